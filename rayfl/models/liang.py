"""The two networks of LG-FedAvg (Liang et al., arXiv 2001.01523), also used by HeteroFL's baselines from that paper.

Every layer except the last is followed by Scaler and ReLU. The authors' MLP ends in a softmax, and their loss applies
a second one; these networks end in logits.
"""

from typing import ClassVar, Literal

from torch import nn

from rayfl.core.axes import Axis, linear
from rayfl.core.net import Net
from rayfl.models.base import ImageModel
from rayfl.models.cnn import Conv, convolutions
from rayfl.models.layers import check_without, scaler, sequential


class LiangMLP(ImageModel):
    """MLP for MNIST: 633,226 parameters. Its layers are input, hidden1, hidden2, hidden3, head."""

    name: Literal["liang_mlp"] = "liang_mlp"
    input: tuple[int, int, int] = (1, 28, 28)

    def build(self, net: Net) -> nn.Module:
        check_without(net, ())
        _, height, width = self.input
        sizes = {"input": 512, "hidden1": 256, "hidden2": 256, "hidden3": 128}
        return _with_linears(self, net, {}, self.image.repeat(height * width), sizes)


class LiangCNN(ImageModel):
    """CNN for CIFAR-10: 64,102 parameters. Its layers are conv1, conv2, hidden1, hidden2, head."""

    name: Literal["liang_cnn"] = "liang_cnn"
    smallest: ClassVar = {"input": (1, 16, 16), "classes": 4}

    def build(self, net: Net) -> nn.Module:
        layers, channels, pixels = convolutions(self, net, [Conv(6, 5), Conv(16, 5)], "none")
        return _with_linears(self, net, layers, channels.repeat(pixels), {"hidden1": 120, "hidden2": 100})


def _with_linears(
    model: ImageModel, net: Net, layers: dict[str, nn.Module], features: Axis, sizes: dict[str, int]
) -> nn.Sequential:
    """Return `layers`, a flatten to `features`, hidden linear layers (name -> units), and the classifier."""
    layers = layers | {"flatten": nn.Flatten()}
    for name, units in sizes.items():
        cout = net.axis(name, units)
        layers[name] = linear(features, cout)
        layers[f"{name}_scaler"] = scaler(net.scale)
        layers[f"{name}_relu"] = nn.ReLU()
        features = cout
    return sequential(**layers, head=linear(features, model.labels))
