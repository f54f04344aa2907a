"""Neuron-wise FIARSE against manual computations: importance of positions, and selections."""

from dataclasses import replace

import pytest
import torch
from helpers import assert_same, bound, client_data, drawn_like, one_round

from rayfl.core.net import Net
from rayfl.core.submodel import Picks, Slice, Window, largest
from rayfl.methods import METHODS, Client, Task
from rayfl.methods.width.fiarse_neurons import importance
from rayfl.models import MODELS
from rayfl.training.settings import Training

Neurons = METHODS["fiarse_neurons"]
SMALL = {
    "digits_cnn": {},
    "resnet18": {"channels": 4},
    "depthfl_resnet18": {"channels": 4},
    "vit_b_16": {"input": (3, 32, 32), "layers": 2, "heads": 3, "head_width": 8, "patch": 8},
}


def with_weights(method, rows, columns):
    """Return a state with these input weights [K, 2] and output weights [4, K] of the hidden nodes."""
    state = method.init()
    given = {"hidden0.weight": torch.tensor(rows), "head.weight": torch.tensor(columns)}
    return method._ranked(state["params"] | given)


ROWS = [[1.0, -2.0], [0.0, 3.0], [-4.0, 0.0], [0.0, 0.0]]
COLUMNS = [[1.0, 0.0, 0.0, 2.0], [0.0, -1.0, 0.0, 2.0], [0.0, 0.0, 0.0, -2.0], [0.5, 0.0, 0.0, 0.0]]


def test_importance():
    """|1| + |-2| + 1 + 0.5, 3 + 1, 4 + 0, 0 + 6; biases do not count. The second and the third are equal."""
    method = bound(Neurons(), 1.0, 0.75, 0.5, 0.25, hidden=(4,))
    state = with_weights(method, ROWS, COLUMNS)
    assert state["importance"]["hidden0"].tolist() == [4.5, 4, 4, 6]
    held = {c: method.submodel(state, 0, c).positions["hidden0"] for c in (1.0, 0.75, 0.5, 0.25)}
    assert held == {1.0: Window(0, 4, 4), 0.75: Picks((0, 1, 3), 4), 0.5: Picks((0, 3), 4), 0.25: Picks((3,), 4)}


@pytest.mark.parametrize("name", SMALL)
def test_importance_is_the_magnitude_removed_with_a_position(name):
    """Importance is the sum of all magnitudes minus that of the network without the position."""
    server = Net(MODELS[name](**SMALL[name]))
    whole = server.layout
    params = drawn_like({n: torch.empty(shape) for n, shape in whole.shapes.items()}, "test:importance")
    weights = [n for n in params if n.removesuffix(".weight") in server.layer_macs]
    found = importance(whole, params, weights)
    assert found.keys() == whole.axes.keys()
    total = sum(params[n].abs().sum() for n in weights)
    for axis, size in [(a, whole.axes[a].size) for a in whole.axes]:
        net = replace(server, sizes=((axis, size - 1),))
        for position in {0, size // 2, size - 1}:
            positions = {a: Window(0, other.size, other.size) for a, other in whole.axes.items()}
            positions[axis] = Picks(tuple(p for p in range(size) if p != position), size)
            without = Slice(server, net, positions).take(params)
            assert found[axis][position] == total - sum(without[n].abs().sum() for n in weights)


def test_ties_go_by_position_and_networks_are_nested():
    values = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 2.0])
    chosen = [largest(values, count).positions for count in range(1, 7)]
    assert chosen == [(1,), (1, 3), (1, 3, 5), (1, 2, 3, 5), (1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5)]
    assert largest(torch.zeros(500), 3).positions == (0, 1, 2)


@pytest.mark.parametrize("name", SMALL)
def test_networks_have_heterofls_sizes(name):
    model = MODELS[name](**SMALL[name])
    nets = {c: Net(model, c) for c in (1.0, 0.5, 0.25)}
    method = Neurons().bind(Task(model, Training(), nets, 1.0, clients=4))
    state = method.init()
    heterofl = METHODS["heterofl"](scaler=False).bind(method.task)
    for capacity in nets:
        ours, theirs = (m.deploy(state, 1, capacity) for m in (method, heterofl))
        assert ours.net == theirs.net
        assert {n: t.shape for n, t in ours.params.items()} == {n: t.shape for n, t in theirs.params.items()}


def test_a_round_of_two_capacities(clients_answer):
    """The large client returns 3; the small one holds nodes 0 and 3 and returns 1. Then all are equally important."""
    method = bound(Neurons(), 1.0, 0.5, hidden=(4,))
    state = with_weights(method, ROWS, COLUMNS)
    clients_answer(3, 1)
    data = client_data(0, 1, 2, 3)
    new = one_round(method, state, (1.0, data), (0.5, data))
    assert new["params"]["hidden0.bias"].tolist() == [2, 3, 3, 2]
    assert new["params"]["head.weight"].tolist() == [[2, 3, 3, 2]] * 4
    assert new["params"]["head.bias"].tolist() == [2] * 4
    assert new["importance"]["hidden0"].tolist() == [12, 18, 18, 12]
    assert method.submodel(new, 1, 0.5).positions["hidden0"] == Picks((1, 2), 4)
    assert method.submodel(state, 0, 0.5).positions["hidden0"] == Picks((0, 3), 4)


def test_positions_follow_the_parameters():
    """Channels in another order give the same submodel with equal outputs."""
    method = bound(Neurons(), 1.0, 0.4, hidden=(10,))
    state, order = method.init(), torch.randperm(10, generator=torch.Generator().manual_seed(0))
    params = dict(state["params"])
    for name in ("hidden0.weight", "hidden0.bias"):
        params[name] = params[name][order]
    params["head.weight"] = params["head.weight"][:, order]
    moved = method._ranked(params)
    before, after = (method.submodel(s, 3, 0.4).positions["hidden0"].positions for s in (state, moved))
    assert sorted(order[list(after)].tolist()) == list(before) != list(after)
    keys = {method.select(s, Client(id, 0.4, 3)).key for s in (state, moved) for id in (0, 1)}
    assert len(keys) == 2


def test_clients_of_full_capacity_are_fedavg():
    """Equal bit for bit: selections are views, and the mean is the same."""
    fedavg = bound(METHODS["fedavg"](weight="uniform"), 1.0, hidden=(35,))
    ours = bound(Neurons(), 1.0, hidden=(35,))
    data = [client_data(0, 1, 2), client_data(3, 1, 1, 0)]
    states = [method.init() for method in (fedavg, ours)]
    for round in range(3):
        states = [
            one_round(method, state, *[(1.0, d) for d in data], round=round)
            for method, state in zip((fedavg, ours), states, strict=True)
        ]
    assert_same(states[1]["params"], states[0]["params"])
    taken = ours.select(states[1], Client(0, 1.0, 3)).take(states[1]["params"])
    assert all(t.data_ptr() == states[1]["params"][name].data_ptr() for name, t in taken.items())


def test_a_server_wider_than_every_client():
    """Its least important nodes are never trained."""
    method = bound(Neurons(), 1.0, 0.5, hidden=(4,), lr=0.5)
    state = with_weights(method, ROWS, COLUMNS)
    new = one_round(method, state, (0.5, client_data(0, 1, 2, 3)))["params"]
    for name in ("hidden0.weight", "hidden0.bias"):
        assert torch.equal(new[name][1:3], state["params"][name][1:3])
    assert not torch.equal(new["head.weight"][:, [0, 3]], state["params"]["head.weight"][:, [0, 3]])
