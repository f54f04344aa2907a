"""Functions that assign a network to every capacity, for `Method.sizes`.

`same`: one network for all devices. `by_exits`: networks that end at early exits. `nested`: submodels cut in width and
depth (NeFL), with their configuration section and the published tables.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field, PositiveInt, field_validator

from rayfl import costs
from rayfl.clients import Population
from rayfl.config import Config, ConfigError, load_yaml
from rayfl.core import operations
from rayfl.core.net import Net
from rayfl.methods.base import Task
from rayfl.metrics import label
from rayfl.models.base import Model

Size = Literal["largest", "smallest", "own"]


def same(task: Task, size: Size) -> Mapping[float, Net]:
    """Return one network for all devices, that of the largest capacity (including the server's) or of the smallest.
    own: every device has the network of its capacity."""
    if size == "own":
        return task.nets
    capacity = (max if size == "largest" else min)(task.nets)
    return dict.fromkeys(task.nets, task.nets[capacity])


def random_depth(net: Net, whole: Net, generator: np.random.Generator) -> Net:
    """Return the network with random blocks of `whole`, as many per stage as it has."""
    without = list(whole.without)
    for stage in net.model.blocks:
        present = [path for path in stage if path not in whole.without]
        count = sum(path in net.without for path in present)
        without += [present[i] for i in sorted(generator.choice(len(present), count, replace=False))]
    return replace(net, without=tuple(without))


def fixed_capacities(method: str, nets: Mapping[float, Net], clients: Population, otherwise: str) -> None:
    """Raise a ConfigError if networks differ and a client's capacity may change between rounds. For methods whose
    client state fits one network only. `otherwise`: the setting that would allow it."""
    if len(set(nets.values())) > 1 and clients.assignment != "fixed":
        raise ConfigError(
            f"clients.assignment: {clients.assignment!r} is not valid. Allowed: 'fixed', because the client state of "
            f"method {method} fits one network only; or {otherwise}"
        )


def rows_are_neurons(method: str, net: Net, paths: Iterable[str]) -> None:
    """Raise a ConfigError if one of these layers has no weight with one row per neuron, as in GPT-2 or under an
    adapter."""
    module = net.blank()
    for path in paths:
        if not isinstance(module.get_submodule(path), operations.LAYERS) or f"{path}.weight" not in net.layout.shapes:
            raise ConfigError(
                f"model: layer {path} of {net.model.name} has no weight with one row per neuron. Allowed with "
                f"method {method}: models of torch's convolutions and linear layers"
            )


def _ascending(exits: tuple[int, ...]) -> tuple[int, ...]:
    if list(exits) != sorted(exits):
        raise ValueError("ascending exits, because larger capacities include the exits of smaller ones")
    return exits


Exits = Annotated[tuple[PositiveInt, ...], AfterValidator(_ascending)]
"""Last exit of every capacity, smallest capacity first, counted from 1. Default: see `by_exits`."""


def by_exits(task: Task, exits: Exits) -> Mapping[float, Net]:
    """Return networks that end at one of the model's exits and have outputs there and at all earlier exits.

    Default for `exits`: 1, 2, ... if there are as many capacities as exits; the last exit for a single capacity. The
    head of a model without early exits is its only exit. Raise a ConfigError if exits and capacities do not match.
    """
    model, count, capacities = task.model, task.model.exit_count, sorted(task.nets)
    default = tuple(range(1, count + 1))[-len(capacities) :] if len(capacities) in (1, count) else ()
    last = exits or default
    if len(last) != len(capacities) or max(last) > count:
        if count == 1:
            raise ConfigError(
                f"model: {model.name} has no early exits. Allowed: a model with {len(capacities)} exits, one per "
                "capacity. Hint: set model.exits of a ResNet, or use a model such as depthfl_resnet18"
            )
        raise ConfigError(
            f"method.exits: {list(exits) or 'none'} is not valid. Allowed: {len(capacities)} exits from 1 to "
            f"{count}, the last exit of every capacity of model {model.name}, smallest capacity first"
        )
    ends = dict(zip(capacities, last, strict=True))
    return {capacity: Net(model, exits=ends[capacity] if count > 1 else 0) for capacity in task.nets}


Variant = Literal["W", "D", "WD"]
"""Dimensions in which submodels are cut: width, depth, or both."""

NEAR = 0.05
"""Largest difference between a population's capacity and a published submodel's."""


class Submodel(Config):
    """Network of one capacity: the first ceil(r K) of the K positions of every axis, and some of the residual blocks.
    The skip of an omitted block stays, with its projection."""

    capacity: float = Field(gt=0, le=1)
    """Capacity, one of `clients.capacities`."""
    width: float | str = "auto"
    """Channel ratio r in (0, 1]; or a root such as "sqrt(0.2)", for about 0.2 of the parameters; or auto: the largest
    ratio at which the submodel costs at most its capacity (the capacity itself if `clients.metric` is width)."""
    blocks: str = "all"
    """One bit per residual block, grouped by stage, e.g. "11 00 11 10" or [[1, 1], [0, 0], [1, 1], [1, 0]]; 0 omits the
    residual branch. all: no block is omitted."""

    @field_validator("width", mode="before")
    @classmethod
    def _ratio(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError('a number in (0, 1], the root of one, e.g. "sqrt(0.2)", or auto')
        if value != "auto" and not 0 < _ratio(value) <= 1:
            raise ValueError('a number in (0, 1], the root of one, e.g. "sqrt(0.2)", or auto')
        return value

    @field_validator("blocks", mode="before")
    @classmethod
    def _bits(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            groups = value if all(isinstance(group, list | tuple) for group in value) else [value]
            value = " ".join("".join(map(str, group)) for group in groups)
        if not isinstance(value, str) or (value != "all" and set(value) - set("01 ")):
            raise ValueError('all, or bits grouped by stage, in quotes: "11 00 11 10"')
        return value

    def without(self, model: Model) -> tuple[str, ...]:
        """Return the module paths of the omitted blocks."""
        if self.blocks == "all":
            return ()
        groups = self.blocks.split()
        sizes = [len(stage) for stage in model.blocks]
        place = f'method.submodels: blocks "{self.blocks}" of capacity {label(self.capacity)}'
        problem = f"{place} do not fit model {model.name}. Allowed"
        if not sizes:
            raise ConfigError(f"{problem}: all, because the model has no residual blocks")
        if len(groups) != len(sizes):
            raise ConfigError(f"{problem}: {len(sizes)} groups of bits, one per stage of {sizes} blocks")
        for s, (group, size) in enumerate(zip(groups, sizes, strict=True), start=1):
            if len(group) != size:
                raise ConfigError(f'{problem}: {size} bits for stage {s}, not "{group}"')
        bits = zip("".join(groups), itertools.chain(*model.blocks), strict=True)
        return tuple(path for bit, path in bits if bit == "0")


Submodels = Literal["auto", "published"] | tuple[Submodel, ...]
"""Submodels of all capacities: cut to cost by `clients.metric` (auto), from NeFL's paper (published), or listed."""


def nested(task: Task, submodels: Submodels, variants: Sequence[str], steps: bool = False) -> Mapping[float, Net]:
    """Return networks cut in width and depth, all of them parts of the server's network.

    `variants`: the names of a method's published submodels, preferred first; the last one, W, D or WD, is the cut of
    `auto`. `steps`: residual branches have step sizes. Raise a ConfigError if the submodels do not fit the capacities
    or the model.
    """
    if submodels == "auto":
        largest = automatic(task, task.server_capacity, variants[-1], Net(task.model))
        rest = {c: automatic(task, c, variants[-1], largest) for c in task.nets if c != task.server_capacity}
        nets = {c: rest.get(c, largest) for c in task.nets}
    else:
        if submodels == "published":
            chosen = published(task.model, variants, tuple(task.nets))
        else:
            chosen = _by_capacity(task, submodels)
        nets = {capacity: _net(task, capacity, chosen[capacity]) for capacity in task.nets}
        _check_nested(nets, task.server_capacity)
    return {capacity: replace(net, steps=steps) for capacity, net in nets.items()}


def automatic(task: Task, capacity: float, variant: str, within: Net) -> Net:
    """Return the largest network within a capacity, with blocks of `within` only.

    W: the widest. D: full width, with the first blocks of every stage that use the capacity best. WD: the first blocks
    of every stage, balanced over stages, within the capacity at the width of its root; then the largest width.
    """
    if variant == "W" or capacity == 1:
        return task.nets[capacity]
    if task.metric == "width":
        raise ConfigError(
            "clients.metric: width is not valid. Allowed: params or flops, because method.submodels is auto and cuts "
            f"in depth ({variant})"
        )
    if not task.model.blocks:
        raise ConfigError(
            f"model: {task.model.name} has no residual blocks. Allowed: a model with residual blocks, because "
            f"method.submodels cuts in depth ({variant})"
        )
    if variant == "D":
        return costs.depth_for(within, capacity, task.metric)
    root = costs.width_for(Net(task.model), math.sqrt(capacity), task.metric)
    net = costs.depth_for(within, capacity, task.metric, root, slack=1.0)
    return replace(net, width=min(costs.width_for(net, capacity, task.metric), within.width))


def published(model: Model, variants: Sequence[str], capacities: Sequence[float]) -> dict[float, Submodel]:
    """Return NeFL's submodels of a model: capacity -> submodel, in ascending order of both.

    Use the first of `variants` with as many submodels as there are capacities, each within `NEAR` of its capacity.
    Raise a ConfigError if there is none.
    """
    tables = _tables().get(model.name, {})
    ascending = sorted(capacities)
    for variant in variants:
        for name, rows in tables.items():
            if name.partition("-")[0] != variant or len(rows) != len(ascending):
                continue
            if all(abs(row.capacity - c) <= NEAR for row, c in zip(rows, ascending, strict=True)):
                return dict(zip(ascending, rows, strict=True))
    known = [f"{name} ({_listed(row.capacity for row in rows)})" for name, rows in tables.items()]
    allowed = "; ".join(known) or f"the models {', '.join(_tables())}"
    raise ConfigError(
        f"method.submodels: no published submodels {' or '.join(variants)} of model {model.name} for "
        f"clients.capacities {_listed(capacities)}. Allowed: {allowed}; or auto, or a list of submodels"
    )


@functools.cache
def _tables() -> dict[str, dict[str, tuple[Submodel, ...]]]:
    """Return model -> variant -> submodels, smallest first."""
    tables = load_yaml(Path(__file__).with_name("nefl_submodels.yaml"))
    return {
        model: {variant: tuple(Submodel(**row) for row in rows) for variant, rows in variants.items()}
        for model, variants in tables.items()
    }


def _by_capacity(task: Task, submodels: Sequence[Submodel]) -> dict[float, Submodel]:
    listed = [submodel.capacity for submodel in submodels]
    if sorted(listed) != sorted(task.nets):
        raise ConfigError(
            f"method.submodels: the capacities {_listed(listed) or '(none)'} do not match clients.capacities. "
            f"Allowed: {_listed(task.nets)}, each once"
        )
    return {submodel.capacity: submodel for submodel in submodels}


def _check_nested(nets: Mapping[float, Net], server_capacity: float) -> None:
    largest = nets[server_capacity]
    for capacity, net in nets.items():
        if net.width > largest.width or not {*net.without} >= {*largest.without}:
            raise ConfigError(
                f"method.submodels: the submodel of capacity {label(capacity)} has channels or blocks that the "
                f"largest, of capacity {label(server_capacity)}, lacks. Allowed: a part of the largest submodel"
            )


def _net(task: Task, capacity: float, submodel: Submodel) -> Net:
    net = Net(task.model, without=submodel.without(task.model))
    if submodel.width == "auto":
        return replace(net, width=costs.width_for(net, capacity, task.metric))
    return replace(net, width=_ratio(submodel.width))


def _ratio(width: float | str) -> float:
    """Return the channel ratio; 0 if the text is not valid."""
    if not isinstance(width, str):
        return width
    share = re.fullmatch(r"sqrt\((\d*\.?\d+)\)", width)
    return math.sqrt(float(share[1])) if share else 0.0


def _listed(capacities: Iterable[float]) -> str:
    return ", ".join(map(label, capacities))
