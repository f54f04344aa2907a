"""Where clients run: one after another in resident networks, over the data of this process.

Executors call the three verbs with messages, `(tensors, rest)`: what all jobs of a key share, and the job's
own. Everything is a pure function of the messages and the data, so a job can run again anywhere.
"""

import math
import traceback
from dataclasses import dataclass

import torch
from torch import nn

from rayfl import costs
from rayfl.data.federation import Federation
from rayfl.executors.base import Message
from rayfl.methods.base import Client, Method, Update, add_metrics
from rayfl.models.base import load, resident
from rayfl.norms import collect
from rayfl.norms import load as load_statistics
from rayfl.seeds import stream, torch_generator
from rayfl.submodel import Selection
from rayfl.tensors import Tensors, as_tensor, leaves, nbytes
from rayfl.training import ClientData, evaluate


class ClientFailed(RuntimeError):
    """A client's code raised: says which client, how much data, and the original traceback."""


@dataclass(frozen=True)
class Limits:
    """When an update is not averaged in."""

    growth: float
    """Largest norm of what a client sends, and of what it keeps, as a multiple of 1 + the norm of what it was sent."""


class Worker:
    def __init__(
        self,
        method: Method,
        data: Federation,
        seed: int,
        limits: Limits,
        device: torch.device | str = "cpu",
    ):
        self.method, self.data, self.seed, self.limits = method, data, seed, limits
        self.device = torch.device(device)
        on_gpu = self.device.type != "cpu"
        arrays = data.arrays
        # a GPU holds the whole data set once; the CPU reads the shared memory that it came in
        self.pixels = {
            "train": as_tensor(arrays.x).to(self.device) if on_gpu else as_tensor(arrays.x),
            "test": as_tensor(arrays.x_test).to(self.device) if on_gpu else as_tensor(arrays.x_test),
        }
        self.labels = {
            "train": as_tensor(arrays.y).to(self.device),
            "test": as_tensor(arrays.y_test).to(self.device),
        }

    def train(self, shared: Message, job: Message) -> Message:
        """The local updates of a chunk of clients with one selection, folded."""
        payload, selection = shared
        carries, (round, clients) = job
        folded: Update | None = None
        refused, norm, totals = [], _norm(payload), {}
        for id, capacity in clients:
            client = Client(id, capacity, carries.get(str(id)))
            data = self._rows("train", self.data.train[id])
            try:
                update = self.method.local_update(
                    payload, selection, client, data, round, stream(self.seed, "local", round, id)
                )
            except Exception:
                raise ClientFailed(
                    f"client {id} (capacity {capacity:g}, {len(data)} samples) failed in round "
                    f"{round + 1}:\n{traceback.format_exc()}"
                ) from None
            cost = self._cost(payload, selection, update)
            if (reason := self._unfit(update, max(norm, _norm(client.carry or {})))) is not None:
                refused.append((id, reason))
                add_metrics(totals, {name: update.metrics.get(name, value) for name, value in cost.items()})
                continue
            add_metrics(totals, {"clients": 1} | cost | update.metrics)
            if folded is None:
                folded = update
            else:
                folded.add(update)
        if folded is None:
            return {}, (None, totals, refused)
        tensors = {
            "sums": folded.sums,
            "held": folded.held,
            "carry": {str(id): carry for id, carry in folded.carries.items()},
        }
        return tensors, (folded.weight, totals, refused)

    def _cost(self, payload: Tensors, selection: Selection, update: Update) -> dict[str, float]:
        samples = int(update.metrics["train_samples"])
        return {
            "bytes_down": nbytes(payload),
            "bytes_up": nbytes(update.sums),
            "train_flops": costs.training_flops(self.method.task.model, selection.net, samples),
        }

    def collect(self, shared: Message, job: Message) -> Message:
        """Sums for a network's static norms over some clients' data, or over pooled batches."""
        tensors, (model, net, _) = shared
        _, (rows, clients, batch_size) = job
        network = resident(model, net, self.device)
        load(network, tensors["params"])
        if clients is not None:
            datas = (self._rows("train", self.data.train[id]) for id in clients)
            batches = (x for data in datas for x, _ in data.in_order(batch_size))
        else:
            start, generator = rows.start, torch_generator(self.seed, "pooled", rows.start)
            pool = self.data.pooled(self.seed)[start : rows.stop]
            data = self._rows("train", pool)
            batches = (x for x, _ in data.in_order(batch_size, generator))
        return collect(network, batches), None

    def evaluate(self, shared: Message, job: Message) -> Message:
        """`Evaluated` sums: of a span of a global split, or of each of some clients' test splits."""
        tensors, (model, net, answer) = shared
        _, (split, items, batch_size, fill) = job
        network = resident(model, net, self.device)
        load(network, tensors["params"])
        load_statistics(network, tensors.get("statistics", {}))
        results = []
        for item in items:
            present = None
            if split == "clients":
                data = self._rows(self.data.test_source, self.data.test[item])
                if fill != "none":
                    present = self._rows("train", self.data.train[item]).present
            elif split == "validation":
                data = self._rows("train", self.data.validation[item])
            else:
                data = self._span("test", item)
            results.append(evaluate(network, data, batch_size, answer, fill, present))
        return {}, results

    def _rows(self, source: str, rows) -> ClientData:
        index = torch.from_numpy(rows.astype("int64")).to(self.device)
        return self._data(self.pixels[source].index_select(0, index), self.labels[source][index])

    def _span(self, source: str, span: slice) -> ClientData:
        return self._data(self.pixels[source][span], self.labels[source][span])

    def _data(self, pixels: torch.Tensor, labels: torch.Tensor) -> ClientData:
        return ClientData(pixels, labels, self.data.classes, self.data.preprocess)

    def _unfit(self, update: Update, before: float) -> str | None:
        """Why an update must not be averaged in, if so; `before` is the norm of what the client started from, 0
        where it drew that itself: then there is nothing to grow from."""
        norms = [_norm(update.sums) / (update.weight or 1.0), *map(_norm, update.carries.values())]
        if not all(map(math.isfinite, norms)):
            return "not finite"
        after = max(norms)
        limit = self.limits.growth * (1 + before)
        return f"norm {after:.3g} over the limit {limit:.3g}" if before and after > limit else None


def _norm(tensors: Tensors) -> float:
    floats = [t for _, t in leaves(tensors) if t.is_floating_point()]
    return float(nn.utils.get_total_norm(floats)) if floats else 0.0
