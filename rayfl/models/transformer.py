"""Transformers of HeteroFL and FedRolex, which differ in sizes only: post-norm blocks over tokens.

Shapes: B sequences, T tokens, C features of the residual stream, H heads of D features, V classes or output tokens.

The stream is one axis, "hidden". Every attention, MLP and output head has its own axis. A narrow network keeps all
attention heads, each with its first ceil(width D) features. The vocabulary is never cut by width. Padding (a token
below 0) is masked in attention.
"""

from abc import ABC
from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import nn

from rayfl.core.axes import CLASSES, Axis, embedding, layer_norm
from rayfl.core.net import Net, load, params_of
from rayfl.models.base import TokenModel
from rayfl.models.layers import Step, check_exits, check_without, heterofl_linear, scaler, sequential


class Transformer(TokenModel, ABC):
    """Transformer: x [B, T] -> logits [B, T, V] of every token, or [B, V] of every sequence, by the mean of its tokens.

    Attention is causal for `next_token`, bidirectional for other tasks. `Net.without` names blocks ("layers.1") that
    are left out completely. With `Net.exits` it returns a tuple: the logits of its early exits, each with its own head.
    A final class adds `name` and sizes.
    """

    layers: int = Field(default=4, ge=1)
    """Number of blocks, with equal initial weights."""
    heads: int = Field(default=8, ge=1)
    """Attention heads, at every width."""
    head_width: int = Field(default=32, ge=1)
    """Features of a head; the residual stream has as many as all heads."""
    mlp: int = Field(default=512, ge=1)
    """Features inside a block's MLP."""
    dropout: float = Field(default=0.2, ge=0, lt=1)
    """Dropout of embeddings, and after attention and both layers of an MLP."""
    positions: int = Field(default=64, ge=1)
    """Number of position embeddings, at least the length of the longest sequence."""
    exits: tuple[str, ...] = ()
    """Blocks ("layers.1") followed by an early exit, in network order."""
    smallest: ClassVar = {"layers": 3, "heads": 2, "head_width": 10, "mlp": 200, "length": 12, "positions": 12}

    @model_validator(mode="after")
    def _blocks_in_order(self) -> Self:
        [order] = self.blocks
        check_exits(self.exits, order, "exits: ")
        return self

    @property
    def head_paths(self) -> tuple[str, ...]:
        # the answer's layer and the block before it
        return ("head",) if self.task == "classes" else ()

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        return (tuple(f"layers.{i}" for i in range(self.layers)),)

    @property
    def exit_count(self) -> int:
        return len(self.exits) + 1

    @property
    def vocabulary(self) -> Axis:
        """Axis of the token embedding's rows, which is never cut: output tokens, then a mask token, present also if
        unused, as in both papers."""
        if self.task == "classes":
            return Axis.fixed("vocabulary", self.ids)
        return Axis.fixed(CLASSES, max(self.ids, self.classes + 1))

    def build(self, net: Net) -> nn.Module:
        [paths] = self.blocks
        check_without(net, paths, self.exit_count)
        if self.length > self.positions:
            raise ValueError(
                f"model {self.name}: sequences have up to {self.length} tokens. Allowed: {self.positions}, its "
                "positions; set its `positions`, or shorter sequences in the data section"
            )
        has_head = net.exits in (0, self.exit_count)
        places = {f"exit{i}": path for i, path in enumerate(self.exits[: net.exits], start=1)}
        if has_head:
            places["head"] = paths[-1]
        stream = net.axis("hidden", self.heads * self.head_width)
        kept = paths[: paths.index([*places.values()][-1]) + 1]
        blocks = {path: None if path in net.without else self._block(net, path, stream) for path in kept}
        equal = [block for block in blocks.values() if block is not None]
        for block in equal[1:]:
            if _shapes(block) == _shapes(equal[0]):  # `Net.sizes` can differ between blocks
                load(block, params_of(equal[0]))
        return Tokens(
            Embedded(self.vocabulary, Axis.fixed("positions", self.positions), stream, net.scale, self.dropout),
            blocks,
            {name: (path, self._head(net, name, stream)) for name, path in places.items()},
            is_causal=self.task == "next_token",
            has_exits=net.exits > 0,
        )

    def _block(self, net: Net, path: str, stream: Axis) -> nn.Module:
        inner = net.axis(f"{path}.inner", self.head_width, groups=self.heads)
        hidden = net.axis(f"{path}.mlp", self.mlp)
        up, down = heterofl_linear(stream, hidden), heterofl_linear(hidden, stream)
        for layer in (up, down):
            nn.init.normal_(layer.weight, std=0.02)
        attention = Attention(stream, inner, self._end(net, heterofl_linear(inner, stream)), net.scale)
        mlp = dict(hidden=up, hidden_scaler=scaler(net.scale), gelu=nn.GELU(), hidden_dropout=nn.Dropout(self.dropout))
        return Block(attention, sequential(**mlp, **self._end(net, down)), stream)

    def _end(self, net: Net, layer: nn.Linear) -> dict[str, nn.Module]:
        """Return the layers at the end of a residual branch."""
        step = Step() if net.steps else nn.Identity()
        return dict(linear=layer, scaler=scaler(net.scale), dropout=nn.Dropout(self.dropout), step=step)

    def _head(self, net: Net, name: str, stream: Axis) -> nn.Module:
        hidden = net.axis(f"{name}.hidden", self.heads * self.head_width)
        return Head(stream, hidden, self.labels, net.scale, is_pooled=self.task == "classes")


def _shapes(module: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in module.parameters()]


class HeteroFLTransformer(Transformer):
    """HeteroFL's transformer for WikiText-2 (section 4, authors' code): 19,263,999 parameters with 33,279 tokens."""

    name: Literal["heterofl_transformer"] = "heterofl_transformer"
    task: Literal["classes", "next_token", "masked_lm"] = "masked_lm"
    ids: int = 33_280
    classes: int = 33_279
    smallest: ClassVar = {**Transformer.smallest, "task": "masked_lm", "exits": ("layers.0", "layers.1")}


class FedRolexTransformer(Transformer):
    """FedRolex's transformer for next-word prediction on Stack Overflow (authors' code): 4,374,416 parameters with
    10,000 words."""

    name: Literal["fedrolex_transformer"] = "fedrolex_transformer"
    task: Literal["classes", "next_token", "masked_lm"] = "next_token"
    ids: int = 10_000
    """Number of input tokens. Default: taken from the data set."""
    classes: int = 10_000
    length: int = 20
    smallest: ClassVar = {**Transformer.smallest, "task": "next_token"}
    layers: int = Field(default=3, ge=1)
    head_width: int = Field(default=16, ge=1)
    mlp: int = Field(default=2048, ge=1)
    dropout: float = Field(default=0.1, ge=0, lt=1)


class Tokens(nn.Module):
    """Network: x [B, T] int64 -> the logits of its head, or a tuple of the logits of all its exits."""

    def __init__(
        self,
        embedded: nn.Module,
        blocks: Mapping[str, nn.Module | None],
        heads: Mapping[str, tuple[str, nn.Module]],
        *,
        is_causal: bool,
        has_exits: bool,
    ):
        """`blocks`: path -> block, or None if left out; `heads`: name -> path of the block before it, and the head."""
        super().__init__()
        self.embedded = embedded
        self.layers = nn.ModuleDict({path.rpartition(".")[2]: b for path, b in blocks.items() if b is not None})
        for name, (_, head) in heads.items():
            self.add_module(name, head)
        self.order = tuple(blocks)
        self.places = {name: path for name, (path, _) in heads.items()}
        self.is_causal, self.has_exits = is_causal, has_exits

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        there = x >= 0
        # causal attention needs no mask: padding is at the end
        seen = None if self.is_causal else there[:, None, None]
        h, answers = self.embedded(x), []
        for path in self.order:
            number = path.rpartition(".")[2]
            if number in self.layers:
                h = self.layers[number](h, seen)
            answers += [self.get_submodule(name)(h, there) for name, place in self.places.items() if place == path]
        return tuple(answers) if self.has_exits else answers[0]


class Embedded(nn.Module):
    """Sum of token and position embeddings, normalised: x [B, T] -> [B, T, C]."""

    def __init__(self, vocabulary: Axis, positions: Axis, stream: Axis, scale: float, dropout: float):
        super().__init__()
        self.tokens, self.positions = embedding(vocabulary, stream), embedding(positions, stream)
        self.sum = sequential(scaler=scaler(scale), norm=layer_norm(stream), dropout=nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # padding is masked, so any token can replace it
        tokens = self.tokens(x.clamp(min=0))
        return self.sum(tokens + self.positions.weight[: x.shape[1]])


class Block(nn.Module):
    """Post-norm block: norm(x + attention(x)), then norm(x + mlp(x)): [B, T, C] -> [B, T, C]."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, stream: Axis):
        super().__init__()
        self.attention, self.norm1 = attention, layer_norm(stream)
        self.mlp, self.norm2 = mlp, layer_norm(stream)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        x = self.norm1(x + self.attention(x, seen))
        return self.norm2(x + self.mlp(x))


class Attention(nn.Module):
    """Attention softmax(q k^T / sqrt(D)) v of every head, masked by `seen` [B, 1, 1, T], or causal if that is None:
    [B, T, C] -> [B, T, C]. D: features of a head in this network."""

    def __init__(self, stream: Axis, inner: Axis, out: Mapping[str, nn.Module], scale: float):
        """`out`: the layer that combines the heads."""
        super().__init__()
        self.q, self.k, self.v = (
            sequential(linear=heterofl_linear(stream, inner), scaler=scaler(scale)) for _ in range(3)
        )
        self.out = sequential(**out)
        self.heads = inner.groups

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (part(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Head(nn.Module):
    """Hidden layer and output layer: [B, T, C] -> [B, T, V], or [B, V] of the mean over positions `there` [B, T]."""

    def __init__(self, stream: Axis, hidden: Axis, labels: Axis, scale: float, *, is_pooled: bool):
        super().__init__()
        self.layers = sequential(
            hidden=heterofl_linear(stream, hidden),
            scaler=scaler(scale),
            gelu=nn.GELU(),
            norm=layer_norm(hidden),
            answer=heterofl_linear(hidden, labels),
        )
        self.is_pooled = is_pooled

    def forward(self, x: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        if self.is_pooled:
            x = (x * there[..., None]).sum(1) / there.sum(1, keepdim=True)
        return self.layers(x)
