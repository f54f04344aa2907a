"""Mixed architectures: a network of any model for every capacity.

    >>> from rayfl.models import MODELS
    >>> mix = MODELS["mix"](networks={1: "resnet20", 0.5: {"name": "resnet8", "channels": 8}})
    >>> [mix.chosen(capacity).parameters for capacity in (1, 0.5)]
    [272474, 19954]

Uses that need a single network take that of the largest capacity.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializationInfo,
    SerializeAsAny,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from torch import nn

from rayfl.config import ConfigError
from rayfl.config.plain import shown
from rayfl.core.axes import CLASSES, Axis, Dims, declare
from rayfl.core.net import Net
from rayfl.core.tensors import Params
from rayfl.metrics import label
from rayfl.models.base import MODELS_KIND, SAMPLES, Model, prepare_at
from rayfl.models.features import classifier_path
from rayfl.models.layers import sequential

ALIKE = ("input", "variables", "series", "task", "ids", "classes")
"""Fields that must be equal in all networks of a mix, because they depend on the data."""


class Around(Model, ABC):
    """A model whose networks are those of another one, `inner`, with changes by a subclass."""

    @property
    @abstractmethod
    def inner(self) -> Model:
        """The other model."""

    @property
    def varying(self) -> tuple[int, ...]:
        return self.inner.varying

    def build(self, net: Net) -> nn.Module:
        return self._within(net).build()

    def example(self, batch: int, device: torch.device | str) -> torch.Tensor:
        return self.inner.example(batch, device)

    def prepare(self) -> None:
        self.inner.prepare()

    def initial(self, net: Net) -> Params:
        return self._within(net).initial()

    def statistics(self, net: Net) -> Params:
        return self._within(net).statistics()

    @property
    def frozen_key(self) -> Hashable:
        return self.inner.frozen_key

    def frozen(self) -> Params:
        return self.inner.frozen()

    def parts(self, net: Net) -> Mapping[str, Any]:
        return self.inner.parts(self._within(net))

    @property
    def head_paths(self) -> tuple[str, ...]:
        return self.inner.head_paths

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        return self.inner.blocks

    def _within(self, net: Net) -> Net:
        return replace(net, model=self.inner)


class Wrapper(Around, ABC):
    """A model around another one, which is part of its section."""

    of: SerializeAsAny[Model]
    """The other model: any `model:` section."""

    @property
    def inner(self) -> Model:
        return self.of

    @property
    def members(self) -> tuple[Model, ...]:
        return tuple(self.model_copy(update={"of": model}) for model in self.of.members)


class Projected(Wrapper):
    """Networks of another model with a linear projection of their last features directly before the classifier, so that
    classifiers of all models have one shape: logits = W (P f + p) + b, f [B, D], P [features, D], W [C, features].

    The classifier at a path such as "head" becomes "head.project" and "head.classifier", both initialised as torch's
    linear layers. Features of the projection are never cut. Early exits are not supported.
    """

    features: int = Field(ge=1)
    """Number of features of the projection."""

    @field_validator("of", mode="before")
    @classmethod
    def _read(cls, given: Any) -> Model:
        return MODELS_KIND.read(given, "of")

    def fitted(self, data: str, offers: Mapping[str, Any], where: str) -> Self:
        return self.model_copy(update={"of": self.of.fitted(data, offers, f"{where}.of")})

    @property
    def blank(self) -> Self:
        return self.model_copy(update={"of": self.of.blank})

    def build(self, net: Net) -> nn.Module:
        within = self._within(net)
        module, path = within.build(), classifier_path(within)
        old = module.get_submodule(path)
        assert isinstance(old, nn.Linear)
        features, dims = Axis.fixed("features", self.features), within.layout.dims[f"{path}.weight"]
        project = _linear(old.in_features, self.features, (features, dims[1]))
        labels = Axis.fixed(CLASSES, old.out_features)
        classifier = _linear(self.features, old.out_features, (labels, features))
        module.set_submodule(path, sequential(project=project, classifier=classifier))
        return module

    def initial(self, net: Net) -> Params:
        """Return the other model's parameters with a new projection and classifier."""
        return super(Around, self).initial(net) | _without_classifier(self._within(net))


class Mix(Around):
    """A network of any model for every capacity. Each is trained at its full width."""

    name: Literal["mix"] = "mix"
    networks: "Networks" = Field(default={1: "resnet20", 0.5: "resnet8"}, validate_default=True)  # pyright: ignore
    """Capacity -> model section, for every capacity of the population: {"1": resnet20, "0.5": {name: resnet8,
    channels: 8}}. In a file, capacities need quotes."""
    weights: Literal[""] = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    """Not supported: set the `weights` of its networks."""
    features: int | None = Field(default=None, ge=1)
    """Number of inputs of every network's classifier, after a linear projection of its last features (the common
    representation of Fed-ET and FedProto). Default: no projection."""

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        (largest, first), *rest = self.networks
        for capacity, model in rest:
            where = f"networks.{label(capacity)}"
            if first.takes and model.takes and first.takes != model.takes:
                raise ConfigError(
                    f"{where}: {model.name} takes {SAMPLES[model.takes]}. Allowed: one of "
                    f"{SAMPLES[first.takes]}, as that of capacity {label(largest)}"
                )
        return self

    @property
    def inner(self) -> Model:
        return self._model(self.networks[0][1])

    @property
    def members(self) -> tuple[Model, ...]:
        return tuple(dict.fromkeys(self._model(model) for _, model in self.networks))

    def chosen(self, capacity: float) -> Net:
        for own, model in self.networks:
            if own == capacity:
                return Net(self._model(model))
        given = ", ".join(label(own) for own, _ in self.networks)
        raise ConfigError(f"model.networks: no network for capacity {label(capacity)}. Allowed: {given}")

    def fitted(self, data: str, offers: Mapping[str, Any], where: str) -> Self:
        fitted = [(c, m.fitted(data, offers, f"{where}.networks.{label(c)}")) for c, m in self.networks]
        for name in ALIKE:
            values = [(c, getattr(model, name)) for c, model in fitted if name in type(model).model_fields]
            for capacity, value in values:
                largest, wanted = values[0]
                if value != wanted:
                    raise ConfigError(
                        f"{where}.networks.{label(capacity)}.{name}: {value!r} is not valid. Allowed: {wanted!r}, as "
                        f"for capacity {label(largest)}"
                    )
        return self.model_copy(update={"networks": tuple(fitted)})

    def prepare(self) -> None:
        for capacity, model in self.networks:
            prepare_at(f"model.networks.{label(capacity)}", model)

    @property
    def blank(self) -> Self:
        return self.model_copy(update={"networks": tuple((c, model.blank) for c, model in self.networks)})

    @property
    def exit_count(self) -> int:
        return self.inner.exit_count

    def _model(self, model: Model) -> Model:
        return model if self.features is None else Projected(of=model, features=self.features)


def _read(given: Any) -> tuple[tuple[float, Model], ...]:
    if not isinstance(given, Mapping) or not given:
        raise ValueError('a mapping of capacities to models, such as {"1": resnet20, "0.5": resnet8}')
    found: dict[float, Model] = {}
    for key, section in given.items():
        capacity = _capacity(key)
        if capacity in found:
            raise ConfigError(f"networks: capacity {label(capacity)} appears twice. Allowed: each capacity once")
        where = f"networks.{label(capacity)}"
        model = found[capacity] = MODELS_KIND.read(section, where)
        if isinstance(model, Mix):
            raise ConfigError(f"{where}: mix is not valid. Allowed: one model for a capacity")
    return tuple(sorted(found.items(), key=lambda pair: -pair[0]))


def _capacity(key: Any) -> float:
    try:
        capacity = 0.0 if isinstance(key, bool) else float(key)
    except (TypeError, ValueError):
        capacity = 0.0
    if not 0 < capacity <= 1:
        raise ConfigError(f"networks: {shown(key)} is not a capacity. Allowed: numbers more than 0, at most 1")
    return capacity


def _plain(networks: tuple[tuple[float, Model], ...], info: SerializationInfo) -> dict[str, Any]:
    """Return the mapping, with capacities as the shortest text that reads as the same number."""
    return {repr(capacity).removesuffix(".0"): model.model_dump(mode=info.mode) for capacity, model in networks}


Networks = Annotated[
    tuple[tuple[float, Any], ...],
    BeforeValidator(_read),
    PlainSerializer(_plain, return_type=dict),
    WithJsonSchema({"type": "object"}),
]
"""Capacity -> model, a mapping in a file."""


def _linear(cin: int, cout: int, weight: Dims) -> nn.Linear:
    return declare(nn.Linear(cin, cout), weight=weight, bias=weight[:1])


def _without_classifier(net: Net) -> Params:
    return {name: t for name, t in net.initial().items() if name not in net.layout.classifier}
