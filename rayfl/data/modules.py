"""Parts of the modules around a network that `torch.export` takes (`Prepare.module`, `Goal.module`)."""

from collections.abc import Sequence

import torch
from torch import nn

from rayfl.config import shown


class Constants(nn.Module):
    """Base of modules with constants, which are buffers outside of the state."""

    def __init__(self, shape: tuple[int, ...], **constants: Sequence[float]):
        """Keep constants as tensors of this shape."""
        super().__init__()
        for name, values in constants.items():
            self.register_buffer(name, torch.tensor(values).view(shape), persistent=False)

    def extra_repr(self) -> str:
        found = {name: [round(value, 4) for value in t.flatten().tolist()] for name, t in self.named_buffers()}
        return ", ".join(f"{name}={shown(values)}" for name, values in found.items())


def as_numbers(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of x of the default type. A program that is exported with it takes numbers of any type."""
    return torch.empty(x.shape, device=x.device).copy_(x)
