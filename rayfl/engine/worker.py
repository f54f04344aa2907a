"""Worker: runs clients one after another in cached networks, on the data of its process.

Every verb is a pure function of its messages and the data, so a job can be repeated anywhere.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from rayfl.core import norms
from rayfl.core.fold import ClientState, PairwiseSum, Update, aligned, sum_of_updates
from rayfl.core.net import as_built, cached_module, load
from rayfl.core.seeds import stream, torch_generator
from rayfl.core.tensors import Params, as_tensor, laid_out, nbytes, norm
from rayfl.data.base import Arrays
from rayfl.data.federation import Federation
from rayfl.data.samples import ClientData
from rayfl.data.scores import OfOwnSamples, Score
from rayfl.engine.checked import Checked, prints
from rayfl.engine.devices import indexed
from rayfl.engine.jobs import Broadcast, Collect, Evaluate, Evaluated, Refine, Train, Trained
from rayfl.evaluation import Judged, add_to, judge
from rayfl.methods.base import Client, Deployment, Method, ServerTask, ServerTaskContext, ServerTaskResult, Visit
from rayfl.metrics import plus
from rayfl.training import stacked
from rayfl.training.passes import Passes
from rayfl.training.sending import RESIDUAL, transformed
from rayfl.training.settings import answered, precise
from rayfl.training.together import together
from rayfl.training.updates import Updates

Answer = tuple[Update | None, dict[str, float], str | None]
"""A client's update (None if refused), its metrics and the reason of a refusal."""


@dataclass(frozen=True)
class Recipe:
    """Everything that a worker needs except the samples."""

    method: Method
    """Bound to its task."""
    federation: Federation
    seed: int
    updates: Updates
    scores: tuple[Score, ...]
    """Scores of an evaluation; the first is also computed for every early exit."""
    statistics: str
    """Statistics of static norms (`norms.finish`)."""


class Worker:
    def __init__(self, recipe: Recipe, arrays: Arrays, device: torch.device | str = "cpu"):
        self.recipe, self.method, self.federation = recipe, recipe.method, recipe.federation
        self.verbs = Checked(recipe.method)
        self.device = indexed(device)
        # a GPU holds one copy of the data set; a CPU worker reads shared memory
        self.samples = {
            source: {name: as_tensor(array).to(self.device) for name, array in split.items()}
            for source, split in (("train", arrays.train), ("test", arrays.test), ("public", arrays.public or {}))
        }

    # training

    def train(self, broadcast: Broadcast, job: Train) -> Trained:
        """Return the sum of the local updates of a chunk of clients with one selection."""
        broadcast = replace(broadcast, payload=laid_out(broadcast.payload))
        updates, metrics = sum_of_updates(), PairwiseSum(plus)
        client_states, losses, refused, before = {}, {}, [], norm([broadcast.payload])
        payload = prints(broadcast.payload)
        answers = self._answers(broadcast, job, before)
        for client in job.clients:
            update, numbers, reason = next(answers)
            updates.add(update)
            metrics.add(numbers)
            if update is not None:
                client_states |= update.client_states
                losses[client.id] = numbers.get("train_loss", 0.0) / (numbers["train_samples"] or 1)
                update.client_states, update.metrics = {}, {}
            else:
                refused.append((client.id, reason))
            del update  # frees it before the next client trains
        self.verbs.require_unchanged(broadcast.payload, payload)
        return Trained(updates.total, len(job.clients), client_states, metrics.total, losses, refused)

    def _answers(self, broadcast: Broadcast, job: Train, before: float) -> Iterator[Answer]:
        """Yield the answers of a chunk of clients. `before`: norm of the payload."""
        for part in aligned(len(job.clients), job.together):
            visits = [self._visit(broadcast, client, job.client_states) for client in job.clients[part]]
            runs = [partial(self._trained, broadcast, visit) for visit in visits]
            with precise(self.method.task.training, self.device):
                trained = together(runs, stacked.train) if len(runs) >= stacked.LEAST else [run() for run in runs]
            for visit in visits:
                residual = cast(ClientState | None, job.client_states.get(visit.client.id, {}).get(RESIDUAL))
                # no name keeps an update while others train
                yield self._answer(broadcast, visit, *trained.pop(0), before, residual)

    def _visit(self, broadcast: Broadcast, client: Client, client_states: Mapping[int, ClientState]) -> Visit:
        # the method never sees the residual of the transforms
        own = {group: t for group, t in client_states.get(client.id, {}).items() if group != RESIDUAL}
        data = self._rows("train", self.federation.train[client.id])
        seed = stream(self.recipe.seed, "local", client.round, client.id)
        return Visit(client, broadcast.selection, data, laid_out(own) or None, seed, self.public)

    def _trained(self, broadcast: Broadcast, visit: Visit) -> tuple[Update, float]:
        """Return a client's update and the FLOPs of its passes."""
        as_built(cached_module(visit.net, self.device))
        with Passes() as passes:
            update = self.verbs.local_update(broadcast.payload, visit)
        return update, passes.flops

    def _answer(
        self,
        broadcast: Broadcast,
        visit: Visit,
        update: Update,
        flops: float,
        before: float,
        residual: ClientState | None,
    ) -> Answer:
        """Return what the server gets of a client."""
        client, own = visit.client, visit.client_state
        before = max(before, norm([own or {}]))
        spent, updates = _cost(broadcast, update, flops), self.recipe.updates
        if (reason := updates.unfit(update, before)) is not None:
            return None, {name: update.metrics.get(name, value) for name, value in spent.items()}, reason
        protection = broadcast.protection
        if protection.clip is not None:
            self.verbs.check_returned(broadcast.payload, update, visit)
        if updates.transforms or protection.is_active:
            spent["bytes_up"], residual = transformed(
                updates.transforms,
                broadcast.payload,
                update,
                stream(visit.seed, "transforms"),
                broadcast.selection,
                residual,
                protection,
            )
            update.metrics.pop("bytes_up", None)
            if protection.secure is not None:
                counted = update.metrics if "bytes_down" in update.metrics else spent
                counted["bytes_down"] += protection.secure.bytes_down(protection.group)
            if residual is not None:
                new = update.client_states.get(client.id, own or {})
                update.client_states[client.id] = {**new, RESIDUAL: residual}
        return update, {"clients": 1} | spent | update.metrics, None

    def refine(self, server_task: ServerTask, job: Refine) -> ServerTaskResult:
        """Run a server task."""
        server_task = replace(server_task, payload=laid_out(server_task.payload))
        as_built(cached_module(server_task.net, self.device))
        seed = stream(self.recipe.seed, "refine", job.round)
        data = {id: self._rows("train", self.federation.train[id]) for id in server_task.clients}
        states = {id: laid_out(state) for id, state in job.client_states.items()}
        context = ServerTaskContext(job.round, seed, self.public, self.validation, data, states)
        with precise(self.method.task.training, self.device), Passes() as passes:
            result = self.verbs.refine(server_task, context)
        if passes.flops:
            result.metrics.setdefault("server_flops", passes.flops)
        return result

    # evaluation

    def collect(self, deployed: Deployment, job: Collect) -> Params:
        """Return the sums for a network's static norms."""
        module = cached_module(deployed.net, self.device)
        load(module, deployed.params)
        with precise(self.method.task.training, self.device):
            return self._collected(module, job)

    def evaluate(self, deployed: Deployment | Mapping[int, Deployment], job: Evaluate) -> Evaluated:
        """Return the sums of all scores per item: of one network, or of a client's own."""
        with precise(self.method.task.training, self.device):
            if job.score is not None:
                return self._of_own_samples(cast(Deployment, deployed), job, self.recipe.scores[job.score])
            if job.own is None:
                return Evaluated.of(self._judged(cast(Deployment, deployed), job), {})
            judged, layers = [], {}
            for client, own in zip(job.items, job.own, strict=True):
                network = cast(Mapping[int, Deployment], deployed)[client]
                judged += self._judged(network, replace(job, items=[client]), own)
                if network.masked:
                    layers[client] = network.present.layers
            return Evaluated.of(judged, layers)

    def _loaded(self, deployed: Deployment, own: Sequence[Collect] = ()) -> nn.Module:
        """Return the network with its statistics or, if it has none, with those of the data in `own`."""
        module = cached_module(deployed.net, self.device)
        load(module, deployed.params)
        statistics = deployed.statistics
        if statistics is None and own and deployed.net.norms and self.recipe.statistics != "batch":
            sums: Params = {}
            for one in own:
                add_to(sums, self._collected(module, one))
            statistics = norms.finish(sums, self.recipe.statistics)
        norms.load(module, statistics or {})
        return module

    def _judged(self, deployed: Deployment, job: Evaluate, own: Sequence[Collect] = ()) -> list[Judged]:
        module = self._loaded(deployed, own)
        pieces = [self._piece(job.split, item) for item in job.items]
        present = None
        if job.fill != "none":
            present = [self._rows("train", self.federation.train[item]).present for item in job.items]
        size = job.batch_size if norms.has_statistics(module) else job.statistics_batch
        return judge(module, pieces, self.recipe.scores, size, deployed.answer, job.fill, present)

    def _of_own_samples(self, deployed: Deployment, job: Evaluate, score: Score) -> Evaluated:
        assert isinstance(score, OfOwnSamples)
        module = self._loaded(deployed).eval()
        goal, size = self.federation.goal, job.batch_size
        predict = lambda x: answered(module(x), deployed.answer)  # noqa: E731
        sums = [score.own_counts(predict, item, size, goal, self.device) for item in job.items]
        return Evaluated(torch.tensor([len(item) for item in job.items]), {score.label: torch.stack(sums)})

    def _collected(self, module: nn.Module, job: Collect) -> Params:
        at = job.augmented
        generator = None if at is None else torch_generator(self.recipe.seed, "pooled", at)
        batches = self._rows("train", job.rows).in_batches(job.sizes, generator)
        return norms.collect(module, (x for x, _ in batches))

    # data

    @functools.cached_property
    def public(self) -> ClientData | None:
        """Public samples, if the task has them."""
        asked, federation = self.method.task.public, self.federation
        if asked is None:
            return None
        # rows of the training set are copied; samples of another data set or noise are used in place
        own = federation.public_source == "train"
        data = self._rows("train", federation.public) if own else self._data(self.samples["public"])
        return replace(data, samples=asked.shown(data.samples))

    @functools.cached_property
    def validation(self) -> ClientData:
        """Validation data of the server."""
        return self._rows("train", self.federation.validation)

    def _piece(self, split: str, item: Any) -> ClientData:
        """Return a slice of a shared split, or a client's own split."""
        federation = self.federation
        if split == "test":
            return self._data({name: t[item] for name, t in self.samples["test"].items()})
        if split == "validation":
            return self._rows("train", federation.validation[item])
        if split == "client_validation":
            return self._rows("train", federation.local_validation[item])
        return self._rows(federation.test_source, federation.test[item])

    def _rows(self, source: str, rows: np.ndarray) -> ClientData:
        index = torch.from_numpy(rows.astype("int64")).to(self.device)
        return self._data({name: t.index_select(0, index) for name, t in self.samples[source].items()})

    def _data(self, samples: dict[str, torch.Tensor]) -> ClientData:
        return ClientData(samples, self.federation.prepare, self.federation.goal)


def _cost(broadcast: Broadcast, update: Update, flops: float) -> dict[str, float]:
    """Return a client's traffic, from tensor sizes, and its FLOPs: those of its passes through networks, but for those
    that the update states as the server's."""
    return {
        "bytes_down": nbytes(broadcast.payload) + broadcast.selection.nbytes,
        "bytes_up": nbytes(update.sums) + nbytes(update.whole) + sum(f.nbytes for f in update.products.values()),
        "train_flops": flops - update.metrics.get("server_flops", 0.0),
    }
