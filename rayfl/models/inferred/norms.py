"""Batch norms of any network as norms that clients can share.

Running statistics of torch's batch norms would be those of the last client of a process. They become static batch norms
(`rayfl.core.norms`), group norms, or a scale and a shift per channel that includes the statistics of the start.
"""

import copy
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayfl.core.norms import STATISTICS, StaticBatchNorm
from rayfl.core.tensors import Params
from rayfl.models.inferred.trace import Untraceable

Kind = Literal["static_bn", "group", "keep"]
GROUPS = 4
"""Groups of a group norm, or their largest divisor that divides the channels."""


class Affine(nn.Module):
    """x * weight + bias for x [B, C, ...] and weight, bias [C]."""

    eps = 1e-5
    """Of the batch norm whose statistics are included."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (-1, *[1] * (x.dim() - 2))
        return x * self.weight.view(shape) + self.bias.view(shape)


@torch.no_grad()
def replace_norms(module: nn.Module, kind: Kind) -> nn.Module:
    """Replace batch norms in place, and return the module. Those without statistics stay with `keep`."""
    for path, part in list(module.named_modules()):
        if isinstance(part, _BatchNorm) and not (kind == "keep" and part.running_mean is None):
            norm = _replaced(part, kind)
            if type(part).forward is not _BatchNorm.forward:
                _check_subclass(part, path)
                # timm's norms end with dropout and an activation
                for name, child in part.named_children():
                    norm.add_module(name, child)
                norm.register_forward_hook(_through_children)
            if not path:
                return norm
            module.set_submodule(path, norm)
    return module


def _replaced(part: _BatchNorm, kind: Kind) -> nn.Module:
    channels = part.num_features
    if kind == "group":
        norm = nn.GroupNorm(math.gcd(GROUPS, channels), channels)
    else:
        norm = StaticBatchNorm(channels) if kind == "static_bn" else Affine(channels)
    if part.weight is not None:
        norm.weight, norm.bias = part.weight, part.bias
    norm.eps = part.eps
    if isinstance(norm, Affine):
        assert part.running_mean is not None and part.running_var is not None
        weight, bias = _included(norm.weight, norm.bias, part.running_mean, part.running_var, part.eps)
        norm.weight.copy_(weight)
        norm.bias.copy_(bias)
    return norm


def _included(
    weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    weight = weight * (var + eps).rsqrt()
    return weight, bias - mean * weight


def without_statistics(tensors: Params, module: nn.Module, kind: Kind) -> Params:
    """Return the state of a network with batch norms as that of `module`, which has norms of a kind."""
    found = dict(tensors)
    for path, norm in module.named_modules():
        mean, var = (found.get(f"{path}{suffix}") for suffix in STATISTICS)
        if isinstance(norm, Affine) and mean is not None and var is not None:
            names = f"{path}.weight", f"{path}.bias"
            start = found.get(names[0], torch.ones_like(var)), found.get(names[1], torch.zeros_like(var))
            found |= dict(zip(names, _included(*start, mean, var, norm.eps), strict=True))
        if not isinstance(norm, StaticBatchNorm) and kind != "static_bn":
            for suffix in STATISTICS:
                found.pop(f"{path}{suffix}", None)
    return found


def _through_children(norm: nn.Module, _: object, y: torch.Tensor) -> torch.Tensor:
    for child in norm.children():
        y = child(y)
    return y


def _check_subclass(part: _BatchNorm, path: str) -> None:
    """Raise Untraceable if a subclass computes other than a batch norm and, after it, its children."""
    own = copy.deepcopy(part).to_empty(device="cpu").eval()
    for t in (*own.parameters(), *own.buffers()):
        t.fill_(1.5)
    shape = (2, own.num_features, *[3] * (1 + isinstance(part, nn.BatchNorm2d)))
    x = torch.linspace(-2, 2, math.prod(shape), device="cpu").view(shape)
    y = F.batch_norm(x, own.running_mean, own.running_var, own.weight, own.bias, own.running_mean is None, eps=own.eps)
    if not torch.equal(own(x), _through_children(own, None, y)):
        raise Untraceable(
            f"{path} ({type(part).__name__}) computes more than a batch norm, so that no norm without running "
            "statistics can replace it"
        )
