"""The round: sample, select, map, fold, step, refine, evaluate.

Knows no method by name, and not Ray. A round depends only on `(state, client_states, round, partial_round)`, which a
checkpoint contains, and every random draw has an address. A run therefore gives the same bits with any executor, after
any restart, and after any fault that the executor survives.
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

from rayfl.core.fold import Fold, PairwiseSum, State, add_updates, aligned
from rayfl.core.net import Net
from rayfl.core.server_optimizers import MOMENTS
from rayfl.core.submodel import Selection
from rayfl.core.tensors import as_tensor
from rayfl.data.base import Arrays
from rayfl.data.federation import Federation
from rayfl.engine import checkpoints
from rayfl.engine.checked import Checked, RunFailed, check_finite
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
"""Jobs per worker and round, if there are enough clients: workers then finish at about the same time."""
JOB_MACS = 5e7
"""Smallest job worth a message, in multiply-adds of forward passes: about 20 ms of training on one core."""
BRANCH = 8
"""Jobs that a node sums before the sum crosses the network."""
DEFAULT_STATISTICS = Evaluation.model_fields["statistics"].default

MakeExecutor = Callable[[Recipe], Executor]

Cohort = dict[Hashable, tuple[Selection, list[Client]]]
"""Selection key -> the selection and its clients, ids ascending."""


@dataclass(frozen=True)
class Chunk:
    """Clients of one selection that form one job."""

    key: Hashable
    """Key of the selection."""
    clients: list[Client]
    branch: Hashable
    """Branch of the job."""


class RefusedUpdate(RunFailed):
    """Raised for an update that is not finite or too large, if the policy is to stop."""


class Simulation:
    """One federated run. `run_round()` until `done`."""

    def __init__(self, experiment: Experiment, arrays: Arrays, folder: Path, make_executor: MakeExecutor | None = None):
        """`folder`: for client states. `make_executor` default: `Serial`, in this process."""
        self.experiment, self.method = experiment, experiment.bound()
        self.verbs = Checked(self.method)
        self.clients, self.seed, self.rounds = experiment.clients, experiment.seed, experiment.rounds
        self.data: Federation = experiment.federate(arrays)
        self.recipe = Recipe(
            self.method, self.data, self.seed, experiment.updates, experiment.scores, experiment.evaluation.statistics
        )
        self.executor = make_executor(self.recipe) if make_executor else self._serial(arrays)
        self._train, self._test_samples = arrays.train, arrays.test_samples
        self.client_states = ClientStates(folder / "client_states")
        self.state = self.verbs.init()
        self.round = 0
        self.partial_round: Line = {}
        """Sums measured so far in a round whose local updates are done; empty between rounds."""
        self._is_noted = False
        self.client_scores = np.empty(0, CLIENT_SCORES)
        """Scores per client of the last evaluation."""

    def _serial(self, arrays: Arrays) -> Executor:
        return Serial(Worker(self.recipe, arrays), self.experiment.run.threads)

    @property
    def done(self) -> bool:
        return self.round >= self.rounds

    def run_round(self) -> Line:
        """Run one round, evaluate if due, and return the round's metrics."""
        while (line := self.advance()) is None:
            pass
        return line

    def advance(self) -> Line | None:
        """Run the next part of a round: its local updates or server tasks. After the last part, evaluate if due and
        return the round's metrics."""
        started = time.perf_counter()
        spent = self.partial_round.get("seconds", 0.0)
        line = self._refine() if self.partial_round else self.train()
        over = not self.verbs.plan(self.state, self.round)
        if over:
            self.round += 1
            if self.round % self.experiment.evaluation.every == 0 or self.done:
                line |= self.evaluate()
        head = {"round": self.round, "seconds": spent + time.perf_counter() - started}
        line = head | line | head
        self.partial_round = {} if over else line
        return line if over else None

    def step(self, seconds: float = STEP_SECONDS) -> list[Line] | None:
        """Run until the next evaluation or for about `seconds`. Return the metrics of finished rounds, possibly none;
        None if the run is done."""
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
        """Run one round of local updates and fold them into the next state."""
        cohort = self.cohort()
        chunks = self._chunks(cohort)

        def shared(key: Hashable) -> Broadcast:
            selection = cohort[key][0]
            return Broadcast(self.verbs.extract(self.state, selection), selection)

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
                self.verbs.fold(fold, cohort[key][0], update)
        moments = {group: t for group, t in self.state.items() if group.startswith(MOMENTS)}
        own = {group: t for group, t in self.state.items() if group not in moments}
        self._take_over(self.verbs.step(own, self.round, fold) | moments | fold.moments)
        line = finished(totals) | {"refused": len(refused)}
        if refused:
            line["refusals"] = "; ".join(f"client {id}: {reason}" for id, reason in refused)
        return line

    def _refine(self) -> Line:
        """Run the next server tasks, and return the round's metrics so far."""
        server_tasks = {server_task.name: server_task for server_task in self.verbs.plan(self.state, self.round)}
        jobs = [self._server_task(server_task) for server_task in server_tasks.values()]
        results: dict[str, ServerTaskResult] = dict(
            zip(server_tasks, self.executor.map("refine", jobs, server_tasks.__getitem__), strict=True)  # pyright: ignore
        )
        line = self.partial_round
        for name, found in results.items():
            if not math.isfinite(norm(found.groups.values())):
                raise RunFailed(
                    f"round {self.round + 1}: the result of the server task {name!r} is not finite. Hint: lower its "
                    "learning rate, in the section method"
                )
            line = plus(line, found.metrics)
        self._take_over(self.verbs.absorb(self.state, self.round, results))
        return line

    def _take_over(self, state: State) -> None:
        server = "" if self.experiment.server.optimizer == "mean" else " or server.lr"
        check_finite(state, self.state, self.round, f"lower training.lr{server}")
        self.state = state

    def _server_task(self, server_task: ServerTask) -> Job:
        def make() -> Refine:
            return Refine(
                self.round, None if server_task.client is None else self.client_states.get(server_task.client)
            )

        about = f"server task {server_task.name!r}, round {self.round + 1}"
        return Job(server_task.name, server_task.samples * server_task.net.macs, make, about)

    def _heed(self, answer: Trained) -> None:
        """Store client states; raise RefusedUpdate for a refusal if the policy is to stop."""
        if answer.refused and self.experiment.updates.policy == "stop":
            client, reason = answer.refused[0]
            raise RefusedUpdate(
                f"round {self.round + 1}: the update of client {client} is {reason}. Hint: lower training.lr, or set "
                "updates.policy: refuse to continue without it"
            )
        for client, client_state in answer.client_states.items():
            self.client_states.put(client, self.round, client_state)

    def cohort(self) -> Cohort:
        """Return the clients of the next round, grouped by selection."""
        cohort: Cohort = {}
        for id in self.clients.sample(self.seed, self.round):
            capacity = self.clients.capacity(id, self.seed, self.round)
            client = Client(id, capacity, self.round, partial(self._present, id))
            selection = self.verbs.select(self.state, client)
            cohort.setdefault(selection.key, (selection, []))[1].append(client)
        return cohort

    def _present(self, id: int) -> torch.Tensor:
        """Return a client's label set."""
        rows = self.data.train[id]
        return self.data.goal.present({name: as_tensor(array[rows]) for name, array in self._train.items()})

    def _chunks(self, cohort: Cohort) -> list[Chunk]:
        """Return the clients of every job: aligned parts of a selection's pairwise sum, so that its bits do not depend
        on their sizes. Large networks come first, in the order of submission, so that no answer waits."""
        chunks = []
        for key, (selection, clients) in sorted(cohort.items(), key=lambda item: -item[1][0].net.macs):
            parts = list(aligned(len(clients), self._most(selection.net, clients)))
            branch = BRANCH * (parts[0].stop - parts[0].start)
            chunks += [Chunk(key, clients[part], (key, part.start // branch)) for part in parts]
        return chunks

    def _most(self, net: Net, clients: list[Client]) -> int:
        """Return the clients per job: enough jobs to keep all workers busy, but none smaller than `JOB_MACS`."""
        if self.experiment.run.chunk != "auto":
            return self.experiment.run.chunk
        cohort, workers = self.clients.cohort, self.executor.workers
        cost = self._samples(clients) * net.macs / len(clients)
        worthwhile = min(JOB_MACS / (cost or 1.0), cohort / workers)
        return max(1, cohort // (JOBS * workers), math.ceil(worthwhile))

    def _samples(self, clients: list[Client]) -> int:
        """Return the number of samples that clients process in a round."""
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
        """Return the metrics of every capacity and client after `round` rounds."""
        deployed = {c: self.verbs.deploy(self.state, self.round, c) for c in self.clients.all_capacities}
        line, self.client_scores = self.evaluator.evaluate(deployed, self._clients(), self.round, self._test_samples)
        kind = self.experiment.evaluation.statistics
        if not self._is_noted and kind != DEFAULT_STATISTICS and all(d.has_statistics for d in deployed.values()):
            self._is_noted = True
            line[NOTE] = (
                f"evaluation.statistics: {kind!r} has no effect, because no norm of method {self.method.name} on model "
                f"{self.experiment.model.name} needs statistics"
            )
        return line

    def _clients(self) -> Clients:
        ids = self.experiment.evaluation.judged(self.clients.count, self.seed)
        capacities = np.full(self.clients.count, np.nan)
        capacities[ids] = self.clients.capacities_of(ids, self.seed, max(self.round - 1, 0))

        def deploy(id: int) -> Deployment:
            return self.verbs.deploy(self.state, self.round, float(capacities[id]), self.client_states.get(id))

        return Clients(ids, capacities, self.client_states.owners, deploy)

    def deployment(self, capacity: float, client: int | None = None) -> Deployment:
        """Return the network deployed at this capacity, or the client's personal network, with statistics."""
        evaluator = self.evaluator
        if client is not None and client in self.client_states.owners:
            deployed = self.verbs.deploy(self.state, self.round, capacity, self.client_states.get(client))
            found = evaluator.collect({deployed.key: deployed}, self.round, client)
        else:
            deployed = self.verbs.deploy(self.state, self.round, capacity)
            found = evaluator.collect({deployed.key: deployed}, self.round)
        return replace(deployed, statistics=found.get(deployed.key, deployed.statistics))

    # checkpoints

    def save(self, folder: Path) -> None:
        """Write a checkpoint of the current state into `folder`."""
        config = self.experiment.result_config()
        checkpoints.write(folder, self.round, config, self.state, self.client_states, partial_round=self.partial_round)

    def restore(self, folder: Path) -> tuple[int, list[str]]:
        """Continue from the newest valid checkpoint in `folder`. Return its round (0 if there is none) and notes."""
        notes: list[str] = []
        found = checkpoints.latest(folder, self.experiment.result_config(), notes.append)
        if found is not None:
            self.round, self.state, self.partial_round = found.round, found.state, dict(found.partial_round)
            self.client_states.restore(found.client_states)
        return self.round, notes
