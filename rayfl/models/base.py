"""A model family: one description from which the network of any width and depth is built."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import nn

from rayfl.config import ConfigError, Kind, Named
from rayfl.core.axes import CLASSES, Axis
from rayfl.core.net import Answer, Net, params_of
from rayfl.core.norms import fresh
from rayfl.core.tensors import Params

SAMPLES = {"input": "images", "ids": "sequences of tokens"}
"""What a data set offers of its samples -> what these are."""


class Model(Named, ABC):
    """What a `model:` section says. A subclass adds its fields.

    A field that the data set offers by the same name (`DataSet.offers`: input, classes, ...) is taken from there unless
    it is given; what is given has to agree with the data.
    """

    takes: ClassVar[str] = ""
    """Which of `SAMPLES` its networks take; "": others, of which nothing is known."""
    smallest: ClassVar[Mapping[str, Any]] = {}
    """Fields and class attributes of its smallest sensible network, on which `rayfl.testing` runs methods."""

    if TYPE_CHECKING:  # pydantic makes it, out of the type checker's sight

        def __hash__(self) -> int: ...

    @abstractmethod
    def build(self, net: Net) -> nn.Module:
        """The network, freshly initialised, made of rayfl.core.axes layers or of layers that `declare` their axes.

        It maps a batch of samples to logits, or to a tuple of logits, the first early exit's first.
        """

    @property
    def varying(self) -> tuple[int, ...]:
        """Dimensions of a network's input whose size may differ from `example`: the batch."""
        return (0,)

    @abstractmethod
    def example(self, batch: int, device: torch.device | str) -> torch.Tensor:
        """Made-up samples of the shape and type that a network takes."""

    def fitted(self, data: str, offers: Mapping[str, Any], where: str) -> Self:
        """The model with what a data set of this name offers. A ConfigError if it was given something else, or takes
        other samples."""
        has = [kind for kind in SAMPLES if kind in offers]
        if self.takes and has and self.takes not in has:
            raise ConfigError(
                f"{where}: given {self.name}, a network of {SAMPLES[self.takes]}; allowed: one of {SAMPLES[has[0]]}, "
                f"which data set {data} has"
            )
        taken = {name: value for name, value in offers.items() if name in type(self).model_fields}
        for name, value in taken.items():
            if name in self.model_fields_set and getattr(self, name) != value:
                raise ConfigError(
                    f"{where}.{name}: given {getattr(self, name)!r}; allowed: {value!r}, as data set {data} has it, "
                    "or nothing, to take it from there"
                )
        return self.model_copy(update=taken)

    def prepare(self) -> None:
        """Fetches what `initial` reads, or a ConfigError that says what to put where. Called before Ray starts."""

    @property
    def blank(self) -> Self:
        """The same network, which starts from nothing that would have to be fetched."""
        return self

    def initial(self, net: Net) -> Params:
        """The parameters that training of a network starts from. Random ones are drawn from torch's global generator
        (`seeds.torch_scope`)."""
        return params_of(net.build())

    def statistics(self, net: Net) -> Params:
        """The running statistics that its static norms start from, by the names of `norms.fresh`."""
        return fresh(net.blank())

    def write(self, net: Net, params: Params, answer: Answer, files: Sequence[Path], to: Path) -> None:
        """Writes into an existing folder what other libraries read a network of the model by, beside what
        `rayfl.exporting` writes of every network. `answer`: which of its early exits count. `files`: the data's
        (`DataSet.attached`)."""

    def chosen(self, capacity: float) -> Net | None:
        """The network that was chosen for a capacity. None: it is the widest of the model that the capacity buys."""
        return None

    @property
    def members(self) -> tuple["Model", ...]:
        """The models whose networks its capacities may stand for: itself, unless they are several."""
        return (self,)

    @property
    def frozen_key(self) -> Hashable:
        """Models of equal keys have the same `frozen` tensors."""
        return self

    def frozen(self) -> Params:
        """What its networks have that nobody trains, by name: it goes to every node once (`rayfl.core.frozen`)."""
        return {}

    def parts(self, net: Net) -> Mapping[str, Any]:
        """What there is to say of a network beside its width, blocks and exits, by name: columns of a table."""
        return {}

    @property
    def head_paths(self) -> tuple[str, ...]:
        """The modules that turn features into classes, by path: what is trained beside adapters."""
        return tuple(sorted({name.partition(".")[0] for name in Net(self).layout.classifier}))

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Its residual blocks by module path, stage by stage: what `Net.without` may name."""
        return ()

    @property
    def exit_count(self) -> int:
        """The number of places at which `Net.exits` lets it answer: its head, and the early exits before it."""
        return 1


class ImageModel(Model):
    """A classifier of images: [B, *input] -> logits [B, classes]."""

    takes: ClassVar = "input"

    input: tuple[int, int, int] = (3, 32, 32)
    """Channels, height and width of one image. Taken from the data set unless given."""
    classes: int = 10
    """Number of classes. Taken from the data set unless given."""
    smallest: ClassVar[Mapping[str, Any]] = {"input": (1, 8, 8), "classes": 4}

    def example(self, batch: int, device: torch.device | str) -> torch.Tensor:
        return torch.zeros(batch, *self.input, device=device)

    @property
    def image(self) -> Axis:
        """The image channels: never cut."""
        return Axis.fixed("image", self.input[0])

    @property
    def labels(self) -> Axis:
        """The classes: never cut."""
        return Axis.fixed(CLASSES, self.classes)


class TokenModel(Model):
    """A network of sequences of tokens: x [B, T] int64, -1 where nothing is, T at most `length` -> logits [B, C] of
    sequences (task: classes), or [B, T, C] of tokens."""

    takes: ClassVar = "ids"

    task: Literal["classes", "next_token", "masked_lm"] = "classes"
    """What it answers. Taken from the data set unless given."""
    ids: int = 1000
    """Tokens that it may be given, a mask's included. Taken from the data set unless given."""
    classes: int = 10
    """Classes, or tokens that it may answer. Taken from the data set unless given."""
    length: int = 64
    """Tokens of the longest sequence. Taken from the data set unless given."""
    smallest: ClassVar[Mapping[str, Any]] = {}

    @property
    def varying(self) -> tuple[int, ...]:
        """The batch, and the length of the sequences."""
        return (0, 1)

    def example(self, batch: int, device: torch.device | str) -> torch.Tensor:
        return torch.zeros(batch, self.length, dtype=torch.int64, device=device)

    @property
    def head_paths(self) -> tuple[str, ...]:
        # a language model's rows of tokens are most of it
        return super().head_paths if self.task == "classes" else ()

    @property
    def labels(self) -> Axis:
        """The classes: never cut."""
        return Axis.fixed(CLASSES, self.classes)


MODELS: dict[str, type[Model]] = {}
"""Name -> family; `rayfl.models` fills it."""

MODELS_KIND = Kind("model", Model, MODELS, "rayfl.models")
