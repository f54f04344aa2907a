"""What is known of a run when it is made (`Facts`), and what came out when it ended (`summary`)."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count, takewhile
from typing import Any, Literal

from rayfl.config import Config
from rayfl.metrics import ENDS, ROUND, SPLITS, TOTALS, Line, evaluated, named

Better = Literal["max", "min"]

KINDS = ("", "best_", "last5_")
"""A number of an evaluation in a result: the last one, the best of all, the mean of the last five."""

AT_BEST_SERVER = "_at_best_server"
"""Ends the name of clients' own score, over their samples, in the round in which the server's was best
(`local_accuracy_samples_at_best_server`): HeteroFL's Local beside its Global."""

DENSITY = "local_density"
"""The mean over clients, and over layers, of the share that clients' own masked networks keep (SpaFL)."""

DENSITY_AT_BEST = "local_density_at_best"
"""`DENSITY` in the round in which clients' own mean score was best."""

AMOUNTS = ("gbit", "client_macs")
"""What `amounts` gives."""


class Facts(Config):
    """What a run's folder states about it, so that nobody has to ask the code that made it."""

    judge: str
    """The metric that it is judged by: the mean of its first score on the test set ("accuracy_mean"), or on clients'
    own test splits where they have networks of their own ("local_accuracy_mean")."""
    capacities: tuple[float, ...]
    """All capacities, largest first."""
    trained: tuple[float, ...]
    """Those that clients have, largest first: a population may have others, of weight 0."""
    scores: dict[str, Better]
    """What an evaluation gives, and which end of it is the good one. The first one counts in tables and plots."""
    clients: int
    """Clients in the population."""
    rounds: int
    """Rounds that were asked for."""
    tuned: tuple[str, ...] = ()
    """The settings that a sweep's search tries, as dotted paths."""

    @property
    def score(self) -> str:
        return next(iter(self.scores))

    def about(self, metric: str) -> tuple[str, str] | None:
        """The score and the split of a number of an evaluation, as in a line or in a result; None of other numbers."""
        ends = (*self.capacities, *ENDS)
        for score in self.scores:
            for split in SPLITS:
                if any(metric == f"{kind}{named(score, end, split)}" for kind in KINDS for end in ends):
                    return score, split
        return None

    def better(self, metric: str) -> Better:
        """Which end of a metric is the good one: of losses and of what a round costs the small one."""
        if found := self.about(metric):
            return self.scores[found[0]]
        return "min" if metric in {m.name for m in ROUND} else "max"


class Cost(Config):
    """What one dense network costs."""

    parameters: int
    macs: int
    """Multiply-adds of one sample's forward pass."""


def summary(lines: Sequence[Line], facts: Facts, costs: Mapping[str, Cost]) -> dict[str, Any]:
    """result.json from the lines of a run; `costs` of dense networks by capacity.

        rounds, train_loss             of the last line
        accuracy_0.5, ...              all that the last evaluation found, by the names of `rayfl.metrics`
        best_*, last5_*                of `summarised` metrics: the best evaluation (papers often print that), and the
                                       mean of the last five
        best_round                     the first round in which the metric that judges was best
        density_0.5, macs_share_0.5    of masked networks: shares of the dense one that were left at the last evaluation
        parameters_0.5, macs_0.5       what a network of this capacity costs; of a masked one only what was left
        bytes_down, ...                totals over all rounds

    With them `AT_BEST_SERVER`, `DENSITY` and `DENSITY_AT_BEST`, where lines have what these are of.
    """
    result: dict[str, Any] = {"rounds": lines[-1]["round"] if lines else 0}
    if lines and "train_loss" in lines[-1]:
        result["train_loss"] = lines[-1]["train_loss"]
    seen = evaluated(lines)
    last = seen[-1] if seen else {}
    names = _measured(last, facts)
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
    return result | {key: sum(line.get(key, 0) for line in lines) for key in TOTALS}


def summarised(scores: Collection[str]) -> list[str]:
    """The metrics of which a result has the best and a mean of the last evaluations, where the run has them."""
    places = (("mean", "test"), ("server", "test"), ("mean", "clients"), ("samples", "clients"))
    return [named(score, end, split) for score in scores for end, split in places]


def summaries(metrics: Collection[str], scores: Collection[str]) -> list[str]:
    """The names that `summary` adds for these metrics of an evaluation, and those of `amounts`."""
    names = [f"{kind}{metric}" for metric in summarised(scores) if metric in metrics for kind in KINDS[1:]]
    first = next(iter(scores))
    samples = named(first, "samples", "clients")
    names += [f"{samples}{AT_BEST_SERVER}"] if samples in metrics else []
    names += [DENSITY_AT_BEST] if named(first, "mean", "clients") in metrics else []
    return [*names, *AMOUNTS]


def amounts(record: Mapping[str, Any]) -> dict[str, float]:
    """What a run's training cost in the units of SpaFL's tables (arXiv 2406.00431), from its row
    (`RunFolder.record`); nothing if it made no round.

    gbit: what was sent to and by all clients, in 10^9 bits. client_macs: multiply-adds of forward and backward passes,
    a mean over all clients, also those that never took part.
    """
    if not record.get("rounds"):
        return {}
    gbit = 8 * (record["bytes_down"] + record["bytes_up"]) / 1e9
    return {"gbit": gbit, "client_macs": record["train_flops"] / 2 / record["facts"]["clients"]}


def _best(lines: Iterable[Line], metric: str, facts: Facts) -> Line:
    """The first line with the best number, {} if none has a number."""
    found = [line for line in lines if not math.isnan(line.get(metric, math.nan))]
    best = max if facts.better(metric) == "max" else min
    return best(found, key=lambda line: line[metric], default={})


def _measured(line: Line, facts: Facts) -> set[str]:
    """The names of what an evaluation may find that a result keeps."""
    exits = takewhile(lambda end: named(facts.score, end) in line, (f"exit{i}" for i in count(1)))
    ends = (*facts.capacities, *ENDS, *exits)
    names = {named(score, end, split) for score in facts.scores for end in ends for split in SPLITS}
    shares = {named(share, capacity) for share in ("density", "macs_share") for capacity in facts.capacities}
    return names | shares | {DENSITY}
