"""Whether rows differ by more than their seeds do.

Two rows that have three or more seeds in common are held against each other seed by seed (the two-sided paired t-test,
Student 1908): a seed gives both rows the same data split, clients and start, so what it does to both falls out. Rows
with fewer common seeds are held against the standard deviation of the difference of two of their runs. Of rows with one
seed each nothing is known.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, Any]]
"""Of one label: `tables.Record`s."""

LEVEL = 0.05
"""Probability of a difference at least as large between rows that are alike, below which rows differ."""

PAIRED = 3
"""Common seeds that the test wants."""


@dataclass(frozen=True)
class Difference:
    """Between two rows, over seeds."""

    by: float
    """The first row's mean minus the second row's, in units of the metric."""
    seeds: int
    """How many the rows have in common."""
    p: float | None = None
    """Of the paired test, which needs `PAIRED` common seeds."""
    spread: float | None = None
    """Without a test the standard deviation of the difference of two runs; None if no row has two seeds."""

    @property
    def is_clear(self) -> bool | None:
        """Whether the rows differ; None where nobody can tell."""
        if self.p is not None:
            return self.p < LEVEL
        return None if self.spread is None else abs(self.by) > self.spread


def difference(one: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """Between two rows that have at least one number each: seed -> number."""
    common = sorted(one.keys() & other.keys())
    if len(common) >= PAIRED:
        each = [one[seed] - other[seed] for seed in common]
        return Difference(statistics.fmean(each), len(common), p=p_value(each))
    known = [list(row.values()) for row in (one, other)]
    deviations = [statistics.stdev(values) for values in known if len(values) > 1]
    # a row of one seed is taken to vary as the other one does
    spread = math.hypot(*deviations) * math.sqrt(2 / len(deviations)) if deviations else None
    return Difference(statistics.fmean(known[0]) - statistics.fmean(known[1]), len(common), spread=spread)


def p_value(differences: Sequence[float]) -> float:
    """The two-sided paired t-test of two or more differences: how probable a mean so far from 0 is, if they are normal
    around 0. 0 if all are equal and not 0."""
    # not scipy.stats.ttest_rel: it takes a second to import, and warns of equal differences
    from scipy.special import stdtr

    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation == 0:
        return float(mean == 0)
    return float(2 * stdtr(len(differences) - 1, -abs(mean) / deviation * math.sqrt(len(differences))))


def by_seed(rows: Rows, metric: str) -> dict[int, float]:
    """Seed -> the row's finite number."""
    return {row["seed"]: row[metric] for row in rows if math.isfinite(row.get(metric, math.nan))}


def differences(groups: Mapping[str, Rows], metric: str) -> dict[str, Difference]:
    """Label -> how far the first label's rows are ahead of its rows. `groups`: the rows of each label, the best first,
    as `tables.by_label` gives them; labels without a number are left out."""
    found = {label: seeds for label, rows in groups.items() if (seeds := by_seed(rows, metric))}
    first, *others = found or [""]
    return {label: difference(found[first], found[label]) for label in others}


def like_the_best(groups: Mapping[str, Rows], metric: str) -> list[str]:
    """The labels that do not differ from the first one, as far as is known; `groups` as for `differences`."""
    return [label for label, found in differences(groups, metric).items() if found.is_clear is False]
