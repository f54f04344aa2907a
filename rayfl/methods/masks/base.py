"""Base of the methods whose clients hold the largest elements of the global parameters.

The defaults are Pruning-greedy's: a client trains the elements that reach a threshold, and the server averages each
element over its holders. A method overrides what differs.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self, cast

import numpy as np
import torch
from pydantic import model_validator
from torch import nn

from rayfl import costs
from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.fold import ClientState, State, Update
from rayfl.core.joined import call
from rayfl.core.net import Net, cached_module, in_training, stands_for
from rayfl.core.submodel import Mask, Selection
from rayfl.core.tensors import Lazy, Params, copied, split_as
from rayfl.methods.base import Client, Deployment, Method, Payload, Task, Visit
from rayfl.methods.masks.thresholds import Maskable, Shards, Threshold, groups, threshold_for, unit_costs


class Masked(Method):
    """Base class of masked methods.

    A client holds the elements of weights and biases of convolutions and linear layers that reach a threshold, and all
    other parameters (norms, positions) whole. Elements equal to the threshold are held, so ties can exceed a capacity's
    share (`threshold_for`)."""

    threshold: Threshold = "model"
    """Scope of a threshold: all maskable elements, each layer (weight and bias), or each shard."""
    shards: Shards = ()
    """Shards of `threshold: shard`: lists of module paths, each including everything below it. Together they name every
    maskable layer once. Default: the model's stages, the layers before them, and the layers after them."""
    embeddings: bool = False
    """Mask embeddings too."""
    whole: tuple[str, ...] = ()
    """Module paths that are never masked, including everything below them."""

    @model_validator(mode="after")
    def _shards_with_shard(self) -> Self:
        if self.shards and self.threshold != "shard":
            raise ValueError("shards requires threshold: shard")
        return self

    # selection

    def sizes(self, task: Task) -> Mapping[float, Net]:
        """Return the server's network for every capacity: devices run it in part."""
        return dict.fromkeys(task.nets, task.server)

    def check(self, rounds: int, clients: Population) -> None:
        """Raise a ConfigError if the shards do not fit the model, or if a capacity does not buy one element."""
        server = self.task.server
        shapes, names = server.layout.shapes, [*itertools.chain(*self.groups)]
        if not names:
            raise ConfigError(
                f"method: no layer of model {server.model.name} outside of method.whole {[*self.whole]} can be masked. "
                "Allowed: at least one"
            )
        units = self.units or dict.fromkeys(names, 1)
        least = max(units.values()) / sum(units[name] * math.prod(shapes[name]) for name in names)
        for capacity in self.task.nets:
            if self.budget(capacity) < least:
                raise ConfigError(
                    f"clients.capacities: {capacity:g} by {self.task.metric} does not buy one element of model "
                    f"{server.model.name}. Allowed with method {self.name}: at least {least:.3g}"
                )

    @property
    def synchronous(self) -> str:
        return ""

    @property
    def groups(self) -> Sequence[tuple[str, ...]]:
        """Names of the maskable tensors, grouped by threshold."""
        return groups(self.task.server, self.threshold, self.shards, Maskable(self.embeddings, self.whole))

    @property
    def units(self) -> dict[str, int] | None:
        """Cost of one element of each maskable tensor. None: 1 each."""
        return unit_costs(self.task.server) if self.task.metric == "flops" else None

    def budget(self, capacity: float) -> float:
        """Return the share of every group that a capacity buys: of its multiply-adds if the task's metric is `flops`,
        otherwise of its elements. By width: the dense network's parameters at this width over the server's."""
        model, server, metric = self.task.model, self.task.server, self.task.metric
        if metric == "width":
            return Net(model, capacity).parameters / server.parameters
        cost = costs.cost_of(metric)
        return capacity * (cost(Net(model)) / cost(server))

    def thresholds(self, params: Params, capacity: float) -> Params:
        """Return the threshold [] of each maskable parameter at a capacity, by name."""
        share, units = self.budget(capacity), self.units
        found: Params = {}
        for names in self.groups:
            theta = threshold_for({name: params[name] for name in names}, share, units)
            found |= {name: torch.tensor(theta) for name in names}
        return found

    def submodel(self, state: State, round: int, capacity: float) -> Mask:
        """Return the mask of a device of this capacity, which need not be the capacity of any client."""
        net, params = self.task.server, state["params"]
        if self.budget(capacity) >= 1:
            return Mask(net, "whole", {})
        names = itertools.chain(*self.groups)
        return Mask(net, (round, capacity), Largest(params, names, lambda: self.thresholds(params, capacity)))

    def select(self, state: State, client: Client) -> Selection:
        return self.submodel(state, client.round, client.capacity)

    def extract(self, state: State, selection: Selection) -> Payload:
        return {"params": selection.take(state["params"])}

    # training

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        part = self.part(payload, visit)
        return self.answer(part, visit, self.fit(part, visit))

    def part(self, payload: Payload, visit: Visit) -> "Part":
        """Return the client's held elements as a trainable module. All clients of the selection use it, one after
        another: use it only until the client answers."""
        module, mask = in_training(cached_module(visit.net, visit.data.device)), cast(Mask, visit.selection)
        if not _last or _last[0].mask is not mask or _last[0].module is not module:
            _last[:] = [self.new_part(module, mask, payload)]
        return _last[0].start(payload["params"])

    def new_part(self, module: nn.Module, mask: Mask, payload: Payload) -> "Part":
        """Return the module of a selection's clients."""
        return Part(module, mask, payload)

    def answer(self, part: "Part", visit: Visit, metrics: dict[str, float]) -> Update:
        """Return the client's weighted elements.

        Masks are nested, so exactly the clients that hold everything hold the least covered element: `full_clients` of
        a round is the minimum coverage index (Pruning-greedy).
        """
        weight, samples = self.weight_of(visit.data), int(metrics["train_samples"])
        metrics["train_flops"] = costs.training_flops(visit.net, samples, part.densities)
        metrics["full_clients"] = int(all(map(visit.selection.covers, part.mask.places)))
        return Update({"params": copied(part.params, weight)}, weight, metrics=metrics)

    # deployment

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        mask, params = self.submodel(state, round, capacity), state["params"]
        masked = {name: torch.zeros_like(params[name]) for name in mask.places}
        mask.put(mask.take({name: params[name] for name in masked}), masked)
        return Deployment(mask.key, mask.net, params | masked, masked=tuple(masked))


class Largest(Lazy):
    """Positions where |x| >= threshold: name -> [k] int64 in the flattened tensor, ascending. Thresholds too are
    computed once, on first use."""

    def __init__(self, params: Params, names: Iterable[str], thresholds: Callable[[], Params]):
        super().__init__(names, lambda name: _at_least(params[name], self.thresholds[name]))
        self._thresholds = thresholds

    @functools.cached_property
    def thresholds(self) -> Params:
        """Threshold [] of each tensor, by name."""
        return self._thresholds()


PIECE = 1 << 15
"""Elements compared at once, so that they stay in the CPU cache."""


def _at_least(t: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    # numpy is much faster than torch here, and pieces make it three times faster again
    x, level = t.reshape(-1).numpy(), theta.item()
    found, magnitudes = np.empty(len(x), bool), np.empty(PIECE, np.float32)
    for start in range(0, len(x), PIECE):
        piece = x[start : start + PIECE]
        np.greater_equal(np.abs(piece, out=magnitudes[: len(piece)]), level, out=found[start : start + PIECE])
    return torch.from_numpy(np.flatnonzero(found))


class Part(nn.Module):
    """Network with only the client's held elements: [B, ...] -> logits. Its only parameter is the vector [k] of these
    elements, tensor by tensor; all others are and stay 0."""

    def __init__(self, module: nn.Module, mask: Mask, payload: Payload):
        """Build on a `cached_module`, whose own parameter values are not used, for clients with such a payload."""
        super().__init__()
        self.mask, self.held = mask, payload["params"]
        # not a submodule, whose own parameters would be trained
        self.run = functools.partial(call, module)
        self.blank = [t.detach() for t in module.parameters()]
        ends = itertools.accumulate((t.numel() for t in self.blank), initial=0)
        starts = dict(zip(mask.net.layout.shapes, ends, strict=False))
        self.places = torch.cat([start + self._places(name) for name, start in starts.items()]).to(self.blank[0].device)
        self.zeros = self.blank[0].new_zeros(sum(t.numel() for t in self.blank) if mask.places else 0)
        self.vector = nn.Parameter(self.zeros.new_empty(len(self.places)))
        stands_for(self, mask.net)

    @property
    def module(self) -> nn.Module:
        """The network."""
        return self.run.args[0]

    def _places(self, name: str) -> torch.Tensor:
        return self.mask.places[name] if name in self.mask.places else torch.arange(self.held[name].numel())

    @torch.no_grad()
    def start(self, held: Params) -> Self:
        """Start a client with these elements."""
        self.vector.copy_(torch.cat([held[name].reshape(-1) for name in self.mask.net.layout.shapes]))
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run_with(self.vector, x)

    def run_with(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the logits with `vector` [k] in place of the parameter."""
        if self.mask.places:
            vector = self.zeros.index_copy(0, self.places, vector)
        return self.run(dict(zip(self.mask.net.layout.shapes, split_as(vector, self.blank), strict=True)), x)

    @property
    def params(self) -> Params:
        """Held elements, detached; they share the parameter's memory."""
        return self.by_name(self.vector.detach())

    def by_name(self, vector: torch.Tensor) -> Params:
        """Return views of a vector [k] in the shapes of the received tensors, by name."""
        names = list(self.mask.net.layout.shapes)
        return dict(zip(names, split_as(vector, [self.held[name] for name in names]), strict=True))

    @property
    def densities(self) -> dict[str, float]:
        """Held share of the weight of each masked layer, by path."""
        weights = {name: len(t) for name, t in self.mask.places.items() if name.endswith(".weight")}
        shapes = self.mask.net.layout.shapes
        return {name.removesuffix(".weight"): n / math.prod(shapes[name]) for name, n in weights.items()}


_last: list[Part] = []
"""The part that clients of this process trained last."""
