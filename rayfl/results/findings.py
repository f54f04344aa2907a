"""Results of the runs in a folder: the best point of every row, and the search that found it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rayfl.config import ConfigError, choose
from rayfl.results.folder import RunFolder, records
from rayfl.results.rows import Record, best_trials, judge_of, judged, numbers_of
from rayfl.results.tuned import Best, tuned


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
    """Return the findings of all runs below a folder. `judge`: ranks the rows; the best point of a row is always
    selected by the sweep's metric. Raise ConfigError if no run was evaluated or has the metric."""
    trials = records(folder)
    found = judged(trials)
    found = [record for record in found if record["status"] == "finished"] or found
    if not found:
        raise ConfigError(f"{folder}: the folder contains no evaluated run. Allowed: the folder of a sweep or a run")
    search = RunFolder.open(folder).config.get("search", {}) if RunFolder.exists(folder) else {}
    best = best_trials(found, search.get("metric"), search.get("mode", "auto"))
    if judge is not None:
        choose(numbers_of(best), judge, "--metric", "metric")
    return findings(folder, best, trials, judge)
