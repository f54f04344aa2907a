"""SpaFL's networks for CIFAR (Kim, Saad, Debbah, Hong, arXiv 2406.00431), as in the authors' code; its network for
Fashion-MNIST is `lenet5_caffe`. Their norms are batch norms, private to each client.
"""

from functools import partial
from itertools import chain
from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from rayfl.core.axes import conv, linear, norm
from rayfl.core.net import Net
from rayfl.models.base import ImageModel
from rayfl.models.blocks import PreActBlock, block_paths, stages_of
from rayfl.models.cnn import Conv, convolutions
from rayfl.models.layers import NormKind, check_without, scaler, sequential


class SpaFLCNN(ImageModel):
    """Seven layers without biases for CIFAR-10: 806,080 parameters, of which 804,800 are weights. The paper's 807,366
    also include the norms' running statistics and six counters of batches. Its 1,418 thresholds belong to another
    network: this one has 650 filters and neurons."""

    name: Literal["spafl_cnn"] = "spafl_cnn"
    smallest: ClassVar = {"input": (1, 28, 28), "classes": 4}

    def build(self, net: Net) -> nn.Module:
        convs = [Conv(64, 5, pool=False), Conv(64, 5), Conv(128, 5, pool=False), Conv(128, 5)]
        layers, channels, pixels = convolutions(self, net, convs, "static_bn", bias=False)
        layers["flatten"] = nn.Flatten()
        features = channels.repeat(pixels)
        for name in ("hidden1", "hidden2"):
            cout = net.axis(name, 128)
            layers[name] = linear(features, cout, bias=False)
            layers[f"{name}_scaler"] = scaler(net.scale)
            layers[f"{name}_norm"] = norm("static_bn", cout)
            layers[f"{name}_relu"] = nn.ReLU()
            features = cout
        return sequential(**layers, head=linear(features, self.labels, bias=False))


class SpaFLResNet18(ImageModel):
    """Pre-activation ResNet for CIFAR-100, with a norm after the stem and none before the classifier: 2,819,396
    parameters with 100 classes. The paper's 11,159,232 are those of the convolutions with 64 channels."""

    name: Literal["spafl_resnet18"] = "spafl_resnet18"
    norm: NormKind = "static_bn"
    channels: int = Field(default=32, ge=1)
    """Channels of the stem and the first stage; they double from stage to stage. 32 in the authors' code and the
    paper's list of layers, 64 in the paper's counts of parameters, bytes and operations."""
    smallest: ClassVar = {**ImageModel.smallest, "channels": 16}

    depth: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)
    """Number of blocks per stage."""

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        return block_paths(self.depth)

    def build(self, net: Net) -> nn.Module:
        check_without(net, [*chain(*self.blocks)])
        stem = net.axis("stage1", self.channels)
        block = partial(PreActBlock, norm_kind=self.norm, pre=net.scale, post=1.0)
        stages, streams = stages_of(net, self.depth, self.channels, stem, block)
        return sequential(
            conv=conv(self.image, stem, 3, padding=1, bias=False),
            scaler=scaler(net.scale),
            norm=norm(self.norm, stem),
            relu=nn.ReLU(),
            **stages,
            average=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=linear(streams[-1], self.labels),
        )
