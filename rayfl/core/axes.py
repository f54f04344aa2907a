"""Named axes: a model says once, where a layer is made, what every dimension of its parameters is.

Two layers that share an `Axis` are cut together: everything that is added along a residual stream, a norm
and what it normalises, a linear layer and the layer before it. From the names alone the rest of rayfl cuts
any model (HeteroFL section 3), with no index walking by layer name.

    image, channels = Axis.fixed("image", 3), net.axis("stage1", 64)
    self.conv = conv(image, channels, 3, padding=1)          # weight: [stage1, image, 3, 3]
    self.norm = norm("static_bn", channels)                  # weight, bias: [stage1]
    self.head = linear(channels.repeat(16), classes)         # a flatten: 16 columns a channel
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from torch import nn

from rayfl.core.norms import StaticBatchNorm

CLASSES = "classes"
"""The name of the axis of classes: what label-aware methods look for."""


@dataclass(frozen=True)
class Axis:
    """One dimension of parameters, in the network at hand.

    `size` positions can be cut. A tensor dimension of this axis is `groups * size * copies` long: every
    group (an attention head) keeps the same positions, and every position stands for `copies` neighbours
    (the pixels of a flattened channel).
    """

    name: str
    size: int
    groups: int = 1
    copies: int = 1
    is_fixed: bool = False

    @classmethod
    def fixed(cls, name: str, size: int) -> "Axis":
        """An axis that is never cut: classes, image channels, a vocabulary, positions."""
        return cls(name, size, is_fixed=True)

    def repeat(self, copies: int) -> "Axis":
        """The axis after a flatten of `copies` pixels a channel."""
        return replace(self, copies=self.copies * copies)

    @property
    def length(self) -> int:
        return self.groups * self.size * self.copies


def size_at(width: float, full: int, rounding: Literal["up", "down"] = "up") -> int:
    """ceil(width * full), or floor, without the channel that binary noise would add or take."""
    size = math.ceil(width * full - 1e-9) if rounding == "up" else math.floor(width * full + 1e-9)
    if size < 1:
        raise ValueError(f"width {width} leaves no channel of {full}; the smallest is {1 / full:.6g}")
    return size


M = TypeVar("M", bound=nn.Module)

Dims = tuple[Axis | None, ...]
"""The axes of one tensor; None for a dimension that is not an axis (a kernel's height and width)."""


def conv(cin: Axis, cout: Axis, kernel: int, *, bias: bool = True, **options: Any) -> nn.Conv2d:
    layer = nn.Conv2d(cin.length, cout.length, kernel, bias=bias, **options)
    return declare(layer, weight=(cout, cin, None, None), bias=(cout,))


def linear(cin: Axis, cout: Axis, *, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(cin.length, cout.length, bias=bias)
    return declare(layer, weight=(cout, cin), bias=(cout,))


def embedding(rows: Axis, cout: Axis) -> nn.Embedding:
    return declare(nn.Embedding(rows.length, cout.length), weight=(rows, cout))


NORMS = ("static_bn", "group", "instance", "layer", "none")


def norm(kind: str, channels: Axis, *, groups: int = 4) -> nn.Module:
    """A norm over `channels` of a feature map [B, C, H, W]. One of `NORMS`.

    `instance` and `layer` are GroupNorm with a group a channel and with one group (HeteroFL Table 4);
    `groups` is for `group` only. A narrow network's groups are not the wide one's.
    """
    if kind == "none":
        return nn.Identity()
    if kind == "static_bn":
        layer = StaticBatchNorm(channels.length)
    else:
        count = {"group": groups, "instance": channels.length, "layer": 1}[kind]
        if channels.length % count:
            raise ValueError(
                f"norm 'group' needs channels that divide by {count}, but axis {channels.name!r} has "
                f"{channels.length} at this width; take larger capacities or another norm"
            )
        layer = nn.GroupNorm(count, channels.length)
    return declare(layer, weight=(channels,), bias=(channels,))


def layer_norm(features: Axis) -> nn.LayerNorm:
    """LayerNorm over the last dimension (of a transformer)."""
    return declare(nn.LayerNorm(features.length), weight=(features,), bias=(features,))


def axes_of(network: nn.Module) -> dict[str, Dims]:
    """The axes of every parameter, by its first name if it has several. A parameter whose module declares none is an
    error that names it."""
    found, names = {}, {name for name, _ in network.named_parameters()}
    for path, module in network.named_modules():
        declared: Mapping[str, Dims] = getattr(module, "axes", {})
        for name, tensor in module.named_parameters(prefix=path, recurse=False):
            if name not in names:
                continue
            dims = declared.get(name.rpartition(".")[2])
            if dims is None:
                raise ValueError(
                    f"{type(network).__name__}: the parameter {name!r} {list(tensor.shape)} of a "
                    f"{type(module).__name__} declares no axes; build it with rayfl.conv, "
                    "rayfl.linear, rayfl.norm, ... or say `declare(module, parameter=(Axis, ...))`"
                )
            lengths = [axis.length if axis else size for axis, size in zip(dims, tensor.shape, strict=False)]
            if len(dims) != tensor.dim() or lengths != list(tensor.shape):
                raise ValueError(
                    f"{type(network).__name__}: the parameter {name!r} is {list(tensor.shape)} but its "
                    f"axes {[axis.name if axis else None for axis in dims]} say {lengths}"
                )
            found[name] = dims
    return found


@dataclass(frozen=True)
class Layout:
    """The parameters of one network: their axes and shapes."""

    dims: Mapping[str, Dims]
    shapes: Mapping[str, tuple[int, ...]]

    @functools.cached_property
    def axes(self) -> dict[str, Axis]:
        """Every axis that can be cut, by name, once."""
        return {a.name: a for dims in self.dims.values() for a in dims if a and not a.is_fixed}

    @functools.cached_property
    def classifier(self) -> tuple[str, ...]:
        """The parameters that have a row a class."""
        return tuple(name for name, dims in self.dims.items() if dims and dims[0] and dims[0].name == CLASSES)


def layout_of(module: nn.Module) -> Layout:
    return Layout(axes_of(module), {name: tuple(p.shape) for name, p in module.named_parameters()})


def declare(layer: M, **axes: Dims) -> M:
    """Says what every dimension of a layer's own parameters is, by the parameter's name; any module may be declared so.

    >>> channels = Axis("channels", 8)
    >>> declare(nn.PReLU(8), weight=(channels,)).axes["weight"]
    (Axis(name='channels', size=8, groups=1, copies=1, is_fixed=False),)
    """
    layer.axes = axes  # type: ignore[assignment]
    return layer
