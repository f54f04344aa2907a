"""What the methods share whose clients hold the largest elements of the global parameters."""

import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import nn
from torch.func import functional_call

from rayfl import costs
from rayfl.axes import Net
from rayfl.coding import decode_places, encode_places
from rayfl.config import ConfigError
from rayfl.methods.base import Client, Deployment, Payload, State, Task, Update
from rayfl.methods.local import LocalMethod
from rayfl.models.base import Model, layers_of, layout, params_of, resident
from rayfl.submodel import Mask, Selection
from rayfl.tensors import Params
from rayfl.training import ClientData, weighted


class MagnitudeMethod(LocalMethod):
    """A client holds the elements of convolutions' and linear layers' weights and biases that reach a threshold, and
    all other parameters (norms, positions) whole. Elements that equal it are in, so that many equal ones may be more
    than a capacity's share (`threshold_for`). The mean is over holders. A subclass says how a client trains.
    """

    threshold: Literal["model", "layer", "shard"] = "model"
    """What one threshold is of: all maskable elements, a layer's (weight and bias), or a shard's."""
    shards: tuple[tuple[str, ...], ...] = ()
    """With `threshold: shard`: lists of module paths, each with all that is below them; together they name every
    maskable layer once. Unless given: the model's stages, what stands before them, and what behind."""

    @model_validator(mode="after")
    def _shards_with_shard(self) -> Self:
        if self.shards and self.threshold != "shard":
            raise ValueError("shards with threshold: shard only")
        return self

    def bind(self, task: Task) -> Self:
        """Every capacity's network is the server's, in part. ConfigError if the shards do not fit the model, or if a
        capacity does not buy one element."""
        bound = super().bind(task.everywhere(task.server))
        names = itertools.chain(*groups(task.model, task.server, self.threshold, self.shards))
        units = bound.units or dict.fromkeys(names, 1)
        shapes = task.layout(task.server).shapes
        least = max(units.values()) / sum(unit * math.prod(shapes[name]) for name, unit in units.items())
        for capacity in task.nets:
            if bound.budget(capacity) < least:
                raise ConfigError(
                    f"clients.capacities: given {capacity:g} by {task.metric}; allowed with method {self.name}: "
                    f"what buys an element of model {task.model.name}, {least:.3g} of it"
                )
        return bound

    def thresholds(self, params: Params, capacity: float) -> Params:
        """Name of a maskable parameter -> the threshold [] of a capacity."""
        model, net, share, units = self.task.model, self.task.server, self.budget(capacity), self.units
        found: Params = {}
        for names in groups(model, net, self.threshold, self.shards):
            of_names = [units[name] for name in names] if units else None
            theta = threshold_for([params[name] for name in names], share, of_names)
            found |= {name: torch.tensor(theta) for name in names}
        return found

    @property
    def units(self) -> dict[str, int] | None:
        """What an element of each maskable tensor costs, where that is not 1."""
        return unit_costs(self.task.model, self.task.server) if self.task.metric == "flops" else None

    def budget(self, capacity: float) -> float:
        """The share of every group that a capacity buys: of its multiply-adds if they are the task's metric, else of
        its elements. By width it is the share of the server's parameters that the dense network of this width has."""
        model, server, metric = self.task.model, self.task.server, self.task.metric
        if metric == "width":
            return costs.parameters(model, Net(capacity)) / costs.parameters(model, server)
        cost = costs.cost_of(metric)
        return capacity * (cost(model, costs.WHOLE) / cost(model, server))

    def window(self, state: State, round: int, capacity: float) -> Mask:
        """What a device of this capacity holds, whether or not the task has it."""
        net, params = self.task.server, state["params"]
        if self.budget(capacity) >= 1:
            return Mask(net, "whole", {})
        names = itertools.chain(*layers_of(self.task.model, net).values())
        return Mask(net, (round, capacity), AtLeast(params, names, lambda: self.thresholds(params, capacity)))

    def select(self, state: State, round: int, client: Client, seed: int) -> Selection:
        return self.window(state, round, client.capacity)

    def extract(self, state: State, selection: Selection) -> Payload:
        assert isinstance(selection, Mask)
        payload: Payload = {"params": selection.take(state["params"])}
        if names := list(selection.masks):
            sizes = {name: state["params"][name].numel() for name in names}
            payload["places"] = {name: encode_places(selection.places(name), sizes[name]) for name in names}
        return payload

    def local_update(
        self, payload: Payload, selection: Selection, client: Client, data: ClientData, round: int, seed: int
    ) -> Update:
        if "places" not in payload:
            net = self.network(payload["params"], selection.net, data)
            return self.answer(params_of(net), payload, self.train(net, data, round, seed), data)
        shapes = self.task.layout(selection.net).shapes
        net = resident(self.task.model, selection.net, data.device).train()
        part = Part(net, payload["params"], payload["places"], shapes)
        metrics = self.train_part(part, payload, data, round, seed)
        layers = layers_of(self.task.model, selection.net)
        densities = {p: part.values[f"{p}.weight"].numel() / math.prod(shapes[f"{p}.weight"]) for p in layers}
        samples = int(metrics["train_samples"])
        metrics["train_flops"] = costs.training_flops(self.task.model, selection.net, samples, densities)
        return self.answer(part.params, payload, metrics, data)

    @abstractmethod
    def train_part(self, part: "Part", payload: Payload, data: ClientData, round: int, seed: int) -> dict[str, float]:
        """Trains what a client holds, in place; the metrics of `fit`."""

    def answer(self, params: Params, payload: Payload, metrics: dict[str, float], data: ClientData) -> Update:
        """The trained parameters, weighted, as what the server gets.

        Masks are nested: an element that fewest clients hold is held by those that hold everything, which sum up to
        `coverage_min`."""
        weight, shapes = self.weight_of(data), self.task.layout(self.task.server).shapes
        metrics["coverage_min"] = float(all(t.numel() == math.prod(shapes[name]) for name, t in params.items()))
        return Update({"params": weighted(params, weight)}, weight, metrics=metrics)

    def deploy(self, state: State, round: int, capacity: float, client: Client | None = None) -> Deployment:
        mask = self.window(state, round, capacity)
        params = state["params"] | {name: state["params"][name] * held for name, held in mask.masks.items()}
        return Deployment(mask.key, self.task.model, mask.net, params, masked=tuple(mask.masks))


class AtLeast(Mapping[str, torch.Tensor]):
    """Name -> |x| >= threshold, bool in the shape of x, found when it is asked for. It travels as nothing: clients are
    sent the places."""

    def __init__(self, params: Params, names: Iterable[str], thresholds: Callable[[], Params]):
        self.names = dict.fromkeys(names)
        self._thresholds = thresholds
        self._find = functools.cache(lambda name: params[name].abs() >= self.thresholds[name])

    @functools.cached_property
    def thresholds(self) -> Params:
        """Name -> its threshold []."""
        return self._thresholds()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._find(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __reduce__(self):
        return dict, ()


class Part(nn.Module):
    """A network of which a client holds only some elements: [B, ...] -> logits. Its parameters are what is held, a
    vector [k] of a masked tensor; everything else is 0 and stays 0."""

    def __init__(self, net: nn.Module, held: Params, places: Params, shapes: Mapping[str, tuple[int, ...]]):
        """`net` runs it: its own parameters mean nothing. `places`: the code of every masked tensor's."""
        super().__init__()
        device = next(net.parameters()).device
        self.shapes = shapes
        self.places = {n: decode_places(code, math.prod(shapes[n])).to(device) for n, code in places.items()}
        self.values = {name: nn.Parameter(t.to(device, copy=True)) for name, t in held.items()}
        self.trained = nn.ParameterList(self.values.values())
        # no submodule, whose parameters would be trained
        self.run = functools.partial(functional_call, net)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run_with({}, x)

    def run_with(self, changed: Params, x: torch.Tensor) -> torch.Tensor:
        """The logits, with `changed` in place of some of its parameters."""
        return self.run({name: self._whole(name, changed.get(name, t)) for name, t in self.values.items()}, (x,))

    def _whole(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if name not in self.places:
            return value
        shape = self.shapes[name]
        return value.new_zeros(math.prod(shape)).index_copy_(0, self.places[name], value).view(shape)

    @property
    def params(self) -> Params:
        """What is held, detached; it shares the parameters' memory."""
        return {name: t.detach() for name, t in self.values.items()}


# which elements are maskable, and what they cost


def unit_costs(model: Model, net: Net) -> dict[str, int]:
    """Multiply-adds of one sample's forward pass that an element of a maskable tensor takes part in: a convolution's
    weight in one a pixel, a bias in none."""
    shapes, macs = layout(model, net).shapes, costs.layer_macs(model, net)
    units = {}
    for path, names in layers_of(model, net).items():
        units |= dict.fromkeys(names, 0)
        units[f"{path}.weight"] = macs.get(path, 0) // math.prod(shapes[f"{path}.weight"])
    return units


@functools.lru_cache(maxsize=256)
def groups(
    model: Model, net: Net, threshold: Literal["model", "layer", "shard"], shards: tuple[tuple[str, ...], ...] = ()
) -> Sequence[tuple[str, ...]]:
    """The names of the maskable tensors that have a threshold in common, group by group, in the network's order."""
    layers = layers_of(model, net)
    if threshold == "layer":
        return list(layers.values())
    if threshold == "model":
        return [tuple(itertools.chain(*layers.values()))]
    found: dict[int, tuple[str, ...]] = {}
    place = _declared(shards, layers) if shards else _stages(model, layers)
    for path, names in layers.items():
        found[place[path]] = found.get(place[path], ()) + names
    return list(found.values())


def _stages(model: Model, layers: Collection[str]) -> dict[str, int]:
    """Layer -> its stage, counted from 1; 0: it stands before them; one more than there are: behind."""
    if not model.blocks:
        raise ConfigError(
            f"method.threshold: given 'shard' with model {model.name}, which has no stages; allowed: method.shards, "
            f"lists of its layers: {', '.join(layers)}; or threshold: model or layer"
        )
    found, outside = {}, 0
    for path in layers:
        stage = next((s for s, blocks in enumerate(model.blocks, 1) if _is_below(path, blocks)), None)
        if stage is not None:
            outside = len(model.blocks) + 1
        found[path] = outside if stage is None else stage
    return found


def _declared(shards: Sequence[Sequence[str]], layers: Collection[str]) -> dict[str, int]:
    """Layer -> the only shard that names it."""
    for prefix in itertools.chain(*shards):
        if not any(_is_below(path, [prefix]) for path in layers):
            raise ConfigError(f"method.shards: {prefix!r} is no layer and above none; the layers: {', '.join(layers)}")
    found = {}
    for path in layers:
        within = [s for s, prefixes in enumerate(shards) if _is_below(path, prefixes)]
        if len(within) != 1:
            raise ConfigError(
                f"method.shards: layer {path!r} is in {len(within)} shards; allowed: every layer in one: "
                f"{', '.join(layers)}"
            )
        [found[path]] = within
    return found


def _is_below(path: str, prefixes: Collection[str]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


# thresholds


def threshold_for(tensors: Sequence[torch.Tensor], share: float, units: Sequence[int] | None = None) -> float:
    """The threshold theta >= 0 of a share of the largest elements, |x| >= theta, over all float32 `tensors`.

    Without `units`: the k-th largest |x|, k = max(1, floor(share d)) of d elements; equal ones are all in. So where
    more than 1 - share of them are exactly 0, theta is 0 and everything is in: it is held, sent and trained, though a
    deployment's densities count what is not 0.
    With `units`, what an element of each tensor costs: of all sets |x| >= theta the largest that costs at most
    share times everything, but at least the largest element, and whatever equals it.

    A group of zeros is all in, for every share.
    """
    if units is None:
        total = sum(t.numel() for t in tensors)
        return _number(_level(tensors, [1] * len(tensors), max(1, _floor(share * total)) - 1))
    total = sum(unit * t.numel() for unit, t in zip(units, tensors, strict=True))
    level = _level(tensors, units, _floor(share * total))
    top = max(max(-low, high) for low, high in (map(float, t.aminmax()) for t in tensors))
    return min(_number(level + 1), top)


def _floor(cost: float) -> int:
    """A share that was computed as a ratio of two counts buys exactly that count."""
    return math.floor(cost * (1 + 1e-9))


def _number(level: int) -> float:
    return float(torch.tensor(level, dtype=torch.int32).view(torch.float32))


HIGH, LOW = 1 << 15, 1 << 16


def _level(tensors: Sequence[torch.Tensor], units: Sequence[int], limit: int) -> int:
    """The largest level of which the elements at or above cost more than the limit; -1: none.

    A level is |x| as its bits, whose order is that of the numbers: counted by their high half first, over everything,
    then by their low half, over the few elements whose high half is the level's.
    """
    high = torch.zeros(HIGH, dtype=torch.int64)
    for t, unit in zip(tensors, units, strict=True):
        high += torch.bincount(_high_half(t), minlength=HIGH).mul_(unit)
    bucket, above = _crossing(high, limit)
    if bucket < 0:
        return -1
    low = torch.zeros(LOW, dtype=torch.int64)
    for t, unit in zip(tensors, units, strict=True):
        inside = torch.from_numpy(np.flatnonzero(_high_half(t).numpy() == bucket))
        values = t.reshape(-1).view(torch.int32).index_select(0, inside) & (LOW - 1)
        low += torch.bincount(values, minlength=LOW).mul_(unit)
    return bucket * LOW + _crossing(low, limit - above)[0]


def _high_half(t: torch.Tensor) -> torch.Tensor:
    """The high 16 of a float32's 32 bits, without its sign, in the memory of a little-endian machine."""
    return t.reshape(-1).view(torch.int16)[1::2] & (HIGH - 1)


def _crossing(cost: torch.Tensor, limit: int) -> tuple[int, int]:
    """The largest index whose cost and that of all above it is more than the limit, and the cost of those above it;
    (-1, 0) if there is none."""
    spent = cost.flip(0).cumsum(0)
    i = int(torch.searchsorted(spent, limit, right=True))
    return (len(cost) - 1 - i, int(spent[i - 1]) if i else 0) if i < len(cost) else (-1, 0)
