"""Base of the transformer families: a section with their sizes, and networks of any width.

A family names its class in transformers, its sizes there, the paths of its layers, and the axes of every parameter in
a table of regular expressions. The networks are transformers' own modules, built from a configuration with the sizes of
a width. Transformers is imported when the first network is built.

The residual stream "hidden" and the attention, "head", have one size in a configuration and are cut together. With
`cut: inside`, a head keeps its first ceil(width D) of D features, and the stream of H heads ceil(width D) H. With `cut:
heads`, the first ceil(width H) of H heads are kept. Heads and perceptrons ("ffn") of each layer are separate axes.
"""

import re
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import nn

from rayfl.config import ConfigError, nearest, shown
from rayfl.core.axes import CLASSES, Axis, Dims, declare
from rayfl.core.net import Answer, Net, load
from rayfl.core.tensors import Params
from rayfl.models import settings
from rayfl.models.base import TokenModel
from rayfl.models.huggingface import folder
from rayfl.models.huggingface.network import Network, Sees, owners, renamed, resized, scaled, stepped
from rayfl.models.layers import check_without
from rayfl.models.settings import Settings
from rayfl.models.start import is_state

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

AUTO = {
    "classes": "AutoModelForSequenceClassification",
    "masked_lm": "AutoModelForMaskedLM",
    "next_token": "AutoModelForCausalLM",
}
"""Task -> class that builds a module from a configuration."""
OTHERS = {"attn_implementation": "attention", "num_labels": "classes", "id2label": "classes", "label2id": "classes"}
"""Further names in a configuration -> field of rayfl that sets them."""


class HuggingFace(TokenModel, ABC):
    """A final class adds `name` and the class attributes below."""

    weights: str = ""
    """Folder with config.json and model.safetensors of such a model, on the server's machine. Training starts from it,
    and it defines the sizes that are not set. Or a file of the network's state or the folder of an earlier run. Empty:
    a new network."""
    hidden: int = Field(default=768, ge=1)
    """Features of the residual stream, a multiple of `heads`."""
    heads: int = Field(default=12, ge=1)
    """Attention heads."""
    layers: int = Field(default=12, ge=1)
    """Number of blocks, each an attention and an MLP."""
    ffn: int | None = Field(default=None, ge=1)
    """Features inside a perceptron. Default: four times those of the stream."""
    positions: int = Field(default=512, ge=1)
    """Position embeddings: at least the length of the longest sequence."""
    vocabulary: int | None = Field(default=None, ge=1)
    """Rows of the token embedding. Default: the number of tokens of the data, including the padding token."""
    pad: int | None = Field(default=None, ge=0)
    """Padding token. Default: that of the data set, otherwise a new token after those of the data set."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout of embeddings and outputs of residual branches."""
    attention_dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout of attention weights."""
    cut: Literal["inside", "heads"] = "inside"
    """Cut of a narrow network: inside every head, or whole heads."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention by torch's fused kernels, or as separate operations."""
    config: Settings = ()
    """Further fields of transformers' configuration, e.g. {hidden_act: gelu_new}. Other names are errors."""
    smallest: ClassVar[Mapping[str, Any]] = {"hidden": 20, "heads": 2, "layers": 2, "ffn": 12, "positions": 70}

    kind: ClassVar[str]
    """`model_type` in its config.json."""
    tasks: ClassVar[tuple[str, ...]]
    """Supported tasks."""
    sees: ClassVar[Sees]
    """Visible tokens."""
    fields: ClassVar[Mapping[str, tuple[str, ...]]]
    """Field of rayfl -> names in the configuration that get its value."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Fields of the configuration where published networks differ from transformers' defaults."""
    stack: ClassVar[str]
    """Path of the list of blocks."""
    branches: ClassVar[tuple[str, ...]]
    """Paths within a block of the layers that end a residual branch."""
    table: ClassVar[Mapping[str, tuple[str, ...]]]
    """Regular expression of the end of a parameter's name -> axes of its dimensions (`axes`); the first match is used.
    Other names are dimensions that are never cut."""

    @model_validator(mode="before")
    @classmethod
    def _as_in_the_folder(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("weights") and not is_state(str(given["weights"])):
            return folder.filled(cls.kind, cls.fields, cls.defaults, given)
        return given

    @model_validator(mode="after")
    def _of_whole_heads(self) -> Self:
        if self.hidden % self.heads:
            near = self.hidden // self.heads * self.heads or self.heads
            raise ValueError(f"hidden: a multiple of {self.heads}, the heads, such as {near}")
        return self

    # the network

    @property
    def rows(self) -> int:
        """Number of rows of the token embedding."""
        return self.ids if self.vocabulary is None else self.vocabulary

    @property
    def padding(self) -> int:
        return self.rows - 1 if self.pad is None else self.pad

    @property
    def room(self) -> int:
        """Length of the longest supported sequence."""
        return self.positions

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        return (tuple(f"{self.stack}.{i}" for i in range(self.layers)),)

    def axes(self, net: Net, block: str) -> dict[str, Axis]:
        """Return the axes of a block by the names in the table; "": outside all blocks."""
        width = self.hidden // self.heads
        within = f"{block}." if block else ""
        if self.cut == "inside":
            hidden, pool = (net.axis(name, width).repeat(self.heads) for name in ("hidden", f"{within}pool"))
            head = net.axis(f"{within}head", width, groups=self.heads)
        else:
            hidden, pool = (net.axis(name, self.heads).repeat(width) for name in ("hidden", f"{within}pool"))
            head = net.axis(f"{within}head", self.heads).repeat(width)
        return {
            "hidden": hidden,
            "pool": pool,
            "head": head,
            "ffn": net.axis(f"{within}ffn", self.ffn or 4 * self.hidden),
            "vocabulary": Axis.fixed("vocabulary" if self.task == "classes" else CLASSES, self.rows),
        }

    def sizes(self, net: Net) -> dict[str, Any]:
        """Return the values of the fields in a network of this width."""
        axes = self.axes(replace(net, sizes=()), self.blocks[0][0])
        given = {name: getattr(self, name) for name in self.fields}
        return given | {
            "hidden": axes["hidden"].length,
            "heads": self.heads if self.cut == "inside" else axes["head"].size,
            "ffn": axes["ffn"].length,
            # transformers' classifiers need a padding token, its decoders do not
            "pad": self.padding if self.pad is not None or self.task == "classes" else None,
        }

    def kept(self, net: Net) -> list[str]:
        """Return the paths of a network's blocks."""
        return [path for path in self.blocks[0] if path not in net.without]

    def configuration(self, net: Net) -> "PreTrainedConfig":
        """Return transformers' configuration with the sizes of a network."""
        from transformers import CONFIG_MAPPING

        sizes = self.sizes(net) | {"layers": len(self.kept(net))}
        labels = {"num_labels": self.classes} if self.task == "classes" else {}
        cls, own = CONFIG_MAPPING[self.kind], {**self.defaults, **settings.plain(self.config)}
        named = {names[0]: sizes[field] for field, names in self.fields.items()}
        named |= {name: sizes[field] for field, (_, *more) in self.fields.items() for name in more if name not in own}
        self._check_names(cls)
        # a vocabulary smaller than the published one lacks its special tokens
        special = ("bos_token_id", "eos_token_id")
        none = {name: None for name in special if isinstance(i := getattr(cls, name), int) and i >= self.rows}
        with self._blamed():
            return cls(**{**none, **own, "vocab_size": self.rows, **labels, **named})

    def _check_names(self, cls: Any) -> None:
        """Raise a ConfigError if `config` has names that transformers does not know or that other fields set."""
        known = cls(**self.defaults).to_dict().keys()
        of = OTHERS | {names[0]: field for field, names in self.fields.items()}
        free = sorted(known - of.keys() - folder.NO_MATTER - {"vocab_size"})
        for given in settings.plain(self.config):
            name = cls.attribute_map.get(given, given)
            if name in of:
                raise ConfigError(f"model.config: {given!r} is set by another field. Allowed: model.{of[name]}")
            # a folder's number of tokens is compared with that of the data
            if name not in free and name != "vocab_size":
                raise ConfigError(
                    f"model.config: no field of {cls.__name__} is called {shown(given)}. {nearest(given, free)}"
                )

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Turn errors of transformers into a ConfigError that names `config`."""
        try:
            yield
        except Exception as error:
            if not self.config:
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(
                f"model.config: transformers does not build {shown(settings.plain(self.config))} ({reason}). Allowed: "
                f"values that transformers documents for {self.kind}"
            ) from error

    # the module

    def build(self, net: Net) -> nn.Module:
        self.check(net)
        module = self.plain(net)
        return self.network(dict(module.named_children()), module.forward)

    def network(self, children: Mapping[str, nn.Module], run: Callable[..., Any], **options: Any) -> Network:
        """Return a network that computes `run` with its children. `options`: of `Network`."""
        ours = {"pad": self.padding, "sees": self.sees, "is_eager": self.attention == "eager"}
        return Network(children, run, self.classes, **ours, **options)

    def plain(self, net: Net) -> "PreTrainedModel":
        """Return transformers' module with the axes of its parameters, Scaler and step sizes."""
        module = self.made_of(self.configuration(net))
        names = [path.rpartition(".")[2] for path in self.kept(net)]
        module.set_submodule(self.stack, renamed(module.get_submodule(self.stack), names))
        self._declare(module, net)
        if net.scale != 1:
            scaled(module, net.scale)
        if net.steps:
            for path in self.kept(net):
                stepped(module.get_submodule(path), self.branches)
        return module

    def made_of(self, configuration: "PreTrainedConfig") -> "PreTrainedModel":
        """Return transformers' module of a configuration, newly initialised."""
        with self._blamed():
            return self._auto.from_config(configuration, attn_implementation=self.attention)

    @property
    def _auto(self) -> Any:
        import transformers

        return getattr(transformers, AUTO[self.task])

    def check(self, net: Net) -> None:
        """Raise a ValueError if there is no such network."""
        check_without(net, self.blocks[0], self.exit_count if self.exit_count > 1 else 0)
        if self.task not in self.tasks:
            raise ValueError(f"model {self.name}: task {self.task} is not valid. Allowed: {', '.join(self.tasks)}")
        if self.length > self.room:
            raise ValueError(
                f"model {self.name}: sequences have up to {self.length} tokens. Allowed: {self.room}, for which it "
                "has positions; set its `positions`, or shorter sequences in the data section"
            )
        self._check_tokenizer()
        if self.ids > self.rows:
            raise ValueError(
                f"model {self.name}: a vocabulary of {self.rows} is not valid. Allowed: at least {self.ids}, the "
                "tokens that the data have"
            )
        if self.padding >= self.rows:
            raise ValueError(
                f"model {self.name}: pad {self.padding} is not valid. Allowed: less than {self.rows}, the rows of the "
                "vocabulary; a token that is in no sequence, such as the end of a text, or a larger `vocabulary`"
            )

    def _declare(self, module: nn.Module, net: Net) -> None:
        """Declare the axes of every parameter."""
        from transformers.pytorch_utils import Conv1D

        prefixes = {f"{path}.": self.axes(net, path) for path in self.kept(net)}
        outside = self.axes(net, "")
        for path, part, own in list(owners(module)):
            axes = next((axes for block, axes in prefixes.items() if path.startswith(block)), outside)
            dims = {name: self._dims(f"{path}.{name}", tensor, axes) for name, tensor in own.items()}
            if net.sizes and isinstance(part, nn.Linear):
                part = resized(module, path, *(axis.length for axis in reversed(dims["weight"]) if axis))
            declare(part, **dims)
            # Conv1D is transformers' linear layer
            part.is_linear = isinstance(part, Conv1D)  # type: ignore[assignment]

    def _dims(self, name: str, tensor: torch.Tensor, axes: Mapping[str, Axis]) -> Dims:
        for pattern, names in self.table.items():
            if re.search(rf"(^|\.){pattern}$", name) and len(names) == tensor.dim():
                sizes = zip(names, tensor.shape, strict=True)
                return tuple(axes.get(axis) or Axis.fixed(axis, size) for axis, size in sizes)
        raise ValueError(
            f"model {self.name}: no entry of its table fits the parameter {name!r} {list(tensor.shape)}. Allowed: the "
            "axes of every parameter, by the end of its name"
        )

    def _check_tokenizer(self) -> None:
        published = settings.plain(self.config).get("vocab_size", self.rows)
        if self.rows != published:
            raise ConfigError(
                f"model {self.name}: the data have {self.rows:,} tokens and the weights {published:,}. Allowed: the "
                f"weights' own tokenizer (data.tokenizer), or model.vocabulary: {published}, if the data's tokens are "
                "its first"
            )

    # initial values

    def fitted(self, data: str, offers: Mapping[str, Any], where: str) -> Self:
        # before the check of the padding, which would differ too
        self.model_copy(update={"ids": offers.get("ids", self.ids)})._check_tokenizer()
        fitted = super().fitted(data, offers, where)
        given = offers.get("pad", self.pad if "pad" in self.model_fields_set else None)
        if given is not None or fitted.task == "next_token":
            return fitted
        # a token of the data would not be trained as padding, and would be missing at the end of a sequence
        has_rows = self.vocabulary is not None or "vocab_size" in settings.plain(self.config)
        return fitted.model_copy(update={"pad": fitted.ids} | ({} if has_rows else {"vocabulary": fitted.ids + 1}))

    def published(self) -> Params:
        if not self.weights or is_state(self.weights):
            return super().published()
        return folder.weights_of(self._auto, self.configuration(Net(self)), self.weights)

    # export

    def write(self, net: Net, params: Params, answer: Answer, files: Sequence[Path], to: Path) -> None:
        """Write a folder "transformers" for `from_pretrained`, with all files of the tokenizer; nothing for a network
        that averages several heads."""
        if net.exits < 2 or answer == "last":
            folder.save(self.exported(net, params), files, to / "transformers")

    def exported(self, net: Net, params: Params) -> "PreTrainedModel":
        """Return transformers' module with these parameters: blocks renumbered, step sizes merged into layers."""
        module, state = self.made_of(self.configuration(net)), dict(params)
        for number, block in enumerate(self.kept(net)):
            names = [name for name in state if name.startswith(f"{block}.")]
            own = {name.removeprefix(f"{block}."): state.pop(name) for name in names}
            for i, branch in enumerate(self.branches, start=1):
                step = own.pop(f"step{i}.scale", None)
                for name in (f"{branch}.weight", f"{branch}.bias"):
                    if step is not None and name in own:
                        own[name] = own[name] * step
            state |= {f"{self.stack}.{number}.{name}": t for name, t in own.items()}
        load(module, state)
        return module
