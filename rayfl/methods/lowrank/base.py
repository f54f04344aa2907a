"""Base of the methods whose clients train low-rank adapters over a frozen base.

Symbols: a layer is $W_0 x + s B A x$ with $d$ inputs and $o$ outputs, $A$ $[r, d]$ and $B$ $[o, r]$ trained, $W_0$
frozen; $b_j a_j$ is its $j$-th component; $r_k$ the rank of client $k$ in this layer, $R$ that of the server; $w_k$ a
client's weight, sum 1 over a cohort; $P_k = s_k B_k A_k$ its product, $P = sum_k w_k P_k$ the exact mean.

The defaults are the holder mean's: a client trains the first r_k components of every adapter and the head, if
`model.head` trains it, and the server averages each coordinate over its holders. A method overrides what differs.

Traffic is counted as in the papers, whatever the simulation moves: up, the trained parameters; down, those that changed
in the last round. The base and everything drawn from the run's seed are not counted.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import nn

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.fold import ClientState, Factors, Fold, State, Update
from rayfl.core.joined import parameters_of
from rayfl.core.net import Net, cached_module, load, params_of
from rayfl.core.seeds import torch_generator
from rayfl.core.submodel import Selection, Slice, prefix
from rayfl.core.tensors import Params, copied, nbytes
from rayfl.methods.base import Client, Deployment, Method, Payload, Task, Visit
from rayfl.methods.contract import Contract
from rayfl.models.lora import Lora
from rayfl.training.settings import Training
from rayfl.training.steps import at_rest

Part = Literal["A", "B", "M", "W"]
"""Part of an adapter: a factor, the core between the factors, or the update merged into the base."""


class LowRank(Method):
    contract: ClassVar = Contract(wants="adapters")
    over: ClassVar[Literal["holders", "all"]] = "holders"
    """Denominator of the mean: clients that hold the coordinate, or the whole cohort (missing values count as 0)."""

    products_sent: ClassVar[Literal["none", "whole", "segments"]] = "none"
    """Products w_k P_k that clients send: of whole layers, or of their `segments`."""
    factors_sent: ClassVar[bool] = True
    """Whether clients send the parts of their adapters."""
    one_scale: ClassVar[bool] = False
    """True if the server compares clients' adapters at one scale."""

    weight: Literal["samples", "uniform"] = "samples"

    @property
    def sends_products(self) -> bool:
        return self.products_sent != "none"

    # selection

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return adapters(task)

    def check(self, rounds: int, clients: Population) -> None:
        """Raise a ConfigError if a client has nothing to train, or if scales that depend on the rank are not valid."""
        model = self.task.model
        assert isinstance(model, Lora)
        if self.one_scale and model.scaling != "constant" and len(self.task.nets) > 1:
            raise ConfigError(
                f"model.scaling: {model.scaling} is not valid. Allowed: constant, because method {self.name} compares "
                "clients of different ranks at one scale; or clients of one capacity"
            )
        largest = max(map(model.largest, self.layers))
        for capacity in self.task.nets:
            if not self.has_trained(capacity):
                raise ConfigError(
                    f"clients.capacities: {capacity:g} is rank 0 of {largest}, with a frozen head. Allowed with "
                    f"model.head: frozen: at least {1 / largest:.3g}"
                )

    def has_trained(self, capacity: float) -> bool:
        """Return whether a client of a capacity has something to train."""
        shapes = self.task.nets[capacity].layout.shapes
        return any(math.prod(shape) and self.is_trained(name, 0) for name, shape in shapes.items())

    def submodel(self, state: State, round: int, capacity: float) -> Slice:
        """Return the submodel of a capacity after `round` rounds: the first components of every adapter."""
        return prefix(self.task.server, self.task.nets[capacity])

    def select(self, state: State, client: Client) -> Selection:
        return self.submodel(state, client.round, client.capacity)

    def extract(self, state: State, selection: Selection) -> Payload:
        return {"params": self.part(state, selection)}

    def part(self, state: State, selection: Selection) -> Params:
        """Return the selected parameters, for training or deployment."""
        return selection.take(state["params"])

    # training

    def trains(self, round: int) -> tuple[Part, ...]:
        """Return the parts of an adapter that clients train and send in a round, in addition to the head."""
        return ("A", "B")

    def changed(self, round: int) -> tuple[Part, ...]:
        """Return the parts of an adapter that the previous round changed, and that are sent down."""
        return self.trains(max(round - 1, 0))

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        trained, metrics = self.train(payload["params"], visit)
        return self.answer(trained, payload, visit, metrics)

    def train(
        self,
        params: Params,
        visit: Visit,
        *,
        training: Training | None = None,
        adjust: Callable[[nn.Module], None] | None = None,
        project: Callable[[nn.Module], None] | None = None,
    ) -> tuple[Params, dict[str, float]]:
        """Train, and return the client's parameters, which share the network's memory, and metrics. Parameters that the
        round does not train get no gradient. `training`, `adjust`, `project`: see `fit`."""
        module = cached_module(visit.net, visit.data.device)
        load(module, params)
        with at_rest(p for name, p in parameters_of(module).items() if not self.is_trained(name, visit.round)):
            metrics = self.fit(module, visit, training=training, adjust=adjust, project=project)
        return params_of(module), metrics

    def answer(
        self, trained: Params, payload: Payload, visit: Visit, metrics: dict[str, float], *, weight: float | None = None
    ) -> Update:
        """Return the trained parameters times `weight` (default: the client's): the head, and what `factors_sent` and
        `products_sent` name."""
        weight = self.weight_of(visit.data) if weight is None else weight
        mine = {name: t for name, t in trained.items() if self.is_trained(name, visit.round)}
        sums = copied({name: t for name, t in mine.items() if self.factors_sent or not part_of(name)}, weight)
        metrics["bytes_up"] = nbytes(mine)
        metrics["bytes_down"] = self.down(payload, visit.round)
        update = Update({"params": sums}, weight, metrics=metrics)
        if self.products_sent == "whole":
            update.products = self.products(trained, visit.net, weight)
        elif self.products_sent == "segments":
            for path, product in self.products(trained, visit.net, weight).items():
                for segment, at in self.segments(path, rank_of(visit.net, path)).items():
                    update.products[segment] = Factors(product.left[:, at], product.right[at])  # type: ignore
            update.whole["holders"] = {segment: torch.tensor(weight) for segment in update.products}
        return update

    def down(self, payload: Payload, round: int) -> int:
        """Return the bytes sent to a client: the changed parts and, for each merged update of the last round, the
        smaller of its factors and its product."""
        parts = ("", *self.changed(round))
        sent = nbytes({name: t for name, t in payload["params"].items() if part_of(name) in parts})
        for path, rank in payload.get("merged", {}).items():
            product = payload["params"][f"{path}.lora.W"]
            sent += product.element_size() * min(int(rank) * sum(product.shape), product.numel())
        return sent

    def products(self, trained: Params, net: Net, weight: float) -> dict[str, Factors]:
        """Return w_k P_k of every layer with rank over 0, as factors. Only one factor is weighted."""
        found = {}
        for path in self.layers:
            if rank := rank_of(net, path):
                b, a = trained[f"{path}.lora.B"], trained[f"{path}.lora.A"]
                found[path] = Factors(b.to("cpu", copy=True), a.cpu() * (weight * self.scale(path, rank)))
        return found

    # aggregation

    def step(self, state: State, round: int, fold: Fold) -> State:
        return state | {"params": fold.mean("params", over=self.over)}

    def mean_products(self, fold: Fold) -> dict[str, Factors]:
        """Return P of every layer, in float64; {} if no products were received. Of segments: the sum of their means,
        each over the segment's holders. A segment without holders in the cohort keeps the server's product."""
        if self.products_sent != "segments":
            return {path: mean(total, fold.weight) for path, total in fold.products.items()}
        found, holders, params = {}, fold.sum("holders"), fold.state["params"]
        for path in self.layers if fold.products else ():
            parts = []
            for segment, at in self.segments(path, self.rank(path)).items():
                if (total := fold.products.get(segment)) is not None:
                    parts.append(mean(total, float(holders[segment])))
                else:
                    b, a = params[f"{path}.lora.B"][:, at], params[f"{path}.lora.A"][at]
                    parts.append(mean(Factors(b * self.scale(path), a), 1.0))
            found[path] = functools.reduce(operator.add, parts)
        return found

    def segments(self, path: str, rank: int) -> dict[str, slice]:
        """Return the components of a layer between consecutive ranks of the population, up to a rank."""
        ends = sorted({0, *(rank_of(net, path) for net in self.task.nets.values())})
        pairs = zip(ends, ends[1:], strict=False)
        return {f"{path} {low}": slice(low, high) for low, high in pairs if high <= rank}

    # deployment

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        selection = self.submodel(state, round, capacity)
        return Deployment(selection.key, selection.net, self.part(state, selection))

    # tools

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(name.removesuffix(".lora.A") for name in self.task.server.layout.shapes if part_of(name) == "A")

    def rank(self, path: str) -> int:
        """Return R, the server's rank of a layer."""
        return rank_of(self.task.server, path)

    def scale(self, path: str, rank: int | None = None) -> float:
        """Return s of a layer's adapter of this rank. Default: the server's."""
        model = self.task.model
        assert isinstance(model, Lora)
        return model.scale(path, self.rank(path) if rank is None else rank)

    def is_trained(self, name: str, round: int) -> bool:
        return part_of(name) in ("", *self.trains(round))


# names


def part_of(name: str) -> Part | Literal[""]:
    """Return the part of an adapter that a parameter is. "": none."""
    path, _, part = name.rpartition(".")
    return part if path.endswith(".lora") else ""  # pyright: ignore[reportReturnType]


def rank_of(net: Net, path: str) -> int:
    shape = net.layout.shapes.get(f"{path}.lora.A")
    return shape[0] if shape else 0


# networks


def adapters(task: Task, **options: bool) -> Mapping[float, Net]:
    """Return the task's networks with other model options, `merged=True` or `core=True`. Raise a ConfigError if the
    model has no adapters."""
    if not isinstance(task.model, Lora):
        raise ConfigError(
            f"model: {task.model.name} has no adapters. Allowed with a low-rank method: "
            "{name: lora, base: {name: ...}, targets: [...]}"
        )
    if not options:
        return task.nets
    model = task.model.model_copy(update=options)
    return {capacity: replace(net, model=model) for capacity, net in task.nets.items()}


# products


def mean(total: Factors, weight: float) -> Factors:
    return Factors(total.left.double() / weight, None if total.right is None else total.right.double())


def rank_sent(product: Factors) -> torch.Tensor:
    """Return the rank [] at which a product is sent; for a dense matrix, its smaller dimension."""
    return torch.tensor(min(product.left.shape) if product.right is None else product.left.shape[1])


# new and merged adapters


def fresh(net: Net, seed: int) -> Params:
    """Return new adapters: A uniform within 1 / sqrt(in), as in a new network, and B = 0."""
    found = {}
    for name, shape in net.layout.shapes.items():
        if part_of(name) == "A":
            drawn = torch.rand(shape, generator=torch_generator(seed, "adapters", name))
            found[name] = (2 * drawn - 1) / math.sqrt(shape[1])
        elif part_of(name) == "B":
            found[name] = torch.zeros(shape)
    return found


def merged(params: Params, added: Mapping[str, torch.Tensor]) -> Params:
    """Return the parameters with `added`, [out, in] per layer, merged into the base."""
    names = {path: f"{path}.lora.W" for path in added}
    return params | {names[path]: params[names[path]] + t.to(params[names[path]].dtype) for path, t in added.items()}
