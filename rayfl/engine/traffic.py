"""Traffic and operations of a visit at each capacity, counted by the engine before the run.

Two rounds are run with one training step per client, so the numbers are those of a run except where they depend on what
is learned (codes of masks).
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfl import costs
from rayfl.config import Config
from rayfl.core.fold import ClientState
from rayfl.data.base import Arrays
from rayfl.engine.jobs import Broadcast, Job, Train
from rayfl.engine.locks import Temporary
from rayfl.experiment import Experiment
from rayfl.methods.base import Client
from rayfl.system import Work
from rayfl.training.secure import Protection

if TYPE_CHECKING:
    from rayfl.engine.simulation import Simulation

LARGEST_COHORT = 10
"""Clients per round in `work`, at most."""

LARGEST_RATE = 0.1

Make = Callable[[Experiment, Arrays, Path], "Simulation"]


def work(experiment: Experiment, arrays: Arrays, make: Make) -> dict[float, Work]:
    """Return capacity -> work of a visit, on average over the clients of a small cohort."""
    clients, training = experiment.clients, experiment.training
    small = clients.model_copy(update={"cohort": min(clients.cohort, LARGEST_COHORT)})
    visited = visits(experiment.model_copy(update={"clients": small}), arrays, make, clients.cohort)
    moments = 2 if training.optimizer != "sgd" else int(training.momentum > 0)
    nets = experiment.bound().task.nets
    return {
        capacity: Work(
            one["train_flops"] / one["train_samples"],
            one["bytes_down"],
            one["bytes_up"],
            costs.training_mb(nets[capacity], training.batch_size, moments),
        )
        for capacity, one in visited.items()
    }


def visits(experiment: Experiment, arrays: Arrays, make: Make, group: int) -> dict[float, dict[str, float]]:
    """Return capacity -> mean metrics of a visit over the clients of round 2's cohort. Capacities without a client in
    that cohort get the metrics of its first client, on a second visit. `group`: largest number of clients whose sum the
    server learns under secure aggregation."""
    evaluation = experiment.evaluation.model_copy(update={"every": 10**9})
    # at a small rate, so that no update is refused
    rate = min(experiment.training.lr, LARGEST_RATE)
    training = experiment.training.model_copy(update={"steps": 1, "lr": rate})
    short = {"rounds": 3, "evaluation": evaluation, "training": training, "method": _short(experiment.method)}
    found: dict[float, list[dict[str, float]]] = {capacity: [] for capacity in experiment.clients.all_capacities}
    with Temporary() as folder:
        simulation = make(experiment.model_copy(update={**short, "system": None}), arrays, folder)
        simulation.run_round()
        verbs = simulation.verbs
        # the largest group has the most traffic
        protection = Protection(None, experiment.updates.secure_aggregation, group)

        def visit(client: Client, client_state: ClientState | None) -> ClientState | None:
            selection = verbs.select(simulation.state, client)
            broadcast = Broadcast(verbs.extract(simulation.state, selection), selection, protection)
            train = Train([client], {client.id: client_state} if client_state else {})
            [answer] = simulation.executor.map("train", [Job(None, 0, lambda: train)], lambda _: broadcast)
            found[client.capacity].append(answer.metrics)
            return answer.client_states.get(client.id)

        clients = [client for _, some in simulation.cohort().values() for client in some]
        for client in clients:
            visit(client, simulation.client_states.get(client.id))
        for capacity in [capacity for capacity, some in found.items() if not some]:
            absent = Client(clients[0].id, capacity, 1, clients[0].label_set)
            client_state = visit(absent, None)
            if client_state:
                found[capacity].clear()
                visit(absent, client_state)
    return {
        capacity: {name: sum(one[name] for one in some) / len(some) for name in some[0]}
        for capacity, some in found.items()
    }


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
