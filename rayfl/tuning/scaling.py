"""Scale studies: seconds per round, memory and traffic against clients, cohort, client actors and nodes.

One axis at a time is varied from the experiment's own point; every point is a separate run (`rayfl.start`). Use idle
cores: other work on the CPUs changes the seconds. Linux only.

    clients   population; the cohort stays the same, so additional clients are idle. Synthetic images grow with it
    cohort    clients per round
    actors    client actors; if there are more than CPUs, each gets a fraction
    nodes     Ray nodes (raylets on one machine) that share the same client actors
"""

import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from rayfl.config import ConfigError
from rayfl.driver import claimed, ending
from rayfl.engine.files import absolute
from rayfl.engine.memory import give_back_freed_memory
from rayfl.engine.on_ray import nodes as ray_nodes
from rayfl.engine.on_ray.cluster import cluster
from rayfl.engine.on_ray.resources import gpus_of, is_own, require_room, room
from rayfl.engine.simulation import load_data
from rayfl.experiment import Experiment, lay_over, read_experiment
from rayfl.results.console import ScaleProgress
from rayfl.results.folder import RunFolder
from rayfl.results.scaling import Row, write_scaling
from rayfl.session import start

AXES: Mapping[str, tuple[int, ...]] = {
    "clients": (100, 1_000, 10_000, 100_000),
    "cohort": (10, 100, 1_000),
    "actors": (1, 2, 4, 8),
    "nodes": (1, 2),
}
"""Default values of every axis."""
ROUNDS = 5
ENDLESS = 10**6
"""Rounds of an experiment that is stopped before its first evaluation."""
PROCESS_BYTES = 400 * 10**6
"""Minimum memory of a process: Python, torch and Ray."""
SHARES = 10**4
"""Smallest fractions of a CPU in Ray: 1 / SHARES."""


@dataclass(frozen=True)
class Point:
    """Point of a measurement."""

    clients: int
    cohort: int
    actors: int
    nodes: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:,}" for name, value in asdict(self).items())


@dataclass(frozen=True)
class Plan:
    """Planned measurements."""

    axes: Mapping[str, Sequence[Point]]
    """Axis -> its points, ascending."""
    experiments: Mapping[Point, Experiment]
    notes: Sequence[str]
    """Notes on points that are left out or changed."""


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
    """Measure an experiment along the axes, write tables, plots and scale.json into a new folder, return the rows of
    every axis. `follow` is called with the folder when it is complete. Raise ConfigError for invalid input before
    anything is started or written."""
    _check(experiment, axes, rounds, address)
    folder = absolute(folder)
    progress = progress or ScaleProgress()
    config = experiment.plain() | {"scale": {"rounds": rounds} | {axis: list(values) for axis, values in axes.items()}}
    with ExitStack() as stack:
        stack.enter_context(claimed(folder, config, False, "scale"))
        stack.enter_context(nullcontext() if is_own(address) else cluster(address))
        plan = planned(experiment, axes, address)
        for text in plan.notes:
            progress.note(text)
        rows: dict[Point, Row] = {}
        record = None
        for count, some in itertools.groupby(sorted(plan.experiments, key=_order), key=lambda point: point.nodes):
            some = list(some)
            with _nodes(count, plan.experiments[some[0]], address):
                if record is None:
                    record = _open(folder, config, experiment)
                    progress.begin(record.path, len(plan.experiments))
                    stack.callback(follow, record.path)
                    stack.enter_context(ending(record, progress.end))
                    stack.callback(_write, record, plan, rows)
                for point in some:
                    progress.phase(f"measuring {point}")
                    rows[point] = measured(plan.experiments[point], point, rounds, address)
                    progress.update(f"{point}: {rows[point]['seconds']:.3g} s per round", rows[point])
    return _by_axis(plan, rows)


# measurements


def axes_of(asked: Mapping[str, str | None], address: str | None) -> dict[str, Sequence[int]]:
    """Return the axes of a command line, such as {"actors": "1,2,4", "nodes": None}. Default: all, without nodes for a
    running cluster."""
    if not any(asked.values()):
        return {axis: values for axis, values in AXES.items() if axis != "nodes" or is_own(address)}
    try:
        return {axis: [int(part) for part in text.split(",")] for axis, text in asked.items() if text}
    except ValueError:
        given = " ".join(f"--{axis} {text}" for axis, text in asked.items() if text)
        raise ConfigError(f"scale: {given} is not valid. Allowed: whole numbers, such as --actors 1,2,4") from None


def planned(base: Experiment, axes: Mapping[str, Sequence[int]], address: str | None = None) -> Plan:
    """Return the points that the machine or cluster and the experiment allow. Raise ConfigError if there are none."""
    free = room(1.0, 0.0, base.run.server_cpus)
    own = _own_point(base, address)
    notes: dict[str, None] = {}
    loaded: set[int] = set()
    points: dict[str, list[Point]] = {}
    experiments: dict[Point, Experiment] = {}
    for axis, values in axes.items():
        points[axis] = []
        for value in sorted(set(values)):
            point = replace(own, **{axis: value})
            try:
                experiment = _at(base, point, free, address)
                if point.clients not in loaded:
                    load_data(experiment)
                    loaded.add(point.clients)
                experiments[point] = experiment
            except ConfigError as error:
                notes[f"left out: {point}: {error}"] = None
                continue
            points[axis].append(point)
            if (cpus := experiment.run.cpus) < base.run.cpus:
                notes[f"{point.actors:,} client actors share {free} CPUs: {cpus:g} of one each"] = None
    if not experiments:
        raise ConfigError("scale: no point is left to measure: " + "; ".join(notes))
    return Plan(points, experiments, list(notes))


def measured(experiment: Experiment, point: Point, rounds: int, address: str | None = None) -> Row:
    """Measure a run at one point: its first round, and the median of `rounds` rounds after all client actors have
    started and worked."""
    before, began = _here(), time.monotonic()
    ray_nodes.forget_peak()
    arrays = load_data(experiment)
    with start(experiment, address=address, arrays=arrays) as session:
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
    """Return the usage of this process, without freed memory."""
    gc.collect()
    give_back_freed_memory()
    return ray_nodes.usage()


def _check(experiment: Experiment, axes: Mapping[str, Sequence[int]], rounds: int, address: str | None) -> None:
    if sys.platform != "linux":
        raise ConfigError(
            f"scale: {sys.platform} is not supported. Allowed: linux, whose /proc has the memory of processes"
        )
    if experiment.run.executor != "ray":
        raise ConfigError("run.executor: serial has no processes to measure. Allowed: ray")
    if rounds < 1:
        raise ConfigError(f"--rounds: {rounds} is not valid. Allowed: at least 1")
    for axis, values in axes.items():
        if axis not in AXES:
            raise ConfigError(f"scale: {axis!r} is not an axis. Allowed: {', '.join(AXES)}")
        if not values or min(values) < 1:
            raise ConfigError(
                f"--{axis}: {list(values)} is not valid. Allowed: whole numbers of at least 1, e.g. 1,2,4"
            )
    if not is_own(address) and "nodes" in axes:
        raise ConfigError(
            "--nodes: --address is set, and the nodes of a running cluster are fixed. Allowed: only without --address"
        )


def _own_point(base: Experiment, address: str | None) -> Point:
    """Return the experiment's own point."""
    run = base.run
    gpus = gpus_of(run)
    actors = run.actors if run.actors != "auto" else max(1, min(room(run.cpus, gpus, run.server_cpus), base.jobs))
    return Point(base.clients.count, base.clients.cohort, actors, 1 if is_own(address) else ray_nodes.alive())


def _at(base: Experiment, point: Point, free: int, address: str | None) -> Experiment:
    """Return the experiment at a point, with `free` CPUs. Raise ConfigError if it is not possible."""
    if is_own(address):
        _require_memory(point)
    if point.nodes > point.actors:
        raise ConfigError(
            f"{point.nodes:,} nodes are more than {point.actors:,} actors. Allowed: at most one node per actor"
        )
    if is_own(address) and point.nodes > 1 and ray_nodes.connected():
        raise ConfigError("nodes: this process is connected to a cluster. Allowed: 1, or a new process")
    if is_own(address) and point.nodes > 1 and gpus_of(base.run):
        raise ConfigError("nodes: nodes of one machine cannot share GPUs. Allowed: only with run.gpus: 0")
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
    if base.training.cosine_rounds:
        changes["training.cosine_rounds"] = ENDLESS
    for path, value in changes.items():
        given = lay_over(given, path, value)
    experiment = read_experiment(given, "scale")
    if point.nodes == 1 or not is_own(address):
        run = experiment.run
        require_room(point.actors, run.cpus, gpus_of(run), address, run.server_cpus)
    return experiment


def _require_memory(point: Point) -> None:
    """Raise ConfigError if memory is too small for client actors, driver, server and every node's Ray processes."""
    asked = (2 + point.nodes + point.actors) * PROCESS_BYTES
    _, free = ray_nodes.memory()
    if asked > free:
        raise ConfigError(f"needs {asked / 1e9:.1f} GB of memory. Allowed: the {free / 1e9:.1f} GB available")


def _nodes(count: int, experiment: Experiment, address: str | None) -> AbstractContextManager[None]:
    """Start Ray with `count` nodes and room for the experiment, unless a running cluster is used."""
    if not is_own(address):
        return nullcontext()
    run = experiment.run
    assert isinstance(run.actors, int)
    return ray_nodes.local_nodes(count, -(-run.actors // count) * run.cpus + run.server_cpus)


def _order(point: Point) -> tuple[int, ...]:
    return point.nodes, *astuple(point)


# results


def _open(folder: Path, config: Mapping[str, Any], experiment: Experiment) -> RunFolder:
    return RunFolder.create(folder, "scale", config, experiment.tags(), experiment.facts(), kind="scale")


def _by_axis(plan: Plan, rows: Mapping[Point, Row]) -> dict[str, list[Row]]:
    """Return the rows measured so far, of every axis."""
    return {axis: [rows[point] for point in points if point in rows] for axis, points in plan.axes.items()}


def _write(record: RunFolder, plan: Plan, rows: Mapping[Point, Row]) -> None:
    """Write tables and plots, and one line of metrics per row with the axis value as its round, for MLflow's plots."""
    found = _by_axis(plan, rows)
    write_scaling(record.path, found)
    record.append(
        [
            {"round": row[axis]} | {f"{axis}/{name}": value for name, value in row.items()}
            for axis, rows in found.items()
            for row in rows
        ]
    )
