"""Model families: descriptions that build networks of any width and depth."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import nn

from rayfl.config import ConfigError, Kind, Named
from rayfl.core.axes import CLASSES, Axis
from rayfl.core.net import Answer, Net, params_of
from rayfl.core.norms import fresh
from rayfl.core.submodel import prefix
from rayfl.core.tensors import Params
from rayfl.models.quantised import Bits
from rayfl.models.start import matching, read

SAMPLES = {"input": "images", "ids": "sequences of tokens", "variables": "tables", "series": "series"}
"""Key offered by a data set -> kind of its samples."""


class Model(Named, ABC):
    """The `model:` section. A subclass adds its fields.

    Fields that the data set offers by the same name (`DataSet.offers`: input, classes, ...) default to the data set's
    values; other values are errors.

    >>> from rayfl.models import MODELS
    >>> Net(MODELS["digits_cnn"](input=(1, 8, 8)), width=0.25).build()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    takes: ClassVar[str] = ""
    """Key of `SAMPLES` accepted by its networks; "" if unknown."""
    smallest: ClassVar[Mapping[str, Any]] = {}
    """Fields and class attributes of its smallest useful network, for the contract tests of `rayfl.testing`."""

    drawn: ClassVar[tuple[str, ...]] = ()
    """Paths of layers that start as in a new network if they do not match the initial weights, like the classifier."""

    weights: str = ""
    """Initial weights on the server's machine: a file .pt, .pth or .safetensors with the state of the whole network, or
    the folder of an earlier run or of an export. Default: a new network."""

    if TYPE_CHECKING:  # created by pydantic

        def __hash__(self) -> int: ...

    @abstractmethod
    def build(self, net: Net) -> nn.Module:
        """Return a newly initialised network, made of layers of rayfl.core.axes or layers that `declare` their axes.

        It maps a batch of samples to logits, or to a tuple of logits, the first early exit's first.
        """

    @property
    def varying(self) -> tuple[int, ...]:
        """Dimensions of a network's input with variable size: the batch."""
        return (0,)

    @abstractmethod
    def example(self, batch: int, device: torch.device | str) -> torch.Tensor:
        """Return synthetic samples of the shape and type that a network takes."""

    def fitted(self, data: str, offers: Mapping[str, Any], where: str) -> Self:
        """Return the model with the fields that a data set offers. Raise ConfigError if it has other values or takes
        other samples."""
        has = [kind for kind in SAMPLES if kind in offers]
        if self.takes and has and self.takes not in has:
            raise ConfigError(
                f"{where}: {self.name} takes {SAMPLES[self.takes]}. Allowed: one of {SAMPLES[has[0]]}, "
                f"which data set {data} has"
            )
        taken = {name: value for name, value in offers.items() if name in type(self).model_fields}
        for name, value in taken.items():
            if name in self.model_fields_set and getattr(self, name) != value:
                raise ConfigError(
                    f"{where}.{name}: {getattr(self, name)!r} is not valid. Allowed: {value!r}, as data set {data} "
                    "has, or no value"
                )
        return self.model_copy(update=taken)

    def prepare(self) -> None:
        """Fetch the files that `initial` reads, before Ray starts. Raise ConfigError with the missing files."""
        self.published()

    @property
    def blank(self) -> Self:
        """The model without pretrained weights."""
        return self.model_copy(update={"weights": ""})

    def published(self) -> Params:
        """Return the initial parameters and statistics of the whole network that `weights` gives. Raise ConfigError if
        they do not match it."""
        if not self.weights:
            return {}
        return matching(self.named(read(self.weights, self.source)), Net(self), self.weights, self.drawn, self.source)

    def named(self, tensors: Params) -> Params:
        """Return tensors of a file by the names of the network's."""
        return tensors

    @property
    def source(self) -> str:
        """Description of files with weights, for errors."""
        return "the state of this network"

    def initial(self, net: Net) -> Params:
        """Return the initial parameters of a network. Random ones are drawn from torch's global generator
        (`seeds.torch_scope`)."""
        return self._started(params_of(net.build()), net)

    def statistics(self, net: Net) -> Params:
        """Return the initial statistics of its static norms, by the names of `norms.fresh`."""
        return self._started(fresh(net.blank()), net)

    def _started(self, new: Params, net: Net) -> Params:
        """Return new tensors with the published ones, cut to the first positions of the network, in their place."""
        if not (published := self.published()):
            return new
        cut = prefix(replace(net, width=1.0), net).take(published)
        return new | {name: cut[name].clone(memory_format=torch.contiguous_format) for name in new.keys() & cut}

    def write(self, net: Net, params: Params, answer: Answer, files: Sequence[Path], to: Path) -> None:
        """Write files for other libraries into an existing folder, in addition to those of `rayfl.exporting`. `answer`:
        early exits to use. `files`: attached by the data set (`DataSet.attached`)."""

    def chosen(self, capacity: float) -> Net | None:
        """Return the network configured for a capacity, or None for the widest that fits the capacity."""
        return None

    @property
    def members(self) -> tuple["Model", ...]:
        """Models of its networks: itself, or the models of a mix."""
        return (self,)

    @property
    def frozen_key(self) -> Hashable:
        """Key that is equal for models with equal `frozen` tensors."""
        return self

    @property
    def quantised(self) -> Bits | None:
        """Storage of the linear layers, except the head, of a network that is frozen. None: as they are."""
        return None

    def frozen(self) -> Params:
        """Return the tensors that are never trained, by name, sent to every node once (`rayfl.core.frozen`)."""
        return {}

    def parts(self, net: Net) -> Mapping[str, Any]:
        """Return further properties of a network, by name: columns of `rayfl describe`."""
        return {}

    @property
    def advice(self) -> str:
        """Hint for a network without an axis to cut."""
        return 'net.axis("hidden", 64) and rayfl.declare(layer, weight=(hidden, None)) in `build`'

    def notes(self) -> list[str]:
        """Return notes on the network for `rayfl describe`."""
        return []

    @property
    def head_paths(self) -> tuple[str, ...]:
        """Paths of the modules that map features to classes, which are trained with adapters."""
        return tuple(sorted({name.rpartition(".")[0] for name in Net(self).layout.classifier}))

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Module paths of its residual blocks per stage, which `Net.without` can name."""
        return ()

    @property
    def exit_count(self) -> int:
        """Number of exits: the head and the early exits before it."""
        return 1


def prepare_at(place: str, model: Model) -> None:
    """Prepare the model in a field of another, such as "model.base", which then is the place of its errors."""
    try:
        model.prepare()
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.", f"{place}.", 1)) from None


class ImageModel(Model):
    """Classifier of images: [B, *input] -> logits [B, classes].

    >>> from rayfl.core import linear
    >>> class Small(ImageModel):
    ...     def build(self, net):
    ...         hidden = net.axis("hidden", 8)
    ...         layers = linear(Axis.fixed("pixels", 64), hidden), linear(hidden, self.labels)
    ...         return nn.Sequential(nn.Flatten(), *layers)
    >>> Net(Small(input=(1, 8, 8)), width=0.25).parameters
    160
    """

    takes: ClassVar = "input"

    input: tuple[int, int, int] = (3, 32, 32)
    """Channels, height and width of one image. Default: taken from the data set."""
    classes: int = 10
    """Number of classes. Default: taken from the data set."""
    smallest: ClassVar[Mapping[str, Any]] = {"input": (1, 8, 8), "classes": 4}

    def example(self, batch: int, device: torch.device | str) -> torch.Tensor:
        return torch.zeros(batch, *self.input, device=device)

    @property
    def image(self) -> Axis:
        """Axis of the image channels, which is never cut."""
        return Axis.fixed("image", self.input[0])

    @property
    def labels(self) -> Axis:
        """Axis of the classes, which is never cut."""
        return Axis.fixed(CLASSES, self.classes)


class TokenModel(Model):
    """A network for sequences of tokens: x [B, T] int64, -1 for padding, T at most `length` -> logits [B, C] of
    sequences (task: classes), or [B, T, C] of tokens."""

    takes: ClassVar = "ids"

    task: Literal["classes", "next_token", "masked_lm"] = "classes"
    """Prediction task. Default: taken from the data set."""
    ids: int = 1000
    """Number of input tokens, including a mask token. Default: taken from the data set."""
    classes: int = 10
    """Number of classes, or of output tokens. Default: taken from the data set."""
    length: int = 64
    """Tokens in the longest sequence. Default: taken from the data set."""

    @property
    def varying(self) -> tuple[int, ...]:
        """Batch, and length of the sequences."""
        return (0, 1)

    def example(self, batch: int, device: torch.device | str) -> torch.Tensor:
        return torch.zeros(batch, self.length, dtype=torch.int64, device=device)

    @property
    def head_paths(self) -> tuple[str, ...]:
        # a language model's token rows are most of its parameters
        return super().head_paths if self.task == "classes" else ()

    @property
    def labels(self) -> Axis:
        """Axis of the classes, which is never cut."""
        return Axis.fixed(CLASSES, self.classes)


MODELS: dict[str, type[Model]] = {}
"""Name -> family, filled by `rayfl.models`."""

MODELS_KIND = Kind("model", Model, MODELS, "rayfl.models")
