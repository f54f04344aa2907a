"""FedPM by hand."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import assert_same, bound, client_data, folded, one_round, updated
from torch.func import functional_call

from rayfl.clients import Population
from rayfl.config import ConfigError, parse
from rayfl.core.bitcodes import decode, encode, entropy
from rayfl.core.net import Net
from rayfl.core.seeds import stream, torch_generator
from rayfl.core.tensors import nbytes
from rayfl.costs import training_flops
from rayfl.data.goal import Classes
from rayfl.data.images import Images
from rayfl.data.samples import ClientData
from rayfl.methods import METHODS, Client, Task, Update
from rayfl.methods.masks.fedpm import Drawn, Keep
from rayfl.models import MODELS
from rayfl.training.settings import Training

FedPM = METHODS["fedpm"]


def answers(method, state, round, *masks: float):
    """The state after a round of clients whose masks are the same bit everywhere."""
    return method.step(state, round, folded(state, *(answer(method, state, bit) for bit in masks)))


def answer(method, state, sum_: float, count: int = 1):
    """Return updates of `count` clients whose masks have the same sum everywhere."""
    sums = {name: torch.full_like(t, sum_) for name, t in state["probabilities"].items()}
    return method.select(state, Client(0, 1.0, 0)), Update({}, float(count), {"masks": sums})


def theta(state) -> float:
    """The probability of a state that has the same everywhere."""
    [value] = {v for t in state["probabilities"].values() for v in t.flatten().tolist()}
    return value


def flat(params) -> torch.Tensor:
    return torch.cat([t.flatten() for t in params.values()])


@pytest.mark.parametrize(
    ("fields", "probability", "score"), [({}, 2 / 3, 0.6931), ({"soften": True}, 0.66333, 0.67818)]
)
def test_three_masks(fields, probability, score):
    method = bound(FedPM(**fields), 1.0)
    state = answers(method, method.init(), 0, 1, 0, 1)
    assert theta(state) == pytest.approx(probability, abs=5e-6)
    assert math.log(theta(state) / (1 - theta(state))) == pytest.approx(score, abs=5e-5)


def test_no_score_is_infinite():
    for fields in ({}, {"soften": True}):
        method = bound(FedPM(**fields), 1.0)
        assert theta(answers(method, method.init(), 0, 0, 0)) == pytest.approx(0.01)
        assert theta(answers(method, method.init(), 0, 1, 1)) == pytest.approx(0.99)


def test_a_prior_lives_until_its_reset():
    """2 of 3, then 0 of 1 more, then anew: 1 of 2."""
    method = bound(FedPM(prior_reset=2), 1.0)
    state, found = method.init(), []
    for round, masks in enumerate([(1, 0, 1), (0,), (1, 0)]):
        state = answers(method, state, round, *masks)
        found.append(theta(state))
        bits = {name: {v for t in state[name].values() for v in t.flatten().tolist()} for name in ("alpha", "beta")}
    assert found == pytest.approx([2 / 3, 2 / 4, 1 / 2])
    assert bits == {"alpha": {2.0}, "beta": {2.0}}
    assert "alpha" not in bound(FedPM(), 1.0).init()


def test_the_inverse_of_the_participation():
    """3 of 10 clients a round: a reset every 4 rounds."""
    methods = [bound(FedPM(prior_reset=reset), 1.0) for reset in ("ceil_inv_participation", 4, 3)]
    states = [method.init() for method in methods]
    found = [[], [], []]
    for round in range(9):
        masks = (1, round % 2, 0)
        states = [answers(m, s, round, *masks) for m, s in zip(methods, states, strict=True)]
        for thetas, state in zip(found, states, strict=True):
            thetas.append(theta(state))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("reset", [1, 3])
def test_a_round_without_answers(reset):
    method = bound(FedPM(prior_reset=reset), 1.0)
    state = method.init()
    assert_same(method.step(state, 0, folded(state)), state)


def test_a_prior_is_reset_in_a_round_without_answers():
    """prior_reset 2: masks 1 and 1, then 1, then none, then 0, which meets a prior of nothing but the reset."""
    method = bound(FedPM(prior_reset=2), 1.0)
    state = method.init()
    for round, (sum_, count) in enumerate([(2.0, 2), (1.0, 1)]):
        state = method.step(state, round, folded(state, answer(method, state, sum_, count)))
    silent = method.step(state, 2, folded(state))
    assert_same(silent["probabilities"], state["probabilities"])
    state = method.step(silent, 3, folded(silent, answer(method, silent, 0.0)))
    assert all(bool((t == 0.01).all()) for t in state["probabilities"].values())


@pytest.mark.parametrize(("twice", "expected"), [(False, [1 / 4, 1 / 9]), (True, [1 / 8, 2 / 27])])
def test_the_gradient_by_hand(twice, expected):
    """theta 1/2 and 2/3, w 1/2 and -1/2, upstream 2 and -1; a mask of 0 does not stop it."""
    scores = torch.tensor([0.0, math.log(2)], requires_grad=True)
    mask, weights = torch.tensor([True, False]), torch.tensor([0.5, -0.5])
    kept = Keep.apply(scores, scores.detach().sigmoid(), mask, weights, twice)
    assert kept.tolist() == [0.5, 0.0]
    kept.backward(torch.tensor([2.0, -1.0]))
    torch.testing.assert_close(scores.grad, torch.tensor(expected))


def drawn_network(method, value: float = 0.0):
    """The network of a method's clients, in training, with the same score everywhere."""
    frozen = method.frozen("cpu")
    scores = torch.full_like(frozen.weights, value)
    return Drawn(method.task.server.build(), frozen, scores, torch_generator(0, "masks"), False), frozen


def test_a_pass_runs_the_kept_weights():
    """The loss and its gradient are those of the network with weights m w."""
    method = bound(FedPM(), 1.0, hidden=(7, 5))
    network, frozen = drawn_network(method)
    x, y = torch.rand(6, 1, 1, 2, generator=torch_generator(0, "test:x")), torch.arange(6) % 4
    loss = torch.nn.functional.cross_entropy(network(x), y)
    loss.backward()
    module = method.task.server.build()
    kept = (frozen.weights * network.mask).requires_grad_()
    plain = torch.nn.functional.cross_entropy(functional_call(module, frozen.params(kept), (x,)), y)
    plain.backward()
    assert torch.equal(loss, plain)
    torch.testing.assert_close(network.scores.grad, kept.grad * frozen.weights * 0.25)


def test_every_pass_draws_a_mask():
    network, _ = drawn_network(bound(FedPM(), 1.0, hidden=(1000,)), math.log(0.31 / 0.69))
    drawn = []
    for _ in range(4):
        network(torch.zeros(1, 1, 1, 2))
        drawn.append(network.mask)
    drawn.append(network.draw())
    assert len({tuple(mask.tolist()) for mask in drawn}) == 5
    n = sum(map(len, drawn))
    assert float(torch.cat(drawn).sum()) == pytest.approx(0.31 * n, abs=4 * math.sqrt(0.31 * 0.69 * n))


@pytest.mark.parametrize(("init_c", "factor"), [("kaiming", math.sqrt(2)), ("official", math.e)])
def test_frozen_weights(init_c, factor):
    """-c or c of the layer's inputs, biases too, as often; of another run others."""
    method = bound(FedPM(init_c=init_c), 1.0, hidden=(50, 200))
    params = method.init()["params"]
    for layer, inputs in (("hidden0", 2), ("hidden1", 50), ("head", 200)):
        for kind in ("weight", "bias"):
            values = params[f"{layer}.{kind}"].abs()
            torch.testing.assert_close(values, torch.full_like(values, factor / math.sqrt(inputs)))
    signs = params["hidden1.weight"].sign()
    assert abs(float(signs.sum())) < 4 * math.sqrt(signs.numel())
    assert_same(method.init()["params"], params)
    other = method.bind(replace(method.task, seed=1))
    assert not torch.equal(other.init()["params"]["hidden1.weight"], params["hidden1.weight"])


def test_probabilities_start_around_a_half():
    """sigmoid(N(0, 1)), within the bounds: at most 0.731 in 84.13 per cent."""
    method = bound(FedPM(), 1.0, hidden=(100, 100))
    thetas = flat(method.init()["probabilities"])
    assert float((thetas < 1 / (1 + math.exp(-1))).float().mean()) == pytest.approx(0.8413, abs=0.015)
    assert 0.01 <= float(thetas.min()) and float(thetas.max()) <= 0.99
    other = method.bind(replace(method.task, seed=1))
    assert not torch.equal(flat(other.init()["probabilities"]), thetas)


def test_norms_stay_as_they_start():
    model = MODELS["resnet18"](channels=2)
    method = FedPM().bind(Task(model, Training(), {1.0: Net(model)}, 1.0, clients=2))
    state = method.init()
    norms = state["params"].keys() - state["probabilities"].keys()
    assert norms == {name for name in state["params"] if "norm" in name}
    for deployed in (method.deploy(state, r, 1.0) for r in (0, 1)):
        assert set(deployed.masked) == state["probabilities"].keys()
        for name in norms:
            assert set(deployed.params[name].tolist()) == {float(name.endswith("weight"))}


@pytest.mark.parametrize("soften", [False, True])
def test_traffic(soften):
    """Down: float32 probabilities and no weight. Up: a code of the bits that are averaged."""
    method = bound(FedPM(soften=soften), 1.0, hidden=(300,), optimizer="adam", lr=0.1, steps=3)
    state = method.init()
    payload = method.extract(state, method.select(state, Client(0, 1.0, 0)))
    n = 300 * 2 + 300 + 4 * 300 + 4
    assert list(payload) == ["probabilities"] and nbytes(payload) == 4 * n
    update = updated(method, state, 1.0, client_data(0, 1, 2, 3))
    bits = flat(update.whole["masks"])
    assert not update.sums and list(update.whole) == ["masks"] and set(bits.tolist()) == {0.0, 1.0}
    code = encode(bits)
    assert update.metrics["bytes_up"] == len(code) and torch.equal(decode(code, n).float(), bits)
    assert len(code) == pytest.approx(2 + n * entropy(float(bits.mean())) / 8, abs=8)
    assert len(code) < nbytes(payload) / 31


def test_masks_add():
    method = bound(FedPM(), 1.0, hidden=(30,), steps=1)
    state = method.init()
    data = client_data(0, 1, 2, 3)
    one, two = (updated(method, state, 1.0, data, seed=seed) for seed in (0, 1))
    total = flat(one.whole["masks"]) + flat(two.whole["masks"])
    both = one.plus(two)
    assert torch.equal(flat(both.whole["masks"]), total) and both.weight == 2
    new = method.step(state, 0, folded(state, (method.select(state, Client(0, 1.0, 0)), both)))
    assert torch.equal(flat(new["probabilities"]), (total / 2).clamp(0.01, 0.99))
    assert_same(new["params"], state["params"])


def test_an_untrained_client_draws_from_the_probabilities():
    method = bound(FedPM(), 1.0, hidden=(2000,), epochs=0)
    state = answers(method, method.init(), 0, 1, 0, 0, 0)
    update = updated(method, state, 1.0, client_data(0, 1))
    bits = flat(update.whole["masks"])
    assert float(bits.sum()) == pytest.approx(len(bits) / 4, abs=4 * math.sqrt(len(bits) * 3 / 16))
    assert update.metrics["train_flops"] == 0


def test_training_flops_are_those_of_the_last_mask():
    """2 multiply-adds a hidden unit, 4 a unit of the head: the share that the mask of the only step keeps."""
    method = bound(FedPM(), 1.0, hidden=(40,), steps=1)
    state = method.init()
    update = updated(method, state, 1.0, client_data(0, 1, 2), seed=5)
    thetas = flat(state["probabilities"]).logit().sigmoid()
    mask = torch.rand(len(thetas), generator=torch.Generator().manual_seed(stream(5, "masks"))) < thetas
    kept = int(mask[:80].sum()) + int(mask[120:280].sum())
    assert update.metrics["train_flops"] == pytest.approx(6 * 3 * kept)
    assert update.metrics["train_flops"] < training_flops(method.task.server, 3) == 6 * 3 * 240


def test_a_client_is_a_pure_function():
    method = bound(FedPM(), 1.0, hidden=(20,), optimizer="adam", lr=0.1, epochs=2, batch_size=2)
    state, data = method.init(), client_data(0, 1, 2, 3, 0)
    before = {group: {name: t.clone() for name, t in tensors.items()} for group, tensors in state.items()}
    first, again, other = (updated(method, state, 1.0, data, seed=seed) for seed in (3, 3, 4))
    assert_same(first.whole, again.whole)
    assert first.metrics == again.metrics
    assert not torch.equal(flat(first.whole["masks"]), flat(other.whole["masks"]))
    assert_same(state, before)


def test_all_capacities_have_the_server_s_network():
    method = bound(FedPM(), 1.0, 0.5, 0.25, hidden=(8,))
    state = method.init()
    assert len({method.select(state, Client(0, c, r)).key for r in (0, 1) for c in (1.0, 0.25)}) == 1
    assert {method.deploy(state, 1, c).net for c in (1.0, 0.5, 0.25)} == {Net(method.task.model)}
    assert method.deploy(state, 1, 1.0).key == method.deploy(state, 1, 0.25).key


def test_a_device_runs_one_draw():
    method = bound(FedPM(), 1.0, hidden=(500,))
    state = answers(method, method.init(), 0, 1, 0, 0, 0)
    deployed, again, later = (method.deploy(state, round, 1.0) for round in (1, 1, 2))
    assert_same(deployed.params, again.params)
    assert deployed.key == again.key != later.key
    assert not torch.equal(deployed.params["hidden0.weight"], later.params["hidden0.weight"])
    n = len(flat(state["probabilities"]))
    assert deployed.present.parameters == pytest.approx(n / 4, abs=4 * math.sqrt(n * 3 / 16))
    weights = deployed.params["head.weight"]
    assert torch.equal(weights, torch.where(weights != 0, state["params"]["head.weight"], 0))


def test_other_deployments():
    state = bound(FedPM(), 1.0).init()
    for kind, share in (("mean", lambda t: t), ("threshold", lambda t: (t > 0.5).float())):
        params = bound(FedPM(deployed=kind), 1.0).deploy(state, 1, 1.0).params
        for name, t in state["probabilities"].items():
            assert torch.equal(params[name], state["params"][name] * share(t))


@pytest.mark.parametrize(
    ("given", "field"),
    [({"weight": "samples"}, "weight"), ({"prior_reset": 0}, "prior_reset"), ({"deployed": "all"}, "deployed")],
)
def test_invalid_options_are_refused(given, field):
    with pytest.raises(ConfigError, match=field):
        parse(FedPM, {"name": "fedpm"} | given, "method")


def test_weights_that_a_model_brings_are_refused():
    net = Net(MODELS["resnet18"](weights="imagenet"))
    method = FedPM().bind(Task(net.model, Training(), {1.0: net}, 1.0, clients=2))
    with pytest.raises(ConfigError, match="model.weights: not supported with method fedpm, .*. Allowed: leave it out"):
        method.check(1, Population())


@pytest.mark.parametrize("fields", [{}, {"ste": "official_p"}, {"init_c": "official", "prior_reset": 2}])
def test_learns(fields):
    """Two pixels, bright or dark: four classes, all seen by each of three clients."""
    method = bound(FedPM(**fields), 1.0, hidden=(64,), optimizer="adam", lr=0.1, epochs=2, batch_size=16)
    pixels = torch.randint(256, (192, 1, 1, 2), generator=torch_generator(0, "test:pixels")).byte()
    bright = (pixels > 127).long().reshape(-1, 2)
    samples = {"x": pixels, "y": bright[:, 0] * 2 + bright[:, 1]}
    data = ClientData(samples, Images(mean=(0.5,), std=(0.25,)), Classes(4))
    state = method.init()
    for round in range(4):
        state = one_round(method, state, *[(1.0, data)] * 3, round=round)
    deployed = method.deploy(state, 4, 1.0)
    module = deployed.net.build()
    module.load_state_dict(deployed.params)
    [(x, y)] = data.in_order(192)
    assert float((module(x).argmax(1) == y).float().mean()) > 0.8
