"""Networks with torchvision's ImageNet weights.

A file holds torchvision's network at full width. Its tensors are renamed, and cut to the first positions of every axis
for a narrower network (`Model.initial`). The layers `drawn` start as in a new network: the classifier, and the
stem for small images (NeFL replaces the 7x7 convolution by a 3x3 one).
"""

import re
from abc import ABC
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch

from rayfl.config import ConfigError
from rayfl.core.net import Net
from rayfl.core.tensors import Params
from rayfl.data.files import PATIENCE, patience
from rayfl.models.base import ImageModel
from rayfl.models.start import matching, read

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

    weights: str = ""
    """Initial weights. Default: a new network. imagenet: torchvision's IMAGENET1K_V1, downloaded into torch's hub
    folder. Otherwise a file .pth, .pt or .safetensors with the state of the network, by torchvision's names or by
    rayfl's, or the folder of an earlier run or of an export, on the server's machine."""

    url: ClassVar[str]
    """URL of torchvision's IMAGENET1K_V1; its name ends with the start of its SHA-256."""
    names: ClassVar[Mapping[str, str]]
    """`RESNET` or `VIT`."""
    drawn: ClassVar = ("head",)

    def published(self) -> Params:
        if self.weights != "imagenet":
            return super().published()
        file = str(self._file())
        return matching(self.named(read(file, self.source)), Net(self), file, self.drawn, self.source)

    def named(self, tensors: Params) -> Params:
        return translated(tensors, self.names)

    @property
    def source(self) -> str:
        return f"a file such as {self.url}, or imagenet"

    def _file(self) -> Path:
        """Return the file with the weights, downloaded if necessary."""
        file = Path(torch.hub.get_dir(), "checkpoints", self.url.rpartition("/")[2])
        if not file.exists():
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with patience(PATIENCE):
                    torch.hub.download_url_to_file(self.url, str(file), file.stem.rpartition("-")[2])
            except (OSError, RuntimeError) as error:
                raise ConfigError(
                    f"model.weights: the imagenet weights of {self.name} are not in {file.parent} and "
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
