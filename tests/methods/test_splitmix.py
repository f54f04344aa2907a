"""SplitMix: draws, means and outputs by hand, identity with FedAvg, and two rounds against plain torch."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, bound, client_data, one_round, run, simulate, tiny, updated, visit
from independent import batches, descend, experiment, network, tensors, visited

from rayfl import costs
from rayfl.config import ConfigError
from rayfl.core.net import Net, load
from rayfl.core.seeds import torch_scope
from rayfl.core.tensors import nbytes
from rayfl.methods import METHODS, Client, Task
from rayfl.models import MODELS
from rayfl.training.settings import Training

SplitMix = METHODS["splitmix"]


def present(net):
    return tuple(path for path in net.model.blocks[0] if path not in net.without)


def of_base(params, base):
    """Return the parameters of one base network, by their names in the model."""
    return {name.removeprefix(f"{base}."): t for name, t in params.items() if name.startswith(f"{base}.")}


def small(**options):
    """Return the method on a Perceptron of 2 pixels, 8 neurons and 4 classes, with 4 base networks of 2 neurons."""
    training = {name: options.pop(name) for name in ("lr", "steps", "batch_size") if name in options}
    return bound(SplitMix(bases=4, **options), 1.0, 0.5, 0.25, hidden=(8,), **training)


def test_networks_are_base_networks():
    """Of 2 x 2 + 2 and 2 x 4 + 4 parameters each."""
    nets = small().task.nets
    assert [present(net) for net in nets.values()] == [
        ("base1", "base2", "base3", "base4"),
        ("base1", "base2"),
        ("base1",),
    ]
    assert [net.parameters for net in nets.values()] == [4 * 18, 2 * 18, 18]
    assert [net.macs for net in nets.values()] == [4 * 12, 2 * 12, 12]


@pytest.mark.parametrize(("capacity", "count"), [(1.0, 8), (0.99, 7), (0.375, 3), (0.3, 2), (0.1, 1)])
def test_a_capacity_is_a_share_of_the_base_networks(capacity, count):
    method = bound(SplitMix(), 1.0, capacity, hidden=(8,))
    assert len(present(method.task.nets[capacity])) == count


def test_a_device_answers_with_the_mean():
    """Of the logits of its first base networks; in training it returns each."""
    method = small()
    params = method.init()["params"]
    deployed = method.deploy({"params": params}, 1, 0.5)
    module = deployed.net.build()
    load(module, deployed.params)
    [(x, _)] = client_data(0, 1, 2, 3).in_order(4)
    expected = []
    for base in ("base1", "base2"):
        own = of_base(params, base)
        hidden = F.linear(x.flatten(1), own["hidden0.weight"], own["hidden0.bias"])
        expected.append(F.linear(hidden, own["head.weight"], own["head.bias"]))
    torch.testing.assert_close(module.eval()(x), (expected[0] + expected[1]) / 2)
    each = module.train()(x)
    assert isinstance(each, tuple) and len(each) == 2
    for logits, wanted in zip(each, expected, strict=True):
        torch.testing.assert_close(logits, wanted)
    assert (deployed.answer, deployed.net.exits) == ("last", 0)


def test_draws_are_uniform_without_replacement():
    """400 draws of 2 of 4 base networks: every pair about 67 times, within 4 standard deviations."""
    method = small()
    clients = [Client(id, 0.5, round) for round in range(20) for id in range(20)]
    pairs = Counter(present(method.select({}, client).net) for client in clients)
    assert len(pairs) == 6 and all(pair == tuple(sorted(pair)) for pair in pairs)
    assert all(abs(n - 400 / 6) < 4 * (400 * 5 / 36) ** 0.5 for n in pairs.values())


def test_draws_follow_from_seed_round_and_client():
    method = small()

    def nets(of, first=0):
        return [of.select({}, Client(id, 0.5, 3)).net for id in range(first, first + 12)]

    assert nets(method) == nets(method) != nets(method, first=12)
    assert nets(method) != nets(method.bind(replace(method.task, seed=1)))


def test_the_mean_is_over_clients_that_drew_the_base_network(clients_answer):
    """Clients of 1 and 2 samples answer 1 and 4: 3 in base networks of both, unchanged in those of none."""
    method = small()
    state = method.init()

    def drawn(round):
        return [{*present(method.select({}, Client(id, 0.5, round)).net)} for id in (0, 1)]

    round = next(r for r in range(99) if len(set.union(*drawn(r))) == 3)
    one, two = drawn(round)
    clients_answer(1, 4)
    new = one_round(method, state, (0.5, client_data(0)), (0.5, client_data(0, 1)), round=round)["params"]
    for name, t in new.items():
        base = name.partition(".")[0]
        expected = {(True, True): 3.0, (True, False): 1.0, (False, True): 4.0}.get((base in one, base in two))
        assert torch.equal(t, state["params"][name] if expected is None else torch.full_like(t, expected)), name


def test_costs():
    """A client receives, trains and sends its base networks, of 4 bytes a number."""
    method = small(steps=3, batch_size=2)
    state, data = method.init(), client_data(0, 1, 2, 3)
    work = visit(method, state, 0.5, data)
    assert nbytes(method.extract(state, work.selection)) == 4 * 2 * 18
    assert nbytes(updated(method, state, 0.5, data).sums) == 4 * 2 * 18
    assert costs.training_flops(work.net, 6) == 6 * 6 * 2 * 12


def test_initial_weights_are_smaller_by_the_root_of_the_width():
    """In layers with a cut input; base networks differ."""
    model = MODELS["digits_cnn"](input=(1, 8, 8), classes=4)
    net = SplitMix(bases=4).bind(Task(model, Training(), {1.0: Net(model)}, 1.0, 10)).task.server
    with torch_scope(5):
        found = net.initial()
    with torch_scope(5):
        narrow = Net(model, 0.25).initial()
    first = of_base(found, "base1")
    for name, t in narrow.items():
        cut = name.startswith(("conv2", "hidden", "head"))
        torch.testing.assert_close(first[name], t / math.sqrt(4) if cut else t, msg=name)
    assert not torch.equal(found["base2.conv1.weight"], first["conv1.weight"])


def rounds(tmp_path, method):
    sections = {"rounds": 2, "clients": {"capacities": [1.0]}, "evaluation": {"every": 1}}
    simulation = simulate(tiny(method=method, **sections), tmp_path / method["name"])
    return run(simulation), simulation.state["params"]


def test_of_one_base_network_it_is_fedavg(tmp_path):
    """Parameters, losses and accuracies are equal bit for bit, on a network with norms."""
    lines, params = rounds(tmp_path, {"name": "splitmix", "bases": 1})
    expected, others = rounds(tmp_path, {"name": "fedavg", "weight": "samples"})
    assert_same(of_base(params, "base1"), others)
    assert lines == expected and "accuracy_server" in lines[-1]


@pytest.mark.parametrize("scaler", [True, False])
def test_two_rounds_are_plain_torch_s(scaler, tmp_path, float64):
    """Every base network is trained on its own."""
    sections = {
        "model": "digits_cnn",
        "clients": {"capacities": [1.0, 0.5, 0.25]},
        "evaluation": {"every": 9, "statistics": "batch"},
        "rounds": 3,
    }
    simulation = simulate(experiment({"name": "splitmix", "bases": 4, "scaler": scaler}, **sections), tmp_path)
    method, params = simulation.method, simulation.state["params"]
    base_net = Net(simulation.experiment.model, 0.25, scale=0.25 if scaler else 1.0)
    seen = set()
    for round in range(2):
        totals, weights = {name: torch.zeros_like(t) for name, t in params.items()}, Counter()
        for client in visited(simulation, round):
            capacity = next(c for c, net in method.task.nets.items() if net == client.net)
            bases = present(method.select({}, Client(client.id, capacity, round)).net)
            seen.add(bases)
            for base in bases:
                module = network(base_net, of_base(params, base) | base_net.statistics())
                descend(module, batches(client.data, client.seed, 2, 5), F.cross_entropy, 0.05)
                weights[base] += len(client.data)
                for name, t in tensors(module).items():
                    if (full := f"{base}.{name}") in totals:
                        totals[full] += len(client.data) * t
        params = {
            name: t / weights[base] if weights[base := name.partition(".")[0]] else params[name]
            for name, t in totals.items()
        }
        simulation.train()
        simulation.round += 1
    assert len(seen) > 1
    found = simulation.state["params"]
    assert found.keys() == params.keys() and found["base1.head.weight"].dtype == torch.float64
    for name, t in params.items():
        torch.testing.assert_close(found[name], t, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["splitmix", "flanc"])
def test_a_mix_of_models_is_refused(name):
    networks = {1.0: {"name": "resnet8", "channels": 8}, 0.5: {"name": "resnet8", "channels": 4}}
    mix = {"name": "mix", "networks": networks}
    clients = {"count": 4, "cohort": 2, "capacities": [1.0, 0.5]}
    with pytest.raises(ConfigError, match="model: mix is not valid. Allowed: one model, because"):
        tiny(method=name, model=mix, clients=clients, data={"shape": [1, 8, 8]})
