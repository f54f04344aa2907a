"""Numbers of the page's curves.

A row's curve has mean and standard deviation over the seeds of its best point, at every evaluated round. Other trials
only have the metric of the search, in at most `COARSE` rounds. With more than `MOST` numbers, the curves of the last
metrics are left out and listed on the page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayfl.metrics import Line, label, named
from rayfl.results.budgets import SIMULATED_TIME, TRAFFIC, with_spent
from rayfl.results.findings import Findings
from rayfl.results.folder import RunFolder
from rayfl.results.plots import axis_of, common, mean_and_std, with_unit
from rayfl.results.rows import Record, by_label, capacities, facts_of, titles_of

COARSE = 40
"""Maximum number of rounds of a trial that is not the best."""
MOST = 300_000
"""Maximum number of numbers in all curves: three megabytes."""

Curve = dict[str, Any]
"""Lists of equal lengths: x, the units of `AXES`, y, and std for several seeds."""
AXES = (TRAFFIC, SIMULATED_TIME)
"""Costs that can replace rounds as the axis."""


@dataclass(frozen=True)
class Curves:
    """Curves of rows and trials. `best`: metric -> name of a row -> curve."""

    titles: Mapping[str, str]
    """Metric -> axis title with unit."""
    best: Mapping[str, Mapping[str, Curve]]
    others: Sequence[tuple[str, str, Curve]]
    """Name of the row, point, and curve of the search metric."""
    left_out: Sequence[str]
    """Titles of metrics left out."""


def curves_of(found: Findings) -> Curves:
    titles = titles_of(found.best)
    lines = {titles[of]: [_lines(row) for row in rows] for of, rows in by_label(found.best, found.judge).items()}
    best: dict[str, dict[str, Curve]] = {}
    names, left_out, size = _metrics(found), [], 0
    for metric, title in names.items():
        of_metric = {name: curve for name, runs in lines.items() if (curve := _curve(runs, metric, title))}
        size += sum(len(numbers) for curve in of_metric.values() for numbers in curve.values())
        if not of_metric:
            continue
        if best and size > MOST:
            left_out.append(title)
        else:
            best[metric] = of_metric
    return Curves({metric: names[metric] for metric in best}, best, list(_others(found, names[found.metric])), left_out)


def _lines(record: Record) -> list[Line]:
    lines = RunFolder.open(record["path"]).rounds()
    for cost in AXES:
        lines = with_spent(lines, cost)
    return lines


def _metrics(found: Findings) -> dict[str, str]:
    """Return metric -> title in the page's order: judge metric, search metric, means, capacities."""
    facts = facts_of(found.best[0])
    places = (("mean", "test"), ("server", "test"), ("worst", "test"), ("mean", "clients"), ("mean", "validation"))
    titles = {metric: axis_of(facts, metric) for metric in (found.judge, found.metric)}
    for score in facts.scores:
        titles |= {(name := named(score, of, split)): axis_of(facts, name) for of, split in places}
    for capacity in capacities(found.best):
        name = f"{facts.score} at capacity {label(capacity)}"
        titles[named(facts.score, capacity)] = with_unit(name, facts, facts.score)
    return titles | {"train_loss": "loss of local training", "seconds": "seconds per round"}


def _curve(runs: Sequence[Sequence[Line]], metric: str, title: str) -> Curve | None:
    """Return the curve of means in the rounds common to all runs; None without such rounds."""
    rounds, values = common(runs, metric)
    if not rounds:
        return None
    mean, std = mean_and_std(values * (100 if title.endswith("%") else 1))
    curve = {"x": rounds, "y": mean.tolist()}
    for cost in AXES:
        _, spent = common([[line for line in lines if metric in line] for lines in runs], cost.unit)
        curve[cost.unit] = spent.mean(0).tolist()
    return curve | ({"std": std.tolist()} if len(runs) > 1 else {})


def _others(found: Findings, title: str) -> list[tuple[str, str, Curve]]:
    """Return the curves of other finished trials."""
    titles, best = titles_of(found.best), {record["id"] for record in found.best}
    curves = []
    for record in found.finished:
        if record["id"] in best or record["label"] not in titles:
            continue
        lines = [line for line in _lines(record) if found.metric in line]
        if lines:
            kept = np.unique(np.linspace(0, len(lines) - 1, min(len(lines), COARSE)).round().astype(int))
            if curve := _curve([[lines[i] for i in kept]], found.metric, title):
                curves.append((titles[record["label"]], record["point"] or label(record["seed"]), curve))
    return curves
