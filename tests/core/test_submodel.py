"""Selections by hand: take, put, cover and serialisation."""

import pickle
from typing import Literal

import pytest
import torch
from helpers import assert_same, drawn_like
from torch import nn

from rayfl.core.axes import Axis, axes_of, linear
from rayfl.core.bitcodes import encode_places
from rayfl.core.net import Net
from rayfl.core.norms import fresh
from rayfl.core.seeds import torch_generator
from rayfl.core.submodel import Coverage, Mask, Picks, Slice, Window, prefix, random_subset, rolling, windows
from rayfl.core.tensors import pack, unpack
from rayfl.models import MODELS, ImageModel


class Heads(ImageModel):
    """A hidden axis that is flattened (2 copies), and one of 2 heads of 4 positions."""

    name: Literal["heads"] = "heads"
    input: tuple[int, int, int] = (2, 1, 1)
    classes: int = 3

    def build(self, net: Net) -> nn.Module:
        a, heads = net.axis("a", 4), net.axis("heads", 4, groups=2)
        layers = {"flat": linear(a.repeat(2), heads), "out": linear(heads, self.labels), "early": linear(self.image, a)}
        return nn.ModuleDict(layers)


WHOLE, HALF = Net(Heads()), Net(Heads(), 0.5)
DIGITS = Net(MODELS["digits_cnn"]())
RESNET = Net(MODELS["resnet18"](input=(1, 8, 8)))


def narrow(net: Net, width: float, **fields) -> Net:
    return Net(net.model, width, **fields)


def counting(net: Net) -> dict[str, torch.Tensor]:
    """Return tensors whose values are their flat indices."""
    return {n: torch.arange(torch.Size(s).numel()).view(s).float() for n, s in net.full_layout.shapes.items()}


def sent(selection):
    """Return the selection after serialisation."""
    return unpack(pack(selection))


def test_axes_of_the_test_network_are_declared():
    assert axes_of(WHOLE.blank())["flat.weight"][1] == Axis("a", 4).repeat(2)


# --- slices ---


def test_windows():
    assert Window(1, 3, 5).positions == (1, 2, 3)
    assert Window(1, 3, 5).runs() == [(1, 0, 3)]
    assert Window(3, 4, 5).positions == (3, 4, 0, 1)
    assert Window(3, 4, 5).runs() == [(3, 0, 2), (0, 2, 2)]
    assert Window(2, 3, 5).runs() == [(2, 0, 3)]
    assert Picks((4, 0), 5).count == 2


def test_copies_of_a_flatten_stay_together():
    """Positions 0, 1 of `a` are the columns 0 ... 3 of `flat`."""
    taken = prefix(WHOLE, HALF).take(counting(WHOLE))
    assert taken["flat.weight"][0].tolist() == [0, 1, 2, 3]


def test_every_head_keeps_the_same_positions():
    x = counting(WHOLE)
    assert prefix(WHOLE, HALF).take(x)["flat.bias"].tolist() == [0, 1, 4, 5]
    assert rolling(WHOLE, HALF, 3).take(x)["flat.bias"].tolist() == [3, 0, 7, 4]
    positions = {"a": Picks((0, 2), 4), "heads": Picks((3, 1), 4)}
    assert Slice(WHOLE, HALF, positions).take(x)["flat.bias"].tolist() == [3, 1, 7, 5]


@pytest.mark.parametrize("start", range(4))
def test_windows_and_picks_of_the_same_positions_are_the_same(start):
    window = rolling(WHOLE, HALF, start)
    picks = Slice(WHOLE, HALF, {n: Picks(w.positions, w.size) for n, w in window.positions.items()})
    x = drawn_like(counting(WHOLE), "test:x")
    taken = window.take(x)
    assert_same(picks.take(x), taken)
    sums = [{n: torch.ones_like(t) for n, t in x.items()} for _ in range(2)]
    window.put(taken, sums[0], alpha=2.0)
    picks.put(taken, sums[1], alpha=2.0)
    assert_same(*sums)
    assert_same(picks.cover(x), window.cover(x))


def test_mixed_windows_and_picks():
    positions = {"a": Window(3, 2, 4), "heads": Picks((0, 1), 4)}
    taken = Slice(WHOLE, HALF, positions).take(counting(WHOLE))
    assert taken["flat.weight"][0].tolist() == [6, 7, 0, 1]


def test_classes_and_image_are_always_whole():
    taken = rolling(WHOLE, HALF, 1).take(counting(WHOLE))
    assert taken["out.weight"].tolist() == [[1, 2, 5, 6], [9, 10, 13, 14], [17, 18, 21, 22]]
    assert taken["early.weight"].tolist() == [[2, 3], [4, 5]]


def test_statistics_of_norms_are_cut_with_the_weights_of_their_norms():
    part, x = narrow(DIGITS, 0.25), counting(DIGITS)
    assert x.keys() > fresh(DIGITS.blank()).keys()
    taken = rolling(DIGITS, part, 62).take(x)
    assert taken.keys() == part.full_layout.shapes.keys() == x.keys()
    assert taken["norm2.running_var"].tolist() == taken["norm2.weight"].tolist() == [62, 63, *range(14)]
    assert taken["norm1.running_mean"].tolist() == [30, 31, *range(6)]
    statistics = {name: t for name, t in x.items() if ".running_" in name}
    assert prefix(DIGITS, part).take(statistics).keys() == statistics.keys()


def test_a_mark_is_a_number_or_rows():
    """Rows of the part, spread over its columns."""
    selection, t = rolling(WHOLE, HALF, 3), torch.zeros(3, 8)
    selection.mark("out.weight", torch.tensor([[1.0], [0.0], [5.0]]), t)
    row = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 1])
    assert torch.equal(t, torch.stack([row, 0 * row, 5 * row]))
    selection.mark("out.weight", 2.0, t)
    assert torch.equal(t, torch.stack([3 * row, 2 * row, 7 * row]))
    selection.mark("nowhere", 1.0, t)


def test_a_prefix_is_a_view_and_a_wrapping_window_a_copy_in_few_pieces():
    part = narrow(DIGITS, 0.3)
    params = DIGITS.initial()
    for name, t in prefix(DIGITS, part).take(params).items():
        assert t.data_ptr() == params[name].data_ptr()
    wrapping = rolling(DIGITS, part, 31)
    assert [len(wrapping._blocks(n)) for n in ("conv1.weight", "conv2.weight", "hidden.weight")] == [2, 2, 1]
    everywhere = windows(DIGITS, part, {"conv1": 31, "conv2": 60, "hidden": 100})
    assert [len(everywhere._blocks(n)) for n in ("conv2.weight", "hidden.weight")] == [4, 4]
    assert wrapping.take(params)["conv2.weight"].shape == part.layout.shapes["conv2.weight"]


def test_a_window_of_everything_is_a_view():
    params = DIGITS.initial()
    selection = rolling(DIGITS, DIGITS, 17)
    assert selection.key == prefix(DIGITS, DIGITS).key
    for name, t in selection.take(params).items():
        assert t.data_ptr() == params[name].data_ptr()


def test_omitted_blocks_are_not_selected():
    selection = prefix(RESNET, narrow(RESNET, 0.5, without=("stage1.1",)))
    params = RESNET.initial()
    missing = {name for name in params if name.startswith("stage1.1.")}
    assert missing and selection.take(params).keys() == params.keys() - missing
    cover = selection.cover(params)
    assert not any(cover[name].any() for name in missing)
    assert not any(selection.covers(name) for name in missing)


def test_a_slice_of_some_tensors():
    selection = Slice(WHOLE, HALF, prefix(WHOLE, HALF).positions, names=("out.bias", "out.weight"))
    x = counting(WHOLE)
    assert list(selection.take(x)) == ["out.bias", "out.weight"]
    assert selection.covers("out.bias") and not selection.covers("early.bias")
    assert {name for name, t in selection.cover(x).items() if t.any()} == {"out.bias", "out.weight"}
    nothing = Slice(WHOLE, HALF, {}, names=())
    assert nothing.take(x) == {} and not any(t.any() for t in nothing.cover(x).values())
    assert len({prefix(WHOLE, HALF).key, selection.key, nothing.key}) == 3


def test_networks_of_two_families_that_share_names():
    """ResNet18 consists of the blocks that it shares with ResNet34."""
    fields = {"input": (1, 8, 8), "channels": 4}
    deep, shallow = Net(MODELS["resnet34"](**fields)), Net(MODELS["resnet18"](**fields), 0.5)
    selection, x = prefix(deep, shallow), counting(deep)
    assert selection.take(x).keys() == shallow.full_layout.shapes.keys() < x.keys()
    assert selection.key != prefix(deep, Net(deep.model, 0.5)).key
    module = shallow.build()
    assert {n: p.shape for n, p in module.named_parameters()}.items() <= {
        n: t.shape for n, t in selection.take(x).items()
    }.items()


def test_positions_must_fit_the_network():
    with pytest.raises(ValueError) as error:
        Slice(WHOLE, HALF, {"a": Window(0, 3, 4), "heads": Window(0, 2, 4)})
    assert str(error.value) == ("positions do not match the network, axis: (positions, network) {'a': (3, 2)}")


def test_random_subsets():
    """Exact sizes, sorted, one draw per axis for tied tensors; other seeds give other draws."""
    part = narrow(RESNET, 0.3)
    draws = [random_subset(RESNET, part, torch_generator(s, "subset")) for s in (0, 0, 1)]
    assert draws[0].key == draws[1].key != draws[2].key
    for name, axis in part.layout.axes.items():
        drawn = draws[0].positions[name].positions
        assert len(set(drawn)) == axis.size and list(drawn) == sorted(drawn)
        assert 0 <= drawn[0] and drawn[-1] < RESNET.layout.axes[name].size
    stage = {d.positions["stage1"].positions for d in draws}
    assert len(stage) == 2 and draws[0].positions["stage1"] != draws[0].positions["stage1.0.inner"]


def test_random_subsets_are_uniform():
    drawn = torch.zeros(4)
    for seed in range(600):
        picks = random_subset(WHOLE, HALF, torch_generator(seed, "subset")).positions["a"]
        drawn[list(picks.positions)] += 1
    # 300 +- 4.1 standard deviations of sqrt(600 / 4)
    assert drawn.sum() == 1200 and (drawn - 300).abs().max() < 50


SLICES = {
    "prefix": lambda: prefix(RESNET, narrow(RESNET, 0.3)),
    "a window that wraps": lambda: rolling(RESNET, narrow(RESNET, 0.3), 55),
    "fewer blocks": lambda: prefix(RESNET, narrow(RESNET, 0.3, without=("stage1.1",))),
    "a random subset": lambda: random_subset(RESNET, narrow(RESNET, 0.3), torch_generator(0, "subset")),
    "not tied": lambda: random_subset(RESNET, narrow(RESNET, 0.3), torch_generator(0, "subset"), tied=False),
    "some tensors": lambda: Slice(
        RESNET, narrow(RESNET, 0.3), prefix(RESNET, narrow(RESNET, 0.3)).positions, names=("conv.weight",)
    ),
}


@pytest.mark.parametrize("kind", SLICES)
@pytest.mark.parametrize("is_used", [False, True])
def test_a_serialised_slice_takes_and_puts_the_same(kind, is_used):
    selection, x = SLICES[kind](), drawn_like(counting(RESNET), "test:x")
    taken = selection.take(x)
    if not is_used:
        selection = SLICES[kind]()
    received = sent(selection)
    assert received.key == selection.key and received.nbytes == 0
    assert_same(received.take(x), taken)
    sums = [{name: torch.zeros_like(t) for name, t in x.items()} for _ in range(2)]
    for one, whole in zip((selection, received), sums, strict=True):
        one.put(taken, whole, alpha=3.0)
    assert_same(*sums)
    assert_same(received.cover(x), selection.cover(x))


@pytest.mark.parametrize("kind", ["prefix", "a window that wraps", "fewer blocks", "some tensors"])
def test_a_slice_is_serialised_without_layouts(kind):
    """Only the network and two or three numbers per axis are sent, without cached values."""
    selection = SLICES[kind]()
    selection.take(counting(RESNET))
    selection.covers("conv.weight")
    packed = pack(selection)
    assert packed.buffers == {}
    assert len(packed.header) - len(pickle.dumps(RESNET.model)) < 2000


# --- masks ---


def masked(*places: int, net: Net = WHOLE, key="some") -> Mask:
    return Mask(net, key, {"early.weight": torch.tensor(places, dtype=torch.int64)})


def test_mask():
    """Elements 0, 3 and 6 of early.weight [4, 2]; the other tensors are whole."""
    x = {n: t.double() for n, t in counting(WHOLE).items()}
    mask = masked(0, 3, 6)
    taken = mask.take(x)
    assert taken["early.weight"].tolist() == [0, 3, 6]
    assert taken["early.bias"] is x["early.bias"]
    whole = {n: torch.zeros_like(t) for n, t in x.items()}
    mask.put(taken, whole, alpha=3.0)
    assert whole["early.weight"].tolist() == [[0, 0], [0, 9], [0, 0], [18, 0]]
    assert torch.equal(whole["early.bias"], 3 * x["early.bias"])
    mask.put({"early.weight": taken["early.weight"]}, whole)
    assert whole["early.weight"].tolist() == [[0, 0], [0, 12], [0, 0], [24, 0]]
    assert mask.cover(x)["early.weight"].tolist() == [[1, 0], [0, 1], [0, 0], [1, 0]]
    assert mask.cover(x)["early.bias"].tolist() == [1] * 4
    mask.mark("early.weight", torch.tensor([2.0, 5.0, 7.0]), whole["early.weight"].zero_())
    assert whole["early.weight"].tolist() == [[2, 0], [0, 5], [0, 0], [7, 0]]
    assert (mask.covers("early.weight"), mask.covers("early.bias")) == (False, True)
    assert masked(*range(8)).covers("early.weight")
    assert mask == Mask(WHOLE, "some", {}) != Mask(WHOLE, "others", {})


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_a_serialised_mask_takes_and_puts_the_same(share):
    x = drawn_like(DIGITS.initial(), "test:x")
    names, generator = ("conv2.weight", "hidden.weight", "hidden.bias"), torch_generator(0, "test:mask")
    kept = {n: (torch.rand(x[n].numel(), generator=generator) < share).nonzero().flatten() for n in names}
    mask = Mask(DIGITS, ("digits", share), kept)
    received = sent(mask)
    assert received == mask and received.key == mask.key and received.net == DIGITS
    assert sorted(received.places) == sorted(names) and len(received.places) == 3
    for name in names:
        assert torch.equal(received.places[name], kept[name]) and received.places[name].dtype == torch.int64
    assert "conv1.weight" not in received.places
    taken = mask.take(x)
    assert_same(received.take(x), taken)
    sums = [{name: torch.zeros_like(t) for name, t in x.items()} for _ in range(2)]
    for one, whole in zip((mask, received), sums, strict=True):
        one.put(taken, whole, alpha=3.0)
        one.mark("hidden.weight", 2.0, whole["hidden.weight"])
    assert_same(*sums)
    assert [received.covers(n) for n in x] == [mask.covers(n) for n in x]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_the_bytes_of_a_mask_are_those_of_its_codes(share):
    """Places are sent as codes in both directions."""
    sizes = {n: torch.Size(DIGITS.layout.shapes[n]).numel() for n in ("conv2.weight", "hidden.weight")}
    generator = torch_generator(0, "test:mask")
    kept = {n: (torch.rand(k, generator=generator) < share).nonzero().flatten() for n, k in sizes.items()}
    mask = Mask(DIGITS, "digits", kept)
    assert mask.nbytes == sum(len(encode_places(kept[n], k)) for n, k in sizes.items())
    packed = pack(mask)
    assert {dtype: buffer.nbytes for dtype, buffer in packed.buffers.items()} == {"uint8": mask.nbytes}
    received = unpack(packed)
    assert received.nbytes == mask.nbytes
    assert pack(received).buffers["uint8"].tobytes() == packed.buffers["uint8"].tobytes()


def test_a_mask_without_places_selects_everything():
    mask = sent(Mask(WHOLE, "whole", {}))
    x = counting(WHOLE)
    assert mask.nbytes == 0 and mask.take(x).keys() == x.keys()
    assert all(mask.covers(name) for name in WHOLE.layout.shapes)


# --- coverage ---


def test_coverage_counts_selected_coordinates():
    coverage = Coverage({"early.weight": (4, 2)})
    coverage.add(prefix(WHOLE, HALF))
    assert coverage.share() == 0.5
    coverage.add(rolling(WHOLE, HALF, 1))
    assert coverage.share() == 0.75
    coverage.add(masked(0, 7))
    assert coverage.share() == 7 / 8
    assert coverage.counts["early.weight"].tolist() == [[2, 1], [2, 2], [1, 1], [0, 1]]
