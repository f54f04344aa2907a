"""What a network costs: parameters, operations, bytes, and the width that a budget buys.

Networks are built and run on the meta device, so nothing is allocated; results are cached.
Published counts differ by convention, so every figure names its own. One sample's forward pass costs

    macs               multiply-adds of convolutions and linear layers
    flops2             2 a multiply-add, 1 a bias addition, 4 an input element of a norm (centre,
                       divide, scale, shift), 1 an element of an activation, 1 an input element of
                       pooling
    heterofl_official  HeteroFL's summary tool: the multiply-adds, 1 an output of a convolution with
                       a bias, 2 an input element of a norm; then every module's figure times the
                       number of its own parameter tensors, an artefact of the tool's loop

Residual additions, the Scaler (an identity in evaluation) and reshapes are free in all of them.
"""

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from rayfl.axes import Net, on_meta
from rayfl.config import ConfigError
from rayfl.models.base import Model, layout
from rayfl.norms import StaticBatchNorm
from rayfl.tensors import Params

Convention = Literal["heterofl_official", "macs", "flops2"]
Metric = Literal["width", "params", "flops"]

WHOLE = Net()

BYTES = 4
"""Bytes of a parameter: float32."""

NORMS = (StaticBatchNorm, nn.GroupNorm, nn.LayerNorm)
ACTIVATIONS = (nn.ReLU, nn.GELU)
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)


@functools.lru_cache(maxsize=4096)
def parameters(model: Model, net: Net) -> int:
    """Number of trainable parameters; step sizes of residual branches are not counted, as in NeFL's tables."""
    return sum(math.prod(shape) for shape in layout(model, net).shapes.values() if shape)


def flops(model: Model, net: Net, convention: Convention = "macs") -> int:
    """Operations of the forward pass of ONE sample, by a convention of this module."""
    return _operations(model, net)[0][convention]


@dataclass(frozen=True)
class Held:
    """How much of a network is there, where only elements that are not 0 are."""

    parameters: int
    macs: float
    """Multiply-adds of one sample."""
    layers: Mapping[str, float]
    """Density of the weight of every masked layer, by its path."""


def held(model: Model, net: Net, params: Params, masked: Collection[str]) -> Held:
    """Of `params`, of which the `masked` are counted by their elements that are not 0."""
    there = {name: int(params[name].count_nonzero()) for name in masked}
    shares = {name: n / params[name].numel() for name, n in there.items()}
    densities = {name.removesuffix(".weight"): share for name, share in shares.items() if name.endswith(".weight")}
    whole = sum(math.prod(shape) for name, shape in layout(model, net).shapes.items() if shape and name not in there)
    return Held(whole + sum(there.values()), macs(model, net, densities), densities)


def layer_macs(model: Model, net: Net) -> Mapping[str, int]:
    """Multiply-adds of one sample's forward pass, of every convolution and linear layer by its path."""
    return _operations(model, net)[1]


def macs(model: Model, net: Net, densities: Mapping[str, float]) -> float:
    """Multiply-adds of one sample's forward pass, of a layer that has a density so much of the dense ones (FIARSE,
    SpaFL)."""
    return sum(n * densities.get(path, 1) for path, n in layer_macs(model, net).items())


def training_flops(model: Model, net: Net, samples: int, densities: Mapping[str, float] | None = None) -> float:
    """Floating point operations of training on so many samples: each 3 forward passes (the backward
    pass counts as two) of 2 floating point operations a multiply-add. `densities` of masked layers, by path."""
    return 3 * 2 * macs(model, net, densities or {}) * samples


def space_mb(parameters: int) -> float:
    """Size of so many float32 parameters in MB of 2^20 bytes, as HeteroFL prints it."""
    return parameters * BYTES / 2**20


@functools.lru_cache(maxsize=1024)
def width_for(model: Model, capacity: float, metric: Metric = "width", net: Net = WHOLE) -> float:
    """The width of the network that a device of a capacity in (0, 1] runs; `net` says its blocks, exits and rounding.

    `width`: the capacity itself (HeteroFL, FedRolex). `params` and `flops`: the largest width whose
    parameters, or multiply-adds, are at most `capacity` times the full network's (NeFL, FIARSE), which has
    all exits if `net` has some. A network changes only at the widths j / K, so the answer is one of them, found
    exactly. A ConfigError if even the narrowest network costs more.
    """
    if metric == "width":
        return capacity
    cost = cost_of(metric)
    whole = Net(exits=model.exit_count if net.exits else 0)
    sizes = {axis.size for axis in layout(model, whole).axes.values()}
    # rounded down, a layer of few channels has none below 1 / K
    least = 1 / min(sizes) if net.rounding == "down" else 0.0
    widths = sorted({j / size for size in sizes for j in range(1, size + 1) if j / size >= least})
    full = cost(model, whole)
    affordable = bisect_right(widths, _budget(capacity, full), key=lambda width: cost(model, replace(net, width=width)))
    if not affordable:
        smallest = cost(model, replace(net, width=widths[0])) / full
        raise ConfigError(
            f"capacity {capacity:g} by {metric}: given model {model.name}, whose narrowest network already is "
            f"{smallest:.3g}; take capacities from {smallest:.3g} to 1"
        )
    return widths[affordable - 1]


@functools.lru_cache(maxsize=256)
def depth_for(
    model: Model, capacity: float, metric: Metric, width: float = 1.0, within: Net = WHOLE, slack: float = 0.01
) -> Net:
    """The network of a width with as many first blocks of every stage as `capacity` of the full network's cost buys.

    Of all numbers of blocks that `within` has and that can be paid, and that cost within `slack` of the full network's
    cost of the dearest, those whose smallest share of a stage is largest, then the next one, and so on; of equal ones
    the dearest.
    """
    idle, added = _block_costs(model, width, metric)
    full = cost_of(metric)(model, WHOLE)
    budget = _budget(capacity, full)
    stages = zip(model.blocks, added, strict=True)
    kept = [[c for p, c in zip(*stage, strict=True) if p not in within.without] for stage in stages]
    sums = [list(itertools.accumulate(stage, initial=0)) for stage in kept]
    affordable = []
    for counts in itertools.product(*(range(len(stage)) for stage in sums)):
        spent = idle + sum(stage[n] for stage, n in zip(sums, counts, strict=True))
        if spent <= budget:
            affordable.append((spent, counts))
    if not affordable:
        raise ConfigError(
            f"capacity {capacity:g} by {metric}: given model {model.name}, of which the layers outside its "
            f"residual blocks cost {idle / full:.3g} at width {width:.3g}; take a larger capacity"
        )
    enough = max(affordable)[0] - slack * full

    def shares(counts: tuple[int, ...]) -> list[float]:
        return sorted(n / len(stage) for n, stage in zip(counts, model.blocks, strict=True))

    _, _, counts = max((shares(counts), spent, counts) for spent, counts in affordable if spent >= enough)
    left = [stage[n:] for n, stage in zip(counts, model.blocks, strict=True)]
    return Net(width, tuple(itertools.chain(*left)))


@functools.lru_cache(maxsize=256)
def _block_costs(model: Model, width: float, metric: Metric) -> tuple[int, list[list[int]]]:
    """What the network of a width costs without any residual branch, and what every branch adds, by stage."""
    paths = tuple(itertools.chain(*model.blocks))
    cost, none = cost_of(metric), layout(model, Net(width, paths)).shapes
    idle = cost(model, Net(width, paths))
    shapes: dict[str, list[tuple[int, ...]]] = {path: [] for path in paths}
    for name, shape in layout(model, Net(width)).shapes.items():
        if name not in none:
            shapes[next(path for path in paths if name.startswith(f"{path}."))].append(shape)
    added: dict[Any, int] = {}
    for s, stage in enumerate(model.blocks):
        for path in stage:
            # equal layers of one stage cost the same
            if (kind := (s, *shapes[path])) not in added:
                alone = tuple(p for p in paths if p != path)
                added[kind] = cost(model, Net(width, alone)) - idle
    return idle, [[added[s, *shapes[path]] for path in stage] for s, stage in enumerate(model.blocks)]


def cost_of(metric: Metric) -> Callable[[Model, Net], int]:
    """What `params` or `flops` counts."""
    return parameters if metric == "params" else flops


def _budget(capacity: float, full: int) -> float:
    """A capacity that was computed as a ratio of two counts buys exactly that count."""
    return capacity * full * (1 + 1e-9)


def describe(
    model: Model,
    nets: Mapping[float, Net],
    convention: Convention = "macs",
) -> list[dict[str, float]]:
    """One record a capacity: what its network costs. Bytes are those of its parameters, a round."""
    records = []
    for capacity, net in nets.items():
        count = parameters(model, net)
        records.append(
            {
                "capacity": capacity,
                "parameters": count,
                "flops": flops(model, net, convention),
                "bytes_down": BYTES * count,
                "bytes_up": BYTES * count,
                "space_mb": space_mb(count),
            }
        )
    return records


@functools.lru_cache(maxsize=4096)
def _operations(model: Model, net: Net) -> tuple[dict[str, int], dict[str, int]]:
    """Convention -> operations of one sample, and path -> multiply-adds of every convolution and linear layer, from
    forward hooks on the leaf modules."""
    network = on_meta(model.build, net).eval()
    totals, layers = dict.fromkeys(CONVENTIONS, 0), {}

    def hook(path: str):
        def count(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            for convention, operations in _COUNT.items():
                totals[convention] += operations(module, inputs[0], output)
            if isinstance(module, nn.Conv2d | nn.Linear):
                layers[path] = layers.get(path, 0) + _macs(module, inputs[0], output)

        return count

    for path, module in network.named_modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(hook(path))
    with torch.no_grad():
        network(torch.empty(1, *model.input, device="meta"))
    return totals, layers


def _macs(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    if isinstance(module, nn.Conv2d):
        return module.weight.numel() * y[0, 0].numel()
    if isinstance(module, nn.Linear):
        return module.weight.numel() * (y.numel() // module.out_features)
    return 0


def _heterofl_official(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    once = _macs(module, x, y)
    if isinstance(module, nn.Conv2d) and module.bias is not None:
        once += y.numel()
    if isinstance(module, NORMS):
        once += 2 * x.numel()
    return once * len(list(module.parameters(recurse=False)))


def _flops2(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    if isinstance(module, nn.Conv2d | nn.Linear):
        return 2 * _macs(module, x, y) + (y.numel() if module.bias is not None else 0)
    if isinstance(module, NORMS):
        return 4 * x.numel()
    return x.numel() if isinstance(module, ACTIVATIONS + POOLS) else 0


_COUNT: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], int]] = {
    "heterofl_official": _heterofl_official,
    "macs": _macs,
    "flops2": _flops2,
}
CONVENTIONS = tuple(_COUNT)
