"""Results of the runs in a folder: the best point of every row, and the search that found it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rayfl.config import ConfigError, choose
from rayfl.results.folder import RunFolder, records, runs
from rayfl.results.rows import Record, best_trials, judge_of, judged, numbers_of, point_of, titles_of
from rayfl.results.tuned import Best, tuned

UNFINISHED = {"running": "has not ended", "stopped": "was stopped", "failed": "has failed"}
"""Status -> words for it."""


@dataclass(frozen=True)
class Findings:
    """Results of one sweep, one run, or several runs below a folder."""

    folder: Path
    run: RunFolder | None
    """Sweep or run in the folder itself; None if the folder only contains other runs."""
    best: Sequence[Record]
    """Runs of every row's best point."""
    trials: Sequence[Record]
    """All runs, failed ones included."""
    judge: str
    """Metric that compares rows."""
    metric: str
    """Metric that selected the best points."""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Configuration in the folder; {} if the folder only contains other runs."""
        return self.run.config if self.run else {}

    @property
    def mode(self) -> Any:
        """Better direction of `metric`; auto: as the facts state."""
        return self.config.get("search", {}).get("mode", "auto")

    @property
    def paths(self) -> tuple[str, ...]:
        """Dotted settings that the search tried."""
        return self.run.facts.tuned if self.run else ()

    @cached_property
    def tuned(self) -> dict[str, Best]:
        return tuned(self.best, self.trials, self.paths, self.metric)

    @property
    def finished(self) -> list[Record]:
        return [trial for trial in self.trials if trial["status"] == "finished"]


def findings(folder: Path, best: Sequence[Record], trials: Sequence[Record], judge: str | None = None) -> Findings:
    """Return the findings of these rows of a folder. `judge`: metric that ranks them. Default: the sweep's."""
    if not RunFolder.exists(folder):
        metric = judge_of(best)
        return Findings(folder, None, best, trials, judge or metric, metric)
    run = RunFolder.open(folder)
    metric = run.config.get("search", {}).get("metric", run.facts.judge)
    return Findings(folder, run, best, trials, judge or run.facts.judge, metric)


def found_in(folder: Path, judge: str | None = None) -> Findings:
    """Return the findings of a sweep, of a run, or of several runs below a folder. `judge`: ranks the rows; the best
    point of a row is always selected by the sweep's metric. Raise ConfigError if no run was evaluated, has a
    finite result, or has the metric."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder. Allowed: the folder of a sweep or a run")
    trials = records(folder) if RunFolder.exists(folder) else _side_by_side(folder)
    if not trials:
        raise ConfigError(f"{folder}: the folder contains no run. Allowed: the folder of a sweep or a run")
    found = judged(trials)
    found = [record for record in found if record["status"] == "finished"] or found
    if not found:
        raise ConfigError(f"{folder}: no run in the folder has been evaluated. Hint: wait for its first evaluation")
    search = RunFolder.open(folder).config.get("search", {}) if RunFolder.exists(folder) else {}
    best = best_trials(found, search.get("metric"), search.get("mode", "auto"))
    if not best:
        metric = search.get("metric", judge_of(found))
        raise ConfigError(f"{folder}: no run in the folder has a finite {metric}. Hint: see metrics.jsonl of each run")
    if judge is not None:
        choose(numbers_of(best), judge, "--metric", "metric")
    return findings(folder, best, trials, judge)


def _side_by_side(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the runs below a folder. Labels and titles of runs that differ in more than the seed begin
    with their folders. Raise ConfigError for a sweep, whose best points are selected by its own metric."""
    below = list(runs(folder))
    if sweeps := [str(run.path.relative_to(folder)) for run in below if run.kind == "sweep"]:
        raise ConfigError(
            f"{folder}: the folder contains the sweeps {', '.join(sweeps)}. Allowed: the folder of one sweep. Hint: "
            "`rayfl compare` compares several"
        )
    rows = [run.record() for run in below if run.kind == "run"]
    points: dict[str, dict[tuple, Record]] = {}
    for row in rows:
        points.setdefault(row["label"], {}).setdefault(point_of(row), row)
    for row in rows:
        if len(alike := points[row["label"]]) > 1:
            before = f"{Path(alike[point_of(row)]['path']).relative_to(folder)}/"
            row |= {"label": before + row["label"], "title": before + row["title"]}
    return rows


def unfinished(records: Iterable[Record]) -> list[str]:
    """Return a note on each of these runs or sweeps whose results are not final."""
    return [
        f"{record['title']} {UNFINISHED[record['status']]}: these results are not final"
        for record in records
        if record["status"] in UNFINISHED
    ]


def unranked(best: Iterable[Record], trials: Iterable[Record], metric: str) -> list[str]:
    """Return a note on each row of `trials` that is not in `best`. `metric`: selected the best points."""
    ranked = {record["label"] for record in best}
    return [
        f"{title}: not ranked, because no finished trial has a finite {metric}"
        for label, title in titles_of(trials).items()
        if label not in ranked
    ]
