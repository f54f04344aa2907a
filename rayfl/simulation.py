"""The round: sample, select, map, aggregate, evaluate, checkpoint.

Knows no method by name and nothing of Ray. All that a round needs is in `(state, carries, round)`, which is what
a checkpoint holds; every random draw has an address. So a run is equal, to the bit, for any executor, after any
restart and after any fault that the executor survives.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from rayfl import checkpoints, costs
from rayfl.axes import Net
from rayfl.checkpoints import Carries
from rayfl.config import Config
from rayfl.data.federation import Federation
from rayfl.executors.base import Executor, Job, Message
from rayfl.methods.base import Client, Deployment, Method, Update, add_metrics
from rayfl.models.base import Model, has_static_norms
from rayfl.norms import finish
from rayfl.population import Population, label
from rayfl.seeds import numpy_generator
from rayfl.submodel import Selection
from rayfl.tensors import Params
from rayfl.training import Fill


class Evaluation(Config):
    """The `evaluation:` section: every capacity on the global test set, every client on its own split."""

    every: int = Field(default=10, ge=1)
    """Rounds between evaluations; the last round is always evaluated."""
    batch_size: int = Field(default=500, ge=1)
    """Samples a forward pass. Part of the result where norms use statistics of a batch."""
    holdout: float = Field(default=0.1, ge=0, lt=1)
    """Share of the training set that the server holds out, stratified, as the validation set: what methods
    are tuned by, so that the test set only judges. 0: none."""
    clients: bool = True
    """Evaluate every client on its own test split."""
    local: Literal["deployed", "server"] = "deployed"
    """What runs on a client's own test split: what the method deploys there, or the server's network
    (HeteroFL's Local, with `label_mask: zero`)."""
    label_mask: Fill = "none"
    """Logits of classes that a client does not have, on its own test split: alone, 0 (as HeteroFL's Local), -inf."""
    statistics: Literal["exact", "cumulative", "pooled", "batch"] = "exact"
    """How static norms get their statistics before an evaluation (rayfl/norms.py)."""
    statistics_clients: int | None = Field(default=None, ge=1)
    """Clients whose data the statistics are taken from, drawn anew each time; all unless given."""


class Updates(Config):
    """The `updates:` section: which client updates are not averaged in."""

    policy: Literal["refuse", "stop"] = "refuse"
    """refuse: left out, counted and logged. stop: the run ends with the client's id."""
    growth: float = Field(default=1000.0, gt=0)
    """An update explodes if its norm, or that of what the client keeps, is over growth * (1 + norm of what the
    client was sent, or kept before)."""


STEP_SECONDS = 1.0


class RefusedUpdate(RuntimeError):
    """A client's update was not finite or exploded, and the policy is to stop."""


class Simulation:
    """One federated run. `run_round()` until `done`."""

    def __init__(
        self,
        method: Method,
        population: Population,
        data: Federation,
        executor: Executor,
        *,
        seed: int,
        rounds: int,
        evaluation: Evaluation,
        updates: Updates,
        chunk: int,
        folder: Path,
        config: dict[str, Any],
        today: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ):
        """`folder` is for what clients keep; `config` is what the result depends on: a checkpoint is of it. `today`
        gives one that an earlier version saved the defaults of newer options."""
        self.method, self.population, self.data, self.executor = method, population, data, executor
        self.seed, self.rounds = seed, rounds
        self.evaluation, self.updates = evaluation, updates
        self.chunk = chunk
        self.config, self.today = config, today
        self.carries = Carries(folder / "carries")
        self.state = method.init(seed)
        self.round = 0
        self._client_accuracy: dict[int, float] = {}

    @property
    def done(self) -> bool:
        return self.round >= self.rounds

    def run_round(self) -> dict[str, Any]:
        """Trains one round, evaluates if it is due, and returns the round's line of metrics."""
        started = time.perf_counter()
        metrics = self._train()
        self.round += 1
        if self.round % self.evaluation.every == 0 or self.done:
            metrics |= self.evaluate()
        return {"round": self.round, "seconds": time.perf_counter() - started} | metrics

    def step(self) -> list[dict[str, Any]]:
        """Rounds up to the next evaluation, or for about a second: their lines; none when it is done."""
        lines: list[dict[str, Any]] = []
        until = time.monotonic() + STEP_SECONDS
        while not self.done and (not lines or "accuracy_mean" not in lines[-1] and time.monotonic() < until):
            lines.append(self.run_round())
        return lines

    # training

    def _train(self) -> dict[str, Any]:
        cohort = self._cohort()
        chunks = [
            (key, clients[i : i + self.chunk])
            for key, (_, clients) in cohort.items()
            for i in range(0, len(clients), self.chunk)
        ]
        jobs = [self._training_job(key, cohort[key][0], clients) for key, clients in chunks]

        def shared(key: Hashable) -> Message:
            selection = cohort[key][0]
            return self.method.extract(self.state, selection), selection

        answers = self.executor.map("train", jobs, shared)
        totals: dict[str, Any] = {}
        refused: list[tuple[int, str]] = []

        def updates() -> Iterator[tuple[Selection, Update]]:
            for (key, _), (tensors, (weight, metrics, unfit)) in zip(chunks, answers, strict=True):
                add_metrics(totals, metrics)
                refused.extend(unfit)
                if unfit and self.updates.policy == "stop":
                    raise RefusedUpdate(
                        f"round {self.round + 1}: the update of client {unfit[0][0]} is {unfit[0][1]}; "
                        "lower training.lr, or set updates.policy: refuse to go on without it"
                    )
                for client, carry in tensors.get("carry", {}).items():
                    self.carries.put(int(client), self.round, carry)
                if weight is not None:
                    # an empty dict does not survive the wire
                    update = Update(tensors.get("sums", {}), weight, tensors.get("held", {}), metrics)
                    yield cohort[key][0], update

        self.state = self.method.aggregate(self.state, self.round, updates())
        samples = totals.pop("train_samples", 0)
        if "train_loss" in totals:
            totals["train_loss"] /= samples or 1
        totals["refused"] = len(refused)
        if refused:
            totals["refusals"] = "; ".join(f"client {id}: {reason}" for id, reason in refused)
        return totals

    def _cohort(self) -> dict[Hashable, tuple[Selection, list[tuple[int, float]]]]:
        """Selection key -> (selection, [(client, capacity)]), ids ascending."""
        cohort: dict[Hashable, tuple[Selection, list[tuple[int, float]]]] = {}
        for id in self.population.sample(self.seed, self.round):
            capacity = self.population.capacity(id, self.seed, self.round)
            selection = self.method.select(self.state, self.round, Client(id, capacity), self.seed)
            cohort.setdefault(selection.key, (selection, []))[1].append((id, capacity))
        return cohort

    def _training_job(self, key: Hashable, selection: Selection, clients: list[tuple[int, float]]) -> Job:
        def message() -> Message:
            carries = {str(id): self.carries.get(id) for id, _ in clients}
            kept = {id: carry for id, carry in carries.items() if carry is not None}
            return kept, (self.round, clients)

        task = self.method.task
        sizes = [int(self.data.train.sizes[id]) for id, _ in clients]
        samples = sum(task.training.samples_of(n) for n in sizes)
        cost = samples * costs.flops(task.model, selection.net, "macs")
        about = f"clients {[id for id, _ in clients]} with {sizes} samples, round {self.round + 1}"
        return Job(key, cost, message, about)

    # evaluation

    def evaluate(self) -> dict[str, Any]:
        """Accuracies after `round` rounds, of every capacity and of every client."""
        deployed = {
            capacity: self.method.deploy(self.state, self.round, capacity)
            for capacity in self.population.all_capacities
        }
        keys = {capacity: d.key for capacity, d in deployed.items()}
        found = {d.key: d for d in deployed.values()}
        nets = {key: (d.model, d.net) for key, d in found.items()}
        pieces = self._statistics_pieces()
        open = {key: net for key, net in nets.items() if found[key].statistics is None}
        statistics = self._collect(open, lambda key: pieces, found.__getitem__)

        def shared(key: Hashable) -> Message:
            return _as_message(found[key], statistics.get(key))

        metrics = self._global("", "test", len(self.data.arrays.y_test), keys, nets, shared)
        if not self.method.is_personal:
            metrics |= _densities(deployed)
        if held := len(self.data.validation):
            metrics |= self._global("validation_", "validation", held, keys, nets, shared)
        if self.evaluation.clients:
            metrics |= self._local(keys, found, shared)
        return metrics

    @property
    def _server_capacity(self) -> float:
        return self.method.task.server_capacity

    @property
    def _piece(self) -> int:
        """Samples that one evaluation job takes."""
        return 4 * self.evaluation.batch_size

    def _statistics_pieces(self) -> list[tuple[int, Any]]:
        """(samples, what `Worker.collect` gets) of every job: groups of clients, or spans of the pool."""
        if self.evaluation.statistics == "pooled":
            batch = self.method.task.training.batch_size
            span = batch * math.ceil(self._piece / batch)
            spans = _spans(len(self.data.train.idx), span)
            return [(s.stop - s.start, (s, None, batch)) for s in spans]
        ids: Any = range(self.population.count)
        if (asked := self.evaluation.statistics_clients) is not None and asked < len(ids):
            draw = numpy_generator(self.seed, "statistics", self.round)
            ids = sorted(draw.choice(len(ids), asked, replace=False).tolist())
        groups = _grouped(ids, self.data.train.sizes, self._piece)
        return [(n, (None, group, self._statistics_batch)) for n, group in groups]

    @property
    def _statistics_batch(self) -> int:
        """Batch means are averaged over training batches (HeteroFL); where only sums count, large ones do."""
        training = self.method.task.training
        return self.evaluation.batch_size if self.evaluation.statistics == "exact" else training.batch_size

    def _collect(
        self,
        nets: dict[Hashable, tuple[Model, Net]],
        pieces: Callable[[Hashable], list[tuple[int, Any]]],
        find: Callable[[Hashable], Deployment],
    ) -> dict[Hashable, Params]:
        """The static norms' statistics of every network that has such norms."""
        kind = self.evaluation.statistics
        normed = [k for k, net in nets.items() if kind != "batch" and has_static_norms(*net)]
        jobs = [
            Job(key, n * costs.flops(*nets[key], "macs"), lambda rest=rest: ({}, rest), "statistics")
            for key in normed
            for n, rest in pieces(key)
        ]
        answers = self.executor.map("collect", jobs, lambda key: _as_message(find(key)))
        sums: dict[Hashable, Params] = {}
        for job, (part, _) in zip(jobs, answers, strict=True):
            total = sums.setdefault(job.key, {})
            for path, t in part.items():
                total[path] = total[path] + t if path in total else t.clone()
        return {key: finish(total, kind) for key, total in sums.items()}

    def _global(
        self,
        prefix: str,
        split: str,
        samples: int,
        keys: dict[float, Hashable],
        nets: dict[Hashable, tuple[Model, Net]],
        shared: Callable[[Hashable], Message],
    ) -> dict[str, float]:
        """Accuracy of every capacity on a split that nobody owns."""
        spans = _spans(samples, self._piece)
        jobs = [
            self._evaluation_job(key, nets[key], split, [span], span.stop - span.start, "none")
            for key in nets
            for span in spans
        ]
        correct, loss = dict.fromkeys(nets, 0), dict.fromkeys(nets, 0.0)
        exits: dict[Hashable, list[int]] = {}
        answers = self.executor.map("evaluate", jobs, shared)
        for job, (_, [result]) in zip(jobs, answers, strict=True):
            correct[job.key] += result.correct
            loss[job.key] += result.loss
            before = exits.get(job.key, [0] * len(result.exits))
            exits[job.key] = [a + b for a, b in zip(before, result.exits, strict=True)]
        accuracy = {capacity: correct[key] / samples for capacity, key in keys.items()}
        metrics = {f"{prefix}accuracy_{label(c)}": value for c, value in accuracy.items()}
        metrics[f"{prefix}accuracy_server"] = accuracy[self._server_capacity]
        for i, right in enumerate(exits[keys[self._server_capacity]], start=1):
            metrics[f"{prefix}accuracy_exit{i}"] = right / samples
        metrics[f"{prefix}accuracy_mean"] = sum(accuracy.values()) / len(accuracy)
        metrics[f"{prefix}accuracy_worst"] = min(accuracy.values())
        metrics[f"{prefix}loss_mean"] = sum(loss[key] for key in keys.values()) / samples / len(keys)
        return metrics

    def _local(
        self,
        keys: dict[float, Hashable],
        found: dict[Hashable, Deployment],
        shared: Callable[[Hashable], Message],
    ) -> dict[str, float]:
        """Every client that has test data, on its own split: its deployed submodel, or the server's network.

        A client that has a deployment of its own runs that, of the network of its capacity, with statistics of
        its own data; it is put together when its job goes out, so that only a few are in memory.
        """
        sizes, deployed = self.data.test.sizes, self.evaluation.local == "deployed"
        able = {
            id: self.population.capacity(id, self.seed, max(self.round - 1, 0))
            for id in range(self.population.count)
            if sizes[id]
        }
        if not able:
            return {}
        owners: dict[Hashable, Client] = {}
        members: dict[Hashable, list[int]] = {}
        for id, capacity in able.items():
            key = keys[capacity if deployed else self._server_capacity]
            if deployed and self._has_own(id):
                key = ("own", id)
                owners[key] = Client(id, capacity)
            members.setdefault(key, []).append(id)

        densities: dict[Hashable, costs.Held] = {}

        def own(key: Hashable) -> Deployment:
            deployed = self._own(owners[key])
            if deployed.masked:
                densities[key] = deployed.held
            return deployed

        def own_pieces(key: Hashable) -> list[tuple[int, Any]]:
            return self._own_pieces(owners[key].id)

        nets = {key: (d.model, d.net) for key, d in found.items()}
        own_nets = {key: nets[keys[client.capacity]] for key, client in owners.items()}
        open = {k: own_nets[k] for k, c in owners.items() if found[keys[c.capacity]].statistics is None}
        statistics = self._collect(open, own_pieces, own)

        def shared_or_own(key: Hashable) -> Message:
            return _as_message(own(key), statistics.get(key)) if key in owners else shared(key)

        groups = [
            (key, samples, group)
            for key, ids in members.items()
            for samples, group in _grouped(ids, sizes, self._piece)
        ]
        fill, all_nets = self.evaluation.label_mask, nets | own_nets
        jobs = [
            self._evaluation_job(key, all_nets[key], "clients", group, samples, fill) for key, samples, group in groups
        ]
        answers = self.executor.map("evaluate", jobs, shared_or_own)
        self._client_accuracy = {}
        for (_, _, group), (_, results) in zip(groups, answers, strict=True):
            for id, result in zip(group, results, strict=True):
                self._client_accuracy[id] = result.correct / result.count
        accuracies = np.array([self._client_accuracy[id] for id in able])
        capacities = np.array(list(able.values()))
        metrics = {
            f"local_accuracy_{label(c)}": float(accuracies[capacities == c].mean())
            for c in keys
            if (capacities == c).any()
        }
        metrics["local_accuracy_mean"] = float(accuracies.mean())
        metrics["local_accuracy_samples"] = float(np.average(accuracies, weights=sizes[list(able)]))
        metrics["local_accuracy_worst"] = float(accuracies.min())
        if densities:
            shared_densities = {key: d.held for key, d in found.items() if d.masked}
            metrics |= _local_densities(members, shared_densities | densities)
        return metrics

    def _has_own(self, id: int) -> bool:
        return self.method.is_personal and id in self.carries.files

    def _own(self, client: Client) -> Deployment:
        carry = self.carries.get(client.id)
        return self.method.deploy(self.state, self.round, client.capacity, replace(client, carry=carry))

    def _own_pieces(self, id: int) -> list[tuple[int, Any]]:
        return [(int(self.data.train.sizes[id]), (None, [id], self._statistics_batch))]

    def deployment(self, capacity: float, client: int | None = None) -> tuple[Deployment, Params]:
        """What a device of this capacity runs now, or a client's own, with its norms' statistics."""
        if client is not None and self._has_own(client):
            deployed, pieces = self._own(Client(client, capacity)), self._own_pieces(client)
        else:
            deployed, pieces = self.method.deploy(self.state, self.round, capacity), self._statistics_pieces()
        if deployed.statistics is not None:
            return deployed, deployed.statistics
        key, net = deployed.key, (deployed.model, deployed.net)
        statistics = self._collect({key: net}, lambda _: pieces, lambda _: deployed)
        return deployed, statistics.get(key, {})

    def client_accuracy(self) -> dict[int, float]:
        """Every client's accuracy on its own test split, at the last evaluation."""
        return self._client_accuracy

    def _evaluation_job(
        self,
        key: Hashable,
        net: tuple[Model, Net],
        split: str,
        items: list,
        samples: int,
        fill: Fill,
    ) -> Job:
        rest = (split, items, self.evaluation.batch_size, fill)
        return Job(key, samples * costs.flops(*net, "macs"), lambda: ({}, rest), f"evaluation on {split}")

    # checkpoints

    def save(self, folder: Path) -> None:
        """Writes a checkpoint of this moment below `folder`."""
        checkpoints.write(folder, self.round, self.config, self.state, self.carries)

    def restore(self, folder: Path) -> tuple[int, list[str]]:
        """Goes to the newest good checkpoint below `folder`: its round (0 if there is none), what to say."""
        said: list[str] = []
        found = checkpoints.latest(folder, self.config, said.append, self.today)
        if found is not None:
            self.round, self.state, carries = found
            self.carries.restore(carries)
        return self.round, said


def _densities(deployed: Mapping[float, Deployment]) -> dict[str, float]:
    """Of masked networks: the shares of the dense one's parameters and multiply-adds that are there."""
    metrics = {}
    for capacity, d in deployed.items():
        if d.masked:
            held = d.held
            metrics[f"density_{label(capacity)}"] = held.parameters / costs.parameters(d.model, d.net)
            metrics[f"macs_share_{label(capacity)}"] = held.macs / costs.flops(d.model, d.net)
    return metrics


def _local_densities(members: Mapping[Hashable, list[int]], held: Mapping[Hashable, costs.Held]) -> dict[str, float]:
    """The mean over clients of the mean density of their masked layers (SpaFL), and of every layer's."""
    clients = [(len(ids), held[key].layers) for key, ids in members.items() if key in held]
    total = sum(n for n, _ in clients)
    means = {path: sum(n * layers[path] for n, layers in clients) / total for path in clients[0][1]}
    return {"local_density": sum(means.values()) / len(means)} | {
        f"local_density_{path}": mean for path, mean in means.items()
    }


def _as_message(d: Deployment, statistics: Params | None = None) -> Message:
    """`statistics` are those that were collected, where the deployment has none of its own."""
    own = d.statistics if d.statistics is not None else statistics
    return {"params": d.params, "statistics": own or {}}, (d.model, d.net, d.answer)


def _spans(total: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, total)) for i in range(0, total, size)]


def _grouped(ids, sizes: np.ndarray, piece: int) -> list[tuple[int, list[int]]]:
    """(samples, ids) of consecutive groups that hold about `piece` samples each."""
    groups: list[tuple[int, list[int]]] = []
    for id in ids:
        if not groups or groups[-1][0] >= piece:
            groups.append((0, []))
        samples, group = groups[-1]
        group.append(int(id))
        groups[-1] = (samples + int(sizes[id]), group)
    return groups
