"""How a run scales: its rounds' seconds, memory and traffic against clients, cohort, client actors and nodes.

One axis at a time moves away from the experiment's own point; every point is a run of its own (`rayfl.start`). What a
CPU does meanwhile besides shows in the seconds, so give it idle cores. Linux only.

    clients   the population; the cohort stays, so all further clients are idle. Made-up images are made for all of them
    cohort    how many of the clients take part in a round
    actors    client actors; of more than the machine has CPUs each gets a fraction
    nodes     Ray nodes, on one machine raylets of it, with the same client actors spread over them
"""

import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from rayfl.config import ConfigError
from rayfl.driver import claimed, load_data, start
from rayfl.engine.memory import give_back_freed_memory
from rayfl.engine.on_ray import nodes as ray_nodes
from rayfl.engine.on_ray.cluster import cluster, is_own, require_room, room
from rayfl.experiment import Experiment, lay_over, read_experiment
from rayfl.results.console import ScaleProgress
from rayfl.results.folder import RunFolder
from rayfl.results.scaling import Row, write_scaling

AXES: Mapping[str, tuple[int, ...]] = {
    "clients": (100, 1_000, 10_000, 100_000),
    "cohort": (10, 100, 1_000),
    "actors": (1, 2, 4, 8),
    "nodes": (1, 2),
}
"""What is measured unless something else is asked for."""
ROUNDS = 5
ENDLESS = 10**6
"""Rounds of an experiment that is ended from outside, before its first evaluation."""
PROCESS_BYTES = 400 * 10**6
"""What a process of a run takes at least: Python, torch and Ray."""
SHARES = 10**4
"""Of a CPU: Ray knows no smaller ones."""


@dataclass(frozen=True)
class Point:
    """Where a run is measured."""

    clients: int
    cohort: int
    actors: int
    nodes: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:,}" for name, value in asdict(self).items())


@dataclass(frozen=True)
class Plan:
    """What is going to be measured, and what is not."""

    axes: Mapping[str, Sequence[Point]]
    """Axis -> its points, ascending."""
    experiments: Mapping[Point, Experiment]
    said: Sequence[str]
    """Sentences on points that are left out, or that are not what one may think."""


def scale(
    experiment: Experiment,
    folder: str | Path,
    axes: Mapping[str, Sequence[int]] = AXES,
    *,
    rounds: int = ROUNDS,
    address: str | None = None,
    progress: ScaleProgress | None = None,
    follow: Callable[[Path], None] = lambda path: None,
) -> dict[str, list[Row]]:
    """Measures an experiment along the axes; leaves tables, plots and scale.json in a folder that holds no run. Returns
    the rows of every axis. `follow` is told the folder when it is complete.

    A ConfigError says what is wrong before anything is started or written.
    """
    _check(experiment, axes, rounds, address)
    folder = Path(folder).resolve()
    progress = progress or ScaleProgress()
    config = experiment.plain() | {"scale": {"rounds": rounds} | {axis: list(values) for axis, values in axes.items()}}
    with claimed(folder, config, resume=False), nullcontext() if is_own(address) else cluster(address):
        plan = planned(experiment, axes, address)
        for text in plan.said:
            progress.note(text)
        rows: dict[Point, Row] = {}
        found: dict[str, list[Row]] = {}
        record, status, error = None, "stopped", None
        try:
            for count, some in itertools.groupby(sorted(plan.experiments, key=_order), key=lambda point: point.nodes):
                some = list(some)
                with _nodes(count, plan.experiments[some[0]], address):
                    if record is None:
                        record = _open(folder, config, experiment)
                        progress.begin(record.path, len(plan.experiments))
                    for point in some:
                        progress.phase(f"measuring {point}")
                        rows[point] = measured(plan.experiments[point], point, rounds, address)
                        progress.update(f"{point}: {rows[point]['seconds']:.3g} s a round", rows[point])
            status = "finished"
        except Exception as failure:
            status, error = "failed", str(failure)
            raise
        finally:
            if record is not None:
                found = {axis: [rows[p] for p in points if p in rows] for axis, points in plan.axes.items()}
                _write(record, found)
                record.finish(status, error)
                progress.end(status)
                follow(record.path)
    return found


# what is measured


def axes_of(asked: Mapping[str, str | None], address: str | None) -> dict[str, Sequence[int]]:
    """The axes that a command line asks for, as in {"actors": "1,2,4", "nodes": None}; if it names none, all of them,
    but for nodes of a cluster that runs already."""
    if not any(asked.values()):
        return {axis: values for axis, values in AXES.items() if axis != "nodes" or is_own(address)}
    try:
        return {axis: [int(part) for part in text.split(",")] for axis, text in asked.items() if text}
    except ValueError:
        given = {f"--{axis}": text for axis, text in asked.items() if text}
        raise ConfigError(f"scale: given {given}; allowed: whole numbers, e.g. --actors 1,2,4") from None


def planned(base: Experiment, axes: Mapping[str, Sequence[int]], address: str | None = None) -> Plan:
    """The points along the axes that this machine, or a running cluster, and the experiment allow. A ConfigError if
    none is left."""
    free = room(1.0, 0.0, base.run.server_cpus)
    own = _own_point(base, free, address)
    said: dict[str, None] = {}
    held: set[int] = set()
    points: dict[str, list[Point]] = {}
    experiments: dict[Point, Experiment] = {}
    for axis, values in axes.items():
        points[axis] = []
        for value in sorted(set(values)):
            point = replace(own, **{axis: value})
            try:
                experiment = _at(base, point, free, address)
                if point.clients not in held:
                    load_data(experiment)
                    held.add(point.clients)
                experiments[point] = experiment
            except ConfigError as error:
                said[f"left out: {point}: {error}"] = None
                continue
            points[axis].append(point)
            if (cpus := experiment.run.cpus) < base.run.cpus:
                said[f"{point.actors:,} client actors share {free} CPUs: {cpus:g} of one each"] = None
    if not experiments:
        raise ConfigError("scale: no point is left to measure: " + "; ".join(said))
    return Plan(points, experiments, list(said))


def measured(experiment: Experiment, point: Point, rounds: int, address: str | None = None) -> Row:
    """A run at one point: its first round apart, and the median of `rounds` others, which begin when all client actors
    have started and worked."""
    before, began = _here(), time.monotonic()
    ray_nodes.forget_peak()
    arrays = load_data(experiment)
    with start(experiment, address, arrays=arrays) as session:
        run: Any = session.simulation
        lines = iter(session)
        next(lines)
        first = time.monotonic() - began
        while ray_nodes.starting(run):
            next(lines)
        next(lines)
        server, actors = ray_nodes.usage_of(run)
        store, taken = 0, []
        for line in itertools.islice(lines, rounds):
            taken.append(line)
            store = max(store, ray_nodes.store_bytes())
        server_after, actors_after = ray_nodes.usage_of(run)
        driver = _here()
        there = ray_nodes.alive()
    seconds = statistics.median(line["seconds"] for line in taken)
    worked = sum(actor.cpu for actor in actors_after) - sum(actor.cpu for actor in actors)
    return asdict(point) | {
        "nodes": there,
        "cpus": experiment.run.cpus,
        "first_seconds": first,
        "seconds": seconds,
        "rounds_per_second": 1 / seconds,
        "clients_per_second": point.cohort / seconds,
        "client_seconds": seconds / point.cohort,
        "server_cpu_seconds": (server_after.cpu - server.cpu) / rounds,
        "client_cpu_seconds": worked / rounds / point.cohort,
        "driver_peak": driver.peak,
        "server_peak": server_after.peak,
        "actor_peak": max(actor.peak for actor in actors_after),
        "driver_own": driver.own - before.own,
        "server_own": server_after.own,
        "actor_own": statistics.fmean(actor.own for actor in actors_after),
        "data_bytes": sum(
            array.nbytes for split in (arrays.train, arrays.test, arrays.public or {}) for array in split.values()
        ),
        "store_bytes": store,
        "bytes_down": statistics.fmean(line["bytes_down"] for line in taken),
        "bytes_up": statistics.fmean(line["bytes_up"] for line in taken),
    }


def _here() -> ray_nodes.Usage:
    """What this process holds, without what it has freed."""
    gc.collect()
    give_back_freed_memory()
    return ray_nodes.usage()


def _check(experiment: Experiment, axes: Mapping[str, Sequence[int]], rounds: int, address: str | None) -> None:
    if sys.platform != "linux":
        raise ConfigError(f"scale: given {sys.platform}; allowed: linux, which says what a process holds in /proc")
    if experiment.run.executor != "ray":
        raise ConfigError("run.executor: given serial; allowed: ray, because processes are what is measured")
    if rounds < 1:
        raise ConfigError(f"--rounds: given {rounds}; allowed: at least 1")
    for axis, values in axes.items():
        if axis not in AXES:
            raise ConfigError(f"scale: given an axis {axis!r}; allowed: {', '.join(AXES)}")
        if not values or min(values) < 1:
            raise ConfigError(f"--{axis}: given {list(values)}; allowed: whole numbers of at least 1, e.g. 1,2,4")
    if not is_own(address) and "nodes" in axes:
        raise ConfigError("--nodes: allowed: without --address, because a running cluster has the nodes that it has")


def _own_point(base: Experiment, free: int, address: str | None) -> Point:
    """The experiment's own, from which one axis at a time moves away, where `free` CPUs are."""
    actors = max(1, min(int(free / base.run.cpus), base.jobs)) if base.run.actors == "auto" else base.run.actors
    return Point(base.clients.count, base.clients.cohort, actors, 1 if is_own(address) else ray_nodes.alive())


def _at(base: Experiment, point: Point, free: int, address: str | None) -> Experiment:
    """The experiment at a point, where `free` CPUs are. A ConfigError says why there is none."""
    if is_own(address):
        _require_memory(point)
    if point.nodes > point.actors:
        raise ConfigError(f"given {point.nodes:,} nodes; allowed: at most one for each of {point.actors:,} actors")
    if is_own(address) and point.nodes > 1 and ray_nodes.connected():
        raise ConfigError("given nodes in a process that is connected to a cluster; allowed: 1, or a new process")
    if is_own(address) and point.nodes > 1 and base.run.gpus:
        raise ConfigError("given nodes of this machine with run.gpus; allowed: without, because they cannot share GPUs")
    given = base.plain()
    if base.data.name == "synthetic":
        each = given["data"]["samples"] // base.clients.count
        given = lay_over(given, "data.samples", each * point.clients)
    changes = {
        "rounds": ENDLESS,
        "evaluation.every": ENDLESS,
        "clients.count": point.clients,
        "clients.cohort": point.cohort,
        "run.actors": point.actors,
        "run.cpus": min(base.run.cpus, math.floor(free / point.actors * SHARES) / SHARES),
    }
    for path, value in changes.items():
        given = lay_over(given, path, value)
    experiment = read_experiment(given, "scale")
    if point.nodes == 1 or not is_own(address):
        require_room(point.actors, experiment.run.cpus, experiment.run.gpus, address, experiment.run.server_cpus)
    return experiment


def _require_memory(point: Point) -> None:
    """A driver, a server, and Ray's own processes of every node stand beside the client actors."""
    asked = (2 + point.nodes + point.actors) * PROCESS_BYTES
    _, free = ray_nodes.memory()
    if asked > free:
        raise ConfigError(f"given what takes {asked / 1e9:.1f} GB of memory; allowed: the {free / 1e9:.1f} GB left")


def _nodes(count: int, experiment: Experiment, address: str | None) -> AbstractContextManager[None]:
    """Ray on so many nodes, with room for the experiment; a cluster that runs already stays as it is."""
    if not is_own(address):
        return nullcontext()
    run = experiment.run
    assert isinstance(run.actors, int)
    return ray_nodes.local_nodes(count, -(-run.actors // count) * run.cpus + run.server_cpus)


def _order(point: Point) -> tuple[int, ...]:
    return point.nodes, *astuple(point)


# what is left of it


def _open(folder: Path, config: Mapping[str, Any], experiment: Experiment) -> RunFolder:
    return RunFolder.create(folder, "scale", config, experiment.tags(), experiment.facts(), kind="scale")


def _write(record: RunFolder, found: Mapping[str, Sequence[Row]]) -> None:
    """Tables and plots; and a line a row, whose round is the value on the axis: MLflow's plots are over the axis."""
    write_scaling(record.path, found)
    record.append(
        [
            {"round": row[axis]} | {f"{axis}/{name}": value for name, value in row.items()}
            for axis, rows in found.items()
            for row in rows
        ]
    )
