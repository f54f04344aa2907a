"""Significance of differences between rows."""

import math

import numpy as np
import pytest

from rayfl.results.spread import by_seed, difference, differences, like_the_best


def seeds(*values):
    return dict(enumerate(values))


def rows(*values, **more):
    return [{"seed": seed, "accuracy_mean": value} | more for seed, value in enumerate(values)]


def test_the_paired_test_by_hand():
    # differences 1, 2, 3: mean 2, deviation 1, t = 2 * sqrt(3); with two degrees of freedom p = 1 - t / sqrt(t^2 + 2)
    one, other = seeds(2, 4, 6), seeds(1, 2, 3)
    assert difference(one, other).p == difference(other, one).p == pytest.approx(1 - math.sqrt(12 / 14))
    assert difference(seeds(1.5, 2.5, 3.5), other).p == 0 and difference(other, other).p == 1


def test_the_tests_are_scipys():
    from scipy.stats import ttest_ind, ttest_rel

    one, other = [0.81, 0.79, 0.84, 0.80, 0.77], [0.80, 0.80, 0.81, 0.76, 0.75]
    assert difference(seeds(*one), seeds(*other)).p == pytest.approx(ttest_rel(one, other).pvalue)
    for n in (3, 5):
        few = {seed + 10: value for seed, value in enumerate(other[:n])}
        assert difference(seeds(*one), few).p == pytest.approx(ttest_ind(one, other[:n]).pvalue)


def test_common_effects_of_a_seed_cancel():
    """Both vary by 0.2 over seeds, and one is always 0.01 better; unpaired nobody could tell."""
    one, other = {0: 0.51, 1: 0.61, 2: 0.712}, {0: 0.50, 1: 0.60, 2: 0.70}
    found = difference(one, other)
    assert found.seeds == 3 and found.by == pytest.approx(0.032 / 3) and found.is_clear
    assert difference(other, one).by == pytest.approx(-found.by)
    unpaired = difference({seed + 10: value for seed, value in one.items()}, other)
    assert unpaired.seeds == 0 and unpaired.is_clear is False


def test_few_seeds_by_hand():
    # both deviate by sqrt(0.02), so t = 0.25 / sqrt(0.02); with two degrees of freedom p = 1 - t / sqrt(t^2 + 2)
    one, other = seeds(0.9, 0.7), seeds(0.65, 0.45)
    found = difference(one, other)
    assert found.by == pytest.approx(0.25) and found.p == pytest.approx(1 - 0.25 / math.sqrt(0.25**2 + 0.04))
    assert found.is_clear is False and difference(one, seeds(0.3, 0.1)).is_clear is False
    assert difference(one, seeds(0.2, 0.0)).is_clear
    # one seed varies as the other row's do
    assert difference(one, {5: 0.4}).p == pytest.approx(1 - 2 / math.pi * math.atan(0.4 / math.sqrt(0.03)))
    alone = difference({0: 0.9}, {0: 0.1})
    assert alone.p is None and alone.is_clear is None
    assert difference({0: 0.9}, {0: 0.9}).is_clear is False


def test_equal_rows_are_told_apart_in_a_twentieth_of_cases():
    """Of 2,000 pairs: 5 standard deviations of the share are 0.024."""
    drawn = np.random.default_rng(0).standard_normal((2000, 2, 3))
    for n in (2, 3):
        apart = [difference(seeds(*one[:n]), {i + 9: v for i, v in enumerate(other[:n])}) for one, other in drawn]
        assert abs(np.mean([found.is_clear for found in apart]) - 0.05) < 0.024


def test_a_row_that_is_better_on_the_common_seeds_is_not_worse():
    """It has two more seeds, which are bad."""
    best, more = seeds(0.79, 0.795, 0.80), seeds(0.80, 0.81, 0.82, 0.5, 0.5)
    found = difference(best, more)
    assert found.by < 0 < found.by_all and found.p is not None and found.p < 0.05 and found.is_clear is False


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
