"""AdaptiveFL: the pool and its draws, the mean by hand, identity with HeteroFL, two rounds against plain torch."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, images, one_round, run, simulate, tiny, updated, visit
from independent import batches, descend, experiment, network, tensors, visited

from rayfl.config import ConfigError
from rayfl.core.net import Net
from rayfl.core.tensors import nbytes
from rayfl.costs import width_for
from rayfl.methods import METHODS, Client, Task
from rayfl.models import MODELS
from rayfl.training.settings import Training

AdaptiveFL = METHODS["adaptivefl"]
THREE = {"capacities": [1.0, 0.5, 0.25]}


def bound(*capacities, metric="width", model=None, training=None, **options):
    model = model or MODELS["mcmahan_cnn"](input=(1, 8, 8), classes=4)
    nets = {c: Net(model, c) for c in sorted(capacities, reverse=True)}
    task = Task(model, Training(**training or {}), nets, max(capacities), clients=10, metric=metric)
    return AdaptiveFL(**options).bind(task)


def sizes(net):
    return [axis.size for axis in net.layout.axes.values()]


def test_the_pool_by_hand():
    """A CNN of 32 and 64 channels and 512 neurons: 4 layers with the classifier, so that I is 1 or 2."""
    method = bound(1.0, 0.5, 0.25, starts=(0.25, 0.5))
    pool = [sizes(net) for net in method.pool(1.0)]
    assert pool == [[32, 16, 128], [32, 64, 128], [32, 32, 256], [32, 64, 256], [32, 64, 512]]
    assert [sizes(net) for net in method.pool(0.25)] == pool[:2]
    assert [sizes(net) for net in method.task.nets.values()] == [pool[4], pool[3], pool[1]]


def test_a_start_of_0_cuts_all_layers():
    method = bound(1.0, 0.5, 0.25, starts=(0.0, 0.25))
    assert [sizes(net) for net in method.pool(0.5)] == [[8, 16, 128], [32, 16, 128], [16, 32, 256], [32, 32, 256]]
    assert sizes(method.pool(1.0)[-1]) == [32, 64, 512]


@pytest.mark.parametrize("metric", ["params", "flops"])
def test_networks_cost_at_most_their_capacity(metric):
    model = MODELS["resnet18"](channels=8, input=(1, 8, 8), classes=4)
    method = bound(1.0, 0.5, 0.3, metric=metric, model=model, starts=(0.0, 0.1))

    def cost(net):
        return net.parameters if metric == "params" else net.macs

    for capacity in (0.5, 0.3):
        costs = [cost(net) / cost(method.task.server) for net in method.pool(capacity)]
        assert costs == sorted(costs) and costs[-1] <= capacity
        net = method.task.nets[capacity]
        assert cost(replace(net, width=net.width + 1 / 8)) > capacity * cost(method.task.server)


@pytest.mark.parametrize(
    ("metric", "capacities"), [("flops", (0.5, 0.49)), ("flops", (0.75, 0.73)), ("params", (0.5, 0.49))]
)
def test_no_layer_is_wider_than_the_servers(metric, capacities):
    """Though the first layers, as wide as the server's, leave room for it."""
    model = MODELS["digits_cnn"](input=(1, 8, 8), classes=4)
    nets = {c: Net(model, width_for(Net(model), c, metric)) for c in capacities}
    method = AdaptiveFL().bind(Task(model, Training(), nets, max(capacities), clients=10, metric=metric))
    server = method.task.server
    pool = method.pool(max(capacities))
    for net in pool:
        assert all(one <= other for one, other in zip(sizes(net), sizes(server), strict=True))
    assert len({tuple(sizes(net)) for net in pool}) == len(pool)


def test_a_network_that_never_fits_is_refused():
    model = MODELS["resnet18"](channels=8, input=(1, 8, 8), classes=4)
    with pytest.raises(ConfigError, match="capacity 0.05 by params: the narrowest network of model resnet18 exceeds"):
        bound(1.0, 0.05, metric="params", model=model, starts=(0.75,))


def test_a_model_of_one_width_for_all_layers_is_refused():
    model = MODELS["bert"](hidden=8, heads=2, layers=2, ffn=12, positions=20, ids=30, classes=4, length=9)
    with pytest.raises(ConfigError, match="all layers of model bert have one width. Allowed: "):
        bound(1.0, 0.5, model=model)
    assert sizes(bound(1.0, 0.5, model=model, starts=(0.0,)).task.nets[0.5]) == sizes(Net(model, 0.5))


@pytest.mark.parametrize(("dispatch", "shares"), [("pool", [1 / 5, 4 / 5]), ("fitting", [1 / 2, 1 / 2])])
def test_draws_end_at_the_largest_that_fits(dispatch, shares):
    """A pool of 5 networks, 2 of each capacity and the whole one, of which 2 fit the smallest capacity. Of 600 draws,
    every network has its share, within 4 standard deviations."""
    model = MODELS["resnet18"](channels=8, input=(1, 8, 8), classes=4)
    method = bound(1.0, 0.5, 0.25, starts=(0.25, 0.5), model=model, dispatch=dispatch)
    fitting, pool = method.pool(0.25), method.pool(1.0)
    assert (len(fitting), len(pool)) == (2, 5)
    clients = [Client(id, 0.25, round) for round in range(30) for id in range(20)]
    drawn = Counter(fitting.index(method.select({}, client).net) for client in clients)
    for index, share in enumerate(shares):
        assert abs(drawn[index] - 600 * share) < 4 * (600 * share * (1 - share)) ** 0.5


def test_draws_follow_from_seed_round_and_client():
    method = bound(1.0, 0.5, 0.25)

    def nets(of, first=0):
        return [of.select({}, Client(id, 1.0, 3)).net for id in range(first, first + 12)]

    assert nets(method) == nets(method) != nets(method, first=12)
    assert nets(method) != nets(method.bind(replace(method.task, seed=1)))


def test_largest_never_draws():
    method = bound(1.0, 0.5, 0.25, dispatch="largest")
    for capacity, net in method.task.nets.items():
        assert {method.select({}, Client(id, capacity, 0)).net for id in range(20)} == {net}


def test_the_mean_by_hand(clients_answer):
    """Clients of width 1/4 and 1/2, uniform weights, answer 1 and 3: 2 where both hold a coordinate, 3 where the
    second does, and the old value elsewhere. The first layer is whole in both."""
    method = bound(1.0, 0.5, 0.25, starts=(0.25,), dispatch="largest", weight="uniform")
    state = method.init()
    clients_answer(1, 3)
    new = one_round(method, state, (0.25, images(0)), (0.5, images(1)))["params"]
    assert (new["conv1.weight"] == 2).all()
    weight, old = new["conv2.weight"], state["params"]["conv2.weight"]
    assert (weight[:16] == 2).all() and (weight[16:32] == 3).all() and torch.equal(weight[32:], old[32:])


def test_traffic():
    """A client receives and sends the network that it trains, of 4 bytes a number: 1 -> 32 channels and 32 -> 16 in
    5x5 kernels, 16 x 2 x 2 -> 128 -> 4, each with biases."""
    method = bound(1.0, 0.5, 0.25, starts=(0.25,), dispatch="largest", training={"lr": 0.1})
    state = method.init()
    size = 4 * (25 * 32 + 32 + 25 * 32 * 16 + 16 + 16 * 4 * 128 + 128 + 128 * 4 + 4)
    assert nbytes(method.extract(state, visit(method, state, 0.25, images(0, 1)).selection)) == size
    assert nbytes(updated(method, state, 0.25, images(0, 1)).sums) == size


def rounds(tmp_path, method):
    simulation = simulate(tiny(method=method, rounds=2), tmp_path / method["name"])
    run(simulation)
    return simulation.state


def test_that_cuts_all_layers_without_draws_it_is_heterofl(tmp_path):
    """Equal bit for bit."""
    adaptive = {"name": "adaptivefl", "starts": [0], "dispatch": "largest"}
    plain = {"weight": "samples", "mask": "none", "label_rows": "all", "scaler": False}
    assert_same(rounds(tmp_path, adaptive), rounds(tmp_path, {"name": "heterofl"} | plain))


@pytest.mark.parametrize("dispatch", ["pool", "fitting", "largest"])
def test_two_rounds_are_plain_torch_s(dispatch, tmp_path, float64):
    method = {"name": "adaptivefl", "starts": [0.25, 0.5], "dispatch": dispatch}
    sections = {"model": "digits_cnn", "clients": THREE, "evaluation": {"every": 9, "statistics": "batch"}, "rounds": 3}
    simulation = simulate(experiment(method, **sections), tmp_path)
    method, params = simulation.method, simulation.state["params"]
    seen = set()
    for round in range(2):
        totals, covers = ({name: torch.zeros_like(t) for name, t in params.items()} for _ in range(2))
        for client in visited(simulation, round):
            capacity = next(c for c, net in method.task.nets.items() if net == client.net)
            net = method.select({}, Client(client.id, capacity, round)).net
            seen.add(net)
            cut = {name: params[name][index(shape)] for name, shape in net.layout.shapes.items()}
            module = network(net, cut | net.statistics())
            descend(module, batches(client.data, client.seed, 2, 5), F.cross_entropy, 0.05)
            for name, t in tensors(module).items():
                if name in totals:
                    totals[name][index(t.shape)] += len(client.data) * t
                    covers[name][index(t.shape)] += len(client.data)
        params = {name: torch.where(covers[name] > 0, t / covers[name], params[name]) for name, t in totals.items()}
        simulation.train()
        simulation.round += 1
    assert len(seen) > 1
    found = simulation.state["params"]
    assert found.keys() == params.keys() and found["head.weight"].dtype == torch.float64
    for name, t in params.items():
        torch.testing.assert_close(found[name], t, rtol=1e-9, atol=1e-11)


def index(shape):
    return tuple(slice(size) for size in shape)
