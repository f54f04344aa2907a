"""Which rows count.

A row (`RunFolder.record`, or the same read back from MLflow) is one run: `label`, `title`, `seed`, `params`, `facts`,
and the numbers of its result.json. Rows of a label are seeds of one method.
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
    """The rows that have a number for the metric that they are judged by."""
    return [record for record in records if record["facts"]["judge"] in record]


def judge_of(records: Sequence[Record]) -> str:
    """What these rows are compared by, where no sweep says it: the first of their judges that all of them have a number
    for, so clients' own accuracy if only some are judged by that; else the first."""
    judges = list(dict.fromkeys(record["facts"]["judge"] for record in records))
    shared = (judge for judge in judges if all(judge in record for record in judged(records)))
    return next(shared, judges[0])


def best_trials(
    records: Iterable[Record], metric: str | None = None, mode: Better | Literal["auto"] = "auto"
) -> list[Record]:
    """The rows of each label's best point: the parameters, but the seed, with the best mean of `metric`; unless given,
    of what each row is judged by. `mode`: which end of it is best; auto: the good end, as rows state it.

    Points that ran on more seeds come first: a sweep confirms only the best of its first seed on the others.
    Rows without a finite `metric` (failed, stopped early) count for no point. Of equals, the first.
    """
    points: dict[str, dict[Any, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if math.isfinite(record.get(metric or record["facts"]["judge"], math.nan)):
            points[record["label"]][point_of(record)].append(record)

    def rank(rows: list[Record]) -> tuple[int, float]:
        judge = metric or rows[0]["facts"]["judge"]
        better = facts_of(rows[0]).better(judge) if mode == "auto" else mode
        return len(rows), (1 if better == "max" else -1) * mean_of(rows, judge)

    return [record for of_label in points.values() for record in max(of_label.values(), key=rank)]


def by_label(records: Iterable[Record], metric: str = "accuracy_mean") -> dict[str, list[Record]]:
    """The rows of each label by seed; labels from the best mean of the metric to the worst, those without any last."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record["label"]].append(record)

    def rank(name: str) -> tuple[bool, float, str]:
        rows = groups[name]
        sign = -1 if facts_of(rows[0]).better(metric) == "max" else 1
        found = values_of(rows, metric)
        return not found, sign * statistics.fmean(found) if found else 0.0, name

    return {name: sorted(groups[name], key=lambda row: row["seed"]) for name in sorted(groups, key=rank)}


def capacities(records: Iterable[Record]) -> list[float]:
    """The capacities whose networks were judged on the global test set in some row, largest first."""
    return sorted({c for row in records for c in row["facts"]["capacities"] if _capacity(row, c) in row}, reverse=True)


def point_of(record: Record) -> tuple:
    """What tells the points of a search apart: all parameters but the seed, as text, as MLflow keeps them."""
    return tuple(sorted((k, str(v)) for k, v in record["params"].items() if k != "seed"))


def values_of(records: Iterable[Record], key: str) -> list[float]:
    return [record[key] for record in records if key in record]


def mean_of(records: Iterable[Record], key: str) -> float:
    return statistics.fmean(values_of(records, key))


def titles_of(records: Iterable[Record]) -> dict[str, str]:
    """Label -> the name that people read: its title, with the label where another row has the same one."""
    titles = {record["label"]: record["title"] for record in records}
    shared = {title for title, count in Counter(titles.values()).items() if count > 1}
    return {label: f"{title} ({label})" if title in shared else title for label, title in titles.items()}


def _capacity(record: Record, capacity: float) -> str:
    return named(facts_of(record).score, capacity)
