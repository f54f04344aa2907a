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


def _is_affected(layer: nn.Conv2d) -> bool:
    is_pointwise = layer.kernel_size == (1, 1) and layer.padding in ((0, 0), "valid") and layer.groups == 1
    return is_pointwise and layer.in_channels < CHANNELS and max(layer.stride) > 1


class _Conv2d(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        down, right = self.stride
        return F.conv2d(input[..., ::down, ::right], self.weight, self.bias)


def safe(network: M) -> M:
    """Change the affected convolutions of a network, in place, and return it."""
    for layer in network.modules():
        if type(layer) is nn.Conv2d and _is_affected(layer):
            layer.__class__ = _Conv2d
    return network
