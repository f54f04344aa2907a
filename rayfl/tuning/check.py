"""What is wrong with a sweep, as far as it can be known before Ray starts."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from rayfl.config import ConfigError, choose
from rayfl.config.plain import shown
from rayfl.experiment import Experiment
from rayfl.metrics import SPLITS, named
from rayfl.results.folder import flatten
from rayfl.results.summary import summaries
from rayfl.tuning.search import scheduler_of, searcher_of
from rayfl.tuning.space import Point, text_of
from rayfl.tuning.sweep import Sweep

CHECKED = 100
"""Experiments of a row that are made; one with networks of its own takes up to 0.1 s."""

FREE = ("chunk", "checkpoint_seconds")
"""Settings of `run:` that trials may have for themselves."""

OF_TEST = {"test": ("validation", "holdout"), "clients": ("client_validation", "local_holdout")}
"""Split of test data -> the one to tune by instead, and the setting of `evaluation:` that gives it."""
HOLDOUTS = [setting for _, setting in OF_TEST.values()]


def check(sweep: Sweep) -> None:
    """Every row at every value and every end of the search space, and what the search itself names. Of a large search
    the first `CHECKED` experiments of each row are made; a wrong one behind them ends the sweep when it is its turn."""
    for row, changes in sweep.rows.items():
        for key, value in flatten(changes).items():
            if any(key == path or key.startswith(f"{path}.") for path in sweep.search.space):
                raise ConfigError(
                    f"{sweep.where}: rows.{row}.{key}: given {shown(value)}; allowed: nothing, because search.space "
                    "decides it"
                )
    shared = _shared(sweep.first)
    for row in sweep.rows:
        for point in _examples(sweep, row):
            experiment = sweep.experiment(row, point, sweep.search.seeds[0])
            _check_shared(sweep, row, point, _shared(experiment), shared)
        experiment = sweep.example(row)
        _check_metric(sweep, row, experiment)
        _check_published(sweep, row, experiment)
        scheduler_of(sweep.search, experiment.rounds, sweep.where)
    searcher_of(sweep.search, sweep.mode, sweep.where)


def _examples(sweep: Sweep, row: str) -> Iterator[Point]:
    """What is made of a row: its first point, that with each value and each end of the space in turn, the others."""
    first, *others = sweep.points[row]
    space = sweep.search.space.items()
    alone = (first | {path: value} for path, domain in space for value in domain.values)
    seen: list[Point] = []
    for point in islice(chain([first], alone, others), CHECKED):
        if point not in seen:
            seen.append(point)
            yield point


def _shared(experiment: Experiment) -> dict[str, Any]:
    """What all trials share: the actors of one can be another's, and the data set is loaded once."""
    return {"run": experiment.run.model_dump(mode="json", exclude=set(FREE)), "data": experiment.plain()["data"]}


def _check_shared(sweep: Sweep, row: str, point: Point, given: dict[str, Any], first: dict[str, Any]) -> None:
    at = f"{sweep.where}: rows.{row}" + (f" ({text_of(point)})" if point else "")
    if given["run"]["executor"] == "serial":
        raise ConfigError(f"{at}: run.executor: given 'serial'; allowed: 'ray' in a sweep, whose trials are Ray's")
    for section, why in (("run", "all trials run on the same actors"), ("data", "all trials share one data set")):
        if given[section] != first[section]:
            raise ConfigError(
                f"{at}: {section}: given {shown(given[section])}; allowed: {shown(first[section])}, because {why}"
            )


def _check_metric(sweep: Sweep, row: str, experiment: Experiment) -> None:
    """The metric is one of the row's and of what the row is judged by, and the data that choose do not judge."""
    metrics, metric, where = experiment.metrics(), sweep.search.metric, f"{sweep.where}: search.metric"
    for setting in HOLDOUTS:
        if metric not in metrics and metric in _with_holdout(experiment, setting).metrics():
            raise ConfigError(
                f"{where}: given {metric!r}; allowed with rows.{row}: it, if evaluation.{setting} is over 0"
            )
    split = choose(metrics, metric, where, "metric").split
    if experiment.method.judged_on == "clients" and split not in ("clients", "client_validation"):
        better = named(experiment.scores[0].label, "mean", "client_validation")
        raise ConfigError(
            f"{where}: given {metric!r}; allowed with rows.{row}, whose clients keep networks of their own: "
            f"{better} (with evaluation.local_holdout) or another of local_*"
        )
    if split in OF_TEST and sweep.points_of(row) > 1 and not sweep.search.allow_test:
        other, setting = OF_TEST[split]
        raise ConfigError(
            f"{where}: given {metric!r}, which is of test data; allowed to tune by: "
            f"{SPLITS[other]}{metric.removeprefix(SPLITS[split])} (with evaluation.{setting}), so that the test data "
            "only judge; search.allow_test: true tunes by it nevertheless"
        )


def _with_holdout(experiment: Experiment, setting: str) -> Experiment:
    return experiment.model_copy(update={"evaluation": experiment.evaluation.model_copy(update={setting: 0.1})})


def _check_published(sweep: Sweep, row: str, experiment: Experiment) -> None:
    metrics = experiment.metrics()
    known = [*metrics, *summaries(metrics, [score.label for score in experiment.scores])]
    for metric, numbers in sweep.published.numbers.items() if sweep.published else ():
        if row in numbers:
            choose(dict.fromkeys(known), metric, f"{sweep.where}: published.numbers", "metric")
