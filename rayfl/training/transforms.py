"""What is done to an update on its way from a client to the server: clipping, noise, compression, for every method.

A transform maps the change d = y - x of what a client was sent, by group and name, to the change that travels. It works
on all tensors of an update together; tensors that a method sends without having been sent them (masks, variates of its
own) have x = 0. Several act one after another, in the order of `updates.transforms`.

    clip       d / max(1, |d| / norm), |d| the L2 norm of everything (McMahan et al., ICLR 2018, arXiv 1710.06963)
    noise      d + N(0, deviation^2): with clip, the Gaussian mechanism on every client
    topk       a share of all elements, those of the largest |d|; 0 elsewhere (Aji, Heafield, 2017, arXiv 1704.05021)
    quantize   stochastic levels of every tensor's range, unbiased (Suresh et al., ICML 2017, arXiv 1611.00429)

The bytes that a client sends are counted after them: topk sends a value and a place for each element that is left (the
shorter code of `rayfl.core.bitcodes`), quantize so many bits an element and a tensor's two ends.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from rayfl.config import ConfigError, Kind, Named
from rayfl.core.bitcodes import encode_places
from rayfl.core.fold import Update
from rayfl.core.norms import VARIANCE
from rayfl.core.tensors import Params


class Transform(Named, ABC):
    """A pure function of a change and a generator. A subclass adds its fields."""

    @abstractmethod
    def change(self, d: Params, generator: torch.Generator) -> Params:
        """The change that travels: "group/name" -> tensor, in fresh tensors, of the same names and shapes."""

    def nbytes(self, d: Params, before: float) -> float:
        """Bytes that `d`, which this transform made, takes; `before`: without it."""
        return before


class Clip(Transform):
    """Scales a change down to a largest L2 norm."""

    name: Literal["clip"] = "clip"
    norm: float = Field(gt=0)
    """The largest norm of a client's whole change."""

    def change(self, d: Params, generator: torch.Generator) -> Params:
        total = nn.utils.get_total_norm(list(d.values()))
        factor = 1 / max(1.0, float(total) / self.norm)
        return {name: t * factor for name, t in d.items()}


class Noise(Transform):
    """Adds Gaussian noise to every element."""

    name: Literal["noise"] = "noise"
    deviation: float = Field(gt=0)
    """Standard deviation; for differential privacy a multiple of clip's norm."""

    def change(self, d: Params, generator: torch.Generator) -> Params:
        return {name: t + self.deviation * torch.randn(t.shape, generator=generator) for name, t in d.items()}


class TopK(Transform):
    """Keeps the largest elements of a change."""

    name: Literal["topk"] = "topk"
    share: float = Field(gt=0, le=1)
    """Of all elements, those that are kept; of equal ones the first."""

    def change(self, d: Params, generator: torch.Generator) -> Params:
        flat = torch.cat([t.reshape(-1) for t in d.values()])
        kept = torch.zeros_like(flat)
        places = flat.abs().sort(descending=True, stable=True).indices[: max(1, round(self.share * len(flat)))]
        kept[places] = flat[places]
        parts = kept.split([t.numel() for t in d.values()])
        return {name: part.view(t.shape) for (name, t), part in zip(d.items(), parts, strict=True)}

    def nbytes(self, d: Params, before: float) -> float:
        flat = torch.cat([t.reshape(-1) for t in d.values()])
        places = flat.nonzero().flatten()
        return 4 * len(places) + _place_bytes(places, len(flat))


class Quantize(Transform):
    """Rounds every tensor at random to so many levels between its smallest and its largest element. Zeros stay zeros,
    and where most are (after `topk`) the places of the others are sent, and only their levels."""

    name: Literal["quantize"] = "quantize"
    bits: int = Field(default=8, ge=1, le=16)
    """Bits an element."""

    def change(self, d: Params, generator: torch.Generator) -> Params:
        return {name: self._rounded(t, generator) for name, t in d.items()}

    def _rounded(self, t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if not t.numel():
            return t.clone()
        low, high = t.min(), t.max()
        width = (high - low) / (2**self.bits - 1)
        if not float(width):
            return t.clone()
        level = (t - low) / width
        down = level.floor()
        rounded = low + width * (down + (torch.rand(t.shape, generator=generator) < level - down))
        return torch.where(t == 0, t, rounded)

    def nbytes(self, d: Params, before: float) -> float:
        """With the two ends of every tensor, 8 bytes."""
        return sum(8 + min(self._packed(t.numel()), self._sparse(t)) for t in d.values())

    def _packed(self, elements: int) -> int:
        return -(-self.bits * elements // 8)

    def _sparse(self, t: torch.Tensor) -> int:
        places = t.reshape(-1).nonzero().flatten()
        return self._packed(len(places)) + _place_bytes(places, t.numel())


def _place_bytes(places: torch.Tensor, elements: int) -> int:
    """What it takes to say which of so many elements are sent."""
    return len(encode_places(places, elements))


TRANSFORMS: dict[str, type[Transform]] = {"clip": Clip, "noise": Noise, "topk": TopK, "quantize": Quantize}

TRANSFORMS_KIND = Kind("transform", Transform, TRANSFORMS, "rayfl.transforms")


def transformed(transforms: Sequence[Transform], payload: Mapping[str, Params], update: Update, seed: int) -> float:
    """Replaces one client's answer by what travels, in place; the bytes that this takes.

    `payload` is what the client was sent, `seed` its own in this round. Rows of a classifier that it does not hold stay
    as they are: no part of its change. A norm's running variance that a transform makes negative is 0.
    """
    if update.products:
        raise ConfigError(
            f"updates.transforms: given {', '.join(t.name for t in transforms)} with a method whose clients send "
            "products of low rank; allowed: none, or a method that averages factors"
        )
    generator = torch.Generator().manual_seed(seed)
    weight = update.weight or 1.0
    groups = [*update.sums.items(), *update.whole.items()]
    answers = {f"{g}/{n}": (params, n, t) for g, params in groups for n, t in params.items()}
    sent = {f"{g}/{n}": t for g, params in payload.items() for n, t in params.items()}
    rows = {f"params/{name}": (t > 0).float() for name, t in update.row_weights.items()}
    start = {key: sent.get(key, torch.zeros_like(t)) * rows.get(key, 1.0) for key, (_, _, t) in answers.items()}
    d = {key: t / weight - start[key] for key, (_, _, t) in answers.items()}
    size = float(sum(t.numel() * t.element_size() for t in d.values()))
    for transform in transforms:
        d = transform.change(d, generator)
        size = transform.nbytes(d, size)
    for key, (params, name, _) in answers.items():
        found = start[key] + d[key] * rows.get(key, 1.0)
        params[name] = (found.clamp_min(0.0) if name.endswith(VARIANCE) else found) * weight
    return size
