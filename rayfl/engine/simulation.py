"""The round: sample, select, map, fold, step, evaluate.

Knows no method by name and nothing of Ray. All that a round needs is in `(state, carries, round)`, which is what
a checkpoint holds; every random draw has an address. So a run is equal, to the bit, for any executor, after any
restart and after any fault that the executor survives.
"""

import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path

import numpy as np

from rayfl.data.base import Arrays
from rayfl.data.federation import Federation
from rayfl.engine import checkpoints
from rayfl.engine.carries import Carries
from rayfl.engine.jobs import Executor, Job, Parcel, Train, Trained
from rayfl.engine.serial import Serial
from rayfl.engine.worker import Recipe, Worker
from rayfl.evaluation import Clients, Evaluation, Evaluator
from rayfl.experiment import Experiment
from rayfl.fold import Fold
from rayfl.methods.base import Client, Deployment
from rayfl.metrics import CLIENT_SCORES, EVALUATED, NOTE, Line, add, finished
from rayfl.net import Net
from rayfl.server import MOMENTS
from rayfl.submodel import Selection

STEP_SECONDS = 1.0
DEFAULT_STATISTICS = Evaluation.model_fields["statistics"].default

MakeExecutor = Callable[[Recipe], Executor]

Cohort = dict[Hashable, tuple[Selection, list[Client]]]
"""Selection key -> the selection, and the clients who hold it, ids ascending."""


class RefusedUpdate(RuntimeError):
    """A client's update was not finite or exploded, and the policy is to stop."""


class Simulation:
    """One federated run. `run_round()` until `done`."""

    def __init__(self, experiment: Experiment, arrays: Arrays, folder: Path, make_executor: MakeExecutor | None = None):
        """In this process unless an executor is given. `folder` is for what clients keep."""
        self.experiment, self.method = experiment, experiment.bound()
        self.clients, self.seed, self.rounds = experiment.clients, experiment.seed, experiment.rounds
        self.data: Federation = experiment.federate(arrays)
        self.recipe = Recipe(
            self.method,
            self.data,
            self.seed,
            experiment.updates,
            experiment.scores,
            experiment.evaluation.statistics,
        )
        self.executor = make_executor(self.recipe) if make_executor else self._serial(arrays)
        self._test_samples = len(arrays.test["y"])
        self.carries = Carries(folder / "carries")
        self.state = self.method.init()
        self.round = 0
        self._is_said = False
        self.client_scores = np.empty(0, CLIENT_SCORES)
        """Of the last evaluation."""

    def _serial(self, arrays: Arrays) -> Executor:
        return Serial(Worker(self.recipe, arrays), self.experiment.run.threads)

    @property
    def done(self) -> bool:
        return self.round >= self.rounds

    def run_round(self) -> Line:
        """Trains one round, evaluates if it is due, and returns the round's line of metrics."""
        started = time.perf_counter()
        line = self.train()
        self.round += 1
        if self.round % self.experiment.evaluation.every == 0 or self.done:
            line |= self.evaluate()
        return {"round": self.round, "seconds": time.perf_counter() - started} | line

    def step(self, seconds: float = STEP_SECONDS) -> list[Line]:
        """Rounds up to the next evaluation, or for about so many seconds, one at least: their lines; none when it is
        done."""
        lines: list[Line] = []
        until = time.monotonic() + seconds
        while not self.done and (not lines or EVALUATED not in lines[-1] and time.monotonic() < until):
            lines.append(self.run_round())
        return lines

    # training

    def train(self) -> Line:
        """One round of local updates, folded into the next state."""
        cohort = self.cohort()
        size = self.experiment.chunk
        chunks = [
            (key, clients[i : i + size]) for key, (_, clients) in cohort.items() for i in range(0, len(clients), size)
        ]

        def shared(key: Hashable) -> Parcel:
            selection = cohort[key][0]
            return Parcel(self.method.extract(self.state, selection), selection)

        jobs = [self._job(key, cohort[key][0].net, clients) for key, clients in chunks]
        fold, totals, refused = Fold(self.state, self.experiment.server), {}, []
        for (key, _), answer in zip(chunks, self.executor.map("train", jobs, shared), strict=True):
            assert isinstance(answer, Trained)
            add(totals, answer.metrics)
            refused += answer.refused
            if answer.refused and self.experiment.updates.policy == "stop":
                client, reason = answer.refused[0]
                raise RefusedUpdate(
                    f"round {self.round + 1}: the update of client {client} is {reason}; "
                    "lower training.lr, or set updates.policy: refuse to go on without it"
                )
            if answer.update is not None:
                for client, carry in answer.update.carries.items():
                    self.carries.put(client, self.round, carry)
                fold.add(cohort[key][0], answer.update)
        moments = {group: t for group, t in self.state.items() if group.startswith(MOMENTS)}
        own = {group: t for group, t in self.state.items() if group not in moments}
        self.state = self.method.step(own, self.round, fold) | moments | fold.moments
        line = finished(totals) | {"refused": len(refused)}
        if refused:
            line["refusals"] = "; ".join(f"client {id}: {reason}" for id, reason in refused)
        return line

    def cohort(self) -> Cohort:
        """The clients of the next round, by what they hold."""
        cohort: Cohort = {}
        for id in self.clients.sample(self.seed, self.round):
            client = Client(id, self.clients.capacity(id, self.seed, self.round), self.round)
            selection = self.method.select(self.state, client)
            cohort.setdefault(selection.key, (selection, []))[1].append(client)
        return cohort

    def _job(self, key: Hashable, net: Net, clients: list[Client]) -> Job:
        def make() -> Train:
            carries = {client.id: self.carries.get(client.id) for client in clients}
            return Train(clients, {id: carry for id, carry in carries.items() if carry is not None})

        training = self.method.task.training
        sizes = [int(self.data.train.sizes[client.id]) for client in clients]
        cost = sum(training.samples_of(n) for n in sizes) * net.macs
        about = f"clients {[client.id for client in clients]} with {sizes} samples, round {self.round + 1}"
        return Job(key, cost, make, about)

    # evaluation

    @property
    def evaluator(self) -> Evaluator:
        method, evaluation = self.method, self.experiment.evaluation
        return Evaluator(method, self.data, evaluation, self.recipe.scores, self.seed, self.executor)

    def evaluate(self) -> Line:
        """What every capacity and every client reach after `round` rounds."""
        deployed = {c: self.method.deploy(self.state, self.round, c) for c in self.clients.all_capacities}
        line, self.client_scores = self.evaluator.evaluate(deployed, self._clients(), self.round, self._test_samples)
        kind = self.experiment.evaluation.statistics
        if not self._is_said and kind != DEFAULT_STATISTICS and all(d.has_statistics for d in deployed.values()):
            self._is_said = True
            line[NOTE] = (
                f"evaluation.statistics: given {kind!r}, which has no effect, because no norm of method "
                f"{self.method.name} on model {self.experiment.model.name} waits for statistics"
            )
        return line

    def _clients(self) -> Clients:
        ids = self.experiment.evaluation.judged(self.clients.count, self.seed)
        capacities = np.full(self.clients.count, np.nan)
        capacities[ids] = self.clients.capacities_of(ids, self.seed, max(self.round - 1, 0))

        def deploy(id: int) -> Deployment:
            return self.method.deploy(self.state, self.round, float(capacities[id]), self.carries.get(id))

        return Clients(ids, capacities, self.carries.owners, deploy)

    def deployment(self, capacity: float, client: int | None = None) -> Deployment:
        """What a device of this capacity runs now, or the client's own, with its norms' statistics."""
        evaluator = self.evaluator
        if client is not None and client in self.carries.owners:
            deployed = self.method.deploy(self.state, self.round, capacity, self.carries.get(client))
            found = evaluator.collect({deployed.key: deployed}, self.round, client)
        else:
            deployed = self.method.deploy(self.state, self.round, capacity)
            found = evaluator.collect({deployed.key: deployed}, self.round)
        return replace(deployed, statistics=found.get(deployed.key, deployed.statistics))

    # checkpoints

    def save(self, folder: Path) -> None:
        """Writes a checkpoint of this moment below `folder`."""
        checkpoints.write(folder, self.round, self.experiment.result_config(), self.state, self.carries)

    def restore(self, folder: Path) -> tuple[int, list[str]]:
        """Goes to the newest good checkpoint below `folder`: its round (0 if there is none), what to say."""
        said: list[str] = []
        found = checkpoints.latest(folder, self.experiment.result_config(), said.append)
        if found is not None:
            self.round, self.state = found.round, found.state
            self.carries.restore(found.carries)
        return self.round, said
