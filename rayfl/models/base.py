"""A model family: one description from which the network of any width and depth is built."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from rayfl.axes import Axis, Layout, Net, layout_of, on_meta
from rayfl.config import Config
from rayfl.norms import fresh, static_norms
from rayfl.tensors import Params


class Model(Config, ABC):
    """What a `model:` section says. A subclass adds its fields and `name: Literal["..."] = "..."`."""

    name: str
    input: tuple[int, int, int] = (3, 32, 32)
    """Channels, height and width of one image. Taken from the data set unless given."""
    classes: int = 10
    """Number of classes. Taken from the data set unless given."""

    if TYPE_CHECKING:  # pydantic makes it, out of the type checker's sight

        def __hash__(self) -> int: ...

    @abstractmethod
    def build(self, net: Net) -> nn.Module:
        """The network, [B, *input] -> logits [B, classes], freshly initialised, made of rayfl.axes layers."""

    def prepare(self) -> None:
        """Fetches what `initial` reads, or a ConfigError that says what to put where. To be called before Ray starts,
        where the data are loaded too."""

    @property
    def blank(self) -> Self:
        """The same network, which starts from nothing that would have to be fetched."""
        return self

    def initial(self, net: Net) -> Params:
        """The parameters that training of a network starts from. What is random is drawn from torch's global generator
        (`seeds.torch_scope`)."""
        return params_of(self.build(net))

    def statistics(self, net: Net) -> Params:
        """The running statistics that its static norms start from, by the names of `norms.fresh`."""
        return fresh(on_meta(self.build, net))

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Its residual blocks by module path, stage by stage: what `Net.without` may name."""
        return ()

    @property
    def exit_count(self) -> int:
        """At how many places `Net.exits` lets it answer: its head, and the early exits before it."""
        return 1

    @property
    def image(self) -> Axis:
        """The image channels: never cut."""
        return Axis.fixed("image", self.input[0])

    @property
    def labels(self) -> Axis:
        """The classes: never cut. Its name is what label-aware methods look for."""
        return Axis.fixed("classes", self.classes)


@functools.lru_cache(maxsize=256)
def layout(model: Model, net: Net) -> Layout:
    """Axes and shapes of a network, without memory for it."""
    return layout_of(on_meta(model.build, net))


@functools.lru_cache(maxsize=256)
def layout_of_all(model: Model, net: Net) -> Layout:
    """Of the parameters, and of the running statistics of static norms, each on the axis of its norm's weight."""
    found = layout(model, net)
    weights = {name: f"{name.rpartition('.')[0]}.weight" for name in fresh(on_meta(model.build, net))}
    return Layout(
        {**found.dims, **{name: found.dims[weight] for name, weight in weights.items()}},
        {**found.shapes, **{name: found.shapes[weight] for name, weight in weights.items()}},
    )


@functools.lru_cache(maxsize=256)
def layers_of(model: Model, net: Net) -> Mapping[str, tuple[str, ...]]:
    """The names of the weight and bias of every convolution and linear layer by its path, in the network's order."""
    layers = {p: m for p, m in on_meta(model.build, net).named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    return {path: tuple(f"{path}.{name}" for name, _ in layer.named_parameters()) for path, layer in layers.items()}


@functools.lru_cache(maxsize=256)
def has_static_norms(model: Model, net: Net) -> bool:
    """Whether the network needs statistics before it is evaluated."""
    return bool(static_norms(on_meta(model.build, net)))


@functools.lru_cache(maxsize=16)
def resident(model: Model, net: Net, device: torch.device) -> nn.Module:
    """The one network of this kind that stays in this process: clients run in it one after another.

    Its parameters and statistics are whatever was there last: always `load` before use.
    """
    return model.build(net).to(device)


@torch.no_grad()
def load(net: nn.Module, params: Params) -> None:
    """Copies parameters into the network's own storage (never aliases: a payload is shared memory)."""
    for name, parameter in net.named_parameters():
        parameter.copy_(params[name])


def params_of(net: nn.Module) -> Params:
    """The network's parameters, detached; they share its memory."""
    return {name: parameter.detach() for name, parameter in net.named_parameters()}
