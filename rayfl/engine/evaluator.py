"""Evaluation: one list of jobs for all networks, splits and clients, and metrics from the returned sums."""

import itertools
import math
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from rayfl.core import norms
from rayfl.core.net import Net
from rayfl.core.seeds import numpy_generator
from rayfl.core.tensors import Params
from rayfl.data.federation import Federation
from rayfl.data.partition import Shards
from rayfl.data.scores import OfOwnSamples, Score, Texts, scores_of
from rayfl.engine.collecting import collections_of, grouped, spans_of
from rayfl.engine.jobs import Collect, Evaluate, Evaluated, Executor, Job
from rayfl.evaluation import Evaluation, add_to, value_of, values_of
from rayfl.methods.base import Deployment, Method
from rayfl.metrics import ANSWERS, CLIENT_SCORES, EVALUATED, MATRICES, Line, client_table, label, named

EXACT_BATCH = 100
"""Default samples per batch of `exact` statistics: few passes, and less memory than training in batches of 10."""
SHARES = 3
"""Messages per worker, at least, with all personal networks of one capacity."""
MESSAGE = 2**22
"""Parameters of the personal networks in one message, at most, unless it is a single one: 16 MB."""


@dataclass
class Sums:
    """Accumulated scores of a network."""

    scores: dict[str, torch.Tensor] = field(default_factory=dict)
    exits: dict[int, torch.Tensor] = field(default_factory=dict)
    texts: dict[str, list[Texts]] = field(default_factory=dict)

    def add(self, found: Evaluated) -> None:
        add_to(self.scores, {name: t.sum(0) for name, t in found.sums.items()})
        add_to(self.exits, {i: t.sum(0) for i, t in enumerate(found.exits)})
        # of the first job
        self.texts = {**found.texts, **self.texts}


class ByClient:
    """Scores of clients on their own data, clients ascending."""

    def __init__(
        self, scores: Sequence[Score], found: Sequence[tuple[Sequence[int], Evaluated]], capacities: np.ndarray
    ):
        """`found`: (clients, their scores) of every job. `capacities`: of all clients."""
        ids = np.concatenate([clients for clients, _ in found])
        order = np.argsort(ids)
        self.ids: np.ndarray = ids[order]
        self.counts: np.ndarray = torch.cat([answer.counts for _, answer in found]).numpy()[order]
        """Samples [n]."""
        self.capacities: np.ndarray = capacities[self.ids]
        """Capacities [n]."""
        sums = {score.label: torch.cat([answer.sums[score.label] for _, answer in found]) for score in scores}
        self.values: dict[str, np.ndarray] = {
            score.label: values_of(score, sums[score.label])[order] for score in scores
        }
        """Score -> [n]."""
        self.counted: dict[str, np.ndarray] = {score.label: score.counted(sums[score.label])[order] for score in scores}
        """Score -> clients that have a value, [n] bool."""

    @property
    def rows(self) -> np.ndarray:
        """Rows of `CLIENT_SCORES`."""
        first = next(iter(self.values))
        rows = np.empty(len(self.ids), CLIENT_SCORES)
        rows["client"], rows["score"] = self.ids, self.values[first]
        return rows[self.counted[first]]

    @property
    def table(self) -> np.ndarray:
        """Rows of `client_table`."""
        table = np.empty(len(self.ids), client_table(self.values))
        table["client"], table["capacity"], table["samples"] = self.ids, self.capacities, self.counts
        for name, values in self.values.items():
            table[name] = np.where(self.counted[name], values, math.nan)
        return table


@dataclass(frozen=True)
class Clients:
    """Clients to evaluate."""

    ids: np.ndarray
    """Evaluated clients [n], ascending."""
    capacities: np.ndarray
    """Current capacities [clients]; NaN for clients that are not evaluated."""
    owners: frozenset[int]
    """Clients with a personal network."""
    deploy: Callable[[int], Deployment]
    """Returns a client's personal network. Called when its job is submitted, so that only a few are in memory."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluation of one run."""

    method: Method
    federation: Federation
    evaluation: Evaluation
    scores: tuple[Score, ...]
    seed: int
    executor: Executor

    def evaluate(
        self, deployed: Mapping[float, Deployment], clients: Clients, round: int, test_samples: int
    ) -> tuple[Line, ByClient | None]:
        """Return the metrics of every capacity's deployment and of every client after `round` rounds, and the scores of
        clients on their own test splits, if there are any."""
        subjects = {d.key: d for d in deployed.values()}
        statistics = self.collect(subjects, round)
        subjects = {key: replace(d, statistics=statistics.get(key, d.statistics)) for key, d in subjects.items()}
        plan = [
            *self._global(subjects, "test", test_samples),
            *self._global(subjects, "validation", len(self.federation.validation)),
            *itertools.chain(*(self._global(subjects, "test", len(own), i) for i, own in self.own_samples.items())),
        ]
        splits = ["clients", *(["client_validation"] if len(self.federation.local_validation.idx) else [])]
        splits = splits if self.evaluation.clients else []
        personal = self._personal(splits, deployed, clients)
        members = {split: self._members(split, deployed, clients, personal) for split in splits}
        for split, some in members.items():
            plan += self._local(split, some, personal)
        plan = _by_subject(plan)

        def shared(key: Hashable) -> Deployment | Mapping[int, Deployment]:
            if key not in personal:
                return subjects[key]
            _, ids = personal[key]
            return {id: clients.deploy(id) for id in ids.tolist()}

        answers = self.executor.map("evaluate", [job for job, _ in plan], shared)
        sums: dict[tuple[str, Hashable], Sums] = {}
        local: dict[str, list[tuple[Sequence[int], Evaluated]]] = {split: [] for split in members}
        own_layers: dict[int, Mapping[str, float]] = {}
        for (job, message), answer in zip(plan, answers, strict=True):
            assert isinstance(answer, Evaluated)
            own_layers |= answer.layers
            if message.split in local:
                local[message.split].append((message.items, answer))
            else:
                sums.setdefault((message.split, job.key), Sums()).add(answer)
        by_client = {
            split: ByClient(scores_of(split, self.scores), found, clients.capacities)
            for split, found in local.items()
            if found
        }
        line: Line = {EVALUATED: True}
        for split in ("test", "validation"):
            line |= self._capacities(split, {c: sums.get((split, d.key)) for c, d in deployed.items()})
        if matrices := self._matrices({c: sums.get(("test", d.key)) for c, d in deployed.items()}):
            line[MATRICES] = matrices
        if texts := self._texts({c: sums.get(("test", d.key)) for c, d in deployed.items()}):
            line[ANSWERS] = texts
        line |= _densities(deployed)
        for split, found in by_client.items():
            line |= self._clients(split, found, deployed)
        if own_layers:
            layers = {key: d.present.layers for key, d in subjects.items() if d.masked}
            found = (_local_densities(some, layers, own_layers) for some in members.values())
            # without local test samples, those of the clients with local validation samples
            line |= next(filter(None, found), {})
        return line, by_client.get("clients")

    # statistics of norms

    def collect(
        self, subjects: Mapping[Hashable, Deployment], round: int, client: int | None = None
    ) -> dict[Hashable, Params]:
        """Return statistics of static norms for subjects that lack them, from the data of all clients or of one."""
        kind = self.evaluation.statistics
        open = [k for k, d in subjects.items() if kind != "batch" and not d.has_statistics]
        work = self._collections(self._asked(round) if client is None else [client]) if open else []
        jobs = [
            Job(key, len(one.rows) * subjects[key].net.macs, lambda one=one: one, "statistics")
            for key in open
            for one in work
        ]
        answers = self.executor.map("collect", jobs, subjects.__getitem__)
        sums: dict[Hashable, Params] = {}
        for job, part in zip(jobs, answers, strict=True):
            add_to(sums.setdefault(job.key, {}), part)
        return {key: norms.finish(total, kind) for key, total in sums.items()}

    def _asked(self, round: int) -> np.ndarray:
        """Return the clients whose data give the statistics after `round` rounds, ascending."""
        count, asked = len(self.federation.train), self.evaluation.statistics_clients
        if asked is None or asked >= count:
            return np.arange(count)
        return np.sort(numpy_generator(self.seed, "statistics", round).choice(count, asked, replace=False))

    def _collections(self, clients: Sequence[int] | np.ndarray) -> list[Collect]:
        kind, batch = self.evaluation.statistics, self._statistics_batch
        return collections_of(self.federation.train, clients, kind, batch, self.seed)

    @property
    def _statistics_batch(self) -> int:
        default = EXACT_BATCH if self.evaluation.statistics == "exact" else self.method.task.training.batch_size
        return self.evaluation.statistics_batch or default

    @property
    def _batches(self) -> tuple[int, int]:
        """Samples per forward pass of networks whose norms have statistics, and of the others."""
        fixed = next((score.counted_by for score in self.scores if score.counted_by), None)
        return (fixed, fixed) if fixed else (self.evaluation.batch_size, self._statistics_batch)

    # the plan

    def _global(
        self, subjects: Mapping[Hashable, Deployment], split: str, samples: int, score: int | None = None
    ) -> list[tuple[Job, Evaluate]]:
        """Return the jobs of every deployed network on a shared split, or on a score's own samples."""
        judged = [d for d in subjects.values() if not d.is_start]
        own = None if score is None else self.own_samples[score]
        work = [
            (span.stop - span.start, Evaluate(split, [own[span] if own else span], *self._batches, score=score))
            for span in spans_of(samples, self._batches[1], self.evaluation.piece)
        ]
        return [self._job(d.key, d.net, count, one) for d in judged for count, one in work]

    @cached_property
    def own_samples(self) -> dict[int, Sequence[Any]]:
        """Number of a score -> the samples that it brings, read once per run."""
        return {i: score.samples for i, score in enumerate(self.scores) if isinstance(score, OfOwnSamples)}

    def _personal(
        self, splits: Sequence[str], deployed: Mapping[float, Deployment], clients: Clients
    ) -> dict[Hashable, tuple[Net, np.ndarray]]:
        """Return the clients with data of a split whose personal networks are sent together: key -> network, and
        clients [n]."""
        if self.evaluation.local == "server" or not splits:
            return {}
        samples = np.sum([self._shards(split).sizes for split in splits], 0)
        ids = clients.ids[(samples[clients.ids] > 0) & np.isin(clients.ids, sorted(clients.owners))]
        personal: dict[Hashable, tuple[Net, np.ndarray]] = {}
        for capacity, d in deployed.items():
            some = ids[clients.capacities[ids] == capacity]
            share = math.ceil(len(some) / (SHARES * self.executor.workers))
            count = max(1, min(share, MESSAGE // d.net.parameters))
            for start in range(0, len(some), count):
                personal["own", int(some[start])] = d.net, some[start : start + count]
        return personal

    def _members(
        self,
        split: str,
        deployed: Mapping[float, Deployment],
        clients: Clients,
        personal: Mapping[Hashable, tuple[Net, np.ndarray]],
    ) -> dict[Hashable, tuple[Net, np.ndarray]]:
        """Return subject key -> its network, and the clients that run it and have data of the split."""
        shards = self._shards(split)
        from_server = self.evaluation.local == "server"
        server = self.method.task.server_capacity
        ids = clients.ids[shards.sizes[clients.ids] > 0]
        capacities = np.full(len(ids), server) if from_server else clients.capacities[ids]
        owners = np.isin(ids, [id for _, some in personal.values() for id in some.tolist()])
        members: dict[Hashable, tuple[Net, np.ndarray]] = {}
        for capacity, d in deployed.items():
            shared = ids[(capacities == capacity) & ~owners]
            if len(shared):
                _, others = members.get(d.key, (d.net, shared[:0]))
                members[d.key] = d.net, np.union1d(others, shared)
        members |= {key: (net, np.intersect1d(some, ids)) for key, (net, some) in personal.items()}
        members = {key: (net, some) for key, (net, some) in members.items() if len(some)}
        return dict(sorted(members.items(), key=lambda item: item[1][1][0]))

    def _shards(self, split: str) -> Shards:
        """Return the clients' test or validation splits."""
        return self.federation.test if split == "clients" else self.federation.local_validation

    def _local(
        self, split: str, members: Mapping[Hashable, tuple[Net, np.ndarray]], personal: Container[Hashable]
    ) -> list[tuple[Job, Evaluate]]:
        """Return the jobs of every network on the split of its clients, those in `personal` with data of their own."""
        shards = self._shards(split)
        fill = self.evaluation.label_mask
        plan = []
        for key, (net, ids) in members.items():
            groups = grouped(ids, shards.sizes, self.evaluation.piece)
            if key in personal:
                groups = [(int(shards.sizes[ids].sum()), ids.tolist())]
            for samples, group in groups:
                own = [self._collections([id]) for id in group] if key in personal else None
                plan.append(self._job(key, net, samples, Evaluate(split, group, *self._batches, fill, own)))
        return plan

    def _job(self, key: Hashable, net: Net, samples: int, work: Evaluate) -> tuple[Job, Evaluate]:
        return Job(key, samples * net.macs, lambda: work, f"evaluation on {work.split}"), work

    # the metrics

    def _capacities(self, split: str, found: Mapping[float, Sums | None]) -> Line:
        """Return the metrics of every capacity's network on a shared split."""
        known = {capacity: sums for capacity, sums in found.items() if sums is not None}
        server, line = known.get(self.method.task.server_capacity), {}
        for score in scores_of(split, self.scores) if known else ():
            name = score.label
            values = {capacity: value_of(score, sums.scores[name]) for capacity, sums in known.items()}
            line |= {named(name, capacity, split): value for capacity, value in values.items()}
            if server is not None:
                line[named(name, "server", split)] = values[self.method.task.server_capacity]
            line[named(name, "mean", split)] = sum(values.values()) / len(values)
            line[named(name, "worst", split)] = _worst(score, values.values())
        if server is not None:
            first = self.scores[0]
            for i, sums in server.exits.items():
                line[named(first.label, f"exit{i + 1}", split)] = value_of(first, sums)
        return line

    def _matrices(self, found: Mapping[float, Sums | None]) -> dict[str, dict[str, list[Any]]]:
        """Return score -> capacity -> matrix of the test set, of scores that have one."""
        matrices: dict[str, dict[str, list[Any]]] = {}
        for score in self.scores:
            for capacity, sums in found.items():
                if sums is not None and (matrix := score.matrix(sums.scores[score.label])) is not None:
                    matrices.setdefault(score.label, {})[label(capacity)] = matrix.tolist()
        return matrices

    def _texts(self, found: Mapping[float, Sums | None]) -> dict[str, dict[str, list[Texts]]]:
        """Return score -> capacity -> texts of some test samples, of scores that have them."""
        texts: dict[str, dict[str, list[Texts]]] = {}
        for capacity, sums in found.items():
            for name, shown in ({} if sums is None else sums.texts).items():
                texts.setdefault(name, {})[label(capacity)] = shown
        return texts

    def _clients(self, split: str, found: ByClient, deployed: Mapping[float, Deployment]) -> Line:
        """Return the metrics over clients on their own split, of scores that they have."""
        line: Line = {}
        for score in scores_of(split, self.scores):
            name, counted = score.label, found.counted[score.label]
            if not counted.any():
                continue
            values, weights, capacities = found.values[name][counted], found.counts[counted], found.capacities[counted]
            line |= {
                named(name, c, split): float(values[capacities == c].mean())
                for c in deployed
                if (capacities == c).any()
            }
            line[named(name, "mean", split)] = float(values.mean())
            line[named(name, "samples", split)] = float(np.average(values, weights=weights))
            line[named(name, "worst", split)] = float(_worst(score, values))
        return line


def _worst(score: Score, values: Iterable[float]) -> float:
    return min(values) if score.better == "max" else max(values)


def _densities(deployed: Mapping[float, Deployment]) -> Line:
    """Return, for masked networks, the fractions of the dense network's parameters and multiply-adds."""
    line: Line = {}
    for capacity, d in deployed.items():
        if d.masked and not d.is_start:
            present = d.present
            line[f"density_{label(capacity)}"] = present.parameters / d.net.parameters
            line[f"macs_share_{label(capacity)}"] = present.macs / d.net.macs
    return line


def _local_densities(
    members: Mapping[Hashable, tuple[Net, np.ndarray]],
    layers: Mapping[Hashable, Mapping[str, float]],
    own: Mapping[int, Mapping[str, float]],
) -> Line:
    """Return the mean over clients of the mean density of their masked layers (SpaFL), and of each layer; {} if no
    client is known. `layers` of shared networks by key, `own` of personal networks by client."""
    clients = [(len(ids), layers[key]) for key, (_, ids) in members.items() if key in layers]
    clients += [(1, own[id]) for _, ids in members.values() for id in ids.tolist() if id in own]
    if not clients:
        return {}
    total = sum(n for n, _ in clients)
    means = {path: sum(n * of[path] for n, of in clients) / total for path in clients[0][1]}
    return {"local_density": sum(means.values()) / len(means)} | {
        f"local_density_{path}": mean for path, mean in means.items()
    }


def _by_subject(plan: list[tuple[Job, Evaluate]]) -> list[tuple[Job, Evaluate]]:
    """Group jobs by network, because a client's state is read once per group."""
    groups: dict[Hashable, list[tuple[Job, Evaluate]]] = {}
    for job, work in plan:
        groups.setdefault(job.key, []).append((job, work))
    return list(itertools.chain(*groups.values()))
