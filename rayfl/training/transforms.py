"""Transforms of client updates before they are sent, for every method: clipping, noise, compression.

A transform maps the change d = y - x of a client's parameters, by group and name, to the change that is sent. It works
on all tensors of an update together. Tensors that are no new values of received ones (masks, changes of control
variates) have x = 0.
Transforms apply in the order of `updates.transforms`.

    clip            d / max(1, |d| / norm), |d| the L2 norm of all tensors (McMahan et al., ICLR 2018, arXiv 1710.06963)
    noise           d + N(0, deviation^2): with clip, the Gaussian mechanism per client
    error_feedback  d + e; the rest of the chain C is compression, and e <- d + e - C(d + e) is client state
                    (Karimireddy et al., ICML 2019, arXiv 1901.09847)
    topk            a fraction of all elements, with the largest |d|; 0 elsewhere (Aji, Heafield, 2017,
                    arXiv 1704.05021)
    random_mask     k of the n elements of each tensor, from a seed, times n / k: unbiased (Konecny et al., 2016,
                    arXiv 1610.05492)
    quantize        unbiased stochastic levels of each tensor's range (Suresh et al., ICML 2017, arXiv 1611.00429)
    sign            sign(d) times the mean of |d|, per tensor, over the elements that are not 0
    bf16            rounding to bfloat16
    int8            the nearest of 256 levels (q - zero) scale of each tensor's range, which includes 0; tensors of up
                    to four elements are sent as they are

The reported bytes are those after the transforms (`Wire`):

    topk            32 bits per value, and the places: the shorter code of `rayfl.core.bitcodes`
    random_mask     32 bits per value, and a seed of 64 bits
    quantize        `bits` per value, and 64 bits per tensor
    sign            1 bit per value, and 32 bits per tensor
    bf16            16 bits per value
    int8            8 bits per value, and 96 bits per tensor, as FLSim counts (which sends biases as they are)

After topk and random_mask, these are bits per remaining value. quantize and sign have no code for 0: an update with
zeros also sends the places of its other elements.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from pydantic import Field

from rayfl.config import ConfigError, Kind, Named
from rayfl.core.bitcodes import encode_places
from rayfl.core.tensors import Params, norm


@dataclass(frozen=True)
class Wire:
    """Size of an update as sent."""

    values: Mapping[str, tuple[int, int]]
    """Tensor -> number of values sent, bits per value."""
    head: int = 0
    """Bytes of everything else: places, seeds, ranges, scales."""

    @classmethod
    def of(cls, d: Params) -> "Wire":
        """Return the size of tensors without a transform."""
        return cls({name: (t.numel(), 8 * t.element_size()) for name, t in d.items()})

    @property
    def nbytes(self) -> float:
        return float(self.head + sum(-(-count * bits // 8) for count, bits in self.values.values()))

    def coded(self, bits: int, head: int = 0) -> "Wire":
        """Return the size with this many bits per value and `head` bytes per tensor."""
        values = {name: (count, bits) for name, (count, _) in self.values.items()}
        return replace(self, values=values, head=self.head + head * len(values))

    def without_zeros(self, d: Params) -> "Wire":
        """Return the size if only the elements of `d` that are not 0 are sent, with their places; unchanged if `d` has
        no zeros among the values sent."""
        counts = {name: int(t.count_nonzero()) for name, t in d.items()}
        if all(counts[name] == count for name, (count, _) in self.values.items()):
            return self
        flat = _flat(d)
        values = {name: (counts[name], bits) for name, (_, bits) in self.values.items()}
        return replace(self, values=values, head=self.head + len(encode_places(flat.nonzero().flatten(), len(flat))))


class Transform(Named, ABC):
    """A pure function of a change and a generator. Subclasses define their options as fields.

    >>> class Half(Transform):
    ...     def change(self, d, generator):
    ...         return {name: t / 2 for name, t in d.items()}
    >>> Half().change({"params/w": torch.ones(2)}, torch.Generator())
    {'params/w': tensor([0.5000, 0.5000])}
    """

    stage: ClassVar[Literal["", "noise", "error_feedback", "selection", "code"]] = ""
    """Place in a chain: these stages in this order, each of `selection` and `code` at most once. "": any place."""

    @abstractmethod
    def change(self, d: Params, generator: torch.Generator) -> Params:
        """Return the change to send: "group/name" -> new tensor, with the names and shapes of `d`. Zeros stay 0 if the
        transform may follow one that selects elements."""

    def wire(self, d: Params, sent: Params, wire: Wire) -> Wire:
        """Return the size of `sent`, the result of this transform for `d`; `wire`: the size of `d`."""
        return wire


class Clip(Transform):
    """Scaling of a change to a maximum L2 norm."""

    name: Literal["clip"] = "clip"
    norm: float = Field(gt=0)
    """Maximum norm of a client's whole change."""

    def change(self, d: Params, generator: torch.Generator) -> Params:
        factor = 1 / max(1.0, norm([d]) / self.norm)
        return {name: t * factor for name, t in d.items()}


class Noise(Transform):
    """Gaussian noise on every element."""

    stage = "noise"
    name: Literal["noise"] = "noise"
    deviation: float = Field(gt=0)
    """Standard deviation; for differential privacy, a multiple of the norm of `clip`."""

    def change(self, d: Params, generator: torch.Generator) -> Params:
        return {name: t + self.deviation * torch.randn(t.shape, generator=generator) for name, t in d.items()}


class ErrorFeedback(Transform):
    """Addition of the residual that the following compression left in the client's earlier rounds."""

    stage = "error_feedback"
    name: Literal["error_feedback"] = "error_feedback"

    def change(self, d: Params, generator: torch.Generator) -> Params:
        return dict(d)  # `transformed` adds the residual


class TopK(Transform):
    """Sparsification to the largest elements of a change."""

    stage = "selection"
    name: Literal["topk"] = "topk"
    share: float = Field(gt=0, le=1)
    """Fraction of all elements to keep; of equal elements, the first."""

    def change(self, d: Params, generator: torch.Generator) -> Params:
        flat = _flat(d)
        sparse = torch.zeros_like(flat)
        places = flat.abs().sort(descending=True, stable=True).indices[: _count(self.share, len(flat))]
        sparse[places] = flat[places]
        return _split(sparse, d)

    def wire(self, d: Params, sent: Params, wire: Wire) -> Wire:
        return wire.without_zeros(sent)


class RandomMask(Transform):
    """Random elements of every tensor, scaled so that the expected value is the change. The server knows their places
    from the seed."""

    stage = "selection"
    name: Literal["random_mask"] = "random_mask"
    share: float = Field(gt=0, le=1)
    """Fraction of each tensor's elements to send, at least one element."""

    def change(self, d: Params, generator: torch.Generator) -> Params:
        seed = int(torch.randint(2**63 - 1, (), generator=generator))
        shared = torch.Generator().manual_seed(seed)
        return {name: self._masked(t, shared) for name, t in d.items()}

    def _masked(self, t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        flat, sparse = t.reshape(-1), torch.zeros(t.numel(), dtype=t.dtype)
        places = torch.randperm(len(flat), generator=generator)[: _count(self.share, len(flat))]
        sparse[places] = flat[places] * (len(flat) / max(len(places), 1))
        return sparse.view(t.shape)

    def wire(self, d: Params, sent: Params, wire: Wire) -> Wire:
        values = {name: (_count(self.share, count), bits) for name, (count, bits) in wire.values.items()}
        return replace(wire, values=values, head=wire.head + 8)


class Quantize(Transform):
    """Stochastic rounding of each tensor to 2**bits levels between its smallest and its largest element. Zeros stay
    0."""

    stage = "code"
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
        # rounding can lead above the largest level
        level = ((t - low) / width).clamp_max(2**self.bits - 1)
        down = level.floor()
        rounded = low + width * (down + (torch.rand(t.shape, generator=generator) < level - down))
        return torch.where(t == 0, t, rounded)

    def wire(self, d: Params, sent: Params, wire: Wire) -> Wire:
        return wire.without_zeros(d).coded(self.bits, head=8)


class Sign(Transform):
    """Signs, times the mean magnitude of each tensor's elements that are not 0. Zeros stay 0."""

    stage = "code"
    name: Literal["sign"] = "sign"

    def change(self, d: Params, generator: torch.Generator) -> Params:
        return {name: t.sign() * (t.abs().sum() / t.count_nonzero().clamp_min(1)) for name, t in d.items()}

    def wire(self, d: Params, sent: Params, wire: Wire) -> Wire:
        return wire.without_zeros(d).coded(1, head=4)


class BFloat16(Transform):
    """Rounding of every element to bfloat16."""

    stage = "code"
    name: Literal["bf16"] = "bf16"

    def change(self, d: Params, generator: torch.Generator) -> Params:
        return {name: t.bfloat16().to(t.dtype) for name, t in d.items()}

    def wire(self, d: Params, sent: Params, wire: Wire) -> Wire:
        return wire.coded(16)


class Int8(Transform):
    """Rounding of each tensor of more than four elements to 256 levels, one of which is 0."""

    stage = "code"
    name: Literal["int8"] = "int8"

    def change(self, d: Params, generator: torch.Generator) -> Params:
        return {name: self._rounded(t) if self._is_coded(t) else t.clone() for name, t in d.items()}

    def _is_coded(self, t: torch.Tensor) -> bool:
        return t.numel() > 4  # the range of a smaller one costs more than it saves

    def _rounded(self, t: torch.Tensor) -> torch.Tensor:
        low, high = t.min().clamp_max(0.0), t.max().clamp_min(0.0)
        scale = (high - low) / 255
        if not float(scale):
            return t.clone()
        zero = (-low / scale).round()
        return ((t / scale).round() + zero).clamp(0, 255).sub(zero) * scale

    def wire(self, d: Params, sent: Params, wire: Wire) -> Wire:
        coded = {name for name, t in d.items() if self._is_coded(t)}
        values = {name: (count, 8 if name in coded else bits) for name, (count, bits) in wire.values.items()}
        return replace(wire, values=values, head=wire.head + 12 * len(coded))


TRANSFORMS: dict[str, type[Transform]] = {
    "clip": Clip,
    "noise": Noise,
    "error_feedback": ErrorFeedback,
    "topk": TopK,
    "random_mask": RandomMask,
    "quantize": Quantize,
    "sign": Sign,
    "bf16": BFloat16,
    "int8": Int8,
}

TRANSFORMS_KIND = Kind("transform", Transform, TRANSFORMS, "rayfl.transforms")

STAGES = ("noise", "error_feedback", "selection", "code")
REASONS = {
    "noise": "every element is noisy and has to be sent",
    "error_feedback": "its residual would lack what {earlier} leaves out",
    "selection": "the values sent would no longer be those of {earlier}",
    "code": "an update has one code",
}
"""Stage -> reason why it cannot follow a later one, or itself."""


def check_order(transforms: Sequence[Transform]) -> None:
    """Raise a ConfigError, with a place below `transforms`, for a chain whose order has no meaning or no code."""
    staged = [(i, transform) for i, transform in enumerate(transforms) if transform.stage]
    for (_, earlier), (i, later) in pairwise(staged):
        before, after = STAGES.index(earlier.stage), STAGES.index(later.stage)  # pyright: ignore[reportArgumentType]
        if after < before or (after == before and later.stage != "noise"):
            reason = REASONS[later.stage].format(earlier=earlier.name)
            order = "one of each" if after == before else f"{later.name} before {earlier.name}"
            raise ConfigError(f"transforms.{i}: {later.name} cannot follow {earlier.name}: {reason}. Allowed: {order}")
    names = [transform.name for transform in transforms]
    if "error_feedback" not in names:
        return
    place = names.index("error_feedback")
    rest = transforms[place + 1 :]
    for i, transform in enumerate(rest, place + 1):
        if isinstance(transform, Clip | RandomMask):
            reason = (
                "what a clip cuts off would be sent in the next rounds"
                if isinstance(transform, Clip)
                else "the scaled elements are larger than the change, so that residuals grow without limit"
            )
            hint = f"{transform.name} before error_feedback" if isinstance(transform, Clip) else "topk"
            raise ConfigError(
                f"transforms.{i}: {transform.name} cannot follow error_feedback: {reason}. Allowed: {hint}"
            )
    if not any(transform.stage in ("selection", "code") for transform in rest):
        raise ConfigError(
            f"transforms.{place}: error_feedback without compression leaves no residual. Allowed: topk, quantize, "
            "sign, bf16 or int8 after it"
        )


def _count(share: float, elements: int) -> int:
    return min(elements, max(1, round(share * elements)))


def _flat(d: Params) -> torch.Tensor:
    return torch.cat([t.reshape(-1) for t in d.values()])


def _split(flat: torch.Tensor, like: Params) -> Params:
    parts = flat.split([t.numel() for t in like.values()])
    return {name: part.view(t.shape) for (name, t), part in zip(like.items(), parts, strict=True)}
