"""All metrics in one table: what a round's line may say, in which unit, and how parts of a round add up.

What an evaluation says is named `<split><score>_<of>`: the split's prefix, a `Score` (accuracy, loss, or a user's own),
and whom it is of: a capacity, or one of `ENDS`. Names are only ever made (`named`), never taken apart: a run's folder
states its capacities, its scores and the metric that it is judged by.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

CLIENT_SCORES = np.dtype([("client", "<i4"), ("score", "<f8")])
"""A row a client: its first score on its own test split, clients ascending."""

Line = dict[str, Any]
"""What one round measured, by name: `round`, `seconds`, those of `ROUND`, and what an evaluation found."""

Unit = Literal["", "share", "bytes", "operations", "seconds"]


@dataclass(frozen=True)
class Metric:
    """One number of a round."""

    name: str
    text: str
    """What it is, in words."""
    unit: Unit = ""
    adds: Literal["sum", "mean"] = "sum"
    """How clients' numbers become the round's: their sum, or (they send sums over samples) the mean over samples."""
    total: bool = False
    """Whether a run's result has the sum over all rounds."""


ROUND = (
    Metric("clients", "clients whose updates were folded"),
    Metric("refused", "clients whose updates were refused"),
    Metric("full_clients", "clients that held everything, where clients hold parts of one network (masked methods)"),
    Metric("steps", "local steps of all clients"),
    Metric("train_samples", "samples that clients trained on"),
    Metric("train_loss", "loss of local training, the mean over samples", adds="mean"),
    Metric("bytes_down", "sent to clients", "bytes", total=True),
    Metric("bytes_up", "sent by clients", "bytes", total=True),
    Metric("bytes_delta", "sent to clients to know the change of thresholds (SpaFL)", "bytes"),
    Metric("train_flops", "floating point operations of local training", "operations", total=True),
    Metric("server_flops", "floating point operations of the server's own work", "operations", total=True),
    Metric("server_steps", "steps of the server's own training"),
    Metric("resets", "layers whose thresholds started again (SpaFL)"),
    Metric("seconds", "wall clock of the round, its evaluation included", "seconds", total=True),
)
"""What every round says. A method's other numbers are sums over clients."""

TOTALS = tuple(metric.name for metric in ROUND if metric.total)
_MEANS = tuple(metric.name for metric in ROUND if metric.adds == "mean")

EVALUATED = "evaluated"
"""In the line of a round that was evaluated."""

NOTE = "note"
"""In a line: something that a person should know, in words."""

SPLITS = {"test": "", "validation": "validation_", "clients": "local_", "client_validation": "local_validation_"}
"""Split -> the prefix of its metrics: the global test set, the server's validation set, clients' own test splits, and
what clients hold out of their own training data."""

ENDS = {
    "mean": "the mean over capacities, or over clients",
    "worst": "the worst capacity, or client",
    "server": "the server's network",
    "samples": "the mean over clients' samples",
}
"""What a metric may be of, beside one capacity."""


def named(score: str, of: float | str, split: str = "test") -> str:
    """The metric's name in a line: `named("accuracy", 0.5)` is "accuracy_0.5".

    >>> named("accuracy", "mean", "clients"), named("density", 1 / 16)
    ('local_accuracy_mean', 'density_0.0625')
    """
    return f"{SPLITS[split]}{score}_{of if isinstance(of, str) else label(of)}"


def label(capacity: float) -> str:
    """A capacity as it stands in names: 1, 0.5, 0.0625."""
    return f"{capacity:g}"


def plus(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The sums of numbers of clients, name by name."""
    return {**one, **{name: one.get(name, 0) + value for name, value in other.items()}}


def finished(totals: Mapping[str, float]) -> Line:
    """The round's numbers from the sums over its clients."""
    samples = totals.get("train_samples", 0)
    line = {name: value for name, value in totals.items() if name != "train_samples"}
    return line | {name: line[name] / (samples or 1) for name in _MEANS if name in line}


def evaluated(lines: Iterable[Line]) -> list[Line]:
    """The lines of rounds that were evaluated."""
    return [line for line in lines if EVALUATED in line]
