"""Samples of a client and their batches: order, augmentation, sizes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rayfl.core.seeds import torch_generator
from rayfl.data import Classes, ClientData, Images


def data(samples=10, classes=4, prepare=None, size=6):
    """Image i is i everywhere, its label i mod classes."""
    pixels = torch.arange(samples, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, size, size).clone()
    return of(pixels, torch.arange(samples) % classes, prepare or Images(scale=1.0), classes)


def of(pixels, y, prepare=None, classes=4):
    return ClientData({"x": pixels, "y": y}, prepare or Images(), Classes(classes))


def batches(given, batch_size, epochs=1, seed=0):
    steps = epochs * -(-len(given) // batch_size)
    return list(given.batches(steps, batch_size, torch_generator(seed, "batches")))


def prepared(prepare, pixels, generator=None):
    """Return the network inputs for stored pixels."""
    x, _ = prepare.batch(prepare.whole({"x": pixels, "y": torch.zeros(len(pixels))}), generator)
    return x


def augmented(prepare, x, generator):
    """Augment normalised images [B, C, H, W]."""
    return prepare.batch({"x": x, "y": torch.zeros(len(x))}, generator)[0]


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
    first, again, other = (batches(data(10), 4, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for (a, _), (b, _) in zip(first, other, strict=True))


@pytest.mark.parametrize(("steps", "sizes"), [(0, []), (2, [4, 4]), (3, [4, 4, 2]), (7, [4, 4, 2, 4, 4, 2, 4])])
def test_as_many_batches_as_are_asked_for(steps, sizes):
    """The generator draws one order per epoch and nothing else."""
    generator, expected = torch_generator(0, "batches"), torch_generator(0, "batches")
    orders = [torch.randperm(10, generator=expected) for _ in range(-(-steps // 3))]
    found = list(data(10).batches(steps, 4, generator))
    assert [len(y) for _, y in found] == sizes
    assert [int(p) for x, _ in found for p in x[:, 0, 0, 0]] == torch.cat([torch.empty(0), *orders])[
        : sum(sizes)
    ].tolist()
    assert torch.equal(generator.get_state(), expected.get_state())


def test_the_samples_names_stay_together():
    """Tensors other than x and y are kept."""

    class Weighed(Images):
        def batch(self, samples, generator):
            x, y = super().batch(samples, generator)
            return x * samples["weight"].view(-1, 1, 1, 1), y

    given = data(6)
    weight = torch.arange(6.0) + 10
    given = replace(given, samples=given.samples | {"weight": weight}, prepare=Weighed(scale=1.0))
    augmented = list(given.in_order(4, torch_generator(0, "test:noise")))
    for found in (batches(given, 4), list(given.in_order(4)), augmented):
        for x, _ in found:
            i = (-5 + torch.sqrt(25 + x[:, 0, 0, 0])).round()  # i * (i + 10) = x
            assert torch.equal(i * (i + 10), x[:, 0, 0, 0])


def test_evaluation_goes_through_the_data_in_order():
    found = list(data(10).in_order(4))
    assert torch.cat([y for _, y in found]).tolist() == data(10).samples["y"].tolist()
    assert [len(y) for _, y in found] == [4, 4, 2]


def test_the_label_set():
    given = of(torch.zeros(3, 1, 1, 1), torch.tensor([3, 1, 1]), classes=5)
    assert given.present.tolist() == [False, True, False, True, False]
    assert (len(given), given.device) == (3, torch.device("cpu"))


# preprocessing of pixels


def test_pixels_are_normalised_by_channel():
    prepare = Images(scale=255, mean=(0.5, 0.25), std=(0.5, 0.125))
    x = prepared(prepare, torch.tensor([[[[255]], [[0]]]], dtype=torch.uint8))
    assert x.flatten().tolist() == [1.0, -2.0]


def image(n=1):
    """[n, 2, 4, 4] float32 with all values different."""
    return torch.arange(n * 32.0).view(n, 2, 4, 4) + 100


def test_a_crop_is_a_window_of_the_image_in_a_border_of_stored_zeros():
    prepare = Images(mean=(0.5, 0.25), std=(0.5, 0.125), crop=2)
    black = torch.tensor([-1.0, -2.0]).view(2, 1, 1)
    x = image(400)
    padded = black.repeat(400, 1, 8, 8)
    padded[:, :, 2:6, 2:6] = x
    cropped = augmented(prepare, x, torch_generator(0, "batches"))
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
    flipped = augmented(Images(flip=True), x, torch_generator(0, "batches"))
    is_flipped = torch.tensor([torch.equal(a.flip(-1), b) for a, b in zip(x, flipped, strict=True)])
    is_same = torch.tensor([torch.equal(a, b) for a, b in zip(x, flipped, strict=True)])
    assert torch.equal(is_flipped, ~is_same)
    assert 160 < is_flipped.sum() < 240


def test_augmentation_is_for_training_only():
    given = data(3, prepare=Images(scale=1.0, crop=2))
    [(x, _)] = given.in_order(5)
    assert torch.equal(x, given.samples["x"].float())
    [(x, _)] = batches(given, batch_size=5)
    assert (x == 0).sum() > (given.samples["x"] == 0).sum()


# other sizes


def ramp(size, n=1):
    """[n, 1, size, size] bytes: 4, 12, 20, ... in every row."""
    row = torch.arange(size) * 8 + 4
    return row.expand(n, 1, size, size).byte()


def test_images_are_resized_bilinearly_with_pixels_as_areas():
    """Twice as large: halfway between 4 and 12 there are no pixels but at a quarter and three quarters."""
    x = prepared(Images(scale=4, mean=(1.0,), std=(2.0,), size=8), ramp(4))
    row = (torch.tensor([4, 6, 10, 14, 18, 22, 26, 28]) / 4 - 1) / 2
    assert torch.equal(x, row.expand(1, 1, 8, 8))


def test_resizing_is_torchvisions():
    from torchvision.transforms import functional

    pixels = torch.randint(256, (2, 3, 9, 9), generator=torch_generator(0, "test:noise")).byte()
    expected = functional.resize(pixels.float(), [24, 24], antialias=False)
    torch.testing.assert_close(prepared(Images(scale=1.0, size=24), pixels), expected)


def test_crops_of_resized_images_are_of_larger_ones_in_a_larger_border():
    """As NeFL does at 224: stored 32, crops of 4, become 256 in a border of 28; here 8 and 1, to 14: 16 in 2."""
    prepare = Images(scale=1.0, size=14, crop=1)
    pixels = torch.randint(1, 256, (1, 1, 8, 8), generator=torch_generator(0, "test:noise")).byte()
    given = of(pixels.expand(400, -1, -1, -1), torch.zeros(400, dtype=torch.int64), prepare)
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
    given = of(ramp(6, 10), torch.arange(10) % 4, Images(scale=1.0, size=12))
    evaluated = [x for x, _ in given.in_order(4)]
    assert [x.shape for x in evaluated] == [(n, 1, 12, 12) for n in (4, 4, 2)]
    for x, _ in batches(given, batch_size=4):
        assert torch.equal(x, evaluated[0][: len(x)])


def test_augmented_in_order():
    """Each sample is augmented once, like training batches, and resized once."""
    given = data(5, prepare=Images(scale=1.0, size=14, crop=1, flip=True), size=8)
    found = list(given.in_order(3, torch_generator(0, "test:noise")))
    generator = torch_generator(0, "test:noise")
    for (x, y), rows in zip(found, (slice(0, 3), slice(3, 5)), strict=True):
        assert torch.equal(y, given.samples["y"][rows])
        assert torch.equal(x, augmented(given.prepare, given.samples["x"][rows].float(), generator))


def test_pixels_come_in_a_true_channels_last_layout_also_with_one_channel():
    """`.contiguous(channels_last)` leaves [n, 1, H, W] as it is, and pooling then takes its slow path."""
    x = prepared(Images(), torch.zeros(3, 1, 5, 7, dtype=torch.uint8))
    assert x.stride() == (35, 1, 7, 1)
    assert prepared(Images(), torch.zeros(3, 2, 5, 7, dtype=torch.uint8)).stride() == (70, 1, 14, 2)


def test_floats_are_normalised_like_bytes():
    x = prepared(Images(scale=2.0, mean=(0.5,), std=(0.25,)), torch.tensor([[[[1.0, -3.0]]]]))
    assert x.flatten().tolist() == [0.0, -8.0]
