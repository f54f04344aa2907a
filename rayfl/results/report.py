"""Reports of runs and sweeps: tables, plots, and comparison with published numbers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rayfl.config import ConfigError, choose
from rayfl.data.base import Arrays
from rayfl.data.partition.base import label_counts
from rayfl.engine.checkpoints import CHECKPOINTS, latest
from rayfl.experiment import Experiment, read_experiment
from rayfl.results import published
from rayfl.results.answers import answers_of
from rayfl.results.budgets import write_equal_cost
from rayfl.results.findings import Findings, found_in
from rayfl.results.folder import RunFolder
from rayfl.results.pareto import write_pareto
from rayfl.results.plots import counts_in, label_distribution, plots_of, tuning_plots, write_plots
from rayfl.results.rows import Record
from rayfl.results.submodels import Deployments, of_networks, over_rounds, write_submodels
from rayfl.results.tables import write_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Notify = Callable[[str], None]


def write_report(found: Findings, notify: Notify, formats: Sequence[str] = ()) -> None:
    """Write tables and plots of the best rows and of the search into their folder; plots as PNG and in `formats`."""
    folder, best, judge = found.folder, found.best, found.judge
    write_tables(folder, best, judge, found.tuned)
    write_equal_cost(folder, best)
    write_plots(folder / "plots", best, judge, formats)
    finished = found.finished
    for name, plot in tuning_plots(finished, found.paths, found.metric, found.mode).items():
        plot.write(folder / "plots" / name, formats)
    if finished:
        write_pareto(folder, best, finished, found.metric, formats)
    write_submodels(folder, best, lambda path: deployments(path, notify), notify, judge, formats)
    for name, counts in counts_in(folder / "plots").items():
        label_distribution(counts).write(folder / "plots" / name, formats)
    if answers := answers_of(best, judge):
        (folder / "answers.md").write_text(answers.markdown(), encoding="utf-8")
    section, changed = published.from_config(found.config)
    if section:
        (folder / "published.md").write_text(published.markdown(section, changed, best), encoding="utf-8")


def write_labels(path: Path, experiment: Experiment, arrays: Arrays) -> None:
    """Write the plot of the classes of each client's data."""
    goal = experiment.data.goal
    counts = label_counts(experiment.federate(arrays).train, goal.labels(arrays.train), goal.kinds)
    label_distribution(counts).write(path)


def report_on(
    folder: Path, metric: str | None, notify: Notify, formats: Sequence[str] = (), html: bool = False
) -> Findings:
    """Rebuild tables and plots, with `html` also the page, from a folder of runs. Default metric: the sweep's."""
    found = found_in(folder, metric)
    write_report(found, notify, formats)
    if html:
        from rayfl.results.page import write_page

        write_page(found)
    return found


class Figures(dict[str, "Figure"]):
    """Figures by name. An unknown name is a ConfigError that lists the names."""

    def __missing__(self, name: str) -> "Figure":
        return choose(self, name, "plots", "plot")


def figures(rows: Sequence[Record], experiment: Experiment | None = None) -> Figures:
    """Return name -> figure of all plots of these rows, for notebooks; with `experiment`, also of a run's networks."""
    plots = plots_of(rows) | over_rounds(rows)
    if experiment is not None:
        plots |= of_networks(_deployed(experiment, Path(rows[0]["path"]), lambda text: None))
    return Figures({name: plot.figure for name, plot in plots.items()})


def deployments(folder: Path, notify: Notify) -> Deployments:
    """Return capacity -> deployed network from a run's newest complete checkpoint, largest capacity first. No data are
    loaded. Raise ConfigError without a checkpoint or with one of another configuration."""
    run = RunFolder.open(folder)
    return _deployed(read_experiment(run.config, str(folder / "config.json")), folder, notify)


def _deployed(experiment: Experiment, folder: Path, notify: Notify) -> Deployments:
    found = latest(folder / CHECKPOINTS, experiment.result_config(), notify, client_states=False)
    if found is None:
        raise ConfigError(f"{folder}: the run has no checkpoint")
    method = experiment.bound()
    return {c: method.deploy(found.state, found.round, c) for c in experiment.clients.all_capacities}
