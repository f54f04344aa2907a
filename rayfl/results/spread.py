"""Comparison of rows with the variation between seeds.

Two rows with at least three common seeds are compared by the two-sided paired t-test (Student 1908): a seed gives both
rows the same data split, clients and initial network, so its effect on both cancels. With fewer common seeds, the
difference is compared with the standard deviation of the difference of two runs. With one seed each, nothing is known.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, Any]]
"""Rows of one label."""

LEVEL = 0.05
"""Significance level of the t-test."""

PAIRED = 3
"""Common seeds required by the t-test."""


@dataclass(frozen=True)
class Difference:
    """Difference between two rows over seeds."""

    by: float
    """The first row's mean minus the second row's, in units of the metric."""
    seeds: int
    """Number of common seeds."""
    p: float | None = None
    """Probability from the paired t-test; None with fewer than `PAIRED` common seeds."""
    spread: float | None = None
    """Standard deviation of the difference of two runs, without a t-test; None if no row has two seeds."""

    @property
    def is_clear(self) -> bool | None:
        """True if the rows differ, False for equal means; None if unknown."""
        if self.by == 0:
            return False
        if self.p is not None:
            return self.p < LEVEL
        return None if self.spread is None else abs(self.by) > self.spread


def difference(one: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """Return the difference of two rows (seed -> number) with at least one number each."""
    common = sorted(one.keys() & other.keys())
    if len(common) >= PAIRED:
        each = [one[seed] - other[seed] for seed in common]
        return Difference(statistics.fmean(each), len(common), p=p_value(each))
    known = [list(row.values()) for row in (one, other)]
    deviations = [statistics.stdev(values) for values in known if len(values) > 1]
    # a row with one seed is assumed to vary like the other row
    spread = math.hypot(*deviations) * math.sqrt(2 / len(deviations)) if deviations else None
    return Difference(statistics.fmean(known[0]) - statistics.fmean(known[1]), len(common), spread=spread)


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation of two or more numbers; NaN if one of them is not finite."""
    # statistics.stdev raises AttributeError
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def p_value(differences: Sequence[float]) -> float:
    """Return the p-value of the two-sided paired t-test of two or more differences. 0 if all are equal and not 0."""
    # scipy.stats.ttest_rel takes a second to import and warns about equal differences
    from scipy.special import stdtr

    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation == 0:
        return float(mean == 0)
    return float(2 * stdtr(len(differences) - 1, -abs(mean) / deviation * math.sqrt(len(differences))))


def by_seed(rows: Rows, metric: str) -> dict[int, float]:
    """Return seed -> finite number of the row."""
    return {row["seed"]: row[metric] for row in rows if math.isfinite(row.get(metric, math.nan))}


def differences(groups: Mapping[str, Rows], metric: str) -> dict[str, Difference]:
    """Return label -> difference between the first label's rows and its rows. `groups`: label -> rows, the best first
    (`rows.by_label`); labels without a number are left out."""
    found = {label: seeds for label, rows in groups.items() if (seeds := by_seed(rows, metric))}
    first, *others = found or [""]
    return {label: difference(found[first], found[label]) for label in others}


def like_the_best(groups: Mapping[str, Rows], metric: str) -> list[str]:
    """Return the labels without a clear difference from the first one; `groups` as for `differences`."""
    return [label for label, found in differences(groups, metric).items() if found.is_clear is False]
