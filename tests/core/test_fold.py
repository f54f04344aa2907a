"""Holder means and other sums of a round, by hand."""

import itertools
import string
from typing import Literal

import pytest
import torch
from helpers import assert_same, folded
from torch import nn

from rayfl.core.axes import linear
from rayfl.core.fold import Fold, PairwiseSum, Update, add_updates, aligned
from rayfl.core.net import Net
from rayfl.core.norms import StaticBatchNorm
from rayfl.core.seeds import torch_generator
from rayfl.core.submodel import Mask, prefix, rolling
from rayfl.core.tensors import as_tensor
from rayfl.models import ImageModel


class Two(ImageModel):
    """One axis of 2 positions, and 2 classes: `x.weight` is [2, 1], `out.weight` [2, 2]."""

    name: Literal["two"] = "two"
    input: tuple[int, int, int] = (1, 1, 1)
    classes: int = 2

    def build(self, net: Net) -> nn.Module:
        a = net.axis("a", 2)
        layers = {"x": linear(self.image, a, bias=False), "out": linear(a, self.labels, bias=False)}
        return nn.ModuleDict(layers)


LARGE_NET, SMALL_NET = Net(Two()), Net(Two(), 0.5)
SMALL, LARGE = prefix(LARGE_NET, SMALL_NET), prefix(LARGE_NET, LARGE_NET)
SHAPES = LARGE_NET.layout.shapes
WHOLE = Mask(LARGE_NET, "whole", {})
"""A selection of all coordinates of any tensor."""


def filled(value: float, net: Net = LARGE_NET) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in net.layout.shapes.items()}


def answer(selection, value: float, weight: float, **more) -> Update:
    """Return the update of a client with `value` everywhere."""
    return Update({"params": filled(value * weight, selection.net)}, weight, **more)


def mean(*clients, old: float = -1.0) -> dict[str, list[float]]:
    """Return the mean of (selection, value everywhere, weight)."""
    fold = folded({"params": filled(old)}, *((s, answer(s, value, weight)) for s, value, weight in clients))
    return {name: t.flatten().tolist() for name, t in fold.mean("params").items()}


# --- the mean ---


def test_the_mean_is_over_holders():
    """The small client has the first position of `a`: the first row of x, the first column of out."""
    assert mean((SMALL, 1.0, 1.0), (LARGE, 3.0, 1.0)) == {"x.weight": [2, 3], "out.weight": [2, 3, 2, 3]}


def test_the_mean_is_weighted():
    assert mean((SMALL, 1.0, 3.0), (LARGE, 3.0, 1.0))["x.weight"] == [1.5, 3]


def test_rolling_windows():
    """Three clients: positions 0, 1 and both."""
    clients = [(rolling(LARGE_NET, SMALL_NET, start), value, 1.0) for start, value in ((0, 1.0), (1, 5.0))]
    assert mean(*clients, (LARGE, 3.0, 2.0))["x.weight"] == [pytest.approx(7 / 3), pytest.approx(11 / 3)]


def test_coordinates_without_holders_keep_their_bits():
    assert mean((SMALL, 1.0, 1.0), (SMALL, 2.0, 1.0))["x.weight"] == [1.5, -1]
    [_, stays] = mean((SMALL, 1.0, 3.0), old=-0.1)["x.weight"]
    assert stays == torch.tensor(-0.1).item()


def test_a_fold_without_updates_keeps_the_state():
    state = {"params": filled(-0.1), "statistics": {"m": torch.tensor([0.3])}}
    fold = Fold(state)
    assert fold.mean("params") is state["params"]
    assert (fold.sum("params"), fold.weights("params"), fold.weight) == ({}, {}, 0)
    fold.add(SMALL, answer(SMALL, 1.0, 1.0))
    assert fold.mean("statistics") is state["statistics"]


def test_a_tensor_without_updates_keeps_its_value():
    """The group was sent without its personal part."""
    update = Update({"params": {"x.weight": torch.tensor([[8.0], [10.0]])}}, 2.0)
    fold = folded({"params": filled(-0.1)}, (LARGE, update))
    assert_same(fold.mean("params"), filled(-0.1) | {"x.weight": torch.tensor([[4.0], [5.0]])})
    assert fold.weights("params") == {"x.weight": 2.0}


def test_unselected_coordinates_of_masks_keep_their_values():
    state = {"params": filled(-1.0)}
    diagonal = Mask(LARGE_NET, "diagonal", {"out.weight": torch.tensor([0, 3])})
    sent = {"x.weight": torch.full((2, 1), 6.0), "out.weight": torch.tensor([2.0, 4.0])}
    fold = folded(state, (diagonal, Update({"params": sent}, 2.0)), (SMALL, answer(SMALL, 7.0, 2.0)))
    assert fold.mean("params")["out.weight"].tolist() == [[4, -1], [7, 2]]
    assert fold.mean("params") is not state["params"]


def test_one_divisor_for_whole_tensors_gives_equal_bits():
    """Full selections divide by one number, others by a cover (a mask without one coordinate)."""
    old = {"params": {"x.weight": torch.randn(2, 1), "out.weight": torch.randn(2, 2)}}
    x = {name: torch.randn(shape, generator=torch_generator(0, "test:x")) for name, shape in SHAPES.items()}
    most = Mask(LARGE_NET, "most", {"out.weight": torch.arange(3)})
    results = []
    for selection in (most, WHOLE):
        updates = [selection.take({n: weight * (t + weight) for n, t in x.items()}) for weight in (3.0, 7.0, 11.0)]
        answers = [(selection, Update({"params": sums}, w)) for sums, w in zip(updates, (3.0, 7.0, 11.0), strict=True)]
        results.append(folded(old, *answers).mean("params")["out.weight"].flatten())
    assert WHOLE.covers("out.weight") and not most.covers("out.weight")
    assert torch.equal(results[0][:3], results[1][:3])
    assert results[0][3] == old["params"]["out.weight"][1, 1] != results[1][3]


def test_the_state_is_not_changed():
    state = {"params": filled(1.0)}
    fold = folded(state, (LARGE, answer(LARGE, 0.0, 1.0)), (SMALL, answer(SMALL, 2.0, 1.0)))
    assert_same(fold.mean("params"), {"x.weight": torch.tensor([[1.0], [0.0]]), "out.weight": torch.eye(2)[[0, 0]]})
    assert_same(state, {"params": filled(1.0)})


def test_updates_are_not_changed():
    """They can be views of shared memory."""
    array = torch.ones(2, 1).numpy()
    array.flags.writeable = False
    for group in ("params", "masks"):
        updates = [Update({}, 1.0, whole={group: {"x.weight": as_tensor(array)}}) for _ in range(3)]
        fold = folded({"params": filled(0.0)}, *((WHOLE, update) for update in updates))
        assert fold.sum(group)["x.weight"].tolist() == [[3], [3]]
        assert fold.mean(group)["x.weight"].tolist() == [[1], [1]]
    assert array.tolist() == [[1], [1]]


def test_folding_in_another_order_differs_only_by_rounding():
    generator = torch_generator(0, "test:updates")
    sums = [{name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for _ in range(20)]
    results = []
    for order in (sums, sums, sums[::-1]):
        fold = folded({"params": filled(0.0)}, *((WHOLE, Update({"params": one}, 1.0)) for one in order))
        results.append(fold.mean("params"))
    assert_same(results[0], results[1])
    for name, t in results[0].items():
        torch.testing.assert_close(t, results[2][name])
    assert any(not torch.equal(t, results[2][name]) for name, t in results[0].items())


# --- rows ---


def test_rows_with_some_holders():
    """The small client has class 0 only, the large one class 1 only: `out` is [classes, a]."""
    answers = []
    for selection, value, rows in ((SMALL, 1.0, [1.0, 0.0]), (LARGE, 3.0, [0.0, 2.0])):
        rows = torch.tensor(rows).view(2, 1)
        update = answer(selection, value, float(rows.max()), row_weights={"out.weight": rows})
        update.sums["params"]["out.weight"] = value * rows.expand(selection.part_layout.shapes["out.weight"])
        answers.append((selection, update))
    fold = folded({"params": filled(-1.0)}, *answers)
    assert fold.weights("params") == {"x.weight": 3.0}
    new = fold.mean("params")
    assert new["out.weight"].tolist() == [[1, -1], [3, 3]]
    assert new["x.weight"].flatten().tolist() == [pytest.approx(7 / 3), 3]


def test_rows_with_clients_that_hold_all():
    """A client of weight 2 has class 1 only; a client of weight 1 sends all rows."""
    some = answer(LARGE, 3.0, 2.0, row_weights={"out.weight": torch.tensor([[0.0], [2.0]])})
    some.sums["params"]["out.weight"] = torch.tensor([[0.0, 0.0], [6.0, 6.0]])
    fold = folded({"params": filled(-1.0)}, (LARGE, some), (LARGE, answer(LARGE, 9.0, 1.0)))
    assert fold.mean("params")["out.weight"].tolist() == [[9, 9], [5, 5]]


def test_row_weights_of_missing_tensors_are_ignored():
    rows = torch.tensor([[2.0], [0.0]])
    update = Update({"params": {"out.weight": torch.full((2, 2), 4.0)}}, 2.0, row_weights=dict.fromkeys(SHAPES, rows))
    new = folded({"params": filled(1.0)}, (LARGE, update)).mean("params")
    assert_same(new, {"x.weight": torch.ones(2, 1), "out.weight": torch.tensor([[2.0, 2.0], [1.0, 1.0]])})


def test_row_weights_apply_to_parameters_only():
    """Statistics have the client's weight."""
    state = {"params": filled(0.0), "momentum": filled(0.0)}
    update = answer(LARGE, 4.0, 2.0, row_weights={"out.weight": torch.tensor([[2.0], [0.0]])})
    update.sums["momentum"] = filled(2 * 5.0)
    fold = folded(state, (LARGE, update))
    assert fold.mean("momentum")["out.weight"].tolist() == [[5, 5], [5, 5]]


# --- groups ---


class Normed(Two):
    """A layer with a static norm on the axis."""

    name: Literal["normed"] = "normed"

    def build(self, net: Net) -> nn.Module:
        module = super().build(net)
        norm = StaticBatchNorm(net.axis("a", 2).length)
        norm.axes = {"weight": (net.axis("a", 2),), "bias": (net.axis("a", 2),)}  # pyright: ignore
        module.add_module("norm", norm)
        return module


def test_every_group_has_its_own_mean():
    """Statistics are cut like parameters."""
    net = Net(Normed())
    small = prefix(net, Net(Normed(), 0.5))
    state = {"params": filled(-1.0, net), "statistics": net.statistics()}
    update = Update({"params": filled(2.0, small.net), "statistics": {"norm.running_var": torch.tensor([6.0])}}, 2.0)
    fold = folded(state, (small, update))
    assert fold.mean("statistics")["norm.running_var"].tolist() == [3, 1]
    assert fold.mean("statistics")["norm.running_mean"].tolist() == [0, 0]
    assert fold.mean("params")["norm.weight"].tolist() == [1, -1]
    assert fold.weights("statistics") == {"norm.running_var": 2.0}


def test_whole_groups_are_not_cut():
    """Groups that are sent whole are averaged over their senders, per tensor."""
    state = {"params": filled(-1.0), "width 0.5": {"t": torch.tensor([0.5, 0.1]), "u": torch.tensor([0.1])}}
    updates = [answer(SMALL, 1.0, w, whole={"width 0.5": {"t": torch.tensor([w, 3 * w])}}) for w in (1.0, 3.0)]
    fold = folded(state, *((SMALL, update) for update in updates), (LARGE, answer(LARGE, 3.0, 2.0)))
    assert fold.weights("width 0.5") == {"t": 4.0} and fold.weight == 6
    assert fold.sum("width 0.5")["t"].tolist() == [4, 12]
    assert_same(fold.mean("width 0.5"), {"t": torch.tensor([1.0, 3.0]), "u": torch.tensor([0.1])})
    assert fold.mean("params")["x.weight"].flatten().tolist() == [pytest.approx(10 / 6), 3]


def test_a_group_that_the_state_lacks_is_summed():
    """Masks are averaged over their senders."""
    updates = [Update({}, w, whole={"masks": {"m": torch.tensor([w, 0.0])}}) for w in (1.0, 3.0)]
    fold = folded({"params": filled(0.0)}, *((WHOLE, update) for update in updates))
    assert fold.sum("masks")["m"].tolist() == [4, 0]
    assert fold.weights("masks") == {"m": 4.0}
    assert fold.mean("masks")["m"].tolist() == [1, 0]


def test_sums_are_in_the_servers_shapes():
    fold = folded({"params": filled(-1.0)}, (SMALL, answer(SMALL, 2.0, 3.0)), (LARGE, answer(LARGE, 1.0, 1.0)))
    assert fold.sum("params")["out.weight"].tolist() == [[7, 1], [7, 1]]
    assert fold.weights("params") == {"x.weight": 4.0, "out.weight": 4.0}


# --- updates that add ---


def test_updates_of_one_selection_add():
    """Sums of a worker and single updates give the same result."""
    rows = [torch.tensor([[1.0], [0.0]]), torch.tensor([[2.0], [2.0]])]
    updates = [
        answer(
            SMALL, value, weight, row_weights={"out.weight": r},
            client_states={id: {"own": {"t": torch.tensor(value)}}},
            whole={"own": {"t": torch.tensor([value * weight])}}, metrics={"steps": 1.0},
        )
        for id, (value, weight, r) in enumerate(zip((3.0, 6.0), (1.0, 2.0), rows, strict=True))
    ]  # fmt: skip
    state = {"params": filled(-1.0), "own": {"t": torch.zeros(1)}}
    apart = folded(state, *((SMALL, update) for update in updates))
    expected = {group: apart.mean(group) for group in state}
    first, second = updates
    before = second.sums["params"]["x.weight"].clone()
    both = first.plus(second)
    assert both.weight == 3 and both.client_states.keys() == {0, 1} and both.metrics == {}
    assert both.row_weights["out.weight"].tolist() == [[3], [2]]
    together = folded(state, (SMALL, both))
    assert together.weights("params") == apart.weights("params") == {"x.weight": 3.0}
    assert_same({group: together.mean(group) for group in state}, expected)
    assert expected["params"]["x.weight"].tolist() == [[5], [-1]]
    assert torch.equal(second.sums["params"]["x.weight"], before)


def test_an_update_that_has_more_groups_is_added_without_being_changed():
    first, second, third = Update({}, 1.0), answer(LARGE, 2.0, 1.0), answer(LARGE, 3.0, 1.0)
    total = first.plus(second).plus(third)
    assert total.sums["params"]["x.weight"].tolist() == [[5], [5]] and total.weight == 3
    assert second.sums["params"]["x.weight"].tolist() == [[2], [2]] and first.sums == {}


# --- pairs ---


def written(one: str, other: str) -> str:
    return f"({one}{other})"


def bracketed(places, sizes) -> str:
    """Return the brackets of the sum of parts of these sizes."""
    whole = PairwiseSum(written)
    for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        part = PairwiseSum(written)
        for place in places[start : start + size]:
            part.add(place)
        whole.add(part.total, size)
    return whole.total


@pytest.mark.parametrize("count", range(1, 40))
def test_aligned_parts_give_the_same_sum(count):
    """Brackets in place of a sum of numbers."""
    places = string.ascii_letters[:count]
    expected = bracketed(places, [1] * count)
    for most in (1, 2, 3, 4, 8, 16, 100):
        parts = list(aligned(count, most))
        sizes = [part.stop - part.start for part in parts]
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(count))
        assert all(size <= most and size.bit_count() == 1 for size in sizes) and sizes == sorted(sizes, reverse=True)
        assert bracketed(places, sizes) == expected


@pytest.mark.parametrize("count", range(1, 40))
def test_the_remainder_after_aligned_parts_can_be_one_value(count):
    places = string.ascii_letters[:count]
    for branch in (2, 4, 8, 16):
        whole, rest = divmod(count, branch)
        sizes = [branch] * whole + [rest] * bool(rest)
        assert bracketed(places, sizes) == bracketed(places, [1] * count)


def test_pairwise_order_of_additions():
    pairs = PairwiseSum(written)
    for place in "abcdef":
        pairs.add(place)
    assert pairs.total == "(((ab)(cd))(ef))"


def test_rejected_updates_keep_their_positions():
    updates = PairwiseSum(add_updates)
    for given in (None, answer(SMALL, 1.0, 1.0), None, None):
        updates.add(given)
    assert updates.total is not None and updates.total.weight == 1
