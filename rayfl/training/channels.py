"""Images of clients that train side by side: the channels of all clients beside one another, and last in memory.

Convolutions of stacked clients return this layout. `torch.vmap` copies it for every pooling, and multiplies by the
weights of norms in steps of their own. Where clients count as channels, it need not (`scripts/bench_step.py --only
company` times the steps).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._C._functorch as functorch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

ACTS: dict[Any, int] = dict.fromkeys((F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d), 0)
ACTS[torch.batch_norm] = 4
"""Function of images -> number of the vectors [C] that are its next arguments."""


def side_by_side(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the inputs of k clients [B, ...] as [k, B, ...], images [B, C, H, W] with the channels of all clients last
    in memory."""
    if inputs[0].dim() != 4:
        return torch.stack(list(inputs))
    return torch.stack([x.movedim(1, -1) for x in inputs], 3).movedim((3, 4), (0, 2))


class Channels(TorchFunctionMode):
    """A block in which stacked clients pool and normalise images as channels."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, tensors = kwargs or {}, 1 + ACTS.get(func, 0)
        if func not in ACTS or len(args) < tensors or kwargs.get("return_indices"):
            return func(*args, **kwargs)
        if args[0].dim() != 4 or not functorch.is_batchedtensor(args[0]):
            return func(*args, **kwargs)
        return _as_channels(lambda *given: func(*given, *args[tensors:], **kwargs), *args[:tensors])


def _as_channels(act: Callable[..., torch.Tensor], x: torch.Tensor, *vectors: torch.Tensor | None) -> torch.Tensor:
    """Return act(x, *vectors) of images x [B, C, H, W] and vectors [C] or None.

    `torch.autograd.Function.vmap` would do the same without private functions, and take 150 microseconds per call."""
    stacked = functorch.get_unwrapped(x)
    images = stacked.movedim(functorch.maybe_get_bdim(x), 1)
    joined = [v if v is None else _stacked(v).flatten() for v in vectors]
    y = act(images.flatten(1, 2), *joined).unflatten(1, (images.shape[1], -1))
    return functorch._add_batch_dim(y, 1, functorch.maybe_get_level(x))


def _stacked(vector: torch.Tensor) -> torch.Tensor:
    """Return the vectors of all clients [k, C]."""
    if not functorch.is_batchedtensor(vector):
        raise ValueError("a vector that is the same for all clients")
    return functorch.get_unwrapped(vector).movedim(functorch.maybe_get_bdim(vector), 0)
