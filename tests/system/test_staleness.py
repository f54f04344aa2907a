"""Weights of stale updates, by hand."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import Perceptron

from rayfl.core.fold import Fold, Update
from rayfl.core.net import Net
from rayfl.core.submodel import prefix
from rayfl.system import Stale, Staleness

LARGE_NET, SMALL_NET = Net(Perceptron(hidden=(2,))), Net(Perceptron(hidden=(2,)), 0.5)
SMALL, LARGE = prefix(LARGE_NET, SMALL_NET), prefix(LARGE_NET, LARGE_NET)


def filled(value, net=LARGE_NET):
    return {"params": {name: torch.full(shape, value) for name, shape in net.layout.shapes.items()}}


def update(value, weight, net=LARGE_NET):
    """Return the update of a client of this weight with `value` everywhere."""
    return Update(filled(weight * value, net), weight)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"weight": "constant"}, [1, 1, 1, 1]),
        ({"weight": "polynomial"}, [1, 2**-0.5, 3**-0.5, 0.5]),
        ({"weight": "hinge", "a": 2, "b": 1}, [1, 1, 1 / 3, 1 / 5]),
    ],
)
def test_weights_by_age(given, expected):
    assert [Staleness(**given).of(tau) for tau in range(4)] == pytest.approx(expected)


def test_refl_by_hand():
    """The model is 2, a fresh client sends 3 (a change of 1). Of two stale clients, one has the same change (r = 0) and
    the other, with the narrow network and a change of -1, r = (1 - -1)^2 / 1^2 = 4 on the coordinates that it holds."""
    refl, now = Staleness(weight="refl", divide="weights"), filled(2.0)
    fold = Fold(now)
    fold.add(LARGE, update(3.0, 1.0))
    same = Stale(update(2.0, 1.0), LARGE, filled(1.0), 1)
    other = Stale(update(-1.0, 2.0, SMALL_NET), SMALL, filled(0.0), 3)
    a, b = refl.weights([same, other], fold)
    assert a == pytest.approx(0.65 / 2 + 0.35 * (1 - 1 / 10))
    assert b == pytest.approx(0.65 / 4 + 0.35 * (1 - math.exp(-1) / 10))
    fold.add(LARGE, refl.moved(same, now, a))
    fold.add(SMALL, refl.moved(other, now, b))
    bias = fold.mean("params")["hidden0.bias"]
    # of two hidden neurons, the narrow network has the first
    assert bias.tolist() == pytest.approx([2 + (1 + a - 2 * b) / (1 + a + 2 * b), 3])


def test_refl_without_a_distance():
    """No fresh client holds the coordinates, or nothing moved: all distances are the largest."""
    refl, now = Staleness(weight="refl", divide="weights"), filled(2.0)
    alone = [Stale(update(value, 1.0), LARGE, filled(1.0), 1) for value in (1.0, 2.0)]
    expected = 0.65 / 2 + 0.35 * (1 - math.exp(-1) / 10)
    assert refl.weights(alone, Fold(now)) == pytest.approx([expected] * 2)
    fold = Fold(now)
    fold.add(LARGE, update(3.0, 1.0))
    assert refl.weights([Stale(update(2.0, 1.0), LARGE, filled(1.0), 1)], fold) == pytest.approx([expected])


def test_a_mean_so_far_leaves_the_sums():
    fold = Fold(filled(2.0))
    fold.add(SMALL, update(4.0, 1.0, SMALL_NET))
    assert fold.mean_so_far("params")["hidden0.bias"].tolist() == [4, 2]
    fold.add(LARGE, update(1.0, 1.0))
    assert fold.mean("params")["hidden0.bias"].tolist() == [2.5, 1]


def test_a_mean_so_far_leaves_the_weights_of_rows():
    fold, ones = Fold(filled(2.0)), {"hidden0.bias": torch.ones(2)}
    fold.add(LARGE, replace(update(4.0, 1.0), row_weights=ones))
    fold.add(LARGE, update(1.0, 1.0))
    assert fold.mean_so_far("params")["hidden0.bias"].tolist() == [2.5, 2.5]
    assert fold.mean("params")["hidden0.bias"].tolist() == [2.5, 2.5]


@pytest.mark.parametrize(("divide", "expected"), [("count", 0.75 * 5 + 0.25 * 8), ("weights", 0.25 * 8)])
def test_statistics_of_norms_are_mixed(divide, expected):
    """Variances: 5 now, 3 then, the client's is 8, s = 1/4. Added as a change, one could become negative."""
    then, now = ({"own": {"n.running_var": torch.tensor([value])}} for value in (3.0, 5.0))
    late = Update({}, 2.0, whole={"own": {"n.running_var": torch.tensor([16.0])}})
    moved = Staleness(divide=divide).moved(Stale(late, LARGE, then, 2), now, 0.25)
    assert (moved.whole["own"]["n.running_var"] / 2).item() == pytest.approx(expected)
