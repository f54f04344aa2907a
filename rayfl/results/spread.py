"""Comparison of rows with the variation between seeds.

Two rows with at least three common seeds are compared by the two-sided paired t-test (Student 1908): a seed gives both
rows the same data split, clients and initial network, so its effect on both cancels. With fewer common seeds, they are
compared by the t-test of two samples of equal variance. With one seed each, nothing is known. No p-value is corrected
for the number of rows.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayfl.results.conditions import is_comparable

Rows = Sequence[Mapping[str, Any]]
"""Rows of one label."""

LEVEL = 0.05
"""Significance level of the t-tests."""

PAIRED = 3
"""Common seeds required by the paired t-test."""


@dataclass(frozen=True)
class Difference:
    """Difference between two rows over seeds."""

    by: float
    """The first row's mean minus the second row's on the common seeds, or without a paired test on all, in units of the
    metric."""
    by_all: float
    """The same on all seeds, by which rows are ranked."""
    seeds: int
    """Number of common seeds."""
    p: float | None = None
    """Probability from the t-test, paired with at least `PAIRED` common seeds; None if no row has two seeds."""

    @property
    def is_clear(self) -> bool | None:
        """True if the rows differ; False if not, or if the two means differ in sign; None if unknown."""
        if self.by * self.by_all <= 0:
            return False
        return None if self.p is None else self.p < LEVEL


def difference(one: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """Return the difference of two rows (seed -> number) with at least one number each."""
    known = [list(row.values()) for row in (one, other)]
    by_all = statistics.fmean(known[0]) - statistics.fmean(known[1])
    common = sorted(one.keys() & other.keys())
    if len(common) >= PAIRED:
        each = [one[seed] - other[seed] for seed in common]
        error = statistics.stdev(each) / math.sqrt(len(each))
        by = statistics.fmean(each)
        return Difference(by, by_all, len(common), p_value(by, error, len(each) - 1))
    free = sum(map(len, known)) - 2
    if not free:
        return Difference(by_all, by_all, len(common))
    squares = sum((len(values) - 1) * statistics.variance(values) for values in known if len(values) > 1)
    error = math.sqrt(squares / free * sum(1 / len(values) for values in known))
    return Difference(by_all, by_all, len(common), p_value(by_all, error, free))


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation of two or more numbers; NaN if one of them is not finite."""
    # statistics.stdev raises AttributeError
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def p_value(by: float, error: float, free: int) -> float:
    """Return the p-value of a two-sided t-test of a difference with this standard error and these degrees of freedom. 0
    if the error is 0 and the difference is not."""
    # scipy.stats takes a second to import and warns about equal differences
    from scipy.special import stdtr

    if error == 0:
        return float(by == 0)
    return float(2 * stdtr(free, -abs(by) / error))


def by_seed(rows: Rows, metric: str) -> dict[int, float]:
    """Return seed -> finite number of the row."""
    return {row["seed"]: row[metric] for row in rows if math.isfinite(row.get(metric, math.nan))}


def differences(groups: Mapping[str, Rows], metric: str) -> dict[str, Difference]:
    """Return label -> difference between the first label's rows and its rows. `groups`: label -> rows, the best first
    (`rows.by_label`); labels without a number, or under other conditions than the first, are left out."""
    found = {label: seeds for label, rows in groups.items() if (seeds := by_seed(rows, metric))}
    first, *others = found or [""]
    return {
        label: difference(found[first], found[label]) for label in others if is_comparable(groups[first], groups[label])
    }


def like_the_best(groups: Mapping[str, Rows], metric: str) -> list[str]:
    """Return the labels without a clear difference from the first one; `groups` as for `differences`."""
    return [label for label, found in differences(groups, metric).items() if found.is_clear is False]
