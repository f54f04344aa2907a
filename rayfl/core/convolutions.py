"""Convolutions around an error of torch.

On CPUs with AVX2 and without AVX-512, oneDNN of torch 2.15 writes outside of its memory when it computes the gradient
of a 1x1 convolution with a stride, fewer than 8 input channels and channels-last inputs: the process ends with
"corrupted size vs. prev_size" or a segmentation fault. Narrow residual networks have such convolutions in their
shortcuts. Here they select the pixels of the stride first and have none: the same outputs and gradients.
"""

from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS = 8
"""Input channels from which on the gradient is right (measured with 1 to 30 channels)."""

M = TypeVar("M", bound=nn.Module)


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: tuple[int, ...],
    padding: str | tuple[int, ...] = (0, 0),
    groups: int = 1,
) -> torch.Tensor:
    """Return `F.conv2d` of x [B, C, H, W]."""
    if _is_affected(weight, stride, padding):
        x, stride = x[..., :: stride[0], :: stride[1]], (1, 1)
    return F.conv2d(x, weight, bias, stride, padding, groups=groups)


def _is_affected(weight: torch.Tensor, stride: tuple[int, ...], padding: str | tuple[int, ...]) -> bool:
    _, inputs, *kernel = weight.shape
    return kernel == [1, 1] and inputs < CHANNELS and max(stride) > 1 and padding == (0, 0)


class _Conv2d(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return conv2d(input, self.weight, self.bias, self.stride, self.padding, self.groups)


def safe(network: M) -> M:
    """Change the affected convolutions of a network, in place, and return it."""
    for layer in network.modules():
        if type(layer) is nn.Conv2d and _is_affected(layer.weight, layer.stride, layer.padding):
            layer.__class__ = _Conv2d
    return network
