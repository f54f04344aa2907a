"""Comparison of rows at equal cost: equal traffic, equal work of the clients, or equal simulated time.

The cost of a round differs between methods, e.g. networks or logits are sent. Each budget is the total cost of a row,
that of its most expensive seed, so that all its seeds end within it.
A row's result at a budget is its last evaluation within it.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayfl.metrics import EVALUATED, Line, named
from rayfl.results.cells import as_csv, human_bytes, human_flops, human_time, percent, plain
from rayfl.results.folder import RunFolder
from rayfl.results.rows import Record, by_label, facts_of, judge_of, titles_of, values_of
from rayfl.results.tables import Table, missing


@dataclass(frozen=True)
class Cost:
    """A cost of rounds."""

    title: str
    names: tuple[str, ...]
    """Metrics of a round that add up to the cost."""
    per: float
    """Amount in the metrics' unit per `unit`."""
    unit: str
    axis: str
    none: str
    """Text for a row without this cost."""
    human: Callable[[float], str]


TRAFFIC = Cost(
    "traffic",
    ("bytes_down", "bytes_up", "wasted_bytes"),
    1.25e8,
    "gbit",
    "communicated by all clients, Gbit",
    "sends nothing",
    human_bytes,
)
CLIENT_FLOPS = Cost(
    "client FLOPs",
    ("train_flops", "wasted_flops"),
    1e12,
    "tflops",
    "floating point operations of all clients, 10^12",
    "clients do nothing",
    human_flops,
)
SIMULATED_TIME = Cost(
    "simulated time", ("sim_seconds",), 60, "sim_minutes", "simulated time, minutes", "takes no time", human_time
)
COSTS = {"traffic": TRAFFIC, "flops": CLIENT_FLOPS, "time": SIMULATED_TIME}
"""Name in files -> cost."""


def with_spent(lines: Iterable[Line], cost: Cost) -> list[Line]:
    """Return lines with the accumulated cost under the name of its unit."""
    total, found = 0.0, []
    for line in lines:
        total += sum(line.get(name, 0) for name in cost.names) / cost.per
        found.append(line | {cost.unit: total})
    return found


@dataclass(frozen=True)
class Reached:
    """Results of a row's runs within a budget."""

    rounds: list[int]
    """Last evaluated round within the budget, of each run that has one."""
    values: Mapping[str, list[float]]
    """Metric -> values of the runs that have it; NaN for one that diverged."""


def reached(runs: Iterable[Sequence[Line]], cost: Cost, budget: float, metrics: Iterable[str]) -> Reached:
    """Return the results of each run's last evaluation within the budget."""
    last = []
    for lines in runs:
        within = [
            line for line in with_spent(lines, cost) if EVALUATED in line and line[cost.unit] <= budget * (1 + 1e-9)
        ]
        last += within[-1:]
    values = {metric: [line[metric] for line in last if metric in line] for metric in metrics}
    return Reached([line["round"] for line in last], values)


def budgets(curves: Iterable[Sequence[Sequence[Line]]], cost: Cost) -> list[float]:
    """Return smallest, median and largest total cost of rows with a cost (the largest of a row's runs); [] if within
    1 %."""
    totals = sorted(max(with_spent(lines, cost)[-1][cost.unit] for lines in runs) for runs in curves if runs)
    totals = [total for total in totals if total]
    if not totals or totals[-1] - totals[0] < 0.01 * totals[-1]:
        return []
    return sorted({totals[0], totals[len(totals) // 2], totals[-1]})


def equal_cost(records: Sequence[Record], cost: Cost) -> Table | None:
    """Return a table of each row's scores and round within each budget; None if all rows have equal cost."""
    judge, facts = judge_of(records), facts_of(records[0])
    groups, titles = by_label(records, judge), titles_of(records)
    lines = {name: [RunFolder.open(row["path"]).rounds() for row in rows] for name, rows in groups.items()}
    curves = {name: [run for run in runs if run] for name, runs in lines.items()}
    limits = budgets(curves.values(), cost)
    if not limits:
        return None
    server = named(facts.score, "server")
    has_server = any(server in line for runs in curves.values() for lines in runs for line in lines)
    metrics = {judge: "local" if judge == named(facts.score, "mean", "clients") else facts.score}
    if has_server and server != judge:
        metrics[server] = "server"
    cell, unit = (percent, " %") if facts.scores[facts.score] == "max" else (plain, "")
    header, rows = ["method", "seeds"], [[titles[name], str(len(runs))] for name, runs in curves.items()]
    for budget in limits:
        amount = cost.human(budget * cost.per)
        header += [f"{title}{unit}, {amount}" for title in metrics.values()] + ["round"]
        for row, runs in zip(rows, curves.values(), strict=True):
            found = reached(runs, cost, budget, metrics)
            row += [cell(values) for values in found.values.values()]
            row.append(f"{statistics.fmean(found.rounds):.3g}{missing(found.rounds, runs)}" if found.rounds else "–")
    note = (
        f"At equal {cost.title}: results of the last evaluation within a budget. Budgets are total costs of rows "
        "(of the most expensive seed)."
    )
    if cost is TRAFFIC and any(values_of(records, "bytes_public")):
        note += " Traffic is without public samples, which some methods need on clients (results.md)."
    return Table(header, rows, notes=[note])


def write_equal_cost(folder: Path, records: Sequence[Record]) -> None:
    """Write equal_traffic, equal_flops and equal_time as .md and .csv if rows differ in this cost."""
    for name, cost in COSTS.items():
        if len({record["label"] for record in records}) > 1 and (table := equal_cost(records, cost)) is not None:
            (folder / f"equal_{name}.md").write_text(table.markdown(), encoding="utf-8")
            (folder / f"equal_{name}.csv").write_text(as_csv(table.header, table.rows), encoding="utf-8")
