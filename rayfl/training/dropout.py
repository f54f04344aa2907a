"""Dropout of clients that train side by side, with the random numbers of each client alone.

Inside `torch.vmap` an operation that draws would use one generator for all clients, or is refused. torch draws in the
order of memory, which stacked clients lack: convolutions of images alone, for example, have channels last. So the
orders are those that a client alone shows.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

Order = tuple[int, ...]
"""Dimensions of a tensor, that of the largest stride first."""


class Dropout(TorchFunctionMode):
    """A block with one forward pass, in which dropout of stacked clients draws from their `generators`, in the order of
    the stack. `orders`: of the inputs of all calls, as `seen`."""

    def __init__(self, orders: Sequence[Order] | None, generators: Sequence[torch.Generator]):
        super().__init__()
        self.generators, self.orders = generators, orders
        self.seen: list[Order] = []
        """Orders in which the calls until now drew."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.dropout:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p in (0, 1):
            return F.dropout(input, p, training, inplace)
        order = _order(input) if self.orders is None else self.orders[len(self.seen)]
        self.seen.append(order)
        factors = cast(torch.Tensor, _Factors.apply(input.detach(), 1 - p, order, self.generators))
        return input.mul_(factors) if inplace else input * factors


class _Factors(torch.autograd.Function):
    """0, or 1 / keep with probability `keep`, in the shape of x."""

    @staticmethod
    def forward(x: torch.Tensor, keep: float, order: Order, generators: Sequence[torch.Generator]) -> torch.Tensor:
        if len(generators) > 1:
            raise ValueError("dropout of values that are the same for all clients")
        return _drawn(x, keep, order, generators[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[torch.Tensor, int]:
        x, keep, order, generators = args
        parts = zip(x.unbind(in_dims[0]), generators, strict=True)
        return torch.stack([_drawn(part, keep, order, generator) for part, generator in parts]), 0


def _order(x: torch.Tensor) -> Order:
    return tuple(sorted(range(x.dim()), key=lambda d: -x.stride(d)))


def _drawn(x: torch.Tensor, keep: float, order: Order, generator: torch.Generator) -> torch.Tensor:
    factors = torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device)
    return factors.bernoulli_(keep, generator=generator).div_(keep)
