"""FedGKT's networks (He et al., NeurIPS 2020, arXiv 2007.14513; FedML's resnet56_gkt): a feature extractor, followed by
a small head for clients or a large trunk for the server. `lenet5_gkt` is ours.

`extractor`: a 3x3 convolution, a norm and ReLU: [B, 3, H, W] -> [B, channels, H, W]. It is followed by stages of
bottlenecks (`rayfl.models.blocks`), the mean over pixels and a linear layer. The first block of every later stage
halves the image.

    >>> from rayfl.models import MODELS
    >>> [Net(MODELS[name]()).parameters for name in ("resnet8_gkt", "resnet55_gkt")]
    [10586, 591322]

`lenet5_gkt` splits LeNet-5-Caffe behind its first convolution, so that FedGKT can be compared with methods that train
LeNet-5-Caffe:

    >>> [Net(MODELS["lenet5_gkt"](**head)).parameters for head in ({}, {"channels": 10, "hidden": 60})]
    [430500, 15700]
"""

from abc import ABC
from functools import partial
from itertools import chain
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from rayfl.core.axes import conv, linear, norm
from rayfl.core.net import Net
from rayfl.models.base import ImageModel
from rayfl.models.blocks import block_paths, bottleneck_block, stages_of
from rayfl.models.cnn import Conv, flattened
from rayfl.models.layers import Init, NormKind, check_without, initialise, scaler, sequential

Depth = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]

OUTER = 4
"""Ratio of the channels between bottlenecks to those inside them."""


class GKTResNet(ImageModel, ABC):
    """An extractor and the stages after it. A final class adds `name` and `depth`."""

    norm: NormKind = "static_bn"
    channels: int = Field(default=16, ge=1)
    """Channels of the features and inside the first stage's bottlenecks; the latter double from stage to stage."""
    init: Init = "kaiming_fan_out"
    """Initial weights. torch: torch's defaults; kaiming: normal by fan-in, for convolutions and linear layers;
    kaiming_fan_out: normal by fan-out, for convolutions only."""
    depth: Depth
    """Number of bottlenecks per stage."""

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        return block_paths(self.depth)

    def build(self, net: Net) -> nn.Module:
        check_without(net, [*chain(*self.blocks)])
        features = net.axis("extractor", self.channels)
        block = partial(bottleneck_block, norm_kind=self.norm, copies=1)
        stages, streams = stages_of(net, self.depth, self.channels, features, block, OUTER)
        module = sequential(
            extractor=sequential(
                conv=conv(self.image, features, 3, padding=1, bias=False),
                scaler=scaler(net.scale),
                norm=norm(self.norm, features),
                relu=nn.ReLU(),
            ),
            **stages,
            average=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=linear(streams[-1], self.labels),
        )
        initialise(module, self.init)
        return module


class GKTResNet8(GKTResNet):
    """Network of a client: an extractor and a head of two bottlenecks, 10,586 parameters."""

    name: Literal["resnet8_gkt"] = "resnet8_gkt"
    depth: Depth = (2,)
    smallest: ClassVar = {**ImageModel.smallest, "channels": 4, "depth": (1,)}


class GKTResNet55(GKTResNet):
    """Network of the server: an extractor of 464 parameters and a trunk of 590,858, ResNet-55."""

    name: Literal["resnet55_gkt"] = "resnet55_gkt"
    depth: Depth = (6, 6, 6)
    smallest: ClassVar = {**ImageModel.smallest, "channels": 4, "depth": (1, 1)}


class GKTLeNet5(ImageModel):
    """LeNet-5-Caffe as an extractor (its first convolution, pooling and ReLU) and a trunk (its other layers): 430,500
    parameters. Fewer channels and hidden features give a client's head."""

    name: Literal["lenet5_gkt"] = "lenet5_gkt"
    input: tuple[int, int, int] = (1, 28, 28)
    channels: int = Field(default=50, ge=1)
    """Channels of the second convolution."""
    hidden: int = Field(default=500, ge=1)
    """Features of the hidden linear layer."""
    smallest: ClassVar = {"input": (1, 16, 16), "classes": 4}

    def build(self, net: Net) -> nn.Module:
        whole = flattened(self, net, [Conv(20, 5), Conv(self.channels, 5)], self.hidden, bias=False)
        layers = dict(whole.named_children())
        first = {name: layers.pop(name) for name in list(layers) if name.endswith("1")}
        return sequential(extractor=sequential(**first), **layers)
