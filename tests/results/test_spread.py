"""Significance of differences between rows."""

import math

import pytest

from rayfl.results.spread import by_seed, difference, differences, like_the_best, p_value


def rows(*values, **more):
    return [{"seed": seed, "accuracy_mean": value} | more for seed, value in enumerate(values)]


def test_the_paired_test_by_hand():
    # mean 2, deviation 1, so t = 2 * sqrt(3); with two degrees of freedom p = 1 - t / sqrt(t^2 + 2)
    assert p_value([1, 2, 3]) == pytest.approx(1 - math.sqrt(12 / 14))
    assert p_value([-1, -2, -3]) == pytest.approx(p_value([1, 2, 3]))
    assert p_value([0.5, 0.5, 0.5]) == 0 and p_value([0, 0, 0]) == 1


def test_the_paired_test_is_scipys():
    from scipy.stats import ttest_rel

    one, other = [0.81, 0.79, 0.84, 0.80, 0.77], [0.80, 0.80, 0.81, 0.76, 0.75]
    assert p_value([a - b for a, b in zip(one, other, strict=True)]) == pytest.approx(ttest_rel(one, other).pvalue)


def test_common_effects_of_a_seed_cancel():
    """Both vary by 0.2 over seeds, and one is always 0.01 better; unpaired nobody could tell."""
    one, other = {0: 0.51, 1: 0.61, 2: 0.712}, {0: 0.50, 1: 0.60, 2: 0.70}
    found = difference(one, other)
    assert found.seeds == 3 and found.by == pytest.approx(0.032 / 3) and found.is_clear
    assert difference(other, one).by == pytest.approx(-found.by)
    unpaired = difference({seed + 10: value for seed, value in one.items()}, other)
    assert unpaired.seeds == 0 and unpaired.p is None and unpaired.is_clear is False


def test_few_seeds_are_compared_with_their_spread():
    # both deviate by sqrt(0.02): a difference of two runs by 0.2
    one, other = {0: 0.9, 1: 0.7}, {0: 0.65, 1: 0.45}
    found = difference(one, other)
    assert found.p is None and found.by == pytest.approx(0.25) and found.spread == pytest.approx(0.2)
    assert found.is_clear and difference(one, {0: 0.72, 1: 0.52}).is_clear is False
    # of one seed: it varies as the other does
    assert difference(one, {5: 0.4}).spread == pytest.approx(0.2)
    alone = difference({0: 0.9}, {0: 0.1})
    assert alone.spread is None and alone.is_clear is None
    assert difference({0: 0.9}, {0: 0.9}).is_clear is False


def test_rows_like_the_best():
    groups = {
        "best": rows(0.80, 0.82, 0.84),
        "as good": rows(0.81, 0.80, 0.83),
        "worse": rows(0.70, 0.73, 0.74),
        "one seed": rows(0.81),
        "failed": rows(math.nan),
        "other": [{"seed": 0}],
    }
    found = differences(groups, "accuracy_mean")
    assert list(found) == ["as good", "worse", "one seed"]
    assert found["worse"].by == pytest.approx(0.29 / 3)
    assert like_the_best(groups, "accuracy_mean") == ["as good", "one seed"]
    assert like_the_best({"failed": rows(math.nan)}, "accuracy_mean") == like_the_best({}, "loss_mean") == []
    assert by_seed(groups["best"], "accuracy_mean") == {0: 0.80, 1: 0.82, 2: 0.84}
