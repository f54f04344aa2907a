"""Removal of dead channels from a masked network, giving a smaller dense network with the same outputs.

A position of an axis (a filter, a neuron) can be removed in two cases.

    zero       its rows are 0 in every parameter that has them: weights, biases, weight and bias of its norm; on a
               residual stream, those of every layer that adds to it. Its output is then 0.
    unread     its columns are 0 in every layer that reads it. Its output is then never used.

Removing it removes its rows and columns, after which more positions may be zero or unread; this repeats until there are
none. At least one position of an axis stays. Classes and image channels always stay.

A filter of zeros before a batch norm whose weight or bias is not 0 can be a constant, and stays. An axis stays whole if
a layer other than a convolution, linear layer or batch norm has it (LayerNorm and GroupNorm mix positions, tokens are
added), and in attention heads, whose size scales the softmax. Operations between layers must map 0 to 0, as ReLU, GELU
and pooling do.
"""

from dataclasses import replace

import torch
from torch import nn

from rayfl.core.axes import Axis, segments
from rayfl.core.net import Net
from rayfl.core.norms import StaticBatchNorm
from rayfl.core.submodel import Picks, Positions, Slice, Window
from rayfl.core.tensors import Params
from rayfl.methods.base import Deployment


def shrunk(deployed: Deployment, statistics: Params) -> tuple[Deployment, Params]:
    """Return the smaller network and its norms' statistics. They can be views of the arguments."""
    kept = survivors(deployed)
    small = replace(deployed, key=(deployed.key, kept.key), net=kept.net, params=kept.take(deployed.params))
    return small, kept.take(statistics)


def survivors(deployed: Deployment) -> Slice:
    """Return the remaining positions. `net.sizes` of the slice's network lists the axes that became smaller."""
    net = deployed.net
    whole = net.layout
    axes = _separable(net)
    matters = {name: t != 0 for name, t in deployed.params.items()}
    stays = {name: torch.ones(axis.size, dtype=torch.bool) for name, axis in whole.axes.items()}
    changed = True
    while changed:
        changed = False
        for axis in axes:
            here = [
                (d, _by_position(t.narrow(d, start, other.length), d, other))
                for name, t in matters.items()
                for d, dim in enumerate(whole.dims[name])
                for start, other in segments(dim)
                if other.name == axis.name
            ]
            is_written, is_read = torch.zeros(2, axis.size, dtype=torch.bool)
            for d, t in here:
                (is_read if d else is_written).logical_or_(t.flatten(1).any(1))
            now = stays[axis.name] & is_written & is_read
            changed |= not now.equal(stays[axis.name])
            stays[axis.name] = now
            for _, t in here:
                t[~now] = False
    positions = {name: _chosen(now) for name, now in stays.items()}
    cut = {name: chosen.count for name, chosen in positions.items() if chosen.count < chosen.size}
    small = replace(net, sizes=tuple(sorted((dict(net.sizes) | cut).items())))
    return Slice(net, small, positions)


def filters(deployed: Deployment) -> tuple[int, int]:
    """Return the number of filters and neurons (rows of masked weights), and how many of them are all zeros."""
    layers = deployed.net.layers
    masked = [name for name in deployed.masked if name.rpartition(".")[0] in layers]
    rows = [t.flatten(1).any(1) for name in masked if (t := deployed.params[name]).dim() > 1]
    return sum(map(len, rows)), sum(int((~row).sum()) for row in rows)


def _separable(net: Net) -> list[Axis]:
    """Return the axes whose positions can be removed one by one."""
    module, tied = net.blank(), set()
    for name, dims in net.layout.dims.items():
        layer = module.get_submodule(name.rpartition(".")[0])
        is_plain = isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Linear | StaticBatchNorm)
        axes = [axis for dim in dims for _, axis in segments(dim)]
        tied |= {axis.name for axis in axes if axis.groups > 1 or not is_plain}
    return [axis for name, axis in net.layout.axes.items() if name not in tied]


def _by_position(t: torch.Tensor, d: int, axis: Axis) -> torch.Tensor:
    """Return a view [positions, copies, ...] of a tensor whose dimension d has the axis."""
    return t.movedim(d, 0).unflatten(0, (axis.size, axis.copies))


def _chosen(stays: torch.Tensor) -> Positions:
    """Return the positions where `stays` [K] is true, or the first if there are none."""
    size, positions = len(stays), stays.nonzero().flatten().tolist() or [0]
    return Window(0, size, size) if len(positions) == size else Picks(tuple(positions), size)
