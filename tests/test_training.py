"""Local training: schedule, batches, augmentation, the SGD step, evaluation."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rayfl.data import CIFAR10
from rayfl.seeds import torch_generator
from rayfl.training import ClientData, Preprocessing, Training, evaluate, fit, mask_logits, weighted


def data(samples=10, classes=4, preprocess=None, size=6):
    """Image i is i everywhere, its label i mod classes."""
    pixels = torch.arange(samples, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, size, size).clone()
    return ClientData(pixels, torch.arange(samples) % classes, classes, preprocess or Preprocessing(scale=1.0))


def batches(given, seed=0, **training):
    return list(given.batches(Training(**training), torch_generator(seed, "batches")))


# the schedule


def test_a_milestone_is_felt_in_the_first_round_after_it():
    """Rounds are counted from 0 here, from 1 in print: 150 rounds at the first rate, the 151st at a tenth."""
    training = Training(lr=0.1, milestones=(150, 250))
    rates = [training.lr_at(round) for round in (0, 149, 150, 249, 250)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])


def test_decay_of_every_round():
    training = Training(lr=0.1, round_decay=0.5, milestones=(2,), decay=0.1)
    assert [training.lr_at(r) for r in range(4)] == pytest.approx([0.1, 0.05, 0.0025, 0.00125])
    floored = training.model_copy(update={"floor": 0.002})
    assert [floored.lr_at(r) for r in range(4)] == pytest.approx([0.1, 0.05, 0.0025, 0.002])


def rates(training, round, samples=7):
    rate = training.rate(round, samples)
    return [rate(step) for step in range(training.batches_of(samples))] if callable(rate) else rate


def test_a_rate_that_is_constant_in_a_round_is_a_number():
    training = Training(lr=0.1, milestones=(2,))
    assert [rates(training, r) for r in range(3)] == [training.lr_at(r) for r in range(3)]


def test_warm_up_goes_by_a_clients_own_steps_across_rounds():
    """7 samples in batches of 4: 2 steps a round; 1 sample: 1 step."""
    training = Training(lr=0.8, warmup=4, batch_size=4)
    assert [rates(training, r) for r in range(3)] == [[0, 0.2], pytest.approx([0.4, 0.6]), [0.8, 0.8]]
    assert sum((rates(training, r, samples=1) for r in range(5)), []) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])


def test_the_cosine_begins_where_the_warm_up_ends_and_ends_at_zero():
    """5 rounds of 2 steps, of which 4 warm up and 6 fall: cosines of 0, 30, ..., 150 degrees; then 0 for ever."""
    training = Training(lr=2, warmup=4, cosine_rounds=5, batch_size=4)
    root = math.sqrt(3) / 2
    assert rates(training, 1) == pytest.approx([1, 1.5])
    assert sum((rates(training, r) for r in (2, 3, 4)), []) == pytest.approx([2, 1 + root, 1.5, 1, 0.5, 1 - root])
    assert rates(training, 5) == rates(training, 90) == [0, 0]


def test_milestones_and_decays_apply_to_warm_up_and_cosine():
    training = Training(lr=1, warmup=4, batch_size=4, milestones=(1,), round_decay=0.5)
    assert rates(training, 1) == pytest.approx([0.5 * 0.1 * 0.5, 0.75 * 0.1 * 0.5])


# batches


def test_every_sample_once_an_epoch_and_the_last_batch_is_kept():
    found = batches(data(10), batch_size=4, epochs=2)
    assert [len(y) for _, y in found] == [4, 4, 2] * 2
    epochs = [torch.cat([x[:, 0, 0, 0] for x, _ in found[i : i + 3]]) for i in (0, 3)]
    assert [sorted(epoch.tolist()) for epoch in epochs] == [list(range(10))] * 2
    assert not torch.equal(*epochs)
    for x, y in found:
        assert torch.equal(x[:, 0, 0, 0].long() % 4, y)


def test_batches_are_a_function_of_their_seed():
    first, again, other = (batches(data(10), seed, batch_size=4) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for (a, _), (b, _) in zip(first, other, strict=True))


@pytest.mark.parametrize("samples", [1, 4, 10])
@pytest.mark.parametrize("amount", [{"epochs": 0}, {"epochs": 3}, *({"steps": n} for n in (1, 2, 3, 7))])
def test_batches_and_samples_are_counted_in_advance(samples, amount):
    training = Training(batch_size=4, **amount)
    found = [len(y) for _, y in batches(data(samples), batch_size=4, **amount)]
    assert len(found) == training.batches_of(samples)
    assert sum(found) == training.samples_of(samples)


def test_evaluation_goes_through_the_data_in_order():
    found = list(data(10).in_order(4))
    assert torch.cat([y for _, y in found]).tolist() == data(10).labels.tolist()
    assert [len(y) for _, y in found] == [4, 4, 2]


def test_the_label_set():
    given = ClientData(torch.zeros(3, 1, 1, 1), torch.tensor([3, 1, 1]), 5)
    assert given.present.tolist() == [False, True, False, True, False]


# from pixels to what a network sees


def test_pixels_are_normalised_by_channel():
    preprocess = Preprocessing(scale=255, mean=(0.5, 0.25), std=(0.5, 0.125))
    x = preprocess(torch.tensor([[[[255]], [[0]]]], dtype=torch.uint8))
    assert x.flatten().tolist() == [1.0, -2.0]


def image(n=1):
    """[n, 2, 4, 4] float32 with all values different."""
    return torch.arange(n * 32.0).view(n, 2, 4, 4) + 100


def test_a_crop_is_a_window_of_the_image_in_a_border_of_stored_zeros():
    preprocess = Preprocessing(mean=(0.5, 0.25), std=(0.5, 0.125), crop=2)
    black = torch.tensor([-1.0, -2.0]).view(2, 1, 1)
    x = image(400)
    padded = black.repeat(400, 1, 8, 8)
    padded[:, :, 2:6, 2:6] = x
    cropped = preprocess.augment(x, torch_generator(0, "crop"))
    assert cropped.shape == x.shape
    offsets = torch.zeros(5, 5)
    for before, after in zip(padded, cropped, strict=True):
        fits = [(i, j) for i in range(5) for j in range(5) if torch.equal(before[:, i : i + 4, j : j + 4], after)]
        assert len(fits) == 1
        offsets[fits[0]] += 1
    # 16 expected in each of 25 places, standard deviation 3.9
    assert 1 <= offsets.min() and offsets.max() <= 34


def test_half_of_the_images_are_flipped():
    x = image(400)
    flipped = Preprocessing(flip=True).augment(x, torch_generator(0, "flip"))
    is_flipped = torch.tensor([torch.equal(a.flip(-1), b) for a, b in zip(x, flipped, strict=True)])
    is_same = torch.tensor([torch.equal(a, b) for a, b in zip(x, flipped, strict=True)])
    assert torch.equal(is_flipped, ~is_same)
    assert 160 < is_flipped.sum() < 240


def test_augmentation_is_for_training_only():
    given = data(3, preprocess=Preprocessing(scale=1.0, crop=2))
    [(x, _)] = given.in_order(5)
    assert torch.equal(x, given.pixels.float())
    [(x, _)] = batches(given, batch_size=5)
    assert (x == 0).sum() > (given.pixels == 0).sum()


# other sizes


def ramp(size, n=1):
    """[n, 1, size, size] bytes: 4, 12, 20, ... in every row."""
    row = torch.arange(size) * 8 + 4
    return row.expand(n, 1, size, size).byte()


def test_images_are_resized_bilinearly_with_pixels_as_areas():
    """Twice as large: halfway between 4 and 12 there are no pixels but at a quarter and three quarters."""
    x = Preprocessing(scale=4, mean=(1.0,), std=(2.0,), size=8)(ramp(4))
    row = (torch.tensor([4, 6, 10, 14, 18, 22, 26, 28]) / 4 - 1) / 2
    assert torch.equal(x, row.expand(1, 1, 8, 8))


def test_resizing_is_torchvisions():
    from torchvision.transforms import functional

    pixels = torch.randint(256, (2, 3, 9, 9), generator=torch_generator(0, "pixels")).byte()
    expected = functional.resize(pixels.float(), [24, 24], antialias=False)
    torch.testing.assert_close(Preprocessing(scale=1.0, mean=(0.0,) * 3, std=(1.0,) * 3, size=24)(pixels), expected)


def test_crops_of_resized_images_are_of_larger_ones_in_a_larger_border():
    """As NeFL does at 224: stored 32, crops of 4, become 256 in a border of 28; here 8 and 1, to 14: 16 in 2."""
    preprocess = Preprocessing(scale=1.0, size=14, crop=1)
    given = data(400, preprocess=preprocess, size=8)
    pixels = torch.randint(1, 256, (1, 1, 8, 8), generator=torch_generator(0, "pixels")).byte()
    given = replace(given, pixels=pixels.expand(400, -1, -1, -1))
    bordered = F.pad(F.interpolate(pixels.float(), (16, 16), mode="bilinear"), (2, 2, 2, 2))
    windows = bordered.unfold(2, 14, 1).unfold(3, 14, 1)[0, 0]
    [(x, _)] = batches(given, batch_size=400)
    assert x.shape == (400, 1, 14, 14)
    found = torch.stack([(windows == image[0]).all(-1).all(-1) for image in x])
    assert torch.equal(found.sum((1, 2)), torch.ones(400))
    # 7 by 7 places, 8 expected in each
    assert windows.shape[:2] == (7, 7) and (found.sum(0) > 0).all()


def test_images_are_resized_a_batch_at_a_time_and_alike_in_training_and_evaluation():
    """Without crops."""
    given = data(10, preprocess=Preprocessing(scale=1.0, size=12))
    given = replace(given, pixels=ramp(6, 10))
    evaluated = [x for x, _ in given.in_order(4)]
    assert [x.shape for x in evaluated] == [(n, 1, 12, 12) for n in (4, 4, 2)]
    for x, _ in batches(given, batch_size=4):
        assert torch.equal(x, evaluated[0][: len(x)])


def test_augmented_in_order():
    """As training batches are, each sample once: resized once, not twice."""
    given = data(5, preprocess=Preprocessing(scale=1.0, size=14, crop=1, flip=True), size=8)
    found = list(given.in_order(3, torch_generator(0, "x")))
    generator = torch_generator(0, "x")
    for (x, y), rows in zip(found, (slice(0, 3), slice(3, 5)), strict=True):
        assert torch.equal(y, given.labels[rows])
        assert torch.equal(x, given.preprocess.augment(given.pixels[rows].float(), generator))


def test_a_data_set_says_what_a_network_sees():
    data = CIFAR10(size=224)
    assert (data.shape, data.seen, CIFAR10().seen) == ((3, 32, 32), (3, 224, 224), (3, 32, 32))
    assert data.preprocess == replace(data.preprocessing, size=224)
    assert CIFAR10().preprocess == CIFAR10().preprocessing


# losses and steps


def test_masked_logits():
    logits, present = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([True, False, True])
    assert mask_logits(logits, present, "none").tolist() == [[1, 2, 3]]
    assert mask_logits(logits, present, "zero").tolist() == [[1, 0, 3]]
    assert mask_logits(logits, present, "neg_inf").tolist() == [[1, float("-inf"), 3]]


@pytest.mark.parametrize(("fill", "loss"), [("none", 10), ("zero", 10), ("neg_inf", 3)])
def test_loss_of_equal_logits(fill, loss):
    """ln of the number of classes that are in the softmax: all C, or those that are present."""
    logits, present = torch.zeros(2, 10), torch.arange(10) < 3
    value = F.cross_entropy(mask_logits(logits, present, fill), torch.tensor([0, 2]))
    assert value.item() == pytest.approx(math.log(loss))


@pytest.mark.parametrize("fill", ["zero", "neg_inf"])
def test_absent_classes_get_no_gradient(fill):
    head = nn.Linear(5, 4)
    x = torch.randn(6, 5, generator=torch_generator(0, "x"))
    present = torch.tensor([True, False, True, False])
    y = torch.tensor([0, 2, 0, 2, 2, 0])
    F.cross_entropy(mask_logits(head(x), present, fill), y).backward()
    for parameter in (head.weight, head.bias):
        rows = parameter.grad.abs().reshape(4, -1).sum(1)
        assert torch.equal(rows > 0, present)


class Scalar(nn.Module):
    """x -> w x, one parameter."""

    def __init__(self, w: float):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))

    def forward(self, x):
        return self.w * x


def steps(training, xs, w=1.0, lr=0.1, adjust=None, project=None, momentum=None):
    """w after minimising the mean of w x: the gradient is the mean of x."""
    net = Scalar(w)
    given = ((torch.tensor(x), torch.zeros(len(x))) for x in xs)
    metrics = fit(net, given, lambda out, y: out.mean(), training, lr, adjust, project, momentum)
    return net.w.item(), metrics


def test_a_step_of_sgd():
    w, metrics = steps(Training(), [[2.0, 4.0]])
    assert w == pytest.approx(1 - 0.1 * 3)
    assert metrics == {"train_loss": pytest.approx(2 * 3), "train_samples": 2, "steps": 1}


def test_momentum_goes_on_where_it_was():
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
    def double(net):
        net.w.grad.mul_(2)

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


def test_weight_decay_is_in_adams_gradient_and_beside_adamws():
    """w - 0.1, for a gradient of 2 + 0.5 w as of 2; or 0.1 * 0.5 w more."""
    assert steps(Training(optimizer="adam", weight_decay=0.5), [[2.0]])[0] == pytest.approx(0.9)
    assert steps(Training(optimizer="adamw", weight_decay=0.5), [[2.0]])[0] == pytest.approx(0.9 - 0.05)
    against = Training(optimizer="adam", weight_decay=0.5)
    assert steps(against, [[-0.4]])[0] == pytest.approx(0.9)  # -0.4 + 0.5 > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": "adam", "momentum": 0.9}, "momentum with optimizer: sgd only; adam has betas"),
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum with optimizer: sgd only; adamw has betas"),
        ({"betas": (0.9, 0.95)}, "betas with optimizer: adam or adamw only"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, "less than 1"),
    ],
    ids=str,
)
def test_settings_of_another_optimizer_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Training(**given)


def test_projecting_comes_after_every_step():
    """0.9, 0.8, which becomes 0.85, 0.95. The loss is that of what was bounded."""

    def bound(net):
        with torch.no_grad():
            net.w.clamp_(min=0.85)

    xs = [[1.0], [1.0], [-1.0]]
    assert steps(Training(), xs)[0] == pytest.approx(0.9)
    w, metrics = steps(Training(), xs, project=bound)
    assert w == pytest.approx(0.95)
    assert metrics["train_loss"] == pytest.approx(1 + 0.9 - 0.85)


def test_no_steps_change_nothing():
    assert steps(Training(), []) == (1.0, {"train_loss": 0.0, "train_samples": 0, "steps": 0})


# evaluation


def test_evaluation_gives_sums():
    """Image i is i; a network with logits (x - 4, 0, 0, 0) says class 0 from 5 on."""

    class Threshold(nn.Module):
        def forward(self, x):
            first = x[:, 0, 0, 0] - 4
            return torch.stack([first, *[torch.zeros_like(first)] * 3], 1)

    given = data(10)
    result = evaluate(Threshold(), given, 3)
    # of equal logits the first counts: 1 up to image 3, 0 for image 4; right are images 1, 4 and 8
    assert (result.correct, result.count) == (3, 10)
    logits = torch.cat([Threshold()(x) for x, _ in given.in_order(10)])
    assert result.loss == pytest.approx(F.cross_entropy(logits, given.labels, reduction="sum").item())
    assert evaluate(Threshold(), given, 10).correct == 3

    present = torch.tensor([False, True, False, False])
    assert evaluate(Threshold(), given, 3, fill="neg_inf", present=present).correct == 3


def test_weighted_parameters_are_copies():
    params = {"w": torch.tensor([1.0, 2.0])}
    for weight in (1.0, 3.0):
        copy = weighted(params, weight)
        assert copy["w"].tolist() == [weight, 2 * weight]
        assert copy["w"].data_ptr() != params["w"].data_ptr()


def test_pixels_come_in_a_true_channels_last_layout_also_with_one_channel():
    """`.contiguous(channels_last)` leaves [n, 1, H, W] as it is, and pooling then takes its slow path."""
    x = Preprocessing()(torch.zeros(3, 1, 5, 7, dtype=torch.uint8))
    assert x.stride() == (35, 1, 7, 1)
    assert Preprocessing()(torch.zeros(3, 2, 5, 7, dtype=torch.uint8)).stride() == (70, 1, 14, 2)
