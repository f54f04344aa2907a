"""The round: sample, select, map, fold, step, refine, evaluate.

Knows no method by name, and not Ray. A round depends only on `(state, client_states, round, partial_round)`, which a
checkpoint contains, and every random draw has an address. A run therefore gives the same bits with any executor, after
any restart, and after any fault that the executor survives.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayfl.core import frozen
from rayfl.core.fold import Fold, PairwiseSum, State, sum_of_updates
from rayfl.core.server_optimizers import MOMENTS
from rayfl.core.tensors import as_tensor, norm
from rayfl.data.base import Arrays
from rayfl.data.federation import Federation
from rayfl.data.notes import notes_on
from rayfl.data.scores import scores_of
from rayfl.engine import checkpoints, traffic
from rayfl.engine.checked import Checked, Diverged, check_finite
from rayfl.engine.client_states import ClientStates
from rayfl.engine.cohort import Chunk, Cohort, Division
from rayfl.engine.evaluator import ByClient, Clients, Evaluator
from rayfl.engine.jobs import Broadcast, Executor, Job, Refine, Train, Trained
from rayfl.engine.locks import Temporary
from rayfl.engine.private import check_groups, public_cover
from rayfl.engine.serial import Serial
from rayfl.engine.worker import Recipe, Worker
from rayfl.evaluation import Evaluation, check_scores
from rayfl.experiment import Experiment
from rayfl.methods.base import Client, Deployment, ServerTask, ServerTaskResult
from rayfl.metrics import CLIENT_SCORES, EVALUATED, NOTE, Line, client_table, finished, plus
from rayfl.system import Fleet, Past, Plan, Schedule, Stale, Staleness, Timed, Untimed
from rayfl.training.privacy import PrivateFold, Released
from rayfl.training.secure import Protection

STEP_SECONDS = 1.0
VERSION = "version "
"""Prefix of the groups of older versions of the model in a checkpoint: "version 12 params"."""
DEFAULT_STATISTICS = Evaluation.model_fields["statistics"].default

MakeExecutor = Callable[[Recipe], Executor]


class RefusedUpdate(Diverged):
    """Raised for an update that is not finite or too large, if the policy is to stop."""


class Simulation:
    """One federated run. `run_round()` until `done`."""

    place = ""
    """Its resources, for the user (`driver.Running`)."""

    def __init__(
        self,
        experiment: Experiment,
        arrays: Arrays,
        folder: Path,
        make_executor: MakeExecutor | None = None,
        device: torch.device | str = "cpu",
    ):
        """`folder`: for client states. `make_executor` default: `Serial`, in this process, on `device`."""
        self.experiment, self.method = experiment, experiment.bound()
        self.verbs = Checked(self.method)
        self.clients, self.seed, self.rounds = experiment.clients, experiment.seed, experiment.rounds
        self.data: Federation = experiment.federate(arrays)
        self.recipe = Recipe(
            self.method, self.data, self.seed, experiment.updates, experiment.scores, experiment.evaluation.statistics
        )
        self.executor = make_executor(self.recipe) if make_executor else self._serial(arrays, device)
        self._arrays = arrays
        self.client_states = ClientStates(folder / "client_states")
        self.state = self.verbs.init()
        self.round = 0
        self.past = Past()
        """The schedule's past: simulated time, and clients that are training."""
        self.versions: dict[int, State] = {}
        """Round -> state of the server that clients which are training were sent."""
        self.partial_round: Line = {}
        """Sums measured so far in a round whose local updates are done; empty between rounds."""
        self._is_noted = False
        self._is_optimizer_unused = False
        """True if the server optimizer made no step in the last round."""
        self._by_client: ByClient | None = None
        """Scores of clients of the last evaluation."""

    def _serial(self, arrays: Arrays, device: torch.device | str) -> Executor:
        frozen.all_of(self.method.task.nets.values())
        return Serial(Worker(self.recipe, arrays, device), self.experiment.run.threads)

    @cached_property
    def schedule(self) -> Schedule:
        """The rounds' plans. With a `system:` section, the first use counts the work of a visit (`engine.traffic`)."""
        system, training, sizes = self.experiment.system, self.method.task.training, self.data.train.sizes
        if system is None:
            return Untimed(self.clients, self.seed)

        def samples(id: int) -> tuple[int, int]:
            size = int(sizes[id])
            return training.samples_of(size), training.batches_of(size)

        work = traffic.work(self.experiment, self._arrays, Simulation)
        return Timed(Fleet(system, self.clients, self.seed, work, samples, lambda id: int(sizes[id])))

    @property
    def method_state(self) -> State:
        """The groups of the state that the method sees: all but those of the server optimizer."""
        return {group: t for group, t in self.state.items() if not group.startswith(MOMENTS)}

    @property
    def _moments(self) -> State:
        return {group: t for group, t in self.state.items() if group.startswith(MOMENTS)}

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
        _ = self.schedule  # not part of a round's seconds
        started = time.perf_counter()
        spent = self.partial_round.get("seconds", 0.0)
        line = self._refine() if self.partial_round else self.train()
        over = not self.verbs.plan(self.method_state, self.round)
        if over:
            self.round += 1
            if self.round % self.experiment.evaluation.every == 0 or self.done:
                line |= self.evaluate()
                if (privacy := self.experiment.privacy) is not None:
                    line[privacy.metric] = privacy.epsilon(self.clients, self.round)
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
            try:
                line = self.advance()
            except Diverged as error:
                error.lines = lines
                raise
            if line is not None:
                lines.append(line)
            if EVALUATED in (line or {}) or time.monotonic() >= until:
                break
        return lines

    # training

    def train(self) -> Line:
        """Run one round of local updates and fold them into the next state."""
        plan = self.schedule.plan(self.past, self.round)
        cohort = self._grouped(plan)
        run = self.experiment.run
        division = Division(
            self.method.task.training, self.data.train.sizes, self.executor.workers, run.chunk, self.experiment.together
        )
        chunks = division.chunks(cohort)
        privacy = self.experiment.privacy
        clip = None if privacy is None else privacy.norm(self.state)
        secure = self.experiment.updates.secure_aggregation

        def shared(key: Any) -> Broadcast:
            selection, clients = cohort[key]
            protection = Protection(clip, secure, len(clients))
            return Broadcast(self.verbs.extract(self._version(key[0]), selection), selection, protection)

        jobs = [self._job(chunk) for chunk in chunks]
        answers = self.executor.map("train", jobs, shared)
        fold, totals, losses, refused = self._fold(clip), {}, {}, []
        stale: list[Stale] = []
        groups: list[float] = []
        for key, some in itertools.groupby(chunks, key=lambda chunk: chunk.key):
            updates, metrics = sum_of_updates(), PairwiseSum(plus)
            for chunk in some:
                answer: Trained = next(answers)
                self._heed(answer)
                metrics.add(answer.metrics, len(chunk.clients))
                losses |= answer.losses
                refused += answer.refused
                if answer.size:
                    updates.add(answer.update, answer.size)
                del answer  # frees its update before the next one arrives
            totals = plus(totals, metrics.total)
            groups.append(metrics.total.get("clients", 0))
            if (update := updates.total) is None:
                continue
            (version, _), selection = key, cohort[key][0]
            if version == self.round:
                self.verbs.fold(fold, selection, update)
                continue
            stale.append(Stale(update, selection, self._version(version), self.round - version))
            if not plan.staleness.compares:
                self._fold_stale(fold, stale, plan.staleness)
        self._fold_stale(fold, stale, plan.staleness)
        moments, own = self._moments, self.method_state
        known = self.versions | {self.round: own}
        self.past = self.schedule.learned(plan, self.round, losses)
        self.versions = {version: known[version] for version in self.schedule.needed(self.past, self.round + 1)}
        line = finished(totals) | {"refused": len(refused), **plan.metrics}
        if privacy is not None and clip is not None:
            within = totals.get("within_norm", 0.0)
            came = totals.get("clients", 0.0)
            moments |= privacy.adapted(clip, within, came, self.clients, self.seed, self.round)
            line["clip_norm"] = clip
        if secure is not None and any(groups):
            line["smallest_group"] = min(filter(None, groups))
        # an empty cohort is not public: its round has noise too
        if plan.visits or privacy is not None:
            self._take_over(self.verbs.step(own, self.round, fold) | moments | fold.moments)
            self._is_optimizer_unused = fold.server.optimizer != "mean" and fold.weight > 0 and not fold.optimized
        if isinstance(fold, PrivateFold):
            line |= fold.released.snr()
        if refused:
            line["refusals"] = "; ".join(f"client {id}: {reason}" for id, reason in refused)
        return line

    def _fold(self, clip: float | None) -> Fold:
        """Return the empty fold of a round. `clip`: norm of clipped changes, with a `privacy:` section."""
        experiment = self.experiment
        if experiment.privacy is None or clip is None:
            return Fold(self.state, experiment.server)
        deviation = experiment.privacy.multiplier(self.clients) * clip
        cover = public_cover(self.verbs, self.clients, self.method_state, self.round, self.schedule.capacities)
        released = Released(cover, deviation, self.seed, self.round, self.clients.cohort)
        return PrivateFold(self.state, experiment.server, released)

    def _fold_stale(self, fold: Fold, stale: list[Stale], staleness: Staleness) -> None:
        """Fold stale updates, and empty the list."""
        for one, s in zip(stale, staleness.weights(stale, fold), strict=True):
            self.verbs.fold(fold, one.selection, staleness.moved(one, self.state, s))
        stale.clear()

    def _refine(self) -> Line:
        """Run the next server tasks, and return the round's metrics so far."""
        server_tasks = {server_task.name: server_task for server_task in self.verbs.plan(self.method_state, self.round)}
        jobs = [self._server_task(server_task) for server_task in server_tasks.values()]
        results: dict[str, ServerTaskResult] = dict(
            zip(server_tasks, self.executor.map("refine", jobs, server_tasks.__getitem__), strict=True)  # pyright: ignore
        )
        line = self.partial_round
        for name, found in results.items():
            if not math.isfinite(norm(found.groups.values())):
                raise Diverged(
                    f"round {self.round + 1}: the result of the server task {name!r} is not finite. Hint: lower its "
                    "learning rate, in the section method"
                )
            line = plus(line, found.metrics)
        self._take_over(self.verbs.absorb(self.method_state, self.round, results) | self._moments)
        return line

    def _take_over(self, state: State) -> None:
        server = "" if self.experiment.server.optimizer == "mean" else " or server.lr"
        check_finite(state, self.state, self.round, f"lower training.lr{server}")
        self.state = state

    def _server_task(self, server_task: ServerTask) -> Job:
        def make() -> Refine:
            return Refine(self.round, self.client_states.some(server_task.clients))

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
        """Return the clients of the next round, grouped by version and selection."""
        return self._grouped(self.schedule.plan(self.past, self.round))

    def _grouped(self, plan: Plan) -> Cohort:
        cohort: Cohort = {}
        for version, visits in itertools.groupby(plan.visits, key=itemgetter(0)):
            ids = [id for _, id in visits]
            is_alone = version < self.round and plan.staleness.compares
            for id, capacity in zip(ids, self.schedule.capacities(np.array(ids), version).tolist(), strict=True):
                client = Client(id, capacity, version, partial(self.label_set, id))
                selection = self.verbs.select(self._version(version), client)
                key = (selection.key, id) if is_alone else selection.key
                cohort.setdefault((version, key), (selection, []))[1].append(client)
        return cohort

    def _version(self, round: int) -> State:
        """Return the method's state before a round."""
        return self.method_state if round == self.round else self.versions[round]

    def label_set(self, id: int) -> torch.Tensor:
        """Return a client's label set."""
        rows = self.data.train[id]
        return self.data.goal.present({name: as_tensor(array[rows]) for name, array in self._arrays.train.items()})

    def _job(self, chunk: Chunk) -> Job:
        clients = chunk.clients

        def make() -> Train:
            return Train(clients, self.client_states.some(client.id for client in clients), chunk.together)

        sizes = [int(self.data.train.sizes[client.id]) for client in clients]
        ids = [client.id for client in clients]
        about = f"clients {ids} with {sizes} samples, round {self.round + 1}, local_update of method {self.method.name}"
        return Job(chunk.key, chunk.cost, make, about, chunk.branch)

    # evaluation

    @cached_property
    def evaluator(self) -> Evaluator:
        method, evaluation = self.method, self.experiment.evaluation
        return Evaluator(method, self.data, evaluation, self.recipe.scores, self.seed, self.executor)

    def evaluate(self) -> Line:
        """Return the metrics of every capacity and client after `round` rounds."""
        state = self.method_state
        deployed = {c: self.verbs.deploy(state, self.round, c) for c in self.clients.all_capacities}
        line, self._by_client = self.evaluator.evaluate(
            deployed, self._clients(), self.round, self._arrays.test_samples
        )
        if not self._is_noted and (notes := self._notes(deployed)):
            self._is_noted = True
            line[NOTE] = "; ".join(notes)
        return line

    @property
    def client_scores(self) -> np.ndarray:
        """Rows of `CLIENT_SCORES` of the last evaluation."""
        return np.empty(0, CLIENT_SCORES) if self._by_client is None else self._by_client.rows

    @property
    def client_table(self) -> np.ndarray:
        """Rows of `client_table` of the last evaluation."""
        labels = [score.label for score in scores_of("clients", self.recipe.scores)]
        return np.empty(0, client_table(labels)) if self._by_client is None else self._by_client.table

    def _notes(self, deployed: Mapping[float, Deployment]) -> list[str]:
        """Return notes on settings without effect."""
        notes, name, kind = [], self.method.name, self.experiment.evaluation.statistics
        if kind != DEFAULT_STATISTICS and all(d.has_statistics for d in deployed.values()):
            notes.append(
                f"evaluation.statistics: {kind!r} has no effect, because no norm of method {name} on model "
                f"{self.experiment.model.name} needs statistics"
            )
        if self._is_optimizer_unused:
            optimizer = self.experiment.server.optimizer
            notes.append(
                f"server.optimizer: {optimizer!r} has no effect, because the server of method {name} takes no mean of "
                "parameters"
            )
        return notes

    def _clients(self) -> Clients:
        ids = self.experiment.evaluation.judged(self.clients.count, self.seed)
        capacities = np.full(self.clients.count, np.nan)
        capacities[ids] = self.schedule.capacities(ids, max(self.round - 1, 0))

        state = self.method_state

        def deploy(id: int) -> Deployment:
            return self.verbs.deploy(state, self.round, float(capacities[id]), self.client_states.get(id))

        return Clients(ids, capacities, self.client_states.owners, deploy)

    def deployment(self, capacity: float, client: int | None = None) -> Deployment:
        """Return the network deployed at this capacity, or the client's personal network, with statistics."""
        owner = client if client in self.client_states.owners else None
        client_state = None if owner is None else self.client_states.get(owner)
        deployed = self.verbs.deploy(self.method_state, self.round, capacity, client_state)
        found = self.evaluator.collect({deployed.key: deployed}, self.round, owner)
        return replace(deployed, statistics=found.get(deployed.key, deployed.statistics))

    # checkpoints

    def save(self, folder: Path) -> None:
        """Write a checkpoint of the current state into `folder`."""
        config = self.experiment.result_config()
        schedule = self.past.plain() if self.experiment.system else {}
        checkpoints.write(
            folder,
            self.round,
            config,
            self.state | _changed(self.state, self.versions),
            self.client_states,
            partial_round=self.partial_round,
            schedule=schedule,
        )

    def restore(self, folder: Path) -> tuple[int, list[str]]:
        """Continue from the newest valid checkpoint in `folder`. Return its round (0 if there is none) and notes."""
        notes: list[str] = []
        found = checkpoints.latest(folder, self.experiment.result_config(), notes.append)
        if found is not None:
            self.round, self.partial_round = found.round, dict(found.partial_round)
            self.past = found.past
            self.state, known = _by_version(found.state, self.past.versions)
            self.versions = {version: known[version] for version in self.schedule.needed(self.past, self.round)}
            self.client_states.restore(found.client_states)
        return self.round, notes


def _changed(state: State, versions: Mapping[int, State]) -> State:
    """Return the groups of older versions, for a checkpoint: those tensors that differ from the next newer version."""
    groups, newer = {}, state
    for version in sorted(versions, reverse=True):
        for group, tensors in versions[version].items():
            changed = {name: t for name, t in tensors.items() if t is not newer.get(group, {}).get(name)}
            groups[f"{VERSION}{version} {group}"] = changed
        newer = versions[version]
    return groups


def _by_version(groups: State, numbers: Iterable[int]) -> tuple[State, dict[int, State]]:
    """Return the server's state and its older versions from the groups of a checkpoint."""
    state = {name: group for name, group in groups.items() if not name.startswith(VERSION)}
    versions, newer = {}, {name: group for name, group in state.items() if not name.startswith(MOMENTS)}
    for version in sorted(numbers, reverse=True):
        changed = {name: groups.get(f"{VERSION}{version} {name}", {}) for name in newer}
        newer = versions[version] = {name: tensors | changed[name] for name, tensors in newer.items()}
    return state, versions


def load_data(experiment: Experiment, arrays: Arrays | None = None) -> Arrays:
    """Load the arrays, unless they are given, and make every check that needs them, before anything else is started.
    Their `notes` are complete."""
    arrays = experiment.data.arrays() if arrays is None else arrays
    federation = experiment.federate(arrays)
    check_with(experiment, arrays)
    return replace(arrays, notes=notes_on(experiment.data, arrays, federation))


def check_with(experiment: Experiment, arrays: Arrays) -> None:
    """Make the checks of the model's files, of scores, of the privacy of the method's groups, and of simulated time."""
    experiment.model.prepare()
    check_scores(experiment.scores, experiment.data, arrays)
    if experiment.privacy is not None:
        check_groups(experiment)
    if experiment.system is not None and experiment.system.can_fail:
        with Temporary() as folder:
            Simulation(experiment, arrays, folder).schedule.check()
