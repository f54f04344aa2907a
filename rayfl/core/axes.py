"""Named axes: a model declares the axis of every dimension of its parameters where it creates a layer.

Layers that share an `Axis` are cut together: all layers that are added along a residual stream, a norm and its input, a
linear layer and the layer before it. rayfl can therefore cut any model (HeteroFL section 3) without code per layer.

    image, channels = Axis.fixed("image", 3), net.axis("stage1", 64)
    self.conv = conv(image, channels, 3, padding=1)          # weight: [stage1, image, 3, 3]
    self.norm = norm("static_bn", channels)                  # weight, bias: [stage1]
    self.head = linear(channels.repeat(16), classes)         # after a flatten: 16 columns per channel
"""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from rayfl.core.norms import StaticBatchNorm

CLASSES = "classes"
"""Name of the axis of classes, used by label-aware methods."""


@dataclass(frozen=True)
class Axis:
    """One dimension of parameters, with `size` positions in this network.

    A tensor dimension of this axis has the length `groups * size * copies`: every group (an attention head) keeps the
    same positions, and every position stands for `copies` neighbours (the pixels of a flattened channel).

    >>> Axis("channels", 8).repeat(9).length
    72
    """

    name: str
    size: int
    groups: int = 1
    copies: int = 1
    is_fixed: bool = False

    @classmethod
    def fixed(cls, name: str, size: int) -> "Axis":
        """Return an axis that is never cut: classes, image channels, a vocabulary, positions."""
        return cls(name, size, is_fixed=True)

    def repeat(self, copies: int) -> "Axis":
        """Return the axis after a flatten of `copies` pixels per channel."""
        return replace(self, copies=self.copies * copies)

    @property
    def length(self) -> int:
        return self.groups * self.size * self.copies


@dataclass(frozen=True)
class Concat:
    """A dimension of several axes one after another: concatenated feature maps, or queries, keys and values of one
    layer.

    >>> Concat((Axis("stem", 8), Axis("branch", 4))).length
    12
    """

    parts: tuple[Axis, ...]

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    @property
    def is_fixed(self) -> bool:
        return all(part.is_fixed for part in self.parts)

    @property
    def length(self) -> int:
        return sum(part.length for part in self.parts)


def segments(dim: "Axis | Concat | None") -> Iterator[tuple[int, Axis]]:
    """Yield the axes of a dimension, each with its first index."""
    start = 0
    for axis in () if dim is None else dim.parts if isinstance(dim, Concat) else (dim,):
        yield start, axis
        start += axis.length


def size_at(width: float, full: int, rounding: Literal["up", "down"] = "up") -> int:
    """Return ceil(width * full), or floor, robust to rounding errors of floating point numbers."""
    size = math.ceil(width * full - 1e-9) if rounding == "up" else math.floor(width * full + 1e-9)
    if size < 1:
        raise ValueError(f"width {width} leaves no channel of {full}. Allowed: at least {1 / full:.6g}")
    return size


M = TypeVar("M", bound=nn.Module)

Dims = tuple[Axis | Concat | None, ...]
"""Axes of one tensor, by dimension; None for a dimension without an axis (height and width of a kernel)."""


def conv(cin: Axis | Concat, cout: Axis | Concat, kernel: int, *, bias: bool = True, **options: Any) -> nn.Conv2d:
    """Return a convolution [B, in, H, W] -> [B, out, H', W'] that declares its axes. `options` are torch's.

    >>> image, channels = Axis.fixed("image", 3), Axis("channels", 8)
    >>> conv(image, channels, 3, padding=1).weight.shape
    torch.Size([8, 3, 3, 3])
    """
    layer = nn.Conv2d(cin.length, cout.length, kernel, bias=bias, **options)
    return declare(layer, weight=(cout, cin, None, None), bias=(cout,))


def conv1d(cin: Axis | Concat, cout: Axis | Concat, kernel: int, *, bias: bool = True, **options: Any) -> nn.Conv1d:
    """Return a convolution over time [B, in, T] -> [B, out, T'] that declares its axes. `options` are torch's."""
    layer = nn.Conv1d(cin.length, cout.length, kernel, bias=bias, **options)
    return declare(layer, weight=(cout, cin, None), bias=(cout,))


def linear(cin: Axis | Concat, cout: Axis | Concat, *, bias: bool = True) -> nn.Linear:
    """Return a linear layer [..., in] -> [..., out] that declares its axes.

    >>> linear(Axis("hidden", 4), Axis.fixed("classes", 10))
    Linear(in_features=4, out_features=10, bias=True)
    """
    layer = nn.Linear(cin.length, cout.length, bias=bias)
    return declare(layer, weight=(cout, cin), bias=(cout,))


def embedding(rows: Axis, cout: Axis | Concat) -> nn.Embedding:
    """Return an embedding, rows [...] int64 -> [..., out], that declares its axes.

    >>> embedding(Axis.fixed("tokens", 100), Axis("hidden", 4))
    Embedding(100, 4)
    """
    return declare(nn.Embedding(rows.length, cout.length), weight=(rows, cout))


def norm(kind: str, channels: Axis | Concat, *, groups: int = 4) -> nn.Module:
    """Return a norm over `channels` of a feature map [B, C, H, W]: static_bn, group, instance, layer or none.

    `instance` and `layer` are GroupNorm with one group per channel and with one group (HeteroFL Table 4). `groups`:
    only for `group`, whose groups contain other channels in narrow networks than in wide ones.

    >>> norm("layer", Axis("channels", 8)).num_groups
    1
    """
    if kind == "none":
        return nn.Identity()
    if kind == "static_bn":
        layer = StaticBatchNorm(channels.length)
    else:
        count = {"group": groups, "instance": channels.length, "layer": 1}[kind]
        if channels.length % count:
            raise ValueError(
                f"norm 'group' needs a multiple of {count} channels, but axis {channels.name!r} has {channels.length} "
                "at this width. Hint: use larger capacities or another norm"
            )
        layer = (InstanceNorm if kind == "instance" else nn.GroupNorm)(count, channels.length)
    return declare(layer, weight=(channels,), bias=(channels,))


class InstanceNorm(nn.GroupNorm):
    """GroupNorm with one group per channel, which needs more than one value per channel: of one it makes 0."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input[0, 0].numel() == 1:
            raise ValueError(
                "norm 'instance' needs maps of more than one pixel, but the network has a map of 1x1. Allowed: larger "
                "images, or another norm"
            )
        return super().forward(input)


def layer_norm(features: Axis | Concat) -> nn.LayerNorm:
    """Return a LayerNorm over the last dimension (of a transformer)."""
    return declare(nn.LayerNorm(features.length), weight=(features,), bias=(features,))


def axes_of(network: nn.Module) -> dict[str, Dims]:
    """Return the axes of every parameter, by its first name. A ValueError names a parameter without axes."""
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
                    f"{type(module).__name__} has no axes. Hint: create the layer with rayfl.conv, rayfl.linear, "
                    "rayfl.norm, ..., or call `declare(module, parameter=(Axis, ...))`"
                )
            lengths = [axis.length if axis else size for axis, size in zip(dims, tensor.shape, strict=False)]
            if len(dims) != tensor.dim() or lengths != list(tensor.shape):
                raise ValueError(
                    f"{type(network).__name__}: the parameter {name!r} has shape {list(tensor.shape)}, but its "
                    f"axes {[axis.name if axis else None for axis in dims]} have shape {lengths}"
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
        """All axes that can be cut, by name."""
        axes = (axis for dims in self.dims.values() for dim in dims for _, axis in segments(dim))
        return {axis.name: axis for axis in axes if not axis.is_fixed}

    @functools.cached_property
    def classifier(self) -> tuple[str, ...]:
        """Parameters with one row per class."""
        return tuple(name for name, dims in self.dims.items() if dims and dims[0] and dims[0].name == CLASSES)


def layout_of(module: nn.Module) -> Layout:
    return Layout(axes_of(module), {name: tuple(p.shape) for name, p in module.named_parameters()})


def declare(layer: M, **axes: Dims) -> M:
    """Declare the axes of a module's own parameters, by parameter name, and return the module.

    >>> channels = Axis("channels", 8)
    >>> declare(nn.PReLU(8), weight=(channels,)).axes["weight"]
    (Axis(name='channels', size=8, groups=1, copies=1, is_fixed=False),)
    """
    layer.axes = axes  # type: ignore[assignment]
    return layer
