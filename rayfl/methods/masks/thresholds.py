"""Exact thresholds of the largest elements: what is maskable, which elements share a threshold, and what they cost.

A threshold is found by counting and not by sorting: the bits of float32 magnitudes have the order of the numbers, so
two histograms of 16 bits each find the element at any rank.
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
"""Which elements have one threshold in common."""
Shards = tuple[tuple[str, ...], ...]
"""Lists of module paths; a path stands for all layers below it."""

# which elements are maskable, and what they cost


@dataclass(frozen=True)
class Maskable:
    """Which tensors of a network may be masked: weights and biases of convolutions and linear layers."""

    embeddings: bool = False
    """Those of embeddings too."""
    whole: tuple[str, ...] = ()
    """Paths of modules of which nothing is."""


@functools.lru_cache(maxsize=256)
def layers_of(net: Net, maskable: Maskable = Maskable()) -> Mapping[str, tuple[str, ...]]:
    """Path -> maskable tensors of every layer that has some, in the network's order. A ConfigError if nothing of
    `whole` is a layer."""
    layers = {**net.layers, **(net.embeddings if maskable.embeddings else {})}
    order = {name: i for i, name in enumerate(net.layout.shapes)}
    layers = dict(sorted(layers.items(), key=lambda layer: order[layer[1][0]]))
    for prefix in maskable.whole:
        if not any(_is_below(path, [prefix]) for path in layers):
            raise ConfigError(
                f"method.whole: given {prefix!r}, which is no layer and above no layer; allowed: the layers "
                f"{', '.join(layers)}, and the modules above them"
            )
    return {path: names for path, names in layers.items() if not _is_below(path, maskable.whole)}


@functools.lru_cache(maxsize=256)
def groups(
    net: Net, threshold: Threshold, shards: Shards = (), maskable: Maskable = Maskable()
) -> Sequence[tuple[str, ...]]:
    """The names of the maskable tensors, group by group, in the network's order: a group has one threshold. A
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
    """Layer -> its stage, counted from 1. 0: it stands before the stages; one more than the last stage: behind them."""
    stages = net.model.blocks
    if not stages:
        raise ConfigError(
            f"method.threshold: given 'shard' with model {net.model.name}, which has no stages; allowed: "
            f"method.shards, lists of its layers: {', '.join(layers)}; or threshold: model or layer"
        )
    found, outside = {}, 0
    for path in layers:
        stage = next((s for s, blocks in enumerate(stages, 1) if _is_below(path, blocks)), None)
        if stage is not None:
            outside = len(stages) + 1
        found[path] = outside if stage is None else stage
    return found


def _declared(shards: Shards, layers: Collection[str]) -> dict[str, int]:
    """Layer -> the only shard that names it."""
    for prefix in itertools.chain(*shards):
        if not any(_is_below(path, [prefix]) for path in layers):
            raise ConfigError(
                f"method.shards: given {prefix!r}, which is no layer and above no layer; allowed: the layers "
                f"{', '.join(layers)}, and the modules above them"
            )
    found = {}
    for path in layers:
        within = [s for s, prefixes in enumerate(shards) if _is_below(path, prefixes)]
        if len(within) != 1:
            raise ConfigError(
                f"method.shards: given layer {path!r} in {len(within)} shards; allowed: every layer in one shard: "
                f"{', '.join(layers)}"
            )
        [found[path]] = within
    return found


def _is_below(path: str, prefixes: Collection[str]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


def unit_costs(net: Net) -> dict[str, int]:
    """What one element of every maskable tensor costs: in how many multiply-adds of one sample's forward pass it takes
    part. A convolution's weight takes part in one a pixel, a bias and an embedding in none."""
    units = dict.fromkeys(itertools.chain(*net.embeddings.values()), 0)
    for path, names in net.layers.items():
        weight = f"{path}.weight"
        units |= dict.fromkeys(names, 0)
        units[weight] = net.layer_macs.get(path, 0) // math.prod(net.layout.shapes[weight])
    return units


# thresholds


def threshold_for(params: Params, share: float, units: Mapping[str, int] | None = None) -> float:
    """The threshold theta of a share of the largest elements of all float32 `params`: the smallest |x| that is kept. A
    ValueError names a tensor with elements that are not finite.

    Without `units`: the k-th largest |x|, k = max(1, floor(share d)) of d elements. Equal elements are kept together.
    So theta is 0 and everything is kept where more than 1 - share of the elements are exactly 0; these are held, sent
    and trained, although the densities of a deployment count only elements that are not 0.
    With `units`, the cost of an element of each tensor: the largest set |x| >= theta that costs at most the share of
    what everything costs, but at least the largest element, and whatever equals it.

    A group of zeros is kept whole, for every share.
    """
    if units is None:
        total = sum(t.numel() for t in params.values())
        return _number(_level(params, dict.fromkeys(params, 1), max(1, _floor(share * total)) - 1))
    total = sum(units[name] * t.numel() for name, t in params.items())
    dropped = _level(params, units, _floor(share * total))
    return _number(_above(params, dropped))


def _floor(cost: float) -> int:
    """A share that was computed as a ratio of two counts buys exactly that count."""
    return math.floor(cost * (1 + 1e-9))


# A level is |x| as its bits, an integer. Levels have the order of the numbers.

HIGH, LOW = 1 << 15, 1 << 16
"""How many high and low halves of a level there are."""
INFINITE = 0x7F80
"""The high half of the level of infinity: NaN and infinity have no smaller one."""
MAGNITUDE = (1 << 31) - 1
"""A float32's bits without its sign."""
PIECE = 1 << 18
"""Elements that are looked at at once."""


def _number(level: int) -> float:
    return float(torch.tensor(level, dtype=torch.int32).view(torch.float32))


def _level(params: Params, units: Mapping[str, int], limit: int) -> int:
    """The largest level such that all elements at or above it cost more than the limit; -1: none.

    Counted first by the high half of the level, over all elements; then by the low half, over the few elements whose
    high half is the one that was found.
    """
    high = torch.zeros(HIGH, dtype=torch.int64)
    for name, t in params.items():
        counts = torch.zeros(HIGH, dtype=torch.int64)
        for piece in _pieces(t):
            counts += torch.bincount(_high_half(piece), minlength=HIGH)
        if counts[INFINITE:].any():
            raise ValueError(f"parameter {name}: given elements that are not finite; allowed: finite numbers")
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
    """Views of a tensor's elements that stay in the cache while they are looked at, which is twice as fast."""
    return t.reshape(-1).split(PIECE)


def _high_half(t: torch.Tensor) -> torch.Tensor:
    """The high 16 of a float32's 32 bits, without its sign, in the memory of a little-endian machine."""
    return t.reshape(-1).view(torch.int16)[1::2] & (HIGH - 1)


def _crossing(cost: torch.Tensor, limit: int) -> tuple[int, int]:
    """The largest index such that the cost at and above it is more than the limit, and the cost above it; (-1, 0) if
    there is none."""
    spent = cost.flip(0).cumsum(0)
    i = int(torch.searchsorted(spent, limit, right=True))
    return (len(cost) - 1 - i, int(spent[i - 1]) if i else 0) if i < len(cost) else (-1, 0)


def _above(params: Params, level: int) -> int:
    """The smallest level of an element above `level`; `level` itself if no element is above it."""
    beyond = MAGNITUDE
    for t in params.values():
        distance = t.reshape(-1).view(torch.int32).numpy() & MAGNITUDE
        distance -= level + 1
        # as unsigned numbers, the negative distances come last
        beyond = min(beyond, int(distance.view(np.uint32).min()))
    return level if beyond == MAGNITUDE else level + 1 + beyond
