"""Shared parts of networks: HeteroFL's Scaler, and helpers to combine layers."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn

from rayfl.config import nearest
from rayfl.core.axes import Axis, declare, linear
from rayfl.core.net import Net

NormKind = Annotated[
    Literal["static_bn", "group", "instance", "layer", "none"],
    Field(
        description="Norm after every convolution (HeteroFL, Table 4). static_bn: batch norm, with the statistics for "
        "evaluation computed separately; group: four groups; instance: one group per channel; layer: one group."
    ),
]
"""See `rayfl.core.axes.norm`."""


class Scaler(nn.Module):
    """x / scale while training, x otherwise (HeteroFL section 3.3). Any shape."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / self.scale if self.training else x

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}"


def scaler(scale: float) -> nn.Module:
    """Return a Scaler (HeteroFL section 3.3), or an identity if the scale is 1. Any shape.

    >>> scaler(0.5)(torch.ones(2)), scaler(1)
    (tensor([2., 2.]), Identity())
    """
    return nn.Identity() if scale == 1 else Scaler(scale)


class Step(nn.Module):
    """x * scale, where scale is a trained step size of a residual branch (NeFL section IV). Any shape."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        declare(self, scale=())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def sequential(**layers: nn.Module) -> nn.Sequential:
    """Return the layers in sequence, by name, without identities."""
    return nn.Sequential(OrderedDict((n, m) for n, m in layers.items() if not isinstance(m, nn.Identity)))


def heterofl_linear(cin: Axis, cout: Axis) -> nn.Linear:
    """Return a linear layer whose bias starts at 0, as in HeteroFL's networks."""
    layer = linear(cin, cout)
    nn.init.zeros_(layer.bias)
    return layer


def depthwise(channels: Axis, kernel: int, **options: Any) -> nn.Conv2d:
    """Return a depthwise convolution without bias: weight [channels, 1, kernel, kernel]."""
    count = channels.length
    layer = nn.Conv2d(count, count, kernel, groups=count, bias=False, **options)
    return declare(layer, weight=(channels, None, None, None))


Init = Literal["torch", "kaiming", "kaiming_fan_out"]
"""Initial weights. torch: torch's defaults. kaiming: normal by fan-in, for convolutions and linear layers.
kaiming_fan_out: normal by fan-out, for convolutions only, as in torchvision's ResNets."""


def initialise(module: nn.Module, init: Init) -> None:
    """Initialise the weights of a network again, in place; `torch` leaves them unchanged."""
    if next(module.parameters()).is_meta:
        return
    for layer in module.modules():
        if init == "kaiming" and isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
        if init == "kaiming_fan_out" and isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def check_exits(exits: Sequence[str], order: Sequence[str], where: str = "") -> None:
    """Raise a ValueError if early exits are not at different blocks, in their order."""
    for path in exits:
        if path not in order:
            raise ValueError(f"{where}blocks of the network; {path!r} is none. {nearest(path, order)}")
    if list(exits) != [path for path in order if path in exits]:
        raise ValueError(f"{where}every block once, in the order of the network")


def check_without(net: Net, blocks: Collection[str], exits: int = 0) -> None:
    """Raise a ValueError if `net.without` is not in `blocks`, or `net.exits` exceeds `exits`."""
    for path in net.without:
        if path not in blocks:
            raise ValueError(
                f"no block {path!r} can be left out of this network; "
                f"{nearest(path, blocks) if blocks else 'it has none'}"
            )
    if not 0 <= net.exits <= exits:
        allowed = f"0 (its head alone) to {exits}" if exits else "0: it has no early exits"
        raise ValueError(f"this network cannot answer at {net.exits} exits; take {allowed}")
