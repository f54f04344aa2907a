"""What the methods share whose clients train low-rank adapters over a frozen base.

Symbols, for all of them: a layer is W0 x + s B A x, with A [r, in] and B [out, r] trained, W0 frozen; b_j a_j is its
j-th component; r_k the rank of client k, R that of the server; w_k a client's weight, sum 1 over a cohort;
P_k = s_k B_k A_k its product, P* = sum_k w_k P_k the mean that one would want.

The defaults are the holder mean's: a client holds the first r_k components of every adapter, and what `head` of the
model says beside them, trains both, and the server averages over holders. A method says what differs.

A client's traffic is counted as the papers count it: what was trained comes up, and what has changed since the last
round goes down, whatever the simulation moves. The base, and what is drawn from the run's seed, travel once and are
not counted.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import nn

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core import factors as lowrank
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

Part = Literal["A", "B", "M", "W"]
"""Of an adapter: its factors, the core between them, and what was merged into the base."""


class LowRank(Method):
    contract: ClassVar = Contract(wants="adapters")
    over: ClassVar[Literal["holders", "all"]] = "holders"
    """Whose mean it is: of those who hold a coordinate, or of the whole cohort, where who lacks one counts as 0."""

    weight: Literal["samples", "uniform"] = "samples"

    # which coordinates

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return adapters(task)

    def check(self, rounds: int, clients: Population) -> None:
        """A ConfigError if a client had nothing to train."""
        for capacity, net in self.task.nets.items():
            if not any(math.prod(shape) and self.is_trained(name, 0) for name, shape in net.layout.shapes.items()):
                raise ConfigError(
                    f"clients.capacities: given {capacity:g}, which is rank 0 of {self.rank}, and a frozen head; "
                    f"allowed with model.head: frozen: at least {1 / self.rank:.3g}"
                )

    def submodel(self, state: State, round: int, capacity: float) -> Slice:
        """What a device of this capacity holds after so many rounds: the first components of every adapter."""
        return prefix(self.task.server, self.task.nets[capacity])

    def select(self, state: State, client: Client) -> Selection:
        return self.submodel(state, client.round, client.capacity)

    def extract(self, state: State, selection: Selection) -> Payload:
        return {"params": self.part(state, selection)}

    def part(self, state: State, selection: Selection) -> Params:
        """The parameters of a network, as it starts or runs with them."""
        return selection.take(state["params"])

    # how it trains

    def trains(self, round: int) -> tuple[Part, ...]:
        """The parts of an adapter that clients train in a round, and send; beside them the head."""
        return ("A", "B")

    def changed(self, round: int) -> tuple[Part, ...]:
        """The parts of an adapter that the round before has changed, and that therefore go down."""
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
        """The client's parameters after its steps, which share its network's memory, and metrics. What the round does
        not train gets no gradient. `training`, `adjust` and `project` as for `fit`."""
        module = cached_module(visit.net, visit.data.device)
        load(module, params)
        with at_rest(p for name, p in parameters_of(module).items() if not self.is_trained(name, visit.round)):
            metrics = self.fit(module, visit, training=training, adjust=adjust, project=project)
        return params_of(module), metrics

    def answer(
        self,
        trained: Params,
        payload: Payload,
        visit: Visit,
        metrics: dict[str, float],
        *,
        weight: float | None = None,
        factors: bool = True,
        products: Literal["none", "whole", "segments"] = "none",
    ) -> Update:
        """What was trained, weighted by `weight`, the client's own unless given: the head, with `factors` the parts of
        the adapters, and `products` of every layer: w_k P_k whole, or in the segments that a mean over the holders of a
        component wants."""
        weight = self.weight_of(visit.data) if weight is None else weight
        mine = {name: t for name, t in trained.items() if self.is_trained(name, visit.round)}
        sums = copied({name: t for name, t in mine.items() if factors or not part_of(name)}, weight)
        metrics["bytes_up"] = nbytes(mine)
        metrics["bytes_down"] = self.down(payload, visit.round)
        update = Update({"params": sums}, weight, metrics=metrics)
        if products == "whole":
            update.products = self.products(trained, visit.net, weight)
        elif products == "segments":
            for path, product in self.products(trained, visit.net, weight).items():
                for segment, held in self.segments(path, rank_of(visit.net, path)).items():
                    update.products[segment] = Factors(product.left[:, held], product.right[held])  # type: ignore
            update.whole["holders"] = {segment: torch.tensor(weight) for segment in update.products}
        return update

    def down(self, payload: Payload, round: int) -> int:
        """Bytes that a client is sent: what has changed, and in place of what is merged the smaller of the factors that
        the last round merged and of their product."""
        parts = ("", *self.changed(round))
        sent = nbytes({name: t for name, t in payload["params"].items() if part_of(name) in parts})
        for path, rank in payload.get("merged", {}).items():
            product = payload["params"][f"{path}.lora.W"]
            sent += product.element_size() * min(int(rank) * sum(product.shape), product.numel())
        return sent

    def products(self, trained: Params, net: Net, weight: float) -> dict[str, Factors]:
        """w_k P_k of every layer of a network with some rank, as factors. The weight is on one of them alone."""
        found = {}
        for path in self.layers:
            if rank := rank_of(net, path):
                b, a = trained[f"{path}.lora.B"], trained[f"{path}.lora.A"]
                found[path] = Factors(b.to("cpu", copy=True), a.cpu() * (weight * self.scale(rank)))
        return found

    # how it is put together

    def step(self, state: State, round: int, fold: Fold) -> State:
        return state | {"params": fold.mean("params", over=self.over)}

    def mean_products(self, fold: Fold) -> dict[str, Factors]:
        """P* of every layer of which somebody sent a product, in float64."""
        return {path: mean(total, fold.weight) for path, total in fold.products.items()}

    def mean_segments(self, fold: Fold) -> dict[str, Factors]:
        """The sum of P* over the segments of every layer, each the mean over those who hold it, in float64. What nobody
        of the cohort holds is as the server has it; {} if nobody holds anything."""
        found, holders, params = {}, fold.sum("holders"), fold.state["params"]
        for path in self.layers if fold.products else ():
            parts = []
            for segment, held in self.segments(path, self.rank).items():
                if (total := fold.products.get(segment)) is not None:
                    parts.append(mean(total, float(holders[segment])))
                else:
                    b, a = params[f"{path}.lora.B"][:, held], params[f"{path}.lora.A"][held]
                    parts.append(mean(Factors(b * self.scale(self.rank), a), 1.0))
            found[path] = functools.reduce(operator.add, parts)
        return found

    def segments(self, path: str, rank: int) -> dict[str, slice]:
        """The components of a layer between one rank of the population and the next, up to a rank."""
        ends = sorted({0, *(rank_of(net, path) for net in self.task.nets.values())})
        pairs = zip(ends, ends[1:], strict=False)
        return {f"{path} {low}": slice(low, high) for low, high in pairs if high <= rank}

    # what a device runs

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        selection = self.submodel(state, round, capacity)
        return Deployment(selection.key, selection.net, self.part(state, selection))

    # tools

    @property
    def layers(self) -> tuple[str, ...]:
        """The paths of the layers that have adapters."""
        return tuple(name.removesuffix(".lora.A") for name in self.task.server.layout.shapes if part_of(name) == "A")

    @property
    def rank(self) -> int:
        """R."""
        return max(rank_of(self.task.server, path) for path in self.layers)

    def scale(self, rank: int) -> float:
        """s of a client with this rank."""
        model = self.task.model
        assert isinstance(model, Lora)
        return model.scale(rank)

    def is_trained(self, name: str, round: int) -> bool:
        return part_of(name) in ("", *self.trains(round))


# names


def part_of(name: str) -> Part | Literal[""]:
    """Which part of an adapter a parameter is; "": none."""
    path, _, part = name.rpartition(".")
    return part if path.endswith(".lora") else ""  # pyright: ignore[reportReturnType]


def rank_of(net: Net, path: str) -> int:
    """Of a layer's adapter in a network."""
    shape = net.layout.shapes.get(f"{path}.lora.A")
    return shape[0] if shape else 0


# networks


def adapters(task: Task, **options: bool) -> Mapping[float, Net]:
    """The networks of a task with other options of their model, `merged=True` or `core=True`. A ConfigError if it has
    no adapters."""
    if not isinstance(task.model, Lora):
        raise ConfigError(
            f"model: given {task.model.name}, which has no adapters; allowed with a low-rank method: "
            "{name: lora, base: {name: ...}, targets: [...]}"
        )
    if not options:
        return task.nets
    model = task.model.model_copy(update=options)
    return {capacity: replace(net, model=model) for capacity, net in task.nets.items()}


@contextmanager
def at_rest(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """These parameters get no gradient inside. Networks are shared by all methods of a process."""
    still = list(parameters)
    for parameter in still:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in still:
            parameter.requires_grad_(True)


# products


def mean(total: Factors, weight: float) -> Factors:
    """total / weight, in float64."""
    return Factors(total.left.double() / weight, None if total.right is None else total.right.double())


def rank_sent(product: Factors) -> torch.Tensor:
    """The rank [] that a product of a round is sent with; of a matrix, which nothing smaller replaces, its own."""
    return torch.tensor(min(product.left.shape) if product.right is None else product.left.shape[1])


def decomposed(method: LowRank, params: Params, products: Mapping[str, Factors]) -> Params:
    """The parameters with the best factors of these products, by layer: all singular values on B, and A orthonormal
    (FlexLoRA)."""
    found = dict(params)
    for path, product in products.items():
        a, b = f"{path}.lora.A", f"{path}.lora.B"
        directions = lowrank.svd(product.left, product.right)
        found[b], found[a] = lowrank.refactored(directions, params[a], method.scale(method.rank))
    return found


def rescaled(method: LowRank, params: Params, net: Net) -> Params:
    """The first singular directions of the server's products, in a network whose s may be another one: B makes up for
    that."""
    found = dict(params)
    for path in method.layers:
        factor = method.scale(method.rank) / method.scale(rank_of(net, path))
        if factor != 1:
            found[f"{path}.lora.B"] = params[f"{path}.lora.B"] * factor
    return found


# adapters that start anew, and what is merged of them


def fresh(net: Net, seed: int) -> Params:
    """New adapters: A uniform within 1 / sqrt(in), as a network is initialised, and B = 0."""
    found = {}
    for name, shape in net.layout.shapes.items():
        if part_of(name) == "A":
            drawn = torch.rand(shape, generator=torch_generator(seed, "adapters", name))
            found[name] = (2 * drawn - 1) / math.sqrt(shape[1])
        elif part_of(name) == "B":
            found[name] = torch.zeros(shape)
    return found


def merged(params: Params, added: Mapping[str, torch.Tensor]) -> Params:
    """The parameters with so much, [out, in] a layer, merged into the base."""
    names = {path: f"{path}.lora.W" for path in added}
    return params | {names[path]: params[names[path]] + t.to(params[names[path]].dtype) for path, t in added.items()}
