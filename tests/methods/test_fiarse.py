"""FIARSE by hand: Eq. 3, elements below the threshold, and the clients of the mean."""

import pytest
import torch
from helpers import assert_same, bound, client_data, folded, images, one_round, spread, updated
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from rayfl.core.net import Net
from rayfl.core.seeds import torch_generator
from rayfl.methods import METHODS, Client, Task, base
from rayfl.methods.masks import fiarse
from rayfl.methods.masks.fiarse import bracket
from rayfl.models import MODELS
from rayfl.training.settings import Training

FIARSE = METHODS["fiarse"]


def gradient(w, theta, slope):
    """Return the gradient of a loss that is linear in the effective weights, slope * w M(w)."""
    return slope * (w.abs() >= theta) * bracket(w, torch.as_tensor(theta, dtype=w.dtype))


@pytest.mark.parametrize("theta", [1e30, 1.0, 0.25, 1e-6, 1e-20, 1e-30, 1e-38])
def test_the_factors(theta):
    theta = float(torch.tensor(theta))
    w = theta * torch.tensor([1.0, -2.0, 4.0, 0.999, -0.0, 1e6])
    expected = torch.tensor([1.5, 13 / 9, 1.32, 0, 0, 1])
    torch.testing.assert_close(gradient(w, theta, 1.0), expected, rtol=1e-5, atol=0)


def test_without_a_threshold_the_factor_is_one():
    assert bracket(torch.tensor([0.0, -0.0, 3.0]), torch.tensor(torch.inf)).tolist() == [1, 1, 1]


def test_the_factor_is_the_product_rules():
    """The gradient of w M(w), where the derivative of the hard mask is that of the keep-probability p."""
    w = torch.tensor([-3.0, -1.2, 1.0, 1.7, 20.0], dtype=torch.float64, requires_grad=True)
    theta, slope = 1.0, torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0], dtype=torch.float64)
    p = (w.abs() - theta) / (w.abs() + theta)
    mask = (w.abs() >= theta).double()
    straight_through = mask + p - p.detach()
    (slope * w * straight_through).sum().backward()
    torch.testing.assert_close(w.grad, gradient(w.detach(), theta, slope))


@pytest.mark.parametrize("threshold", ["model", "layer"])
def test_the_gradient_of_a_convolutional_network(threshold):
    """Is autograd's of w (M + p - p.detach()) through all layers, norms and shortcuts; some of what was sent has fallen
    below the threshold."""
    net = Net(MODELS["resnet18"](input=(1, 8, 8), classes=4, channels=4))
    method = FIARSE(threshold=threshold).bind(Task(net.model, Training(), dict.fromkeys((1.0, 0.3), net), 1.0, 10))
    state = method.init()
    mask = method.submodel(state, 0, 0.3)
    payload = method.extract(state, mask)
    theta = {n: float(t) for n, t in payload["thresholds"].items()}
    held = {n: t.double() for n, t in payload["params"].items()}
    moved = {n: t * (1 - 0.2 * (torch.arange(t.numel()) % 3 == 0)).view(t.shape) for n, t in held.items()}
    module, [(x, y)] = net.build().double(), images(0, 1, 2, 3).in_order(4)

    above = fiarse.Above(module, mask, payload).start(moved)
    cross_entropy(above(x.double()), y).backward()
    above.scale_gradients()

    w = {n: t.requires_grad_() for n, t in spread(mask, moved, state["params"]).items()}
    u = dict(w)
    for n, limit in theta.items():
        kept = (w[n].abs() >= limit).double()
        p = kept * (w[n].abs() - limit) / (w[n].abs() + limit)
        u[n] = w[n] * (kept + p - p.detach())
    cross_entropy(functional_call(module, u, (x.double(),)), y).backward()
    assert sum(int((above.params[n].abs() < limit).sum()) for n, limit in theta.items()) > 500
    gradients = above.by_name(above.vector.grad)
    for n, t in mask.take({n: t.grad for n, t in w.items()}).items():
        torch.testing.assert_close(gradients[n], t)


def by_hand(method, state, capacity, data, steps):
    """Plain SGD with w M(w) in the forward pass and Eq. 3 in the backward pass, on dense tensors."""
    mask = method.select(state, Client(0, capacity, 0))
    theta = {name: float(t) for name, t in method.thresholds(state["params"], capacity).items()}
    w = spread(mask, mask.take(state["params"]), state["params"])
    module = method.task.server.build()
    for x, y in data.batches(steps, len(data), torch_generator(0, "test:any")):
        module.load_state_dict({name: t * (t.abs() >= theta[name]) for name, t in w.items()})
        module.zero_grad()
        cross_entropy(module(x), y).backward()
        slopes = {name: p.grad for name, p in module.named_parameters()}
        w = {name: t - method.task.training.lr * gradient(t, theta[name], slopes[name]) for name, t in w.items()}
    return mask, w


@pytest.mark.parametrize("threshold", ["model", "layer"])
def test_steps_by_hand(threshold):
    method = bound(FIARSE(threshold=threshold), 1.0, 0.4, hidden=(6,), lr=0.3, epochs=8)
    state, data = method.init(), client_data(0, 1, 2, 3)
    mask, w = by_hand(method, state, 0.4, data, 8)
    sent = updated(method, state, 0.4, data).sums["params"]
    theta = method.thresholds(state["params"], 0.4)
    assert any((t.abs() < theta[name]).any() for name, t in sent.items())
    for name, t in spread(mask, sent, state["params"]).items():
        torch.testing.assert_close(t, w[name])


def test_the_bracket_makes_a_difference():
    """One step is 1 to 1.5 times as long."""
    data, moved = client_data(0, 1, 2, 3), []
    for biased in (True, False):
        method = bound(FIARSE(biased_term=biased), 1.0, 0.4, hidden=(6,), lr=0.5)
        state = method.init()
        received = method.extract(state, method.select(state, Client(0, 0.4, 0)))["params"]
        sent = updated(method, state, 0.4, data).sums["params"]
        moved.append(torch.cat([sent[name] - t for name, t in received.items()]))
    ratio = (moved[0] / moved[1])[moved[1].abs() > 1e-3]
    assert len(ratio) > 5 and (1 < ratio).all() and (ratio <= 1.5 + 1e-4).all()


# what falls below the threshold


class Watched(fiarse.Above):
    """Keeps what every step ran with."""

    runs: list

    def forward(self, x):
        logits = super().forward(x)
        kept = self.by_name(self.kept(self.vector.detach()))
        self.runs.append({n: (kept[n].clone(), self.params[n].clone()) for n in self.mask.places})
        return logits


@pytest.fixture
def runs(monkeypatch):
    """(what was kept, w) of every masked tensor in every step."""
    monkeypatch.setattr(Watched, "runs", [], raising=False)
    monkeypatch.setattr(fiarse, "Above", Watched)
    return Watched.runs


OPTIMISERS = {
    "sgd": {"lr": 0.4},
    "momentum": {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1},
    "adamw": {"lr": 0.05, "optimizer": "adamw", "betas": (0.9, 0.95), "weight_decay": 0.1},
}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_dropped_elements_do_not_move(runs, optimiser):
    """At first everything is kept. What falls below the threshold never returns in the round, so that the kept count
    never grows, and has its value until the answer."""
    method = bound(FIARSE(), 1.0, 0.5, hidden=(8,), epochs=12, batch_size=2, **OPTIMISERS[optimiser])
    state = method.init()
    sent = updated(method, state, 0.5, client_data(0, 1, 2, 3)).sums["params"]
    assert all(kept.all() for kept, _ in runs[0].values())
    for before, after in zip(runs, runs[1:], strict=False):
        for name, (kept, w) in before.items():
            now, w_now = after[name]
            assert not (now & ~kept).any()
            assert torch.equal(w_now[~kept], w[~kept])
    dropped = 0
    for name, (kept, w) in runs[-1].items():
        assert torch.equal(sent[name][~kept], w[~kept])
        dropped += int((~kept).sum())
    assert dropped


@pytest.mark.parametrize(("optimiser", "moves"), [("sgd", False), ("momentum", True), ("adamw", True)])
def test_an_optimiser_can_move_dropped_elements(runs, optimiser, moves):
    """With `mask_update: false`; without momentum and decay it has nothing to move it by."""
    method = bound(FIARSE(mask_update=False), 1.0, 0.5, hidden=(8,), epochs=12, batch_size=2, **OPTIMISERS[optimiser])
    updated(method, method.init(), 0.5, client_data(0, 1, 2, 3))
    moved = any(
        not torch.equal(after[name][1][~kept], w[~kept])
        for before, after in zip(runs, runs[1:], strict=False)
        for name, (kept, w) in before.items()
    )
    assert moved is moves


def test_masked_updates_are_plain_ones_where_nothing_moves_by_itself():
    """SGD without momentum, to the bit."""
    answers = []
    for mask_update in (True, False):
        method = bound(FIARSE(mask_update=mask_update), 1.0, 0.5, hidden=(8,), lr=0.4, epochs=12, batch_size=2)
        answers.append(updated(method, method.init(), 0.5, client_data(0, 1, 2, 3)).sums)
    assert_same(*answers)


# whom the mean is over


@pytest.mark.parametrize(("count", "bias"), [("holders", [2.0, 1.5, 2.0, 4.0]), ("nonzero", [3.0, 2.0, 2.0, 4.0])])
def test_clients_in_the_mean(count, bias, monkeypatch):
    """Two clients that hold everything start from 1, 1, 2, 4; the first answers 3, 2, 2, 4, the second what it got."""
    method = bound(FIARSE(count=count), 1.0, hidden=(2,))
    state = method.init()
    state["params"]["head.bias"] = torch.tensor([1.0, 1.0, 2.0, 4.0])
    answers = iter([torch.tensor([3.0, 2.0, 2.0, 4.0]), torch.tensor([1.0, 1.0, 2.0, 4.0])])

    def answer(above, *args, **kwargs):
        with torch.no_grad():
            above.params["head.bias"].copy_(next(answers))
        return {"train_loss": 0.0, "train_samples": 1, "steps": 1}

    monkeypatch.setattr(base, "fit", answer)
    new = one_round(method, state, (1.0, client_data(0)), (1.0, client_data(1)))["params"]
    assert new["head.bias"].tolist() == bias
    assert_same(
        {n: t for n, t in new.items() if n != "head.bias"},
        {n: t for n, t in state["params"].items() if n != "head.bias"},
    )


def test_nonzero_updates_of_parts():
    """A client that holds everything and does not train does not hold the other's elements back."""
    method = bound(FIARSE(count="nonzero", weight="samples"), 1.0, 0.4, hidden=(6,), lr=0.3)
    state, data = method.init(), client_data(0, 1, 2, 3)
    selection = method.select(state, Client(0, 0.4, 0))
    part = updated(method, state, 0.4, data)
    idle = bound(FIARSE(count="nonzero", weight="samples"), 1.0, 0.4, hidden=(6,), epochs=0)
    whole = (idle.select(state, Client(1, 1.0, 0)), updated(idle, state, 1.0, data))
    new = method.step(state, 0, folded(state, whole, (selection, part)))["params"]
    old = selection.take(state["params"])
    for name, t in selection.take(new).items():
        sent = part.sums["params"][name] / part.weight
        torch.testing.assert_close(t, torch.where(part.row_weights[name] > 0, sent, old[name]))
    outside = selection.cover(state["params"])
    assert all(torch.equal(new[n][t == 0], state["params"][n][t == 0]) for n, t in outside.items())
