"""The round: sample, select, map, fold, step, refine, evaluate.

Knows no method by name and nothing of Ray. A round depends on `(state, client_states, round, partial_round)` alone,
which a checkpoint holds, and every random draw has an address. A run therefore gives the same bits with any executor,
after any restart, and after any fault that the executor survives.
"""

import itertools
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from rayfl.core.fold import Fold, PairwiseSum, add_updates, aligned
from rayfl.core.net import Net
from rayfl.core.server_optimizers import MOMENTS
from rayfl.core.submodel import Selection
from rayfl.core.tensors import as_tensor
from rayfl.data.base import Arrays
from rayfl.data.federation import Federation
from rayfl.engine import checkpoints
from rayfl.engine.client_states import ClientStates
from rayfl.engine.evaluator import Clients, Evaluator
from rayfl.engine.jobs import Broadcast, Executor, Job, Refine, Train, Trained
from rayfl.engine.serial import Serial
from rayfl.engine.worker import Recipe, Worker
from rayfl.evaluation import Evaluation
from rayfl.experiment import Experiment
from rayfl.methods.base import Client, Deployment, ServerTask, ServerTaskResult
from rayfl.metrics import CLIENT_SCORES, EVALUATED, NOTE, Line, finished, plus
from rayfl.training.updates import norm

STEP_SECONDS = 1.0
JOBS = 8
"""Jobs a worker in a round, where there are clients enough: the last ones to end then end at about the same time."""
JOB_MACS = 5e7
"""Multiply-adds of forward passes that are worth a message: some 20 ms of training on one core."""
BRANCH = 8
"""Jobs that a node adds up before their sum crosses the network."""
DEFAULT_STATISTICS = Evaluation.model_fields["statistics"].default

MakeExecutor = Callable[[Recipe], Executor]

Cohort = dict[Hashable, tuple[Selection, list[Client]]]
"""Selection key -> the selection, and the clients who hold it, ids ascending."""


@dataclass(frozen=True)
class Chunk:
    """Clients of one selection who are one job."""

    key: Hashable
    """The selection's."""
    clients: list[Client]
    branch: Hashable
    """The job's."""


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
        self._train, self._test_samples = arrays.train, arrays.test_samples
        self.client_states = ClientStates(folder / "client_states")
        self.state = self.method.init()
        self.round = 0
        self.partial_round: Line = {}
        """What the round has measured so far, behind its local updates; nothing between rounds."""
        self._is_noted = False
        self.client_scores = np.empty(0, CLIENT_SCORES)
        """Of the last evaluation."""

    def _serial(self, arrays: Arrays) -> Executor:
        return Serial(Worker(self.recipe, arrays), self.experiment.run.threads)

    @property
    def done(self) -> bool:
        return self.round >= self.rounds

    def run_round(self) -> Line:
        """Trains one round, evaluates if it is due, and returns the round's line of metrics."""
        while (line := self.advance()) is None:
            pass
        return line

    def advance(self) -> Line | None:
        """The next part of a round: its local updates, or lessons of the server. With the last one it is evaluated if
        that is due, and its line of metrics is returned."""
        started = time.perf_counter()
        spent = self.partial_round.get("seconds", 0.0)
        line = self._refine() if self.partial_round else self.train()
        over = not self.method.plan(self.state, self.round)
        if over:
            self.round += 1
            if self.round % self.experiment.evaluation.every == 0 or self.done:
                line |= self.evaluate()
        head = {"round": self.round, "seconds": spent + time.perf_counter() - started}
        line = head | line | head
        self.partial_round = {} if over else line
        return line if over else None

    def step(self, seconds: float = STEP_SECONDS) -> list[Line] | None:
        """Rounds up to the next evaluation, or for about so many seconds: their lines, perhaps none in the middle of a
        round. None when it is done."""
        if self.done:
            return None
        lines: list[Line] = []
        until = time.monotonic() + seconds
        while not self.done:
            if (line := self.advance()) is not None:
                lines.append(line)
            if EVALUATED in (line or {}) or time.monotonic() >= until:
                break
        return lines

    # training

    def train(self) -> Line:
        """One round of local updates, folded into the next state."""
        cohort = self.cohort()
        chunks = self._chunks(cohort)

        def shared(key: Hashable) -> Broadcast:
            selection = cohort[key][0]
            return Broadcast(self.method.extract(self.state, selection), selection)

        jobs = [self._job(chunk, cohort[chunk.key][0].net) for chunk in chunks]
        answers = zip(chunks, self.executor.map("train", jobs, shared), strict=True)
        fold, totals, refused = Fold(self.state, self.experiment.server), {}, []
        for key, some in itertools.groupby(answers, key=lambda pair: pair[0].key):
            updates, metrics = PairwiseSum(add_updates), PairwiseSum(plus)
            for chunk, answer in some:
                assert isinstance(answer, Trained)
                self._heed(answer)
                metrics.add(answer.metrics, len(chunk.clients))
                refused += answer.refused
                if answer.size:
                    updates.add(answer.update, answer.size)
            totals = plus(totals, metrics.total)
            if (update := updates.total) is not None:
                fold.add(cohort[key][0], update)
        moments = {group: t for group, t in self.state.items() if group.startswith(MOMENTS)}
        own = {group: t for group, t in self.state.items() if group not in moments}
        self.state = self.method.step(own, self.round, fold) | moments | fold.moments
        line = finished(totals) | {"refused": len(refused)}
        if refused:
            line["refusals"] = "; ".join(f"client {id}: {reason}" for id, reason in refused)
        return line

    def _refine(self) -> Line:
        """The server's next lessons, and what the round has measured with them."""
        server_tasks = {server_task.name: server_task for server_task in self.method.plan(self.state, self.round)}
        jobs = [self._server_task(server_task) for server_task in server_tasks.values()]
        refined: dict[str, ServerTaskResult] = dict(
            zip(server_tasks, self.executor.map("refine", jobs, server_tasks.__getitem__), strict=True)  # pyright: ignore
        )
        line = self.partial_round
        for name, found in refined.items():
            if not math.isfinite(norm(found.groups.values())):
                raise RefusedUpdate(
                    f"round {self.round + 1}: what the server learned ({name}) is not finite; lower the learning rate "
                    f"of its work, in the section method"
                )
            line = plus(line, found.metrics)
        self.state = self.method.absorb(self.state, self.round, refined)
        return line

    def _server_task(self, server_task: ServerTask) -> Job:
        def make() -> Refine:
            return Refine(
                self.round, None if server_task.client is None else self.client_states.get(server_task.client)
            )

        about = f"the server's work {server_task.name!r}, round {self.round + 1}"
        return Job(server_task.name, server_task.samples * server_task.net.macs, make, about)

    def _heed(self, answer: Trained) -> None:
        """What clients keep is written down, and a refusal may end the run."""
        if answer.refused and self.experiment.updates.policy == "stop":
            client, reason = answer.refused[0]
            raise RefusedUpdate(
                f"round {self.round + 1}: the update of client {client} is {reason}; "
                "lower training.lr, or set updates.policy: refuse to go on without it"
            )
        for client, client_state in answer.client_states.items():
            self.client_states.put(client, self.round, client_state)

    def cohort(self) -> Cohort:
        """The clients of the next round, by what they hold."""
        cohort: Cohort = {}
        for id in self.clients.sample(self.seed, self.round):
            capacity = self.clients.capacity(id, self.seed, self.round)
            client = Client(id, capacity, self.round, partial(self._present, id))
            selection = self.method.select(self.state, client)
            cohort.setdefault(selection.key, (selection, []))[1].append(client)
        return cohort

    def _present(self, id: int) -> torch.Tensor:
        """A client's label set."""
        rows = self.data.train[id]
        return self.data.goal.present({name: as_tensor(array[rows]) for name, array in self._train.items()})

    def _chunks(self, cohort: Cohort) -> list[Chunk]:
        """The clients of every job: aligned parts of the sum of their selection's updates, whose bits therefore do not
        depend on where the parts end. Large networks come first, as they go out first, so that no answer waits."""
        chunks = []
        for key, (selection, clients) in sorted(cohort.items(), key=lambda item: -item[1][0].net.macs):
            parts = list(aligned(len(clients), self._most(selection.net, clients)))
            branch = BRANCH * (parts[0].stop - parts[0].start)
            chunks += [Chunk(key, clients[part], (key, part.start // branch)) for part in parts]
        return chunks

    def _most(self, net: Net, clients: list[Client]) -> int:
        """Clients a job: enough jobs to keep all workers busy to the end, but none that is not worth its message."""
        if self.experiment.run.chunk != "auto":
            return self.experiment.run.chunk
        cohort, workers = self.clients.cohort, self.executor.workers
        cost = self._samples(clients) * net.macs / len(clients)
        worthwhile = min(JOB_MACS / (cost or 1.0), cohort / workers)
        return max(1, cohort // (JOBS * workers), math.ceil(worthwhile))

    def _samples(self, clients: list[Client]) -> int:
        """That they process in a round."""
        training, sizes = self.method.task.training, self.data.train.sizes
        return sum(training.samples_of(int(sizes[client.id])) for client in clients)

    def _job(self, chunk: Chunk, net: Net) -> Job:
        clients = chunk.clients

        def make() -> Train:
            client_states = {client.id: self.client_states.get(client.id) for client in clients}
            return Train(
                clients, {id: client_state for id, client_state in client_states.items() if client_state is not None}
            )

        sizes = [int(self.data.train.sizes[client.id]) for client in clients]
        about = f"clients {[client.id for client in clients]} with {sizes} samples, round {self.round + 1}"
        return Job(chunk.key, self._samples(clients) * net.macs, make, about, chunk.branch)

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
        if not self._is_noted and kind != DEFAULT_STATISTICS and all(d.has_statistics for d in deployed.values()):
            self._is_noted = True
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
            return self.method.deploy(self.state, self.round, float(capacities[id]), self.client_states.get(id))

        return Clients(ids, capacities, self.client_states.owners, deploy)

    def deployment(self, capacity: float, client: int | None = None) -> Deployment:
        """What a device of this capacity runs now, or the client's own, with its norms' statistics."""
        evaluator = self.evaluator
        if client is not None and client in self.client_states.owners:
            deployed = self.method.deploy(self.state, self.round, capacity, self.client_states.get(client))
            found = evaluator.collect({deployed.key: deployed}, self.round, client)
        else:
            deployed = self.method.deploy(self.state, self.round, capacity)
            found = evaluator.collect({deployed.key: deployed}, self.round)
        return replace(deployed, statistics=found.get(deployed.key, deployed.statistics))

    # checkpoints

    def save(self, folder: Path) -> None:
        """Writes a checkpoint of this moment below `folder`."""
        config = self.experiment.result_config()
        checkpoints.write(folder, self.round, config, self.state, self.client_states, partial_round=self.partial_round)

    def restore(self, folder: Path) -> tuple[int, list[str]]:
        """Goes to the newest good checkpoint below `folder`: its round (0 if there is none), what to say."""
        said: list[str] = []
        found = checkpoints.latest(folder, self.experiment.result_config(), said.append)
        if found is not None:
            self.round, self.state, self.partial_round = found.round, found.state, dict(found.partial_round)
            self.client_states.restore(found.client_states)
        return self.round, said
