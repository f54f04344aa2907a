"""Residual blocks and stages.

The residual stream of a stage is one axis, "stage1", "stage2", ...: everything added to it is cut with it. The
channels between the convolutions of a block have their own axes. `Net.without` names blocks ("stage2.1") without
their residual branch. Their skip keeps its projection and, in a pre-activation block, the norm before it. With
`Net.steps` a residual branch ends in a step size.
"""

from collections.abc import Callable

import torch
from torch import nn

from rayfl.core.axes import Axis, conv, norm
from rayfl.core.net import Net
from rayfl.models.layers import NormKind, Step, scaler, sequential


class PostActBlock(nn.Module):
    """relu(residual(x) + skip(x)): [B, cin, H, W] -> [B, cout, H', W']. The skip is x itself, or a projection."""

    def __init__(self, residual: nn.Module | None, projection: nn.Module | None):
        super().__init__()
        self.residual, self.projection = residual, projection
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = x if self.projection is None else self.projection(x)
        return self.relu(skip if self.residual is None else self.residual(x) + skip)


def basic_block(
    net: Net, path: str, cin: Axis, channels: int, cout: Axis, stride: int, *, norm_kind: NormKind
) -> PostActBlock:
    """Return a block of two 3x3 convolutions, with `channels` between them in the widest network."""
    inner, residual = net.axis(f"{path}.inner", channels), None
    if path not in net.without:
        residual = sequential(
            conv1=conv(cin, inner, 3, stride=stride, padding=1, bias=False),
            scaler1=scaler(net.scale),
            norm1=norm(norm_kind, inner),
            relu=nn.ReLU(),
            conv2=conv(inner, cout, 3, padding=1, bias=False),
            scaler2=scaler(net.scale),
            norm2=norm(norm_kind, cout),
            step=_step(net),
        )
    return PostActBlock(residual, _projection(net, cin, cout, stride, norm_kind))


def bottleneck_block(
    net: Net, path: str, cin: Axis, channels: int, cout: Axis, stride: int, *, norm_kind: NormKind, copies: int
) -> PostActBlock:
    """Return a block of 1x1, 3x3 and 1x1 convolutions, with `channels` times `copies` between them in the widest
    network. The second has the stride, as in torchvision."""
    inner1, inner2 = (net.axis(f"{path}.inner{i}", channels).repeat(copies) for i in (1, 2))
    residual = None
    if path not in net.without:
        residual = sequential(
            conv1=conv(cin, inner1, 1, bias=False),
            scaler1=scaler(net.scale),
            norm1=norm(norm_kind, inner1),
            relu1=nn.ReLU(),
            conv2=conv(inner1, inner2, 3, stride=stride, padding=1, bias=False),
            scaler2=scaler(net.scale),
            norm2=norm(norm_kind, inner2),
            relu2=nn.ReLU(),
            conv3=conv(inner2, cout, 1, bias=False),
            scaler3=scaler(net.scale),
            norm3=norm(norm_kind, cout),
            step=_step(net),
        )
    return PostActBlock(residual, _projection(net, cin, cout, stride, norm_kind))


class PreActBlock(nn.Module):
    """residual(a) + skip, a = relu(norm(x)): [B, cin, H, W] -> [B, cout, H', W'].

    The skip is x itself, or a projection of a. `pre` and `post` are the divisors of the Scaler before a norm and after
    a convolution.
    """

    def __init__(
        self,
        net: Net,
        path: str,
        cin: Axis,
        channels: int,
        cout: Axis,
        stride: int,
        *,
        norm_kind: NormKind,
        pre: float,
        post: float,
    ):
        super().__init__()
        inner = net.axis(f"{path}.inner", channels)
        is_whole, projects = path not in net.without, cin.name != cout.name
        self.activate = self.residual = self.projection = None
        if is_whole or projects:
            self.activate = sequential(scaler=scaler(pre), norm=norm(norm_kind, cin), relu=nn.ReLU())
        if is_whole:
            self.residual = sequential(
                conv1=conv(cin, inner, 3, stride=stride, padding=1, bias=False),
                scaler1=scaler(pre * post),
                norm=norm(norm_kind, inner),
                relu=nn.ReLU(),
                conv2=conv(inner, cout, 3, padding=1, bias=False),
                scaler2=scaler(post),
                step=_step(net),
            )
        if projects:
            self.projection = sequential(conv=conv(cin, cout, 1, stride=stride, bias=False), scaler=scaler(post))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.activate is None:
            return x
        a = self.activate(x)
        skip = x if self.projection is None else self.projection(a)
        return skip if self.residual is None else self.residual(a) + skip


def _projection(net: Net, cin: Axis, cout: Axis, stride: int, norm_kind: NormKind) -> nn.Module | None:
    """Return the skip of a post-activation block where the axis of the stream changes."""
    if cin.name == cout.name:
        return None
    return sequential(
        conv=conv(cin, cout, 1, stride=stride, bias=False), scaler=scaler(net.scale), norm=norm(norm_kind, cout)
    )


def _step(net: Net) -> nn.Module:
    return Step() if net.steps else nn.Identity()


def block_paths(depth: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the module paths of the blocks per stage."""
    return tuple(tuple(f"stage{s}.{b}" for b in range(count)) for s, count in enumerate(depth, start=1))


def stages_of(
    net: Net,
    depth: tuple[int, ...],
    channels: int,
    cin: Axis,
    block: Callable[[Net, str, Axis, int, Axis, int], nn.Module],
    copies: int = 1,
    last: str | None = None,
) -> tuple[dict[str, nn.Module], list[Axis]]:
    """Return the stages by name, up to the block `last`, and the axes of their streams, each channel repeated `copies`
    times.

    `block(net, path, cin, channels, cout, stride)` returns one block.
    """
    stages: dict[str, nn.Module] = {}
    streams: list[Axis] = []
    for s, paths in enumerate(block_paths(depth)):
        name = f"stage{s + 1}"
        cout, blocks = net.axis(name, channels * 2**s).repeat(copies), []
        for path in paths[: paths.index(last) + 1] if last in paths else paths:
            stride = 2 if s and not blocks else 1
            blocks.append(block(net, path, cin, channels * 2**s, cout, stride))
            cin = cout
        stages[name] = nn.Sequential(*blocks)
        streams.append(cout)
        if last in paths:
            break
    return stages, streams
