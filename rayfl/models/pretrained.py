"""Networks with torchvision's ImageNet weights.

A file holds torchvision's network at full width. `Pretrained.initial` renames its tensors and cuts them to the first
positions of every axis for a narrower network. The layers `drawn` start as in a new network: the classifier, and the
stem for small images (NeFL replaces the 7x7 convolution by a 3x3 one).
"""

import pickle
import re
from abc import ABC
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

import torch
from pydantic import field_validator
from safetensors import SafetensorError
from safetensors.torch import load_file

from rayfl.config import ConfigError
from rayfl.core.net import Net, params_of
from rayfl.core.norms import fresh
from rayfl.core.submodel import prefix
from rayfl.core.tensors import Params
from rayfl.data.files import PATIENCE, patience
from rayfl.models.base import ImageModel

RESNET = {
    r"^conv1\.": "conv.",
    r"^bn1\.": "norm.",
    r"^layer(\d)\.(\d+)\.(conv|bn)(\d)\.": r"stage\1.\2.residual.\3\4.",
    r"\.bn(\d)\.": r".norm\1.",
    r"^layer(\d)\.(\d+)\.downsample\.0\.": r"stage\1.\2.projection.conv.",
    r"^layer(\d)\.(\d+)\.downsample\.1\.": r"stage\1.\2.projection.norm.",
    r"^fc\.": "head.",
}
VIT = {
    r"^conv_proj\.": "patches.",
    r"^class_token$": "tokens.first",
    r"^encoder\.pos_embedding$": "tokens.positions",
    r"^encoder\.ln\.": "norm.",
    r"^encoder\.layers\.encoder_layer_": "encoder.",
    r"\.ln_1\.": ".attention.norm.",
    r"\.self_attention\.in_proj_": ".attention.attend.qkv.linear.",
    r"\.self_attention\.out_proj\.": ".attention.attend.out.linear.",
    r"\.ln_2\.": ".mlp.norm.",
    r"\.mlp\.(0|linear_1)\.": ".mlp.up.",
    r"\.mlp\.(3|linear_2)\.": ".mlp.down.",
    r"^heads\.head\.": "head.",
}
"""torchvision's names -> rayfl's, as regular expressions applied in this order."""


class Pretrained(ImageModel, ABC):
    """Image model with optional pretrained weights. A final class adds `url` and `names`."""

    pretrained: str = ""
    """Initial weights. Default: a new network. imagenet: torchvision's IMAGENET1K_V1, downloaded into torch's hub
    folder. Otherwise a .pth, .pt or .safetensors file on the machine of the server."""

    url: ClassVar[str]
    """URL of torchvision's IMAGENET1K_V1; its name ends with the start of its SHA-256."""
    names: ClassVar[Mapping[str, str]]
    """`RESNET` or `VIT`."""
    drawn: ClassVar[tuple[str, ...]] = ("head",)
    """Layers that start as in a new network."""

    @field_validator("pretrained")
    @classmethod
    def _is_known(cls, given: str) -> str:
        if given in ("", "imagenet") or given.endswith((".pth", ".pt", ".safetensors")):
            return given
        raise ValueError("imagenet, a file .pth, .pt or .safetensors, or nothing")

    def prepare(self) -> None:
        if self.pretrained:
            self._published()

    @property
    def blank(self) -> Self:
        return self.model_copy(update={"pretrained": ""})

    def initial(self, net: Net) -> Params:
        return self._taken(super().initial(net), net)

    def statistics(self, net: Net) -> Params:
        return self._taken(super().statistics(net), net)

    def _taken(self, start: Params, net: Net) -> Params:
        """Return `start` with the published tensors, cut to the network's width, in place of the new ones."""
        if not self.pretrained:
            return start
        published = self._published()
        cut = prefix(replace(net, width=1.0), net).take(published)
        return start | {name: cut[name].clone(memory_format=torch.contiguous_format) for name in start.keys() & cut}

    def _published(self) -> Params:
        """Return the full network's tensors by rayfl's names, without `drawn`. Raise ConfigError if they differ."""
        file, full = self._file(), Net(self).blank()
        found, wanted = (self._kept(t) for t in (translated(_read(file), self.names), params_of(full) | fresh(full)))
        names = sorted(found.keys() | wanted.keys())
        given, fits = ({name: list(t.shape) for name, t in tensors.items()} for tensors in (found, wanted))
        if wrong := [name for name in names if given.get(name) != fits.get(name)]:
            first = wrong[0]
            raise ConfigError(
                f"model.pretrained: {len(wrong)} tensors of {file} do not match {self.name} as it is "
                f"configured ({first} is {given.get(first, 'missing')} and should be {fits.get(first, 'missing')}). "
                f"Allowed: a file such as {self.url}"
            )
        return found

    def _kept(self, tensors: Params) -> Params:
        layers = tuple(f"{layer}." for layer in self.drawn)
        return {name: t.float() for name, t in tensors.items() if not name.startswith(layers)}

    def _file(self) -> Path:
        """Return the file with the weights, downloaded if necessary."""
        if self.pretrained != "imagenet":
            file = Path(self.pretrained).expanduser()
            if not file.is_file():
                raise ConfigError(
                    f"model.pretrained: {self.pretrained!r} is not valid. Allowed: an existing file with the weights "
                    f"of {self.name}, such as {self.url}, or imagenet, which downloads that"
                )
            return file
        file = Path(torch.hub.get_dir(), "checkpoints", self.url.rpartition("/")[2])
        if not file.exists():
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with patience(PATIENCE):
                    torch.hub.download_url_to_file(self.url, str(file), file.stem.rpartition("-")[2])
            except (OSError, RuntimeError) as error:
                raise ConfigError(
                    f"model.pretrained: the imagenet weights of {self.name} are not in {file.parent} and "
                    f"cannot be downloaded ({' '.join(str(error).split())}). Allowed: imagenet once that folder holds\n"
                    f"  {self.url}\nor the path of this file"
                ) from None
        return file


def translated(state: Params, names: Mapping[str, str]) -> Params:
    """Return torchvision's state by rayfl's names, without counts of batches. `names`: such as `RESNET`."""
    found = {}
    for name, t in state.items():
        if name.endswith("num_batches_tracked"):
            continue
        for pattern, ours in names.items():
            name = re.sub(pattern, ours, name)
        if ".qkv." in name:
            found |= {name.replace(".qkv.", f".{part}."): rows for part, rows in zip("qkv", t.chunk(3), strict=True)}
        else:
            found[name] = t
    return found


def _read(file: Path) -> Params:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        state = torch.load(file, "cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        [reason, *_] = [*str(error).splitlines(), type(error).__name__]
        raise ConfigError(
            f"model.pretrained: {file} cannot be read ({reason}). Allowed: the state of a network as "
            "torch or safetensors saves it; delete the file if it is damaged"
        ) from None
    if not isinstance(state, Mapping) or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise ConfigError(f"model.pretrained: {file} has no named tensors. Allowed: the state of a network")
    return dict(state)
