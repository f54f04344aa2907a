"""RoBERTa, BERT and DistilBERT: every token sees all others; the first one represents its sequence."""

from abc import ABC
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import nn

from rayfl.core.axes import Axis, linear
from rayfl.core.net import Net
from rayfl.core.tensors import Params
from rayfl.models.huggingface.base import HuggingFace
from rayfl.models.layers import scaler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}

BERT = {
    r"word_embeddings\.weight": ("vocabulary", "hidden"),
    r"position_embeddings\.weight": ("positions", "hidden"),
    r"token_type_embeddings\.weight": ("types", "hidden"),
    r"LayerNorm\.(weight|bias)": ("hidden",),
    r"attention\.self\.(query|key|value)\.weight": ("head", "hidden"),
    r"attention\.self\.(query|key|value)\.bias": ("head",),
    r"attention\.output\.dense\.weight": ("hidden", "head"),
    r"intermediate\.dense\.weight": ("ffn", "hidden"),
    r"intermediate\.dense\.bias": ("ffn",),
    r"output\.dense\.weight": ("hidden", "ffn"),
    r"output\.dense\.bias": ("hidden",),
}
"""Table of the trunk of BERT and RoBERTa."""


class Encoder(HuggingFace, ABC):
    """Families with early exits: heads like the model's own after some layers. A final class adds `head` and
    `activation`."""

    exits: tuple[PositiveInt, ...] = ()
    """Numbers of layers before each early exit, ascending, fewer than all."""

    head: ClassVar[tuple[str, str]]
    """Paths of the classifier's two layers: the hidden one and the output."""
    activation: ClassVar[str] = "tanh"
    """Activation of the classifier: tanh, relu or gelu."""
    sees: ClassVar = "all"
    smallest: ClassVar = {**HuggingFace.smallest, "layers": 3, "exits": (1, 2)}
    tasks: ClassVar = ("classes", "masked_lm")

    @model_validator(mode="after")
    def _exits_in_order(self) -> Self:
        if list(self.exits) != sorted({*self.exits}) or (self.exits and self.exits[-1] >= self.layers):
            raise ValueError(f"exits: numbers from 1 to {self.layers - 1}, ascending, each once")
        return self

    @property
    def exit_count(self) -> int:
        return len(self.exits) + 1

    @property
    def head_paths(self) -> tuple[str, ...]:
        trunk, *_ = self.stack.split(".")
        found = {path.split(".")[0] for path in self.head} - {trunk}
        return tuple(sorted(found)) if self.task == "classes" else ()

    def kept(self, net: Net) -> list[str]:
        [paths] = self.blocks
        last = self.exits[net.exits - 1] if 0 < net.exits < self.exit_count else len(paths)
        return [path for path in paths[:last] if path not in net.without]

    def build(self, net: Net) -> nn.Module:
        self.check(net)
        module, [paths] = self.plain(net), self.blocks
        has_head = net.exits in (0, self.exit_count)
        if has_head:
            children, run = dict(module.named_children()), module.forward
        else:
            trunk = module.base_model
            children, run = {module.base_model_prefix: trunk}, trunk.forward
            if getattr(trunk, "pooler", None) is not None:
                # part of the head
                trunk.register_module("pooler", None)
        kept = self.kept(net)
        depths = [sum(path in kept for path in paths[:after]) for after in self.exits[: net.exits]]
        exits = {f"exit{number}": self._exit(net, f"exit{number}") for number in range(1, len(depths) + 1)}
        return self.network(children | exits, run, depths=depths, has_exits=net.exits > 0, has_head=has_head)

    def check(self, net: Net) -> None:
        super().check(net)
        if self.exits and self.task != "classes":
            raise ValueError(
                f"model {self.name}: task {self.task} has no early exits. Allowed: no `exits`, or a data set with "
                "classes"
            )

    def exported(self, net: Net, params: Params) -> "PreTrainedModel":
        """Return the module with the last exit's head."""
        own = {name: t for name, t in params.items() if not name.startswith("exit")}
        if 0 < net.exits < self.exit_count:
            for path, layer in zip(self.head, ("dense", "answer"), strict=True):
                own |= {f"{path}.{kind}": params[f"exit{net.exits}.{layer}.{kind}"] for kind in ("weight", "bias")}
        return super().exported(net, own)

    def _exit(self, net: Net, name: str) -> nn.Module:
        axes = self.axes(net, name)
        return ExitHead(axes["hidden"], axes["pool"], self.labels, self.activation, self.dropout, net.scale)


class ExitHead(nn.Module):
    """Classify the first token with a hidden layer: [B, T, hidden] -> [B, C]."""

    def __init__(self, hidden: Axis, pool: Axis, labels: Axis, activation: str, dropout: float, scale: float):
        super().__init__()
        self.dense, self.answer = linear(hidden, pool), linear(pool, labels)
        for layer in (self.dense, self.answer):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.scaler, self.activation, self.dropout = scaler(scale), ACTIVATIONS[activation](), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(self.dropout(self.activation(self.scaler(self.dense(x[:, 0])))))


class Roberta(Encoder):
    """Liu et al., arXiv 1907.11692; 124,648,708 parameters with its 50,265 tokens and four classes. Positions start at
    `pad` + 1."""

    name: Literal["roberta"] = "roberta"
    positions: int = Field(default=514, ge=1)
    """Position embeddings, of which `pad` + 1 are never used."""
    pad: int | None = Field(default=1, ge=0)
    """Padding token, whose embedding stays at 0. Default: that of the data set, otherwise a new token after those of
    the data set; 1 without a data set."""

    kind: ClassVar = "roberta"
    head: ClassVar = ("classifier.dense", "classifier.out_proj")
    fields: ClassVar = {
        "hidden": ("hidden_size",),
        "heads": ("num_attention_heads",),
        "layers": ("num_hidden_layers",),
        "ffn": ("intermediate_size",),
        "positions": ("max_position_embeddings",),
        "pad": ("pad_token_id",),
        "dropout": ("hidden_dropout_prob",),
        "attention_dropout": ("attention_probs_dropout_prob",),
    }
    defaults: ClassVar = {"type_vocab_size": 1, "layer_norm_eps": 1e-5}
    stack: ClassVar = "roberta.encoder.layer"
    branches: ClassVar = ("attention.output.dense", "output.dense")
    table: ClassVar = BERT | {
        r"classifier\.dense\.weight": ("pool", "hidden"),
        r"classifier\.dense\.bias": ("pool",),
        r"classifier\.out_proj\.weight": ("classes", "pool"),
        r"classifier\.out_proj\.bias": ("classes",),
        r"lm_head\.dense\.weight": ("hidden", "hidden"),
        r"lm_head\.dense\.bias": ("hidden",),
        r"lm_head\.layer_norm\.(weight|bias)": ("hidden",),
        r"lm_head\.bias": ("vocabulary",),
    }

    @property
    def room(self) -> int:
        return self.positions - self.padding - 1

    def check(self, net: Net) -> None:
        if self.room < 1:
            raise ValueError(
                f"model {self.name}: pad {self.padding} is not valid. Allowed: less than {self.positions - 1}, because "
                "the positions of a sequence start after it, or larger `positions`. Default: the padding token of "
                "the data's tokenizer; without one, the number after their last token"
            )
        super().check(net)


class Bert(Encoder):
    """Devlin et al., arXiv 1810.04805: by default BERT-base."""

    name: Literal["bert"] = "bert"
    pad: int | None = Field(default=0, ge=0)
    """Padding token, whose embedding stays at 0. Default: that of the data set, otherwise a new token after those of
    the data set; 0 without a data set."""

    kind: ClassVar = "bert"
    head: ClassVar = ("bert.pooler.dense", "classifier")
    fields: ClassVar = Roberta.fields
    stack: ClassVar = "bert.encoder.layer"
    branches: ClassVar = Roberta.branches
    table: ClassVar = BERT | {
        r"pooler\.dense\.weight": ("pool", "hidden"),
        r"pooler\.dense\.bias": ("pool",),
        r"classifier\.weight": ("classes", "pool"),
        r"classifier\.bias": ("classes",),
        r"cls\.predictions\.transform\.dense\.weight": ("hidden", "hidden"),
        r"cls\.predictions\.transform\.dense\.bias": ("hidden",),
        r"cls\.predictions\.bias": ("vocabulary",),
    }


class DistilBert(Encoder):
    """DistilBERT (Sanh et al., arXiv 1910.01108): six layers. `dropout` is also that before the classifier, for which
    the library transformers has 0.2 by default."""

    name: Literal["distilbert"] = "distilbert"
    layers: int = Field(default=6, ge=1)
    pad: int | None = Field(default=0, ge=0)
    """Padding token, whose embedding stays at 0. Default: that of the data set, otherwise a new token after those of
    the data set; 0 without a data set."""

    kind: ClassVar = "distilbert"
    head: ClassVar = ("pre_classifier", "classifier")
    activation: ClassVar = "relu"
    fields: ClassVar = {
        "hidden": ("dim",),
        "heads": ("n_heads",),
        "layers": ("n_layers",),
        "ffn": ("hidden_dim",),
        "positions": ("max_position_embeddings",),
        "pad": ("pad_token_id",),
        "dropout": ("dropout", "seq_classif_dropout"),
        "attention_dropout": ("attention_dropout",),
    }
    stack: ClassVar = "distilbert.transformer.layer"
    branches: ClassVar = ("attention.out_lin", "ffn.lin2")
    table: ClassVar = {
        r"word_embeddings\.weight": ("vocabulary", "hidden"),
        r"position_embeddings\.weight": ("positions", "hidden"),
        r"(LayerNorm|\w+_layer_norm)\.(weight|bias)": ("hidden",),
        r"(q|k|v)_lin\.weight": ("head", "hidden"),
        r"(q|k|v)_lin\.bias": ("head",),
        r"out_lin\.weight": ("hidden", "head"),
        r"out_lin\.bias": ("hidden",),
        r"lin1\.weight": ("ffn", "hidden"),
        r"lin1\.bias": ("ffn",),
        r"lin2\.weight": ("hidden", "ffn"),
        r"lin2\.bias": ("hidden",),
        r"pre_classifier\.weight": ("pool", "hidden"),
        r"pre_classifier\.bias": ("pool",),
        r"classifier\.weight": ("classes", "pool"),
        r"classifier\.bias": ("classes",),
        r"vocab_transform\.weight": ("hidden", "hidden"),
        r"vocab_transform\.bias": ("hidden",),
        r"vocab_projector\.bias": ("vocabulary",),
    }
