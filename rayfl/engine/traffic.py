"""Traffic and operations of a visit at each capacity, counted by the engine before the run.

Two rounds are run with one training step per client and as little other work as possible. The clients of the next round
then train for 1, 2 and 8 steps, with all other work of the method. Traffic is that of a run, except where it depends on
what is learned (codes of masks) or alternates between rounds (RoLoRA, LoRA-A2: that of the third round). Operations
are a fixed number per visit plus a number per training sample:

- proportional to the samples, also with several inner steps per batch: exact, nothing is fixed;
- networks drawn per step: the expectation, which the method states (`Method.expected_flops`);
- networks drawn per client and round: operations and traffic in proportion to the mean network of many draws;
- learned masks: proportional, the mean of the eight steps;
- training on public samples: fixed, exact from the second round on;
- passes over the client's own data whose number is a setting of the method: fixed, the mean of the visited clients,
  whatever the size of a client's data;
- a warm-up in a client's first rounds: not counted;
- too many for a method that makes one further pass whatever `training.epochs` is, which is counted like the training
  (LoRA-A2), or that trains on a part of the client's data, which is counted as all of them (FedL2G).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rayfl import costs
from rayfl.config import Config, ConfigError
from rayfl.core.fold import ClientState
from rayfl.core.net import Net
from rayfl.data.base import Arrays
from rayfl.engine.jobs import Broadcast, Executor, Job, Train
from rayfl.engine.locks import Temporary
from rayfl.engine.serial import Serial
from rayfl.engine.worker import Worker
from rayfl.experiment import Experiment
from rayfl.methods.base import Client
from rayfl.system import Work
from rayfl.training.secure import Protection
from rayfl.training.settings import Training

if TYPE_CHECKING:
    from rayfl.engine.simulation import Simulation

LARGEST_COHORT = 10
"""Clients per round in `work`, at most, except for methods whose traffic can grow with the cohort."""

LARGEST_RATE = 0.1

LENGTHS = 1, 2, 8
"""Steps of the visits from which fixed operations follow."""
TOLERANCE = 1e-6
"""Relative error of sums of operations."""
FEW, MANY, MOST, UNLIKE = 16, 400, 16, 4
"""Selections by which networks that are drawn per client and round are noticed and averaged, at most; most different
networks among them, because each is counted; and how many of equal costs mean that all cost the same."""

Make = Callable[[Experiment, Arrays, Path], "Simulation"]


def work(experiment: Experiment, arrays: Arrays, make: Make) -> dict[float, Work]:
    """Return capacity -> work of a visit, on average over the clients of a small cohort."""
    clients, training = experiment.clients, experiment.training
    cohort = clients.cohort if experiment.method.sends_products else min(clients.cohort, LARGEST_COHORT)
    small = experiment.model_copy(update={"clients": clients.model_copy(update={"cohort": cohort})})
    with Temporary() as folder:
        simulation = _after_two_rounds(small, arrays, make, folder)
        visited = [_visits(simulation, _executor(small, simulation, arrays, n), clients.cohort) for n in LENGTHS]
        larger = {capacity: _larger(simulation, capacity) for capacity in visited[0]}
    nets = experiment.bound().task.nets
    found = {}
    for capacity, one in visited[0].items():
        flops, fixed = split(
            [(length[capacity]["train_samples"], length[capacity]["train_flops"]) for length in visited]
        )
        work, size = larger[capacity]
        flops, fixed = flops * work, fixed * work
        if (expected := simulation.method.expected_flops(capacity)) is not None:
            flops, fixed = expected, 0.0
        memory = costs.training_mb(nets[capacity], training.at_once, training.moments)
        found[capacity] = Work(flops, one["bytes_down"] * size, one["bytes_up"] * size, memory, fixed)
    return found


def _larger(simulation: "Simulation", capacity: float) -> tuple[float, float]:
    """Return how much more operations, and parameters, the networks of many clients and rounds have on average than
    those that `_visits` visits."""

    def net(draw: int) -> Net:
        later, id = divmod(draw, simulation.clients.count)
        client = Client(id, capacity, 2 + later, partial(simulation.label_set, id))
        return simulation.verbs.select(simulation.method_state, client).net

    visited = [
        selection.net
        for selection, clients in simulation.cohort().values()
        for client in clients
        if client.capacity == capacity
    ] or [net(0)]
    some = list(map(net, range(FEW)))
    if len({_cost(one) for one in list(dict.fromkeys(visited + some))[:UNLIKE]}) == 1:
        return 1.0, 1.0
    for draw in range(FEW, MANY):
        if len(set(some)) == MOST:
            break
        some.append(net(draw))
    (work, size), (more_work, more_size) = (np.mean(list(map(_cost, nets)), 0).tolist() for nets in (visited, some))
    return more_work / (work or 1.0), more_size / (size or 1.0)


def _cost(net: Net) -> tuple[float, int]:
    """Return the operations per sample and the parameters."""
    return costs.training_flops(net, 1), net.parameters


def split(visits: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the operations per sample and the fixed operations of three visits with more and more steps, given as
    (training samples, operations). Operations that are not a linear function of the samples, because widths are drawn
    or masks are learned per step, or that do not depend on the steps, count as proportional."""
    (samples, flops), (more_samples, more_flops), (most_samples, most_flops) = visits
    if more_samples == samples:
        return flops / samples, 0.0
    slope = (more_flops - flops) / (more_samples - samples)
    fixed = flops - slope * samples
    is_linear = math.isclose(most_flops, fixed + slope * most_samples, rel_tol=TOLERANCE)
    if not is_linear or fixed < -TOLERANCE * flops:
        return most_flops / most_samples, 0.0
    return (slope, fixed) if fixed > TOLERANCE * flops else (flops / samples, 0.0)


def visits(experiment: Experiment, arrays: Arrays, make: Make) -> dict[float, dict[str, float]]:
    """Return capacity -> mean metrics of a visit over the clients of round 3's cohort, which take one step. Capacities
    without a client in that cohort get the metrics of its first client, on a second visit."""
    with Temporary() as folder:
        simulation = _after_two_rounds(experiment, arrays, make, folder)
        return _visits(simulation, simulation.executor, experiment.clients.cohort)


def _after_two_rounds(experiment: Experiment, arrays: Arrays, make: Make, folder: Path) -> "Simulation":
    """Return a simulation after two rounds with as few steps as possible, when no method sends anything for the first
    time."""
    evaluation = experiment.evaluation.model_copy(update={"every": 10**9})
    short = {"rounds": 4, "evaluation": evaluation, "training": _training(experiment, 1), "system": None}
    method = _warmed_up(_short(experiment.method))
    simulation = make(experiment.model_copy(update=short | {"method": method}), arrays, folder)
    for _ in range(2):
        simulation.run_round()
    return simulation


def _executor(experiment: Experiment, simulation: "Simulation", arrays: Arrays, steps: int) -> Executor:
    """Return an executor whose clients take this many steps, with all other work of the method."""
    longer = {"training": _training(experiment, steps), "method": _warmed_up(experiment.method)}
    recipe = replace(simulation.recipe, method=experiment.model_copy(update=longer).bound())
    return Serial(Worker(recipe, arrays), experiment.run.threads)


def _visits(simulation: "Simulation", executor: Executor, group: int) -> dict[float, dict[str, float]]:
    """Return capacity -> mean metrics of a visit. `group`: largest number of clients whose sum the server learns under
    secure aggregation, who have the most traffic. Raise a ConfigError if all updates of a capacity are refused."""
    experiment, verbs = simulation.experiment, simulation.verbs
    refused: dict[float, str] = {}
    found: dict[float, list[dict[str, float]]] = {capacity: [] for capacity in experiment.clients.all_capacities}
    protection = Protection(None, experiment.updates.secure_aggregation, group)

    def visit(client: Client, client_state: ClientState | None) -> ClientState | None:
        selection = verbs.select(simulation.method_state, client)
        broadcast = Broadcast(verbs.extract(simulation.method_state, selection), selection, protection)
        train = Train([client], {client.id: client_state} if client_state else {})
        [answer] = executor.map("train", [Job(None, 0, lambda: train)], lambda _: broadcast)
        if answer.refused:
            refused[client.capacity] = f"client {answer.refused[0][0]}: {answer.refused[0][1]}"
        else:
            found[client.capacity].append(answer.metrics)
        return answer.client_states.get(client.id)

    clients = [client for _, some in simulation.cohort().values() for client in some]
    for client in clients:
        visit(client, simulation.client_states.get(client.id))
    for capacity in [capacity for capacity, some in found.items() if not some]:
        absent = Client(0, capacity, 2, partial(simulation.label_set, 0))
        client_state = visit(absent, None)
        if client_state:
            found[capacity].clear()
            visit(absent, client_state)
    for capacity in [capacity for capacity, some in found.items() if not some]:
        raise ConfigError(
            f"model: the work of capacity {capacity:g} cannot be counted, because its updates diverge in the first "
            f"steps ({refused[capacity]}). Allowed: a network that can be trained, such as one with norms"
        )
    return {
        capacity: {name: sum(one[name] for one in some) / len(some) for name in some[0]}
        for capacity, some in found.items()
    }


def _training(experiment: Experiment, steps: int) -> Training:
    """Return settings with a number of steps, at a small rate, so that no update is refused."""
    rate = min(experiment.training.lr, LARGEST_RATE) / steps
    return experiment.training.model_copy(update={"steps": steps, "lr": rate})


def _warmed_up(config: Any) -> Any:
    """Return a section without the numbers of a warm-up, which is not part of every visit."""
    names = [name for name in type(config).model_fields if "warmup" in name]
    return config.model_copy(update={name: 0 for name in names if type(getattr(config, name)) is int})


def _short(config: Any) -> Any:
    """Return a section with its numbers of steps, at any depth, reduced to 1, and of epochs to 0."""
    found = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if type(value) is int and name.endswith(("steps", "epochs")):
            found[name] = int(name.endswith("steps"))
        elif isinstance(value, Config):
            found[name] = _short(value)
    return config.model_copy(update=found)
