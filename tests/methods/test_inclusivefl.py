"""InclusiveFL: own last blocks and classifiers, the momentum by hand, and two rounds against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, images, one_round, updated, visit
from independent import batches, descend, experiment, network, tensors, visited

from rayfl.core.net import Net
from rayfl.core.tensors import nbytes
from rayfl.methods import METHODS, Task
from rayfl.models import MODELS
from rayfl.testing.tiny import simulate
from rayfl.training.settings import Training

InclusiveFL = METHODS["inclusivefl"]
SMALL = {"layers": 4, "heads": 2, "head_width": 4, "patch": 4}
VIT = {"name": "vit_b_16"} | SMALL


def bound(*capacities, beta=0.2, **training):
    """Return the method on a transformer of 4 blocks."""
    model = MODELS["vit_b_16"](**SMALL, input=(1, 8, 8), classes=4)
    nets = {c: Net(model) for c in sorted(capacities, reverse=True)}
    task = Task(model, Training(**training), nets, max(capacities), clients=10, metric="params")
    return InclusiveFL(beta=beta, weight="uniform").bind(task)


def block(name):
    """Return the number of a parameter's block; -1 outside blocks."""
    return int(name.split(".")[1]) if name.startswith("encoder.") else -1


def test_every_size_has_its_last_block_and_classifier():
    """Sizes of 2 and 4 blocks: block 1 is the small one's own, and shared of the large one alone."""
    state = bound(1.0, 0.6).init()
    assert state.keys() == {"params", "size 1", "size 2", "momentum size 1"}
    assert {block(name) for name in state["params"]} == {-1, 0, 1, 2}
    for size, last in (("size 1", 1), ("size 2", 3)):
        assert {block(name) for name in state[size]} == {-1, last}
        assert {name for name in state[size] if block(name) < 0} == {"head.weight", "head.bias"}
    assert {block(name) for name in state["momentum size 1"]} == {1}
    assert all(not t.any() for t in state["momentum size 1"].values())


def test_the_momentum_by_hand(clients_answer):
    """From 0: the small client returns 1, the large one 4. The small one's last block becomes (1 - 0.2) 1 in the first
    round, and then, from 0.8, with answers 2 and 4: 0.8 + 0.8 (2 - 0.8) + 0.2 m. m is the mean change of the large
    one's blocks 1, 2 and 3 in the first round: 4."""
    method = bound(1.0, 0.6)
    state = {group: {name: torch.zeros_like(t) for name, t in ts.items()} for group, ts in method.init().items()}
    clients = [(0.6, images(0)), (1.0, images(1))]
    clients_answer(1, 4, 2, 4)
    first = one_round(method, state, *clients)
    for name, t in first["size 1"].items():
        torch.testing.assert_close(t, torch.full_like(t, 1 if block(name) < 0 else 0.8))
    for name, t in first["params"].items():
        torch.testing.assert_close(t, torch.full_like(t, 2.5 if block(name) < 1 else 4))
    for group in ("size 2", "momentum size 1"):
        for t in first[group].values():
            torch.testing.assert_close(t, torch.full_like(t, 4))
    second = one_round(method, first, *clients, round=1)
    for name, t in second["size 1"].items():
        torch.testing.assert_close(t, torch.full_like(t, 2 if block(name) < 0 else 0.8 + 0.8 * 1.2 + 0.2 * 4))
    for t in second["momentum size 1"].values():
        torch.testing.assert_close(t, torch.zeros_like(t))


def test_sizes_that_nobody_trained_are_unchanged(clients_answer):
    """Bit for bit: the small one's own parameters, though there is momentum; the momentum, without large clients."""
    method = bound(1.0, 0.6)
    state = method.init()
    state["momentum size 1"] = {name: torch.ones_like(t) for name, t in state["momentum size 1"].items()}
    clients_answer(3, 3)
    assert_same(one_round(method, state, (1.0, images(0)))["size 1"], state["size 1"])
    after = one_round(method, state, (0.6, images(0)))
    for group in ("size 2", "momentum size 1"):
        assert_same(after[group], state[group])


def test_without_beta_it_is_the_mean_of_each_size(clients_answer):
    method = bound(1.0, 0.6, beta=0)
    state = method.init()
    assert state.keys() == {"params", "size 1", "size 2"}
    clients_answer(1, 2, 7)
    new = one_round(method, state, (0.6, images(0)), (0.6, images(1)), (1.0, images(1)))
    assert all((t == 1.5).all() for t in new["size 1"].values())
    assert all((t == 7).all() for t in new["size 2"].values())


def test_blocks_of_other_shapes_do_not_teach():
    """A ResNet18 whose small size ends in block 1 of stage 1: tensors of its shape are in block 1 alone."""
    model = MODELS["resnet18"](channels=4, input=(1, 8, 8), classes=4)
    small, large = Net(model, without=tuple(p for s in model.blocks[1:] for p in s)), Net(model)
    taught = InclusiveFL()._taught(small, large)
    assert taught["stage1.1.residual.conv1.weight"] == ["stage1.1.residual.conv1.weight"]
    wide = Net(model, without=("stage1.1", *(p for s in model.blocks[1:] for p in s)))
    assert InclusiveFL()._taught(wide, large)["stage1.0.residual.conv1.weight"] == [
        "stage1.0.residual.conv1.weight",
        "stage1.1.residual.conv1.weight",
    ]


def test_traffic():
    """A client receives and sends the parameters of its network, of 4 bytes a number."""
    method = bound(1.0, 0.6, lr=0.1)
    state = method.init()
    for capacity in (1.0, 0.6):
        size = 4 * method.task.nets[capacity].parameters
        assert nbytes(method.extract(state, visit(method, state, capacity, images(0, 1)).selection)) == size
        update = updated(method, state, capacity, images(0, 1))
        assert nbytes(update.sums) + nbytes(update.whole) == size
        assert bool(update.derived) == (capacity == 1)


def test_the_momentum_is_that_of_the_changes_before_the_transforms(tmp_path):
    """Departure 7: of a hundredth of the changes, too."""
    sections = {"model": VIT, "clients": {"capacities": [1.0, 0.6], "metric": "params", "count": 6, "cohort": 6}}
    sparse = {"updates": {"transforms": [{"name": "topk", "share": 0.01}]}}
    runs = {
        name: simulate(experiment("inclusivefl", **sections, **more), tmp_path / name)
        for name, more in (("plain", {}), ("sparse", sparse))
    }
    lines = {name: simulation.run_round() for name, simulation in runs.items()}
    assert lines["sparse"]["bytes_up"] < 0.05 * lines["plain"]["bytes_up"]
    plain, sent = (simulation.state for simulation in runs.values())
    assert all(t.any() for t in plain["momentum size 1"].values())
    assert_same(sent["momentum size 1"], plain["momentum size 1"])
    start = runs["sparse"].method.init()["size 1"]
    changed = {n: (t != start[n]).float().mean() for n, t in sent["size 1"].items() if block(n) == 1}
    assert any(share < 1 for share in changed.values()), changed


@pytest.mark.parametrize("beta", [0.2, 0.7])
def test_three_rounds_are_plain_torch_s(beta, tmp_path, float64):
    """Two sizes of a transformer, of 2 and 4 blocks; the reference keeps a whole model per size, as the code does."""
    sections = {"model": VIT, "clients": {"capacities": [1.0, 0.6], "metric": "params", "count": 6, "cohort": 4}}
    sections |= {"evaluation": {"every": 9}, "rounds": 4}
    simulation = simulate(experiment({"name": "inclusivefl", "beta": beta}, **sections), tmp_path)
    large, small = simulation.method.task.nets.values()
    start, moved = simulation.method.task.initial(), set()
    models = {net: {name: start[name] for name in net.layout.shapes} for net in (large, small)}
    momentum = {name: torch.zeros_like(t) for name, t in models[small].items() if block(name) == 1}
    for round in range(3):
        answers: dict = {large: [], small: []}
        for client in visited(simulation, round):
            module = network(client.net, models[client.net])
            descend(module, batches(client.data, client.seed, 2, 5), F.cross_entropy, 0.05)
            answers[client.net].append((len(client.data), tensors(module)))

        def mean(name, *nets, answers=answers):
            found = [(n, of[name]) for net in nets for n, of in answers[net]]
            return sum(n * t for n, t in found) / sum(n for n, _ in found) if found else None

        new = {net: dict(model) for net, model in models.items()}
        for net, last in ((large, 3), (small, 1)):
            for name, old in models[net].items():
                if block(name) == last or name.startswith("head."):
                    value = mean(name, net)
                    if value is not None and net is small and block(name) == 1:
                        moved.add(bool(momentum[name].any()))
                        value = old + (1 - beta) * (value - old) + beta * momentum[name]
                else:
                    holders = [large] if block(name) >= 1 else [large, small]
                    value = mean(name, *holders)
                new[net][name] = old if value is None else value
        if answers[large]:
            for name in momentum:
                alike = [name.replace("encoder.1.", f"encoder.{i}.") for i in (1, 2, 3)]
                momentum[name] = sum(mean(other, large) - models[large][other] for other in alike) / 3
        models = new
        simulation.train()
        simulation.round += 1
    assert moved == {False, True}
    for net, capacity in ((large, 1.0), (small, 0.6)):
        found = simulation.method.deploy(simulation.state, 3, capacity).params
        assert found.keys() == models[net].keys()
        for name, t in models[net].items():
            torch.testing.assert_close(found[name], t, rtol=1e-9, atol=1e-11)
