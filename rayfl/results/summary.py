"""Facts of a run, known at its start (`Facts`), and its result at the end (`summary`)."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count, takewhile
from typing import Any, Literal

from pydantic import Field

from rayfl.config import Config
from rayfl.metrics import (
    ENDS,
    EPSILONS,
    ROUND,
    SIMULATED,
    SMALLEST_GROUP,
    SPLITS,
    TOTALS,
    WASTED,
    Line,
    evaluated,
    named,
)

Better = Literal["max", "min"]

KINDS = ("", "best_", "last5_")
"""Prefixes of scores in a result: last evaluation, best evaluation, mean of the last five."""

AT_BEST_SERVER = "_at_best_server"
"""Suffix of the clients' own score over their samples in the round with the best server score
(`local_accuracy_samples_at_best_server`): HeteroFL's Local for its Global."""

DENSITY = "local_density"
"""Mean density of the clients' own masked networks over clients and layers (SpaFL)."""

DENSITY_AT_BEST = "local_density_at_best"
"""`DENSITY` in the round with the best mean score of clients."""

LESS = ("time_to_", "macs_", "parameters_")
"""Prefixes of results of which less is better, beside the costs of rounds."""

AMOUNTS = ("gbit", "client_macs", "kbit_up_per_point")
"""Keys of `amounts`."""


class Facts(Config):
    """Description of a run in its folder, sufficient to read results without the code that made it."""

    judge: str
    """Judge metric: the mean of the first score on the test set ("accuracy_mean"), or on the clients' own test splits
    for personal networks ("local_accuracy_mean")."""
    capacities: tuple[float, ...]
    """All capacities, largest first."""
    trained: tuple[float, ...]
    """Capacities of clients, largest first: without those of weight 0."""
    scores: dict[str, Better]
    """Scores of an evaluation and their better direction. Tables and plots show the first one."""
    clients: int
    """Number of clients in the population."""
    rounds: int
    """Number of rounds requested."""
    targets: tuple[float, ...] = Field(default=(), exclude_if=lambda targets: not targets)
    """Values of the judge metric whose simulated time is reported."""
    tuned: tuple[str, ...] = ()
    """Dotted paths of the settings that a sweep tunes."""

    @property
    def score(self) -> str:
        return next(iter(self.scores))

    def about(self, metric: str) -> tuple[str, str] | None:
        """Return score and split of an evaluation metric in a line or result; None for other metrics."""
        metric, ends = metric.removesuffix(AT_BEST_SERVER), (*self.capacities, *ENDS)
        metric = re.sub(r"_exit\d+$", "_server", metric)
        for score in self.scores:
            for split in SPLITS:
                if any(metric == f"{kind}{named(score, end, split)}" for kind in KINDS for end in ends):
                    return score, split
        return None

    def better(self, metric: str) -> Better:
        """Return the better direction of a metric: "min" for losses, and for costs of rounds and networks."""
        if found := self.about(metric):
            return self.scores[found[0]]
        return "min" if metric in {m.name for m in ROUND} or metric.startswith(LESS) else "max"

    def is_share(self, metric: str) -> bool:
        """Return whether a metric is shown in per cent: a score of which more is better."""
        return self.about(metric) is not None and self.better(metric) == "max"


class Cost(Config):
    """Cost of a dense network."""

    parameters: int
    macs: int
    """Multiply-adds of one sample's forward pass."""


def summary(lines: Sequence[Line], facts: Facts, costs: Mapping[str, Cost]) -> dict[str, Any]:
    """Return result.json from the lines of a run; `costs`: dense networks by capacity.

        rounds, train_loss             of the last line
        epsilon, simulated_epsilon     of the last evaluation, with a `privacy:` section
        smallest_group                 smallest of all rounds, with secure aggregation
        accuracy_0.5, ...              scores of the last evaluation, by the names of `rayfl.metrics`
        best_*, last5_*                for `summarised` metrics: best evaluation, mean of the last five
        best_round                     first round with the best judge metric
        density_0.5, macs_share_0.5    masked networks: fractions of the dense network at the last evaluation
        parameters_0.5, macs_0.5       cost of this capacity's network; masked networks: of the remaining part
        time_to_0.8                    simulated seconds until the judge metric reached 0.8; missing: never
        bytes_down, ...                totals over all rounds

    Also `AT_BEST_SERVER`, `DENSITY` and `DENSITY_AT_BEST`, if lines have the metrics they need.
    """
    result: dict[str, Any] = {"rounds": lines[-1]["round"] if lines else 0}
    if lines and "train_loss" in lines[-1]:
        result["train_loss"] = lines[-1]["train_loss"]
    seen = evaluated(lines)
    last = seen[-1] if seen else {}
    if groups := [line[SMALLEST_GROUP] for line in lines if SMALLEST_GROUP in line]:
        result[SMALLEST_GROUP] = min(groups)
    names = {*_measured(last, facts), *EPSILONS}
    result |= {name: value for name, value in last.items() if name in names}
    for metric in summarised(facts.scores):
        if best := _best(seen, metric, facts):
            values = [line[metric] for line in seen if metric in line][-5:]
            result |= {f"best_{metric}": best[metric], f"last5_{metric}": sum(values) / len(values)}
    samples = named(facts.score, "samples", "clients")
    at_best = {
        f"{samples}{AT_BEST_SERVER}": (named(facts.score, "server"), samples),
        "best_round": (facts.judge, "round"),
        DENSITY_AT_BEST: (named(facts.score, "mean", "clients"), DENSITY),
    }
    for name, (judge, metric) in at_best.items():
        if best := _best([line for line in seen if metric in line], judge, facts):
            result[name] = best[metric]
    for capacity, cost in costs.items():
        result[named("parameters", capacity)] = round(cost.parameters * last.get(named("density", capacity), 1))
        result[named("macs", capacity)] = round(cost.macs * last.get(named("macs_share", capacity), 1))
    for target in facts.targets:
        sign = 1 if facts.better(facts.judge) == "max" else -1
        if times := [line["sim_time"] for line in seen if sign * line.get(facts.judge, math.nan) >= sign * target]:
            result[time_to(target)] = times[0]
    totals = (*TOTALS, *SIMULATED) if any("sim_time" in line for line in lines) else TOTALS
    return result | {key: sum(line.get(key, 0) for line in lines) for key in totals}


def time_to(target: float) -> str:
    """Return the name of the simulated time to a target: "time_to_0.8"."""
    return f"time_to_{target:g}"


def summarised(scores: Collection[str]) -> list[str]:
    """Return the metrics with `best_` and `last5_` numbers in a result."""
    places = (("mean", "test"), ("server", "test"), ("mean", "clients"), ("samples", "clients"))
    return [named(score, end, split) for score in scores for end, split in places]


def summaries(metrics: Collection[str], scores: Collection[str]) -> list[str]:
    """Return the names that `summary` adds for these metrics of an evaluation, and those of `amounts`."""
    names = [f"{kind}{metric}" for metric in summarised(scores) if metric in metrics for kind in KINDS[1:]]
    first = next(iter(scores))
    samples = named(first, "samples", "clients")
    names += [f"{samples}{AT_BEST_SERVER}"] if samples in metrics else []
    names += [DENSITY_AT_BEST] if named(first, "mean", "clients") in metrics else []
    return [*names, *AMOUNTS]


def amounts(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the training cost of a row (`RunFolder.record`) in the units of SpaFL's tables (arXiv 2406.00431); {} for
    a run without rounds.

    gbit: traffic to and from all clients in 10^9 bits. client_macs: multiply-adds of forward and backward passes, as a
    mean over all clients, including those never selected. Both include visits whose update was discarded.
    kbit_up_per_point: 10^3 bits sent by all clients per percentage point of the judge metric, if that is a fraction of
    which more is better.
    """
    if not record.get("rounds"):
        return {}
    facts = record["facts"]
    wasted_bytes, wasted_flops = (record.get(name, 0) for name in WASTED)
    gbit = 8 * (record["bytes_down"] + record["bytes_up"] + wasted_bytes) / 1e9
    found = {"gbit": gbit, "client_macs": (record["train_flops"] + wasted_flops) / 2 / facts["clients"]}
    score = record.get(facts["judge"], 0.0)
    if score > 0 and Facts(**facts).better(facts["judge"]) == "max":
        found["kbit_up_per_point"] = 8 * record["bytes_up"] / 1e3 / (100 * score)
    return found


def _best(lines: Iterable[Line], metric: str, facts: Facts) -> Line:
    """Return the first line with the best number; {} if none has a number."""
    found = [line for line in lines if not math.isnan(line.get(metric, math.nan))]
    best = max if facts.better(metric) == "max" else min
    return best(found, key=lambda line: line[metric], default={})


def _measured(line: Line, facts: Facts) -> set[str]:
    """Return the names of evaluation metrics that a result contains."""
    exits = takewhile(lambda end: named(facts.score, end) in line, (f"exit{i}" for i in count(1)))
    ends = (*facts.capacities, *ENDS, *exits)
    names = {named(score, end, split) for score in facts.scores for end in ends for split in SPLITS}
    shares = {named(share, capacity) for share in ("density", "macs_share") for capacity in facts.capacities}
    return names | shares | {DENSITY}
