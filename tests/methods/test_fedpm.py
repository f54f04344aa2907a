"""FedPM by hand."""

import math

import pytest
import torch
from helpers import assert_same, bound, client_data, one_round, updated
from torch.func import functional_call

from rayfl.axes import Net
from rayfl.coding import decode, encode, entropy
from rayfl.config import ConfigError, parse
from rayfl.costs import training_flops
from rayfl.methods import METHODS, Client, Task, Update
from rayfl.methods.fedpm import _frozen, _Keep, _Masked
from rayfl.models import MODELS
from rayfl.seeds import stream, torch_generator
from rayfl.tensors import nbytes
from rayfl.training import ClientData, Preprocessing, Training

FedPM = METHODS["fedpm"]


def answers(method, state, round, *masks: float):
    """The state after a round of clients whose masks are the same bit everywhere."""
    selection = method.select(state, round, Client(0, 1.0), 0)
    updates = [
        Update({"masks": {name: torch.full_like(t, bit) for name, t in state["probabilities"].items()}}, 1.0)
        for bit in masks
    ]
    return method.aggregate(state, round, iter([(selection, update) for update in updates]))


def theta(state) -> float:
    """The probability of a state that has the same everywhere."""
    [value] = {v for t in state["probabilities"].values() for v in t.flatten().tolist()}
    return value


def flat(params) -> torch.Tensor:
    return torch.cat([t.flatten() for t in params.values()])


@pytest.mark.parametrize(
    ("fields", "probability", "score"),
    [({}, 2 / 3, 0.6931), ({"soften": True}, 0.66333, 0.67818)],
)
def test_three_masks(fields, probability, score):
    method = bound(FedPM(**fields), 1.0)
    state = answers(method, method.init(0), 0, 1, 0, 1)
    assert theta(state) == pytest.approx(probability, abs=5e-6)
    assert math.log(theta(state) / (1 - theta(state))) == pytest.approx(score, abs=5e-5)


def test_no_score_is_infinite():
    for fields, lowest in (({}, 0.01), ({"epsilon": 0.1}, 0.1), ({"soften": True, "epsilon": 0.001}, 0.01)):
        method = bound(FedPM(**fields), 1.0)
        assert theta(answers(method, method.init(0), 0, 0, 0)) == pytest.approx(lowest)
        assert theta(answers(method, method.init(0), 0, 1, 1)) == pytest.approx(1 - lowest)


def test_a_prior_lives_until_its_reset():
    """2 of 3, then 0 of 1 more, then anew: 1 of 2."""
    method = bound(FedPM(prior_reset=2), 1.0)
    state, found = method.init(0), []
    for round, masks in enumerate([(1, 0, 1), (0,), (1, 0)]):
        state = answers(method, state, round, *masks)
        found.append(theta(state))
        bits = {name: {v for t in state[name].values() for v in t.flatten().tolist()} for name in ("alpha", "beta")}
    assert found == pytest.approx([2 / 3, 2 / 4, 1 / 2])
    assert bits == {"alpha": {2.0}, "beta": {2.0}}
    assert "alpha" not in bound(FedPM(), 1.0).init(0)


def test_the_inverse_of_the_participation():
    """3 of 10 clients a round: a reset every 4 rounds."""
    methods = [bound(FedPM(prior_reset=reset), 1.0) for reset in ("ceil_inv_participation", 4, 3)]
    states = [method.init(0) for method in methods]
    found = [[], [], []]
    for round in range(9):
        masks = (1, round % 2, 0)
        states = [answers(m, s, round, *masks) for m, s in zip(methods, states, strict=True)]
        for thetas, state in zip(found, states, strict=True):
            thetas.append(theta(state))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("reset", [1, 3])
def test_nobody_answers(reset):
    method = bound(FedPM(prior_reset=reset), 1.0)
    state = method.init(0)
    assert_same(method.aggregate(state, 0, iter([])), state)


def test_a_prior_is_reset_though_nobody_answers():
    """prior_reset 2: masks 1 and 1, then 1, then none, then 0, which meets a prior of nothing but the reset."""
    method = bound(FedPM(prior_reset=2, epsilon=0.01), 1.0)
    state = method.init(0)
    everything = method.select(state, 0, Client(0, 1.0), 0)

    def masks(sum_: float, count: int):
        ones = {name: torch.full_like(t, sum_) for name, t in state["probabilities"].items()}
        return iter([(everything, Update({"masks": ones}, float(count)))])

    for round, (sum_, count) in enumerate([(2.0, 2), (1.0, 1)]):
        state = method.aggregate(state, round, masks(sum_, count))
    silent = method.aggregate(state, 2, iter([]))
    assert_same(silent["probabilities"], state["probabilities"])
    state = method.aggregate(silent, 3, masks(0.0, 1))
    assert all(bool((t == 0.01).all()) for t in state["probabilities"].values())


@pytest.mark.parametrize(("twice", "expected"), [(False, [1 / 4, 1 / 9]), (True, [1 / 8, 2 / 27])])
def test_the_gradient_by_hand(twice, expected):
    """theta 1/2 and 2/3, w 1/2 and -1/2, upstream 2 and -1; a mask of 0 does not stop it."""
    scores = torch.tensor([0.0, math.log(2)], requires_grad=True)
    mask, weights = torch.tensor([True, False]), torch.tensor([0.5, -0.5])
    kept = _Keep.apply(scores, scores.detach().sigmoid(), mask, weights, twice)
    assert kept.tolist() == [0.5, 0.0]
    kept.backward(torch.tensor([2.0, -1.0]))
    torch.testing.assert_close(scores.grad, torch.tensor(expected))


def masked(method, value: float = 0.0):
    """The network of a method's clients, in training, with the same score everywhere."""
    model, net = method.task.model, method.task.server
    frozen = _frozen(model, net, method.init_c, method.task.seed, torch.device("cpu"))
    scores = torch.full_like(frozen.weights, value)
    return _Masked(model.build(net), frozen, scores, torch_generator(0, "masks"), False), frozen


def test_a_pass_runs_the_kept_weights():
    """The loss and its gradient are those of the network with weights m w."""
    network, frozen = masked(bound(FedPM(), 1.0, hidden=(7, 5)))
    x, y = torch.rand(6, 1, 1, 2, generator=torch_generator(0, "x")), torch.arange(6) % 4
    loss = torch.nn.functional.cross_entropy(network(x), y)
    loss.backward()
    net = bound(FedPM(), 1.0, hidden=(7, 5)).task.model.build(Net())
    kept = (frozen.weights * network.mask).requires_grad_()
    plain = torch.nn.functional.cross_entropy(functional_call(net, frozen.params(kept), (x,)), y)
    plain.backward()
    assert torch.equal(loss, plain)
    torch.testing.assert_close(network.scores.grad, kept.grad * frozen.weights * 0.25)


def test_every_pass_draws_a_mask():
    network, _ = masked(bound(FedPM(), 1.0, hidden=(1000,)), math.log(0.31 / 0.69))
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
    """-c or c of the layer's inputs, biases too, as often; the same for every seed of a client or a state."""
    method = bound(FedPM(init_c=init_c), 1.0, hidden=(50, 200))
    params = method.init(0)["params"]
    for layer, inputs in (("hidden0", 2), ("hidden1", 50), ("head", 200)):
        for kind in ("weight", "bias"):
            values = params[f"{layer}.{kind}"].abs()
            torch.testing.assert_close(values, torch.full_like(values, factor / math.sqrt(inputs)))
    signs = params["hidden1.weight"].sign()
    assert abs(float(signs.sum())) < 4 * math.sqrt(signs.numel())
    assert_same(method.init(1)["params"], params)
    other = method.bind(Task(method.task.model, Training(), {1.0: Net()}, 1.0, clients=10, seed=1))
    assert not torch.equal(other.init(0)["params"]["hidden1.weight"], params["hidden1.weight"])


def test_probabilities_start_around_a_half():
    """sigmoid(N(0, 1)), within the bounds: at most 0.731 in 84.13 per cent."""
    method = bound(FedPM(), 1.0, hidden=(100, 100))
    thetas = flat(method.init(0)["probabilities"])
    assert float((thetas < 1 / (1 + math.exp(-1))).float().mean()) == pytest.approx(0.8413, abs=0.015)
    assert 0.01 <= float(thetas.min()) and float(thetas.max()) <= 0.99
    assert not torch.equal(flat(method.init(1)["probabilities"]), thetas)


def test_norms_stay_as_they_start():
    model = MODELS["resnet18"](channels=2)
    method = FedPM().bind(Task(model, Training(), {1.0: Net()}, 1.0, clients=2))
    state = method.init(0)
    norms = state["params"].keys() - state["probabilities"].keys()
    assert norms == {name for name in state["params"] if "norm" in name}
    for deployed in (method.deploy(state, r, 1.0) for r in (0, 1)):
        assert set(deployed.masked) == state["probabilities"].keys()
        for name in norms:
            assert set(deployed.params[name].tolist()) == {float(name.endswith("weight"))}


@pytest.mark.parametrize("soften", [False, True])
def test_what_travels(soften):
    """Down: float32 probabilities and no weight. Up: a code of the bits that are averaged."""
    method = bound(FedPM(soften=soften), 1.0, hidden=(300,), optimizer="adam", lr=0.1, steps=3)
    state = method.init(0)
    selection = method.select(state, 0, Client(0, 1.0), 0)
    payload = method.extract(state, selection)
    n = 300 * 2 + 300 + 4 * 300 + 4
    assert list(payload) == ["probabilities"] and nbytes(payload) == 4 * n
    update = updated(method, state, 1.0, client_data(0, 1, 2, 3))
    bits = flat(update.sums["masks"])
    assert list(update.sums) == ["masks"] and set(bits.tolist()) == {0.0, 1.0}
    code = encode(bits)
    assert update.metrics["bytes_up"] == len(code) and torch.equal(decode(code, n).float(), bits)
    assert len(code) == pytest.approx(2 + n * entropy(float(bits.mean())) / 8, abs=8)
    assert len(code) < nbytes(payload) / 31


def test_masks_add():
    method = bound(FedPM(), 1.0, hidden=(30,), steps=1)
    state = method.init(0)
    data = client_data(0, 1, 2, 3)
    one, two = (updated(method, state, 1.0, data, seed) for seed in (0, 1))
    total = flat(one.sums["masks"]) + flat(two.sums["masks"])
    one.add(two)
    assert torch.equal(flat(one.sums["masks"]), total) and one.weight == 2
    selection = method.select(state, 0, Client(0, 1.0), 0)
    new = method.aggregate(state, 0, iter([(selection, one)]))
    assert torch.equal(flat(new["probabilities"]), (total / 2).clamp(0.01, 0.99))
    assert_same(new["params"], state["params"])


def test_an_untrained_client_draws_from_the_probabilities():
    method = bound(FedPM(), 1.0, hidden=(2000,), epochs=0)
    state = answers(method, method.init(0), 0, 1, 0, 0, 0)
    update = updated(method, state, 1.0, client_data(0, 1))
    bits = flat(update.sums["masks"])
    assert float(bits.sum()) == pytest.approx(len(bits) / 4, abs=4 * math.sqrt(len(bits) * 3 / 16))
    assert update.metrics["train_flops"] == 0


def test_training_costs_what_the_last_mask_keeps():
    """2 multiply-adds a hidden unit, 4 a unit of the head, of which the mask of the only step keeps a share."""
    method = bound(FedPM(), 1.0, hidden=(40,), steps=1)
    state = method.init(0)
    update = updated(method, state, 1.0, client_data(0, 1, 2), seed=5)
    thetas = flat(state["probabilities"]).logit().sigmoid()
    mask = torch.rand(len(thetas), generator=torch.Generator().manual_seed(stream(5, "masks"))) < thetas
    kept = int(mask[:80].sum()) + int(mask[120:280].sum())
    assert update.metrics["train_flops"] == pytest.approx(6 * 3 * kept)
    assert update.metrics["train_flops"] < training_flops(method.task.model, method.task.server, 3) == 6 * 3 * 240


def test_a_client_is_a_pure_function():
    method = bound(FedPM(), 1.0, hidden=(20,), optimizer="adam", lr=0.1, epochs=2, batch_size=2)
    state, data = method.init(0), client_data(0, 1, 2, 3, 0)
    before = {group: {name: t.clone() for name, t in tensors.items()} for group, tensors in state.items()}
    first, again, other = (updated(method, state, 1.0, data, seed) for seed in (3, 3, 4))
    assert_same(first.sums, again.sums)
    assert first.metrics == again.metrics
    assert not torch.equal(flat(first.sums["masks"]), flat(other.sums["masks"]))
    assert_same(state, before)


def test_everybody_runs_the_server_s_network():
    method = bound(FedPM(), 1.0, 0.5, 0.25, hidden=(8,))
    state = method.init(0)
    assert len({method.select(state, r, Client(0, c), 0).key for r in (0, 1) for c in (1.0, 0.25)}) == 1
    assert {method.deploy(state, 1, c).net for c in (1.0, 0.5, 0.25)} == {Net(1.0)}
    assert method.deploy(state, 1, 1.0).key == method.deploy(state, 1, 0.25).key


def test_a_device_runs_one_draw():
    method = bound(FedPM(), 1.0, hidden=(500,))
    state = answers(method, method.init(0), 0, 1, 0, 0, 0)
    deployed, again, later = (method.deploy(state, round, 1.0) for round in (1, 1, 2))
    assert_same(deployed.params, again.params)
    assert deployed.key == again.key != later.key
    assert not torch.equal(deployed.params["hidden0.weight"], later.params["hidden0.weight"])
    n = len(flat(state["probabilities"]))
    assert deployed.held.parameters == pytest.approx(n / 4, abs=4 * math.sqrt(n * 3 / 16))
    weights = deployed.params["head.weight"]
    assert torch.equal(weights, torch.where(weights != 0, state["params"]["head.weight"], 0))


def test_what_else_a_device_may_run():
    state = bound(FedPM(), 1.0).init(0)
    for kind, share in (("mean", lambda t: t), ("threshold", lambda t: (t > 0.5).float())):
        params = bound(FedPM(deployed=kind), 1.0).deploy(state, 1, 1.0).params
        for name, t in state["probabilities"].items():
            assert torch.equal(params[name], state["params"][name] * share(t))


@pytest.mark.parametrize(
    ("given", "field"),
    [({"weight": "samples"}, "weight"), ({"prior_reset": 0}, "prior_reset"), ({"epsilon": 0.5}, "epsilon")],
)
def test_what_makes_no_sense_is_refused(given, field):
    with pytest.raises(ConfigError, match=field):
        parse(FedPM, {"name": "fedpm"} | given, "method")


@pytest.mark.parametrize("fields", [{}, {"ste": "official_p"}, {"init_c": "official", "prior_reset": 2}])
def test_learns(fields):
    """Which of two pixels are bright: four classes, from three clients of which each sees all."""
    method = bound(FedPM(**fields), 1.0, hidden=(64,), optimizer="adam", lr=0.1, epochs=2, batch_size=16)
    pixels = torch.randint(256, (192, 1, 1, 2), generator=torch_generator(0, "pixels")).byte()
    bright = (pixels > 127).long().reshape(-1, 2)
    data = ClientData(pixels, bright[:, 0] * 2 + bright[:, 1], 4, Preprocessing(mean=(0.5,), std=(0.25,)))
    state = method.init(0)
    for round in range(4):
        state = one_round(method, state, *[(1.0, data)] * 3, round=round)
    deployed = method.deploy(state, 4, 1.0)
    net = deployed.model.build(deployed.net)
    net.load_state_dict(deployed.params)
    [(x, y)] = data.in_order(192)
    assert float((net(x).argmax(1) == y).float().mean()) > 0.8
