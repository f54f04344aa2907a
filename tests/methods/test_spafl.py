"""SpaFL: gradients and Eq. 13 by hand, traffic, client state, and pruned networks."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import Shuffled, assert_same, bound, client_data, folded, images, run, simulate, tiny, updated, visit
from torch import nn

from rayfl import costs
from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core import norms
from rayfl.core.net import Net, load
from rayfl.core.seeds import torch_generator
from rayfl.core.tensors import leaves, nbytes
from rayfl.engine.worker import Worker
from rayfl.methods import METHODS, Client, Task
from rayfl.methods.masks.spafl import Pruned
from rayfl.models import MODELS
from rayfl.testing.tiny import raised
from rayfl.training.settings import Training

SpaFL = METHODS["spafl"]

W = torch.tensor([[0.1, -0.2, 0.3], [-0.05, 0.02, -0.02]])
TAU = torch.tensor([0.10, 0.04])
G = torch.tensor([[1.0, -2.0, 0.5], [0.4, 0.1, -0.3]])
"""Two rows with mu = (0.2, 0.03), so the thresholds keep the first; and a gradient by the pruned weights."""


def on(name, *, input=None, **training):
    """A method's task: a model, all clients of one capacity."""
    model = MODELS[name](classes=4, **({"input": input} if input else {}))
    return Task(model, Training(**training), {1.0: Net(model)}, 1.0, clients=10)


def answer(method, state, data, round=0, id=0, client_state=None):
    """A client's update in a round."""
    return updated(method, state, 1.0, data, id=id, round=round, seed=round, client_state=client_state)


def a_round(method, state, datas, client_states, round=0):
    """The next state; what the clients keep is put into `client_states`."""
    answers = []
    for id, data in datas.items():
        update = answer(method, state, data, round, id, client_states.get(id))
        client_states.update(update.client_states)
        answers.append((method.select(state, Client(id, 1.0, round)), update))
    return method.step(state, round, folded(state, *answers))


def one_layer(w=W, tau=TAU, **fields):
    """A linear layer of these rows, behind these thresholds."""
    whole = nn.Sequential()
    whole.add_module("layer", nn.Linear(w.shape[1], w.shape[0], bias=False))
    whole.load_state_dict({"layer.weight": w})
    return Pruned(SpaFL(**fields), whole, {"layer": tau})


def gradients(pruned, g=G):
    """By the weights and by the thresholds, of a loss whose gradient by the pruned weights is g."""
    (pruned(torch.eye(g.shape[1])) * g.T).sum().backward()
    return pruned.whole.layer.weight.grad, pruned.thresholds[0].grad


# gradients


def test_rows_below_their_threshold_are_pruned():
    pruned = one_layer()
    torch.testing.assert_close(pruned(torch.eye(3)).T, W * torch.tensor([[1.0], [0.0]]), rtol=0, atol=0)
    assert pruned.densities == {"layer": 0.5}
    equal = one_layer(torch.full((2, 4), 0.25), torch.tensor([0.25, 0.125]))
    assert equal(torch.eye(4)).T.count_nonzero(1).tolist() == [0, 4]


@pytest.mark.parametrize(
    ("w_grad", "expected"),
    [
        ("paper", [[1, -2, 0.5], [0, 0, 0]]),
        ("official_fmnist", [[1.216667, -2.216667, 0.716667], [0.004, -0.004, 0.004]]),
    ],
)
def test_gradients_by_hand(w_grad, expected):
    """The threshold's is -sum_j g_ij w_ij, of the pruned row too."""
    by_weight, by_threshold = gradients(one_layer(w_grad=w_grad))
    torch.testing.assert_close(by_weight, torch.tensor(expected), rtol=0, atol=1e-6)
    torch.testing.assert_close(by_threshold, torch.tensor([-0.65, 0.012]))
    torch.testing.assert_close(by_threshold, -(G * W).sum(1))


def test_a_layer_whose_weights_a_parent_module_uses_is_pruned_too():
    """Its own forward pass, whose outputs would be pruned, is never called."""

    class ByHand(nn.Module):
        def __init__(self, w):
            super().__init__()
            self.layer = nn.Linear(w.shape[1], w.shape[0], bias=False)
            self.layer.weight.data.copy_(w)

        def forward(self, x):
            return F.linear(x, self.layer.weight)

    expected, found = one_layer(), Pruned(SpaFL(), ByHand(W), {"layer": TAU})
    x = torch.eye(3)
    torch.testing.assert_close(found(x), expected(x), rtol=0, atol=0)
    for a, b in zip(gradients(found), gradients(expected), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("seed", range(3))
def test_the_official_step_gives_thresholds_nothing_near_them(seed):
    """1[|mu - tau| > 1]: nothing, but for thresholds that are far away."""
    w, g = torch.randn(2, 6, 5, generator=torch_generator(seed, "test:draw"))
    tau = torch.tensor([0.0, 0.5, 1.0, -2.0, 3.0, 0.8])
    by_weight, by_threshold = gradients(one_layer(w, tau, step_backward="official_cifar"), g)
    mu = w.abs().mean(1)
    torch.testing.assert_close(by_threshold, -(g * w).sum(1) * ((mu - tau).abs() > 1))
    torch.testing.assert_close(by_weight, g * (mu > tau)[:, None])


# Eq. 13


def test_the_change_of_thresholds_moves_weights():
    moved = SpaFL().moved({"layer.weight": W}, {"layer": torch.tensor([0.03, -0.06])})
    expected = torch.tensor([[0.09, -0.21, 0.29], [-0.07, 0.0, -0.04]])
    torch.testing.assert_close(moved["layer.weight"], expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("divisor", "conv", "linear"), [("n_in", 12, 12), ("official", 4, 12)])
def test_by_a_rows_weights_or_a_filters_height_times_width(divisor, conv, linear):
    params = {"c.weight": torch.ones(2, 3, 2, 2), "c.bias": torch.ones(2), "l.weight": torch.ones(2, 12)}
    delta = {"c": torch.tensor([0.12, 0.0]), "l": torch.tensor([0.0, -0.12])}
    moved = SpaFL(eq13_divisor=divisor).moved(params, delta)
    torch.testing.assert_close(moved["c.weight"][0], torch.full((3, 2, 2), 1 - 0.12 / conv))
    torch.testing.assert_close(moved["l.weight"][1], torch.full((12,), 1 + 0.12 / linear))
    assert torch.equal(moved["c.weight"][1], params["c.weight"][1])
    assert torch.equal(moved["c.bias"], params["c.bias"]) and torch.equal(moved["l.weight"][0], params["l.weight"][0])


# rounds


def by_hand(method, params, tau, delta, data, round, momentum=0.9):
    """A client's round from the paper's equations: its gradients are those of the pruned network."""
    task, alpha = method.task, method.alpha
    paths = list(tau)
    params, tau = {name: t.clone() for name, t in params.items()}, {path: t.clone() for path, t in tau.items()}
    for path in paths if method.eq13 else []:
        w = params[f"{path}.weight"]
        w -= (delta[path] * w.sum(1).sign() / w.shape[1])[:, None]
    module, speeds = task.server.build(), {}
    rates, steps = task.training.lr_at(round), task.training.batches_of(len(data))
    for x, y in data.batches(steps, task.training.batch_size, torch_generator(round, "batches")):
        gates = {path: (params[f"{path}.weight"].abs().mean(1) > tau[path]).float() for path in paths}
        with torch.no_grad():
            for name, p in module.named_parameters():
                path, kind = name.rsplit(".", 1)
                p.copy_(params[name] * (gates[path][:, None] if kind == "weight" else gates[path]))
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()
        for path in paths:
            g, b = module.get_parameter(f"{path}.weight").grad, module.get_parameter(f"{path}.bias").grad
            w, bias = params[f"{path}.weight"], params[f"{path}.bias"]
            h = -(g * w).sum(1) - b * bias - alpha * torch.exp(-tau[path])
            steps = {tau[path]: h, w: g * gates[path][:, None], bias: b * gates[path]}
            for t, step in steps.items():
                speeds[id(t)] = momentum * speeds.get(id(t), 0) + step
            for t in steps:
                t -= rates * speeds[id(t)]
    return params, tau


@pytest.mark.parametrize("eq13", [True, False])
def test_rounds_by_hand(eq13):
    """Two clients over three rounds; the first does not take part in the second."""
    method = bound(SpaFL(alpha=0.05, eq13=eq13), 1.0, hidden=(6,), lr=0.2, momentum=0.9, batch_size=2, epochs=2)
    state, datas = method.init(), {0: client_data(0, 1, 2), 1: client_data(3, 1, 0, 2)}
    # close to the rows' means, so that some are pruned
    state["thresholds"] = {"hidden0": torch.full((6,), 0.3), "head": torch.full((4,), 0.1)}
    params = {id: {name: t.clone() for name, t in state["params"].items()} for id in datas}
    tau, delta = state["thresholds"], {path: torch.zeros_like(t) for path, t in state["thresholds"].items()}
    client_states, densities = {}, set()
    for round, cohort in enumerate(((0, 1), (1,), (0, 1))):
        state = a_round(method, state, {id: datas[id] for id in cohort}, client_states, round)
        answers = []
        for id in cohort:
            params[id], trained = by_hand(method, params[id], tau, delta, datas[id], round)
            torch.testing.assert_close(client_states[id]["own"], params[id])
            torch.testing.assert_close(client_states[id]["thresholds"], trained)
            answers.append(trained)
            deployed = method.deploy(state, round, 1.0, client_states[id])
            densities |= set(deployed.present.layers.values())
        mean = {path: sum(a[path] for a in answers) / len(answers) for path in tau}
        delta = {path: mean[path] - tau[path] for path in tau}
        tau = mean
        torch.testing.assert_close(state["thresholds"], tau)
        torch.testing.assert_close(state["delta"], delta, rtol=1e-4, atol=1e-6)
    assert 0 < min(densities) < 1


def test_the_initial_network_is_the_runs_and_nothing_moves_before_thresholds_did():
    method = bound(SpaFL(), 1.0, lr=0.1, momentum=0.9)
    method = method.bind(replace(method.task, seed=7))
    state, data = method.init(), client_data(0, 1)
    assert all(not t.any() for group in ("thresholds", "delta") for t in state[group].values())
    without = method.model_copy(update={"eq13": False})
    assert_same(answer(method, state, data).client_states[0], answer(without, state, data).client_states[0])
    idle = method.bind(replace(method.task, training=Training(epochs=0)))
    assert_same(answer(idle, state, data).client_states[0]["own"], state["params"])


def test_no_answers_change_nothing():
    method = bound(SpaFL(target_density=0.5), 1.0)
    state = method.init()
    state |= {"thresholds": {"hidden0": torch.ones(2), "head": torch.ones(4)}}
    assert_same(method.step(state, 3, folded(state)), state)


def test_the_regularisation_may_rise():
    """1 / (1 + exp(5 - 10 t / P)) (the code, P = 1)."""
    ramp = SpaFL(alpha_ramp=1).ramp
    assert (ramp(0), ramp(1), ramp(2)) == pytest.approx((0.0066929, 0.9933071, 0.9999997), rel=1e-4)
    assert SpaFL(alpha_ramp=4).ramp(2) == 0.5
    assert SpaFL().ramp(0) == 1
    data, tau = client_data(0, 1), []
    for ramped in (0.0, 1.0):
        method = bound(SpaFL(alpha=1e-3, alpha_ramp=ramped, step_backward="official_cifar"), 1.0, lr=1.0)
        tau.append(answer(method, method.init(), data).whole["thresholds"]["head"])
    torch.testing.assert_close(tau[0], torch.full((4,), 1e-3))
    torch.testing.assert_close(tau[1], torch.full((4,), 0.0066929e-3))


def test_the_regularisation_falls_with_the_threshold():
    """Two steps from .3: tau <- tau + eta alpha exp(-tau)."""
    method = bound(SpaFL(alpha=0.1, step_backward="official_cifar"), 1.0, lr=0.5, batch_size=1)
    state = method.init()
    state["thresholds"] = {path: torch.full_like(t, 0.3) for path, t in state["thresholds"].items()}
    after = 0.3
    for _ in range(2):
        after += 0.5 * 0.1 * math.exp(-after)
    sent = answer(method, state, client_data(0, 1)).whole["thresholds"]
    for tau in sent.values():
        torch.testing.assert_close(tau, torch.full_like(tau, after))


def test_an_empty_layer_starts_again():
    """At most 1 % of its rows left: its thresholds are 0 before the pass. One of 200 rows is 0.5 %, three are 1.5 %."""
    w = torch.full((200, 2), 0.5)
    for left, resets in ((1, 1), (2, 1), (3, 0)):
        tau = torch.ones(200)
        tau[:left] = 0.1
        pruned = one_layer(w, tau)
        pruned(torch.eye(2))
        assert int(pruned.resets) == resets
        assert pruned.densities["layer"] == pytest.approx(1.0 if resets else left / 200)
        assert pruned.thresholds[0].count_nonzero() == (0 if resets else 200)
        pruned(torch.eye(2))
        assert int(pruned.resets) == resets
    method = bound(SpaFL(alpha=0), 1.0, hidden=(5,), lr=1e-9)
    state = method.init()
    state["thresholds"]["hidden0"] = torch.ones(5)
    update = answer(method, state, client_data(0, 1))
    assert update.metrics["resets"] == 1
    assert update.whole["thresholds"]["hidden0"].abs().max() < 1e-6
    emptied = {"own": state["params"], "thresholds": state["thresholds"]}
    assert method.deploy(state, 1, 1.0, emptied).present.layers == {"hidden0": 1, "head": 1}


def test_bounds():
    fields = {"clamp_weights": (-0.1, 0.2), "clamp_thresholds": (0.0, 0.001)}
    method = bound(SpaFL(alpha=1.0, **fields), 1.0, hidden=(6,), lr=0.5)
    client_state = answer(method, method.init(), client_data(0, 1, 2)).client_states[0]
    for path in ("hidden0", "head"):
        w, tau = client_state["own"][f"{path}.weight"], client_state["thresholds"][path]
        assert (w.min(), w.max()) == pytest.approx((-0.1, 0.2))
        assert tau.min() >= 0 and tau.max() == pytest.approx(0.001)
    assert client_state["own"]["hidden0.bias"].abs().max() > 0.2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"clamp_weights": (1, -1)}, "the lower bound must come first and be less than the upper bound"),
        ({"train_weights": False}, "train_weights: false requires eq13: false"),
        ({"target_density": 0.5, "exchange": False}, "target_density requires exchange: true and an alpha over 0"),
        ({"target_density": 0.5, "alpha": 0}, "target_density requires exchange: true and an alpha over 0"),
    ],
)
def test_bad_settings_are_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        SpaFL(**fields)


# what travels, what is kept


def test_thresholds_alone_travel():
    """LeNet: 580 of them beside 430,500 weights, and Table 1's 0.1856 Gbit in 5,000 client-rounds."""
    model = MODELS["lenet5_caffe"]()
    method = SpaFL().bind(Task(model, Training(epochs=0), {1.0: Net(model)}, 1.0, clients=100))
    state = method.init()
    assert {path: len(t) for path, t in state["thresholds"].items()} == {
        "conv1": 20, "conv2": 50, "hidden": 500, "head": 10
    }  # fmt: skip
    assert sum(t.numel() for t in state["params"].values()) == 430_500
    work = visit(method, state, 1.0, client_data(0))
    payload = method.extract(state, work.selection)
    assert set(payload) == {"thresholds", "delta"} and work.selection.nbytes == 0
    update = method.local_update(payload, work)
    assert not update.sums and set(update.whole) == {"thresholds"}
    traffic = [update.metrics[name] for name in ("bytes_down", "bytes_delta")] + [nbytes(update.whole)]
    assert traffic == [4 * 580] * 3
    assert 8 * (traffic[0] + traffic[2]) * 5000 / 1e9 == pytest.approx(0.1856)


ALL = {"capacities": [1]}
"""Clients that can run the whole network."""


def test_traffic_of_a_round(tmp_path):
    lines = {}
    for name, fields in {"spafl": {}, "alone": {"exchange": False}, "steered": {"target_density": 0.5}}.items():
        lines[name] = simulate(tiny(method={"name": "spafl"} | fields, clients=ALL), tmp_path / name).run_round()
    count = lines["spafl"]["clients"]
    traffic = {name: (line["bytes_down"], line["bytes_up"], line["bytes_delta"]) for name, line in lines.items()}
    each = 4 * (32 + 64 + 128 + 4)
    assert traffic == {
        "spafl": (each * count, each * count, each * count),
        "alone": (0, 0, 0),
        "steered": ((each + 4) * count, (each + 4) * count, each * count),
    }


def test_without_exchange_clients_keep_personal_thresholds():
    """The first round is SpaFL's; then a client goes on from its own thresholds, and no weight is moved."""
    method = bound(SpaFL(exchange=False, alpha=0.05), 1.0, hidden=(6,), lr=0.2, momentum=0.9)
    exchanging = method.model_copy(update={"exchange": True})
    state, datas, client_states = method.init(), {0: client_data(0, 1, 2), 1: client_data(3, 1, 0, 2)}, {}
    after = a_round(method, state, datas, client_states)
    assert_same(after, state)
    for id, data in datas.items():
        assert_same(client_states[id], answer(exchanging, state, data, id=id).client_states[id])
    params, tau = by_hand(
        method.model_copy(update={"eq13": False}),
        client_states[0]["own"],
        client_states[0]["thresholds"],
        {},
        datas[0],
        1,
    )
    second = answer(method, state, datas[0], 1, 0, client_states[0]).client_states[0]
    torch.testing.assert_close((second["own"], second["thresholds"]), (params, tau))


def test_clients_are_evaluated_with_the_thresholds_of_their_own_last_round():
    method = bound(SpaFL(alpha=0.9), 1.0, hidden=(6,), lr=0.2)
    state, datas, client_states = method.init(), {0: client_data(0, 1), 1: client_data(2, 3)}, {}
    state = a_round(method, state, datas, client_states)
    before = method.deploy(state, 1, 1.0, client_states[0])
    assert 0 < min(before.present.layers.values()) < 1
    state = a_round(method, state, {1: datas[1]}, client_states, 1)
    after = method.deploy(state, 2, 1.0, client_states[0])
    assert_same(after.params, before.params)
    assert after.key == before.key != method.deploy(state, 2, 1.0).key and not after.is_start
    for name in ("hidden0", "head"):
        keep = client_states[0]["own"][f"{name}.weight"].abs().mean(1) > client_states[0]["thresholds"][name]
        for p in (f"{name}.weight", f"{name}.bias"):
            assert torch.equal(after.params[p], client_states[0]["own"][p] * keep.view(-1, *[1] * (p[-1] == "t")))
    # a client that has not trained
    start = method.deploy(state, 2, 1.0)
    assert_same(start.params, state["params"])
    assert start.is_start and start.present.layers == {"hidden0": 1.0, "head": 1.0}


def test_a_deployment_answers_as_the_masked_network():
    method = SpaFL(alpha=0.05).bind(on("digits_cnn", lr=0.1, momentum=0.9, batch_size=4, epochs=3))
    state, data, client_states = method.init(), images(0, 1, 2, 3, 0, 1), {}
    state = a_round(method, state, {0: data}, client_states)
    state = a_round(method, state, {0: data}, client_states, 1)
    deployed = method.deploy(state, 2, 1.0, client_states[0])
    assert 0 < min(deployed.present.layers.values()) < 1
    module = deployed.net.build()
    load(module, client_states[0]["own"])
    norms.load(module, deployed.statistics)
    pruned = Pruned(method, module, client_states[0]["thresholds"]).eval()
    x, _ = next(data.in_order(6))
    expected = pruned(x)
    assert pruned.densities == pytest.approx(dict(deployed.present.layers))
    load(module, deployed.params)
    assert torch.equal(module(x), expected)


def test_norms_and_their_running_statistics_are_a_clients_own():
    """They start as torch's do, go on where they were, and never travel."""
    method = SpaFL().bind(on("digits_cnn", lr=0.01, batch_size=6))
    state, data = method.init(), images(0, 1, 2, 3, 0, 1)
    first = answer(method, state, data)
    assert set(first.whole) == {"thresholds"} and set(first.whole["thresholds"]) == {"conv1", "conv2", "hidden", "head"}
    x, _ = next(data.batches(1, 6, torch_generator(0, "batches")))
    z = F.conv2d(x, state["params"]["conv1.weight"], state["params"]["conv1.bias"], padding=1)
    mean = first.client_states[0]["statistics"]["norm1.running_mean"]
    torch.testing.assert_close(mean, 0.1 * z.mean((0, 2, 3)))
    second = answer(method, state, data, 1, 0, first.client_states[0]).client_states[0]["statistics"][
        "norm1.running_mean"
    ]
    x, _ = next(data.batches(1, 6, torch_generator(1, "batches")))
    params = first.client_states[0]["own"]
    z = F.conv2d(x, params["conv1.weight"], params["conv1.bias"], padding=1)
    torch.testing.assert_close(second, 0.9 * mean + 0.1 * z.mean((0, 2, 3)))


def test_the_classifier_can_be_whole():
    method = bound(SpaFL(classifier=False, alpha=5.0), 1.0, hidden=(6,), lr=0.2)
    state, client_states = method.init(), {}
    assert list(state["thresholds"]) == ["hidden0"]
    state = a_round(method, state, {0: client_data(0, 1)}, client_states)
    deployed = method.deploy(state, 1, 1.0, client_states[0])
    assert deployed.masked == ("hidden0.weight", "hidden0.bias")
    assert_same(
        {name: deployed.params[name] for name in ("head.weight", "head.bias")},
        {name: client_states[0]["own"][name] for name in ("head.weight", "head.bias")},
    )


@pytest.mark.parametrize("classifier", [True, False])
def test_operations_by_hand(classifier):
    """6 a multiply-add: hidden0 has 2 x 6 and head 6 x 4, each by its density at the last pass."""
    method = bound(SpaFL(alpha=0, classifier=classifier), 1.0, hidden=(6,), lr=1e-9, epochs=3, batch_size=2)
    state = method.init()
    w = state["params"]["hidden0.weight"].abs().mean(1)
    state["thresholds"]["hidden0"] = torch.full((6,), w.sort().values[1:3].mean().item())
    if classifier:
        state["thresholds"]["head"] = torch.tensor([-1.0, 9.0, -1.0, -1.0])
    update = answer(method, state, client_data(0, 1, 2))
    there = 12 * 4 / 6 + 24 * (0.75 if classifier else 1)
    assert update.metrics["train_flops"] == pytest.approx(6 * there * 9)
    dense = answer(method, method.init(), client_data(0, 1, 2)).metrics["train_flops"]
    assert dense == costs.training_flops(method.task.server, 9)


def test_payload_and_client_state_are_not_changed():
    method = SpaFL(alpha=0.05, target_density=0.5).bind(on("digits_cnn", lr=0.1, momentum=0.9, batch_size=4))
    state, data, client_states = method.init(), images(0, 1, 2, 3, 0, 1), {}
    state = a_round(method, state, {0: data}, client_states)
    before = {name: t.clone() for name, t in leaves({"state": state, "carry": client_states[0]})}
    a_round(method, state, {0: data}, dict(client_states), 1)
    method.deploy(state, 1, 1.0, client_states[0])
    assert_same(dict(leaves({"state": state, "carry": client_states[0]})), before)


def test_a_wider_server_is_every_clients_network():
    method = bound(SpaFL(), 1.0, 0.5, hidden=(4,))
    assert set(method.task.nets.values()) == {Net(method.task.model)}
    assert method.select(method.init(), Client(0, 0.5, 0)).net == Net(method.task.model)


# a target


@pytest.mark.parametrize("target", [0.3, 0.7])
def test_the_server_holds_a_density(target):
    """From some round on within 0.15, a few rows of the head, and on average."""
    method = bound(
        SpaFL(alpha=0.02, target_density=target), 1.0, hidden=(64,), lr=0.05, momentum=0.9, batch_size=4, epochs=2
    )
    state, client_states, densities = method.init(), {}, []
    datas = {id: client_data(*[(id + i) % 4 for i in range(8)]) for id in range(2)}
    for round in range(40):
        state = a_round(method, state, datas, client_states, round)
        densities.append(float(state["control"]["density"]))
    assert densities[0] > 0.95
    assert all(abs(density - target) < 0.15 for density in densities[25:])
    assert sum(densities[25:]) / 15 == pytest.approx(target, abs=0.05)


def test_alpha_follows_the_density():
    """alpha + alpha_0 (5 (rho - target) + 20 (rho - the last rho)), of the clients' mean."""
    method = bound(SpaFL(alpha=0.2, target_density=0.5), 1.0, hidden=(6,), lr=0.2)
    state, datas, client_states = method.init(), {0: client_data(0, 1), 1: client_data(2, 3)}, {}
    assert_same(state["control"], {"alpha": torch.tensor(0.2), "density": torch.ones(())})
    alpha, last = 0.2, 1.0
    for round in range(4):
        state = a_round(method, state, datas, client_states, round)
        layers = [method.deploy(state, 1, 1.0, client_states[id]).present.layers for id in datas]
        rho = sum(sum(by_path.values()) / len(by_path) for by_path in layers) / len(layers)
        alpha += 0.2 * (5 * (rho - 0.5) + 20 * (rho - last))
        last = rho
        assert float(state["control"]["density"]) == pytest.approx(rho)
        assert float(state["control"]["alpha"]) == pytest.approx(alpha, abs=1e-5)
    assert last < 1


@pytest.mark.parametrize("rule", [{"momentum": 0.9}, {"optimizer": "adamw", "lr": 0.01}])
def test_thresholds_alone_are_trained_in_frozen_networks(rule):
    """Table 2. Weight decay does not move weights either."""
    training = {"batch_size": 2, "weight_decay": 0.1} | rule
    method = SpaFL(train_weights=False, eq13=False).bind(on("digits_cnn", **training))
    state = method.init()
    data = images(0, 1, 2, 3)
    update = answer(method, state, data)
    assert_same(update.client_states[0]["own"], state["params"])
    assert any(t.any() for t in update.client_states[0]["thresholds"].values())


def test_thresholds_that_do_nothing_are_local_training(tmp_path):
    """Frozen at 0 they prune nothing: Standalone, but for a rounding, because a step takes elements in groups and
    thresholds stand behind the weights."""
    still = {"name": "spafl", "alpha": 0, "eq13": False, "step_backward": "official_cifar"}
    kept = []
    for method in (still, {"name": "standalone", "size": "largest"}):
        simulation = simulate(tiny(method=method, training={"momentum": 0.9}), tmp_path / method["name"])
        run(simulation)
        kept.append({id: simulation.client_states.get(id)["own"] for id in sorted(simulation.client_states.owners)})
    assert kept[0].keys() == kept[1].keys()
    for id, own in kept[1].items():
        torch.testing.assert_close(kept[0][id], own, rtol=0, atol=1e-6)


def test_densities_do_not_depend_on_the_order_of_work(tmp_path):
    """Sums of shares of 500 and of 50 rows are not exact."""
    spec = tiny(
        method="spafl",
        model="lenet5_caffe",
        data={"shape": [1, 16, 16], "samples": 400, "test_samples": 80},
        clients={"count": 20, "cohort": 20, "capacities": [1]},
        training={"steps": 4, "lr": 0.5},
        rounds=1,
    )
    lines = [run(simulate(spec, tmp_path / "serial"))]
    arrays = spec.data.arrays()
    lines.append(run(simulate(spec, tmp_path / "shuffled", lambda recipe: Shuffled(Worker(recipe, arrays)))))
    assert lines[0] == lines[1]
    assert 0 < lines[0][-1]["local_density"] < 1


def test_momentum_may_outlive_the_round():
    """And is there for the next one; without momentum there is none to keep."""
    task = on("digits_cnn", batch_size=2, momentum=0.9)
    method, data = SpaFL(persistent_momentum=True).bind(task), images(0, 1, 2, 3)
    state = method.init()
    client_state = answer(method, state, data).client_states[0]
    assert {name.removeprefix("whole.") for name in client_state["momentum"] if name.startswith("whole.")} == set(
        client_state["own"]
    )
    assert len(client_state["momentum"]) == len(client_state["own"]) + len(client_state["thresholds"])
    kept, anew = (
        answer(method, state, data, 1, client_state=c).client_states[0]["own"]
        for c in (client_state, client_state | {"momentum": {}})
    )
    assert any(not torch.equal(kept[name], anew[name]) for name in kept)
    plain = SpaFL().bind(task)
    without = {name: tensors for name, tensors in client_state.items() if name != "momentum"}
    assert_same(answer(plain, state, data, 1, client_state=without).client_states[0]["own"], anew)
    with pytest.raises(
        ConfigError, match="persistent_momentum: true requires momentum. Allowed: training.momentum over 0"
    ):
        SpaFL(persistent_momentum=True).bind(on("digits_cnn")).check(1, Population())


def test_every_layer_has_neurons():
    """The rows of GPT-2's matrices are inputs."""
    gpt2 = {"name": "gpt2", "hidden": 16, "heads": 2, "layers": 1, "positions": 16}
    assert "layer transformer.h.0.attn.c_attn of gpt2 has no weight with one row per neuron" in raised(
        lambda: tiny(method="spafl", model=gpt2, data={"name": "synthetic_text"}), ConfigError
    )


def test_some_layer_has_thresholds():
    method = bound(SpaFL(classifier=False), 1.0, hidden=())
    with pytest.raises(
        ConfigError, match="classifier: false leaves no layer of model perceptron with thresholds. Allowed: true"
    ):
        method.check(1, Population())
