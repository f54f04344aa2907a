"""What a run or a comparison leaves in its folder for people: tables, plots, a paper's numbers beside ours."""

from collections.abc import Callable, Sequence
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
from rayfl.results.plots import label_distribution, plots_of, write_plots
from rayfl.results.submodels import Deployments, of_networks, over_rounds, write_submodels
from rayfl.results.tables import Record, best_trials, judge_of, judged, write_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Say = Callable[[str], None]


def write_report(folder: Path, best: Sequence[Record], trials: Sequence[Record], say: Say) -> None:
    """Tables and plots of the best rows, and the Pareto front of all, into a folder."""
    config, judge = _of_folder(folder, best)
    write_tables(folder, best, judge)
    write_plots(folder / "plots", best, judge)
    if finished := [trial for trial in trials if trial["status"] == "finished"]:
        write_pareto(folder, finished, config.get("search", {}).get("metric", judge))
    write_submodels(folder, best, lambda path: deployments(path, say), say, judge)
    section, changed = published.from_config(config)
    if section:
        (folder / "published.md").write_text(published.markdown(section, changed, best))


def write_labels(path: Path, experiment: Experiment, arrays: Arrays) -> None:
    """The plot of who holds which classes."""
    goal = experiment.data.goal
    counts = label_counts(experiment.federate(arrays).train, goal.labels(arrays.train), goal.classes)
    label_distribution(counts).write(path)


def report_on(folder: Path, metric: str | None, say: Say) -> tuple[list[Record], str]:
    """Everything again, from a folder of runs: the best rows by `metric`, or by what a sweep was tuned by, and what
    judges them."""
    found = judged(records(folder))
    found = [record for record in found if record["status"] == "finished"] or found
    if not found:
        raise ConfigError(f"{folder}: holds no run that was evaluated; allowed: the folder of a sweep or a run")
    search = _of_folder(folder, found)[0].get("search", {})
    best = best_trials(found, metric or search.get("metric"), search.get("mode", "auto"))
    write_report(folder, best, found, say)
    return best, _of_folder(folder, best)[1]


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
    found = latest(folder / "checkpoints", experiment.result_config(), say)
    if found is None:
        raise ConfigError(f"{folder}: has no checkpoint")
    method = experiment.bound()
    return {c: method.deploy(found.state, found.round, c) for c in experiment.clients.all_capacities}


def _of_folder(folder: Path, rows: Sequence[Record]) -> tuple[dict[str, Any], str]:
    """The configuration of the run or sweep that a folder holds, {} if it holds others below it, and what its rows are
    compared by."""
    if not RunFolder.exists(folder):
        return {}, judge_of(rows)
    run = RunFolder.open(folder)
    return run.config, run.facts.judge
