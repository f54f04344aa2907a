"""A network of another library, or of the user's own, as a model."""

import copy
import functools
import hashlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import nn

from rayfl.config import ConfigError, imported, shown, with_options
from rayfl.core import values
from rayfl.core.axes import CLASSES, segments
from rayfl.core.net import Answer, Net, load
from rayfl.core.tensors import Params
from rayfl.models.base import SAMPLES, Model
from rayfl.models.huggingface import folder
from rayfl.models.inferred.blocks import add_steps
from rayfl.models.inferred.exits import add_exits, end_at, features_at, remove, unused
from rayfl.models.inferred.narrow import Plan, narrowed
from rayfl.models.inferred.norms import Kind, replace_norms, without_statistics
from rayfl.models.inferred.notes import listed, notes_on, uncounted
from rayfl.models.inferred.plan import plan_of
from rayfl.models.inferred.tokens import VOCABULARY, adapt, by_configuration, check_positions
from rayfl.models.inferred.trace import Misnamed, Untraceable
from rayfl.models.layers import Scaler, check_without
from rayfl.models.settings import Settings, frozen, plain
from rayfl.models.start import matching

OUTPUTS = ("num_classes", "classes", "num_labels", "n_classes")
"""Names by which constructors take the number of classes."""
PRETRAINED = ("weights", "pretrained")
"""Options by which constructors load weights."""


class Module(Model):
    """Network that `of(**options)` returns. Its axes are inferred from one forward pass on torch's meta device, which
    computes nothing.

    The data set decides about its samples: images [B, *input], tables [B, variables] or series [B, *series] -> logits
    [B, classes]; tokens [B, T] int64 -> logits [B, classes] of sequences or [B, T, classes] of tokens. A network whose
    `forward` has `input_ids` gets tokens and attention mask as those of transformers do, others get tokens, with `pad`
    in place of padding.

    A narrow network has the first positions of the initial weights, and the sizes of its layers and modules follow.
    Parts that cannot be cut stay whole.

    >>> Module(nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))).name
    'module'
    """

    positional: ClassVar = ("of",)
    name: Literal["module"] = "module"
    of: str
    """Constructor or function, "package.module:name", such as torchvision.models:mobilenet_v3_small or
    transformers:BertForSequenceClassification. The package must be installed or in PYTHONPATH. In Python also a class
    or function itself, or a network, whose weights are the start."""
    options: Settings = ()
    """Its keyword arguments; for a class of transformers, fields of its configuration. The number of classes is added
    as `num_classes`, `classes`, `num_labels` or `n_classes`, and that of tokens as `vocab_size`, `vocabulary`,
    `num_tokens`, `n_tokens`, `ntokens`, `ntoken` or `num_embeddings`, if it has such an argument. `weights` and
    `pretrained` are the start of the whole network, but for the classifier if it differs."""
    fixed: tuple[str, ...] = ()
    """Paths of modules that are never cut."""
    axes: Settings = ()
    """Path of a module -> name of the axis of its output's channels, e.g. {"features.3": stage1}. Channels of one name
    are cut together. Operations inside these modules are trusted to work on narrow inputs."""
    channels: int | None = Field(default=None, ge=1)
    """Channels of the images that the network takes, if they are not those of the data: 3 repeats images of one
    channel. Default: those of the data."""
    skippable: tuple[str, ...] | None = None
    """Paths of the blocks that methods such as NeFL leave out: modules whose output has the shape and axes of their
    input. Default: all modules that add their input to a result of it."""
    exits: tuple[str, ...] = ()
    """Paths of modules followed by an early exit, a linear classifier of their mean features, in network order."""
    norm: Kind = "static_bn"
    """Batch norms. static_bn: static batch norms (`rayfl.core.norms`). group: group norms of up to four groups. keep:
    only their scale and shift are trained; they include the initial statistics, which do not change. Other norms stay
    as they are."""
    input: tuple[int, int, int] | None = None
    """Channels, height and width of one image. Default: taken from the data set."""
    variables: int | None = None
    """Columns of a table. Default: taken from the data set."""
    series: tuple[int, int] | None = None
    """Variables and steps of a series. Default: taken from the data set."""
    ids: int | None = None
    """Number of input tokens, including a mask token. Default: taken from the data set."""
    length: int = 64
    """Tokens in the longest sequence. Default: taken from the data set."""
    task: Literal["classes", "next_token", "masked_lm"] = "classes"
    """Prediction task for tokens. Default: taken from the data set."""
    pad: int | None = None
    """Token in place of padding. Default: that of the data set, otherwise a new token after those of the data set; with
    task next_token, which has no use for it, the last token."""
    classes: int = 10
    """Number of classes, or of output tokens. Default: taken from the data set."""
    smallest: ClassVar[Mapping[str, Any]] = {"of": "rayfl.testing.tiny:Branches", "input": (1, 8, 8), "classes": 4}

    @model_validator(mode="before")
    @classmethod
    def _arguments(cls, given: Any) -> Any:
        """Read further arguments beside an object, in Python, as its options."""
        if not isinstance(given, Mapping) or isinstance(given.get("of", ""), str):
            return given
        options = {name: value for name, value in given.items() if name not in cls.model_fields}
        fields = {name: value for name, value in given.items() if name in cls.model_fields}
        return {**fields, "options": {**fields.get("options", {}), **options}}

    @property
    def takes(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return next((kind for kind in SAMPLES if getattr(self, kind) is not None), "")

    @property
    def rows(self) -> int:
        """Number of tokens that the network must know: those of the data, and padding."""
        return max(self.ids or 0, (self.pad or 0) + 1)

    @property
    def varying(self) -> tuple[int, ...]:
        return (0, 1) if self.takes == "ids" else (0,)

    @property
    def head_paths(self) -> tuple[str, ...]:
        return super().head_paths if self.task == "classes" else ()

    def example(self, batch: int, device: torch.device | str) -> torch.Tensor:
        shapes = {"input": self.input, "variables": (self.variables,), "series": self.series, "ids": (self.length,)}
        if not self.takes:
            raise ValueError(f"model {self.name}: the shape of samples is not known. Hint: input")
        kind = torch.int64 if self.takes == "ids" else None
        return torch.zeros(batch, *shapes[self.takes], dtype=kind, device=device)  # pyright: ignore[reportGeneralTypeIssues]

    @field_validator("of", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        if not callable(given):
            return given
        if isinstance(given, nn.Module):
            return values.keep(given)
        name = f"{getattr(given, '__module__', '')}:{getattr(given, '__qualname__', '')}"
        try:
            found = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError):
            found = None
        return name if found is given and given.__module__ != "__main__" else values.keep(given)

    def fitted(self, data: str, offers: Mapping[str, Any], where: str) -> Self:
        fitted = super().fitted(data, offers, where)
        if fitted.channels and fitted.input and fitted.input[0] not in (1, fitted.channels):
            raise ConfigError(
                f"{where}.channels: {fitted.channels} is not valid. Allowed: {fitted.input[0]}, as data set {data} has"
            )
        if fitted.takes == "ids" and fitted.pad is None and fitted.task != "next_token":
            # a token of the data would not be trained as padding
            fitted = fitted.model_copy(update={"pad": fitted.ids})
        fitted._check(where)
        return fitted

    def _check(self, where: str) -> None:
        """Raise ConfigError if the network cannot be made, run or cut."""
        self.constructor(where)
        if self.exits and self.task != "classes":
            raise ConfigError(f"{where}.exits: not supported with task {self.task}. Allowed: []")
        try:
            plan = _plan(self)
        except Misnamed as error:
            raise ConfigError(f"{where}.{error.field}: {error}") from None
        except Untraceable as error:
            shape = list(self.example(1, "meta").shape[1:])
            hint = "torch.where in place of `if`, or a model that declares its axes (rayfl/PLUGINS.md)"
            if self.input and self.input[0] == 1 and self.channels is None:
                hint = f"channels: 3 repeats the channel of these images. Or {hint}"
            raise ConfigError(
                f"{where}: {self.of} is not valid: {error}. Allowed: networks that run on samples of shape {shape} and "
                f"do not look at the values of tensors. Hint: {hint}"
            ) from error
        if self.takes == "ids":
            with torch.device("meta"):
                check_positions(self.whole(), self.length, f"{where}.options")
        outputs = (self.classes,) if self.task == "classes" else (self.length, self.classes)
        if plan.outputs != outputs:
            raise ConfigError(
                f"{where}.options: {self.of} returns outputs of shape {list(plan.outputs)} per sample. Allowed: "
                f"{list(outputs)}, the classes of the data. Hint: set the option that gives the number of classes"
            )

    def constructor(self, where: str = "model", pretrained: bool = False) -> Callable[[], Any]:
        """Return `of` with its options, or a function that copies it if it is a network. Raise ConfigError if it cannot
        be imported or called with them. `pretrained`: with the options of `PRETRAINED`, and without the classes."""
        found = self._object(where)
        if isinstance(found, nn.Module):
            if self.options:
                raise ConfigError(
                    f"{where}.options: {shown(plain(self.options))} is not valid with a network. Allowed: {{}}"
                )
            return lambda: copy.deepcopy(found).to(torch.get_default_device())
        if not callable(found):
            raise ConfigError(
                f"{where}.of: {shown(self.of)} is of type {type(found).__name__}. Allowed: a class or function"
            )
        options = {name: value for name, value in plain(self.options).items() if pretrained or name not in PRETRAINED}
        of_tokens = self.takes == "ids"
        for name in {*VOCABULARY} & options.keys() if of_tokens else ():
            if options[name] < self.rows:
                raise ConfigError(
                    f"{where}.options: {name} {options[name]} is not valid. Allowed: at least {self.rows}, the tokens "
                    "of the data and of padding"
                )
        if hasattr(found, "config_class"):
            follow = {"num_labels": self.classes} if self.task == "classes" else {}
            follow |= {"vocab_size": self.rows, "pad_token_id": self.pad} if of_tokens else {}
            return by_configuration(found, options, follow, f"{where}.options")
        try:
            takes = inspect.signature(found).parameters
        except ValueError:
            takes = {}
        if of_tokens and not {*VOCABULARY} & options.keys():
            options |= {name: self.rows for name in VOCABULARY if name in takes}
        names = [name for name in OUTPUTS if name in takes]
        open_ended = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        if not pretrained and not set(OUTPUTS) & set(options) and (names or open_ended):
            options[(names or OUTPUTS)[0]] = self.classes
        return with_options(found, self.of, options, where)

    def _object(self, where: str = "model") -> Any:
        """Return what `of` names. Raise ConfigError if it cannot be imported."""
        if "@" not in self.of:
            return imported(self.of, where)
        try:
            return values.find(self.of)
        except KeyError:
            raise ConfigError(
                f"{where}.of: {shown(self.of)} is an object of another Python program. Allowed: package.module:name. "
                "Hint: make the same object here and pass it to rayfl.Module first"
            ) from None

    def whole(self) -> nn.Module:
        """Return the whole network, on the default device."""
        pad = (self.rows - 1 if self.pad is None else self.pad) if self.takes == "ids" else None
        module = adapt(self._made(self.constructor()), pad, None if self.task == "classes" else self.classes)
        module = replace_norms(module, self.norm)
        if self.input and self.channels:
            module.register_forward_pre_hook(functools.partial(_repeated, self.channels))
        return module

    def _made(self, make: Callable[[], Any]) -> nn.Module:
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
        return module

    @property
    def blank(self) -> Self:
        options = {name: value for name, value in plain(self.options).items() if name not in PRETRAINED}
        return self.model_copy(update={"weights": "", "options": frozen(options)})

    def published(self) -> Params:
        given = plain(self.options)
        if self.weights:
            return super().published()
        if isinstance(found := self._object(), nn.Module):
            return matching(self.named(found.state_dict()), Net(self), self.of, (), self.source)
        if not any(given.get(name) for name in PRETRAINED):
            return {}
        try:
            state = self._made(self.constructor(pretrained=True)).state_dict()
        except Exception as error:
            raise ConfigError(
                f"model.options: {self.of} failed with {shown(given)} ({type(error).__name__}: {error}). Allowed: "
                "weights that it can load or download"
            ) from error
        return matching(self.named(state), Net(self), self.of, (), self.source)

    def named(self, tensors: Params) -> Params:
        return without_statistics(tensors, Net(self).blank(), self.norm)

    def with_exits(self) -> nn.Module:
        """Return the whole network with all its early exits, on the default device."""
        module = self.whole()
        if self.exits:
            add_exits(module, _features(self), self.classes)
        return module

    @property
    def advice(self) -> str:
        return f"model.axes declares what is not cut: {listed(_plan(self).fixed)}"

    def notes(self) -> list[str]:
        net = Net(self)
        return [*notes_on(_plan(self)), *uncounted(net.blank(), self.example(1, "meta"), net.layer_macs)]

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

    def write(self, net: Net, params: Params, answer: Answer, files: Sequence[Path], to: Path) -> None:
        """Write a folder "transformers" of a whole network of this library. A configuration has no narrow one."""
        if net == Net(self):
            module = self._made(self.constructor())
            if hasattr(module, "save_pretrained"):
                load(module, params)
                folder.save(module, files, to / "transformers")


@functools.lru_cache(maxsize=64)
def _plan(model: Module) -> Plan:
    """Return the plan that the driver of the run has inferred, or infer it."""
    name = f"{model.of}#{hashlib.sha256(model.model_dump_json().encode()).hexdigest()}"
    try:
        return values.find(name)
    except KeyError:
        with torch.device("meta"):
            module, x = model.with_exits().eval(), model.example(2, "meta")
            plan = plan_of(module, x, model.fixed, model.skippable, plain(model.axes))
        values.keep_as(name, plan)
        return plan


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


def _repeated(channels: int, module: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
    """Repeat the channel of images [B, 1, H, W]."""
    return (given[0].expand(-1, channels, -1, -1),)


def _scale(module: nn.Module, scale: float) -> None:
    """Divide the outputs of all layers but the classifier in training (HeteroFL section 3.3)."""
    divide = Scaler(scale)
    for part in module.modules():
        dims = getattr(part, "axes", {}).get("weight", ())
        answers = any(axis.name == CLASSES for _, axis in segments(dims[0])) if dims else False
        if len(dims) > 1 and (not answers or isinstance(part, nn.Embedding)):
            part.register_forward_hook(lambda part, _, y: divide.train(part.training)(y))
