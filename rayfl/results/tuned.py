"""What a search found: the best point of every row, its place among the points that were tried, and what leaves a doubt
whether the row could do better."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose, isfinite
from typing import Literal

from rayfl.config.plain import last, short
from rayfl.results.rows import Record, facts_of, mean_of, point_of
from rayfl.results.summary import Better

Value = int | float | str
"""Of a setting. What is no number is text, as MLflow keeps it."""

Doubt = Literal["lowest", "highest"]
"""A best value at an end of those that were tried: beyond it may be a better one."""

ARROWS: Mapping[Doubt, str] = {"lowest": "↓", "highest": "↑"}
"""The way to go on."""


@dataclass(frozen=True)
class Setting:
    """One tuned setting of a row's best point."""

    path: str
    value: Value
    tried: tuple[Value, ...]
    """The values of all the row's trials: ascending if all are numbers, else as they came."""

    @property
    def is_ordered(self) -> bool:
        return not any(isinstance(value, str) for value in self.tried)

    @property
    def place(self) -> str:
        """ "2 of 4", counted from the smallest; "of 3" of values that have no order."""
        place = f"{self.tried.index(self.value) + 1} " if self.is_ordered else ""
        return f"{place}of {len(self.tried)}"

    @property
    def doubt(self) -> Doubt | None:
        """Whether it stands at an end of what was tried, if that has ends."""
        if not self.is_ordered or len(self.tried) < 2:
            return None
        if self.value == self.tried[0]:
            return "lowest"
        return "highest" if self.value == self.tried[-1] else None

    def __str__(self) -> str:
        """ "0.1 (1 of 4) ↓"."""
        return f"{short(self.value)} ({self.place})" + (f" {ARROWS[self.doubt]}" if self.doubt else "")


@dataclass(frozen=True)
class Best:
    """The best point of a row."""

    settings: tuple[Setting, ...]
    tied: tuple[str, ...]
    """Other points that are exactly as good on the seeds that both ran on."""

    @property
    def point(self) -> str:
        """ "lr 0.1, momentum 0.9"."""
        return _text({setting.path: setting.value for setting in self.settings})

    def doubts(self) -> list[str]:
        """A sentence for each reason to search on, without the row's name."""
        names = names_of(setting.path for setting in self.settings)
        found = [
            f"the best {names[s.path]}, {short(s.value)}, is the {s.doubt} of {len(s.tried)} values tried: "
            f"try {'lower' if s.doubt == 'lowest' else 'higher'} ones"
            for s in self.settings
            if s.doubt
        ]
        return found + ([f"{self.point} is tied with {' and '.join(self.tied)}"] if self.tied else [])


def tuned(
    best: Sequence[Record],
    trials: Iterable[Record],
    paths: Sequence[str],
    metric: str | None = None,
    mode: Better | Literal["auto"] = "auto",
) -> dict[str, Best]:
    """Label -> its best point, from the rows of it and those of all trials, failed ones included. `paths`: the dotted
    settings that the search tries (`Facts.tuned`); without any there is nothing. `metric` and `mode`: what the search
    went by, as for `best_trials`; a tie is one of that number."""
    found = {}
    for row in best if paths else ():
        if row["label"] in found:
            continue
        own = [trial for trial in trials if trial["label"] == row["label"]]
        settings = []
        for path in paths:
            tried = tuple(dict.fromkeys(value_of(trial, path) for trial in own))
            ordered = not any(isinstance(value, str) for value in tried)
            settings.append(Setting(path, value_of(row, path), tuple(sorted(tried)) if ordered else tried))
        judge = metric or row["facts"]["judge"]
        points = _points(own, judge)
        mine = points.pop(point_of(row), [])
        tied = [
            _text({path: value_of(rows[0], path) for path in paths})
            for rows in points.values()
            if _tie(mine, rows, judge)
        ]
        found[row["label"]] = Best(tuple(settings), tuple(tied))
    return found


def responses(
    trials: Iterable[Record], path: str, metric: str, mode: Better | Literal["auto"] = "auto"
) -> dict[str, dict[Value, float]]:
    """Label -> value of a setting -> the best mean of the metric that a point with this value has, on the seeds that
    all points of the label ran on: there the search compared them. Values ascend if all are numbers."""
    labels: dict[str, list[Record]] = {}
    for trial in trials:
        labels.setdefault(trial["label"], []).append(trial)
    found = {}
    for label, rows in labels.items():
        points = _points(rows, metric)
        seeds = set.intersection(*({row["seed"] for row in some} for some in points.values())) if points else set()
        best = max if (facts_of(rows[0]).better(metric) if mode == "auto" else mode) == "max" else min
        heights: dict[Value, float] = {}
        for some in points.values():
            if shared := [row for row in some if row["seed"] in seeds]:
                value, height = value_of(some[0], path), mean_of(shared, metric)
                heights[value] = best(heights.get(value, height), height)
        ordered = not any(isinstance(value, str) for value in heights)
        found[label] = dict(sorted(heights.items()) if ordered else heights.items())
    return {label: heights for label, heights in found.items() if heights}


def notes(found: Mapping[str, Best], titles: Mapping[str, str]) -> list[str]:
    """What leaves a doubt, a sentence each, with the rows that it is of."""
    said: dict[str, list[str]] = {}
    for label, best in found.items():
        for doubt in best.doubts():
            said.setdefault(doubt, []).append(titles[label])
    return [f"{'; '.join(of)}: {doubt}" for doubt, of in said.items()]


def names_of(paths: Iterable[str]) -> dict[str, str]:
    """Path -> what tables call it: its end, or all of it if two paths end alike."""
    paths = list(paths)
    ends = [last(path) for path in paths]
    return {path: path if ends.count(end) > 1 else end for path, end in zip(paths, ends, strict=True)}


def value_of(record: Record, path: str) -> Value:
    """What a row has at a dotted path; of a section whose name chooses its class, the name."""
    params = record["params"]
    text = str(params.get(path, params.get(f"{path}.name", "–")))
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _points(rows: Iterable[Record], metric: str) -> dict[tuple, list[Record]]:
    """The rows of every point that have a finite number."""
    points: dict[tuple, list[Record]] = {}
    for row in rows:
        if isfinite(row.get(metric, float("nan"))):
            points.setdefault(point_of(row), []).append(row)
    return points


def _tie(mine: Sequence[Record], others: Sequence[Record], metric: str) -> bool:
    seeds = {row["seed"] for row in mine} & {row["seed"] for row in others}
    means = [mean_of([row for row in rows if row["seed"] in seeds], metric) for rows in (mine, others) if seeds]
    # a mean over capacities may differ in its last bit
    return bool(means) and isclose(*means, rel_tol=1e-9)


def _text(point: Mapping[str, Value]) -> str:
    names = names_of(point)
    return ", ".join(f"{names[path]} {short(value)}" for path, value in point.items())
