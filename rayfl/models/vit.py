"""Vision transformer: the patches of an image as a sequence, preceded by a class token.

Shapes: B images, N tokens (one per patch, and the class token), C features of the residual stream, H heads of D
features.

The stream is one axis, "hidden", of D positions with H features each: a narrow network has its first ceil(width D) H
features. Inside an attention every head keeps its first ceil(width D) features, in queries, keys and values. Slicing
torchvision's stacked q, k and v would mix the heads. The MLP is four times as wide as the stream.
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from rayfl.core.axes import Axis, conv, declare, layer_norm, linear
from rayfl.core.net import Net
from rayfl.models.layers import Step, check_without, scaler, sequential
from rayfl.models.pretrained import VIT, Pretrained

EXPANSION = 4


class ViTB16(Pretrained):
    """Dosovitskiy et al., arXiv 2010.11929, as torchvision has it, without dropout: 85,806,346 parameters with ten
    classes. `Net.without` names encoder blocks ("encoder.11"), of which nothing stays. It starts as torchvision's
    does, but its head is not zero: NeFL's is a new linear layer."""

    name: Literal["vit_b_16"] = "vit_b_16"
    input: tuple[int, int, int] = (3, 224, 224)
    """Channels, height and width of one image, multiples of `patch`. Default: taken from the data set (`data.size`)."""
    layers: int = Field(default=12, ge=1)
    """Encoder blocks."""
    heads: int = Field(default=12, ge=1)
    """Attention heads, at every width."""
    head_width: int = Field(default=64, ge=1)
    """Features of a head; the residual stream has as many as all heads."""
    patch: int = Field(default=16, ge=1)
    """Height and width of a patch."""
    smallest: ClassVar = {**Pretrained.smallest, "layers": 2, "heads": 2, "head_width": 10, "patch": 4}

    url: ClassVar = "https://download.pytorch.org/models/vit_b_16-c867db91.pth"
    names: ClassVar = VIT

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        return (tuple(f"encoder.{i}" for i in range(self.layers)),)

    def build(self, net: Net) -> nn.Module:
        [paths] = self.blocks
        check_without(net, paths)
        _, height, width = self.input
        if height % self.patch or width % self.patch:
            raise ValueError(
                f"model {self.name}: images have {height}x{width} pixels. Allowed: multiples of {self.patch}, its "
                "patches; set data.size (224 as published)"
            )
        stream = net.axis("hidden", self.head_width).repeat(self.heads)
        blocks = {path.rpartition(".")[2]: self._block(net, path, stream) for path in paths if path not in net.without}
        patches = conv(self.image, stream, self.patch, stride=self.patch)
        nn.init.trunc_normal_(patches.weight, std=patches.weight[0].numel() ** -0.5)
        nn.init.zeros_(patches.get_parameter("bias"))
        return sequential(
            patches=patches,
            scaler=scaler(net.scale),
            tokens=Tokens(height * width // self.patch**2, stream),
            encoder=sequential(**blocks),
            norm=_norm(stream),
            first=First(),
            head=linear(stream, self.labels),
        )

    def _block(self, net: Net, path: str, stream: Axis) -> nn.Module:
        inner = net.axis(f"{path}.inner", self.head_width, groups=self.heads)
        hidden = net.axis(f"{path}.mlp", self.head_width).repeat(EXPANSION * self.heads)
        wide = partial(_linear, weights=nn.init.xavier_uniform_, biases=partial(nn.init.normal_, std=1e-6))
        return EncoderBlock(
            attention=sequential(
                norm=_norm(stream),
                attend=Attention(stream, inner, net.scale),
                step=Step() if net.steps else nn.Identity(),
            ),
            mlp=sequential(
                norm=_norm(stream),
                up=wide(stream, hidden),
                up_scaler=scaler(net.scale),
                gelu=nn.GELU(),
                down=wide(hidden, stream),
                down_scaler=scaler(net.scale),
                step=Step() if net.steps else nn.Identity(),
            ),
        )


class Tokens(nn.Module):
    """Class token and patch tokens, plus position embeddings: [B, C, H', W'] -> [B, N, C], N = 1 + H' W'."""

    def __init__(self, patches: int, stream: Axis):
        super().__init__()
        positions = Axis.fixed("positions", 1 + patches)
        self.first = nn.Parameter(torch.zeros(1, 1, stream.length))
        self.positions = nn.Parameter(torch.empty(1, positions.length, stream.length).normal_(std=0.02))
        declare(self, first=(None, None, stream), positions=(None, positions, stream))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = x.flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(x.shape[0], -1, -1), patches], 1) + self.positions


class First(nn.Module):
    """The first token: [B, N, C] -> [B, C]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0]


class EncoderBlock(nn.Module):
    """Encoder block: x + attention(x), then x + mlp(x): [B, N, C] -> [B, N, C]."""

    def __init__(self, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Attention(nn.Module):
    """Attention softmax(q k^T / sqrt(D)) v of every head, combined by a linear layer: [B, N, C] -> [B, N, C].

    Queries, keys and values are separate layers, [H D, C] each. `inner`: axis of D features in H groups.
    """

    def __init__(self, stream: Axis, inner: Axis, scale: float):
        super().__init__()
        # the bound of a stacked [3 H D, C]
        stacked = partial(nn.init.xavier_uniform_, gain=0.5**0.5)
        layers = [_linear(stream, inner, weights=stacked) for _ in range(3)]
        self.q, self.k, self.v = (sequential(linear=layer, scaler=scaler(scale)) for layer in layers)
        self.out = sequential(linear=_linear(inner, stream), scaler=scaler(scale))
        self.heads = inner.groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def _norm(stream: Axis) -> nn.LayerNorm:
    layer = layer_norm(stream)
    layer.eps = 1e-6
    return layer


def _linear(
    cin: Axis,
    cout: Axis,
    *,
    weights: Callable[[torch.Tensor], object] | None = None,
    biases: Callable[[torch.Tensor], object] = nn.init.zeros_,
) -> nn.Linear:
    """Return a linear layer with these initial weights. Default: torch's."""
    layer = linear(cin, cout)
    if weights is not None:
        weights(layer.weight)
    biases(layer.bias)
    return layer
