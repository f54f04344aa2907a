"""Which network: one value from which a device builds it, and from which its shapes and costs follow.

A `Net` names its model family, so that a population may mix architectures, and nothing has to travel beside it.
"""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from rayfl.core import norms, operations
from rayfl.core.axes import Axis, Layout, axes_of, layout_of, size_at
from rayfl.core.joined import parameters_of
from rayfl.core.operations import Convention
from rayfl.core.tensors import Params, as_vector, end_to_end

Answer = Literal["last", "mean"]
"""What a network with early exits answers: the logits of its last exit, or the mean of all exits' logits."""


class Family(Protocol):
    """A network family, as a `Net` and its users see it. `rayfl.models.Model` implements and documents it."""

    @property
    def name(self) -> str: ...
    @property
    def members(self) -> Sequence["Family"]: ...
    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]: ...
    @property
    def exit_count(self) -> int: ...
    @property
    def frozen_key(self) -> Hashable: ...
    @property
    def varying(self) -> tuple[int, ...]: ...

    def build(self, net: "Net") -> nn.Module: ...
    def example(self, batch: int, device: torch.device | str) -> torch.Tensor: ...
    def initial(self, net: "Net") -> Params: ...
    def statistics(self, net: "Net") -> Params: ...
    def frozen(self) -> Params: ...
    def parts(self, net: "Net") -> Mapping[str, Any]: ...
    def write(self, net: "Net", params: Params, answer: Answer, files: Sequence[Path], to: Path) -> None: ...
    def model_dump(self, *, mode: str) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Net:
    """One network of a family: everything that a device must know to build it.

    The network built at a width decides its sizes (sizes do not compose: rounding a rate of a rate differs
    from rounding once); indices follow them. Equal values are equal networks; what follows from one is found once.
    """

    model: Family
    """The family."""
    width: float = 1.0
    """Share of every cuttable axis, in (0, 1]: an axis of K positions has ceil(width * K), or floor."""
    without: tuple[str, ...] = ()
    """Blocks that are left out, by module path."""
    exits: int = 0
    """Early exits at which it answers, counted from the first, its last one included; it ends there.
    0: it has none, and answers at its head alone."""
    steps: bool = False
    """Whether every residual branch is multiplied by a step size of its own, a parameter (NeFL)."""
    scale: float = 1.0
    """What HeteroFL's Scaler divides by during training (section 3.3): client width / server width."""
    rounding: Literal["up", "down"] = "up"
    """Of width * K: ScaleFL rounds down."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Axis -> its number of positions (a group), whatever the width: what a removal of channels leaves."""

    def axis(self, name: str, full: int, groups: int = 1) -> Axis:
        """The axis `name`, of `full` positions (a group) in the widest network, as it is in this one."""
        size = dict(self.sizes).get(name)
        if size is None:
            size = size_at(self.width, full, self.rounding)
        elif not 1 <= size <= full:
            raise ValueError(f"Net.sizes: given {size} for the axis {name!r}; allowed: 1 to {full}")
        return Axis(name, size, groups)

    def build(self) -> nn.Module:
        """The network, freshly initialised from torch's global generator (`seeds.torch_scope`)."""
        return self.model.build(self)

    def blank(self) -> nn.Module:
        """The network on the meta device: shapes and no memory."""
        with torch.device("meta"):
            return self.build()

    def initial(self) -> Params:
        """The parameters that its training starts from; random ones are drawn from torch's global generator."""
        return self.model.initial(self)

    def statistics(self) -> Params:
        """The running statistics that its static norms start from, by the names of `norms.fresh`."""
        return self.model.statistics(self)

    @property
    def layout(self) -> Layout:
        """Axes and shapes of its parameters."""
        return _layout(self)

    @property
    def full_layout(self) -> Layout:
        """Of its parameters, and of its static norms' running statistics, each on the axis of its norm's weight."""
        return _full_layout(self)

    @property
    def layers(self) -> Mapping[str, tuple[str, ...]]:
        """Path of a convolution or linear layer -> the names of its parameters, in the network's order. A layer of a
        frozen base has none and is left out."""
        return _layers(self)

    @property
    def embeddings(self) -> Mapping[str, tuple[str, ...]]:
        """Path of an embedding -> the name of its weight, in the network's order."""
        return _embeddings(self)

    @property
    def norms(self) -> tuple[str, ...]:
        """The paths of its static norms; with some it needs statistics before it is evaluated."""
        return _norms(self)

    @property
    def parameters(self) -> int:
        """Number of its parameters; step sizes of residual branches are not counted, as in NeFL's tables."""
        return sum(math.prod(shape) for shape in self.layout.shapes.values() if shape)

    @property
    def macs(self) -> int:
        """Multiply-adds of the forward pass of one sample."""
        return self.operations("macs")

    @property
    def layer_macs(self) -> Mapping[str, int]:
        """Multiply-adds of the forward pass of one sample, of every convolution and linear layer by its path."""
        return _operations(self)[1]

    def operations(self, convention: Convention) -> int:
        """Operations of the forward pass of one sample, by a convention of `rayfl.core.operations`."""
        return _operations(self)[0][convention]


@functools.lru_cache(maxsize=512)
def _layout(net: Net) -> Layout:
    return layout_of(net.blank())


@functools.lru_cache(maxsize=512)
def _full_layout(net: Net) -> Layout:
    found = net.layout
    weights = {name: f"{name.rpartition('.')[0]}.weight" for name in norms.fresh(net.blank())}
    return Layout(
        {**found.dims, **{name: found.dims[weight] for name, weight in weights.items()}},
        {**found.shapes, **{name: found.shapes[weight] for name, weight in weights.items()}},
    )


@functools.lru_cache(maxsize=512)
def _layers(net: Net) -> Mapping[str, tuple[str, ...]]:
    return _own(net, operations.is_layer)


@functools.lru_cache(maxsize=512)
def _embeddings(net: Net) -> Mapping[str, tuple[str, ...]]:
    return _own(net, lambda module: isinstance(module, nn.Embedding))


def _own(net: Net, wanted: Callable[[nn.Module], bool]) -> dict[str, tuple[str, ...]]:
    """Path -> parameters of the modules that are wanted, if they have a weight, and it is nobody's before them."""
    layers, shapes = {p: m for p, m in net.blank().named_modules() if wanted(m)}, net.layout.shapes
    names = {path: tuple(f"{path}.{name}" for name, _ in layer.named_parameters()) for path, layer in layers.items()}
    return {path: some for path, some in names.items() if some and shapes.keys() >= {*some}}


@functools.lru_cache(maxsize=512)
def _norms(net: Net) -> tuple[str, ...]:
    return tuple(norms.static_norms(net.blank()))


@functools.lru_cache(maxsize=4096)
def _operations(net: Net) -> tuple[dict[str, int], dict[str, int]]:
    return operations.count(net.blank(), net.model.example(1, "meta"))


@functools.lru_cache(maxsize=16)
def cached_module(net: Net, device: torch.device) -> nn.Module:
    """The one module of this network that stays in this process: clients run in it one after another.

    Its parameters and statistics are whatever was there last: always `load` before use.
    """
    module = net.build().to(device)
    as_vector(list(module.parameters()))
    return module


@torch.no_grad()
def load(module: nn.Module, params: Params) -> None:
    """Copies parameters into the module's own storage (never aliases: a payload is shared memory), in one go where they
    lie end to end in both."""
    parameters = parameters_of(module)
    places, given = list(parameters.values()), [params[name] for name in parameters]
    target, source = (end_to_end(t) if t else None for t in (places, given))
    if target is not None and source is not None:
        target.copy_(source)
    else:
        for place, t in zip(places, given, strict=True):
            place.copy_(t)


def params_of(module: nn.Module) -> Params:
    """The module's parameters, detached; they share its memory."""
    return {name: parameter.detach() for name, parameter in parameters_of(module).items()}


def check_axes(net: Net, narrow: float = 0.5) -> None:
    """The two-width check: `net` and the same at another width have the same parameters on the same axes, and only
    cuttable axes change their size. Nothing is allocated. A ValueError says which parameter breaks it."""
    wide, thin = axes_of(net.blank()), axes_of(replace(net, width=narrow).blank())
    if wide.keys() != thin.keys():
        raise ValueError(f"parameters differ between widths: {sorted(wide.keys() ^ thin.keys())}")
    for name, dims in wide.items():
        for a, b in zip(dims, thin[name], strict=True):
            if a is None or b is None:
                if a is not b:
                    raise ValueError(f"{name}: a dimension is an axis at one width only")
                continue
            if a.is_fixed and a != b:
                raise ValueError(f"{name}: the fixed axis {a.name!r} is {a.size}, then {b.size}")
            if replace(a, size=0) != replace(b, size=0):
                raise ValueError(f"{name}: the axis {a.name!r} becomes {b.name!r} at another width")
            # an axis may vanish, as a rank does
            if not a.is_fixed and b.size not in (0, size_at(narrow / net.width, a.size, net.rounding)):
                raise ValueError(
                    f"{name}: the axis {a.name!r} has {a.size} positions at width {net.width} and "
                    f"{b.size} at {narrow}; take its size from `net.axis(name, full)`"
                )
