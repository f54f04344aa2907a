"""ScaleFL against manual computations: its loss, and networks cut in width and depth."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, bound, client_data, one_round, visit
from test_exits import ExitPerceptron, at, names, staged

from rayfl.clients import Population
from rayfl.config import ConfigError, parse
from rayfl.core.net import Net
from rayfl.core.seeds import torch_generator
from rayfl.costs import cost_of, width_for
from rayfl.methods import METHODS
from rayfl.models import MODELS

ScaleFL = METHODS["scalefl"]


def drawn_logits():
    """Return fixed logits of three exits, 5 samples and 4 classes."""
    generator = torch_generator(0, "test:logits")
    return tuple(torch.randn(5, 4, generator=generator, requires_grad=True) for _ in range(3))


# the loss


def test_the_loss():
    """Two classes, one sample: CE ln 2, ln 4/3 and ln 10/9, with the exits' p at T = 1 1/2, 3/4 and 9/10."""
    logits = tuple(torch.log(torch.tensor([[1.0, odds]])) for odds in (1, 3, 9))
    y = torch.tensor([1])
    labels = [math.log(2), math.log(4 / 3), math.log(10 / 9)]
    plain = 2 / 12 * (labels[0] + 2 * labels[1] + 3 * labels[2])
    assert ScaleFL().loss(at(0))(logits, y).item() == pytest.approx(plain, rel=1e-5)
    # at T = 2 the teacher is (1/4, 3/4), and the students (1/2, 1/2) and (1, sqrt 3) / (1 + sqrt 3)
    second = math.sqrt(3) / (1 + math.sqrt(3))
    towards = [0.25 * math.log(0.25 / (1 - p)) + 0.75 * math.log(0.75 / p) for p in (0.5, second)]
    distilled = plain + 2 / 12 * 0.1 * 4 * (towards[0] + 2 * towards[1])
    method = ScaleFL(gamma=0.1, temperature=2)
    assert method.loss(at(0))(logits, y).item() == pytest.approx(distilled, rel=1e-5)


def test_distillation_starts_at_distill_from():
    logits, y = drawn_logits(), torch.tensor([0, 1, 2, 3, 0])
    method, plain = ScaleFL(gamma=0.1, distill_from=5), ScaleFL().loss(at(0))(logits, y)
    values = [method.loss(at(round))(logits, y) for round in (0, 4, 5, 6)]
    assert values[0] == values[1] == plain < values[2] == values[3]


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("reduction", ["batchmean", "mean"])
def test_gradients_of_the_divergence(detach, reduction):
    """T^2 D over the batch, or over batch and classes; with `detach: false` the last exit has a gradient too."""
    logits = drawn_logits()
    y = torch.tensor([0, 1, 2, 3, 0])
    options = {"gamma": 0.1, "detach": detach, "reduction": reduction}
    ScaleFL(**options).loss(at(0))(logits, y).backward()
    twin = drawn_logits()
    teacher = (twin[2] / 3).softmax(1)
    teacher = teacher.detach() if detach else teacher
    expected = 3 * F.cross_entropy(twin[2], y)
    for j in (0, 1):
        student = (twin[j] / 3).softmax(1)
        divergence = (teacher * (teacher / student).log()).sum() / (5 if reduction == "batchmean" else 20)
        expected = expected + (j + 1) * (F.cross_entropy(twin[j], y) + 0.1 * 9 * divergence)
    (expected / 6).backward()
    for z, other in zip(logits, twin, strict=True):
        torch.testing.assert_close(z.grad, other.grad)
    alone = drawn_logits()[2]
    (F.cross_entropy(alone, y) / 2).backward()
    assert torch.allclose(alone.grad, logits[2].grad, rtol=0, atol=1e-7) == detach


@pytest.mark.parametrize("extra", [{}, {"momentum": 0.9, "weight_decay": 0.1, "clip": 1.0}], ids=str)
def test_one_exit_of_full_width_is_fedavg(extra):
    """Equal bit for bit."""
    data, states = client_data(0, 1, 2, 3, 1), []
    for method in (ScaleFL(gamma=0.1), METHODS["fedavg"](weight="uniform")):
        method = bound(method, 1.0, hidden=(3, 3), batch_size=2, **extra)
        state = one_round(method, method.init(), (1.0, data), (1.0, client_data(2, 3)))
        states.append(one_round(method, state, (1.0, data), round=1))
    assert_same(*states)


# networks


def test_the_published_networks():
    """Parameters of the four levels of the authors' ResNet110 with 10 classes."""
    model = MODELS["scalefl_resnet110"](init="torch")
    capacities = (0.079, 0.164, 0.395, 1.0)
    method = staged(ScaleFL(widths=(0.7, 0.7, 0.75, 1)), *capacities, model=model)
    nets = [method.task.nets[c] for c in capacities]
    assert [(net.width, net.exits, net.rounding) for net in nets] == [
        (0.7, 1, "down"),
        (0.7, 2, "down"),
        (0.75, 3, "down"),
        (1.0, 4, "down"),
    ]
    assert [net.parameters for net in nets] == [157453, 325631, 783402, 1982136]


def test_widths_are_floors():
    """0.7 of 4, 5 and 9."""
    model = ExitPerceptron(hidden=(4, 5, 9))
    method = staged(ScaleFL(widths=(0.7, 0.7, 1)), 1.0, 0.5, 0.25, model=model)
    shapes = method.task.nets[0.5].layout.shapes
    assert (shapes["hidden1.weight"], shapes["hidden2.weight"]) == ((2, 2), (3, 2))
    assert shapes["exit2.weight"] == (4, 3)
    selection = visit(method, method.init(), 0.5, client_data(0)).selection
    assert selection.positions["hidden2"].positions == (0, 1, 2)
    assert selection.net.scale == 0.7
    plain = method.model_copy(update={"scaler": False})
    assert visit(plain, plain.init(), 0.5, client_data(0)).net.scale == 1


def test_capacities_by_width_are_the_widths():
    method = staged(ScaleFL(), 0.8, 0.6, 0.3)
    assert {c: net.width for c, net in method.task.nets.items()} == {0.8: 0.8, 0.6: 0.6, 0.3: 0.3}
    assert visit(method, method.init(), 0.3, client_data(0)).net.scale == pytest.approx(0.3 / 0.8)


@pytest.mark.parametrize("metric", ["params", "flops"])
def test_the_largest_width_within_a_capacity(metric):
    """Including its exits; the next larger width exceeds the capacity."""
    model = ExitPerceptron(hidden=(12, 8, 6), input=(1, 2, 2))
    cost = cost_of(metric)
    widths = sorted({j / size for size in model.hidden for j in range(1, size + 1) if 6 * j >= size})
    method = staged(ScaleFL(), 1.0, 0.5, 0.25, model=model, metric=metric)
    whole = Net(model, exits=3, rounding="down")
    assert method.task.server == whole
    for capacity, exits in ((0.5, 2), (0.25, 1)):
        net, budget = method.task.nets[capacity], capacity * cost(whole)
        spent = {width: cost(Net(model, width, exits=exits, rounding="down")) for width in widths}
        assert cost(net) <= budget
        assert max(width for width in widths if spent[width] <= budget) == net.width
        assert net.width < 1 and max(spent.values()) > budget
        for width in widths:
            assert width_for(net, spent[width] / cost(whole), metric) >= width


def test_widths_are_at_most_the_servers():
    """Half of the full network's parameters: all channels of the first layer, but a part of the third."""
    model = ExitPerceptron(hidden=(2, 4, 16))
    assert width_for(Net(model, exits=1, rounding="down"), 0.4, "params") == 1
    method = staged(ScaleFL(exits=(1, 3)), 0.5, 0.4, model=model, metric="params")
    widths = {c: net.width for c, net in method.task.nets.items()}
    assert widths[0.4] == widths[0.5] < 1


def test_heads_without_holders_are_unchanged():
    """Channels too: the holder mean."""
    method = staged(ScaleFL(widths=(0.5, 0.75, 1)), 1.0, 0.5, 0.25, lr=0.3)
    state, data = method.init(), client_data(0, 1, 2, 3)
    before, after = state["params"], one_round(method, state, (0.25, data), (0.5, data))["params"]
    deeper = names(method, 1.0) - names(method, 0.5)
    assert deeper == {f"{layer}.{kind}" for layer in ("hidden3", "head") for kind in ("weight", "bias")}
    assert_same({n: after[n] for n in deeper}, {n: before[n] for n in deeper})
    for name in ("hidden2.weight", "exit2.weight", "exit1.weight"):
        changed = (after[name] != before[name]).nonzero()
        assert changed[:, 1].max() <= 2 and torch.equal(after[name][:, 3], before[name][:, 3])
    assert (after["exit1.weight"] != before["exit1.weight"]).any()


# errors


def test_invalid_widths():
    for widths in ([0.7, 0.5], [0.5, 1.1], [0, 1]):
        with pytest.raises(ConfigError) as error:
            parse(ScaleFL, {"name": "scalefl", "widths": widths}, "test: method")
        assert str(error.value) == (
            f"test: method.widths: {widths} is not valid. Allowed: ascending widths in (0, 1], because larger "
            "capacities include the channels of smaller ones"
        )
    with pytest.raises(ConfigError) as error:
        staged(ScaleFL(widths=(0.5, 1)), 1.0, 0.5, 0.25)
    assert str(error.value) == (
        "method.widths: [0.5, 1.0] is not valid. Allowed: 3 widths, one per capacity, smallest capacity first"
    )


def test_a_capacity_below_the_narrowest_network():
    model = ExitPerceptron(hidden=(4, 3, 2))
    with pytest.raises(ConfigError) as error:
        staged(ScaleFL(), 1.0, 0.5, 0.01, model=model, metric="params")
    assert str(error.value) == (
        "capacity 0.01 by params: the narrowest network of model exit_perceptron exceeds it. Allowed: 0.217 to 1"
    )


@pytest.mark.parametrize("option", [{"temperature": 2}, {"distill_from": 1}, {"detach": False}, {"reduction": "mean"}])
def test_distillation_options_need_gamma(option):
    with pytest.raises(ValueError, match="only with gamma > 0"):
        ScaleFL(**option)


def test_distill_from_is_below_rounds():
    method = ScaleFL(gamma=0.1, distill_from=10)
    with pytest.raises(ConfigError) as error:
        method.check(10, Population())
    assert str(error.value) == "method.distill_from: 10 is not valid. Allowed: less than the run's 10 rounds"
    method.check(11, Population())
