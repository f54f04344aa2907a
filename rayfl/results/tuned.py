"""Search results: each row's best point, its place among the values tried, and reasons to continue the search."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Literal

from rayfl.config.plain import last, short
from rayfl.results.rows import Record, facts_of, mean_of, point_of, points_of
from rayfl.results.summary import Better

Value = int | float | str
"""Value of a setting; text if it is not a number, as in MLflow."""

Doubt = Literal["lowest", "highest"]
"""Edge of the values tried at which the best value lies."""

MISSING = "–"
"""Value of a setting that a row does not have."""

ARROWS: Mapping[Doubt, str] = {"lowest": "↓", "highest": "↑"}
"""Direction in which to continue the search."""


@dataclass(frozen=True)
class Setting:
    """A tuned setting of a row's best point."""

    path: str
    value: Value
    tried: tuple[Value, ...]
    """Values of all trials of the row: ascending if all are numbers, otherwise in order of appearance."""

    @property
    def is_ordered(self) -> bool:
        return not any(isinstance(value, str) for value in self.tried)

    @property
    def place(self) -> str:
        """Rank from the smallest value, "2 of 4"; "of 3" for unordered values."""
        place = f"{self.tried.index(self.value) + 1} " if self.is_ordered else ""
        return f"{place}of {len(self.tried)}"

    @property
    def doubt(self) -> Doubt | None:
        """Edge of the values tried if the best value is there."""
        if not self.is_ordered or len(self.tried) < 2:
            return None
        if self.value == self.tried[0]:
            return "lowest"
        return "highest" if self.value == self.tried[-1] else None

    @property
    def note(self) -> str:
        """Return "(1 of 4) ↓"; "" for a setting that the row does not have."""
        return "" if self.value == MISSING else f"({self.place})" + (f" {ARROWS[self.doubt]}" if self.doubt else "")

    def __str__(self) -> str:
        """Return "0.1 (1 of 4) ↓", or a dash for a setting that the row does not have."""
        return f"{short(self.value)} {self.note}".rstrip()


@dataclass(frozen=True)
class Best:
    """Best point of a row."""

    settings: tuple[Setting, ...]
    tied: tuple[str, ...]
    """Other points with equal results on the common seeds."""

    @property
    def point(self) -> str:
        """Text of the point: "lr 0.1, momentum 0.9"."""
        return _text({setting.path: setting.value for setting in self.settings})

    def doubts(self) -> list[str]:
        """Return a clause for each reason to continue the search, without the row's name."""
        names = names_of(setting.path for setting in self.settings)
        found = [
            f"best {names[s.path]} {short(s.value)} is at the edge of the values tried ({short(s.tried[0])} to "
            f"{short(s.tried[-1])}); try {'smaller' if s.doubt == 'lowest' else 'larger'} values"
            for s in self.settings
            if s.doubt
        ]
        return found + ([f"{self.point} is tied with {' and '.join(self.tied)}"] if self.tied else [])


def tuned(
    best: Sequence[Record], trials: Iterable[Record], paths: Sequence[str], metric: str | None = None
) -> dict[str, Best]:
    """Return label -> best point; {} without `paths`. `best`: rows of the best points; `trials`: of all trials;
    `paths`: dotted settings of the search (`Facts.tuned`); `metric`: as for `best_trials`, also for ties."""
    found = {}
    for row in best if paths else ():
        if row["label"] in found:
            continue
        judge = metric or row["facts"]["judge"]
        own = [trial for trial in trials if trial["label"] == row["label"] and _was_tried(trial, judge)]
        settings = []
        for path in paths:
            tried = tuple(dict.fromkeys(value_of(trial, path) for trial in own))
            ordered = not any(isinstance(value, str) for value in tried)
            settings.append(Setting(path, value_of(row, path), tuple(sorted(tried)) if ordered else tried))
        points = points_of(own, judge)
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
    """Return label -> value of a setting -> best mean of the metric over points with this value, on the seeds common to
    all points of the label. Values ascend if all are numbers. Labels without the setting are missing."""
    labels: dict[str, list[Record]] = {}
    for trial in trials:
        labels.setdefault(trial["label"], []).append(trial)
    found = {}
    for label, rows in labels.items():
        points = points_of(rows, metric)
        seeds = set.intersection(*({row["seed"] for row in some} for some in points.values())) if points else set()
        best = max if (facts_of(rows[0]).better(metric) if mode == "auto" else mode) == "max" else min
        heights: dict[Value, float] = {}
        for some in points.values():
            value, shared = value_of(some[0], path), [row for row in some if row["seed"] in seeds]
            if shared and value != MISSING:
                height = mean_of(shared, metric)
                heights[value] = best(heights.get(value, height), height)
        ordered = not any(isinstance(value, str) for value in heights)
        found[label] = dict(sorted(heights.items()) if ordered else heights.items())
    return {label: heights for label, heights in found.items() if heights}


def notes(found: Mapping[str, Best], titles: Mapping[str, str]) -> list[str]:
    """Return a sentence for each doubt, with the names of its rows."""
    rows: dict[str, list[str]] = {}
    for label, best in found.items():
        for doubt in best.doubts():
            rows.setdefault(doubt, []).append(titles[label])
    return [f"{'; '.join(of)}: {doubt}" for doubt, of in rows.items()]


def names_of(paths: Iterable[str]) -> dict[str, str]:
    """Return path -> column title: the last part of the path, or the whole path if last parts are equal."""
    paths = list(paths)
    ends = [last(path) for path in paths]
    return {path: path if ends.count(end) > 1 else end for path, end in zip(paths, ends, strict=True)}


def value_of(record: Record, path: str) -> Value:
    """Return a row's value at a dotted path; for a section, its `name`; for a list of sections, the text of all."""
    params = record["params"]
    text = str(params.get(path, params.get(f"{path}.name", _entries(params, path))))
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _entries(params: Mapping[str, object], path: str) -> str:
    """Return a list of sections as text: "topk(share=0.1), sign"."""
    entries: dict[str, dict[str, object]] = {}
    for key, value in params.items():
        index, dot, name = key.removeprefix(f"{path}.").partition(".")
        if dot and index.isdecimal() and key.startswith(f"{path}."):
            entries.setdefault(index, {})[name] = value
    texts = []
    for entry in entries.values():
        others = ", ".join(f"{name}={value}" for name, value in entry.items() if name != "name")
        texts.append(f"{entry.get('name', '')}({others})" if others else str(entry["name"]))
    return ", ".join(texts) or MISSING


def _was_tried(trial: Record, metric: str) -> bool:
    """Return whether a trial ended by itself or was evaluated: one that the user stopped says nothing on its point."""
    return metric in trial or trial["status"] not in ("running", "stopped")


def _tie(mine: Sequence[Record], others: Sequence[Record], metric: str) -> bool:
    seeds = {row["seed"] for row in mine} & {row["seed"] for row in others}
    means = [mean_of([row for row in rows if row["seed"] in seeds], metric) for rows in (mine, others) if seeds]
    # a mean over capacities may differ in its last bit
    return bool(means) and isclose(*means, rel_tol=1e-9)


def _text(point: Mapping[str, Value]) -> str:
    names = names_of(point)
    return ", ".join(f"{names[path]} {short(value)}" for path, value in point.items() if value != MISSING)
