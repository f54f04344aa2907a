"""Residual networks: a stem, stages of blocks (`rayfl.models.blocks`), and a classifier. The first block of every later
stage halves the image."""

from abc import ABC
from functools import partial
from itertools import chain
from typing import ClassVar, Literal

from pydantic import Field, field_validator
from torch import nn

from rayfl.core.axes import Axis, conv, linear, norm
from rayfl.core.net import Net
from rayfl.models.base import ImageModel
from rayfl.models.blocks import PreActBlock, basic_block, block_paths, bottleneck_block, stages_of
from rayfl.models.exits import DepthFLExit, EarlyExits, ExitKind, scalefl_exit
from rayfl.models.layers import (
    Init,
    NormKind,
    check_exits,
    check_without,
    heterofl_linear,
    initialise,
    scaler,
    sequential,
)
from rayfl.models.pretrained import RESNET, Pretrained

ScalerSite = Literal["pre_norm", "post_conv"]


class PostActResNet(ImageModel, ABC):
    """ResNet of He et al., arXiv 1512.03385. Between stages the skip is a 1x1 convolution and a norm. With `Net.exits`
    it returns a tuple: the logits [B, classes] of its early exits. A final class adds `name`, `depth`, and optionally
    another stem and bottlenecks."""

    norm: NormKind = "static_bn"
    maxpool: bool = False
    """3x3 max pooling of stride 2 after the stem, as in NeFL; FjORD has none."""
    channels: int = Field(default=64, ge=1)
    """Channels of the stem and the first stage; they double from stage to stage."""
    init: Init = "torch"
    """Initial weights. torch: torch's defaults; kaiming: normal by fan-in, for convolutions and linear layers;
    kaiming_fan_out: normal by fan-out, for convolutions only."""
    exits: tuple[str, ...] = ()
    """Blocks ("stage2.1") followed by an early exit, in network order."""
    exit: ExitKind = "scalefl"
    """Early exits: ScaleFL's three convolutions, or DepthFL's gate and separable convolutions."""
    smallest: ClassVar = {**ImageModel.smallest, "channels": 16}

    depth: ClassVar[tuple[int, ...]]
    """Number of blocks per stage."""
    stem: ClassVar[tuple[int, int]] = (3, 1)
    """Kernel and stride of the first convolution."""
    inner: ClassVar[int] = 1
    outer: ClassVar[int] = 1
    """Multiples of `channels`: channels inside the blocks (`inner`) and of the stream (`outer`) of the first stage. The
    copies of a channel are cut together. Blocks are bottlenecks if the two differ."""

    @field_validator("exits")
    @classmethod
    def _blocks_in_order(cls, exits: tuple[str, ...]) -> tuple[str, ...]:
        check_exits(exits, [*chain(*block_paths(cls.depth))])
        return exits

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        return block_paths(self.depth)

    @property
    def exit_count(self) -> int:
        return len(self.exits) + 1

    def build(self, net: Net) -> nn.Module:
        check_without(net, [*chain(*self.blocks)], self.exit_count)
        has_head = net.exits in (0, self.exit_count)
        stem = net.axis("stage1" if self.outer == 1 else "stem", self.channels)
        kernel, stride = self.stem
        if self.inner == self.outer:
            block = partial(basic_block, norm_kind=self.norm)
        else:
            block = partial(bottleneck_block, norm_kind=self.norm, copies=self.inner)
        last = None if has_head else self.exits[net.exits - 1]
        stages, streams = stages_of(net, self.depth, self.channels, stem, block, self.outer, last)
        layers = dict(
            conv=conv(self.image, stem, kernel, stride=stride, padding=kernel // 2, bias=False),
            scaler=scaler(net.scale),
            norm=norm(self.norm, stem),
            relu=nn.ReLU(),
            maxpool=nn.MaxPool2d(3, stride=2, padding=1) if self.maxpool else nn.Identity(),
            **stages,
        )
        if has_head:
            features = streams[-1]
            layers |= dict(average=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), head=linear(features, self.labels))
        module = sequential(**layers)
        if net.exits:
            exits = {path: self._exit(net, i, streams) for i, path in enumerate(self.exits[: net.exits])}
            module = EarlyExits(module, exits, has_head)
        initialise(module, self.init)
        return module

    def _exit(self, net: Net, index: int, streams: list[Axis]) -> nn.Module:
        """Return the early exit after the block `self.exits[index]`."""
        path, name = self.exits[index], f"exit{index + 1}"
        stage = next(s for s, paths in enumerate(self.blocks) if path in paths)
        channels = [self.channels * 2**s for s in range(stage, len(self.depth))]
        if self.exit == "scalefl":
            return scalefl_exit(net, name, streams[stage], channels[0], self.labels, norm_kind=self.norm)
        channels = [self.outer * c for c in channels]
        return DepthFLExit(net, name, streams[stage], channels, self.labels, norm_kind=self.norm)


class ResNet18(Pretrained, PostActResNet):
    """ResNet-18 with a 3x3 stem: 11,173,962 parameters."""

    name: Literal["resnet18"] = "resnet18"
    depth: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)
    url: ClassVar[str] = "https://download.pytorch.org/models/resnet18-f37072fd.pth"
    names: ClassVar = RESNET
    drawn: ClassVar = ("conv", "head")


class ResNet34(Pretrained, PostActResNet):
    """ResNet-34 with a 3x3 stem: 21,282,122 parameters."""

    name: Literal["resnet34"] = "resnet34"
    depth: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)
    url: ClassVar[str] = "https://download.pytorch.org/models/resnet34-b627a593.pth"
    names: ClassVar = RESNET
    drawn: ClassVar = ("conv", "head")


class ResNet8(PostActResNet):
    """ResNet for small images, like resnet56, with 3 blocks: 78,042 parameters."""

    name: Literal["resnet8"] = "resnet8"
    channels: int = Field(default=16, ge=1)
    init: Init = "kaiming"

    depth: ClassVar[tuple[int, ...]] = (1, 1, 1)


class ResNet20(PostActResNet):
    """ResNet for small images, like resnet56, with 9 blocks: 272,474 parameters."""

    name: Literal["resnet20"] = "resnet20"
    channels: int = Field(default=16, ge=1)
    init: Init = "kaiming"

    depth: ClassVar[tuple[int, ...]] = (3, 3, 3)


class ResNet32(PostActResNet):
    """ResNet for small images, like resnet56, with 15 blocks: 466,906 parameters."""

    name: Literal["resnet32"] = "resnet32"
    channels: int = Field(default=16, ge=1)
    init: Init = "kaiming"

    depth: ClassVar[tuple[int, ...]] = (5, 5, 5)


class ResNet56(PostActResNet):
    """ResNet-56 for small images, as in NeFL, with projections: 855,770 parameters."""

    name: Literal["resnet56"] = "resnet56"
    channels: int = Field(default=16, ge=1)
    init: Init = "kaiming"

    depth: ClassVar[tuple[int, ...]] = (9, 9, 9)


class ResNet110(PostActResNet):
    """ResNet-110 for small images, as in NeFL, with projections: 1,730,714 parameters."""

    name: Literal["resnet110"] = "resnet110"
    channels: int = Field(default=16, ge=1)
    init: Init = "kaiming"

    depth: ClassVar[tuple[int, ...]] = (18, 18, 18)


class WideResNet101(Pretrained, PostActResNet):
    """torchvision's `wide_resnet101_2`, with 10 classes: 124,858,186 parameters."""

    name: Literal["wide_resnet101_2"] = "wide_resnet101_2"
    input: tuple[int, int, int] = (3, 224, 224)
    maxpool: bool = True
    init: Init = "kaiming_fan_out"

    depth: ClassVar[tuple[int, ...]] = (3, 4, 23, 3)
    stem: ClassVar[tuple[int, int]] = (7, 2)
    inner: ClassVar[int] = 2
    outer: ClassVar[int] = 4
    url: ClassVar[str] = "https://download.pytorch.org/models/wide_resnet101_2-32ee1156.pth"
    names: ClassVar = RESNET


class DepthFLResNet18(PostActResNet):
    """DepthFL's ResNet-18, with early exits after the first three stages: 12,283,344 parameters with 100 classes."""

    name: Literal["depthfl_resnet18"] = "depthfl_resnet18"
    init: Init = "kaiming_fan_out"
    exits: tuple[str, ...] = ("stage1.1", "stage2.1", "stage3.1")
    exit: ExitKind = "depthfl"
    smallest: ClassVar = {**PostActResNet.smallest, "exits": ("stage1.0", "stage2.0")}

    depth: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)


class ScaleFLResNet110(PostActResNet):
    """ScaleFL's ResNet-110, with early exits after 30, 38 and 46 of its 54 blocks: 1,982,136 parameters."""

    name: Literal["scalefl_resnet110"] = "scalefl_resnet110"
    channels: int = Field(default=16, ge=1)
    exits: tuple[str, ...] = ("stage2.11", "stage3.1", "stage3.9")
    smallest: ClassVar = {**PostActResNet.smallest, "exits": ("stage1.0", "stage2.0")}

    depth: ClassVar[tuple[int, ...]] = (18, 18, 18)


class PreActResNet(ImageModel, ABC):
    """Pre-activation ResNet of He et al., arXiv 1603.05027, with a 3x3 stem. A final class adds `name` and `depth`."""

    norm: NormKind = "static_bn"
    scaler_site: ScalerSite = "pre_norm"
    """Place of the Scaler. pre_norm: before every norm, as in HeteroFL's code, which does not scale the skip;
    post_conv: after every convolution, as in its section 3.3."""
    smallest: ClassVar = {**ImageModel.smallest, "channels": 16}

    depth: ClassVar[tuple[int, ...]]
    """Number of blocks per stage."""
    channels: ClassVar[int] = 64
    """Channels of the stem and the first stage; they double from stage to stage."""

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        return block_paths(self.depth)

    def build(self, net: Net) -> nn.Module:
        check_without(net, [*chain(*self.blocks)])
        stem = net.axis("stage1", self.channels)
        pre, post = _sites(self.scaler_site, net.scale)
        block = partial(PreActBlock, norm_kind=self.norm, pre=pre, post=post)
        stages, streams = stages_of(net, self.depth, self.channels, stem, block)
        features = streams[-1]
        return sequential(
            conv=conv(self.image, stem, 3, padding=1, bias=False),
            conv_scaler=scaler(post),
            **stages,
            norm_scaler=scaler(pre),
            norm=norm(self.norm, features),
            relu=nn.ReLU(),
            average=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=heterofl_linear(features, self.labels),
        )


class PreActResNet18(PreActResNet):
    """Pre-activation ResNet-18 of FedRolex and of HeteroFL's code since 2021: 11,172,170 parameters."""

    name: Literal["preact_resnet18"] = "preact_resnet18"
    depth: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)


class PreActResNet18HeteroFL(PreActResNet):
    """The "PreResNet18" of HeteroFL's tables and of its code until 2021: 9,622,090 parameters."""

    name: Literal["preact_resnet18_heterofl"] = "preact_resnet18_heterofl"
    depth: ClassVar[tuple[int, ...]] = (1, 1, 1, 2)


def _sites(site: ScalerSite, scale: float) -> tuple[float, float]:
    """Return the divisors of the Scaler before a norm and after a convolution."""
    return (scale, 1.0) if site == "pre_norm" else (1.0, scale)
