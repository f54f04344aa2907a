"""FjORD against manual computations."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    Shuffled,
    assert_same,
    bound,
    client_data,
    drawn_like,
    folded,
    images,
    one_round,
    run,
    simulate,
    tiny,
    updated,
    visit,
)
from torch import nn

from rayfl import costs
from rayfl.core import norms
from rayfl.core.fold import Update
from rayfl.core.net import Net
from rayfl.core.seeds import torch_generator
from rayfl.core.tensors import nbytes
from rayfl.data.samples import ClientData
from rayfl.engine.files import checksum
from rayfl.engine.worker import Worker
from rayfl.evaluation import judge
from rayfl.methods import METHODS, Client, Task
from rayfl.models import MODELS
from rayfl.training.settings import Training

FjORD = METHODS["fjord"]


def with_norms(method, *capacities, **training):
    """The method on a small network with static norms."""
    model = MODELS["digits_cnn"](classes=4)
    nets = {c: Net(model, c) for c in sorted(capacities, reverse=True)}
    return method.bind(Task(model, Training(**training), nets, max(capacities), clients=10))


def answered(update, group="params"):
    return {name: t / update.weight for name, t in (update.sums | update.whole)[group].items()}


def answer_bytes(update):
    return nbytes(update.sums) + nbytes(update.whole)


def next_state(method, state, *answers):
    return method.step(state, 0, folded(state, *answers))


def seed_of(method, *drawn, widths=2):
    """Return a seed whose steps draw these widths, counted from the largest."""
    return next(seed for seed in range(9999) if method.draws(widths, len(drawn), seed) == list(drawn))


# draws


def test_every_step_draws_uniformly():
    """4,000 draws among 4 widths: 1,000 each, within 3 standard deviations, determined by the seed."""
    drawn = FjORD().draws(4, 4000, seed=5)
    counts = Counter(drawn)
    assert sorted(counts) == [0, 1, 2, 3]
    assert all(abs(n - 1000) < 3 * math.sqrt(4000 * 1 / 4 * 3 / 4) for n in counts.values())
    assert drawn == FjORD().draws(4, 4000, seed=5) != FjORD().draws(4, 4000, seed=6)


def test_a_client_trains_widths_up_to_its_own():
    """60 steps draw every width up to the client's own; the FLOPs show how often."""
    method = with_norms(FjORD(), 1.0, 0.5, 0.25, steps=60, batch_size=4)
    update = updated(method, method.init(), 0.5, images(0, 1, 2, 3))
    drawn = Counter(method.draws(2, 60, 0))
    assert len(drawn) == 2
    assert update.sums.keys() == {"params"} and update.whole.keys() == {"width 0.5", "width 0.25"}
    nets = [method.net_at(c) for c in (0.5, 0.25)]
    assert update.metrics["train_flops"] == sum(costs.training_flops(net, 4 * drawn[i]) for i, net in enumerate(nets))


def test_norms_of_smaller_widths_are_sent_too():
    """Mean and variance of 16 and 32 channels, and of 8 and 16; down and up."""
    method = with_norms(FjORD(), 1.0, 0.5, 0.25)
    state = method.init()
    payload = method.extract(state, method.select(state, Client(0, 0.5, 0)))
    update = updated(method, state, 0.5, images(0, 1))
    expected = method.net_at(0.5).parameters + 2 * (16 + 32) + 2 * (8 + 16)
    assert nbytes(payload) == answer_bytes(update) == 4 * expected


# one width per round


@pytest.mark.parametrize(("capacity", "widths"), [(1.0, 4), (0.5, 2), (0.25, 1)])
def test_a_round_draws_uniformly_among_the_widths_of_a_client(capacity, widths):
    """400 draws are uniform within 3 standard deviations, determined by seed, round and client."""
    method = bound(FjORD(sample="round"), 1.0, 0.75, 0.5, 0.25, hidden=(4,))

    def drawn(seed=0, first=0):
        of_seed = method.bind(replace(method.task, seed=seed))
        clients = [Client(id, capacity, round) for round in range(20) for id in range(first, first + 20)]
        return [of_seed.select({}, client).net for client in clients]

    counts = Counter(net.width for net in drawn())
    assert sorted(counts) == [0.25, 0.5, 0.75, 1.0][:widths]
    expected, spread = 400 / widths, 3 * math.sqrt(400 * (widths - 1)) / widths
    assert all(abs(n - expected) <= spread for n in counts.values())
    others = (drawn(seed=1), drawn(first=20))
    assert drawn() == drawn() and (widths == 1 or drawn() not in others)


def round_drawing(method, capacity, width):
    """Return a round in which client 0 of this capacity draws a width."""
    return next(r for r in range(999) if method.select({}, Client(0, capacity, r)).net.width == width)


@pytest.mark.parametrize("kind", ["per_width", "per_width_affine", "static"])
def test_only_the_rounds_width_is_sent_and_trained(kind):
    """Parameters and statistics of 8 and 16 channels, down and up, for a client with capacity for 32 and 64."""
    method = with_norms(FjORD(sample="round", norms=kind), 1.0, 0.5, 0.25, steps=3, batch_size=2, lr=0.1)
    state, data, net = method.init(), images(0, 1, 2, 3, 0, 1), method.net_at(0.25)
    round = round_drawing(method, 1.0, 0.25)
    work = visit(method, state, 1.0, data, round=round, seed=7)
    selection = work.selection
    assert selection.key == method.prefix(0.25).key
    payload = method.extract(state, selection)
    update = method.local_update(payload, work)
    statistics = 0 if kind == "static" else 2 * (8 + 16)
    expected = net.parameters + statistics
    assert nbytes(payload) == answer_bytes(update) == 4 * expected
    assert update.sums.keys() == {"params"} and update.whole.keys() == (set() if kind == "static" else {"width 0.25"})
    assert update.metrics["train_flops"] == costs.training_flops(net, 6)
    after = next_state(method, state, (selection, update))
    held = selection.cover(state["params"])
    for name, old in state["params"].items():
        changed = after["params"][name] != old
        assert not (changed & (held[name] == 0)).any()
        own = kind == "per_width_affine" and "norm" in name
        assert changed.any() != own
    for group in ("width 1", "width 0.5") if kind != "static" else ():
        assert_same(after[group], state[group])


def test_a_width_drawn_for_a_round_trains_as_if_it_were_drawn_at_every_step():
    """Also equal to a client with that capacity, bit for bit."""
    training = {"steps": 4, "batch_size": 3, "lr": 0.1, "momentum": 0.9, "clip": 1.0}
    by_round = with_norms(FjORD(sample="round"), 1.0, 0.5, 0.25, **training)
    by_step = with_norms(FjORD(), 1.0, 0.5, 0.25, **training)
    state, data, round = by_step.init(), images(0, 1, 2, 3, 1), round_drawing(by_round, 1.0, 0.25)
    found = []
    for method, capacity in ((by_round, 1.0), (by_step, 0.25)):
        found.append(updated(method, state, capacity, data, round=round, seed=7))
    assert_same(found[0].sums, found[1].sums)
    assert_same(found[0].whole, found[1].whole)
    assert found[0].metrics == found[1].metrics


def test_the_mean_of_a_round_is_over_clients_that_drew_a_width(clients_answer):
    """A client with 2 samples returns 8 for the widest network, one with 6 returns 4 for the half that it drew."""
    method = bound(FjORD(sample="round"), 1.0, 0.5, hidden=(4,))
    clients_answer(8, 4)
    widths = {r: [method.select({}, Client(id, 1.0, r)).net.width for id in (0, 1)] for r in range(99)}
    round = next(r for r, drawn in widths.items() if drawn == [1.0, 0.5])
    clients = [(1.0, client_data(0, 1)), (1.0, client_data(0, 1, 2, 3, 0, 1))]
    new = one_round(method, method.init(), *clients, round=round)["params"]
    assert new["hidden0.bias"].tolist() == pytest.approx([(2 * 8 + 6 * 4) / 8] * 2 + [8, 8])


def test_a_width_of_a_round_has_no_teacher():
    with pytest.raises(ValueError, match="distill: true only with sample: step"):
        FjORD(sample="round", distill=True)


# a step


def prefix_of(params, hidden):
    """The first nodes of a Perceptron with one hidden layer."""
    return {
        "hidden0.weight": params["hidden0.weight"][:hidden],
        "hidden0.bias": params["hidden0.bias"][:hidden],
        "head.weight": params["head.weight"][:, :hidden],
        "head.bias": params["head.bias"],
    }


def logits_of(params, x):
    hidden = F.linear(x.flatten(1), params["hidden0.weight"], params["hidden0.bias"])
    return F.linear(hidden, params["head.weight"], params["head.bias"])


def stepped(params, lr, objective):
    """params - lr * gradient of objective(params)."""
    leaves = {name: t.clone().requires_grad_() for name, t in params.items()}
    gradients = torch.autograd.grad(objective(leaves), list(leaves.values()))
    return {name: t - lr * g for (name, t), g in zip(params.items(), gradients, strict=True)}


@pytest.mark.parametrize(("drawn", "hidden"), [(0, 4), (1, 2)])
def test_a_step_trains_the_drawn_prefix_and_nothing_else(drawn, hidden):
    method = bound(FjORD(), 1.0, 0.5, hidden=(4,), lr=0.5)
    state, data = method.init(), client_data(0, 1, 2, 3)
    [(x, y)] = data.in_order(len(data))
    update = updated(method, state, 1.0, data, seed=seed_of(method, drawn))
    new, old = answered(update), state["params"]
    by_hand = stepped(prefix_of(old, hidden), 0.5, lambda params: F.cross_entropy(logits_of(params, x), y))
    for name, t in prefix_of(new, hidden).items():
        torch.testing.assert_close(t, by_hand[name])
        assert not torch.equal(t, prefix_of(old, hidden)[name])
    assert torch.equal(new["hidden0.weight"][hidden:], old["hidden0.weight"][hidden:])
    assert torch.equal(new["hidden0.bias"][hidden:], old["hidden0.bias"][hidden:])
    assert torch.equal(new["head.weight"][:, hidden:], old["head.weight"][:, hidden:])


def test_weight_decay_and_momentum_act_outside_the_prefix():
    """v <- 0.9 v + 0.1 x, x <- x - 0.5 v, twice."""
    training = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1, "steps": 2, "batch_size": 4}
    method = bound(FjORD(), 1.0, 0.5, hidden=(4,), **training)
    state = method.init()
    new = answered(updated(method, state, 1.0, client_data(0, 1, 2, 3), seed=seed_of(method, 1, 1)))
    x = state["params"]["hidden0.weight"][2:]
    v = 0.1 * x
    x = x - 0.5 * v
    x = x - 0.5 * (0.9 * v + 0.1 * x)
    torch.testing.assert_close(new["hidden0.weight"][2:], x)


def test_full_clients_of_one_capacity_are_fedavg():
    """Equal bit for bit, in `params`."""
    training = {"steps": 5, "batch_size": 3, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "clip": 1.0}
    clients = [(1.0, images(0, 1, 2, 0)), (1.0, images(1, 3))]
    expected = with_norms(METHODS["fedavg"](), 1.0, **training)
    after = one_round(expected, expected.init(), *clients)
    for kind in ("per_width", "static"):
        method = with_norms(FjORD(norms=kind), 1.0, **training)
        assert_same(one_round(method, method.init(), *clients)["params"], after["params"])


# distillation


def test_distillation_by_hand():
    """Eq. 1 with alpha 1/4 and T = 2, and the cross-entropy of the widest beside it."""
    method = bound(FjORD(distill=True, alpha=0.25, temperature=2.0), 1.0, 0.5, hidden=(4,), lr=0.5)
    state, data = method.init(), client_data(0, 1, 2, 3)
    old, [(x, y)] = state["params"], data.in_order(4)

    def objective(params):
        widest, student = logits_of(params, x), logits_of(prefix_of(params, 2), x)
        p, q = (widest / 2).softmax(1).detach(), (student / 2).softmax(1)
        divergence = (p * (p.log() - q.log())).sum(1).mean()
        return F.cross_entropy(widest, y) + 0.75 * F.cross_entropy(student, y) + 0.25 * divergence

    update = updated(method, state, 1.0, data, seed=seed_of(method, 1))
    by_hand = stepped(old, 0.5, objective)
    for name, t in answered(update).items():
        torch.testing.assert_close(t, by_hand[name])
    student = logits_of(prefix_of(old, 2), x)
    assert update.metrics["train_loss"] == pytest.approx(4 * F.cross_entropy(student, y).item())


def test_the_widest_is_taught_by_the_labels_twice():
    """(2 - alpha) CE if the largest width is drawn; absent classes are masked for teacher and student."""
    method = bound(FjORD(distill=True, alpha=0.25, mask="zero"), 1.0, 0.5, hidden=(4,), lr=0.5)
    state, data = method.init(), client_data(0, 1, 1, 0)
    [(x, y)] = data.in_order(len(data))

    def masked(logits):
        return F.cross_entropy(logits * data.present, y)

    for drawn in (0, 1):
        update = updated(method, state, 1.0, data, seed=seed_of(method, drawn))

        def objective(params, drawn=drawn):
            widest = logits_of(params, x)
            student = logits_of(prefix_of(params, 2), x) if drawn else widest
            divergence = F.kl_div(student.log_softmax(1), widest.softmax(1).detach(), reduction="batchmean")
            return masked(widest) + 0.75 * masked(student) + (0.25 * divergence if drawn else 0)

        by_hand = stepped(state["params"], 0.5, objective)
        for name, t in answered(update).items():
            torch.testing.assert_close(t, by_hand[name])


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_widest_learns_nothing_from_itself(temperature):
    """Its gradient equals that of the cross-entropy alone, bit for bit."""
    methods = FjORD(), FjORD(distill=True, temperature=temperature)
    plain, distilling = (bound(method, 1.0, 0.5, hidden=(4,), lr=0.5) for method in methods)
    state, data, seed = plain.init(), client_data(0, 1, 2, 3), seed_of(plain, 0)
    update = updated(distilling, state, 1.0, data, seed=seed)
    assert_same(update.sums, updated(plain, state, 1.0, data, seed=seed).sums)
    assert update.metrics["train_loss"] > 0


def test_the_teacher_costs_a_pass():
    """Networks 2-4-4 and 2-2-4 have 24 and 12 multiply-adds; 3 steps of 2 samples, 6 operations each."""
    plain, distilling = (bound(FjORD(distill=on), 1.0, 0.5, hidden=(4,), steps=3, batch_size=2) for on in (False, True))
    state, data, seed = plain.init(), client_data(0, 1, 2, 3, 0, 1), seed_of(plain, 1, 0, 1)
    flops = [updated(method, state, 1.0, data, seed=seed).metrics["train_flops"] for method in (plain, distilling)]
    assert flops == [6 * 2 * (12 + 24 + 12), 6 * 2 * (12 + 24 + 12 + 2 * 24)]


# the mean


def test_a_round_of_three_capacities(clients_answer):
    """Clients with 2, 6 and 4 samples return 8, 4 and 1; the mean of a block is over the clients that hold it."""
    method = bound(FjORD(), 1.0, 0.5, 0.25, hidden=(4,))
    clients_answer(8, 4, 1)
    sizes = [(1.0, 2), (0.5, 6), (0.25, 4)]
    clients = [(c, client_data(*[i % 4 for i in range(n)])) for c, n in sizes]
    new = one_round(method, method.init(), *clients)["params"]
    row = [(2 * 8 + 6 * 4 + 4 * 1) / 12, (2 * 8 + 6 * 4) / 8, 8, 8]
    assert new["hidden0.bias"].tolist() == pytest.approx(row)
    assert new["head.weight"].tolist() == [pytest.approx(row)] * 4
    assert new["head.bias"].tolist() == pytest.approx([row[0]] * 4)


def test_the_mean_is_equation_2():
    """As in the authors' code: from the widest width down, the mean over its holders, on its prefix."""
    method = bound(FjORD(), 1.0, 0.6, 0.3, hidden=(10, 7))
    state = method.init()
    state = {"params": {name: t.double() for name, t in state["params"].items()}}
    answers = []
    for k, (capacity, samples) in enumerate([(0.3, 5), (0.6, 3), (0.3, 2), (0.6, 7)]):
        selection = method.select(state, Client(k, capacity, 0))
        answers.append((capacity, samples, selection, drawn_like(selection.take(state["params"]), f"test:{k}")))
    updates = [(s, Update({"params": {m: n * t for m, t in y.items()}}, n)) for _, n, s, y in answers]
    new = next_state(method, state, *updates)["params"]
    for name, old in state["params"].items():
        expected = old.clone()
        for width in (1.0, 0.6, 0.3):
            able = [(n, y[name]) for capacity, n, _, y in answers if capacity >= width]
            if able:
                shape = method.net_at(width).layout.shapes[name]
                block = tuple(slice(size) for size in shape)
                expected[block] = sum(n * t[block] for n, t in able) / sum(n for n, _ in able)
        torch.testing.assert_close(new[name], expected)


def test_a_widths_statistics_are_averaged_over_clients_that_may_train_it():
    """2 samples of the large client, 6 of the small; statistics without a holder are unchanged bit for bit."""
    method = with_norms(FjORD(), 1.0, 0.5, 0.25, steps=3, batch_size=2)
    state = method.init()
    clients = [(0.5, images(0, 1)), (0.25, images(0, 1, 2, 3, 0, 1))]
    updates = [updated(method, state, c, data, seed=seed) for seed, (c, data) in enumerate(clients)]
    large, small = ({g: answered(u, g) for g in u.whole} for u in updates)
    new = one_round(method, state, *clients)
    for name, t in new["width 0.25"].items():
        torch.testing.assert_close(t, (2 * large["width 0.25"][name] + 6 * small["width 0.25"][name]) / 8)
    for name, t in new["width 0.5"].items():
        torch.testing.assert_close(t, large["width 0.5"][name])
    assert_same(new["width 1"], state["width 1"])


# norms


def test_statistics_of_a_width_are_those_of_torch():
    """Equal to torch's batch norm in the network of that width, over the batches that drew it."""
    method = with_norms(FjORD(), 1.0, 0.5, steps=6, batch_size=4, lr=1e-30)
    state, data = method.init(), images(*[i % 4 for i in range(12)])
    seed = seed_of(method, 0, 1, 1, 0, 0, 1)
    update = updated(method, state, 1.0, data, seed=seed)
    batches = list(data.batches(6, 4, torch_generator(seed, "batches")))
    for capacity, steps in ((1.0, (0, 3, 4)), (0.5, (1, 2, 5))):
        deployed = method.deploy(state, 0, capacity)
        module = deployed.net.build()
        for path, norm in norms.static_norms(module).items():
            module.set_submodule(path, nn.BatchNorm2d(norm.weight.numel()))
        module.load_state_dict(deployed.params, strict=False)
        module.train()
        for i in steps:
            module(batches[i][0])
        expected = module.state_dict()
        for name, t in answered(update, f"width {capacity:g}").items():
            torch.testing.assert_close(t, expected[name])
            assert not torch.equal(t, state[f"width {capacity:g}"][name])


def test_the_teacher_is_tracked_too():
    method = with_norms(FjORD(distill=True), 1.0, 0.5, steps=2, batch_size=4)
    state = method.init()
    update = updated(method, state, 1.0, images(0, 1, 2, 3), seed=seed_of(method, 1, 1))
    for group in ("width 1", "width 0.5"):
        assert all(not torch.equal(t, state[group][name]) for name, t in answered(update, group).items())


@pytest.mark.parametrize("kind", ["per_width", "per_width_affine"])
def test_a_capacity_is_evaluated_with_its_own_norms(kind, tmp_path, monkeypatch):
    """Nothing is collected: each width is evaluated with its statistics in the state."""
    monkeypatch.setattr(Worker, "collect", None)
    spec = tiny(method={"name": "fjord", "norms": kind})
    simulation = simulate(spec, tmp_path)
    line = run(simulation)[-1]
    method, state, test = simulation.method, simulation.state, spec.data.arrays().test
    data = ClientData(
        {name: torch.tensor(array) for name, array in test.items()}, simulation.data.prepare, simulation.data.goal
    )
    accuracy, cross_entropy = simulation.recipe.scores
    loss = 0
    for capacity in (0.3, 0.2, 0.1):
        group = state[f"width {capacity:g}"]
        module = method.net_at(capacity).build()
        module.load_state_dict(method.prefix(capacity).take(state["params"]))
        module.load_state_dict({name: t for name, t in group.items() if "running" not in name}, strict=False)
        norms.load(module, group)
        [found] = judge(module, [data], simulation.recipe.scores, 7)
        assert line[f"accuracy_{capacity:g}"] == accuracy.value(found.sums["accuracy"])
        loss += cross_entropy.value(found.sums["loss"]) / 3
    assert line["loss_mean"] == pytest.approx(loss)


def test_own_norms_are_independent_between_widths():
    """A step of the small width does not change the large one's norms, nor the shared ones."""
    method = with_norms(FjORD(norms="per_width_affine"), 1.0, 0.5, lr=0.5)
    state, data = method.init(), images(0, 1, 2, 3)
    selection = method.select(state, Client(0, 1.0, 0))
    affine = {name for name in state["width 1"] if "running" not in name}
    assert affine == {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}
    assert method.extract(state, selection)["params"].keys() == state["params"].keys() - affine
    update = updated(method, state, 1.0, data, seed=seed_of(method, 1))
    assert_same(answered(update, "width 1"), state["width 1"])
    assert update.sums["params"].keys() == state["params"].keys() - affine
    new = answered(update, "width 0.5")
    assert all(not torch.equal(t, state["width 0.5"][name]) for name, t in new.items())
    after = next_state(method, state, (selection, update))
    assert {name for name, t in state["params"].items() if torch.equal(after["params"][name], t)} == affine
    for capacity in (1.0, 0.5):
        deployed = method.deploy(after, 1, capacity)
        assert all(torch.equal(deployed.params[name], after[f"width {capacity:g}"][name]) for name in affine)


def test_weight_decay_acts_on_the_norms_of_other_widths():
    """As outside the prefix: v <- 0.9 v + 0.1 x, x <- x - 0.5 v, twice, from 1; statistics stay."""
    training = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1, "steps": 2, "batch_size": 4}
    method = with_norms(FjORD(norms="per_width_affine"), 1.0, 0.5, **training)
    state = method.init()
    update = updated(method, state, 1.0, images(0, 1, 2, 3), seed=seed_of(method, 1, 1))
    new = answered(update, "width 1")
    torch.testing.assert_close(new["norm1.weight"], torch.full((32,), 0.95 - 0.5 * (0.09 + 0.095)))
    assert torch.equal(new["norm1.running_var"], torch.ones(32))


def test_own_norms_equal_shared_norms_for_one_width():
    """Up to rounding, which depends on where tensors lie in memory on some processors."""
    clients = [(1.0, images(0, 1, 2, 3)), (1.0, images(1, 1, 2))]
    training = {"steps": 3, "batch_size": 2, "lr": 0.5, "momentum": 0.9}
    shared, own = (
        with_norms(FjORD(norms=kind, weight="uniform"), 1.0, **training) for kind in ("per_width", "per_width_affine")
    )
    after, own_after = (one_round(method, method.init(), *clients) for method in (shared, own))
    group = own_after["width 1"]
    torch.testing.assert_close({name: group.get(name, t) for name, t in own_after["params"].items()}, after["params"])
    torch.testing.assert_close({name: group[name] for name in after["width 1"]}, after["width 1"])


def test_static_norms_and_networks_without_any_have_no_groups():
    assert with_norms(FjORD(norms="static"), 1.0, 0.5).init().keys() == {"params"}
    method = bound(FjORD(), 1.0, 0.5)
    assert method.init().keys() == {"params"}
    assert method.deploy(method.init(), 0, 0.5).statistics is None


def test_capacities_of_equal_width_are_one():
    model = MODELS["digits_cnn"]()
    nets = {1.0: Net(model), 0.5: Net(model, 0.75), 0.45: Net(model, 0.75), 0.2: Net(model, 0.5)}
    state = FjORD().bind(Task(model, Training(), nets, 1.0, clients=4)).init()
    assert list(state) == ["params", "width 1", "width 0.75", "width 0.5"]


# every option


@pytest.mark.parametrize(
    "options",
    [
        {"norms": "per_width_affine", "sample": "round"},
        {"norms": "per_width_affine", "distill": True, "alpha": 0.5},
        {"norms": "static", "distill": True, "temperature": 2.0},
        {"distill": True, "scaler": True, "norms": "static", "label_rows": "present", "mask": "zero"},
    ],
    ids=str,
)
def test_results_do_not_depend_on_the_order_of_work(options, tmp_path):
    """Neither payloads nor the state are changed in place."""
    spec = tiny(method={"name": "fjord"} | options, run={"chunk": 2}, training={"momentum": 0.9, "clip": 1.0})
    serial = simulate(spec, tmp_path / "serial")
    before, checked = serial.state, checksum(serial.state)
    shuffled = simulate(spec, tmp_path / "shuffled", lambda recipe: Shuffled(Worker(recipe, spec.data.arrays())))
    assert run(serial) == run(shuffled)
    assert_same(shuffled.state, serial.state)
    assert checksum(before) == checked


def test_norms_of_a_frozen_base_are_no_widths_own():
    base = MODELS["digits_cnn"](norm="static_bn", input=(1, 8, 8), classes=4)
    model = MODELS["lora"](base=base, targets=("hidden",), rank=4)
    nets = {c: Net(model, c) for c in (1.0, 0.5)}
    method = METHODS["fjord"](norms="per_width_affine").bind(Task(model, Training(), nets, 1.0, clients=2))
    own = {group: names for group, names in method.init().items() if group != "params"}
    assert own and not any(name.endswith(("weight", "bias")) for names in own.values() for name in names)
