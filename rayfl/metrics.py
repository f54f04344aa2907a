"""Metrics of rounds: names, units and aggregation over clients.

Metrics of an evaluation have names `<split><score>_<of>`: the prefix of the split, a `Score` (accuracy, loss, or one of
a user), and a capacity or one of `ENDS`. Names are created (`named`) but never parsed: the folder of a run lists its
capacities, its scores and its main metric.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

CLIENT_SCORES = np.dtype([("client", "<i4"), ("score", "<f8")])
"""One row per client, ascending: its first score on its own test split."""


def client_table(scores: Iterable[str]) -> np.dtype:
    """Return the row of a client in a table of all scores (labels) on its own test split. A score without a value, such
    as that of an absent class, is NaN."""
    return np.dtype([("client", "<i4"), ("capacity", "<f8"), ("samples", "<i8"), *((label, "<f8") for label in scores)])


Line = dict[str, Any]
"""Results of one round by name: `round`, `seconds`, metrics of `ROUND`, and metrics of an evaluation."""

Unit = Literal["", "share", "bytes", "operations", "seconds"]


@dataclass(frozen=True)
class Metric:
    """One metric of a round."""

    name: str
    text: str
    """Description."""
    unit: Unit = ""
    adds: Literal["sum", "mean"] = "sum"
    """Aggregation over clients: sum, or mean over samples (clients send sums over samples)."""
    total: bool = False
    """True if the result of a run contains the sum over all rounds."""
    of_methods: bool = False
    """True if methods can return it. The others are rayfl's own."""


ROUND = (
    Metric("clients", "clients whose updates were aggregated"),
    Metric("refused", "clients whose updates were rejected"),
    Metric("full_clients", "clients with the whole network (masked methods)", of_methods=True),
    Metric("steps", "local steps of all clients", of_methods=True),
    Metric("train_samples", "samples that clients trained on", of_methods=True),
    Metric("train_loss", "loss of local training, mean over samples", adds="mean", of_methods=True),
    Metric("bytes_down", "sent to clients", "bytes", total=True, of_methods=True),
    Metric("bytes_up", "sent by clients", "bytes", total=True, of_methods=True),
    Metric(
        "bytes_public",
        "public samples that clients must have, at a client's first update",
        "bytes",
        total=True,
        of_methods=True,
    ),
    Metric("bytes_delta", "sent to clients for the change of thresholds (SpaFL)", "bytes", of_methods=True),
    Metric("train_flops", "floating point operations of local training", "operations", total=True, of_methods=True),
    Metric(
        "server_flops", "floating point operations of the server's own work", "operations", total=True, of_methods=True
    ),
    Metric("server_steps", "steps of the server's own training", of_methods=True),
    Metric("resets", "layers with reset thresholds (SpaFL)", of_methods=True),
    Metric("sim_seconds", "simulated duration of the round", "seconds", total=True),
    Metric("sim_time", "simulated time since the start of the run", "seconds"),
    Metric("asked", "clients that were sent the model (system)"),
    Metric("late", "updates that arrived too late (system)"),
    Metric("lost", "clients that dropped out or left before they had finished (system)"),
    Metric("abandoned", "1 if too few updates arrived, so that the model did not change (system)"),
    Metric("wasted_flops", "operations of late and lost updates until their end", "operations", total=True),
    Metric("wasted_bytes", "traffic of late and lost updates until their end", "bytes", total=True),
    Metric("staleness", "versions between an update's model and the server's, mean over updates"),
    Metric("within_norm", "clients whose change was within the clipping norm (privacy)"),
    Metric("clip_norm", "clipping norm of the round (privacy)"),
    Metric("epsilon", "epsilon of the server's parameters after an evaluated round, at privacy.delta (privacy)"),
    Metric("simulated_epsilon", "the same, of the population of privacy.stands_for (privacy)"),
    Metric("overflows", "elements of changes over updates.secure_aggregation.limit, of all clients"),
    Metric("smallest_group", "clients of the smallest group whose sum the server learns (secure aggregation)"),
    Metric("seconds", "wall-clock time of the round, including its evaluation", "seconds", total=True),
)
"""Metrics of every round. Other metrics of methods are summed over clients."""

UPDATES = "updates_"
"""Prefix of the number of aggregated updates from a class of devices."""

SNR = "snr_"
"""Prefix of signal-to-noise ratios under privacy, by the share of the clients that hold a coordinate."""

EPSILONS = ("epsilon", "simulated_epsilon")
"""Privacy of a run so far, with the metrics of an evaluation."""
SMALLEST_GROUP = "smallest_group"
"""Anonymity of the clients under secure aggregation."""

IF_ANY = ("bytes_public", "server_flops")
"""Totals that tables show only if a row has them."""
WASTED = ("wasted_bytes", "wasted_flops")
"""Totals of visits whose update was discarded."""
SIMULATED = ("sim_seconds", *WASTED)
"""Totals of runs with a `system:` section."""
TOTALS = tuple(metric.name for metric in ROUND if metric.total and metric.name not in SIMULATED)
_MEANS = tuple(metric.name for metric in ROUND if metric.adds == "mean")

EVALUATED = "evaluated"
"""Key in the lines of evaluated rounds."""

MATRICES = "matrices"
"""Key in the lines of evaluated rounds: score -> capacity as text -> rows of its matrix (`Score.matrix`), test set."""

ANSWERS = "answers"
"""Key in the lines of evaluated rounds: score -> capacity as text -> prompt, answer and reference of some test
samples."""

NOTE = "note"
"""Key of a message to the user in a line."""

SPLITS = {"test": "", "validation": "validation_", "clients": "local_", "client_validation": "local_validation_"}
"""Split -> prefix of its metrics: the global test set, the server's validation data, clients' own test splits, and
clients' own validation data."""

ENDS = {
    "mean": "mean over capacities, or over clients",
    "worst": "worst capacity, or client",
    "server": "network of the server",
    "samples": "mean over clients' samples",
}
"""Subjects of a metric, in addition to single capacities."""


def named(score: str, of: float | str, split: str = "test") -> str:
    """Return the name of a metric: `named("accuracy", 0.5)` is "accuracy_0.5".

    >>> named("accuracy", "mean", "clients"), named("density", 1 / 16)
    ('local_accuracy_mean', 'density_0.0625')
    """
    return f"{SPLITS[split]}{score}_{of if isinstance(of, str) else label(of)}"


def label(capacity: float) -> str:
    """Return a capacity as part of a name: 1, 0.5, 0.0625."""
    return f"{capacity:g}"


def plus(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of metrics by name."""
    return {**one, **{name: one.get(name, 0) + value for name, value in other.items()}}


def finished(totals: Mapping[str, float]) -> Line:
    """Return the metrics of a round from the sums over its clients."""
    samples = totals.get("train_samples", 0)
    line = {name: value for name, value in totals.items() if name != "train_samples"}
    return line | {name: line[name] / (samples or 1) for name in _MEANS if name in line}


def evaluated(lines: Iterable[Line]) -> list[Line]:
    """Return the lines of evaluated rounds."""
    return [line for line in lines if EVALUATED in line]
