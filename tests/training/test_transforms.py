"""Transforms of updates by hand, and their bytes."""

import math

import pytest
import torch
from helpers import assert_same, run, simulate, tiny

from rayfl.config import ConfigError
from rayfl.core.bitcodes import encode_places
from rayfl.core.fold import Update
from rayfl.core.net import Net
from rayfl.core.seeds import torch_generator
from rayfl.core.submodel import Mask, random_subset, rolling
from rayfl.core.tensors import nbytes
from rayfl.engine import worker
from rayfl.testing.networks import MIX
from rayfl.testing.tiny import model_of
from rayfl.training.sending import RESIDUAL, transformed
from rayfl.training.transforms import (
    BFloat16,
    Clip,
    ErrorFeedback,
    Int8,
    Noise,
    Quantize,
    RandomMask,
    Sign,
    TopK,
    Transform,
    Wire,
)

NET = Net(model_of("digits_cnn"), 1.0)
EXITS = {"name": "depthfl_resnet18", "channels": 8, "exits": ["stage1.1", "stage2.1"]}
NOTHING = Mask(NET, "whole", {})


def changed(transforms, sent, answered, weight=2.0, rows=None):
    """Return the update of a client of this weight with `answered`, and its bytes."""
    update = Update({"params": {"w": torch.tensor(answered) * weight}}, weight)
    if rows is not None:
        update.row_weights["w"] = torch.tensor(rows) * weight
    size, _ = transformed(transforms, {"params": {"w": torch.tensor(sent)}}, update, 0, NOTHING)
    return (update.sums["params"]["w"] / weight).tolist(), size


def test_clip_bounds_the_change():
    assert changed([Clip(norm=5.0)], [1.0, 1.0], [7.0, 9.0]) == ([4.0, 5.0], 8)  # a change of (6, 8), norm 10
    assert changed([Clip(norm=50.0)], [1.0, 1.0], [7.0, 9.0]) == ([7.0, 9.0], 8)


def test_groups_that_are_changes_themselves():
    """Of the weight 2 and what was received under the same name, nothing is seen in them."""
    update = Update({"variate": {"w": torch.tensor([6.0, 8.0])}}, 2.0, as_is=frozenset({"variate"}))
    transformed([Clip(norm=5.0)], {"variate": {"w": torch.tensor([1.0, 1.0])}}, update, 0, NOTHING)
    assert update.sums["variate"]["w"].tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("method", "model", "group", "expected"),
    [
        ("fedgen", MIX, "labels", 0),
        # of 4 classes, mean probabilities: their sums and counts get smaller alike
        ("feddistill", "digits_cnn", "outputs", 4),
    ],
)
def test_what_is_no_new_value_after_tiny_changes(method, model, group, expected, tmp_path):
    """Three rounds with a clipping norm of almost 0."""
    clip = {"transforms": [{"name": "clip", "norm": 1e-7}]}
    experiment = tiny(rounds=3, model=model, method={"name": method, "weight": "samples"}, updates=clip)
    simulation = simulate(experiment, tmp_path)
    run(simulation)
    assert float(sum(t.abs().sum() for t in simulation.state[group].values())) == pytest.approx(expected, abs=1e-5)


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
    assert transform.wire(d, d, Wire.of(d)).nbytes == -(-2 * 1001 // 8) + 8


def test_quantize_keeps_its_largest_level():
    """Rounding can put an element above it."""
    for seed in range(200):
        t = torch.randn(50, generator=torch.Generator().manual_seed(seed))
        sent = Quantize(bits=16).change({"params/w": t}, torch.Generator().manual_seed(seed))["params/w"]
        assert sent.max() <= t.max() + float(t.max() - t.min()) / 2**17


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


def sized(transforms, d):
    """Return the change that is sent for `d`, and its bytes."""
    wire = Wire.of(d)
    for transform in transforms:
        sent = transform.change(d, torch.Generator().manual_seed(0))
        wire, d = transform.wire(d, sent, wire), sent
    return d, wire.nbytes


D = {"params/a": torch.arange(1.0, 13.0).view(3, 4), "params/b": torch.tensor([-1.0, 0.5, 2.0])}
"""15 elements without a zero: a matrix and a bias."""


@pytest.mark.parametrize(
    ("transforms", "bits"),
    [
        ([], 15 * 32),
        ([BFloat16()], 15 * 16),
        # two bytes of signs for 12 elements, one for 3, and a float32 for each tensor
        ([Sign()], 16 + 8 + 2 * 32),
        # the bias stays float32; 96 bits for the range of the matrix
        ([Int8()], 12 * 8 + 96 + 3 * 32),
        ([Quantize(bits=4)], 12 * 4 + 16 + 2 * 64),
        # half of 12 and of 3 (2): 8 values and a seed
        ([RandomMask(share=0.5)], 8 * 32 + 64),
        ([RandomMask(share=0.5), BFloat16()], 8 * 16 + 64),
        ([RandomMask(share=0.5), Int8()], 6 * 8 + 96 + 2 * 32 + 64),
        # the 3 largest are 10, 11, 12, at the places 9, 10 and 11 of 15: as bits, one byte of form and two of bits
        ([TopK(share=0.2)], 3 * 32 + 24),
        ([TopK(share=0.2), BFloat16()], 3 * 16 + 24),
        # three signs in a byte; the bias sends its scale alone
        ([TopK(share=0.2), Sign()], 8 + 2 * 32 + 24),
    ],
)
def test_bytes_are_those_counted_by_hand(transforms, bits):
    assert sized(transforms, D)[1] * 8 == bits


def test_a_sign_has_the_mean_magnitude_and_marks_zeros():
    d = {"params/w": torch.tensor([[1.0, -3.0, 0.0], [0.0, 8.0, -4.0]])}
    sent, size = sized([Sign()], d)
    assert sent["params/w"].tolist() == [[4.0, -4.0, 0.0], [0.0, 4.0, -4.0]]
    assert size == 1 + 4 + len(encode_places(torch.tensor([0, 1, 4, 5]), 6))


def test_int8_rounds_to_the_nearest_of_256_levels_with_0_among_them():
    # from -1 to 2: scale 3 / 255, zero point 85
    d = {"params/w": torch.tensor([[-1.0, 2.0, 0.0, 0.5, 0.5]]), "params/b": torch.tensor([0.3333])}
    sent, _ = sized([Int8()], d)
    scale = 3 / 255
    assert sent["params/w"][0].tolist() == pytest.approx([-85 * scale, 170 * scale, 0.0, 42 * scale, 42 * scale])
    assert sent["params/w"][0, 2] == 0.0
    assert torch.equal(sent["params/b"], d["params/b"])
    wide = {"params/w": torch.linspace(-0.3, 1.1, 5000).view(50, 100)}
    error = (sized([Int8()], wide)[0]["params/w"] - wide["params/w"]).abs().max()
    assert error <= 1.4 / 255  # half a step of rounding, and half a step of the zero point's at the ends


def test_bf16_keeps_eight_bits_of_mantissa():
    sent, _ = sized([BFloat16()], {"params/w": torch.tensor([1.0, 1.0 + 2**-7, 1.0 + 2**-9])})
    assert sent["params/w"].tolist() == [1.0, 1.0 + 2**-7, 1.0]


def test_a_random_mask_is_unbiased_and_comes_from_the_seed():
    d = {"params/w": torch.linspace(-1, 2, 50).view(5, 10)}
    mask = RandomMask(share=0.2)
    drawn = [mask.change(d, torch.Generator().manual_seed(i))["params/w"] for i in range(4000)]
    assert all(int((t != 0).sum()) == 10 for t in drawn)
    # an element is 5 d with probability 1/5: standard deviation 2 |d|
    assert (torch.stack(drawn).mean(0) - d["params/w"]).abs().max() < 4.5 * 2 * 2 / math.sqrt(4000)
    assert torch.equal(drawn[7], mask.change(d, torch.Generator().manual_seed(7))["params/w"])


# error feedback


def drawn(shapes, seed, scale=1.0):
    generator = torch_generator(seed, "test:drawn")
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("chain", [[TopK(share=0.05)], [Sign()], [Int8()], [TopK(share=0.1), Quantize(bits=2)]])
@pytest.mark.parametrize("family", ["rolling", "random", "mask"])
def test_the_sum_sent_and_the_residual_are_the_sum_of_the_changes(family, chain):
    """In the server's coordinates, while the client's part of the model moves in every round."""
    narrow, shapes = Net(NET.model, 0.4), NET.layout.shapes

    def selection(round):
        if family == "rolling":
            return rolling(NET, narrow, 5 * round)
        if family == "random":
            return random_subset(NET, narrow, torch_generator(round, "test:subset"))
        held = {
            n: torch.rand(math.prod(s), generator=torch_generator(round, "test:held", n)) for n, s in shapes.items()
        }
        return Mask(NET, round, {n: (t < 0.3).nonzero().flatten() for n, t in held.items()})

    residual, changes, sent = None, {n: torch.zeros(s) for n, s in shapes.items()}, {}
    sent = {n: torch.zeros(s) for n, s in shapes.items()}
    for round in range(6):
        part = selection(round)
        x = part.take(drawn(shapes, -1 - round))
        d = part.take(drawn(shapes, round, 0.1))
        update = Update({"params": {n: (x[n] + d[n]) * 3.0 for n in x}}, 3.0)
        outside = {n: t.clone() for n, t in (residual or {}).get("params", {}).items()}
        _, residual = transformed([ErrorFeedback(), *chain], {"params": x}, update, round, part, residual)
        part.put(d, changes)
        part.put({n: t / 3.0 - x[n] for n, t in update.sums["params"].items()}, sent)
        cover = part.cover(changes)
        for n, t in outside.items():  # coordinates that the client does not hold keep their residual
            assert torch.equal(residual["params"][n][cover[n] == 0], t[cover[n] == 0])
    for n in shapes:
        torch.testing.assert_close(sent[n] + residual["params"][n], changes[n], rtol=1e-4, atol=1e-5)
    assert max(float(t.abs().max()) for t in residual["params"].values()) > 1e-4


def test_rows_that_a_client_does_not_contribute_keep_their_residual():
    """Steps by hand: the largest of two elements is sent; the second row is not contributed in the second round."""
    chain, sent = [ErrorFeedback(), TopK(share=0.5)], {"params": {"w": torch.zeros(2)}}

    def visit(d, rows, residual):
        update = Update({"params": {"w": torch.tensor(d)}}, 1.0, row_weights={"w": torch.tensor(rows)})
        _, residual = transformed(chain, sent, update, 0, NOTHING, residual)
        return update.sums["params"]["w"].tolist(), residual

    answer, residual = visit([3.0, 2.0], [1.0, 1.0], None)
    assert (answer, residual["params"]["w"].tolist()) == ([3.0, 0.0], [0.0, 2.0])
    answer, residual = visit([1.0, 0.0], [1.0, 0.0], residual)
    assert (answer, residual["params"]["w"].tolist()) == ([1.0, 0.0], [0.0, 2.0])
    answer, residual = visit([1.0, 0.5], [1.0, 1.0], residual)
    assert (answer, residual["params"]["w"].tolist()) == ([0.0, 2.5], [1.0, 0.0])


COMPRESSED = [{"name": "error_feedback"}, {"name": "topk", "share": 0.1}, {"name": "int8"}]


@pytest.mark.parametrize("method", ["fiarse", "ditto"])
def test_a_run_with_error_feedback_resumes_to_the_bit(method, tmp_path):
    """Residuals are client states: in checkpoints, in jobs of any size, beside the method's own."""
    spec = tiny(method=method, updates={"transforms": COMPRESSED}, rounds=3)
    straight, second = simulate(spec, tmp_path / "straight"), simulate(spec, tmp_path / "second")
    run(straight, 2)
    straight.save(tmp_path / "checkpoints")
    lines = run(straight)
    assert all(RESIDUAL in straight.client_states.get(client) for client in straight.client_states.files)
    second.restore(tmp_path / "checkpoints")
    assert run(second) == lines
    assert_same(second.state, straight.state)
    for client in straight.client_states.files:
        assert_same(second.client_states.get(client), straight.client_states.get(client))


def test_a_method_does_not_see_the_residual(tmp_path):
    """Ditto's state has the client's own network; in bits and bytes a run is the same with a residual beside them."""
    exact = [{"name": "error_feedback"}, {"name": "topk", "share": 1.0}]
    plain = simulate(tiny(method="ditto", updates={"transforms": exact[1:]}), tmp_path / "plain")
    fed = simulate(tiny(method="ditto", updates={"transforms": exact}), tmp_path / "fed")
    assert run(plain) == run(fed)
    assert_same(plain.state, fed.state)
    for client in plain.client_states.files:
        state = dict(fed.client_states.get(client))
        assert nbytes(state) > 0 and not any(t.any() for t in state.pop(RESIDUAL)["params"].values())
        assert_same(state, plain.client_states.get(client))


# order


@pytest.mark.parametrize(
    ("chain", "sentence"),
    [
        (["int8", "topk"], "transforms.1: topk cannot follow int8: the values sent would no longer be those of int8."),
        (["topk", "noise"], "transforms.1: noise cannot follow topk: every element is noisy and has to be sent."),
        (["sign", "bf16"], "transforms.1: bf16 cannot follow sign: an update has one code. Allowed: one of each"),
        (["topk", "random_mask"], "transforms.1: random_mask cannot follow topk"),
        (
            ["topk", "error_feedback"],
            "transforms.1: error_feedback cannot follow topk: its residual would lack what topk",
        ),
        (["error_feedback", "clip", "topk"], "transforms.1: clip cannot follow error_feedback: what a clip cuts off"),
        (["error_feedback", "random_mask"], "transforms.1: random_mask cannot follow error_feedback: the scaled"),
        (["clip", "error_feedback"], "transforms.1: error_feedback without compression leaves no residual."),
        (["error_feedback", "error_feedback", "topk"], "transforms.1: error_feedback cannot follow error_feedback"),
    ],
)
def test_an_order_without_meaning_is_refused(chain, sentence):
    options = {"clip": {"norm": 1}, "noise": {"deviation": 1}, "topk": {"share": 0.1}, "random_mask": {"share": 0.1}}
    with pytest.raises(ConfigError) as error:
        tiny(updates={"transforms": [{"name": name} | options.get(name, {}) for name in chain]})
    assert f"updates: {sentence}" in str(error.value) and "Allowed: " in str(error.value)


class Nothing(Transform):
    """A transform without effect."""

    def change(self, d, generator):
        return {name: t.clone() for name, t in d.items()}


class Other(Nothing):
    """Changes what a transform keeps."""

    how: str

    def change(self, d, generator):
        name = next(iter(d))
        changed = {
            "none": None,
            "number": d | {name: 1.0},
            "shape": d | {name: d[name][:1]},
            "type": d | {name: d[name].half()},
            "missing": {n: t for n, t in d.items() if n != name},
            "more": d | {"params/ghost": d[name]},
        }
        return changed[self.how]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("number", "nothing for params/conv1.weight. Allowed: a tensor [10, 1, 3, 3] of torch.float32"),
        ("none", "nothing for params/conv1.bias. Allowed: a tensor [10] of torch.float32"),
        ("shape", "a tensor [1, 1, 3, 3] of torch.float32 for params/conv1.weight. Allowed: a tensor [10, 1, 3, 3]"),
        ("type", "a tensor [10, 1, 3, 3] of torch.float16 for params/conv1.weight. Allowed: a tensor [10, 1, 3, 3]"),
        ("missing", "nothing for params/conv1.weight. Allowed: a tensor [10, 1, 3, 3] of torch.float32"),
        ("more", "a tensor [10, 1, 3, 3] of torch.float32 for params/ghost. Allowed: nothing"),
    ],
)
def test_a_transform_keeps_names_shapes_and_types(how, expected, tmp_path):
    simulation = simulate(tiny(updates={"transforms": [Other(how=how)]}), tmp_path)
    with pytest.raises(ConfigError) as error:
        run(simulation, 1)
    assert str(error.value).startswith(f"updates.transforms: {__name__}:Other returned {expected}")


@pytest.mark.parametrize("method", ["heterofl", "fiarse", "ditto", "spafl", "nefl"])
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


@pytest.mark.parametrize(
    ("method", "sections", "reason"),
    [
        ("scaffold", {}, "method scaffold is not supported, because a client keeps its variate as it computed it"),
        (
            "depthfl",
            {"model": EXITS},
            "method depthfl is not supported, because with alpha a client keeps g_k as it computed it",
        ),
    ],
)
def test_methods_whose_clients_keep_what_they_computed_take_no_transforms(method, sections, reason):
    clip = {"transforms": [{"name": "clip", "norm": 1}]}
    with pytest.raises(ConfigError, match=f"updates.transforms: {reason}. Allowed: no transforms"):
        tiny(method=method, updates=clip, **sections)
    tiny(method={"name": "depthfl", "alpha": 0}, model=EXITS, updates=clip)


def test_a_wrong_transform_is_refused():
    with pytest.raises(ConfigError) as error:
        tiny(updates={"transforms": [{"name": "clop", "norm": 1}]})
    assert "updates: transforms.0" in str(error.value) and "Did you mean 'clip'?" in str(error.value)


def test_every_client_and_round_draws_its_own_noise(tmp_path, monkeypatch):
    seeds = []
    monkeypatch.setattr(worker, "transformed", lambda *given: seeds.append(given[3]) or transformed(*given))
    run(simulate(tiny(updates={"transforms": [{"name": "noise", "deviation": 0.1}]}), tmp_path))
    assert len(set(seeds)) == len(seeds) > 4
