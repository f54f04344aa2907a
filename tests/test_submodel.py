"""Selections and the holder mean, by hand."""

import pytest
import torch
from helpers import assert_same, drawn_like
from torch import nn

from rayfl.axes import Axis, Net, axes_of, layout_of, linear
from rayfl.models import MODELS, layout, params_of
from rayfl.seeds import torch_generator
from rayfl.submodel import Mask, NestedMean, Picks, Slice, Window, prefix, random_subset, rolling, windows

IMAGE, CLASSES = Axis.fixed("image", 2), Axis.fixed("classes", 3)


class Heads(nn.Module):
    """A hidden axis that is flattened (2 copies), and one of 2 heads of 4 positions."""

    def __init__(self, net: Net):
        super().__init__()
        a, heads = net.axis("a", 4), net.axis("heads", 4, groups=2)
        self.flat = linear(a.repeat(2), heads)
        self.out = linear(heads, CLASSES)
        self.early = linear(IMAGE, a)


WHOLE, HALF = (layout_of(Heads(Net(width))) for width in (1.0, 0.5))


def counting(layout_) -> dict[str, torch.Tensor]:
    """Every coordinate is its own flat index."""
    return {n: torch.arange(torch.Size(s).numel()).view(s).float() for n, s in layout_.shapes.items()}


def test_windows():
    assert Window(1, 3, 5).positions == (1, 2, 3)
    assert Window(1, 3, 5).runs() == [(1, 0, 3)]
    assert Window(3, 4, 5).positions == (3, 4, 0, 1)
    assert Window(3, 4, 5).runs() == [(3, 0, 2), (0, 2, 2)]
    assert Window(2, 3, 5).runs() == [(2, 0, 3)]
    assert Picks((4, 0), 5).count == 2


def test_copies_of_a_flatten_stay_together():
    """Positions 0, 1 of `a` are the columns 0 ... 3 of `flat`."""
    taken = prefix(WHOLE, HALF, Net(0.5)).take(counting(WHOLE))
    assert taken["flat.weight"][0].tolist() == [0, 1, 2, 3]


def test_every_head_keeps_the_same_positions():
    x = counting(WHOLE)
    assert prefix(WHOLE, HALF, Net(0.5)).take(x)["flat.bias"].tolist() == [0, 1, 4, 5]
    assert rolling(WHOLE, HALF, Net(0.5), 3).take(x)["flat.bias"].tolist() == [3, 0, 7, 4]
    positions = {"a": Picks((0, 2), 4), "heads": Picks((3, 1), 4)}
    assert Slice(Net(0.5), WHOLE, HALF, positions).take(x)["flat.bias"].tolist() == [3, 1, 7, 5]


@pytest.mark.parametrize("start", range(4))
def test_windows_and_picks_of_the_same_positions_are_the_same(start):
    window = rolling(WHOLE, HALF, Net(0.5), start)
    picks = Slice(Net(0.5), WHOLE, HALF, {n: Picks(w.positions, w.size) for n, w in window.positions.items()})
    x = drawn_like(counting(WHOLE), "x")
    taken = window.take(x)
    assert_same(picks.take(x), taken)
    sums = [{n: torch.ones_like(t) for n, t in x.items()} for _ in range(2)]
    window.put(taken, sums[0], alpha=2.0)
    picks.put(taken, sums[1], alpha=2.0)
    assert_same(*sums)
    assert_same(picks.cover(x), window.cover(x))


def test_mixed_windows_and_picks():
    positions = {"a": Window(3, 2, 4), "heads": Picks((0, 1), 4)}
    taken = Slice(Net(0.5), WHOLE, HALF, positions).take(counting(WHOLE))
    assert taken["flat.weight"][0].tolist() == [6, 7, 0, 1]


def test_classes_and_image_are_always_whole():
    taken = rolling(WHOLE, HALF, Net(0.5), 1).take(counting(WHOLE))
    assert taken["out.weight"].tolist() == [[1, 2, 5, 6], [9, 10, 13, 14], [17, 18, 21, 22]]
    assert taken["early.weight"].tolist() == [[2, 3], [4, 5]]


def test_a_prefix_is_a_view_and_a_wrapping_window_a_copy_in_few_pieces():
    model = MODELS["digits_cnn"]()
    whole, part = layout(model, Net()), layout(model, Net(0.3))
    params = params_of(model.build(Net()))
    for name, t in prefix(whole, part, Net(0.3)).take(params).items():
        assert t.data_ptr() == params[name].data_ptr()
    wrapping = rolling(whole, part, Net(0.3), 31)
    assert [len(wrapping._blocks(n)) for n in ("conv1.weight", "conv2.weight", "hidden.weight")] == [2, 2, 1]
    everywhere = windows(whole, part, Net(0.3), {"conv1": 31, "conv2": 60, "hidden": 100})
    assert [len(everywhere._blocks(n)) for n in ("conv2.weight", "hidden.weight")] == [4, 4]
    assert wrapping.take(params)["conv2.weight"].shape == part.shapes["conv2.weight"]


def test_a_window_of_everything_is_a_view():
    model = MODELS["digits_cnn"]()
    whole, params = layout(model, Net()), params_of(model.build(Net()))
    selection = rolling(whole, whole, Net(), 17)
    assert selection.key == prefix(whole, whole, Net()).key
    for name, t in selection.take(params).items():
        assert t.data_ptr() == params[name].data_ptr()


def test_blocks_that_are_left_out_are_not_held():
    model = MODELS["resnet18"](input=(1, 8, 8))
    net = Net(0.5, without=("stage1.1",))
    selection = prefix(layout(model, Net()), layout(model, net), net)
    params = params_of(model.build(Net()))
    missing = {name for name in params if name.startswith("stage1.1.")}
    assert missing and selection.take(params).keys() == params.keys() - missing
    cover = selection.cover(params)
    assert not any(cover[name].any() for name in missing)
    assert not any(selection.covers(name) for name in missing)


def test_positions_must_fit_the_network():
    with pytest.raises(ValueError) as error:
        Slice(Net(0.5), WHOLE, HALF, {"a": Window(0, 3, 4), "heads": Window(0, 2, 4)})
    assert str(error.value) == ("positions and network disagree, axis: (positions, network) {'a': (3, 2)}")


def test_random_subsets():
    """Exact sizes, sorted, one draw an axis: tied tensors agree; other seeds draw others."""
    model = MODELS["resnet18"](input=(1, 8, 8))
    whole, part = layout(model, Net()), layout(model, Net(0.3))
    draws = [random_subset(whole, part, Net(0.3), torch_generator(s, "subset")) for s in (0, 0, 1)]
    assert draws[0].key == draws[1].key != draws[2].key
    for name, axis in part.axes.items():
        drawn = draws[0].positions[name].positions
        assert len(set(drawn)) == axis.size and list(drawn) == sorted(drawn)
        assert 0 <= drawn[0] and drawn[-1] < whole.axes[name].size
    stage = {d.positions["stage1"].positions for d in draws}
    assert len(stage) == 2 and draws[0].positions["stage1"] != draws[0].positions["stage1.0.inner"]


def test_random_subsets_are_uniform():
    drawn = torch.zeros(4)
    for seed in range(600):
        picks = random_subset(WHOLE, HALF, Net(0.5), torch_generator(seed, "subset")).positions["a"]
        drawn[list(picks.positions)] += 1
    # 300 +- 4.1 standard deviations of sqrt(600 / 4)
    assert drawn.sum() == 1200 and (drawn - 300).abs().max() < 50


def test_mask():
    net = nn.Sequential(nn.Linear(2, 2))
    x = {n: p.detach().double() for n, p in net.named_parameters()}
    masks = {"0.weight": torch.tensor([[True, False], [False, True]])}
    mask = Mask(Net(), "diagonal", masks)
    taken = mask.take(x)
    assert torch.equal(taken["0.weight"], x["0.weight"].diag())
    assert taken["0.bias"] is x["0.bias"]
    whole = {n: torch.zeros_like(t) for n, t in x.items()}
    mask.put(taken, whole, alpha=3.0)
    assert_same(whole, {"0.weight": 3 * x["0.weight"].diag().diag(), "0.bias": 3 * x["0.bias"]})
    assert mask.cover(x)["0.weight"].tolist() == [[1, 0], [0, 1]]
    mask.mark("0.weight", torch.tensor([2.0, 5.0]), whole["0.weight"].zero_())
    assert whole["0.weight"].tolist() == [[2, 0], [0, 5]]
    assert (mask.covers("0.weight"), mask.covers("0.bias")) == (False, True)
    assert mask == Mask(Net(), "diagonal", {})


# the holder mean


class Two(nn.Module):
    """One axis of 2 positions, and 2 classes."""

    def __init__(self, net: Net):
        super().__init__()
        self.x = linear(Axis.fixed("image", 1), net.axis("a", 2), bias=False)
        self.out = linear(net.axis("a", 2), Axis.fixed("classes", 2), bias=False)


SMALL_NET, LARGE_NET = Net(0.5), Net(1.0)
SMALL, LARGE = (prefix(layout_of(Two(Net())), layout_of(Two(net)), net) for net in (SMALL_NET, LARGE_NET))


def mean(*updates, old=-1.0):
    """The mean of (selection, value everywhere, weight, held)."""
    mean = NestedMean({n: torch.full(shape, old) for n, shape in LARGE.part.shapes.items()})
    for selection, value, weight, held in updates:
        sums = {n: torch.full(shape, value * weight) for n, shape in selection.part.shapes.items()}
        mean.add(selection, sums, weight, held)
    return {name: t.flatten().tolist() for name, t in mean.mean().items()}


def test_the_mean_is_over_who_holds():
    assert mean((SMALL, 1.0, 1.0, None), (LARGE, 3.0, 1.0, None))["x.weight"] == [2, 3]


def test_the_mean_is_weighted():
    assert mean((SMALL, 1.0, 3.0, None), (LARGE, 3.0, 1.0, None))["x.weight"] == [1.5, 3]


def test_what_nobody_holds_stays():
    assert mean((SMALL, 1.0, 1.0, None), (SMALL, 2.0, 1.0, None))["x.weight"] == [1.5, -1]
    assert mean(old=-0.1)["x.weight"] == torch.full((2,), -0.1).tolist()


def test_rows_that_only_some_hold():
    """The small client has class 0 only, the large one class 1 only: `out` is [classes, a]."""
    mean_ = NestedMean({n: torch.full(shape, -1.0) for n, shape in LARGE.part.shapes.items()})
    for selection, value, rows in ((SMALL, 1.0, [1.0, 0.0]), (LARGE, 3.0, [0.0, 2.0])):
        rows = torch.tensor(rows).view(2, 1)
        weight = float(rows.max())
        sums = {
            "x.weight": torch.full(selection.part.shapes["x.weight"], value * weight),
            "out.weight": value * rows.expand(selection.part.shapes["out.weight"]),
        }
        mean_.add(selection, sums, weight, {"out.weight": rows})
    new = mean_.mean()
    assert new["out.weight"].tolist() == [[1, -1], [3, 3]]
    assert new["x.weight"].flatten().tolist() == [pytest.approx(7 / 3), 3]


def test_counting_whole_tensors_at_once_changes_no_bit():
    """Where all hold all, a division by one number; else by a cover, as for a mask of all but one."""
    x = {"w": torch.randn(50, generator=torch_generator(0, "x"))}
    most = Mask(Net(), "most", {"w": torch.arange(50) < 49})
    whole = Mask(Net(), "whole", {})
    weights = [3.0, 7.0, 11.0]
    results = []
    for selection in (most, whole):
        mean = NestedMean(x)
        for k, weight in enumerate(weights):
            mean.add(selection, selection.take({"w": weight * (x["w"] + k)}), weight)
        results.append(mean.mean()["w"])
    assert whole.covers("w") and not most.covers("w")
    assert torch.equal(results[0][:49], results[1][:49]) and results[0][49] == x["w"][49]


def test_held_rows_of_what_was_not_sent_are_not_held():
    mean = NestedMean({"w": torch.ones(2), "v": torch.ones(2)})
    mean.add(
        Mask(Net(), "whole", {}), {"v": torch.tensor([4.0, 4.0])}, 2.0, dict.fromkeys("vw", torch.tensor([2.0, 0.0]))
    )
    assert {name: t.tolist() for name, t in mean.mean().items()} == {"w": [1, 1], "v": [2, 1]}


def test_the_old_state_is_not_changed():
    old = {"w": torch.ones(3)}
    mean = NestedMean(old)
    mean.add(Mask(Net(), "whole", {}), {"w": torch.zeros(3)}, 1.0)
    assert mean.mean()["w"].tolist() == [0, 0, 0]
    assert old["w"].tolist() == [1, 1, 1]


def test_folding_in_another_order_differs_only_by_rounding():
    generator = torch_generator(0, "updates")
    updates = [{"w": torch.randn(40, generator=generator)} for _ in range(20)]
    whole, results = Mask(Net(), "whole", {}), []
    for order in (updates, updates[::-1]):
        mean = NestedMean({"w": torch.zeros(40)})
        for sums in order:
            mean.add(whole, sums, 1.0)
        results.append(mean.mean()["w"])
    torch.testing.assert_close(*results)
    assert not torch.equal(*results)


def test_axes_of_the_test_network_are_declared():
    assert axes_of(Heads(Net()))["flat.weight"][1] == Axis("a", 4).repeat(2)
