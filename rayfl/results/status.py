"""Current state of a cluster as tables for a terminal."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from rayfl.engine.on_ray.status import Node, RunStatus
from rayfl.results.console import clock
from rayfl.results.folder import runs


def trials(running: Sequence[RunStatus]) -> dict[str, dict[str, int]]:
    """Return study -> number of trials by status; only running ones if this node cannot read the study's folder."""
    found = {}
    for study in dict.fromkeys(run.about.study for run in running):
        mine = [run for run in running if run.about.study == study]
        counts = Counter({"running": len(mine)})
        if mine[0].about.trials > 1 and Path(study).is_dir():
            counts = Counter(run.status for run in runs(study) if run.kind == "run")
        # trials of wider grids are not planned
        if (left := mine[0].about.trials - counts.total()) > 0:
            counts["to come"] = left
        found[study] = dict(counts)
    return found


def nodes_table(nodes: Sequence[Node], running: Sequence[RunStatus]) -> Table:
    """Return a table with one row per node: CPUs and GPUs in use, and client actors by GPU."""
    table = Table("node", "CPUs", "GPUs", "client actors", box=None, title="nodes", title_justify="left")
    for node in nodes:
        if not node.is_alive:
            table.add_row(node.address, "", "", "dead", style="dim")
            continue
        by_gpu = Counter(
            gpu for run in running for place in run.places if place.node == node.id for gpu in place.gpus or [""]
        )
        actors = ", ".join(f"{count} on GPU {gpu}" if gpu else f"{count}" for gpu, count in sorted(by_gpu.items()))
        table.add_row(
            node.address,
            f"{node.cpus_taken:g} of {node.cpus:g}",
            f"{node.gpus_taken:g} of {node.gpus:g}",
            actors or "0",
        )
    return table


def runs_table(running: Sequence[RunStatus]) -> Table:
    table = Table(
        "run", "study", "round", "left", "client actors", "deaths", box=None, title="runs", title_justify="left"
    )
    for run in running:
        actors = f"{len(run.places)}" + (f" x {run.gpus:g} GPU" if run.gpus else "")
        table.add_row(
            run.about.label,
            Path(run.about.study).name,
            f"{run.round}/{run.rounds}",
            "" if run.left is None else clock(run.left),
            actors + (f", {run.starting} starting" if run.starting else ""),
            f"{run.deaths}",
        )
    return table
