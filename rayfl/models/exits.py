"""Early exits of residual networks: heads on the feature map of a stage, and the network that contains them.

The input channels of an exit have the axis of the residual stream; its other channels have their own axes.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from rayfl.core.axes import Axis, conv, linear, norm
from rayfl.core.net import Net
from rayfl.models.layers import NormKind, depthwise, scaler, sequential

ExitKind = Literal["scalefl", "depthfl"]


class EarlyExits(nn.Module):
    """Network with early exits: [B, *input] -> the logits [B, classes] of every exit, the first exit's first.

    `trunk` is a plain network up to the last exit; its layers keep their names. If it has a head, the head's logits
    are last. `exits`: path of a layer or block of the trunk -> the exit that reads its output ("exit1", ... in order).
    """

    def __init__(self, trunk: nn.Sequential, exits: Mapping[str, nn.Module], has_head: bool):
        super().__init__()
        self.order = _paths(trunk)
        self.exits = {path: f"exit{number}" for number, path in enumerate(exits, start=1)}
        self.has_head = has_head
        for name, layer in trunk.named_children():
            self.add_module(name, layer)
        for path, exit in exits.items():
            self.add_module(self.exits[path], exit)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        answers = []
        for path in self.order:
            x = self.get_submodule(path)(x)
            if path in self.exits:
                answers.append(self.get_submodule(self.exits[path])(x))
        return (*answers, x) if self.has_head else tuple(answers)


def _paths(trunk: nn.Sequential) -> list[str]:
    """Return the paths of its layers in order, with the blocks of a stage listed individually."""
    paths = []
    for name, layer in trunk.named_children():
        blocks = dict(layer.named_children()) if isinstance(layer, nn.Sequential) else {}
        paths += [f"{name}.{block}" for block in blocks] or [name]
    return paths


def scalefl_exit(
    net: Net, name: str, stream: Axis, channels: int, classes: Axis, *, norm_kind: NormKind
) -> nn.Sequential:
    """Return ScaleFL's exit (released code): three 3x3 convolutions, of `channels` in the widest network, and a
    classifier. [B, stream, H, W] -> [B, classes]. The Scaler applies in training only, as in HeteroFL. In the released
    code it also applies in evaluation, where batch norms cancel it."""
    layers: dict[str, nn.Module] = {}
    cin = stream
    for i in (1, 2, 3):
        cout = net.axis(f"{name}.conv{i}", channels)
        layers |= {
            f"conv{i}": conv(cin, cout, 3, padding=1, bias=False),
            f"scaler{i}": scaler(net.scale),
            f"norm{i}": norm(norm_kind, cout),
            f"relu{i}": nn.ReLU(),
        }
        cin = cout
    return sequential(**layers, average=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), head=linear(cin, classes))


class DepthFLExit(nn.Module):
    """DepthFL's exit (its authors' baseline in Flower): the feature map is multiplied by a gate computed from it, then
    halved in size once per later stage until it has the channels of the last. [B, stream, H, W] -> [B, classes].

    `channels`: of the exit's stage and all later ones, in the widest network. The gate is interpolated to the size of
    the map; the baseline doubles its size, which is equivalent for even height and width.
    """

    def __init__(
        self, net: Net, name: str, stream: Axis, channels: Sequence[int], classes: Axis, *, norm_kind: NormKind
    ):
        super().__init__()
        inner = net.axis(f"{name}.gate.inner", channels[0])
        self.gate = sequential(
            halve=_halving(stream, inner, stream, norm_kind, net.scale), norm=norm(norm_kind, stream), relu=nn.ReLU()
        )
        layers: dict[str, nn.Module] = {}
        cin = stream
        for i, (before, after) in enumerate(zip(channels, channels[1:], strict=False), start=1):
            inner = net.axis(f"{name}.halve{i}.inner", before)
            cout = net.axis(f"{name}.halve{i}", after)
            layers[f"halve{i}"] = _halving(cin, inner, cout, norm_kind, net.scale)
            cin = cout
        self.features = sequential(**layers, average=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
        self.head = linear(cin, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = F.interpolate(self.gate(x), x.shape[-2:], mode="bilinear", align_corners=False)
        return self.head(self.features(gate.sigmoid() * x))


def _halving(cin: Axis, inner: Axis, cout: Axis, norm_kind: NormKind, scale: float) -> nn.Sequential:
    """Return two separable 3x3 convolutions, the first of stride 2: [B, cin, H, W] -> [B, cout, H / 2, W / 2]. Their
    depthwise parts have no Scaler, because they do not sum over channels."""
    return sequential(
        depth1=depthwise(cin, 3, stride=2, padding=1),
        point1=conv(cin, inner, 1, bias=False),
        scaler1=scaler(scale),
        norm1=norm(norm_kind, inner),
        relu1=nn.ReLU(),
        depth2=depthwise(inner, 3, padding=1),
        point2=conv(inner, cout, 1, bias=False),
        scaler2=scaler(scale),
        norm2=norm(norm_kind, cout),
        relu2=nn.ReLU(),
    )
