"""Transforms of updates by hand, and their bytes."""

import math

import pytest
import torch
from helpers import assert_same, run, simulate, tiny

from rayfl.config import ConfigError
from rayfl.core.bitcodes import encode_places
from rayfl.core.fold import Update
from rayfl.training.transforms import Clip, Noise, Quantize, TopK, Transform, transformed


def changed(transforms, sent, answered, weight=2.0, rows=None):
    """Return the update of a client of this weight with `answered`, and its bytes."""
    update = Update({"params": {"w": torch.tensor(answered) * weight}}, weight)
    if rows is not None:
        update.row_weights["w"] = torch.tensor(rows) * weight
    size = transformed(transforms, {"params": {"w": torch.tensor(sent)}}, update, 0)
    return (update.sums["params"]["w"] / weight).tolist(), size


def test_clip_bounds_the_change():
    assert changed([Clip(norm=5.0)], [1.0, 1.0], [7.0, 9.0]) == ([4.0, 5.0], 8)  # a change of (6, 8), norm 10
    assert changed([Clip(norm=50.0)], [1.0, 1.0], [7.0, 9.0]) == ([7.0, 9.0], 8)


def test_topk_keeps_the_largest_changes_and_counts_them():
    values, size = changed([TopK(share=0.5)], [1.0] * 4, [1.0, 4.0, -3.0, 2.0])
    assert values == [1.0, 4.0, -3.0, 1.0]
    assert size == 4 * 2 + len(encode_places(torch.tensor([1, 2]), 4))


def test_quantize_is_unbiased_and_keeps_the_ends():
    d = {"params/w": torch.linspace(-1, 2, 1001)}
    transform = Quantize(bits=2)
    drawn = [transform.change(d, torch.Generator().manual_seed(i))["params/w"] for i in range(400)]
    levels = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    assert all((t[:, None] - levels).abs().min(1).values.max() < 1e-6 for t in drawn[:3])
    assert (torch.stack(drawn).mean(0) - d["params/w"]).abs().max() < 5 * 0.5 / math.sqrt(400)
    assert transform.nbytes(d, 0) == -(-2 * 1001 // 8) + 8


def test_zeros_of_topk_stay_zeros_when_quantized():
    """8 of 800 elements are sent: their places, one byte each, and the two ends of the range."""
    answered = [0.0] * 800
    answered[::100] = range(3, 11)
    values, size = changed([TopK(share=0.01), Quantize(bits=8)], [0.0] * 800, answered)
    assert [i for i, value in enumerate(values) if value] == list(range(0, 800, 100))
    assert values[::100] == pytest.approx(answered[::100], abs=10 / 255)
    assert size == len(encode_places(torch.arange(0, 800, 100), 800)) + 8 + 8


def test_noise_has_its_deviation_and_comes_from_the_seed():
    d = {"params/w": torch.zeros(10_000)}
    first, again = (Noise(deviation=0.5).change(d, torch.Generator().manual_seed(1))["params/w"] for _ in range(2))
    assert torch.equal(first, again)
    assert first.std().item() == pytest.approx(0.5, rel=0.05)


def test_rows_that_a_client_does_not_hold_have_no_change():
    """They are not part of the change, so they have no effect."""
    values, _ = changed([Clip(norm=1.0)], [5.0, 5.0], [5.5, 0.0], rows=[1.0, 0.0])
    assert values == [5.5, 0.0]


def test_transforms_apply_in_order():
    clip, largest = Clip(norm=5.0), TopK(share=0.5)
    assert changed([clip, largest], [0.0, 0.0], [6.0, 8.0])[0] == [0.0, 4.0]
    assert changed([largest, clip], [0.0, 0.0], [6.0, 8.0])[0] == [0.0, 5.0]


class Nothing(Transform):
    """A transform without effect."""

    def change(self, d, generator):
        return {name: t.clone() for name, t in d.items()}


@pytest.mark.parametrize("method", ["heterofl", "fiarse", "scaffold", "spafl", "nefl"])
def test_a_transform_without_effect_does_not_change_a_run(method, tmp_path):
    """Up to rounding of (y - x) + x."""
    plain = simulate(tiny(method=method), tmp_path / "plain")
    same = simulate(tiny(method=method, updates={"transforms": [Nothing()]}), tmp_path / "same")
    a, b = run(plain), run(same)
    for group, tensors in plain.state.items():
        for name, t in tensors.items():
            torch.testing.assert_close(same.state[group][name], t, rtol=1e-4, atol=1e-6)
    assert [line["bytes_down"] for line in a] == [line["bytes_down"] for line in b]


def test_a_run_under_transforms_is_repeatable_and_cheaper(tmp_path):
    asked = [{"name": "clip", "norm": 1.0}, {"name": "topk", "share": 0.1}]
    spec = tiny(method="heterofl", updates={"transforms": asked})
    first, second = (simulate(spec, tmp_path / name) for name in "ab")
    lines = run(first)
    assert lines == run(second)
    assert_same(first.state, second.state)
    dense = run(simulate(tiny(method="heterofl"), tmp_path / "dense"))
    assert lines[0]["bytes_up"] < 0.2 * dense[0]["bytes_up"]


def test_a_wrong_transform_is_refused():
    with pytest.raises(ConfigError) as error:
        tiny(updates={"transforms": [{"name": "clop", "norm": 1}]})
    assert "updates: transforms.0" in str(error.value) and "Did you mean 'clip'?" in str(error.value)
