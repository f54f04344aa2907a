"""What came out of the runs of a folder: the best point of every row, and how it was found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rayfl.config import ConfigError
from rayfl.results.folder import RunFolder, records
from rayfl.results.rows import Record, best_trials, judge_of, judged
from rayfl.results.tuned import Best, tuned


@dataclass(frozen=True)
class Findings:
    """Of one sweep, of one run, or of several runs below a folder."""

    folder: Path
    run: RunFolder | None
    """The sweep or run that the folder holds; None if it only holds others."""
    best: Sequence[Record]
    """The runs of every row's best point."""
    trials: Sequence[Record]
    """All runs, failed ones included."""
    judge: str
    """The metric by which rows are compared."""
    metric: str
    """The metric by which the best points were chosen."""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """As the folder has it; {} where it only holds other runs."""
        return self.run.config if self.run else {}

    @property
    def mode(self) -> Any:
        """Which end of `metric` is best; auto: its own good end."""
        return self.config.get("search", {}).get("mode", "auto")

    @property
    def paths(self) -> tuple[str, ...]:
        """The dotted settings that the search tried."""
        return self.run.facts.tuned if self.run else ()

    @cached_property
    def tuned(self) -> dict[str, Best]:
        return tuned(self.best, self.trials, self.paths, self.metric, self.mode)

    @property
    def finished(self) -> list[Record]:
        return [trial for trial in self.trials if trial["status"] == "finished"]


def findings(folder: Path, best: Sequence[Record], trials: Sequence[Record], metric: str | None = None) -> Findings:
    """Of these rows of a folder. `metric`: by which the best were chosen, unless it is the sweep's own."""
    if not RunFolder.exists(folder):
        judge = judge_of(best)
        return Findings(folder, None, best, trials, judge, metric or judge)
    run = RunFolder.open(folder)
    judge = run.facts.judge
    return Findings(folder, run, best, trials, judge, metric or run.config.get("search", {}).get("metric", judge))


def found_in(folder: Path, metric: str | None = None) -> Findings:
    """Of all runs below a folder: the best rows by `metric`, or by what a sweep was tuned by. A ConfigError if no run
    was evaluated."""
    trials = records(folder)
    found = judged(trials)
    found = [record for record in found if record["status"] == "finished"] or found
    if not found:
        raise ConfigError(f"{folder}: holds no run that was evaluated; allowed: the folder of a sweep or a run")
    search = RunFolder.open(folder).config.get("search", {}) if RunFolder.exists(folder) else {}
    best = best_trials(found, metric or search.get("metric"), search.get("mode", "auto"))
    return findings(folder, best, trials, metric)
