"""The layer of a low-rank adapter, and the base network below it: frozen, never cut."""

import math
from itertools import chain

import torch
import torch.nn.functional as F
from torch import nn

from rayfl.core.axes import Axis, axes_of, declare
from rayfl.core.tensors import Params


class Adapter(nn.Module):
    """Adapter: s B A drop(x), or s B M A drop(x), plus W x if it has W: [..., in] -> [..., out]."""

    def __init__(self, out: int, cin: int, rank: Axis, scale: float, dropout: float, merged: bool, core: bool):
        super().__init__()
        self.scale, self.dropout = scale, dropout
        bound = 1 / math.sqrt(cin)
        self.A = nn.Parameter(torch.empty(rank.size, cin).uniform_(-bound, bound))
        self.B = nn.Parameter(torch.zeros(out, rank.size))
        self.M = nn.Parameter(torch.zeros(rank.size, rank.size)) if core else None
        self.W = nn.Parameter(torch.zeros(out, cin)) if merged else None
        if core:
            nn.init.uniform_(self.B, -1 / math.sqrt(out), 1 / math.sqrt(out))
        declare(self, A=(rank, None), B=(None, rank), M=(rank, rank), W=(None, None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # a base of another data type has float32 adapters
        x = x.to(self.A.dtype)
        low = F.linear(F.dropout(x, self.dropout, self.training), self.A)
        if self.M is not None:
            low = F.linear(low, self.M)
        y = F.linear(low * self.scale, self.B)
        return y if self.W is None else y + F.linear(x, self.W)

    def multiply_adds(self, y: torch.Tensor) -> int:
        """Return the multiply-adds of the forward pass with output y [..., out], without those of W."""
        core = 0 if self.M is None else self.M.numel()
        return (self.A.numel() + self.B.numel() + core) * (y.numel() // y.shape[-1])


def add(layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """Return a layer's output with its adapter's: a forward hook."""
    return output + layer.get_submodule("lora")(inputs[0]).to(output.dtype)


def take_axes(module: nn.Module, trained: set[str]) -> None:
    """Keep only the fixed axes of a base, because it is never cut."""
    for name, dims in axes_of(module).items():
        path, _, own = name.rpartition(".")
        if name in trained:
            layer = module.get_submodule(path)
            layer.axes = {**layer.axes, own: tuple(a if a and a.is_fixed else None for a in dims)}  # type: ignore


def take_base(module: nn.Module, trained: set[str], tensors: Params | None) -> None:
    """Turn untrained parameters into buffers with these tensors, or on the meta device without. A tensor with several
    names uses its first."""
    first = {id(t): name for name, t in chain(module.named_buffers(), module.named_parameters())}
    # one tensor under all its names, so that it is saved once
    shared: Params = {}
    for path, layer in list(module.named_modules()):
        for own, t in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            name = first[id(t)]
            given = shared.setdefault(name, (t if tensors is None else tensors[name]).detach())
            if f"{path}.{own}".lstrip(".") in trained:
                layer.register_parameter(own, nn.Parameter(given.clone()))
            else:
                layer._parameters.pop(own, None)
                layer.register_buffer(own, given, persistent=False)
