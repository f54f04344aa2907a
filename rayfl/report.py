"""What a run or a comparison leaves in its folder for people: tables, plots, a paper's numbers beside ours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfl.config import ConfigError
from rayfl.data.base import Arrays
from rayfl.data.partition.base import label_counts
from rayfl.engine.checkpoints import latest
from rayfl.experiment import Experiment, read_experiment
from rayfl.results import published
from rayfl.results.folder import RunFolder, records
from rayfl.results.pareto import write_pareto
from rayfl.results.plots import label_distribution, plots_of, tuning_plots, write_plots
from rayfl.results.rows import Record, best_trials, judge_of, judged
from rayfl.results.submodels import Deployments, of_networks, over_rounds, write_submodels
from rayfl.results.tables import write_tables
from rayfl.results.tuned import Best, tuned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Say = Callable[[str], None]


@dataclass(frozen=True)
class Findings:
    """What came out of the runs of a folder."""

    folder: Path
    config: Mapping[str, Any]
    """Of the sweep or run, {} where the folder only holds others."""
    best: Sequence[Record]
    """The runs of every row's best point."""
    trials: Sequence[Record]
    """All runs, failed ones included."""
    judge: str
    """The metric by which rows are compared."""
    metric: str
    """The metric by which the best points were chosen."""
    paths: tuple[str, ...]
    """The dotted settings that the search tried."""

    @property
    def mode(self) -> Any:
        return self.config.get("search", {}).get("mode", "auto")

    @property
    def tuned(self) -> dict[str, Best]:
        return tuned(self.best, self.trials, self.paths, self.metric, self.mode)


def findings(folder: Path, best: Sequence[Record], trials: Sequence[Record], metric: str | None = None) -> Findings:
    """Of the best rows and those of all trials in a folder. `metric`: that the best were chosen by, unless it is the
    sweep's own."""
    if not RunFolder.exists(folder):
        judge = judge_of(best)
        return Findings(folder, {}, best, trials, judge, metric or judge, ())
    run = RunFolder.open(folder)
    metric = metric or run.config.get("search", {}).get("metric", run.facts.judge)
    return Findings(folder, run.config, best, trials, run.facts.judge, metric, run.facts.tuned)


def write_report(found: Findings, say: Say, formats: Sequence[str] = ()) -> None:
    """Tables and plots of the best rows, and what the search tried, into their folder; plots as PNG and in `formats`."""
    folder, best, judge = found.folder, found.best, found.judge
    write_tables(folder, best, judge, found.tuned)
    write_plots(folder / "plots", best, judge, formats)
    finished = [trial for trial in found.trials if trial["status"] == "finished"]
    for name, plot in tuning_plots(finished, found.paths, found.metric, found.mode).items():
        plot.write(folder / "plots" / name, formats)
    if finished:
        write_pareto(folder, best, finished, found.metric, formats)
    write_submodels(folder, best, lambda path: deployments(path, say), say, judge, formats)
    section, changed = published.from_config(found.config)
    if section:
        (folder / "published.md").write_text(published.markdown(section, changed, best))


def write_labels(path: Path, experiment: Experiment, arrays: Arrays) -> None:
    """The plot of who holds which classes."""
    goal = experiment.data.goal
    counts = label_counts(experiment.federate(arrays).train, goal.labels(arrays.train), goal.classes)
    label_distribution(counts).write(path)


def report_on(folder: Path, metric: str | None, say: Say, formats: Sequence[str] = ()) -> Findings:
    """Everything again, from a folder of runs, with the best rows by `metric`, or by what a sweep was tuned by."""
    trials = records(folder)
    found = judged(trials)
    found = [record for record in found if record["status"] == "finished"] or found
    if not found:
        raise ConfigError(f"{folder}: holds no run that was evaluated; allowed: the folder of a sweep or a run")
    search = RunFolder.open(folder).config.get("search", {}) if RunFolder.exists(folder) else {}
    best = best_trials(found, metric or search.get("metric"), search.get("mode", "auto"))
    report = findings(folder, best, trials, metric)
    write_report(report, say, formats)
    return report


def figures(rows: Sequence[Record], experiment: Experiment | None = None) -> "dict[str, Figure]":
    """Name -> figure, of all plots of these rows, for a notebook; with one run's `experiment` of its networks too."""
    plots = plots_of(rows) | over_rounds(rows)
    if experiment is not None:
        plots |= of_networks(_deployed(experiment, Path(rows[0]["path"]), lambda text: None))
    return {name: plot.figure for name, plot in plots.items()}


def deployments(folder: Path, say: Say) -> Deployments:
    """What a device of every capacity runs after a run's newest whole checkpoint, largest capacity first. No data are
    loaded. A ConfigError where there is no checkpoint, or one of another configuration."""
    run = RunFolder.open(folder)
    run.require_version()
    return _deployed(read_experiment(run.config, str(folder / "config.json")), folder, say)


def _deployed(experiment: Experiment, folder: Path, say: Say) -> Deployments:
    found = latest(folder / "checkpoints", experiment.result_config(), say, carries=False)
    if found is None:
        raise ConfigError(f"{folder}: has no checkpoint")
    method = experiment.bound()
    return {c: method.deploy(found.state, found.round, c) for c in experiment.clients.all_capacities}
