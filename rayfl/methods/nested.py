"""What the methods share whose submodels are cut in width and in depth: which channels and which residual blocks a
device of every capacity has, and how its tensors of its own travel.

A submodel keeps the first ceil(r K) of the K positions of every axis, and the residual branches that its bits say; of
a block that is left out the skip stays, with its projection.
"""

import functools
import itertools
import math
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from rayfl import costs
from rayfl.axes import Net
from rayfl.config import Config, ConfigError, load_yaml
from rayfl.methods.base import State, Task
from rayfl.methods.width import GroupedMethod
from rayfl.models.base import Model, layout_of_all
from rayfl.population import label
from rayfl.submodel import Selection, prefix
from rayfl.tensors import Params

Variant = Literal["W", "D", "WD"]
"""What a submodel is cut in: its width, its depth, or both."""

NEAR = 0.05
"""How far a population's capacity may be from a published submodel's."""


class Submodel(Config):
    """The network of one capacity."""

    capacity: float = Field(gt=0, le=1)
    """One of the population's."""
    width: float | str = "auto"
    """Channel ratio in (0, 1]; "sqrt(0.2)": that of a share of the parameters; or auto: the largest at which the
    submodel, with its blocks, costs no more than its capacity, where capacities are widths the capacity itself."""
    blocks: str = "all"
    """A bit for every residual block and a group for every stage, e.g. "11 00 11 10" or [[1, 1], [0, 0], [1, 1],
    [1, 0]]: 0 leaves the residual branch out; or all."""

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
            raise ValueError('bits, a group for every stage, in quotes: "11 00 11 10", or all')
        return value

    def without(self, model: Model) -> tuple[str, ...]:
        """The blocks that are left out, by module path."""
        if self.blocks == "all":
            return ()
        groups = self.blocks.split()
        sizes = [len(stage) for stage in model.blocks]
        where = f'method.submodels: given blocks "{self.blocks}" for capacity {label(self.capacity)}; allowed'
        if not sizes:
            raise ConfigError(f"{where}: all, for model {model.name} has no residual blocks to leave out")
        if len(groups) != len(sizes):
            raise ConfigError(f"{where}: {len(sizes)} groups, for model {model.name} has stages of {sizes} blocks")
        for s, (group, size) in enumerate(zip(groups, sizes, strict=True), start=1):
            if len(group) != size:
                raise ConfigError(f'{where}: {size} bits for stage {s} of model {model.name}, not "{group}"')
        kept = zip("".join(groups), itertools.chain(*model.blocks), strict=True)
        return tuple(path for bit, path in kept if bit == "0")


class NestedMethod(GroupedMethod):
    """Submodels of every width and depth, the largest of which contains all others. A subclass says what networks have
    for themselves, by `group`."""

    submodels: Literal["auto", "published"] | tuple[Submodel, ...] = "auto"
    """The network of every capacity: cut to what it costs by `clients.metric`; those of NeFL's paper, in the order of
    the capacities; or a list of {capacity, width, blocks}."""

    @property
    @abstractmethod
    def variants(self) -> tuple[str, ...]:
        """The names of its published submodels, the preferred first. The last, W, D or WD, is how `auto` cuts."""

    @property
    @abstractmethod
    def has_steps(self) -> bool:
        """Whether every residual branch has a step size."""

    @abstractmethod
    def groups(self, params: Params, statistics: Params) -> dict[str, Params]:
        """What networks have for themselves at first, by group, given what the server's network starts from."""

    def bind(self, task: Task) -> Self:
        steps = self.has_steps
        nets = {capacity: replace(net, steps=steps) for capacity, net in self._nets(task).items()}
        return super().bind(replace(task, nets=nets))

    def _nets(self, task: Task) -> Mapping[float, Net]:
        if self.submodels == "auto":
            variant = self.variants[-1]
            largest = automatic(task, task.server_capacity, variant, Net())
            rest = {c: automatic(task, c, variant, largest) for c in task.nets if c != task.server_capacity}
            return {c: rest.get(c, largest) for c in task.nets}
        if self.submodels == "published":
            submodels = published(task.model, self.variants, tuple(task.nets))
        else:
            submodels = {submodel.capacity: submodel for submodel in self.submodels}
            if len(submodels) < len(self.submodels) or submodels.keys() != task.nets.keys():
                raise ConfigError(
                    f"method.submodels: given capacities {_listed(s.capacity for s in self.submodels) or 'none'}; "
                    f"allowed: those of clients.capacities, each once: {_listed(task.nets)}"
                )
        nets = {capacity: _net(task, capacity, submodels[capacity]) for capacity in task.nets}
        largest = nets[task.server_capacity]
        for capacity, net in nets.items():
            if net.width > largest.width or not {*net.without} >= {*largest.without}:
                raise ConfigError(
                    f"method.submodels: given for capacity {label(capacity)} channels or blocks that the largest "
                    f"submodel, {label(task.server_capacity)}, does not have; allowed: a part of that"
                )
        return nets

    @property
    def nets(self) -> list[Net]:
        """Its networks, each once, largest capacity first."""
        return list(dict.fromkeys(map(self.net_at, self.task.nets)))

    def init(self, seed: int) -> State:
        params = super().init(seed)["params"]
        groups = self.groups(params, self.task.model.statistics(self.task.server))
        own = {name for tensors in groups.values() for name in tensors}
        return {"params": {name: t for name, t in params.items() if name not in own}} | groups


class UniformMethod(NestedMethod):
    """All submodels are averaged in one: the norms and their running statistics, along the norm's axis, as well.
    `evaluation.statistics` has no effect."""

    @property
    def has_steps(self) -> bool:
        return False

    def group(self, net: Net) -> str:
        return "statistics"

    def groups(self, params: Params, statistics: Params) -> dict[str, Params]:
        return {"statistics": statistics} if statistics else {}

    def place(self, net: Net) -> Selection:
        return _place(self.task.model, self.task.server, net)


@functools.lru_cache(maxsize=256)
def _place(model: Model, server: Net, net: Net) -> Selection:
    """Where a network's running statistics are in the server's: found once, for folding asks with every answer."""
    return prefix(layout_of_all(model, server), layout_of_all(model, net), net)


def automatic(task: Task, capacity: float, variant: str, within: Net) -> Net:
    """The network of a capacity, with blocks that `within` has. W: the widest. D: at full width the first blocks of
    every stage that spend it best. WD: the first blocks of every stage, the stages in balance, that it can carry at
    the width of the capacity's root; then the largest width."""
    if variant == "W" or capacity == 1:
        return task.nets[capacity]
    if task.metric == "width":
        raise ConfigError(
            "clients.metric: given width, of which a block is no share; allowed: params or flops, where "
            f"method.submodels is auto and cuts in depth ({variant})"
        )
    if not task.model.blocks:
        raise ConfigError(
            f"model: given {task.model.name}, which has no residual blocks to leave out; allowed: one that has, where "
            f"method.submodels cuts in depth ({variant})"
        )
    if variant == "D":
        return costs.depth_for(task.model, capacity, task.metric, 1.0, within)
    root = costs.width_for(task.model, math.sqrt(capacity), task.metric)
    net = costs.depth_for(task.model, capacity, task.metric, root, within, slack=1.0)
    width = costs.width_for(task.model, capacity, task.metric, net)
    return replace(net, width=min(width, within.width))


def published(model: Model, variants: tuple[str, ...], capacities: tuple[float, ...]) -> dict[float, Submodel]:
    """NeFL's submodels of a model: capacity -> submodel, the smallest capacity having the smallest one.

    Of the first of `variants` that has as many of about these capacities, each within `NEAR`; else a ConfigError.
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
        f"method.submodels: given published, {' or '.join(variants)} of model {model.name} at clients.capacities "
        f"{_listed(capacities)}; published: {allowed}; or list the submodels, or auto"
    )


@functools.cache
def _tables() -> dict[str, dict[str, tuple[Submodel, ...]]]:
    given = load_yaml(Path(__file__).with_name("nefl_submodels.yaml"))
    return {
        model: {variant: tuple(Submodel(**row) for row in rows) for variant, rows in variants.items()}
        for model, variants in given.items()
    }


def _net(task: Task, capacity: float, submodel: Submodel) -> Net:
    net = Net(without=submodel.without(task.model))
    if submodel.width == "auto":
        return replace(net, width=costs.width_for(task.model, capacity, task.metric, net))
    return replace(net, width=_ratio(submodel.width))


def _ratio(width: float | str) -> float:
    """A channel ratio, 0 if it is none."""
    if not isinstance(width, str):
        return width
    share = re.fullmatch(r"sqrt\((\d*\.?\d+)\)", width)
    return math.sqrt(float(share[1])) if share else 0.0


def _listed(capacities: Iterable[float]) -> str:
    return ", ".join(map(label, capacities))
