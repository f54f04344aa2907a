"""Local training: learning rate schedules, counts, losses and steps."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rayfl.core.fold import Update
from rayfl.core.seeds import torch_generator
from rayfl.data.goal import Classes
from rayfl.data.images import Images
from rayfl.data.samples import ClientData
from rayfl.training.settings import Training, answered, divergence, every_exit, mask_logits
from rayfl.training.steps import fit
from rayfl.training.updates import Updates

# --- the schedule ---


def test_a_milestone_applies_from_the_next_round():
    """Rounds are counted from 0: 150 rounds at the first learning rate, the 151st at a tenth of it."""
    training = Training(lr=0.1, milestones=(150, 250))
    rates = [training.lr_at(round) for round in (0, 149, 150, 249, 250)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])


def test_round_decay():
    training = Training(lr=0.1, round_decay=0.5, milestones=(2,), decay=0.1)
    assert [training.lr_at(r) for r in range(4)] == pytest.approx([0.1, 0.05, 0.0025, 0.00125])
    floored = training.model_copy(update={"floor": 0.002})
    for wrong in ({"floor": 0.2}, {"floor": 0.01, "cosine_rounds": 10}):
        with pytest.raises(ValueError, match="floor"):
            Training(lr=0.1, **wrong)
    assert [floored.lr_at(r) for r in range(4)] == pytest.approx([0.1, 0.05, 0.0025, 0.002])


def rates(training, round, samples=7):
    rate = training.rate(round, samples)
    return [rate(step) for step in range(training.batches_of(samples))] if callable(rate) else rate


def test_a_rate_that_is_constant_in_a_round_is_a_number():
    training = Training(lr=0.1, milestones=(2,))
    assert [rates(training, r) for r in range(3)] == [training.lr_at(r) for r in range(3)]


@pytest.mark.parametrize("schedule", [{"cosine_rounds": 4}, {"warmup": 6}])
def test_more_steps_than_those_of_a_round_share_its_part_of_the_schedule(schedule):
    """7 samples in batches of 4: 2 steps per round; 10 steps go from the first rate of a round to the next one's."""
    training = Training(lr=0.1, epochs=1, batch_size=4, **schedule)
    plain, spread = training.rate(1, 7), training.rate(1, 7, 10)
    assert callable(plain) and callable(spread)
    assert [spread(step) for step in (0, 5, 10)] == pytest.approx([plain(0), plain(1), plain(2)])
    assert [spread(step) for step in range(10)] == sorted(
        (spread(s) for s in range(10)), reverse="warmup" not in schedule
    )
    fewer = training.rate(1, 7, 1)
    assert callable(fewer) and fewer(0) == plain(0)


def test_warm_up_goes_by_a_clients_own_steps_across_rounds():
    """7 samples in batches of 4: 2 steps per round; 1 sample: 1 step."""
    training = Training(lr=0.8, warmup=4, batch_size=4)
    assert [rates(training, r) for r in range(3)] == [[0, 0.2], pytest.approx([0.4, 0.6]), [0.8, 0.8]]
    assert sum((rates(training, r, samples=1) for r in range(5)), []) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])


def test_the_cosine_begins_where_the_warm_up_ends_and_ends_at_zero():
    """5 rounds of 2 steps, 4 of warm-up and 6 of decay: cosines of 0, 30, ..., 150 degrees; then 0."""
    training = Training(lr=2, warmup=4, cosine_rounds=5, batch_size=4)
    root = math.sqrt(3) / 2
    assert rates(training, 1) == pytest.approx([1, 1.5])
    assert sum((rates(training, r) for r in (2, 3, 4)), []) == pytest.approx([2, 1 + root, 1.5, 1, 0.5, 1 - root])
    assert rates(training, 5) == rates(training, 90) == [0, 0]


def test_milestones_and_decays_apply_to_warm_up_and_cosine():
    training = Training(lr=1, warmup=4, batch_size=4, milestones=(1,), round_decay=0.5)
    assert rates(training, 1) == pytest.approx([0.5 * 0.1 * 0.5, 0.75 * 0.1 * 0.5])


# --- what is counted in advance ---


@pytest.mark.parametrize("samples", [1, 4, 10])
@pytest.mark.parametrize("amount", [{"epochs": 0}, {"epochs": 3}, *({"steps": n} for n in (1, 2, 3, 7))])
def test_batches_and_samples_are_counted_in_advance(samples, amount):
    training = Training(batch_size=4, **amount)
    pixels = torch.zeros(samples, 1, 2, 2, dtype=torch.uint8)
    data = ClientData({"x": pixels, "y": torch.zeros(samples, dtype=torch.long)}, Images(), Classes(4))
    batches = data.batches(training.batches_of(samples), training.batch_size, torch_generator(0, "batches"))
    found = [len(y) for _, y in batches]
    assert len(found) == training.batches_of(samples)
    assert sum(found) == training.samples_of(samples)


@pytest.mark.parametrize(
    ("training", "moves"),
    [
        ({}, False),
        ({"clip": 1.0, "milestones": (1,)}, False),
        ({"momentum": 0.1}, True),
        ({"weight_decay": 0.1}, True),
        ({"optimizer": "adam"}, True),
    ],
    ids=str,
)
def test_whether_a_step_changes_parameters_with_zero_gradient(training, moves):
    """A parameter with the gradient 1 in the first step, then 0."""
    assert Training(**training).moves_at_rest == moves
    once, _ = steps(Training(**training), [[1.0]])
    then, _ = steps(Training(**training), [[1.0], [0.0]])
    assert (once != then) == moves


# --- losses ---


def test_masked_logits():
    logits, present = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([True, False, True])
    assert mask_logits(logits, present, "none").tolist() == [[1, 2, 3]]
    assert mask_logits(logits, present, "zero").tolist() == [[1, 0, 3]]
    assert mask_logits(logits, present, "neg_inf").tolist() == [[1, float("-inf"), 3]]


@pytest.mark.parametrize(("fill", "loss"), [("none", 10), ("zero", 10), ("neg_inf", 3)])
def test_loss_of_equal_logits(fill, loss):
    """ln of the number of classes in the softmax: all C, or the present ones."""
    logits, present = torch.zeros(2, 10), torch.arange(10) < 3
    value = F.cross_entropy(mask_logits(logits, present, fill), torch.tensor([0, 2]))
    assert value.item() == pytest.approx(math.log(loss))


@pytest.mark.parametrize("fill", ["zero", "neg_inf"])
def test_absent_classes_get_no_gradient(fill):
    head = nn.Linear(5, 4)
    x = torch.randn(6, 5, generator=torch_generator(0, "test:x"))
    present = torch.tensor([True, False, True, False])
    y = torch.tensor([0, 2, 0, 2, 2, 0])
    F.cross_entropy(mask_logits(head(x), present, fill), y).backward()
    for parameter in (head.weight, head.bias):
        rows = parameter.grad.abs().reshape(4, -1).sum(1)
        assert torch.equal(rows > 0, present)


def test_predictions_of_exits_and_head():
    first, last = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 8.0]])
    assert every_exit(last) == (last,) and every_exit((first, last)) == (first, last)
    assert answered(last, "last") is last and answered(last, "mean") is last
    assert answered((first, last), "last") is last
    assert answered((first, last), "mean").tolist() == [[2, 5]]
    assert answered((last,), "mean") is last


def test_without_rows_the_divergence_is_0():
    """As of a batch of texts that is padding only."""
    assert divergence(torch.zeros(0, 3), torch.zeros(0, 3), 1.0) == 0


def test_divergence_by_hand():
    """Softmaxes of T ln 3 : 0 at temperature T are 3/4 and 1/4."""
    teacher, even = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]]), torch.zeros(2, 2)
    one = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    for temperature in (1.0, 2.0):
        assert divergence(temperature * teacher, even, temperature).item() == pytest.approx(one / 2)
    assert divergence(teacher, teacher, 1.0).item() == pytest.approx(0, abs=1e-7)
    other = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert divergence(even, teacher, 1.0).item() == pytest.approx(other / 2)


# --- steps ---


class Scalar(nn.Module):
    """x -> w x, one parameter."""

    def __init__(self, w: float):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))

    def forward(self, x):
        return self.w * x


def steps(training, xs, w=1.0, lr=0.1, adjust=None, project=None, momentum=None):
    """w after minimising the mean of w x: the gradient is the mean of x."""
    module = Scalar(w)
    given = ((torch.tensor(x), torch.zeros(len(x))) for x in xs)
    metrics = fit(module, given, lambda out, y: out.mean(), training, lr, adjust, project, momentum)
    return module.w.item(), metrics


def test_a_step_of_sgd():
    w, metrics = steps(Training(), [[2.0, 4.0]])
    assert w == pytest.approx(1 - 0.1 * 3)
    assert metrics == {"train_loss": pytest.approx(2 * 3), "train_samples": 2, "steps": 1}


def test_momentum_is_resumed():
    training, xs, kept = Training(momentum=0.5), [[2.0], [4.0], [-1.0], [3.0]], {}
    straight, _ = steps(training, xs)
    halfway, _ = steps(training, xs[:2], momentum=kept)
    assert kept["w"].tolist() == [0.5 * 2 + 4]
    assert steps(training, xs[2:], w=halfway, momentum=kept)[0] == straight
    assert steps(training, xs[2:], w=halfway)[0] != straight


def test_a_rate_for_every_step_counted_from_0():
    w, _ = steps(Training(), [[1.0], [1.0], [2.0]], lr=lambda step: [0.0, 0.5, 0.25][step])
    assert w == pytest.approx(1 - 0.5 * 1 - 0.25 * 2)
    assert steps(Training(), [], lr=lambda step: 0.1)[0] == 1


def test_momentum_keeps_gradients_and_not_rates():
    """v = 0.5 v + x, and each step subtracts its own rate times v."""
    w, _ = steps(Training(momentum=0.5), [[1.0], [1.0]], lr=lambda step: 0.1 * (step + 1))
    assert w == pytest.approx(1 - 0.1 * 1 - 0.2 * 1.5)


def test_loss_is_a_sum_over_samples():
    _, metrics = steps(Training(), [[2.0, 4.0], [1.0]])
    assert metrics["train_loss"] == pytest.approx(2 * 3 + 1 * 0.7)
    assert (metrics["train_samples"], metrics["steps"]) == (3, 2)


def test_momentum_and_weight_decay():
    """v = 0.5 v + x + 0.1 w; w -= 0.1 v."""
    w, _ = steps(Training(momentum=0.5, weight_decay=0.1), [[1.0], [1.0]])
    first = 1 - 0.1 * 1.1
    assert w == pytest.approx(first - 0.1 * (0.5 * 1.1 + 1 + 0.1 * first))


def test_clipping_bounds_the_whole_gradient():
    assert steps(Training(clip=2.0), [[30.0]])[0] == pytest.approx(1 - 0.1 * 2)
    assert steps(Training(clip=2.0), [[1.5]])[0] == pytest.approx(1 - 0.1 * 1.5)


def test_adjusting_comes_before_clipping():
    def double(module):
        module.w.grad.mul_(2)

    assert steps(Training(clip=3.0), [[2.0]], adjust=double)[0] == pytest.approx(1 - 0.1 * 3)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_by_hand(optimizer):
    """Means of 1, 3 and of their squares, the last with weights 1/2 and 1/4, without the bias of their start at 0:
    (1 + 2 * 3) / 3 and (3 * 1 + 4 * 9) / 7. The first step is the rate, whatever the gradient."""
    training = Training(optimizer=optimizer, betas=(0.5, 0.75))
    assert steps(training, [[1.0]])[0] == pytest.approx(1 - 0.1)
    assert steps(training, [[1.0], [3.0]])[0] == pytest.approx(1 - 0.1 - 0.1 * (7 / 3) / (39 / 7) ** 0.5)
    assert steps(training, [[1.0], [3.0]], lr=lambda step: 0.1 * step)[0] == pytest.approx(
        1 - 0.1 * (7 / 3) / (39 / 7) ** 0.5
    )
    assert steps(Training(optimizer=optimizer), [[1.0], [3.0]])[0] != steps(training, [[1.0], [3.0]])[0]


def test_weight_decay_of_adam_and_adamw():
    """w - 0.1, for a gradient of 2 + 0.5 w as of 2; or 0.1 * 0.5 w more."""
    assert steps(Training(optimizer="adam", weight_decay=0.5), [[2.0]])[0] == pytest.approx(0.9)
    assert steps(Training(optimizer="adamw", weight_decay=0.5), [[2.0]])[0] == pytest.approx(0.9 - 0.05)
    against = Training(optimizer="adam", weight_decay=0.5)
    assert steps(against, [[-0.4]])[0] == pytest.approx(0.9)  # -0.4 + 0.5 > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": "adam", "momentum": 0.9}, "momentum only with optimizer: sgd; adam has betas"),
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum only with optimizer: sgd; adamw has betas"),
        ({"betas": (0.9, 0.95)}, "betas only with optimizer: adam or adamw"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, "less than 1"),
    ],
    ids=str,
)
def test_settings_of_another_optimizer_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Training(**given)


def test_projecting_comes_after_every_step():
    """0.9, 0.8, which becomes 0.85, 0.95. The loss is that of the bounded parameters."""

    def bound(module):
        with torch.no_grad():
            module.w.clamp_(min=0.85)

    xs = [[1.0], [1.0], [-1.0]]
    assert steps(Training(), xs)[0] == pytest.approx(0.9)
    w, metrics = steps(Training(), xs, project=bound)
    assert w == pytest.approx(0.95)
    assert metrics["train_loss"] == pytest.approx(1 + 0.9 - 0.85)


def test_no_steps_change_nothing():
    assert steps(Training(), []) == (1.0, {"train_loss": 0.0, "train_samples": 0, "steps": 0})


def test_the_loss_receives_the_output_of_the_network():
    """Also for a tuple of the logits of several exits."""

    class Exits(Scalar):
        def forward(self, x):
            return self.w * x, 3 * self.w * x

    def loss(logits, y):
        first, last = every_exit(logits)
        return first.mean() + last.mean()

    module = Exits(1.0)
    metrics = fit(module, iter([(torch.tensor([2.0]), torch.zeros(1))]), loss, Training(), 0.1)
    assert module.w.item() == pytest.approx(1 - 0.1 * 8) and metrics["train_loss"] == 8


def test_a_frozen_parameter_stays():
    module = nn.Sequential(Scalar(2.0), Scalar(3.0))
    module[0].w.requires_grad_(False)
    momentum = {}
    fit(module, iter([(torch.tensor([1.0]), torch.zeros(1))]), lambda out, y: out.mean(), Training(momentum=0.5), 0.1,
        momentum=momentum)  # fmt: skip
    assert module[0].w.item() == 2 and module[1].w.item() == pytest.approx(3 - 0.1 * 2)
    assert momentum.keys() == {"1.w"}


def test_the_limit_of_an_update_by_hand():
    w, updates = torch.full((4,), 3.0), Updates(growth=2.0)
    heavy = Update({"params": {"w": 50 * w}}, 50.0)
    assert updates.unfit(heavy, 2.5) is None
    assert updates.unfit(heavy, 1.9) == "norm 6 over the limit 5.8"
    kept = Update({"params": {"w": w}}, 1.0, client_states={7: {"own": {"w": 2 * w}}})
    assert updates.unfit(kept, 2.5) == "norm 12 over the limit 7" and updates.unfit(kept, 0.0) is None


def test_counts_are_no_part_of_the_norm_that_is_limited():
    """A client with 4,000 samples of each of two classes."""
    counts = {"labels": {"counts": torch.tensor([4000.0, 4000.0])}}
    update = Update({"params": {"w": torch.ones(4)}}, 1.0, counts, as_is=frozenset({"labels"}))
    assert Updates().unfit(update, 1.8) is None
    update.whole["labels"]["counts"][0] = math.nan
    assert Updates().unfit(update, 1.8) == "not finite"
