"""Checks of a sweep before Ray starts."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from rayfl.config import ConfigError, choose
from rayfl.config.plain import shown
from rayfl.experiment import Experiment
from rayfl.listeners.early_stopping import EarlyStopping
from rayfl.metrics import SPLITS, named
from rayfl.results.folder import flatten
from rayfl.results.summary import summaries
from rayfl.tuning.search import scheduler_of, searcher_of
from rayfl.tuning.space import Point, text_of
from rayfl.tuning.sweep import Sweep

CHECKED = 100
"""Experiments made per row; one takes up to 0.1 s."""

FREE = ("chunk", "checkpoint_seconds")
"""Settings of `run:` that can differ between trials."""

OF_TEST = {"test": ("validation", "holdout"), "clients": ("client_validation", "local_holdout")}
"""Split of test data -> the validation split to use instead, and its setting in `evaluation:`."""
HOLDOUTS = [setting for _, setting in OF_TEST.values()]


def check(sweep: Sweep) -> None:
    """Raise ConfigError if a row is invalid at a value or an extreme of the search space, or if the search is. Only the
    first `CHECKED` experiments of each row are made; a later invalid one fails when its trial starts."""
    for row, changes in sweep.rows.items():
        if twice := decided(changes, sweep.search.of(row).space):
            raise ConfigError(
                f"{sweep.where}: rows.{row}.{twice[0]}: {shown(twice[1])} is in search.space too. Allowed: one of both"
            )
    shared = _shared(sweep.first)
    for row in sweep.rows:
        for point in _examples(sweep, row):
            experiment = sweep.experiment(row, point, sweep.search.seeds[0])
            _check_shared(sweep, row, point, _shared(experiment), shared)
        experiment = sweep.example(row)
        _check_entries(sweep, row, experiment)
        _check_metric(sweep, row, experiment)
        _check_published(sweep, row, experiment)
        if sweep.search.scheduler != "fifo" and "rounds" in sweep.search.of(row).space:
            raise ConfigError(
                f"{sweep.where}: search.scheduler: {sweep.search.scheduler} compares trials at equal rounds, and "
                f"rounds is tuned with rows.{row}. Allowed: fifo, or fixed rounds"
            )
        scheduler_of(sweep.search, experiment.rounds, sweep.where)
    searcher_of(sweep.search, sweep.mode, sweep.where)


def decided(settings: Mapping[str, Any], space: Iterable[str]) -> tuple[str, Any] | None:
    """Return the first setting, and its value, that a search space's path decides."""
    for key, value in flatten(settings).items():
        if any(f"{key}.".startswith(f"{path}.") for path in space):
            return key, value
    return None


def _examples(sweep: Sweep, row: str) -> Iterator[Point]:
    """Yield points to check: the first, the first with each value and extreme of the space in turn, then the others."""
    first, *others = sweep.points[row]
    space = sweep.search.of(row).space.items()
    alone = (first | {path: value} for path, domain in space for value in domain.extremes)
    seen: list[Point] = []
    for point in islice(chain([first], alone, others), CHECKED):
        if point not in seen:
            seen.append(point)
            yield point


def _shared(experiment: Experiment) -> dict[str, Any]:
    """Return the sections that must be equal in all trials, because they share actors and the data set."""
    return {"run": experiment.run.model_dump(mode="json", exclude=set(FREE)), "data": experiment.plain()["data"]}


def _check_shared(sweep: Sweep, row: str, point: Point, given: dict[str, Any], first: dict[str, Any]) -> None:
    at = sweep.place(row) + (f" ({text_of(point)})" if point else "")
    if given["run"]["executor"] == "serial":
        raise ConfigError(
            f"{at}: run.executor: 'serial' is not valid. Allowed: 'ray', because trials of a sweep run on Ray"
        )
    for section, why in (("run", "all trials run on the same actors"), ("data", "all trials share one data set")):
        if given[section] != first[section]:
            raise ConfigError(
                f"{at}: {section}: {shown(given[section])} differs from other trials. Allowed: "
                f"{shown(first[section])}, because {why}"
            )


def _check_entries(sweep: Sweep, row: str, experiment: Experiment) -> None:
    """Raise ConfigError if an entry of a list is tuned that no table could show, because it is no section."""
    params = flatten(experiment.plain())
    for path in sweep.search.of(row).space:
        whole, _, entry = path.rpartition(".")
        if entry.isdecimal() and whole in params:
            raise ConfigError(
                f"{sweep.where}: search.space.{path}: {shown(params[whole])} is a list of values, which are not tuned "
                f"one by one. Allowed: {whole} with whole lists"
            )


def _check_metric(sweep: Sweep, row: str, experiment: Experiment) -> None:
    """Raise ConfigError if the row does not have the metric, or if it uses test data."""
    metrics, metric, where = experiment.metrics(), sweep.search.metric, f"{sweep.where}: search.metric"
    for setting in HOLDOUTS:
        if metric not in metrics and metric in _with_holdout(experiment, setting).metrics():
            raise ConfigError(
                f"{where}: {metric!r} needs validation data with rows.{row}. Allowed: evaluation.{setting} above 0"
            )
    split = choose(metrics, metric, where, "metric").split
    if experiment.method.judged_on == "clients" and split not in ("clients", "client_validation"):
        better = named(experiment.scores[0].label, "mean", "client_validation")
        raise ConfigError(
            f"{where}: {metric!r} does not fit rows.{row}, whose clients have personal networks. Allowed: {better} "
            "(with evaluation.local_holdout) or another of local_*"
        )
    used = [(where, metric)] + [
        (f"{sweep.where}: early stopping with rows.{row}", listener.metric)
        for listener in experiment.all_listeners()
        if isinstance(listener, EarlyStopping) and listener.metric
    ]
    for where, metric in used:
        split = metrics[metric].split
        if split in OF_TEST and sweep.points_of(row) > 1 and not sweep.search.allow_test:
            other, setting = OF_TEST[split]
            raise ConfigError(
                f"{where}: {metric!r} uses test data. Allowed for tuning: "
                f"{SPLITS[other]}{metric.removeprefix(SPLITS[split])} (with evaluation.{setting}), or any metric with "
                "search.allow_test: true"
            )


def _with_holdout(experiment: Experiment, setting: str) -> Experiment:
    return experiment.model_copy(update={"evaluation": experiment.evaluation.model_copy(update={setting: 0.1})})


def _check_published(sweep: Sweep, row: str, experiment: Experiment) -> None:
    metrics = experiment.metrics()
    known = [*metrics, *summaries(metrics, [score.label for score in experiment.scores])]
    for metric, numbers in sweep.published.numbers.items() if sweep.published else ():
        if row in numbers:
            choose(dict.fromkeys(known), metric, f"{sweep.where}: published.numbers", "metric")
