"""Which network does a capacity stand for: functions capacity -> Net, which a method names in its `sizes`.

`same`: one network for everybody. `by_exits`: the network ends at an early exit. `nested`: submodels are cut in width
and in depth (NeFL); their section of a configuration and the published ones are here too.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

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
    """One network for every device: that of the largest capacity (the server's own too), or that of the smallest.
    own: every device keeps the network of its capacity."""
    if size == "own":
        return task.nets
    capacity = (max if size == "largest" else min)(task.nets)
    return dict.fromkeys(task.nets, task.nets[capacity])


def fixed_capacities(method: str, nets: Mapping[float, Net], clients: Population, otherwise: str) -> None:
    """A ConfigError if networks differ and a client's capacity may change between rounds, for methods whose clients
    keep what fits one network. `otherwise`: the setting that would allow it."""
    if len(set(nets.values())) > 1 and clients.assignment != "fixed":
        raise ConfigError(
            f"clients.assignment: given {clients.assignment!r}; allowed: 'fixed', because with method {method} every "
            f"client keeps what fits one network; or {otherwise}"
        )


def rows_are_neurons(method: str, net: Net, paths: Iterable[str]) -> None:
    """A ConfigError if one of these layers has no weight of its own with a row a neuron: GPT-2's, or under an
    adapter."""
    module = net.blank()
    for path in paths:
        if not isinstance(module.get_submodule(path), operations.LAYERS) or f"{path}.weight" not in net.layout.shapes:
            raise ConfigError(
                f"model: given {net.model.name}, whose layer {path} has no weight with a row a neuron; allowed with "
                f"method {method}: a model of torch's convolutions and linear layers"
            )


# early exits


def _ascending(exits: tuple[int, ...]) -> tuple[int, ...]:
    if list(exits) != sorted(exits):
        raise ValueError("ascending exits, because a larger capacity has the exits of a smaller one too")
    return exits


Exits = Annotated[tuple[PositiveInt, ...], AfterValidator(_ascending)]
"""The last exit of every capacity, smallest capacity first, counted from 1; () leaves the choice to `by_exits`."""


def by_exits(task: Task, exits: Exits) -> Mapping[float, Net]:
    """The network of every capacity ends at one of the model's exits, and answers there and at all exits before it.

    Without `exits` the capacities end at 1, 2, ..., if the model has one for each; a single capacity ends at the last.
    A model without early exits has its head as the only exit. A ConfigError if exits and capacities do not fit.
    """
    model, count, capacities = task.model, task.model.exit_count, sorted(task.nets)
    default = tuple(range(1, count + 1))[-len(capacities) :] if len(capacities) in (1, count) else ()
    last = exits or default
    if len(last) != len(capacities) or max(last) > count:
        if count == 1:
            raise ConfigError(
                f"model: given {model.name}, which has no early exits; allowed: a model with {len(capacities)} exits, "
                "one for every capacity; set model.exits of a ResNet, or take a model such as depthfl_resnet18"
            )
        raise ConfigError(
            f"method.exits: given {list(exits) or 'none'}; allowed: {len(capacities)} exits from 1 to {count}, the "
            f"last of every capacity, smallest capacity first; model {model.name} answers at {count}"
        )
    ends = dict(zip(capacities, last, strict=True))
    return {capacity: Net(model, exits=ends[capacity] if count > 1 else 0) for capacity in task.nets}


# submodels


Variant = Literal["W", "D", "WD"]
"""What a submodel is cut in: its width, its depth, or both."""

NEAR = 0.05
"""How far a population's capacity may be from a published submodel's."""


class Submodel(Config):
    """The network of one capacity: the first ceil(r K) of the K positions of every axis, and some residual blocks. An
    omitted block leaves its skip, with its projection."""

    capacity: float = Field(gt=0, le=1)
    """One of the population's."""
    width: float | str = "auto"
    """Channel ratio r in (0, 1]; or "sqrt(0.2)", the ratio for a share of the parameters; or auto: the largest at which
    the submodel, with its blocks, costs no more than its capacity, and the capacity itself where capacities are
    widths."""
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
        """The omitted blocks, by module path."""
        if self.blocks == "all":
            return ()
        groups = self.blocks.split()
        sizes = [len(stage) for stage in model.blocks]
        where = f'method.submodels: given blocks "{self.blocks}" for capacity {label(self.capacity)}; allowed'
        if not sizes:
            raise ConfigError(f"{where}: all, because model {model.name} has no residual blocks to leave out")
        if len(groups) != len(sizes):
            raise ConfigError(f"{where}: {len(sizes)} groups, because model {model.name} has stages of {sizes} blocks")
        for s, (group, size) in enumerate(zip(groups, sizes, strict=True), start=1):
            if len(group) != size:
                raise ConfigError(f'{where}: {size} bits for stage {s} of model {model.name}, not "{group}"')
        kept = zip("".join(groups), itertools.chain(*model.blocks), strict=True)
        return tuple(path for bit, path in kept if bit == "0")


Submodels = Literal["auto", "published"] | tuple[Submodel, ...]
"""The network of every capacity: cut to what it costs by `clients.metric`; those of NeFL's paper, in the order of the
capacities; or listed."""


def nested(task: Task, submodels: Submodels, variants: Sequence[str], steps: bool = False) -> Mapping[float, Net]:
    """Networks cut in width and depth, all of them parts of the server's.

    `variants`: the names of a method's published submodels, the preferred first; the last, W, D or WD, is how `auto`
    cuts. `steps`: residual branches have step sizes. A ConfigError if the submodels do not fit the capacities or the
    model.
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
    """The network that a capacity buys, with no other blocks than `within` has.

    W: the widest. D: at full width, the first blocks of every stage that spend the capacity best. WD: the first blocks
    of every stage, the stages in balance, that the capacity buys at the width of its root; then the largest width.
    """
    if variant == "W" or capacity == 1:
        return task.nets[capacity]
    if task.metric == "width":
        raise ConfigError(
            "clients.metric: given width; allowed: params or flops where method.submodels is auto and cuts in depth "
            f"({variant}), because omitting a block changes no width"
        )
    if not task.model.blocks:
        raise ConfigError(
            f"model: given {task.model.name}, which has no residual blocks to leave out; allowed: a model with "
            f"residual blocks, where method.submodels cuts in depth ({variant})"
        )
    if variant == "D":
        return costs.depth_for(within, capacity, task.metric)
    root = costs.width_for(Net(task.model), math.sqrt(capacity), task.metric)
    net = costs.depth_for(within, capacity, task.metric, root, slack=1.0)
    return replace(net, width=min(costs.width_for(net, capacity, task.metric), within.width))


def published(model: Model, variants: Sequence[str], capacities: Sequence[float]) -> dict[float, Submodel]:
    """NeFL's submodels of a model: capacity -> submodel, the smallest capacity having the smallest one.

    They are those of the first of `variants` that has as many submodels as there are capacities, each within `NEAR` of
    its capacity. A ConfigError if there is none.
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
        f"{_listed(capacities)}; allowed: {allowed}; or list the submodels, or take auto"
    )


@functools.cache
def _tables() -> dict[str, dict[str, tuple[Submodel, ...]]]:
    """Model -> variant -> its submodels, smallest first."""
    given = load_yaml(Path(__file__).with_name("nefl_submodels.yaml"))
    return {
        model: {variant: tuple(Submodel(**row) for row in rows) for variant, rows in variants.items()}
        for model, variants in given.items()
    }


def _by_capacity(task: Task, submodels: Sequence[Submodel]) -> dict[float, Submodel]:
    given = [submodel.capacity for submodel in submodels]
    if sorted(given) != sorted(task.nets):
        raise ConfigError(
            f"method.submodels: given capacities {_listed(given) or 'none'}; allowed: those of clients.capacities, "
            f"each once: {_listed(task.nets)}"
        )
    return {submodel.capacity: submodel for submodel in submodels}


def _check_nested(nets: Mapping[float, Net], server_capacity: float) -> None:
    largest = nets[server_capacity]
    for capacity, net in nets.items():
        if net.width > largest.width or not {*net.without} >= {*largest.without}:
            raise ConfigError(
                f"method.submodels: given channels or blocks for capacity {label(capacity)} that the largest submodel, "
                f"of capacity {label(server_capacity)}, does not have; allowed: a part of the largest submodel"
            )


def _net(task: Task, capacity: float, submodel: Submodel) -> Net:
    net = Net(task.model, without=submodel.without(task.model))
    if submodel.width == "auto":
        return replace(net, width=costs.width_for(net, capacity, task.metric))
    return replace(net, width=_ratio(submodel.width))


def _ratio(width: float | str) -> float:
    """A channel ratio; 0 if it is none."""
    if not isinstance(width, str):
        return width
    share = re.fullmatch(r"sqrt\((\d*\.?\d+)\)", width)
    return math.sqrt(float(share[1])) if share else 0.0


def _listed(capacities: Iterable[float]) -> str:
    return ", ".join(map(label, capacities))
