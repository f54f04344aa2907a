"""Nested dicts of tensors (states, payloads, updates), and serialisation of objects as flat buffers.

`Params` is a flat dict (parameter name -> tensor); `Tensors` are nested dicts of them.
"""

import functools
import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch

Params = dict[str, torch.Tensor]
Tensors = Mapping[str, "torch.Tensor | Tensors"]

SEPARATOR = "/"


def leaves(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor with its path ("params/conv1.weight"), in the order of the dicts."""
    return ((path, t) for path, t in places(tensors) if t is not None)


def places(tensors: Tensors, prefix: str = "") -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield `leaves`, and ("group/", None) for a dict without entries."""
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor):
            yield prefix + name, value
        else:
            path = prefix + name + SEPARATOR
            yield from places(value, path) if value else [(path, None)]


def nest(flat: Mapping[str, torch.Tensor | None]) -> dict:
    """Return nested dicts; the inverse of `places`."""
    nested: dict = {}
    for path, tensor in flat.items():
        *parents, name = path.split(SEPARATOR)
        level = nested
        for parent in parents:
            level = level.setdefault(parent, {})
        if name:
            level[name] = tensor
    return nested


def norm(tensors: Iterable[Tensors]) -> float:
    """Return the L2 norm of all floating point tensors together."""
    floats = [t for some in tensors for _, t in leaves(some) if t.is_floating_point()]
    if not floats:
        return 0.0
    joined = end_to_end(floats)
    return float(torch.nn.utils.get_total_norm(floats) if joined is None else torch.linalg.vector_norm(joined))


class Lazy(Mapping[str, torch.Tensor]):
    """Tensors that are computed on first access."""

    def __init__(self, names: Iterable[str], compute: Callable[[str], torch.Tensor]):
        self._names, self._compute = dict.fromkeys(names), functools.cache(compute)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._compute(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def prefixed(prefix: str, params: Params) -> Params:
    return {f"{prefix}.{name}": t for name, t in params.items()}


def below(prefix: str, params: Mapping[str, Any]) -> Params:
    """Return the tensors whose names begin with a prefix, without it; the inverse of `prefixed`."""
    return {name.removeprefix(f"{prefix}."): t for name, t in params.items() if name.startswith(f"{prefix}.")}


def nbytes(tensors: Tensors) -> int:
    return sum(t.numel() * t.element_size() for _, t in leaves(tensors))


@dataclass(frozen=True)
class Packed:
    """A serialised object: tensors as flat buffers, and a header with everything else. The header is a pickle: only for
    messages inside a trusted cluster, never for files."""

    header: bytes
    buffers: dict[str, np.ndarray]
    """One buffer per dtype, by its name, and one per large tensor, by a number."""


LARGE = 1 << 20
"""Minimum bytes of a contiguous tensor to send it without a copy."""


@torch.no_grad()
def pack(value: Any) -> Packed:
    """Serialise any object. Large tensors are not copied and have one buffer each; the others are copied into one
    buffer per dtype. The object must not change before it is sent."""
    header = io.BytesIO()
    pickler = _Pickler(header)
    pickler.dump(value)
    flat = {dtype: torch.empty(n, dtype=getattr(torch, dtype)) for dtype, n in pickler.used.items()}
    for tensor, (dtype, start, shape) in pickler.copied:
        flat[dtype][start : start + tensor.numel()].view(shape).copy_(tensor)
    buffers = flat | {str(i): tensor.detach().view(-1) for i, tensor in enumerate(pickler.large)}
    return Packed(header.getvalue(), {name: buffer.numpy() for name, buffer in buffers.items()})


def unpack(packed: Packed) -> Any:
    """Return the object; its tensors are views of the buffers. **Read only**: processes can share a buffer, and torch
    does not protect it from writes."""
    return _Unpickler(packed).load()


Place = tuple[str, int, tuple[int, ...]]
"""Location of a tensor: name of its buffer, offset of its first element, shape."""


class _Pickler(cloudpickle.Pickler):
    """A pickler that extracts tensors. Classes of a notebook are pickled by value."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.used: dict[str, int] = {}
        # keep references to tensors that a __reduce__ created
        self.copied: list[tuple[torch.Tensor, Place]] = []
        self.large: list[torch.Tensor] = []
        self.places: dict[int, Place] = {}

    def persistent_id(self, obj: Any) -> Place | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self.places:
            self.places[id(obj)] = self._place(obj)
        return self.places[id(obj)]

    def _place(self, tensor: torch.Tensor) -> Place:
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if tensor.nbytes >= LARGE and tensor.is_contiguous() and tensor.device.type == "cpu":
            self.large.append(tensor)
            return str(len(self.large) - 1), 0, shape
        place = dtype, self.used.get(dtype, 0), shape
        self.used[dtype] = place[1] + tensor.numel()
        self.copied.append((tensor, place))
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: Packed):
        super().__init__(io.BytesIO(packed.header))
        self.buffers = {name: as_tensor(buffer) for name, buffer in packed.buffers.items()}

    def persistent_load(self, pid: Place) -> torch.Tensor:
        name, start, shape = pid
        return self.buffers[name][start : start + math.prod(shape)].view(shape)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a view of an array. Never write to it: the array can be read-only, but torch has no read-only tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


ALIGNED = 64
"""Bytes of a cache line. Tensors that torch allocates begin at a multiple, those of a message anywhere."""


@torch.no_grad()
def laid_out(tensors: Tensors) -> dict[str, Any]:
    """Return nested tensors in one layout, whether they are views of a state or of a message: contiguous, small ones in
    one buffer per dtype. Results of kernels can depend on strides and alignment. Read only: large tensors are not
    copied if they are contiguous and aligned."""
    flat = dict(places(tensors))
    small: dict[tuple[torch.dtype, torch.device], dict[str, torch.Tensor]] = {}
    for path, t in flat.items():
        if t is None:
            continue
        if t.nbytes < LARGE:
            small.setdefault((t.dtype, t.device), {})[path] = t
        elif not t.is_contiguous() or t.data_ptr() % ALIGNED:
            flat[path] = t.clone(memory_format=torch.contiguous_format)
    for some in small.values():
        joined = torch.cat([t.reshape(-1) for t in some.values()])
        flat |= zip(some, split_as(joined, list(some.values())), strict=True)
    return nest(flat)


@torch.no_grad()
def as_vector(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors of one dtype as one vector [n]; they become views of it. Adjacent tensors are not copied."""
    if not tensors:
        return torch.zeros(0)
    joined = end_to_end(tensors)
    if joined is None:
        joined = torch.cat([t.reshape(-1) for t in tensors])
        for t, part in zip(tensors, split_as(joined, tensors), strict=True):
            t.data = part
    return joined


def end_to_end(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return tensors that are adjacent in memory as one vector [n] without a copy; None if they are not adjacent."""
    memory, dtype = tensors[0].untyped_storage().data_ptr(), tensors[0].dtype
    place = tensors[0].storage_offset()
    for t in tensors:
        if t.untyped_storage().data_ptr() != memory or t.storage_offset() != place:
            return None
        if t.dtype != dtype or not t.is_contiguous():
            return None
        place += t.numel()
    size = place - tensors[0].storage_offset()
    return tensors[0].detach().as_strided((size,), (1,))


def split_as(vector: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a vector [n] in the tensors' shapes and order."""
    parts = vector.split([t.numel() for t in tensors])
    return [part.view_as(t) for t, part in zip(tensors, parts, strict=True)]


def copied(params: Params, factor: float = 1.0) -> Params:
    """Return factor * params in new CPU tensors, which are adjacent in memory if the parameters are."""

    def fresh(t: torch.Tensor) -> torch.Tensor:
        return (t * factor).cpu() if factor != 1 else t.to("cpu", copy=True)

    tensors = list(params.values())
    joined = end_to_end(tensors) if len(tensors) > 1 else None
    if joined is None:
        return {name: fresh(t) for name, t in params.items()}
    return dict(zip(params, split_as(fresh(joined), tensors), strict=True))
