"""Named tensors: the dicts that states, payloads and updates are made of, and one flat buffer for the wire.

`Params` is a flat dict (parameter name -> tensor); `Tensors` nests such dicts. Nothing here knows what
the tensors mean.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

Params = dict[str, torch.Tensor]
Tensors = Mapping[str, "torch.Tensor | Tensors"]

SEPARATOR = "/"


def leaves(tensors: Tensors, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with its path ("params/conv1.weight"), in the order of the dicts."""
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor):
            yield prefix + name, value
        else:
            yield from leaves(value, prefix + name + SEPARATOR)


def nest(flat: Mapping[str, torch.Tensor]) -> dict:
    """The inverse of `leaves`."""
    nested: dict = {}
    for path, tensor in flat.items():
        *parents, name = path.split(SEPARATOR)
        level = nested
        for parent in parents:
            level = level.setdefault(parent, {})
        level[name] = tensor
    return nested


def nbytes(tensors: Tensors) -> int:
    return sum(t.numel() * t.element_size() for _, t in leaves(tensors))


@dataclass(frozen=True)
class Packed:
    """Tensors as one flat buffer per dtype: what is put into the object store or sent back."""

    header: tuple[tuple[str, str, tuple[int, ...]], ...]
    buffers: dict[str, np.ndarray]


def pack(tensors: Tensors) -> Packed:
    """Copies every tensor once, into one buffer per dtype."""
    found = list(leaves(tensors))
    sizes: dict[str, int] = {}
    for _, tensor in found:
        dtype = str(tensor.dtype).removeprefix("torch.")
        sizes[dtype] = sizes.get(dtype, 0) + tensor.numel()
    flat = {dtype: torch.empty(n, dtype=getattr(torch, dtype)) for dtype, n in sizes.items()}
    used = dict.fromkeys(sizes, 0)
    header = []
    for path, tensor in found:
        dtype = str(tensor.dtype).removeprefix("torch.")
        start = used[dtype]
        flat[dtype][start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
        used[dtype] += tensor.numel()
        header.append((path, dtype, tuple(tensor.shape)))
    return Packed(tuple(header), {dtype: buffer.numpy() for dtype, buffer in flat.items()})


def unpack(packed: Packed) -> dict:
    """Views of the buffers, nested as they were.

    **Read only**: a buffer may be shared by every process of the node, and torch would write through it.
    """
    buffers = {dtype: as_tensor(buffer) for dtype, buffer in packed.buffers.items()}
    used = dict.fromkeys(buffers, 0)
    flat = {}
    for path, dtype, shape in packed.header:
        size = math.prod(shape)
        flat[path] = buffers[dtype][used[dtype] : used[dtype] + size].view(shape)
        used[dtype] += size
    return nest(flat)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A view of an array that may be read-only. torch has no read-only tensors: never write to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
