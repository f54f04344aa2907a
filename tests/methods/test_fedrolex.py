"""FedRolex against manual computations: windows, coverage of positions and pairs, and server-sized tensors."""

import math
from fractions import Fraction

import pytest
import torch
from helpers import bound, client_data, one_round, simulate, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayfl.core.net import Net, cached_module
from rayfl.core.submodel import Coverage
from rayfl.core.tensors import leaves
from rayfl.methods import METHODS, Client, Task
from rayfl.models import MODELS
from rayfl.training.settings import Training

FedRolex = METHODS["fedrolex"]


def window(method, round, capacity, axis="hidden0"):
    return method.select({}, Client(0, capacity, round)).positions[axis].positions


def test_flattened_heads_of_queries_keys_and_values_in_one_layer(tmp_path):
    """GPT-2's first attention layer has three times the columns of its output: the same positions in each third."""
    gpt2 = {"name": "gpt2", "hidden": 16, "heads": 2, "layers": 1, "positions": 16}
    method = {"name": "fedrolex", "heads": "flattened"}
    clients = {"count": 4, "cohort": 4, "capacities": [1, 0.5]}
    spec = tiny(method=method, model=gpt2, clients=clients, data={"name": "synthetic_text"}, partition="iid")
    simulation = simulate(spec, tmp_path)
    simulation.run_round()
    selection = simulation.method.select(simulation.state, Client(0, 0.5, 1))
    everything = torch.arange(16 * 48).reshape(16, 48)
    part = selection.take({"transformer.h.0.attn.c_attn.weight": everything})["transformer.h.0.attn.c_attn.weight"]
    columns = (part[0] % 48).reshape(3, 8)
    assert torch.equal(columns[1:], columns[0] + torch.tensor([[16], [32]]))


def test_windows_roll_up():
    """Windows of 3 and 2 of 5 nodes move one position per round, the small one inside the large one."""
    method = bound(FedRolex(), 1.0, 0.6, 0.4, hidden=(5,))
    assert [window(method, r, 0.6) for r in range(6)] == [
        (0, 1, 2),
        (1, 2, 3),
        (2, 3, 4),
        (3, 4, 0),
        (4, 0, 1),
        (0, 1, 2),
    ]
    for round in range(6):
        assert window(method, round, 0.4) == window(method, round, 0.6)[:2]
    assert [window(method, r, 1.0) for r in range(6)] == [(0, 1, 2, 3, 4)] * 6


def test_the_authors_code_rolls_down():
    method = bound(FedRolex(direction=-1), 1.0, 0.6, hidden=(5,))
    assert [window(method, r, 0.6) for r in range(4)] == [(0, 1, 2), (4, 0, 1), (3, 4, 0), (2, 3, 4)]


def test_every_axis_rolls_modulo_its_own_size():
    method = bound(FedRolex(), 1.0, 0.5, hidden=(4, 8))
    assert window(method, 6, 0.5, "hidden0") == (2, 3)
    assert window(method, 6, 0.5, "hidden1") == (6, 7, 0, 1)


@pytest.mark.parametrize("options", [{}, {"direction": -1}, {"overlap": 0.5}], ids=str)
def test_every_position_is_trained_equally_often(options):
    """k times in K rounds, in every cycle (here the stride of overlap 0.5 is coprime with K)."""
    method = bound(FedRolex(**options), 1.0, 0.4, hidden=(30, 50))
    for axis, size in (("hidden0", 30), ("hidden1", 50)):
        for cycle in range(3):
            trained = torch.zeros(size, dtype=torch.int64)
            for round in range(cycle * size, (cycle + 1) * size):
                trained[list(window(method, round, 0.4, axis))] += 1
            assert (trained == 0.4 * size).all()


@pytest.mark.parametrize(("overlap", "stride"), [(1.0, 1), (0.5, 5), (0.25, 7), (0.0, 9)])
def test_stride_of_an_overlap(overlap, stride):
    """floor(k (1 - overlap)) + 1 for k = 8."""
    method = bound(FedRolex(overlap=overlap), 1.0, 0.125, hidden=(64,))
    assert method.stride(8) == stride
    assert [window(method, r, 0.125)[0] for r in range(3)] == [0, stride, 2 * stride]


def test_strides_are_exact():
    """For every overlap in twentieths and every window up to 100, e.g. overlap 0.8 of 5: stride 2."""
    assert FedRolex(overlap=0.8).stride(5) == 2
    for twentieths in range(21):
        method = FedRolex(overlap=twentieths / 20)
        expected = [math.floor(kept * (1 - Fraction(twentieths, 20))) + 1 for kept in range(1, 101)]
        assert [method.stride(kept) for kept in range(1, 101)] == expected


# pairs of positions (weights) that are trained


def coverage(method, capacity: float, rounds: int, sizes: tuple[int, int]) -> float:
    trained = torch.zeros(sizes, dtype=torch.bool)
    for round in range(rounds):
        positions = method.select({}, Client(0, capacity, round)).positions
        rows, columns = (torch.tensor(positions[f"hidden{i}"].positions) for i in (0, 1))
        trained[rows[:, None], columns] = True
    return trained.float().mean().item()


@pytest.mark.parametrize("options", [{}, {"direction": -1}], ids=str)
@pytest.mark.parametrize(
    ("sizes", "expected"), [((64, 64), [0.984, 0.484, 0.234, 0.109]), ((128, 64), [1.0, 0.734, 0.359, 0.172])]
)
def test_axes_that_roll_together_leave_most_weights_untrained(sizes, expected, options):
    """2 k - 1 of 64 pairs, for any offset."""
    capacities = (1 / 2, 1 / 4, 1 / 8, 1 / 16)
    method = bound(FedRolex(**options), 1.0, *capacities, hidden=sizes)
    found = [coverage(method, c, math.lcm(*sizes), sizes) for c in capacities]
    assert found == pytest.approx(expected, abs=5e-4)


@pytest.mark.slow
def test_coverage_of_a_resnet():
    """Share of the convolutions' weights that clients of these capacities train in a full cycle, e.g. 0.1316 if the
    server is 16 times as wide."""
    model, capacities = MODELS["preact_resnet18"](), (1 / 2, 1 / 4, 1 / 8, 1 / 16)
    task = Task(model, Training(), {c: Net(model, c) for c in (1.0, *capacities)}, 1.0, clients=1)
    method = FedRolex().bind(task)
    shapes = task.server.layout.shapes
    convs = {name: shape for name, shape in shapes.items() if len(shape) == 4}
    found = []
    for capacity in capacities:
        coverage = Coverage(convs)
        for round in range(512):
            coverage.add(method.select({}, Client(0, capacity, round)))
        found.append(coverage.share())
    assert len(convs) == 20 and found == pytest.approx([0.998, 0.535, 0.266, 0.1316], abs=6e-4)


# a round, and after it


def test_a_round_of_two_capacities(clients_answer):
    """Round 3, 4 nodes: the large client holds all nodes, the small one the nodes 3 and 0."""
    method = bound(FedRolex(label_rows="all"), 1.0, 0.5, hidden=(4,))
    clients_answer(3, 1)
    data = client_data(0, 1, 2, 3)
    new = one_round(method, method.init(), (1.0, data), (0.5, data), round=3)["params"]
    assert new["hidden0.bias"].tolist() == [2, 3, 3, 2]
    assert new["head.weight"].tolist() == [[2, 3, 3, 2]] * 4
    assert new["head.bias"].tolist() == [2] * 4


def test_a_server_wider_than_every_client_is_trained_everywhere(clients_answer):
    method = bound(FedRolex(), 1.0, 0.5, hidden=(4,))
    state = method.init()
    for round in range(4):
        clients_answer(9)
        state = one_round(method, state, (0.5, client_data(0, 1, 2, 3)), round=round)
    assert all((t == 9).all() for t in state["params"].values())


class Shapes(TorchDispatchMode):
    """Record the shapes of all tensors created inside."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {tuple(t.shape) for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        return out


@pytest.mark.parametrize(("gamma", "letter"), [(2, "b"), (4, "c"), (8, "d"), (16, "e")])
def test_clients_of_a_wider_server_never_receive_its_model(gamma, letter, tmp_path):
    """Figure 4: no server-sized tensor is sent to a client or created on the worker."""
    clients = {"capacities": f"a0-{letter}1"}
    simulation = simulate(tiny(method="fedrolex", model="preact_resnet18", clients=clients), tmp_path)
    server, before = simulation.method.task.server, simulation.state["params"]
    wide, narrow = (Net(server.model, width).layout.shapes for width in (1.0, 1 / gamma))
    worker, train, shapes = simulation.executor.worker, simulation.executor.worker.train, Shapes()

    def watched(broadcast, job):
        assert {t.shape for _, t in leaves(broadcast.payload)} == set(narrow.values())
        cached_module.cache_clear()
        with shapes:
            return train(broadcast, job)

    worker.train = watched
    line = simulation.run_round()
    assert line["bytes_down"] == 4 * line["clients"] * sum(math.prod(shape) for shape in narrow.values())
    assert shapes.seen >= set(narrow.values())
    assert not shapes.seen & {shape for name, shape in wide.items() if shape not in narrow.values() and len(shape) == 4}
    after = simulation.state["params"]
    assert {name: t.shape for name, t in after.items()} == wide
    assert any(not torch.equal(after[name], before[name]) for name in wide)


def test_a_device_runs_the_window_of_the_last_round():
    method = bound(FedRolex(), 1.0, 0.5, hidden=(8,))
    for rounds in (1, 5, 9):
        assert method.submodel({}, rounds, 0.5).key == method.select({}, Client(0, 0.5, rounds - 1)).key
    assert method.submodel({}, 0, 0.5).positions["hidden0"].positions == (0, 1, 2, 3)
    state = method.init()
    deployed = method.deploy(state, 3, 0.5)
    assert torch.equal(deployed.params["hidden0.bias"], state["params"]["hidden0.bias"][2:6])
    assert (deployed.net.width, deployed.net.scale) == (0.5, 0.5)


def test_deploys_prefix():
    method = bound(FedRolex(deploys="prefix"), 1.0, 0.5, hidden=(8,))
    for rounds in (0, 1, 5):
        assert method.submodel({}, rounds, 0.5).positions["hidden0"].positions == (0, 1, 2, 3)
