"""Exact thresholds of the largest elements: maskable tensors, groups that share a threshold, and element costs.

Thresholds are found by counting, not by sorting: the bits of float32 magnitudes are ordered like the numbers, so two
histograms of 16 bits each find the element of any rank.
"""

import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from rayfl.config import ConfigError
from rayfl.core.net import Net
from rayfl.core.tensors import Params

Threshold = Literal["model", "layer", "shard"]
"""Scope of a threshold."""
Shards = tuple[tuple[str, ...], ...]
"""Lists of module paths; a path stands for all layers below it."""

# maskable elements and their costs


@dataclass(frozen=True)
class Maskable:
    """Rule for the tensors that can be masked: weights and biases of convolutions and linear layers."""

    embeddings: bool = False
    """Mask embeddings too."""
    whole: tuple[str, ...] = ()
    """Paths of modules that are never masked."""


@functools.lru_cache(maxsize=256)
def layers_of(net: Net, maskable: Maskable = Maskable()) -> Mapping[str, tuple[str, ...]]:
    """Return the maskable tensors of each layer, by path, in the network's order. Raise a ConfigError if a path in
    `whole` matches no layer."""
    layers = {**net.layers, **(net.embeddings if maskable.embeddings else {})}
    order = {name: i for i, name in enumerate(net.layout.shapes)}
    layers = dict(sorted(layers.items(), key=lambda layer: order[layer[1][0]]))
    for prefix in maskable.whole:
        if not any(_is_below(path, [prefix]) for path in layers):
            raise ConfigError(
                f"method.whole: {prefix!r} is neither a layer nor a parent of one. Allowed: the layers "
                f"{', '.join(layers)}, and the modules above them"
            )
    return {path: names for path, names in layers.items() if not _is_below(path, maskable.whole)}


@functools.lru_cache(maxsize=256)
def groups(
    net: Net, threshold: Threshold, shards: Shards = (), maskable: Maskable = Maskable()
) -> Sequence[tuple[str, ...]]:
    """Return the names of the maskable tensors in groups of one threshold each, in the network's order. Raise a
    ConfigError if the shards do not fit."""
    layers = layers_of(net, maskable)
    if threshold == "layer":
        return list(layers.values())
    if threshold == "model":
        return [tuple(itertools.chain(*layers.values()))]
    found: dict[int, tuple[str, ...]] = {}
    place = _declared(shards, layers) if shards else _stages(net, layers)
    for path, names in layers.items():
        found[place[path]] = found.get(place[path], ()) + names
    return list(found.values())


def _stages(net: Net, layers: Collection[str]) -> dict[str, int]:
    """Return each layer's stage, counted from 1. 0: before the stages; the number of stages + 1: after them."""
    stages = net.model.blocks
    if not stages:
        raise ConfigError(
            f"method.threshold: 'shard' needs method.shards, because model {net.model.name} has no stages. Allowed: "
            f"method.shards with lists of the layers {', '.join(layers)}; or threshold: model or layer"
        )
    found, outside = {}, 0
    for path in layers:
        stage = next((s for s, blocks in enumerate(stages, 1) if _is_below(path, blocks)), None)
        if stage is not None:
            outside = len(stages) + 1
        found[path] = outside if stage is None else stage
    return found


def _declared(shards: Shards, layers: Collection[str]) -> dict[str, int]:
    """Return the index of each layer's shard."""
    for prefix in itertools.chain(*shards):
        if not any(_is_below(path, [prefix]) for path in layers):
            raise ConfigError(
                f"method.shards: {prefix!r} is neither a layer nor a parent of one. Allowed: the layers "
                f"{', '.join(layers)}, and the modules above them"
            )
    found = {}
    for path in layers:
        within = [s for s, prefixes in enumerate(shards) if _is_below(path, prefixes)]
        if len(within) != 1:
            raise ConfigError(
                f"method.shards: layer {path!r} is in {len(within)} shards. Allowed: each layer in one shard: "
                f"{', '.join(layers)}"
            )
        [found[path]] = within
    return found


def _is_below(path: str, prefixes: Collection[str]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


def unit_costs(net: Net) -> dict[str, int]:
    """Return the multiply-adds of one element of each maskable tensor in one sample's forward pass: one per pixel for a
    convolution's weight, none for a bias or an embedding. A tied weight has those of all its layers."""
    units = dict.fromkeys(itertools.chain(*net.embeddings.values(), *net.layers.values()), 0)
    for path, owner in net.owners.items():
        if (weight := f"{owner}.weight") in units:
            units[weight] += net.layer_macs[path] // math.prod(net.layout.shapes[weight])
    return units


# thresholds


def threshold_for(params: Params, share: float, units: Mapping[str, int] | None = None) -> float:
    """Return theta, the smallest magnitude among the largest `share` of the elements of all float32 `params`. Raise a
    ValueError that names a tensor with non-finite elements.

    Without `units`: the k-th largest |x|, k = max(1, floor(share d)) of d elements. Equal elements are kept together.
    If more than 1 - share of the elements are exactly 0, theta is 0 and all elements are held, sent and trained. The
    densities of a deployment count only nonzero elements.
    With `units`, the cost of an element of each tensor: the largest set |x| >= theta that costs at most `share` of the
    total cost, but at least the largest element and its equals.
    """
    if units is None:
        total = sum(t.numel() for t in params.values())
        return _number(_level(params, dict.fromkeys(params, 1), max(1, _floor(share * total)) - 1))
    total = sum(units[name] * t.numel() for name, t in params.items())
    dropped = _level(params, units, _floor(share * total))
    return _number(_above(params, dropped))


def _floor(cost: float) -> int:
    """Round down, with a tolerance: a share computed as a ratio of two counts buys exactly that count."""
    return math.floor(cost * (1 + 1e-9))


# A level is the integer with the bits of |x|. Levels are ordered like the numbers.

HIGH, LOW = 1 << 15, 1 << 16
"""Number of high and of low halves of a level."""
INFINITE = 0x7F80
"""High half of the level of infinity. NaN has the same or a larger one."""
MAGNITUDE = (1 << 31) - 1
"""Bit mask of a float32 without its sign."""
PIECE = 1 << 18
"""Elements processed at once, so that they stay in the CPU cache (twice as fast)."""


def _number(level: int) -> float:
    return float(torch.tensor(level, dtype=torch.int32).view(torch.float32))


def _level(params: Params, units: Mapping[str, int], limit: int) -> int:
    """Return the largest level such that all elements at or above it cost more than the limit. -1: none.

    The first histogram is over the high halves of all levels, the second over the low halves of those in the high half
    found.
    """
    high = torch.zeros(HIGH, dtype=torch.int64)
    for name, t in params.items():
        counts = torch.zeros(HIGH, dtype=torch.int64)
        for piece in _pieces(t):
            counts += torch.bincount(_high_half(piece), minlength=HIGH)
        if counts[INFINITE:].any():
            raise ValueError(f"parameter {name}: some elements are not finite. Allowed: finite numbers")
        high += counts.mul_(units[name])
    bucket, above = _crossing(high, limit)
    if bucket < 0:
        return -1
    low = torch.zeros(LOW, dtype=torch.int64)
    for name, t in params.items():
        found = [p.view(torch.int32).numpy()[_high_half(p).numpy() == bucket] & (LOW - 1) for p in _pieces(t)]
        low += torch.from_numpy(np.bincount(np.concatenate(found), minlength=LOW)).mul_(units[name])
    return bucket * LOW + _crossing(low, limit - above)[0]


def _pieces(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return t.reshape(-1).split(PIECE)


def _high_half(t: torch.Tensor) -> torch.Tensor:
    """Return the high 16 bits of float32 numbers, without the sign, on a little-endian machine."""
    return t.reshape(-1).view(torch.int16)[1::2] & (HIGH - 1)


def _crossing(cost: torch.Tensor, limit: int) -> tuple[int, int]:
    """Return the largest index with the cost at and above it over the limit, and the cost above it. (-1, 0): none."""
    spent = cost.flip(0).cumsum(0)
    i = int(torch.searchsorted(spent, limit, right=True))
    return (len(cost) - 1 - i, int(spent[i - 1]) if i else 0) if i < len(cost) else (-1, 0)


def _above(params: Params, level: int) -> int:
    """Return the smallest level of an element above `level`, or `level` if there is none."""
    beyond = MAGNITUDE
    for t in params.values():
        distance = t.reshape(-1).view(torch.int32).numpy() & MAGNITUDE
        distance -= level + 1
        # as unsigned numbers, negative distances are the largest
        beyond = min(beyond, int(distance.view(np.uint32).min()))
    return level if beyond == MAGNITUDE else level + 1 + beyond
