"""Low-rank adapters over a frozen network (Hu et al., "LoRA", ICLR 2022, arXiv 2106.09685).

Every target, a linear layer x -> W0 x of the base network, gets two small matrices A and B:

    y = W0 x + s B A drop(x),   A [r, in] ~ U(-1 / sqrt(in), 1 / sqrt(in)),   B [out, r] = 0

The base is frozen: it is in no layout, payload or sum (`rayfl.core.frozen`). A, B and the base's head are trained. The
rank is an ordinary axis, one per target: a client of a smaller capacity has a prefix of every A and B. This prefix is a
valid initialisation, because A's distribution does not depend on the rank.
"""

import math
import re
import shutil
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, SerializeAsAny, WithJsonSchema, field_validator, model_validator
from torch import nn

from rayfl.config import ConfigError
from rayfl.core import frozen
from rayfl.core.axes import Axis
from rayfl.core.net import Answer, Net, load, params_of
from rayfl.core.seeds import stream, torch_scope
from rayfl.core.submodel import prefix
from rayfl.core.tensors import Params
from rayfl.models import peft
from rayfl.models.adapter import Adapter, add, take_axes, take_base
from rayfl.models.base import MODELS_KIND, Model, prepare_at
from rayfl.models.quantised import Bits, Quantised, packed, unpacked
from rayfl.models.settings import Settings, plain
from rayfl.models.vit import ViTB16

QUERIES_VALUES = ("query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "c_attn", "q.linear", "v.linear")
"""Names of queries and values in RoBERTa and BERT, Llama, DistilBERT, GPT-2, and rayfl."""
PEFT = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "use_rslora": "scaling: rslora",
    "use_dora": "LoRA without magnitudes (DoRA)",
    "alpha_pattern": "one alpha for all targets",
}
"""Setting of peft -> what is used instead."""
ALL_LINEAR = ("all-linear",)
"""Targets: all linear layers."""


class Lora(Model):
    """Adapters of at most `rank` at the targets of a base network.

    A capacity c has rank ceil(c R) at a target of rank R. Below 1 / R the rank is 0; if it is 0 at all targets, only
    the head is trained. Layers keep the base's paths: parameters are "<path>.lora.A", "<path>.lora.B", and those of the
    base's head. A method's Scaler has no effect, because no layer is narrow.
    """

    name: Literal["lora"] = "lora"
    base: SerializeAsAny[Model] = Field(default="vit_b_16", validate_default=True)  # pyright: ignore
    """Base network: the section of any model."""
    targets: Annotated[
        tuple[str, ...],
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}], "default": []}),
    ] = ()
    """Linear layers with an adapter, by the end of their paths, or all-linear: all but the head. Default: the queries
    and values of attention."""
    rank: int = Field(default=8, ge=1)
    """Rank R of the server's adapters."""
    rank_pattern: Settings = ()
    """Other ranks R of some targets, by the end of their paths or a regular expression of it: {v_proj: 4}, or
    {layers.0.*: 2} (peft's name)."""
    scaling: Literal["constant", "alpha_over_r", "rslora"] = "constant"
    """Factor s of a client of rank r: alpha / R for all, so that a prefix truncates the same function; alpha / r, as in
    most published code; or alpha / sqrt(r) (rsLoRA)."""
    alpha: float = Field(default=16.0, gt=0)
    """Numerator of s."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of an adapter's input in training."""
    head: Literal["train", "frozen"] = "train"
    """Train the head of the base network too, or freeze it."""
    modules_to_save: tuple[str, ...] = ()
    """Further modules of the base that are trained whole, by a part of their paths, such as lm_head (peft's name)."""
    base_seed: int = Field(default=0, ge=0)
    """Seed of a base without pretrained weights, and of a frozen head."""
    adapter: str = ""
    """Folder of the library peft with adapter_config.json and adapter_model.safetensors, on the server's machine:
    initial adapters and head. Empty: new ones."""
    merged: bool = False
    """Give every target a third parameter, "<path>.lora.W" [out, in], added to W0, which methods fold into the base. It
    is never trained by gradients."""
    core: bool = False
    """Give every target a parameter "<path>.lora.M" [r, r]: y = W0 x + s B M A drop(x). M starts at 0, and B like A;
    methods train only M (Fed-SB)."""
    smallest: ClassVar = {"rank": 10, "base": {"name": "vit_b_16", **ViTB16.smallest}}

    @field_validator("targets", mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else given

    @field_validator("rank_pattern")
    @classmethod
    def _ranks(cls, given: tuple[Any, ...]) -> tuple[Any, ...]:
        for pattern, rank in given:
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
                raise ValueError(f"{pattern}: {rank!r} is not valid. Allowed: whole numbers of at least 1")
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(f"{pattern!r} is not valid ({error}). Allowed: regular expressions") from None
        return given

    @model_validator(mode="before")
    @classmethod
    def _of_peft(cls, given: Any) -> Any:
        """Raise ConfigError for settings of peft that have another name here, or none."""
        if isinstance(given, Mapping) and (known := [name for name in given if name in PEFT]):
            raise ConfigError(f"{known[0]}: the setting of peft is not supported. Allowed: {PEFT[known[0]]}")
        return given

    @field_validator("base", mode="before")
    @classmethod
    def _read(cls, given: Any) -> Model:
        return MODELS_KIND.read(given, "base")

    def fitted(self, data: str, offers: Mapping[str, Any], where: str) -> Self:
        return self.model_copy(update={"base": self.base.fitted(data, offers, f"{where}.base")})

    def prepare(self) -> None:
        super().prepare()
        prepare_at("model.base", self.base)
        frozen.tensors_of(self)

        if self.adapter:
            self._read_adapter()

    @property
    def blank(self) -> Self:
        return self.model_copy(update={"base": self.base.blank, "adapter": "", "weights": ""})

    def initial(self, net: Net) -> Params:
        start = super().initial(net)
        if not self.adapter:
            return start
        return start | prefix(replace(net, width=1.0), net).take(self._read_adapter())

    def _read_adapter(self) -> Params:
        """Return the folder's tensors by rayfl's names. Raise ConfigError if they do not fit the widest network."""
        found = peft.read(self.adapter)
        scales = peft.scales(self.adapter, self.target_paths)
        untrained = {*self._heads} - {*self.head_names}
        found = {name: t for name, t in found.items() if name not in untrained}
        wanted = {n: shape for n, shape in Net(self).layout.shapes.items() if not n.endswith(".lora.W")}
        given = {name: tuple(t.shape) for name, t in found.items()}
        ranks = sorted({self.largest(path) for path in self.target_paths})
        if wrong := sorted(name for name in given.keys() | wanted.keys() if given.get(name) != wanted.get(name)):
            raise ConfigError(
                f"model.adapter: {len(wrong)} tensors of {self.adapter!r} do not match the model as it "
                f"is configured ({wrong[0]} is {given.get(wrong[0], 'missing')} and should be "
                f"{wanted.get(wrong[0], 'missing')}). Allowed: adapters of rank {', '.join(map(str, ranks))} at "
                f"{', '.join(self.ends)}"
            )
        for path, scale in scales.items():
            if not math.isclose(scale, own := self.scale(path, self.largest(path)), rel_tol=1e-6):
                raise ConfigError(
                    f"model.alpha: {self.alpha:g} is not valid with {self.adapter!r}, whose factor of {path} is "
                    f"{scale:g}, here {own:g}. Allowed: {self.alpha * scale / own:g}"
                )
        return found

    def parts(self, net: Net) -> Mapping[str, int]:
        """Return the rank, of several ranks the largest, and the number of frozen parameters."""
        base = Net(self.base)
        trained = sum(math.prod(base.layout.shapes[name]) for name in self.head_names)
        return {"rank": max(self.rank_of(net, path) for path in self.target_paths), "frozen": base.parameters - trained}

    @property
    def varying(self) -> tuple[int, ...]:
        return self.base.varying

    def example(self, batch: int, device: torch.device | str) -> torch.Tensor:
        return self.base.example(batch, device)

    # the frozen part

    @property
    def frozen_key(self) -> Hashable:
        return self.base, self.base_seed

    def frozen(self) -> Params:
        """Return the base's parameters and buffers, which also initialise a trained head."""
        with torch_scope(stream(self.base_seed, "frozen")):
            net = Net(self.base)
            module = net.build()
            load(module, net.initial())
        tensors = {n: t.detach() for n, t in chain(module.named_parameters(), module.named_buffers())}
        for path, bits in self._quantised.items():
            weight = _oriented(tensors.pop(f"{path}.weight"), module.get_submodule(path))
            tensors |= {f"{path}.{own}": t for own, t in packed(weight, bits).items()}
        return tensors

    @property
    def head_names(self) -> tuple[str, ...]:
        """Return the trained parameters of the base."""
        heads = self._heads if self.head == "train" else ()
        return tuple(dict.fromkeys((*heads, *self._saved)))

    @property
    def _saved(self) -> tuple[str, ...]:
        """Return the parameters of `modules_to_save`. Raise ConfigError if there are none, or if other modules or
        adapters use them too."""
        if not self.modules_to_save:
            return ()
        base, names = Net(self.base), list[str]()
        for module in self.modules_to_save:
            found = [name for name in base.layout.shapes if f".{module}." in f".{name}"]
            if not found:
                ends = dict.fromkeys(name.split(".")[-2] for name in base.layout.shapes if "." in name)
                raise ConfigError(
                    f"model.modules_to_save: no module of {self.base.name} with parameters of its own is named "
                    f"{module!r}. Allowed: {', '.join(ends)}, or more of a path"
                )
            names += found
        paths = {name.rpartition(".")[0] for name in names}
        if tied := [path for path, owner in base.owners.items() if owner != path and owner in paths]:
            raise ConfigError(
                f"model.modules_to_save: {base.owners[tied[0]]!r} is tied to {tied[0]!r}, which would keep its frozen "
                "weight. Allowed: modules of their own"
            )
        if self.targets != ALL_LINEAR and (both := sorted(paths & {*self._adapted})):
            raise ConfigError(
                f"model.modules_to_save: {both[0]!r} is one of model.targets too. Allowed: modules without an adapter"
            )
        return tuple(names)

    @property
    def _heads(self) -> tuple[str, ...]:
        below = tuple(f"{path}." for path in self.base.head_paths)
        return tuple(name for name in Net(self.base).layout.shapes if name.startswith(below))

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the targets, by the end of their paths. Raise ConfigError if the base has none."""
        layers = Net(self.base).layers
        if self.targets == ALL_LINEAR:
            return tuple(self._inner)
        if self.targets:
            return self.targets
        found = tuple(end for end in QUERIES_VALUES if any(_ends(path, end) for path in layers))
        if not found:
            raise ConfigError(
                f"model.targets: the default does not fit base {self.base.name}, which has no queries and values that "
                f"are known. Allowed: the ends of its layers' paths: {', '.join(self._linear)}"
            )
        return found

    @property
    def target_paths(self) -> tuple[str, ...]:
        """Return the layers with an adapter. Raise ConfigError if a target is not a linear layer."""
        layers = list(Net(self.base).layers)
        for target in self.ends:
            if not any(_ends(path, target) for path in layers):
                linear = self._linear
                ends = sorted({path.rpartition(".")[2] for path in linear})
                raise ConfigError(
                    f"model.targets: no linear layer of {self.base.name} ends with {target!r}. Allowed: "
                    f"{', '.join(ends)}, or more of a path, such as {linear[0]}"
                )
        paths = self._adapted
        for pattern in plain(self.rank_pattern):
            if not any(peft.matches(path, pattern) for path in paths):
                raise ConfigError(
                    f"model.rank_pattern: no target ends with {pattern!r}. Allowed: ends of {', '.join(paths[:3])}"
                    f"{', ...' if paths[3:] else ''}, or regular expressions of them"
                )
        return paths

    @property
    def _adapted(self) -> tuple[str, ...]:
        ends = self.ends
        return tuple(path for path in Net(self.base).layers if any(_ends(path, target) for target in ends))

    @property
    def _inner(self) -> list[str]:
        """Return the linear layers that are not of a head, nor trained whole."""
        head = {name.rpartition(".")[0] for name in (*Net(self.base).layout.classifier, *self._saved)}
        return [path for path in self._linear if path not in head | {*self.base.head_paths}]

    @property
    def _quantised(self) -> dict[str, Bits]:
        """Return the layers whose weights are stored in few bits, and how."""
        bits, owners = self.base.quantised, Net(self.base).owners
        return {path: bits for path in self._inner if owners[path] == path} if bits else {}

    @property
    def _linear(self) -> list[str]:
        """Return the layers with a weight of two dimensions."""
        net = Net(self.base)
        return [path for path in net.layers if len(net.layout.shapes.get(f"{path}.weight", ())) == 2]

    # networks

    def scale(self, path: str, rank: int) -> float:
        """Return s of a target's adapter of this rank."""
        rank = self.largest(path) if self.scaling == "constant" else max(rank, 1)
        return self.alpha / (math.sqrt(rank) if self.scaling == "rslora" else rank)

    def build(self, net: Net) -> nn.Module:
        # do not initialise parameters that are replaced below
        with torch.device("meta"):
            module = Net(self.base).build()
        is_meta = torch.get_default_device().type == "meta"
        trained, paths = set(self.head_names), self.target_paths
        take_axes(module, trained)
        for path, bits in self._quantised.items():
            layer: Any = module.get_submodule(path)
            shape = self._shape(path, layer)
            module.set_submodule(path, Quantised(shape, layer.bias, bits, layer.weight.dtype))
        take_base(module, trained, None if is_meta else frozen.tensors_of(self))
        for path in paths:
            layer = module.get_submodule(path)
            layer.add_module("lora", self._adapter(net, path, layer))
            layer.register_forward_hook(add)
        return module

    def largest(self, path: str) -> int:
        """Return R, the rank of the server's adapter at a target."""
        found = {rank for pattern, rank in self.rank_pattern if peft.matches(path, pattern)}
        if len(found) > 1:
            raise ConfigError(
                f"model.rank_pattern: {path} has the ranks {', '.join(map(str, sorted(found)))}. Allowed: one rank"
            )
        return found.pop() if found else self.rank

    def rank_of(self, net: Net, path: str) -> int:
        """Return the rank of a network's adapter at a target."""
        if net.width * self.largest(path) < 1 - 1e-9 and not net.sizes:
            return 0
        return net.axis(f"{path}.rank", self.largest(path)).size

    # for other libraries

    def write(self, net: Net, params: Params, answer: Answer, files: Sequence[Path], to: Path) -> None:
        """Write the base's files with the adapters merged; if the base is unchanged, also the adapters alone, for peft,
        in the folder "adapter"."""
        self.base.write(Net(self.base), self.merged_into_base(net, params), answer, files, to)
        ranks = {path: len(params[f"{path}.lora.A"]) for path in self.target_paths}
        ranks = {path: rank for path, rank in ranks.items() if rank}
        if ranks and not self.merged and not self.core:
            weights = getattr(self.base, "weights", "")
            task = getattr(self.base, "task", "classes")
            # a head that is frozen was drawn here, and is not in the base's files
            head = {name: frozen.tensors_of(self)[name] for name in self._heads}
            saved = dict.fromkeys((*self.base.head_paths, *(name.rpartition(".")[0] for name in self._saved)))
            alphas = {path: self.scale(path, rank) * rank for path, rank in ranks.items()}
            config = peft.config_of(ranks, alphas, list(saved), self.dropout, task, weights)
            peft.write(to / "adapter", head | dict(params), config)
            for file in files:
                (shutil.copytree if file.is_dir() else shutil.copy)(file, to / "adapter" / file.name)

    def merged_into_base(self, net: Net, params: Params) -> Params:
        """Return the base's parameters with the adapters merged, W0 + W + s B A, and the trained head."""
        base = Net(self.base).blank()
        kept = dict(frozen.tensors_of(self))
        for path, bits in self._quantised.items():
            layer: Any = base.get_submodule(path)
            buffers = {own: kept[f"{path}.{own}"] for own in ("codes", "scales")}
            weight = unpacked(buffers, self._shape(path, layer), bits, layer.weight.dtype)
            kept[f"{path}.weight"] = _oriented(weight, layer)
        found = {name: (params[name] if name in params else kept[name]).clone() for name in params_of(base)}
        for path in self.target_paths:
            a, b, m, w = (params.get(f"{path}.lora.{part}") for part in "ABMW")
            assert a is not None and b is not None
            added = self.scale(path, len(a)) * (b if m is None else b @ m) @ a + (0 if w is None else w)
            found[f"{path}.weight"] += _oriented(added, base.get_submodule(path))
        return found

    def _adapter(self, net: Net, path: str, layer: nn.Module) -> Adapter:
        out, cin = self._shape(path, layer)
        if (largest := self.largest(path)) > min(out, cin):
            raise ConfigError(
                f"model.rank: rank {largest} is too large for the layer {path} of {out} x {cin}. Allowed: at most "
                f"{min(out, cin)}"
            )
        rank = self.rank_of(net, path)
        scale = self.scale(path, rank)
        return Adapter(out, cin, Axis(f"{path}.rank", rank), scale, self.dropout, self.merged, self.core)

    def _shape(self, path: str, layer: nn.Module) -> tuple[int, int]:
        """Return the outputs and inputs of a linear layer, for both layouts of its weight."""
        if isinstance(layer, nn.Linear):
            return layer.out_features, layer.in_features
        weight = layer.weight
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            raise ConfigError(f"model.targets: {path!r} is a {type(layer).__name__}. Allowed: linear layers")
        return weight.shape[1], weight.shape[0]


def _oriented(weight: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Return a weight [out, in] as a layer stores it, or back: Conv1D has [in, out]."""
    return weight if isinstance(layer, nn.Linear) else weight.T


def _ends(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")
