"""Residual networks for small images: a 3x3 stem and four stages of basic blocks.

The residual stream of a stage is one axis, "stage1" ... "stage4": whatever is added to it is cut
with it. The channels between the two convolutions of a block are an axis of their own. `Net.without`
names blocks ("stage2.1") whose residual branch is left out. What the skip needs of such a block
stays: the projection, and before it the norm of a pre-activation block.
"""

from abc import ABC
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import nn

from rayfl.axes import Axis, Net, conv, linear, norm
from rayfl.models.base import Model
from rayfl.models.layers import NormKind, Step, check_without, heterofl_head, scaler, sequential

CHANNELS = (64, 128, 256, 512)

ScalerSite = Literal["pre_norm", "post_conv"]


class PostActResNet(Model, ABC):
    """He et al., arXiv 1512.03385, with a 3x3 stem. A final class adds `name` and `depth`."""

    norm: NormKind = "static_bn"
    maxpool: bool = False
    """3x3 max pooling of stride 2 after the stem, as in NeFL; FjORD has none."""

    depth: ClassVar[tuple[int, ...]]
    """Blocks of every stage."""

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        return _paths(self.depth)

    def build(self, net: Net) -> nn.Module:
        stem = net.axis("stage1", CHANNELS[0])
        block = partial(BasicBlock, norm_kind=self.norm, scale=net.scale, steps=net.steps)
        stages, features = _stages(net, self.depth, block)
        return sequential(
            conv=conv(self.image, stem, 3, padding=1, bias=False),
            scaler=scaler(net.scale),
            norm=norm(self.norm, stem),
            relu=nn.ReLU(),
            maxpool=nn.MaxPool2d(3, stride=2, padding=1) if self.maxpool else nn.Identity(),
            **stages,
            average=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=linear(features, self.labels),
        )


class ResNet18(PostActResNet):
    """11,173,962 parameters."""

    name: Literal["resnet18"] = "resnet18"
    depth: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)


class ResNet34(PostActResNet):
    """21,282,122 parameters."""

    name: Literal["resnet34"] = "resnet34"
    depth: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)


class PreActResNet(Model, ABC):
    """He et al., arXiv 1603.05027, with a 3x3 stem. A final class adds `name` and `depth`."""

    norm: NormKind = "static_bn"
    scaler_site: ScalerSite = "pre_norm"
    """Where the Scaler stands: on the input of every norm, as in HeteroFL's code, which leaves the
    skip alone; or behind every convolution, as its section 3.3 says."""

    depth: ClassVar[tuple[int, ...]]
    """Blocks of every stage."""

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        return _paths(self.depth)

    def build(self, net: Net) -> nn.Module:
        stem = net.axis("stage1", CHANNELS[0])
        pre, post = _sites(self.scaler_site, net.scale)
        block = partial(PreActBlock, norm_kind=self.norm, pre=pre, post=post)
        stages, features = _stages(net, self.depth, block)
        return sequential(
            conv=conv(self.image, stem, 3, padding=1, bias=False),
            conv_scaler=scaler(post),
            **stages,
            norm_scaler=scaler(pre),
            norm=norm(self.norm, features),
            relu=nn.ReLU(),
            average=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=heterofl_head(features, self.labels),
        )


class PreActResNet18(PreActResNet):
    """FedRolex's, and that of HeteroFL's code since 2021: 11,172,170 parameters."""

    name: Literal["preact_resnet18"] = "preact_resnet18"
    depth: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)


class PreActResNet18HeteroFL(PreActResNet):
    """The "PreResNet18" of HeteroFL's tables and of its code until 2021: 9,622,090 parameters."""

    name: Literal["preact_resnet18_heterofl"] = "preact_resnet18_heterofl"
    depth: ClassVar[tuple[int, ...]] = (1, 1, 1, 2)


class BasicBlock(nn.Module):
    """relu(residual(x) + skip(x)): [B, cin, H, W] -> [B, cout, H', W']."""

    def __init__(
        self,
        cin: Axis,
        inner: Axis,
        cout: Axis,
        is_whole: bool,
        *,
        norm_kind: NormKind,
        scale: float,
        steps: bool,
    ):
        super().__init__()
        projects, stride = _changes(cin, cout)
        self.residual = self.projection = None
        if is_whole:
            self.residual = sequential(
                conv1=conv(cin, inner, 3, stride=stride, padding=1, bias=False),
                scaler1=scaler(scale),
                norm1=norm(norm_kind, inner),
                relu=nn.ReLU(),
                conv2=conv(inner, cout, 3, padding=1, bias=False),
                scaler2=scaler(scale),
                norm2=norm(norm_kind, cout),
                step=Step() if steps else nn.Identity(),
            )
        if projects:
            self.projection = sequential(
                conv=conv(cin, cout, 1, stride=stride, bias=False),
                scaler=scaler(scale),
                norm=norm(norm_kind, cout),
            )
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = x if self.projection is None else self.projection(x)
        return self.relu(skip if self.residual is None else self.residual(x) + skip)


class PreActBlock(nn.Module):
    """residual(a) + skip, a = relu(norm(x)): [B, cin, H, W] -> [B, cout, H', W'].

    The skip is x itself, or a projection of a. `pre` and `post` are what the Scaler divides by
    before a norm and behind a convolution.
    """

    def __init__(
        self,
        cin: Axis,
        inner: Axis,
        cout: Axis,
        is_whole: bool,
        *,
        norm_kind: NormKind,
        pre: float,
        post: float,
    ):
        super().__init__()
        projects, stride = _changes(cin, cout)
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
            )
        if projects:
            self.projection = sequential(conv=conv(cin, cout, 1, stride=stride, bias=False), scaler=scaler(post))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.activate is None:
            return x
        a = self.activate(x)
        skip = x if self.projection is None else self.projection(a)
        return skip if self.residual is None else self.residual(a) + skip


def _sites(site: ScalerSite, scale: float) -> tuple[float, float]:
    """What the Scaler divides by before a norm, and behind a convolution."""
    return (scale, 1.0) if site == "pre_norm" else (1.0, scale)


def _changes(cin: Axis, cout: Axis) -> tuple[bool, int]:
    """Whether a block projects, and its stride: where the stream changes its axis, its image is halved."""
    projects = cin.name != cout.name
    return projects, 2 if projects else 1


def _paths(depth: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    """The module paths of the blocks, stage by stage."""
    return tuple(tuple(f"stage{s}.{b}" for b in range(count)) for s, count in enumerate(depth, start=1))


def _stages(
    net: Net, depth: tuple[int, ...], block: Callable[[Axis, Axis, Axis, bool], nn.Module]
) -> tuple[dict[str, nn.Module], Axis]:
    """The stages by name, and the axis of the last. The stem before them has the axis of the first.

    `block(cin, inner, cout, is_whole)` makes one block.
    """
    check_without(net, [path for paths in _paths(depth) for path in paths])
    stages: dict[str, nn.Module] = {}
    cin = net.axis("stage1", CHANNELS[0])
    for s, (channels, count) in enumerate(zip(CHANNELS, depth, strict=True), start=1):
        cout, blocks = net.axis(f"stage{s}", channels), []
        for b in range(count):
            path = f"stage{s}.{b}"
            inner = net.axis(f"{path}.inner", channels)
            blocks.append(block(cin, inner, cout, path not in net.without))
            cin = cout
        stages[f"stage{s}"] = nn.Sequential(*blocks)
    return stages, cin
