"""Submodels as selections S of coordinates of the global parameters x.

    take   S x       parameters sent to the client
    put    S^T y     the client's parameters in the server's shapes
    cover  S^T 1     coordinates that the client holds

A `Slice` selects positions of named axes and gives a small dense network; a `Mask` selects single coordinates of a
network of full shape. See `rayfl.core.fold` for the aggregation.
"""

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import torch

from rayfl.core.axes import Axis, Concat, Dims, Layout, segments
from rayfl.core.bitcodes import decode_places, encode_places
from rayfl.core.net import Net
from rayfl.core.tensors import Lazy, Params


@dataclass(frozen=True)
class Window:
    """`count` consecutive positions from `start`, modulo `size`."""

    start: int
    count: int
    size: int

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple((self.start + u) % self.size for u in range(self.count))

    def runs(self) -> list[tuple[int, int, int]]:
        """Return (start in the whole, start in the part, length) per run: one, or two if the window wraps."""
        first = min(self.count, self.size - self.start)
        runs = [(self.start, 0, first)]
        return runs if first == self.count else [*runs, (0, first, self.count - first)]


@dataclass(frozen=True)
class Picks:
    """Any distinct positions, in any order."""

    positions: tuple[int, ...]
    size: int
    groups: int = 1
    """1: the same positions in every group of the axis. More: the concatenated positions of this many groups."""

    @property
    def count(self) -> int:
        """Number of positions per group."""
        return len(self.positions) // self.groups


Positions = Window | Picks


class Selection(ABC):
    """The coordinates that one client holds. Selections are equal if their `key`s are equal."""

    net: Net
    """Network of the selected parameters."""
    key: Hashable

    @abstractmethod
    def take(self, params: Params) -> Params:
        """Return S x. Read only, because results can be views of `params`."""

    @abstractmethod
    def put(self, part: Params, whole: Params, alpha: float = 1.0) -> None:
        """Add alpha * S^T part to `whole`, in place. Names that `part` lacks are ignored."""

    @abstractmethod
    def mark(self, name: str, value: float | torch.Tensor, whole: torch.Tensor) -> None:
        """Add value * S^T 1 to one tensor, in place. `value`: a number, or broadcastable to the part."""

    @abstractmethod
    def covers(self, name: str) -> bool:
        """Return whether the selection contains every coordinate of the tensor."""

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the server's tensors. Tensors that are missing here are selected whole."""

    @property
    def nbytes(self) -> int:
        """Bytes to send the selection itself; 0 if it follows from the network."""
        return 0

    def spread(self, part: Params) -> Params:
        """Return S^T part, in new tensors of the server's shapes."""
        whole = {name: t.new_zeros(self.shapes.get(name, t.shape)) for name, t in part.items()}
        self.put(part, whole)
        return whole

    def cover(self, params: Params) -> Params:
        """Return S^T 1 in the shapes of `params`: 1 for selected coordinates, otherwise 0."""
        cover = {name: torch.zeros_like(t) for name, t in params.items()}
        for name, t in cover.items():
            self.mark(name, 1.0, t)
        return cover


@dataclass(frozen=True)
class Slice(Selection):
    """Positions of every cuttable axis of the network `whole`, for parameters and running statistics. Tensors that
    `net` lacks are not selected. A contiguous window is a view; a window that wraps is copied."""

    whole: Net
    """Network of the server."""
    net: Net
    positions: Mapping[str, Positions]
    """Axis -> selected positions. A fixed axis (classes) is whole if it is missing here; otherwise, its positions from
    `size` of the given positions are also selected."""
    names: tuple[str, ...] | None = None
    """Selected tensors; None: all tensors of `net`."""
    tied: bool = True
    """False: the output of every layer has its own axis, as in `untied`."""

    def __post_init__(self) -> None:
        sizes = {name: axis.size for name, axis in self.part_layout.axes.items()}
        given = {name: self.positions[name].count for name in sizes}
        if sizes != given:
            wrong = {n: (given[n], sizes[n]) for n in sizes if given[n] != sizes[n]}
            raise ValueError(f"positions do not match the network, axis: (positions, network) {wrong}")

    @property
    def whole_layout(self) -> Layout:
        return _layout(self.whole, None, self.tied)

    @property
    def part_layout(self) -> Layout:
        """Layout of the selected tensors."""
        return _layout(self.net, self.names, self.tied)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.whole_layout.shapes

    @property
    def key(self) -> Hashable:
        return (self.net, self.names, self.tied, *sorted(self.positions.items()))

    def __getstate__(self) -> dict:
        # without cached indices and layouts
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def take(self, params: Params) -> Params:
        return {name: self._take(name, params[name]) for name in self.part_layout.dims if name in params}

    def put(self, part: Params, whole: Params, alpha: float = 1.0) -> None:
        for name, t in part.items():
            self._add(name, t, whole[name], alpha)

    def mark(self, name: str, value: float | torch.Tensor, whole: torch.Tensor) -> None:
        if name in self.part_layout.dims:
            value = torch.as_tensor(value, dtype=whole.dtype, device=whole.device)
            self._add(name, value.expand(self.part_layout.shapes[name]), whole, 1.0)

    def covers(self, name: str) -> bool:
        return self.part_layout.shapes.get(name) == self.whole_layout.shapes[name]

    def _take(self, name: str, t: torch.Tensor) -> torch.Tensor:
        if (picks := self._picks.get(name)) is not None:
            for dim, index in picks:
                t = t.index_select(dim, index)
            return t
        whole = _grouped(t, self.whole_layout.dims[name])
        blocks = self._plan[name]
        if len(blocks) == 1:
            return whole[blocks[0][0]].reshape(self.part_layout.shapes[name])
        part = t.new_empty(self.part_layout.shapes[name])
        grouped = _grouped(part, self.part_layout.dims[name])
        for source, target in blocks:
            grouped[target] = whole[source]
        return part

    def _add(self, name: str, part: torch.Tensor, t: torch.Tensor, alpha: float) -> None:
        if (picks := self._picks.get(name)) is not None:
            _index_add(t, picks, part, alpha)
            return
        whole = _grouped(t, self.whole_layout.dims[name])
        part = _grouped(part, self.part_layout.dims[name])
        for target, source in self._plan[name]:
            whole[target].add_(part[source], alpha=alpha)

    @functools.cached_property
    def _picks(self) -> dict[str, list[tuple[int, torch.Tensor]]]:
        """(dimension, index) of all cut dimensions, for tensors with single positions; cached for aggregation."""
        found = {}
        for name in self.part_layout.dims:
            dims = enumerate(self.whole_layout.dims[name])
            cut = [(d, dim) for d, dim in dims if dim and any(a.name in self.positions for _, a in segments(dim))]
            if any(isinstance(dim, Concat) or isinstance(self.positions[dim.name], Picks) for _, dim in cut):
                found[name] = [(d, _index(dim, self.positions)) for d, dim in cut]
        return found

    @functools.cached_property
    def _plan(self) -> dict[str, list[tuple[tuple[slice, ...], tuple[slice, ...]]]]:
        """Contiguous blocks of all other tensors."""
        return {name: self._blocks(name) for name in self.part_layout.dims if name not in self._picks}

    def _blocks(self, name: str) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Return (index in the whole, index in the part) of every contiguous block, in `_grouped` shape."""
        everything = [(slice(None), slice(None))]
        options = []
        for axis in self.whole_layout.dims[name]:
            if axis is None or axis.is_fixed:
                options.append(everything)
                continue
            assert isinstance(axis, Axis)
            if axis.groups > 1:
                options.append(everything)
            window = self.positions[axis.name]
            assert isinstance(window, Window)
            runs = [tuple(n * axis.copies for n in run) for run in window.runs()]
            options.append([(slice(w, w + n), slice(p, p + n)) for w, p, n in runs])
        return [(tuple(w for w, _ in block), tuple(p for _, p in block)) for block in itertools.product(*options)]


def _index(dim: Axis | Concat, positions: Mapping[str, Positions]) -> torch.Tensor:
    """Return the selected indices along a tensor dimension."""
    parts = [
        start + (_along(axis, positions[axis.name]) if axis.name in positions else torch.arange(axis.length))
        for start, axis in segments(dim)
    ]
    return torch.cat(parts)


def _along(axis: Axis, positions: Positions) -> torch.Tensor:
    """Return the indices of `positions` along an axis."""
    selected = torch.tensor([*positions.positions, *range(positions.size, axis.size)], dtype=torch.int64)
    inside = selected[:, None] * axis.copies + torch.arange(axis.copies)
    # picks in several groups repeat in an axis with a multiple of them (queries, keys and values of all heads)
    own = positions.groups if isinstance(positions, Picks) else 1
    groups = torch.arange(axis.groups // own)[:, None] * (own * axis.size * axis.copies)
    return (groups + inside.flatten()).flatten()


def _index_add(t: torch.Tensor, picks: list[tuple[int, torch.Tensor]], part: torch.Tensor, alpha: float) -> None:
    """Add alpha * part to t[picks], in place, by dimension: rows are 20 times faster than single positions."""
    (dim, index), *rest = picks
    if not rest:
        t.index_add_(dim, index, part, alpha=alpha)
        return
    rows = t.index_select(dim, index)
    _index_add(rows, rest, part, alpha)
    t.index_copy_(dim, index, rows)


def _grouped(t: torch.Tensor, dims: Dims) -> torch.Tensor:
    """Return a view with a separate dimension for the groups of every grouped axis."""
    shape: list[int] = []
    for axis, size in zip(dims, t.shape, strict=True):
        groups = axis.groups if isinstance(axis, Axis) and not axis.is_fixed else 1
        shape += [groups, size // groups] if groups > 1 else [size]
    return t.view(shape) if len(shape) != t.dim() else t


@dataclass(frozen=True)
class Mask(Selection):
    """Single coordinates of a network of full shape: `take` returns a masked tensor as the vector [k] of its selected
    elements, in order. A mask is sent as codes of its places (`rayfl.core.bitcodes`)."""

    net: Net
    key: Hashable
    places: Mapping[str, torch.Tensor] = field(repr=False, compare=False)
    """Masked tensor -> selected flat positions [k] int64, ascending, read only. Other tensors are selected whole."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.net.full_layout.shapes

    def take(self, params: Params) -> Params:
        return {
            name: t.reshape(-1).index_select(0, self.places[name]) if name in self.places else t
            for name, t in params.items()
        }

    def put(self, part: Params, whole: Params, alpha: float = 1.0) -> None:
        for name, t in part.items():
            self.mark(name, t if alpha == 1 else alpha * t, whole[name])

    def mark(self, name: str, value: float | torch.Tensor, whole: torch.Tensor) -> None:
        if name in self.places:
            places = self.places[name]
            whole.view(-1).index_add_(0, places, torch.as_tensor(value, dtype=whole.dtype).expand(len(places)))
        else:
            whole.add_(value)

    def covers(self, name: str) -> bool:
        return name not in self.places or len(self.places[name]) == math.prod(self.net.layout.shapes[name])

    @property
    def nbytes(self) -> int:
        return sum(len(code) for code in self._codes.values())

    @functools.cached_property
    def _codes(self) -> dict[str, torch.Tensor]:
        shapes = self.net.layout.shapes
        return {name: encode_places(places, math.prod(shapes[name])) for name, places in self.places.items()}

    def __reduce__(self):
        return _received, (self.net, self.key, self._codes)


def _received(net: Net, key: Hashable, codes: dict[str, torch.Tensor]) -> Mask:
    shapes = net.layout.shapes
    mask = Mask(net, key, Lazy(codes, lambda name: decode_places(codes[name], math.prod(shapes[name]))))
    object.__setattr__(mask, "_codes", codes)
    return mask


@functools.lru_cache(maxsize=512)
def prefix(whole: Net, net: Net) -> Slice:
    """Return the first positions of every axis (HeteroFL Algorithm 1)."""
    return rolling(whole, net, 0)


def rolling(whole: Net, net: Net, offset: int) -> Slice:
    """Return positions offset, offset + 1, ... modulo the size of each axis (FedRolex)."""
    return windows(whole, net, dict.fromkeys(net.layout.axes, offset))


def windows(whole: Net, net: Net, offsets: Mapping[str, int]) -> Slice:
    """Return a window of every axis, from its offset modulo its size. Windows of whole axes start at 0: they are views,
    and training of the whole network is FedAvg bit for bit."""
    positions = {}
    for name, axis in net.layout.axes.items():
        size = whole.layout.axes[name].size
        start = offsets[name] % size if axis.size < size else 0
        positions[name] = Window(start, axis.size, size)
    return Slice(whole, net, positions)


def random_subset(
    whole: Net, net: Net, generator: torch.Generator, *, ordered: bool = True, tied: bool = True
) -> Slice:
    """Return a uniform random subset of every axis, one draw per axis (Federated Dropout), ascending if `ordered`.
    Whole axes are views without a draw, as in `windows`. `tied=False`: one draw per layer."""
    sizes = _layout(whole, None, tied).axes
    positions: dict[str, Positions] = {}
    for name, axis in sorted(_layout(net, None, tied).axes.items()):
        size = sizes[name].size
        if axis.size == size:
            positions[name] = Window(0, size, size)
        else:
            drawn = torch.randperm(size, generator=generator)[: axis.size].tolist()
            positions[name] = Picks(tuple(sorted(drawn) if ordered else drawn), size)
    return Slice(whole, net, positions, tied=tied)


def largest(values: torch.Tensor, count: int) -> Positions:
    """Return the positions of the `count` largest elements of `values` [K], ascending; ties: the first. All K are a
    window, whose tensors are views, so that training equals FedAvg bit for bit."""
    size = len(values)
    if count == size:
        return Window(0, size, size)
    order = values.argsort(descending=True, stable=True)
    return Picks(tuple(order[:count].sort().values.tolist()), size)


@functools.lru_cache(maxsize=512)
def _layout(net: Net, names: tuple[str, ...] | None, tied: bool) -> Layout:
    """Return the layout of a network's tensors, or of `names` only."""
    layout = net.full_layout if tied else untied(net.layout)
    if names is None:
        return layout
    return Layout({name: layout.dims[name] for name in names}, {name: layout.shapes[name] for name in names})


def untied(layout: Layout) -> Layout:
    """Return the layout with a separate axis ("stage1@1", "stage1@2", ...) for the output of every convolution or
    linear layer, as if there were no residual additions.

    Parameters are in the order of the network: inputs, biases and norms have the axis of the last output. A projection
    shortcut reads another axis than the last output and gets no new axis, because it is added to that output.
    """
    given: Counter[str] = Counter()
    last = None

    def named(dim: Axis | Concat | None) -> Axis | Concat | None:
        if isinstance(dim, Concat):
            return Concat(tuple(cast(Axis, named(axis)) for axis in dim.parts))
        return dim if dim is None or dim.is_fixed else replace(dim, name=f"{dim.name}@{given[dim.name]}")

    dims = {}
    for name, axes in layout.dims.items():
        if not axes:
            dims[name] = axes
            continue
        first, *rest = axes
        inputs = [named(axis) for axis in rest]
        if rest and first is not None and not first.is_fixed:
            reads = rest[0].name if rest[0] is not None else None
            if last is None or reads == last:
                given[first.name] += 1
            last = first.name
        dims[name] = (named(first), *inputs)
    return Layout(dims, layout.shapes)


class Coverage:
    """Counts of how often each coordinate of the global parameters was selected."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        self.counts = {name: torch.zeros(shape) for name, shape in shapes.items()}

    def add(self, selection: Selection) -> None:
        for name, count in self.counts.items():
            selection.mark(name, 1.0, count)

    def share(self) -> float:
        """Return the fraction of coordinates that were selected at least once."""
        counts = self.counts.values()
        return sum(int((count > 0).sum()) for count in counts) / sum(count.numel() for count in counts)
