"""A network of another library, or of the user's own, as a model."""

import functools
import inspect
import itertools
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import field_validator
from torch import nn

from rayfl.config import ConfigError, shown
from rayfl.core.axes import CLASSES, segments
from rayfl.core.net import Net
from rayfl.models.base import ImageModel
from rayfl.models.inferred.blocks import add_steps
from rayfl.models.inferred.exits import add_exits, end_at, features_at, remove, unused
from rayfl.models.inferred.norms import Kind, replace_norms
from rayfl.models.inferred.plan import Plan, narrowed, plan_of
from rayfl.models.inferred.trace import Misnamed, Untraceable
from rayfl.models.layers import Scaler, check_without
from rayfl.models.settings import Settings, plain

OUTPUTS = ("num_classes", "classes", "num_labels", "n_classes")
"""Names by which constructors take the number of classes."""


class Module(ImageModel):
    """Network that `of(**options)` returns: [B, *input] -> logits [B, classes]. Its axes are inferred from one forward
    pass on torch's meta device, which computes nothing.

    A narrow network has the first positions of the initial weights, and the sizes of its layers and modules follow.
    Parts that cannot be cut stay whole.
    """

    name: Literal["module"] = "module"
    of: str
    """Constructor or function, "package.module:name", such as torchvision.models:mobilenet_v3_small. The package must
    be installed or in PYTHONPATH."""
    options: Settings = ()
    """Its keyword arguments. The number of classes is added as `num_classes`, `classes`, `num_labels` or `n_classes` if
    it has such an argument."""
    fixed: tuple[str, ...] = ()
    """Paths of modules that are never cut."""
    axes: Settings = ()
    """Path of a module -> name of the axis of its output's channels, e.g. {"features.3": stage1}. Channels of one name
    are cut together. Operations inside these modules are trusted to work on narrow inputs."""
    skippable: tuple[str, ...] | None = None
    """Paths of the blocks that methods such as NeFL leave out: modules whose output has the shape and axes of their
    input. Default: all modules that add their input to a result of it."""
    exits: tuple[str, ...] = ()
    """Paths of modules followed by an early exit, a linear classifier of their mean features, in network order."""
    norm: Kind = "static_bn"
    """Batch norms. static_bn: static batch norms (`rayfl.core.norms`). group: group norms of up to four groups. keep:
    only their scale and shift are trained; they include the initial statistics, which do not change. Other norms stay
    as they are."""
    smallest: ClassVar[Mapping[str, Any]] = {"of": "rayfl.testing.tiny:Branches", "input": (1, 8, 8), "classes": 4}

    @field_validator("of", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        if not callable(given):
            return given
        name = f"{given.__module__}:{given.__qualname__}"
        try:
            found = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError):
            found = None
        if found is not given or given.__module__ == "__main__":
            raise ValueError("a class or function of a module that actors can import, not one of a notebook")
        return name

    def fitted(self, data: str, offers: Mapping[str, Any], where: str) -> Self:
        fitted = super().fitted(data, offers, where)
        fitted._check(where)
        return fitted

    def _check(self, where: str) -> None:
        """Raise ConfigError if the network cannot be made, run or cut."""
        self.constructor(where)
        try:
            plan = _plan(self)
        except Misnamed as error:
            raise ConfigError(f"{where}.{error.field}: {error}") from None
        except Untraceable as error:
            raise ConfigError(
                f"{where}: {self.of} is not valid: {error}. Allowed: networks that run on samples of shape "
                f"{list(self.input)} and do not look at the values of tensors. Hint: torch.where in place of `if`, or "
                "a model that declares its axes (rayfl/PLUGINS.md)"
            ) from error
        outputs = plan.outputs
        if outputs != (self.classes,):
            raise ConfigError(
                f"{where}.options: {self.of} returns outputs of shape {list(outputs)} per sample. Allowed: "
                f"[{self.classes}], the classes of the data. Hint: set the option that gives the number of classes"
            )

    def constructor(self, where: str = "model") -> Callable[[], Any]:
        """Return `of` with its options. Raise ConfigError if it cannot be imported or called with them."""
        try:
            found = pkgutil.resolve_name(self.of)
            if not callable(found):
                raise TypeError("not a class or function")
        except (Exception, SystemExit) as error:
            reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            raise ConfigError(
                f"{where}.of: {shown(self.of)} cannot be called ({reason}). Allowed: package.module:name of a package "
                "that is installed or in PYTHONPATH"
            ) from None
        try:
            signature = inspect.signature(found)
        except ValueError:
            signature = inspect.Signature()
        options = plain(self.options)
        takes = [name for name in OUTPUTS if name in signature.parameters]
        open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        if not set(OUTPUTS) & set(options) and (takes or open_ended):
            options[(takes or OUTPUTS)[0]] = self.classes
        try:
            signature.bind(**options)
        except TypeError as error:
            raise ConfigError(
                f"{where}.options: {shown(options)} is not valid ({error}). Allowed: the arguments of "
                f"{self.of}{signature}"
            ) from None
        return functools.partial(found, **options)

    def whole(self) -> nn.Module:
        """Return the whole network, on the default device."""
        make = self.constructor()
        try:
            module = make()
        except Exception:
            # constructors that read values of tensors
            device = torch.get_default_device()
            if device.type != "meta":
                raise
            with torch.device("cpu"):
                module = make()
            module = module.to(device)
        if not isinstance(module, nn.Module):
            raise ConfigError(f"model.of: {self.of} returned {type(module).__name__}. Allowed: a torch.nn.Module")
        return replace_norms(module, self.norm)

    def with_exits(self) -> nn.Module:
        """Return the whole network with all its early exits, on the default device."""
        module = self.whole()
        if self.exits:
            add_exits(module, _features(self), self.classes)
        return module

    @property
    def exit_count(self) -> int:
        return len(self.exits) + 1

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        return _plan(self).blocks

    def build(self, net: Net) -> nn.Module:
        plan, blocks = _plan(self), [*itertools.chain(*self.blocks)]
        check_without(net, blocks, self.exit_count if self.exits else 0)
        sizes = {name: net.axis(name, axis.size, axis.groups).size for name, axis in plan.axes.items()}
        module = narrowed(self.with_exits() if net.exits else self.whole(), plan, sizes, net.without)
        if net.steps:
            add_steps(module, [path for path in blocks if path not in net.without])
        if net.scale != 1:
            _scale(module, net.scale)
        if 0 < net.exits < self.exit_count:
            end_at(module, net.exits)
            remove(module, _unused(self, net.exits))
        return module


@functools.lru_cache(maxsize=64)
def _plan(model: Module) -> Plan:
    with torch.device("meta"):
        return plan_of(
            model.with_exits().eval(), model.example(2, "meta"), model.fixed, model.skippable, plain(model.axes)
        )


@functools.lru_cache(maxsize=64)
def _features(model: Module) -> dict[str, tuple[int, int]]:
    with torch.device("meta"):
        return features_at(model.whole().eval(), model.example(2, "meta"), model.exits)


@functools.lru_cache(maxsize=64)
def _unused(model: Module, exits: int) -> tuple[str, ...]:
    with torch.device("meta"):
        module = model.with_exits().eval()
        end_at(module, exits)
        return unused(module, model.example(2, "meta"))


def _scale(module: nn.Module, scale: float) -> None:
    """Divide the outputs of all layers but the classifier in training (HeteroFL section 3.3)."""
    divide = Scaler(scale)
    for part in module.modules():
        if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Linear):
            rows = getattr(part, "axes", {}).get("weight", (None,))[0]
            if not any(axis.name == CLASSES for _, axis in segments(rows)):
                part.register_forward_hook(lambda part, _, y: divide.train(part.training)(y))
