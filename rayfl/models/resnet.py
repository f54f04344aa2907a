"""Residual networks: a stem and stages of blocks; the first block of a later stage halves the image.

The residual stream of a stage is one axis, "stage1", "stage2", ...: whatever is added to it is cut
with it. The channels between the convolutions of a block are axes of their own. `Net.without`
names blocks ("stage2.1") whose residual branch is left out. What the skip needs of such a block
stays: the projection, and before it the norm of a pre-activation block. With `Net.steps` a residual
branch ends in a step size.
"""

from abc import ABC
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import nn

from rayfl.axes import Axis, Net, conv, linear, norm
from rayfl.config import nearest
from rayfl.models.base import Model
from rayfl.models.exits import DepthFLExit, EarlyExits, ExitKind, scalefl_exit
from rayfl.models.layers import Init, NormKind, Step, check_without, heterofl_head, initialise, scaler, sequential
from rayfl.models.pretrained import RESNET, Pretrained

ScalerSite = Literal["pre_norm", "post_conv"]


class PostActResNet(Model, ABC):
    """He et al., arXiv 1512.03385; a stage changes its stream by a 1x1 convolution and a norm. With `Net.exits` it
    gives the logits of its early exits [E, B, classes]. A final class adds `name` and `depth`, perhaps another stem
    and bottlenecks."""

    norm: NormKind = "static_bn"
    maxpool: bool = False
    """3x3 max pooling of stride 2 after the stem, as in NeFL; FjORD has none."""
    channels: int = Field(default=64, ge=1)
    """Channels of the stem and the first stage; they double from stage to stage."""
    init: Init = "torch"
    """How weights start: as torch's layers do; kaiming: normal by the fan-in, of convolutions and linear layers;
    kaiming_fan_out: normal by the fan-out, of convolutions alone."""
    exits: tuple[str, ...] = ()
    """Blocks ("stage2.1") behind which an early exit stands, in the order of the network."""
    exit: ExitKind = "scalefl"
    """What an early exit is: ScaleFL's three convolutions, or DepthFL's gate and separable convolutions."""

    depth: ClassVar[tuple[int, ...]]
    """Blocks of every stage."""
    stem: ClassVar[tuple[int, int]] = (3, 1)
    """Kernel and stride of the first convolution."""
    inner: ClassVar[int] = 1
    outer: ClassVar[int] = 1
    """Channels inside the blocks of the first stage and of its stream, as multiples of `channels`, which are cut
    together. Blocks are bottlenecks where the two differ."""

    @field_validator("exits")
    @classmethod
    def _blocks_in_order(cls, exits: tuple[str, ...]) -> tuple[str, ...]:
        order = [*chain(*block_paths(cls.depth))]
        for path in exits:
            if path not in order:
                raise ValueError(f"blocks of the network; {path!r} is none; {nearest(path, order)}")
        if list(exits) != [path for path in order if path in exits]:
            raise ValueError("every block once, in the order of the network")
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
            block = partial(_basic, norm_kind=self.norm)
        else:
            block = partial(_bottleneck, norm_kind=self.norm, copies=self.inner)
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
        network = sequential(**layers)
        if net.exits:
            exits = {path: self._exit(net, i, streams) for i, path in enumerate(self.exits[: net.exits])}
            network = EarlyExits(network, exits, has_head)
        initialise(network, self.init)
        return network

    def _exit(self, net: Net, index: int, streams: list[Axis]) -> nn.Module:
        """The early exit behind the block `self.exits[index]`."""
        path, name = self.exits[index], f"exit{index + 1}"
        stage = next(s for s, paths in enumerate(self.blocks) if path in paths)
        channels = [self.channels * 2**s for s in range(stage, len(self.depth))]
        if self.exit == "scalefl":
            return scalefl_exit(net, name, streams[stage], channels[0], self.labels, norm_kind=self.norm)
        channels = [self.outer * c for c in channels]
        return DepthFLExit(net, name, streams[stage], channels, self.labels, norm_kind=self.norm)


class ResNet18(Pretrained, PostActResNet):
    """11,173,962 parameters."""

    name: Literal["resnet18"] = "resnet18"
    depth: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)
    url: ClassVar[str] = "https://download.pytorch.org/models/resnet18-f37072fd.pth"
    names: ClassVar = RESNET
    drawn: ClassVar = ("conv", "head")


class ResNet34(Pretrained, PostActResNet):
    """21,282,122 parameters."""

    name: Literal["resnet34"] = "resnet34"
    depth: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)
    url: ClassVar[str] = "https://download.pytorch.org/models/resnet34-b627a593.pth"
    names: ClassVar = RESNET
    drawn: ClassVar = ("conv", "head")


class ResNet56(PostActResNet):
    """For small images, as in NeFL, with projections: 855,770 parameters."""

    name: Literal["resnet56"] = "resnet56"
    channels: int = Field(default=16, ge=1)
    """Channels of the stem and the first stage; they double from stage to stage."""
    init: Init = "kaiming"
    """As for resnet18."""

    depth: ClassVar[tuple[int, ...]] = (9, 9, 9)


class ResNet110(PostActResNet):
    """For small images, as in NeFL, with projections: 1,730,714 parameters."""

    name: Literal["resnet110"] = "resnet110"
    channels: int = Field(default=16, ge=1)
    """Channels of the stem and the first stage; they double from stage to stage."""
    init: Init = "kaiming"
    """As for resnet18."""

    depth: ClassVar[tuple[int, ...]] = (18, 18, 18)


class WideResNet101(Pretrained, PostActResNet):
    """torchvision's `wide_resnet101_2`, with 10 classes: 124,858,186 parameters."""

    name: Literal["wide_resnet101_2"] = "wide_resnet101_2"
    input: tuple[int, int, int] = (3, 224, 224)
    """Channels, height and width of one image. Taken from the data set unless given."""
    maxpool: bool = True
    """3x3 max pooling of stride 2 after the stem."""
    init: Init = "kaiming_fan_out"
    """As for resnet18."""

    depth: ClassVar[tuple[int, ...]] = (3, 4, 23, 3)
    stem: ClassVar[tuple[int, int]] = (7, 2)
    inner: ClassVar[int] = 2
    outer: ClassVar[int] = 4
    url: ClassVar[str] = "https://download.pytorch.org/models/wide_resnet101_2-32ee1156.pth"
    names: ClassVar = RESNET


class DepthFLResNet18(PostActResNet):
    """DepthFL's, with early exits behind the first three stages: 12,283,344 parameters with 100 classes."""

    name: Literal["depthfl_resnet18"] = "depthfl_resnet18"
    init: Init = "kaiming_fan_out"
    """As for resnet18."""
    exits: tuple[str, ...] = ("stage1.1", "stage2.1", "stage3.1")
    """Blocks behind which an early exit stands, in the order of the network."""
    exit: ExitKind = "depthfl"
    """As for resnet18."""

    depth: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)


class ScaleFLResNet110(PostActResNet):
    """ScaleFL's, with early exits behind 30, 38 and 46 of its 54 blocks: 1,982,136 parameters."""

    name: Literal["scalefl_resnet110"] = "scalefl_resnet110"
    channels: int = Field(default=16, ge=1)
    """Channels of the stem and the first stage; they double from stage to stage."""
    exits: tuple[str, ...] = ("stage2.11", "stage3.1", "stage3.9")
    """Blocks behind which an early exit stands, in the order of the network."""

    depth: ClassVar[tuple[int, ...]] = (18, 18, 18)


class PreActResNet(Model, ABC):
    """He et al., arXiv 1603.05027, with a 3x3 stem. A final class adds `name` and `depth`."""

    norm: NormKind = "static_bn"
    scaler_site: ScalerSite = "pre_norm"
    """Where the Scaler stands: on the input of every norm, as in HeteroFL's code, which leaves the
    skip alone; or behind every convolution, as its section 3.3 says."""

    depth: ClassVar[tuple[int, ...]]
    """Blocks of every stage."""
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


class PostActBlock(nn.Module):
    """relu(residual(x) + skip(x)): [B, cin, H, W] -> [B, cout, H', W']. The skip is x itself, or a projection."""

    def __init__(self, residual: nn.Module | None, projection: nn.Module | None):
        super().__init__()
        self.residual, self.projection = residual, projection
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = x if self.projection is None else self.projection(x)
        return self.relu(skip if self.residual is None else self.residual(x) + skip)


def _basic(
    net: Net, path: str, cin: Axis, channels: int, cout: Axis, stride: int, *, norm_kind: NormKind
) -> PostActBlock:
    """Two 3x3 convolutions, with `channels` between them in the widest network."""
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


def _bottleneck(
    net: Net, path: str, cin: Axis, channels: int, cout: Axis, stride: int, *, norm_kind: NormKind, copies: int
) -> PostActBlock:
    """Convolutions of 1x1, 3x3 and 1x1, with `channels` times `copies` between them in the widest network. The second
    has the stride, as torchvision's."""
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

    The skip is x itself, or a projection of a. `pre` and `post` are what the Scaler divides by
    before a norm and behind a convolution.
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
    """The skip of a post-activation block, where the stream changes its axis."""
    if cin.name == cout.name:
        return None
    return sequential(
        conv=conv(cin, cout, 1, stride=stride, bias=False),
        scaler=scaler(net.scale),
        norm=norm(norm_kind, cout),
    )


def _step(net: Net) -> nn.Module:
    return Step() if net.steps else nn.Identity()


def _sites(site: ScalerSite, scale: float) -> tuple[float, float]:
    """What the Scaler divides by before a norm, and behind a convolution."""
    return (scale, 1.0) if site == "pre_norm" else (1.0, scale)


def block_paths(depth: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    """The module paths of the blocks, stage by stage."""
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
    """The stages by name, and the axes of their streams, of which a channel is `copies` in a row. Nothing is made
    behind the block `last`.

    `block(net, path, cin, channels, cout, stride)` makes one block.
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
