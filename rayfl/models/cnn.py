"""Plain convolutional networks: convolutions with pooling, then linear layers.

Every convolution is followed by Scaler, norm, optional max pooling, and ReLU; a hidden linear layer by Scaler and ReLU
(HeteroFL section 3.3: a Scaler after every parametric layer except the classifier). Max pooling and ReLU commute,
gradients included; in this order ReLU does a quarter of the work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from rayfl.config import ConfigError
from rayfl.core.axes import Axis, conv, linear, norm
from rayfl.core.net import Net
from rayfl.models.base import ImageModel
from rayfl.models.layers import NormKind, check_without, heterofl_linear, scaler, sequential


class DigitsCNN(ImageModel):
    """CNN for the 8x8 digits of scikit-learn: 53,194 parameters."""

    name: Literal["digits_cnn"] = "digits_cnn"
    input: tuple[int, int, int] = (1, 8, 8)
    norm: NormKind = "static_bn"

    def build(self, net: Net) -> nn.Module:
        convs = [Conv(32, 3, padding=1), Conv(64, 3, padding=1)]
        return flattened(self, net, convs, hidden=128, norm_kind=self.norm)


class McMahanCNN(ImageModel):
    """The MNIST CNN of FedAvg (arXiv 1602.05629, section 3): 1,663,370 parameters."""

    name: Literal["mcmahan_cnn"] = "mcmahan_cnn"
    input: tuple[int, int, int] = (1, 28, 28)
    norm: NormKind = "none"

    def build(self, net: Net) -> nn.Module:
        convs = [Conv(32, 5, padding=2), Conv(64, 5, padding=2)]
        return flattened(self, net, convs, hidden=512, norm_kind=self.norm)


class LeNet5Caffe(ImageModel):
    """LeNet-5-Caffe without biases, as in SpaFL (arXiv 2406.00431): 430,500 parameters."""

    name: Literal["lenet5_caffe"] = "lenet5_caffe"
    input: tuple[int, int, int] = (1, 28, 28)
    smallest: ClassVar = {"input": (1, 16, 16), "classes": 4}

    def build(self, net: Net) -> nn.Module:
        return flattened(self, net, [Conv(20, 5), Conv(50, 5)], hidden=500, bias=False)


class HeteroFLCNN(ImageModel):
    """The MNIST CNN of HeteroFL (arXiv 2010.01264): 1,556,874 parameters."""

    name: Literal["heterofl_cnn"] = "heterofl_cnn"
    input: tuple[int, int, int] = (1, 28, 28)
    norm: NormKind = "static_bn"

    def build(self, net: Net) -> nn.Module:
        convs = [Conv(channels, 3, padding=1) for channels in (64, 128, 256)]
        convs.append(Conv(512, 3, padding=1, pool=False))
        layers, features, _ = convolutions(self, net, convs, self.norm)
        return sequential(
            **layers, average=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), head=heterofl_linear(features, self.labels)
        )


@dataclass(frozen=True)
class Conv:
    """A convolution of stride 1, optionally followed by 2x2 max pooling."""

    channels: int
    kernel: int
    padding: int = 0
    pool: bool = True

    def after(self, size: int) -> int:
        """Return the output's height or width for an input of `size`."""
        size += 2 * self.padding - self.kernel + 1
        return size // 2 if self.pool else size

    def before(self, size: int) -> int:
        """Return the smallest input height or width for an output of `size`."""
        return size * (2 if self.pool else 1) - 2 * self.padding + self.kernel - 1


def flattened(
    model: ImageModel, net: Net, convs: Sequence[Conv], hidden: int, norm_kind: NormKind = "none", bias: bool = True
) -> nn.Sequential:
    """Return a network of convolutions, one hidden linear layer over all pixels, and the classifier."""
    layers, channels, pixels = convolutions(model, net, convs, norm_kind, bias)
    features = net.axis("hidden", hidden)
    return sequential(
        **layers,
        flatten=nn.Flatten(),
        hidden=linear(channels.repeat(pixels), features, bias=bias),
        hidden_scaler=scaler(net.scale),
        hidden_relu=nn.ReLU(),
        head=linear(features, model.labels, bias=bias),
    )


def convolutions(
    model: ImageModel, net: Net, convs: Sequence[Conv], norm_kind: NormKind, bias: bool = True
) -> tuple[dict[str, nn.Module], Axis, int]:
    """Return the layers by name, the axis of the last channels, and the pixels per channel after them."""
    check_without(net, ())
    height, width = _sizes(model, convs)
    layers: dict[str, nn.Module] = {}
    cin = model.image
    for i, c in enumerate(convs, start=1):
        cout = net.axis(f"conv{i}", c.channels)
        layers[f"conv{i}"] = conv(cin, cout, c.kernel, padding=c.padding, bias=bias)
        layers[f"scaler{i}"] = scaler(net.scale)
        layers[f"norm{i}"] = norm(norm_kind, cout)
        layers[f"pool{i}"] = nn.MaxPool2d(2) if c.pool else nn.Identity()
        layers[f"relu{i}"] = nn.ReLU()
        cin = cout
    return layers, cin, height * width


def _sizes(model: ImageModel, convs: Sequence[Conv]) -> tuple[int, int]:
    """Return height and width after all convolutions."""
    smallest = 1
    for c in reversed(convs):
        smallest = c.before(smallest)
    _, height, width = model.input
    if min(height, width) < smallest:
        raise ConfigError(
            f"model {model.name}: images of {height}x{width} pixels are too small for its convolutions "
            f"and pooling. Allowed: at least {smallest}x{smallest}; take another model or data set"
        )
    for c in convs:
        height, width = c.after(height), c.after(width)
    return height, width
