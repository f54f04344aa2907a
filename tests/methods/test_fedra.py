"""FedRA: draws, means by hand, and two rounds against plain torch."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import images, one_round, updated, visit
from independent import batches, descend, experiment, network, tensors, visited

from rayfl.config import ConfigError
from rayfl.core.net import Net
from rayfl.core.tensors import nbytes
from rayfl.methods import METHODS, Client, Task
from rayfl.models import MODELS
from rayfl.testing.tiny import simulate
from rayfl.training.settings import Training

FedRA = METHODS["fedra"]
VIT = {"name": "vit_b_16", "layers": 4, "heads": 2, "head_width": 4, "patch": 4}
HALF = {"capacities": [1.0, 0.6], "metric": "params"}


def bound(*capacities, model=None, **training):
    """Return the method on a transformer of 4 blocks."""
    model = model or MODELS["vit_b_16"](**{k: v for k, v in VIT.items() if k != "name"}, input=(1, 8, 8), classes=4)
    nets = {c: Net(model) for c in sorted(capacities, reverse=True)}
    return FedRA().bind(Task(model, Training(**training), nets, max(capacities), clients=10, metric="params"))


def kept(net):
    return tuple(path for stage in net.model.blocks for path in stage if path not in net.without)


def test_draws_are_uniform_without_replacement():
    """400 draws of 2 of 4 blocks: every pair about 67 times, within 4 standard deviations; blocks keep their order."""
    method = bound(1.0, 0.6)
    assert len(kept(method.task.nets[0.6])) == 2
    clients = [Client(id, 0.6, round) for round in range(20) for id in range(20)]
    pairs = Counter(kept(method.select({}, client).net) for client in clients)
    assert len(pairs) == 6 and all(pair == tuple(sorted(pair)) for pair in pairs)
    assert all(abs(n - 400 / 6) < 4 * (400 * 5 / 36) ** 0.5 for n in pairs.values())


def test_draws_follow_from_seed_round_and_client():
    method = bound(1.0, 0.6)

    def nets(of, first=0):
        return [of.select({}, Client(id, 0.6, 3)).net for id in range(first, first + 12)]

    assert nets(method) == nets(method) != nets(method, first=12)
    assert nets(method) != nets(method.bind(replace(method.task, seed=1)))


def test_a_large_client_has_all_blocks():
    assert bound(1.0, 0.6).select({}, Client(0, 1.0, 0)).net.without == ()


def test_blocks_are_drawn_within_their_stage():
    """ResNet18 at half of the parameters: every draw has as many blocks per stage as the capacity's network."""
    model = MODELS["resnet18"](channels=4, input=(1, 8, 8), classes=4)
    method = bound(1.0, 0.5, model=model)
    expected = [sum(path in method.task.nets[0.5].without for path in stage) for stage in model.blocks]
    drawn = [method.select({}, Client(id, 0.5, 0)).net for id in range(20)]
    assert 0 < sum(expected) and len(set(drawn)) > 1
    for net in drawn:
        assert [sum(path in net.without for path in stage) for stage in model.blocks] == expected


def test_the_mean_is_over_clients_that_drew_the_block(clients_answer):
    """Clients return 1 and 4: 2.5 outside blocks and in blocks that both drew; others keep their value or one
    client's."""
    method = bound(1.0, 0.6)
    state = method.init()
    round = next(
        r for r in range(99) if len({b for id in (0, 1) for b in kept(method.select({}, Client(id, 0.6, r)).net)}) == 3
    )
    one, two = ({*kept(method.select({}, Client(id, 0.6, round)).net)} for id in (0, 1))
    clients_answer(1, 4)
    new = one_round(method, state, (0.6, images(0)), (0.6, images(1)), round=round)["params"]
    for name, t in new.items():
        block = next((b for b in method.task.model.blocks[0] if name.startswith(f"{b}.")), None)
        values = [v for v, of in ((1.0, one), (4.0, two)) if block is None or block in of]
        assert torch.equal(t, torch.full_like(t, sum(values) / len(values)) if values else state["params"][name]), name


def test_traffic():
    """A client receives and sends its blocks and the layers outside blocks, of 4 bytes a number."""
    method = bound(1.0, 0.6, lr=0.1)
    state, whole = method.init(), method.task.server
    block = sum(t.numel() for name, t in method.init()["params"].items() if name.startswith("encoder.0."))
    work = visit(method, state, 0.6, images(0, 1))
    expected = 4 * (sum(t.numel() for t in state["params"].values()) - 2 * block)
    assert whole.parameters > 4 * block
    assert nbytes(method.extract(state, work.selection)) == expected
    assert nbytes(updated(method, state, 0.6, images(0, 1)).sums) == expected


def test_a_device_runs_the_first_blocks():
    method = bound(1.0, 0.6)
    deployed = method.deploy(method.init(), 1, 0.6)
    assert kept(deployed.net) == ("encoder.0", "encoder.1")


@pytest.mark.parametrize("model", [VIT, {"name": "resnet18", "channels": 4}], ids=lambda model: model["name"])
def test_two_rounds_are_plain_torch_s(model, tmp_path, float64):
    sections = {"clients": HALF, "evaluation": {"every": 9, "statistics": "batch"}, "rounds": 3}
    simulation = simulate(experiment({"name": "fedra"}, model=model, **sections), tmp_path)
    method, params = simulation.method, simulation.state["params"]
    seen = set()
    for round in range(2):
        totals = {name: torch.zeros_like(t) for name, t in params.items()}
        holders = dict.fromkeys(params, 0)
        for client in visited(simulation, round):
            capacity = next(c for c, net in method.task.nets.items() if net == client.net)
            net = method.select({}, Client(client.id, capacity, round)).net
            seen.add(net.without)
            module = network(net, {name: params[name] for name in net.layout.shapes} | net.statistics())
            descend(module, batches(client.data, client.seed, 2, 5), F.cross_entropy, 0.05)
            for name, t in tensors(module).items():
                if name in totals:
                    totals[name] += t
                    holders[name] += 1
        params = {name: t / holders[name] if holders[name] else params[name] for name, t in totals.items()}
        simulation.train()
        simulation.round += 1
    assert len(seen) > 1
    found = simulation.state["params"]
    assert found.keys() == params.keys() and found["head.weight"].dtype == torch.float64
    for name, t in params.items():
        torch.testing.assert_close(found[name], t, rtol=1e-9, atol=1e-11)


def test_capacities_are_costs():
    with pytest.raises(ConfigError, match="clients.metric: width is not valid. Allowed: params or flops"):
        experiment({"name": "fedra"}, model=VIT)
