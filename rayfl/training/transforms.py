"""Transforms of client updates before they are sent, for every method: clipping, noise, compression.

A transform maps the change d = y - x of a client's parameters, by group and name, to the change that is sent. It works
on all tensors of an update together. Tensors that the client did not receive (masks, control variates) have x = 0.
Transforms apply in the order of `updates.transforms`.

    clip       d / max(1, |d| / norm), |d| the L2 norm of all tensors (McMahan et al., ICLR 2018, arXiv 1710.06963)
    noise      d + N(0, deviation^2): with clip, the Gaussian mechanism per client
    topk       a fraction of all elements, with the largest |d|; 0 elsewhere (Aji, Heafield, 2017, arXiv 1704.05021)
    quantize   unbiased stochastic levels of each tensor's range (Suresh et al., ICML 2017, arXiv 1611.00429)

The reported bytes are those after the transforms: topk sends a value and a position per remaining element (the shorter
code of `rayfl.core.bitcodes`), quantize sends `bits` bits per element and the two ends of each tensor's range.
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
    """A pure function of a change and a generator. Subclasses define their options as fields."""

    @abstractmethod
    def change(self, d: Params, generator: torch.Generator) -> Params:
        """Return the change to send: "group/name" -> new tensor, with the names and shapes of `d`."""

    def nbytes(self, d: Params, before: float) -> float:
        """Return the size in bytes of `d`, a result of this transform; `before`: the size without it."""
        return before


class Clip(Transform):
    """Scaling of a change to a maximum L2 norm."""

    name: Literal["clip"] = "clip"
    norm: float = Field(gt=0)
    """Maximum norm of a client's whole change."""

    def change(self, d: Params, generator: torch.Generator) -> Params:
        total = nn.utils.get_total_norm(list(d.values()))
        factor = 1 / max(1.0, float(total) / self.norm)
        return {name: t * factor for name, t in d.items()}


class Noise(Transform):
    """Gaussian noise on every element."""

    name: Literal["noise"] = "noise"
    deviation: float = Field(gt=0)
    """Standard deviation; for differential privacy, a multiple of the norm of `clip`."""

    def change(self, d: Params, generator: torch.Generator) -> Params:
        return {name: t + self.deviation * torch.randn(t.shape, generator=generator) for name, t in d.items()}


class TopK(Transform):
    """Sparsification to the largest elements of a change."""

    name: Literal["topk"] = "topk"
    share: float = Field(gt=0, le=1)
    """Fraction of all elements to keep; of equal elements, the first."""

    def change(self, d: Params, generator: torch.Generator) -> Params:
        flat = torch.cat([t.reshape(-1) for t in d.values()])
        sparse = torch.zeros_like(flat)
        places = flat.abs().sort(descending=True, stable=True).indices[: max(1, round(self.share * len(flat)))]
        sparse[places] = flat[places]
        parts = sparse.split([t.numel() for t in d.values()])
        return {name: part.view(t.shape) for (name, t), part in zip(d.items(), parts, strict=True)}

    def nbytes(self, d: Params, before: float) -> float:
        flat = torch.cat([t.reshape(-1) for t in d.values()])
        places = flat.nonzero().flatten()
        return 4 * len(places) + _place_bytes(places, len(flat))


class Quantize(Transform):
    """Stochastic rounding of each tensor to 2**bits levels between its smallest and its largest element. Zeros stay 0;
    in a sparse tensor (after `topk`), only the positions and levels of the other elements are sent."""

    name: Literal["quantize"] = "quantize"
    bits: int = Field(default=8, ge=1, le=16)
    """Bits per element."""

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
        # 8 bytes per tensor for the two ends of its range
        return sum(8 + min(self._packed(t.numel()), self._sparse(t)) for t in d.values())

    def _packed(self, elements: int) -> int:
        return -(-self.bits * elements // 8)

    def _sparse(self, t: torch.Tensor) -> int:
        places = t.reshape(-1).nonzero().flatten()
        return self._packed(len(places)) + _place_bytes(places, t.numel())


def _place_bytes(places: torch.Tensor, elements: int) -> int:
    return len(encode_places(places, elements))


TRANSFORMS: dict[str, type[Transform]] = {"clip": Clip, "noise": Noise, "topk": TopK, "quantize": Quantize}

TRANSFORMS_KIND = Kind("transform", Transform, TRANSFORMS, "rayfl.transforms")


def transformed(transforms: Sequence[Transform], payload: Mapping[str, Params], update: Update, seed: int) -> float:
    """Apply the transforms to one client's update, in place, and return its size in bytes.

    `payload`: the tensors that the client received; `seed`: its seed for this round. Classifier rows that the client
    does not own are not part of its change. Negative running variances are set to 0.
    """
    if update.products:
        raise ConfigError(
            f"updates.transforms: {', '.join(t.name for t in transforms)} cannot be used with a method whose clients "
            "send low-rank products. Allowed: no transforms, or a method that averages factors"
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
