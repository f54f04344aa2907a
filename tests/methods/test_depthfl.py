"""DepthFL against manual computations: losses, FedDyn's signs and counts, running statistics."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, bound, client_data, folded, images, one_round, run, simulate, tiny, updated, visit
from test_exits import ExitPerceptron, at, names, staged
from torch import nn

from rayfl.clients import Population
from rayfl.config import ConfigError, parse
from rayfl.core.norms import fresh
from rayfl.core.seeds import torch_generator
from rayfl.evaluation import judge
from rayfl.methods import METHODS
from rayfl.models import MODELS

DepthFL = METHODS["depthfl"]
NORMED = ExitPerceptron(norm="static_bn")


def noise(tensors, purpose):
    generator = torch_generator(0, f"test:{purpose}")
    return {name: torch.randn(t.shape, generator=generator) / 10 for name, t in tensors.items()}


def full(tensors, value):
    return {name: torch.full_like(t, value) for name, t in tensors.items()}


def values(tensors):
    """Return name -> the single value of each tensor."""
    found = {name: t.unique().tolist() for name, t in tensors.items()}
    assert all(len(v) == 1 for v in found.values())
    return {name: v[0] for name, v in found.items()}


def drawn_logits(exits):
    """Return fixed logits of 5 samples and 4 classes per exit."""
    generator = torch_generator(0, "test:logits")
    return tuple(torch.randn(5, 4, generator=generator, requires_grad=True) for _ in range(exits))


# the loss


def test_the_loss():
    """p_1 = (1/2, 1/2) and p_2 = (1/4, 3/4)."""
    logits = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, math.log(3)]])
    labels = math.log(2) + math.log(4 / 3)
    towards_1 = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    towards_2 = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    y = torch.tensor([1])
    for options, round, ramp in (
        ({"distill": False}, 300, 0.0),
        ({}, 0, math.exp(-5)),
        ({}, 150, math.exp(-1.25)),
        ({}, 300, 1.0),
        ({}, 1000, 1.0),
        ({"ramp_rounds": 0}, 0, 1.0),
    ):
        value = DepthFL(**options).loss(at(round))(logits, y).item()
        assert value == pytest.approx(labels + ramp * (towards_1 + towards_2), rel=1e-5)


def test_the_loss_of_more_exits_pair_by_pair():
    """The divergence is divided by n - 1, averaged over the batch, and without gradients to its teachers."""
    logits = drawn_logits(3)
    y = torch.tensor([0, 1, 2, 3, 0])
    DepthFL().loss(at(300))(logits, y).backward()
    twin = drawn_logits(3)
    expected = torch.zeros(())
    for i in range(3):
        expected = expected + F.cross_entropy(twin[i], y)
        for j in {0, 1, 2} - {i}:
            p, q = twin[j].softmax(1).detach(), twin[i].softmax(1)
            expected = expected + (p * (p / q).log()).sum() / 5 / 2
    expected.backward()
    assert DepthFL().loss(at(300))(logits, y).item() == pytest.approx(expected.item(), rel=1e-5)
    for z, other in zip(logits, twin, strict=True):
        torch.testing.assert_close(z.grad, other.grad)


def test_one_exit_has_no_distillation():
    """A single exit and a network without early exits are equal."""
    [logits], y = drawn_logits(1), torch.tensor([0, 1, 2, 3, 0])
    loss = DepthFL().loss(at(300))
    assert loss(logits, y) == loss((logits,), y) == F.cross_entropy(logits, y)


# FedDyn


def test_feddyn():
    """Two steps of gradient + alpha (y - x) - g, then g - alpha (y - x), against autograd on the written-out loss."""
    method = staged(DepthFL(distill=False, alpha=0.5), 1.0, lr=0.3, epochs=2, weight_decay=0.1)
    state, data = method.init(), client_data(0, 1, 2, 3)
    kept = noise(state["params"], "g")
    update = updated(method, state, 1.0, data, id=3, client_state={"g": kept})
    module = method.task.server.build()
    module.load_state_dict(state["params"])
    named = dict(module.named_parameters())
    [(x, y)] = data.in_order(4)
    optimizer = torch.optim.SGD(module.parameters(), 0.3, weight_decay=0.1)
    for _ in range(2):
        loss = sum(F.cross_entropy(z, y) for z in module(x))
        for name, p in named.items():
            loss = loss - (kept[name] * p).sum() + 0.25 * (p - state["params"][name]).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(update.sums["params"], {name: p.detach() for name, p in named.items()})
    for name, p in update.sums["params"].items():
        torch.testing.assert_close(update.client_states[3]["g"][name], kept[name] - 0.5 * (p - state["params"][name]))


def test_a_new_client_starts_from_zeros():
    method = staged(DepthFL(), 1.0, lr=0.3)
    state, data = method.init(), client_data(0, 1)
    zeros = full(state["params"], 0.0)
    first, second = (
        updated(method, state, 1.0, data, client_state=client_state) for client_state in (None, {"g": zeros})
    )
    assert_same(first.sums, second.sums)
    assert_same(first.client_states[0], second.client_states[0])


def test_the_servers_step(clients_answer):
    """From 2, 10 clients, alpha 0.1. Shared tensors: m = (4 + 8) / 2 and h = -0.1 * 2/10 * 4; the large client's own:
    m = 8 and h = -0.1 * 1/10 * 6; in the next round h accumulates, and tensors without holders are unchanged."""
    method = staged(DepthFL(), 1.0, 0.5, 0.25)
    state, data = method.init(), client_data(0, 1)
    state["params"] = full(state["params"], 2.0)
    smallest, middle, largest = (names(method, c) for c in (0.25, 0.5, 1.0))
    clients_answer(4, 8)
    new = one_round(method, state, (0.25, data), (0.5, data))
    expected = {n: (-0.08, 6.8) if n in smallest else (-0.06, 8.6) if n in middle else (0, 2) for n in largest}
    h, params = values(new["h"]), values(new["params"])
    assert h == pytest.approx({n: e[0] for n, e in expected.items()})
    assert params == pytest.approx({n: e[1] for n, e in expected.items()})
    for name in largest - middle:
        assert torch.equal(new["params"][name], state["params"][name])
    clients_answer(5)
    last = one_round(method, new, (0.25, data), round=1)
    h, params = values(last["h"]), values(last["params"])
    for name in smallest:
        assert h[name] == pytest.approx(-0.08 - 0.1 / 10 * (5 - 6.8))
        assert params[name] == pytest.approx(5 - h[name] / 0.1)
    for name in largest - smallest:
        assert torch.equal(last["params"][name], new["params"][name])
        assert torch.equal(last["h"][name], new["h"][name])


@pytest.mark.parametrize("server", [{}, {"optimizer": "adam", "lr": 0.05}])
def test_h_is_the_mean_of_all_client_states(server, tmp_path, monkeypatch):
    """Over the population; missing tensors and untrained clients count as zero."""
    monkeypatch.setitem(MODELS, "exit_perceptron", ExitPerceptron)
    spec = tiny(
        rounds=5,
        method={"name": "depthfl", "alpha": 0.3},
        model={"name": "exit_perceptron", "norm": "static_bn"},
        clients={"capacities": [1.0, 0.5, 0.25], "cohort": 3},
        server=server,
        evaluation={"every": 9},
        run={"chunk": 2},
    )
    simulation = simulate(spec, tmp_path)
    run(simulation, 4)
    mean = full(simulation.state["params"], 0.0)
    for id in simulation.client_states.files:
        for name, g in simulation.client_states.get(id)["g"].items():
            mean[name] += g / 6
    torch.testing.assert_close(simulation.state["h"], mean, rtol=1e-4, atol=1e-6)
    assert any(t.abs().max() > 1e-3 for t in mean.values())


def test_a_client_without_steps_keeps_its_state():
    method = staged(DepthFL(), 1.0, 0.5, 0.25, epochs=0)
    state = method.init()
    for client_state in (None, {"g": noise(state["params"], "g")}):
        update = updated(method, state, 1.0, client_data(0, 1), client_state=client_state)
        assert not update.client_states
        assert_same(update.sums["params"], state["params"])


def test_no_client_state_without_feddyn():
    method = staged(DepthFL(alpha=0), 1.0, 0.5, 0.25)
    state = method.init()
    update = updated(method, state, 0.5, client_data(0, 1))
    assert state.keys() == {"params", "statistics"} and not update.client_states
    method.check(1, Population(assignment="dynamic"))
    fold = folded(state, (visit(method, state, 0.5, client_data(0, 1)).selection, update))
    assert_same(fold.mean("params"), one_round(method, state, (0.5, client_data(0, 1)))["params"])


@pytest.mark.parametrize("extra", [{}, {"momentum": 0.9, "weight_decay": 0.1, "clip": 1.0}], ids=str)
def test_one_exit_without_feddyn_is_fedavg(extra):
    """Equal bit for bit."""
    data, states = client_data(0, 1, 2, 3, 1), []
    for method in (DepthFL(alpha=0, distill=False), METHODS["fedavg"](weight="uniform")):
        method = bound(method, 1.0, hidden=(3, 3), batch_size=2, **extra)
        state = one_round(method, method.init(), (1.0, data), (1.0, client_data(2, 3)))
        states.append(one_round(method, state, (1.0, data), round=1))
    assert_same(*states)


def test_feddyn_needs_fixed_capacities(monkeypatch):
    monkeypatch.setitem(MODELS, "exit_perceptron", ExitPerceptron)
    sections = {"model": "exit_perceptron", "clients": {"capacities": [1.0, 0.5, 0.25], "assignment": "dynamic"}}
    with pytest.raises(ConfigError) as error:
        tiny(method="depthfl", **sections)
    assert str(error.value) == (
        "test: clients.assignment: 'dynamic' is not valid. Allowed: 'fixed', because the client state of method "
        "depthfl fits one network only; or method.alpha: 0"
    )
    tiny(method={"name": "depthfl", "alpha": 0}, **sections)
    staged(DepthFL(), 1.0).check(1, Population(assignment="dynamic"))


# norms


def test_running_statistics_are_averaged_over_holders():
    """Weighted: the first norm over both clients, with 4 and 2 samples; the third is the large client's."""
    method = staged(DepthFL(alpha=0, weight="samples"), 1.0, 0.5, 0.25, model=NORMED, lr=0.1, batch_size=2)
    state, data = method.init(), (client_data(0, 1, 2, 3), client_data(3, 2))
    assert_same(state["statistics"], fresh(method.task.server.build()))
    work = [visit(method, state, c, d) for c, d in zip((1.0, 0.25), data, strict=True)]
    large, small = (method.local_update(method.extract(state, w.selection), w) for w in work)
    uniform = staged(DepthFL(alpha=0), 1.0, 0.5, 0.25, model=NORMED, lr=0.1, batch_size=2)
    plain = updated(uniform, state, 1.0, data[0])
    assert_same({n: t / 4 for n, t in large.sums["statistics"].items()}, plain.sums["statistics"])
    for sent in (method.extract(state, work[1].selection), small.sums):
        assert sent["statistics"].keys() == {"norm1.running_mean", "norm1.running_var"}
    fold = folded(state, (work[0].selection, large), (work[1].selection, small))
    new = method.step(state, 0, fold)["statistics"]
    for name, t in new.items():
        total, weight = large.sums["statistics"][name], 4
        if name in small.sums["statistics"]:
            total, weight = total + small.sums["statistics"][name], 6
        torch.testing.assert_close(t, total / weight)
        assert not torch.equal(t, state["statistics"][name])


def test_statistics_of_one_batch():
    """0.9 of the start and 0.1 of the batch, as nn.BatchNorm1d."""
    method = staged(DepthFL(), 1.0, model=NORMED, lr=1e-9)
    state, data = method.init(), client_data(0, 1, 2)
    [(x, _)] = data.in_order(3)
    twin = nn.BatchNorm1d(4)
    twin(F.linear(x.flatten(1), state["params"]["hidden1.weight"], state["params"]["hidden1.bias"]))
    for update in (updated(method, state, 1.0, data) for _ in range(2)):
        torch.testing.assert_close(update.sums["statistics"]["norm1.running_mean"], twin.running_mean)
        torch.testing.assert_close(update.sums["statistics"]["norm1.running_var"], twin.running_var)


def test_a_device_has_the_statistics_of_its_norms():
    method = staged(DepthFL(), 1.0, 0.5, 0.25, model=NORMED)
    state = method.init()
    for capacity, count in ((1.0, 3), (0.5, 2), (0.25, 1)):
        deployed = method.deploy(state, 1, capacity)
        assert deployed.statistics.keys() == fresh(deployed.net.build()).keys()
        assert len(deployed.statistics) == 2 * count
        assert deployed.params.keys() == names(method, capacity)
    plain = staged(DepthFL(), 1.0, 0.5, 0.25)
    assert plain.deploy(plain.init(), 1, 0.5).statistics is None


# answers


def test_the_global_model_outputs_the_mean_of_its_exits():
    method = staged(DepthFL(), 1.0)
    deployed = method.deploy(method.init(), 1, 1.0)
    module, data = deployed.net.build(), client_data(*[0, 1, 2, 3] * 5)
    accuracy, *_ = data.goal.scores
    [judged] = judge(module, [data], [accuracy], 7, deployed.answer)
    [(x, y)] = data.in_order(20)
    exits = torch.stack(module(x))
    assert accuracy.value(judged.sums[accuracy.label]) == (exits.mean(0).argmax(1) == y).double().mean()
    assert [accuracy.value(t) for t in judged.exits] == [(z.argmax(1) == y).double().mean() for z in exits]
    last = staged(DepthFL(distill=False, exits_trained="last"), 1.0)
    assert last.deploy(last.init(), 1, 1.0).answer == "last"


@pytest.mark.parametrize(
    "model", [ExitPerceptron(), MODELS["depthfl_resnet18"](channels=2, input=(1, 8, 8), init="torch")]
)
def test_parameters_trained_with_the_last_exit_only(model):
    """Exactly the tensors without a gradient from the last exit's loss are excluded."""
    capacities = [(i + 1) / model.exit_count for i in range(model.exit_count)]
    method = staged(DepthFL(distill=False, exits_trained="last"), *capacities, model=model)
    everything = staged(DepthFL(), *capacities, model=model)
    for level, net in enumerate(reversed(method.task.nets.values()), start=1):
        layers = set(net.full_layout.dims)
        trained = layers - method.withheld(net)
        assert not everything.withheld(net)
        assert layers - trained == {n for n in layers if n.startswith(tuple(f"exit{i}." for i in range(1, level)))}
        module = net.build().train()
        generator = torch_generator(0, "test:x")
        module(torch.randn(4, *model.input, generator=generator))[-1].square().sum().backward()
        assert not any(p.grad is not None and p.grad.any() for n, p in module.named_parameters() if n not in trained)


def test_earlier_exits_are_not_sent_if_only_the_last_is_trained():
    """The mean of a head is over the clients whose last exit it is."""
    method = staged(
        DepthFL(distill=False, exits_trained="last", alpha=0), 1.0, 0.5, 0.25, model=NORMED, lr=0.3, weight_decay=0.1
    )
    state, data = method.init(), client_data(0, 1, 2, 3)
    logits, y = drawn_logits(3), torch.tensor([0, 1, 2, 3, 0])
    assert method.loss(at(0))(logits, y) == F.cross_entropy(logits[-1], y)
    update = updated(method, state, 0.5, data)
    assert update.sums["params"].keys() == names(method, 0.5) - {"exit1.weight", "exit1.bias"}
    new = one_round(method, state, (0.5, data), (0.5, data))["params"]
    assert torch.equal(new["exit1.weight"], state["params"]["exit1.weight"])
    assert not torch.equal(new["exit2.weight"], state["params"]["exit2.weight"])
    assert not torch.equal(new["hidden1.weight"], state["params"]["hidden1.weight"])


def test_norms_and_label_rows_of_unsent_exits():
    """Exits with norms: statistics of earlier exits stay, those of the trunk and of the last exit are averaged; and
    label rows of unsent exits do not count."""
    model = MODELS["depthfl_resnet18"](channels=2, input=(1, 8, 8), classes=4)
    capacities = (1.0, 0.75, 0.5, 0.25)
    method = staged(
        DepthFL(distill=False, exits_trained="last", alpha=0, label_rows="present"), *capacities, model=model, lr=0.1
    )
    state = method.init()
    new = one_round(method, state, (0.5, images(0, 1, 0, 1)))
    changed = {
        group: {name for name, t in new[group].items() if not torch.equal(t, state[group][name])}
        for group in ("params", "statistics")
    }
    for found in changed.values():
        assert any(name.startswith("exit2.") for name in found) and any(name.startswith("stage2.") for name in found)
        assert not any(name.startswith(("exit1.", "exit3.", "stage3.")) for name in found)


TOGETHER = "weight: uniform with label_rows: all, or alpha: 0, because FedDyn weights clients equally"


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"distill": False, "ramp_rounds": 10}, "ramp_rounds only with distill: true"),
        ({"exits_trained": "last"}, "exits_trained: last only with distill: false, because no other exit is trained"),
        ({"weight": "samples"}, TOGETHER),
        ({"label_rows": "present"}, TOGETHER),
    ],
)
def test_incompatible_options(options, allowed):
    with pytest.raises(ConfigError, match=f". Allowed: {allowed}$"):
        parse(DepthFL, {"name": "depthfl"} | options, "test: method")
