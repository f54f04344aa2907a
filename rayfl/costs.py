"""Costs of training, and the width and depth of networks within a budget. Results are cached."""

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from rayfl.config import ConfigError
from rayfl.core.net import Family, Net
from rayfl.core.tensors import Params

Metric = Literal["width", "params", "flops"]
"""Unit of capacities: fraction of the channels, parameters or multiply-adds of the full network."""

BYTES = 4
"""Bytes per parameter (float32)."""
PROCESS_GB = 0.35
"""Private memory of a process that has imported torch and rayfl."""


@dataclass(frozen=True)
class Present:
    """Parameters and multiply-adds of a network with masked tensors, of which only nonzero elements count."""

    parameters: int
    macs: float
    """Multiply-adds of one sample."""
    layers: Mapping[str, float]
    """Path of a masked layer -> density of its weight."""


def present(net: Net, params: Params, masked: Collection[str]) -> Present:
    """Return the costs of `params`; of tensors in `masked`, only nonzero elements count."""
    nonzero = {name: int(params[name].count_nonzero()) for name in masked}
    shares = {name: n / params[name].numel() for name, n in nonzero.items()}
    densities = {name.removesuffix(".weight"): share for name, share in shares.items() if name.endswith(".weight")}
    whole = sum(math.prod(shape) for name, shape in net.layout.shapes.items() if shape and name not in nonzero)
    return Present(whole + sum(nonzero.values()), macs(net, densities), densities)


def macs(net: Net, densities: Mapping[str, float]) -> float:
    """Return the multiply-adds of the forward pass of one sample; a layer of density d needs the fraction d of the
    dense layer's (FIARSE, SpaFL)."""
    return sum(n * densities.get(net.owners[path], 1) for path, n in net.layer_macs.items())


def training_flops(net: Net, samples: int, densities: Mapping[str, float] | None = None) -> float:
    """Return the FLOPs of training on this many samples: 3 forward passes per sample (the backward pass counts as two),
    2 FLOPs per multiply-add. `densities` of masked layers, by path. The backward pass of a frozen layer counts as one,
    because its weight has no gradient; also of one before the first trained layer, which has none."""
    frozen = sum(n for path, n in net.layer_macs.items() if path in _frozen(net))
    return (3 * 2 * macs(net, densities or {}) - 2 * frozen) * samples


def partial_flops(net: Net, names: Collection[str], samples: int) -> float:
    """Return the FLOPs of training only these parameters: a forward pass, and a backward pass to the first of their
    layers, with gradients of the weights of their layers only. 2 FLOPs per multiply-add."""
    macs, trained = net.layer_macs, {name.rpartition(".")[0] for name in names}
    places = {path: i for i, path in enumerate(dict.fromkeys(name.rpartition(".")[0] for name in net.layout.shapes))}
    # norms and embeddings have no multiply-adds: the backward pass goes to the first layer after them
    start = min((places[path] for path in trained - macs.keys()), default=math.inf)
    # tied layers come last
    own = {path: places.get(path, -1) if path == owner else len(places) for path, owner in net.owners.items()}
    reached = [path in trained or own[path] >= start for path in macs]
    after = sum(list(macs.values())[reached.index(True) :]) if any(reached) else 0
    return 2.0 * (net.macs + after + sum(n for path, n in macs.items() if net.owners[path] in trained)) * samples


@functools.lru_cache(maxsize=1024)
def _frozen(net: Net) -> frozenset[str]:
    """Return the paths of the layers whose weight is not a parameter. One that is tied to another is."""
    trained = {name.rpartition(".")[0] for name in net.layout.shapes}
    return frozenset(path for path, owner in net.owners.items() if not trained & {path, owner})


def forward_flops(net: Net, samples: int) -> float:
    """Return the FLOPs of a forward pass of this many samples: 2 per multiply-add."""
    return 2.0 * net.macs * samples


class Memory(NamedTuple):
    """Bytes for training a network."""

    frozen: int
    """Of its frozen base, which processes of a node share."""
    parameters: int
    optimizer: int
    """Of gradients and moments."""
    activations: int
    """Of the samples that pass through the network at once."""


def training_memory(net: Net, samples: int, moments: int) -> Memory:
    """Return the memory for training with `samples` in a forward pass and `moments` of the optimizer."""
    own = net.parameters * BYTES
    return Memory(net.fixed_bytes, own, own * (1 + moments), samples * net.activations * BYTES)


def training_mb(net: Net, samples: int, moments: int) -> float:
    """Return the same in MB of 2^20 bytes."""
    return sum(training_memory(net, samples, moments)) / 2**20


def actor_gb(nets: Iterable[Net], samples: int, moments: int, together: Callable[[Net], int] = lambda _: 1) -> float:
    """Return an estimate of the memory of a process that trains one of these networks at a time, `together` times, in
    GB: PyTorch itself, a frozen base, and twice the rest of the memory for training the largest."""
    needed = ((together(net), training_memory(net, samples, moments)) for net in nets)
    return PROCESS_GB + max(memory.frozen + 2 * n * sum(memory[1:]) for n, memory in needed) / 1e9


def space_mb(parameters: int) -> float:
    """Return the size of float32 parameters in MB of 2^20 bytes, as HeteroFL prints it."""
    return parameters * BYTES / 2**20


@functools.lru_cache(maxsize=1024)
def width_for(net: Net, capacity: float, metric: Metric = "width") -> float:
    """Return the width of `net` for a capacity in (0, 1].

    `width`: the capacity itself (HeteroFL, FedRolex). `params` and `flops`: the largest width whose parameters, or
    multiply-adds, are at most `capacity` times the full network's (NeFL, FIARSE), which has all exits if `net` has
    some. Networks change only at the widths j / K, so the result is exact. A ConfigError if the narrowest network
    exceeds the capacity.
    """
    if metric == "width" or capacity == 1:
        return capacity
    cost = cost_of(metric)
    whole = Net(net.model, exits=net.model.exit_count if net.exits else 0)
    sizes = {axis.size for axis in whole.layout.axes.values()}
    if not sizes:
        raise ConfigError(
            f"model: {net.model.name} has nothing to cut, so it has no network of capacity {capacity:g} by {metric}. "
            "Allowed: a model whose layers have axes to cut, or clients.capacities: [1]"
        )
    # with rounding down, a layer has no channels below 1 / K
    least = 1 / min(sizes) if net.rounding == "down" else 0.0
    widths = sorted({j / size for size in sizes for j in range(1, size + 1) if j / size >= least})
    full = cost(whole)
    affordable = bisect_right(widths, _budget(capacity, full), key=lambda width: cost(replace(net, width=width)))
    if not affordable:
        smallest = cost(replace(net, width=widths[0])) / full
        raise ConfigError(
            f"capacity {capacity:g} by {metric}: the narrowest network of model {net.model.name} exceeds it. "
            f"Allowed: {smallest:.3g} to 1"
        )
    return widths[affordable - 1]


@functools.lru_cache(maxsize=256)
def depth_for(within: Net, capacity: float, metric: Metric, width: float = 1.0, slack: float = 0.01) -> Net:
    """Return the network of a width with first blocks of every stage, as many as `capacity` of the full cost allows.

    Blocks are those of `within`. Candidates are the affordable block counts whose cost is within `slack` (a fraction of
    the full cost) of the most expensive one. The most balanced one is used: the largest minimum fraction of a stage,
    then the largest second smallest, and so on; ties go to the more expensive one.
    """
    model = within.model
    idle, added = _block_costs(model, width, metric)
    full = cost_of(metric)(Net(model))
    budget = _budget(capacity, full)
    stages = zip(model.blocks, added, strict=True)
    remaining = [[c for p, c in zip(*stage, strict=True) if p not in within.without] for stage in stages]
    sums = [list(itertools.accumulate(stage, initial=0)) for stage in remaining]
    affordable = []
    for counts in itertools.product(*(range(len(stage)) for stage in sums)):
        spent = idle + sum(stage[n] for stage, n in zip(sums, counts, strict=True))
        if spent <= budget:
            affordable.append((spent, counts))
    if not affordable:
        raise ConfigError(
            f"capacity {capacity:g} by {metric}: the layers of model {model.name} outside residual blocks exceed it at "
            f"width {width:.3g}. Allowed: {idle / full:.3g} to 1"
        )
    enough = max(affordable)[0] - slack * full

    def shares(counts: tuple[int, ...]) -> list[float]:
        return sorted(n / len(stage) for n, stage in zip(counts, model.blocks, strict=True))

    _, _, counts = max((shares(counts), spent, counts) for spent, counts in affordable if spent >= enough)
    left = [stage[n:] for n, stage in zip(counts, model.blocks, strict=True)]
    return Net(model, width, tuple(itertools.chain(*left)))


@functools.lru_cache(maxsize=256)
def _block_costs(model: Family, width: float, metric: Metric) -> tuple[int, list[list[int]]]:
    """Return the cost of the network of a width without residual branches, and the cost per branch, by stage."""
    paths = tuple(itertools.chain(*model.blocks))
    cost, none = cost_of(metric), Net(model, width, paths)
    idle = cost(none)
    shapes: dict[str, list[tuple[int, ...]]] = {path: [] for path in paths}
    for name, shape in Net(model, width).layout.shapes.items():
        if name not in none.layout.shapes:
            shapes[next(path for path in paths if name.startswith(f"{path}."))].append(shape)
    added: dict[Any, int] = {}
    for s, stage in enumerate(model.blocks):
        for path in stage:
            # blocks of equal shapes in one stage have equal costs
            if (kind := (s, *shapes[path])) not in added:
                alone = tuple(p for p in paths if p != path)
                added[kind] = cost(Net(model, width, alone)) - idle
    return idle, [[added[s, *shapes[path]] for path in stage] for s, stage in enumerate(model.blocks)]


def cost_of(metric: Metric) -> Callable[[Net], int]:
    """Return the cost function of `params` or `flops`."""
    return (lambda net: net.parameters) if metric == "params" else (lambda net: net.macs)


def _budget(capacity: float, full: int) -> float:
    # with a tolerance: a capacity that is a ratio of two counts allows exactly that count
    return capacity * full * (1 + 1e-9)
