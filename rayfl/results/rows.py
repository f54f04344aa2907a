"""Selection of rows.

A row (`RunFolder.record`, or the same read back from MLflow) is one run: `label`, `title`, `seed`, `params`, `facts`,
and the numbers of its result.json. Rows with one label are seeds of one method.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rayfl.metrics import named
from rayfl.results.summary import Better, Facts

Record = Mapping[str, Any]


def facts_of(record: Record) -> Facts:
    return Facts(**record["facts"])


def judged(records: Iterable[Record]) -> list[Record]:
    """Return the rows that have a number for their own judge metric."""
    return [record for record in records if record["facts"]["judge"] in record]


def numbers_of(records: Iterable[Record]) -> dict[str, None]:
    """Return the names of the results that can rank rows."""
    return dict.fromkeys(
        name
        for record in records
        for name, value in record.items()
        if isinstance(value, int | float) and name != "seed"
    )


def judge_of(records: Sequence[Record]) -> str:
    """Return the metric that compares rows outside a sweep: the first judge metric of all, otherwise the first."""
    judges = list(dict.fromkeys(record["facts"]["judge"] for record in records))
    shared = (judge for judge in judges if all(judge in record for record in judged(records)))
    return next(shared, judges[0])


def best_trials(
    records: Iterable[Record], metric: str | None = None, mode: Better | Literal["auto"] = "auto"
) -> list[Record]:
    """Return the rows of each label's best point: the parameters except the seed with the best mean of `metric`.
    Default: each row's judge metric. `mode`: the better direction; auto: as the rows' facts state.

    Points with more seeds rank first, because a sweep confirms only the best points of its first seed on the others.
    A point that was run several times on a seed, because a search drew it again, counts once: with the first of these
    rows, in the order given. Rows without a finite `metric` (failed, stopped early) are ignored. Ties go to the first
    point by `point_of`.
    """
    labels: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        labels[record["label"]].append(record)
    best: list[Record] = []
    for rows in labels.values():
        judge = metric or rows[0]["facts"]["judge"]
        better = facts_of(rows[0]).better(judge) if mode == "auto" else mode
        sign = 1 if better == "max" else -1
        points = [point for _, point in sorted(points_of(rows, judge).items())]
        best += max(points, key=lambda point: (len(point), sign * mean_of(point, judge)), default=[])
    return best


def points_of(records: Iterable[Record], metric: str) -> dict[tuple, list[Record]]:
    """Return the rows of each point (`point_of`) with a finite metric, one per seed: the first, in the order given."""
    points: dict[tuple, dict[int, Record]] = defaultdict(dict)
    for record in records:
        if math.isfinite(record.get(metric, math.nan)):
            points[point_of(record)].setdefault(record["seed"], record)
    return {point: list(rows.values()) for point, rows in points.items()}


def by_label(records: Iterable[Record], metric: str = "accuracy_mean") -> dict[str, list[Record]]:
    """Return each label's rows ordered by seed; labels from best to worst mean of the metric (`finite_mean`), those
    without one last."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record["label"]].append(record)

    def rank(name: str) -> tuple[bool, float, str]:
        rows = groups[name]
        sign = -1 if facts_of(rows[0]).better(metric) == "max" else 1
        mean = finite_mean(rows, metric)
        return mean is None, sign * (mean or 0.0), name

    return {name: sorted(groups[name], key=lambda row: row["seed"]) for name in sorted(groups, key=rank)}


def capacities(records: Iterable[Record]) -> list[float]:
    """Return the capacities with a score on the global test set in any row, largest first."""
    return sorted({c for row in records for c in row["facts"]["capacities"] if _capacity(row, c) in row}, reverse=True)


def point_of(record: Record) -> tuple:
    """Return the identity of a search point: all parameters except the seed, as text, as MLflow stores them."""
    return tuple(sorted((k, str(v)) for k, v in record["params"].items() if k != "seed"))


def values_of(records: Iterable[Record], key: str) -> list[float]:
    return [record[key] for record in records if key in record]


def mean_of(records: Iterable[Record], key: str) -> float:
    return statistics.fmean(values_of(records, key))


def finite_mean(records: Iterable[Record], key: str) -> float | None:
    """Return the mean of the rows' numbers; None if they have none, or if it is not finite (a run diverged)."""
    found = values_of(records, key)
    mean = statistics.fmean(found) if found else math.nan
    return mean if math.isfinite(mean) else None


def titles_of(records: Iterable[Record]) -> dict[str, str]:
    """Return label -> displayed name: the title, followed by the label if titles are equal."""
    titles = {record["label"]: record["title"] for record in records}
    shared = {title for title, count in Counter(titles.values()).items() if count > 1}
    return {label: f"{title} ({label})" if title in shared else title for label, title in titles.items()}


def _capacity(record: Record, capacity: float) -> str:
    return named(facts_of(record).score, capacity)
