"""Networks of an experiment and their costs, without training it.

Bytes are counted by the engine itself, which runs two rounds with almost no training.
"""

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch

from rayfl import costs
from rayfl.config import ConfigError, set_path
from rayfl.core.fold import State
from rayfl.core.net import Net
from rayfl.core.operations import Convention
from rayfl.core.submodel import Coverage
from rayfl.data.arrays import Arrays, Column, Split
from rayfl.data.base import DataSet
from rayfl.data.files import offline
from rayfl.data.partition.iid import IID
from rayfl.data.tokens import Sequences
from rayfl.engine import traffic
from rayfl.engine.locks import Temporary
from rayfl.engine.simulation import Simulation
from rayfl.experiment import Experiment
from rayfl.methods.base import Client, Method
from rayfl.models import MODELS_KIND
from rayfl.models.base import ImageModel
from rayfl.results.cells import human_bytes
from rayfl.system import Past, Timed
from rayfl.system.settings import Sync
from rayfl.training.settings import Training

PADDED = 50
"""Maximum number of clients whose padding is counted."""
SAMPLES = 10_000
"""Made-up samples if the data set is not available; more if there are more clients."""


def describe(
    experiment: Experiment,
    convention: Convention = "macs",
    coverage: int = 0,
    notify: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Return one record per capacity: width, and blocks, exits and rank if the model has them; parameters, operations
    of one sample by a convention, and MB of 2^20 bytes; with adapters also `frozen` parameters, which are never sent.

    Bytes are those of `sent`. `notify` gets a note about their estimation, and the model's `notes`. Of masked networks
    only nonzero elements count. With `coverage`: the share of the server's parameters that a client of the capacity
    holds at least once in that many rounds.
    """
    experiment = experiment.model_copy(update={"model": experiment.model.blank})
    method = experiment.bound()
    state, traffic_of = method.init(), sent(experiment, notify)
    training = experiment.training
    gb = costs.actor_gb(method.task.nets.values(), training.at_once, training.moments, experiment.together)
    notify(
        f"Memory of a client actor: about {gb:.2g} GB, with batches of {training.batch_size} samples (run.memory: auto)"
    )
    largest = max(method.task.nets.values(), key=lambda net: costs.training_mb(net, training.at_once, training.moments))
    if largest.model.parts(largest).get("frozen"):
        notify(_parts(largest, training))
    groups = {capacity: experiment.together(net) for capacity, net in method.task.nets.items()}
    if any(group > 1 for group in groups.values()):
        shown = ", ".join(f"{group} at {capacity:g}" for capacity, group in groups.items() if group > 1)
        notify(f"Clients of one submodel train side by side, at most {shown} (run.together: {experiment.run.together})")
    for note in experiment.model.notes():
        notify(note)
    return [
        _record(method, state, capacity, convention, coverage) | traffic_of[capacity] for capacity in method.task.nets
    ]


def _parts(net: Net, training: Training) -> str:
    """Return a note on the memory for training a network with a frozen base."""
    frozen, parameters, optimizer, activations = map(
        human_bytes, costs.training_memory(net, training.at_once, training.moments)
    )
    return (
        f"Of it, for the largest network: base {frozen} (once per node where processes share memory), adapters "
        f"{parameters}, their gradients and optimizer {optimizer}, activations of {training.at_once} samples "
        f"{activations}"
    )


def times(experiment: Experiment, notify: Callable[[str], None]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return one record per class of devices, and facts on all rounds, from the schedule alone: nothing is trained.

    Records: share of the `clients`, mean `capacity`, mean seconds of a visit and its parts at mean speeds, and share of
    the `updates`. Facts: simulated seconds in total, and per round the seconds (mean, median, 9 of 10), clients asked,
    and updates aggregated, late and lost.
    """
    if experiment.system is None:
        raise ConfigError("--time: the file has no section system. Allowed: a file with simulated devices")
    experiment, arrays, about = _with_data(experiment)
    with Temporary() as folder:
        schedule = Simulation(experiment, arrays, folder).schedule
    assert isinstance(schedule, Timed)
    schedule.check()
    fleet, ids = schedule.fleet, schedule.fleet.some
    kinds: dict[str, list[int]] = {}
    for id in ids:
        kinds.setdefault(fleet.device(id).kind, []).append(id)
    past, plans = Past(), []
    for round in range(experiment.rounds):
        plans.append(plan := schedule.plan(past, round))
        past = schedule.learned(plan, round, {id: 1.0 for _, id in plan.visits})
    updates = Counter(fleet.device(id).kind for plan in plans for _, id in plan.visits)
    records = []
    for kind, some in sorted(kinds.items()):
        down, compute, up = np.mean([fleet.seconds(id) for id in some], 0).tolist()
        capacities = schedule.capacities(np.array(some), 0)
        record = {"device": kind, "clients": len(some) / len(ids), "capacity": float(capacities.mean())}
        record |= {"down_s": down, "compute_s": compute, "up_s": up, "visit_s": down + compute + up}
        records.append(record | {"updates": updates[kind] / max(updates.total(), 1)})
    seconds = [plan.metrics["sim_seconds"] for plan in plans]
    facts = {"seconds": past.seconds, "mean": past.seconds / len(plans)}
    facts |= {"median": float(np.median(seconds)), "nine_of_ten": float(np.quantile(seconds, 0.9))}
    facts["updates"] = updates.total() / len(plans)
    equal = "; with equal losses of all clients" if past.memory else ""
    for name in ("asked", "late", "lost", "abandoned", "staleness"):
        facts[name] = sum(plan.metrics[name] for plan in plans) / len(plans)
    notify(f"Times: {experiment.rounds} rounds from the schedule{about}, {len(ids)} clients by class{equal}")
    mode = fleet.system.mode
    if isinstance(mode, Sync) and (abandoned := sum(plan.metrics["abandoned"] for plan in plans)) > len(plans) / 10:
        notify(
            f"{abandoned} of {len(plans)} rounds are abandoned, because fewer than "
            f"{max(mode.least(fleet.population.cohort), 1)} updates have arrived at their end. Hint: raise "
            "system.mode.deadline_s, late_rounds or select, or lower minimum"
        )
    return records, facts


def _record(method: Method, state: State, capacity: float, convention: Convention, coverage: int) -> dict[str, Any]:
    net = method.task.nets[capacity]
    deployed = method.deploy(state, 0, capacity)
    parameters, share = net.parameters, 1.0
    if deployed.masked:
        present = deployed.present
        parameters, share = present.parameters, present.macs / deployed.net.macs
    record: dict[str, Any] = {"capacity": capacity} | anatomy(net)
    record |= {
        "parameters": parameters,
        "flops": round(share * net.operations(convention)),
        "bytes_down": 0,
        "bytes_up": 0,
        "space_mb": costs.space_mb(parameters + record.get("frozen", 0)),
    }
    if coverage:
        covered = Coverage(method.task.server.layout.shapes)
        for t in range(coverage):
            covered.add(method.select(state, Client(0, capacity, t)))
        record["coverage"] = covered.share()
    return record


def sent(experiment: Experiment, notify: Callable[[str], None]) -> dict[float, dict[str, int]]:
    """Return `bytes_down` and `bytes_up` of each capacity: the mean per client of round 3's cohort, as a run counts it.
    The run has its data and cohorts, but clients take one step (`rayfl.engine.traffic`)."""
    experiment, arrays, about = _with_data(experiment)
    found = traffic.visits(experiment, arrays, Simulation)
    population = experiment.clients
    notify(
        f"Bytes: mean per client of round 3, {population.cohort} of {population.count} clients, estimated with one "
        f"training step per client{about}"
    )
    if not about and (note := _padding(experiment, arrays)):
        notify(note)
    return {c: {name: round(one[name]) for name in ("bytes_down", "bytes_up")} for c, one in found.items()}


def _padding(experiment: Experiment, arrays: Arrays) -> str:
    """Return a note on the padding in batches of sequences; "" for other data."""
    federation, size = experiment.federate(arrays), experiment.training.batch_size
    prepare = federation.prepare
    if not isinstance(prepare, Sequences):
        return ""
    found = np.sum(
        [
            prepare.padding(torch.from_numpy(arrays.train["x"][federation.train[client]]), size)
            for client in range(min(PADDED, len(federation.train)))
        ],
        0,
    )
    return (
        f"Padding: {found[0] / max(found[1], 1):.0%} of the tokens of batches of {size} (data.order: {prepare.order})"
    )


def _with_data(experiment: Experiment) -> tuple[Experiment, Arrays, str]:
    """Return the run's data or, if they are not available without a download, made-up ones, partitioned at random."""
    data = experiment.data
    try:
        with offline():
            return experiment, data.arrays(), ""
    except ConfigError:
        count = max(SAMPLES, experiment.clients.count)
        public = None if data.public is None or data.public.share else _made_up(data, data.public.noise or count)
        arrays = Arrays(_made_up(data, count), _made_up(data, count), public=public)
        note = f", on {count:,} made-up samples, because the data set is not available"
        return experiment.model_copy(update={"partition": IID()}), arrays, note


def _made_up(data: DataSet, count: int) -> Split:
    return {name: _column(column, count) for name, column in data.columns.items()}


def _column(column: Column, count: int) -> np.ndarray:
    """Return zeros, or for labels all values in turn: [count, ...]."""
    if column.below is None or column.shape:
        stored = "uint8" if column.below is None else column.stored
        return np.zeros((count, *column.shape), stored)
    return (column.least + np.arange(count) % (column.below - column.least)).astype(column.stored)


def anatomy(net: Net) -> dict[str, Any]:
    """Return what a network keeps of its model. Blocks are "8/8", or one bit each in groups by stage: "11 00 11 10"."""
    model = net.model
    found: dict[str, Any] = {"width": net.width}
    if model.blocks:
        names = net.layout.dims
        kept = {
            b: b not in net.without and any(name.startswith(f"{b}.") for name in names) for b in chain(*model.blocks)
        }
        bits = " ".join("".join("01"[kept[block]] for block in stage) for stage in model.blocks)
        found["blocks"] = f"{len(kept)}/{len(kept)}" if all(kept.values()) else bits
    if model.exit_count > 1:
        found["exits"] = net.exits
    return {**found, **model.parts(net)}


def native(name: str, classes: int | None = None) -> dict[str, Any]:
    """Return the sections of an experiment with an image model as published, HeteroFL's five capacities and synthetic
    data."""
    model = MODELS_KIND.find(name, "--model")
    if not issubclass(model, ImageModel):
        raise ConfigError(
            f"--model: {name!r} is not valid. Allowed: a model of images; describe a CONFIG with it instead"
        )
    fields = model.model_fields
    data = {"name": "synthetic", "shape": fields["input"].default, "classes": classes or fields["classes"].default}
    clients = {"count": 1000, "cohort": 1, "capacities": [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]}
    return {"model": {"name": name}, "data": data, "clients": clients, "method": "heterofl"}


def changed(given: dict[str, Any], capacities: str | None, metric: str | None, method: str | None) -> dict[str, Any]:
    """Return a file's sections with the changes of the command line."""
    if capacities:
        shares = capacities if capacities[:1].isalpha() else _shares(capacities)
        given = set_path(set_path(given, "clients.capacities", shares), "clients.weights", [])
    if metric:
        given = set_path(given, "clients.metric", metric)
    return given | ({"method": method} if method else {})


def _shares(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--capacities: {text!r} is not valid. Allowed: shares such as 1,0.5 or letters such as a1-e1"
        ) from None
