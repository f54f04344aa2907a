"""Networks for tables and series: a perceptron, convolutions over time, and an LSTM.

As in the networks for images, a Scaler follows every layer except the classifier, and the gates of the LSTM.
"""

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from rayfl.config import ConfigError
from rayfl.core.axes import CLASSES, Axis, conv1d, linear, norm
from rayfl.core.net import Net
from rayfl.models.base import Model
from rayfl.models.layers import NormKind, check_without, heterofl_linear, scaler, sequential

Size = Annotated[int, Field(ge=1, le=10**6)]
Sizes = Annotated[tuple[Size, ...], Field(min_length=1)]


class MLP(Model):
    """Perceptron of tables: x [B, variables] -> outputs [B, classes]. Layers are hidden1, hidden2, ..., head."""

    takes: ClassVar = "variables"
    smallest: ClassVar = {"variables": 6, "classes": 4, "hidden": (20, 16)}

    name: Literal["mlp"] = "mlp"
    variables: int = 10
    """Columns of the network input. Default: taken from the data set."""
    classes: int = 2
    """Number of outputs: classes, numbers or labels. Default: taken from the data set."""
    hidden: Sizes = (64, 64)
    """Units of the hidden layers."""

    def example(self, batch: int, device: torch.device | str) -> torch.Tensor:
        return torch.zeros(batch, self.variables, device=device)

    def build(self, net: Net) -> nn.Module:
        check_without(net, ())
        layers, features = {}, Axis.fixed("variables", self.variables)
        for i, units in enumerate(self.hidden, start=1):
            cout = net.axis(f"hidden{i}", units)
            layers[f"hidden{i}"] = linear(features, cout)
            layers[f"scaler{i}"] = scaler(net.scale)
            layers[f"relu{i}"] = nn.ReLU()
            features = cout
        return sequential(**layers, head=linear(features, Axis.fixed(CLASSES, self.classes)))


class SeriesModel(Model):
    """A network for series: x [B, C, T] -> outputs [B, classes]."""

    takes: ClassVar = "series"
    smallest: ClassVar[dict[str, Any]] = {"series": (2, 8), "classes": 4}

    series: tuple[int, int] = (1, 64)
    """Variables C and steps T of a series. Default: taken from the data set."""
    classes: int = 2
    """Number of outputs: classes, numbers or labels. Default: taken from the data set."""

    def example(self, batch: int, device: torch.device | str) -> torch.Tensor:
        return torch.zeros(batch, *self.series, device=device)

    @property
    def variables(self) -> Axis:
        """Axis of the variables, which is never cut."""
        return Axis.fixed("variables", self.series[0])

    @property
    def labels(self) -> Axis:
        """Axis of the outputs, which is never cut."""
        return Axis.fixed(CLASSES, self.classes)


class Conv1D(SeriesModel):
    """Convolutions over time, each with Scaler, norm, ReLU and max pooling by 2, and the mean over time."""

    name: Literal["conv1d"] = "conv1d"
    channels: Sizes = (32, 64)
    """Channels of the convolutions."""
    kernel: int = Field(default=5, ge=1, le=999)
    """Steps that a convolution covers, an odd number."""
    norm: NormKind = "static_bn"

    def build(self, net: Net) -> nn.Module:
        check_without(net, ())
        least = 2 ** len(self.channels)
        if self.series[1] < least or self.kernel % 2 == 0:
            raise ConfigError(
                f"model {self.name}: {len(self.channels)} layers with kernel {self.kernel} do not fit series of "
                f"{self.series[1]} steps. Allowed: at least {least} steps and an odd kernel"
            )
        layers, cin = {}, self.variables
        for i, channels in enumerate(self.channels, start=1):
            cout = net.axis(f"conv{i}", channels)
            layers[f"conv{i}"] = conv1d(cin, cout, self.kernel, padding=self.kernel // 2)
            layers[f"scaler{i}"] = scaler(net.scale)
            layers[f"norm{i}"] = norm(self.norm, cout)
            layers[f"pool{i}"] = nn.MaxPool1d(2)
            layers[f"relu{i}"] = nn.ReLU()
            cin = cout
        return sequential(
            **layers, average=nn.AdaptiveAvgPool1d(1), flatten=nn.Flatten(), head=heterofl_linear(cin, self.labels)
        )


class LSTM(SeriesModel):
    """Layers of LSTM (Hochreiter and Schmidhuber 1997, with forget gates), and a classifier of the last state."""

    name: Literal["lstm"] = "lstm"
    hidden: Sizes = (64,)
    """Units of the layers."""
    smallest: ClassVar = {**SeriesModel.smallest, "hidden": (20, 16)}

    def build(self, net: Net) -> nn.Module:
        check_without(net, ())
        layers, cin = {}, self.variables
        for i, units in enumerate(self.hidden, start=1):
            cin, before = net.axis(f"lstm{i}", units), cin
            layers[f"lstm{i}"] = Recurrent(before, cin, net.axis(f"lstm{i}", units, groups=4))
        head = linear(cin, self.labels)
        return sequential(**layers, last=Last(), scaler=scaler(net.scale), head=head)


class Recurrent(nn.Module):
    """One layer of LSTM, as torch's: x [B, C, T] -> states [B, H, T].

    It consists of linear layers, unlike torch's, so that methods cut, mask and count it as any other network. Gates
    are stacked in torch's order: input, forget, cell, output; every gate keeps the same units of a narrow network. Of
    torch's two biases there is one.
    """

    def __init__(self, cin: Axis, units: Axis, gates: Axis):
        super().__init__()
        self.units = units.length
        self.inputs, self.states = linear(cin, gates), linear(units, gates, bias=False)
        for weights in self.parameters():
            nn.init.uniform_(weights, -(units.length**-0.5), units.length**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs = self.inputs(x.transpose(1, 2))
        h = c = inputs.new_zeros(inputs.shape[0], self.units)
        found = []
        for step in inputs.unbind(1):
            i, f, g, o = (step + self.states(h)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            found.append(h)
        return torch.stack(found, 2)


class Last(nn.Module):
    """x [B, H, T] -> its last step [B, H]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, -1]
