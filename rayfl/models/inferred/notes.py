"""What was inferred of a network, in words."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from rayfl.core.axes import segments
from rayfl.models.inferred.narrow import Plan

SHOWN = 12
"""Axes, and modules in a note, before "and n more"."""


def notes_on(plan: Plan) -> Iterator[str]:
    """Yield notes on axes with their layers, what stays whole, and blocks."""
    layers: dict[str, list[str]] = {name: [] for name in plan.axes}
    for name, dims in plan.dims.items():
        for dim in dims:
            for _, axis in segments(dim):
                if (path := name.rpartition(".")[0] or name) not in layers.get(axis.name, [path]):
                    layers[axis.name].append(path)
    for name, axis in list(plan.axes.items())[:SHOWN]:
        groups = f" in each of {axis.groups} groups" if axis.groups > 1 else ""
        yield f"Axis {name}: {axis.size} positions{groups} of {listed(layers[name])}"
    if len(plan.axes) > SHOWN:
        yield f"And {len(plan.axes) - SHOWN} more axes"
    for reason in plan.fixed:
        # others are those of the samples and of the classes
        if "no rule" in reason or "Error" in reason or not plan.axes:
            yield f"Not cut: {reason}. Hint: model.axes declares the channels of modules around it"
    if plan.blocks:
        yield f"Blocks that can be left out: {'; '.join(listed(stage) for stage in plan.blocks)}"


def listed(names: Iterable[str]) -> str:
    names = [*names]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def uncounted(module: nn.Module, x: torch.Tensor, counted: Mapping[str, int]) -> Iterator[str]:
    """Yield a note on multiply-adds of a network on the meta device that are in none of the layers `counted`, such as
    products of attention and functions of raw parameters."""
    # imports triton
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module.eval()(x)
    root, outside = type(module).__name__, {}
    for name, operations in counter.get_flop_counts().items():
        path = "" if name in ("Global", root) else name.removeprefix(f"{root}.")
        inside = sum(n for layer, n in counted.items() if not path or layer == path or layer.startswith(f"{path}."))
        if (rest := sum(operations.values()) // 2 - inside) > 0:
            outside[path] = rest
    innermost = [p for p in outside if p and not any(other.startswith(f"{p}.") for other in outside)]
    if outside:
        yield (
            f"Not counted: {outside.get('', 0):,} multiply-adds per sample outside of convolutions and linear layers, "
            f"in {listed(innermost) or 'the network'}"
        )
