"""Which positions of a network's tensors are cut together, from one forward pass on the meta device.

Every position of every dimension of a parameter has a number. Numbers move with the data: an output has those of the
weights' rows, a view, a concatenation or a transposition moves them, an addition of two maps makes their numbers equal,
and so does a weight that reads a map. Number 0 stands for what is never cut: the channels of an image, a vocabulary,
and whatever an operation without a rule receives. Operations are those of ATen, below `torch.nn` and
`torch.nn.functional`, so that it does not matter how a network is written. Nothing is computed.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.backends import mha
from torch.utils._python_dispatch import TorchDispatchMode

from rayfl.models.inferred.rules import FACTORIES, RULES, UNARY, Layer, along_which, compact, flat, keeps_zeros


class Untraceable(ValueError):
    """A network that does not run on the meta device."""

    path = ""
    """Module that was running."""
    reason = ""
    done = 0
    """Number of operations before the error."""


class Misnamed(ValueError):
    """A path that a field of the model names and that is not valid."""

    def __init__(self, field: str, problem: str):
        super().__init__(problem)
        self.field = field


class Trace(TorchDispatchMode):
    """Numbers of all tensors that a forward pass makes, and which of them are equal."""

    def __init__(self, module: nn.Module | None, declared: Mapping[str, str] | None = None):
        super().__init__()
        self.declared, self.named = declared or {}, dict[str, np.ndarray]()
        self.count, self.done = 1, 0
        self.pairs: list[tuple[np.ndarray, np.ndarray]] = []
        self.reasons: list[tuple[np.ndarray, str]] = []
        self.joint: dict[Any, Layer] = {}
        self.shared: list[tuple[Layer, Layer]] = []
        """Numbers of channels in heads, and of the heads or of the channels alone, such as those of a norm of queries,
        that meet them. They are equal if that is what is cut."""
        self.rows: list[np.ndarray] = []
        """Numbers of rows that are looked up, such as those of a vocabulary, which are never cut."""
        self.dims: dict[str, list[np.ndarray | None]] = {}
        """Name of a parameter -> the numbers of each dimension. Buffers are constants."""
        self.path = ""
        self._layers: dict[int, tuple[torch.Tensor, list[Layer]]] = {}
        self._known = -1, np.zeros(0, dtype=np.int64)
        self._zeros: set[int] = set()
        """Tensors that would be 0 at positions that are cut, if all parameters were."""
        for name, t in module.named_parameters() if module is not None else ():
            self._number(name, t)

    def _number(self, name: str, t: torch.Tensor) -> None:
        layers, dims = [], []
        for d, size in enumerate(t.shape):
            if size == 1 or not t.is_floating_point():
                dims.append(None)
                continue
            numbers = torch.arange(self.count, self.count + size, device="cpu")
            self.count += size
            dims.append(numbers.numpy())
            layers.append(numbers.view([-1 if i == d else 1 for i in range(t.dim())]))
        self.dims[name] = dims
        self._layers[id(t)] = (t, layers)
        self._zeros.add(id(t))

    # numbers of tensors

    def of(self, t: Any) -> list[Layer]:
        return self._layers[id(t)][1] if isinstance(t, torch.Tensor) and id(t) in self._layers else []

    def has_zeros(self, t: Any) -> bool:
        """Return whether a tensor would be 0 at positions that are cut, if all parameters were."""
        return id(t) in self._zeros

    def give(self, t: torch.Tensor, layers: Sequence[Layer]) -> None:
        kept = [layer for layer in map(compact, layers) if layer.numel() > 1 and bool(layer.any())]
        self._layers[id(t)] = (t, kept)
        for layer in kept:
            if len(along_which(layer)) > 1:
                self.joint[layer.shape, layer.contiguous().numpy().tobytes()] = layer

    def along(self, t: Any, d: int) -> np.ndarray:
        """Return the numbers along one dimension, 0 without any; all positions that share one become equal."""
        size, d = t.shape[d], d % t.dim()
        for layer in self.of(t):
            if layer.shape[d] > 1:
                rows = layer.movedim(d, 0).reshape(size, -1)
                self.equal(rows[:, :1].expand_as(rows), rows)
                return rows[:, 0].numpy()
        return np.zeros(size, dtype=np.int64)

    def equal(self, a: Any, b: Any, reason: str = "") -> None:
        """Record that numbers are equal, elementwise. A number that equals 0 is never cut."""
        a, b = (np.asarray(x).reshape(-1) for x in np.broadcast_arrays(np.asarray(a), np.asarray(b)))
        different = a != b
        if any(self.path == path or self.path.startswith(f"{path}.") for path in self.declared):
            # the user says what is cut here
            different &= (a != 0) & (b != 0)
        if different.any():
            pair = np.unique(np.stack([a[different], b[different]]), axis=1)
            self.pairs.append((pair[0], pair[1]))
            fixed = pair.max(0)[pair.min(0) == 0]
            if len(fixed):
                self.reasons.append((fixed, f"{self.path or 'the network'}: {reason or self.operation}"))

    def fix(self, *layers: Any, reason: str = "") -> None:
        for layer in layers:
            self.equal(layer, np.zeros(1, dtype=np.int64), reason)

    def declare(self, path: str, out: Any) -> None:
        """Give the channels of a module's output the axis that the user declares. Raise Misnamed if they differ from
        those of another module with this axis."""
        if not isinstance(out, torch.Tensor) or out.dim() < 2:
            raise Misnamed(
                "axes", f"{path!r} is not valid. Allowed: modules that return a tensor [B, ..., channels, ...]"
            )
        name, layers = self.declared[path], self.of(out)
        d = channels_of(out, layers)
        if not any(layer.shape[d] > 1 for layer in layers):
            numbers = torch.arange(self.count, self.count + out.shape[d], device="cpu")
            self.count += out.shape[d]
            self.give(out, [*layers, numbers.view([-1 if i == d else 1 for i in range(out.dim())])])
        numbers = self.along(out, d)
        first = self.named.setdefault(name, numbers)
        if len(first) != len(numbers):
            raise Misnamed(
                "axes",
                f"{path!r} has {len(numbers)} channels. Allowed: {len(first)}, as other modules of axis {name!r}",
            )
        self.equal(first, numbers)

    # operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.done += 1
        name = func.overloadpacket.__name__
        self.operation = name
        plain = name.removesuffix("_") if func._schema.is_mutable and name != "_" else name
        tensors = [t for t in flat((args, kwargs or {})) if self.of(t)]
        if not tensors or plain in FACTORIES:
            return out
        rule = RULES.get(plain)
        if rule is not None:
            rule(self, func, args, kwargs or {}, out)
        elif torch.Tag.pointwise in func.tags or plain in UNARY:
            self.pointwise(flat((args, kwargs or {})), out)
        else:
            self.fix(*(layer for t in tensors for layer in self.of(t)), reason=f"no rule for {name}")
        has_zeros = keeps_zeros(self, func, plain, args, kwargs or {}, tensors)
        for t in flat(out):
            (self._zeros.add if has_zeros else self._zeros.discard)(id(t))
        return out

    def pointwise(self, given: Sequence[torch.Tensor], out: Any) -> None:
        for one in flat(out):
            layers: list[Layer] = []
            for t in given:
                if t.dim() > one.dim():
                    continue
                for layer in self.of(t):
                    layers = self.merged(layers, layer.view(*[1] * (one.dim() - t.dim()), *layer.shape))
            kept = []
            for layer in layers:
                varying = set(along_which(layer))
                lacked = set().union(*(self._lacked(t, one.dim(), varying) for t in given))
                if lacked == varying:
                    self.fix(layer)
                    continue
                # such as the angles of a rotary embedding, which are equal in all heads: heads are cut whole
                for d in lacked:
                    self.equal(layer.narrow(d, 0, 1), layer)
                    layer = layer.narrow(d, 0, 1)
                kept.append(layer)
            self.give(one, kept)

    def _lacked(self, t: torch.Tensor, dim: int, varying: set[int]) -> set[int]:
        """Return the dimensions of `varying` along which a tensor, broadcast to `dim` dimensions, has values and no
        numbers."""
        first = dim - t.dim()
        own = {first + d for layer in self.of(t) for d in along_which(layer)}
        return {first + d for d, size in enumerate(t.shape) if size > 1} & varying - own

    def merged(self, layers: list[Layer], new: Layer) -> list[Layer]:
        result = []
        for layer in layers:
            more, fewer = (layer, new) if len(along_which(layer)) > len(along_which(new)) else (new, layer)
            if 0 < len(along_which(fewer)) < len(along_which(more)) and {*along_which(fewer)} < {*along_which(more)}:
                self.shared.append((more, fewer))
                new = more
            elif set(along_which(layer)) & set(along_which(new)):
                a, b = torch.broadcast_tensors(layer, new)
                self.equal(a, b)
                new = torch.where(a != 0, a, b)
            else:
                result.append(layer)
        return [*result, new]

    def contract(self, a: list[Layer], b: list[Layer], has_zeros: bool) -> list[Layer]:
        """Return the numbers of the product of [..., n, k] and [..., k, m]: equal along k. `has_zeros`: of `a` or
        `b`."""
        one, two = [layer.unsqueeze(-1) for layer in a], [layer.unsqueeze(-3) for layer in b]
        left, right = ([x for x in some if x.shape[-2] > 1] for some in (one, two))
        for x in left:
            for y in right:
                self.equal(*(t.numpy() for t in torch.broadcast_tensors(x, y)))
        if not (left and right and has_zeros):
            self.fix(*left, *right)
        kept: list[Layer] = []
        for x in (*one, *two):
            kept = self.merged(kept, x.narrow(-2, 0, 1).squeeze(-2))
        return [layer for layer in kept if layer.numel() > 1]

    # the result

    def components(self) -> np.ndarray:
        """Return the number of the set of every number; 0 for the set of what is never cut."""
        known, labels = self._known
        if known == len(self.pairs):
            return labels
        labels = self._connected()
        while True:
            # heads are cut whole if some of their channels are cut together, or if heads that they meet are
            joint = [found for layer in self.joint.values() if (found := self._rows(labels, layer)) is not None]
            whole = [rows for rows, last in joint if _repeats(last)]
            open_ones = np.concatenate([rows.ravel() for rows, _ in joint] or [np.zeros(0, dtype=np.int64)])
            met = [
                (layer, heads)
                for layer, heads in self.shared
                if along_which(heads) != along_which(layer)[-1:]
                and not np.isin(heads.numpy(), open_ones).any()
                and along_which(self._now(labels, heads))
                and len(along_which(self._now(labels, layer))) > 1
            ]
            for a, b in [*((rows[:, :1], rows) for rows in whole), *met]:
                self.equal(a, b, "view")
            if not whole and not met:
                break
            labels = self._connected()
        while True:
            # otherwise the same channels of every head
            joint = [found for layer in self.joint.values() if (found := self._rows(labels, layer)) is not None]
            if not joint:
                break
            done = np.zeros(self.count, dtype=bool)
            for rows, last in joint:
                if not done[last].any():
                    self.equal(rows[:1], rows, "view")
                    done[last] = True
            labels = self._connected()
        for layer, some in self.shared:
            if set(along_which(self._now(labels, some))) <= set(along_which(self._now(labels, layer))):
                if along_which(self._now(labels, some)):
                    self.equal(layer, some, "view")
            else:
                self.fix(some, reason="view")
        labels = self._connected()
        self._known = len(self.pairs), labels
        return labels

    def _rows(self, labels: np.ndarray, layer: Layer) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the numbers [heads, channels] of a layer and their sets; None if not both are cut."""
        now = self._now(labels, layer)
        varying = along_which(now)
        if len(varying) < 2:
            return None
        last = now.movedim(varying[-1], -1).reshape(-1, now.shape[varying[-1]]).numpy()
        original = layer.expand([max(a, b) for a, b in zip(layer.shape, now.shape, strict=True)])
        return original.movedim(varying[-1], -1).reshape(-1, last.shape[-1]).numpy(), last

    @staticmethod
    def _now(labels: np.ndarray, layer: Layer) -> Layer:
        return compact(torch.from_numpy(labels)[layer])

    def _connected(self) -> np.ndarray:
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        if not self.pairs:
            return np.arange(self.count)
        a, b = (np.concatenate(some) for some in zip(*self.pairs, strict=True))
        graph = coo_array((np.ones(len(a), dtype=np.int8), (a, b)), shape=(self.count, self.count))
        labels = connected_components(graph, directed=False)[1].astype(np.int64)
        # the set of 0 is 0
        if labels[0] != 0:
            first = labels[0]
            labels = np.where(labels == 0, -1, labels)
            labels = np.where(labels == first, 0, np.where(labels == -1, first, labels))
        return labels


def channels_of(t: torch.Tensor, layers: Sequence[Layer]) -> int:
    """Return the dimension of a tensor's channels: the first with numbers, otherwise that of images or tokens."""
    cut = [d for layer in layers for d in range(1, t.dim()) if layer.shape[d] > 1]
    return cut[0] if cut else 1 if t.dim() == 4 else t.dim() - 1


def _repeats(rows: np.ndarray) -> bool:
    """Return whether a number other than 0 is twice in a row."""
    ordered = np.sort(rows, axis=1)
    return bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] > 0)).any())


@contextlib.contextmanager
def _paths(module: nn.Module, trace: Trace) -> Iterator[None]:
    """Keep the path of the running module in `trace.path`."""
    stack: list[str] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            stack.append(path)
            trace.path = path

        return hook

    def leave(_: nn.Module, __: Any, out: Any) -> None:
        path = stack.pop()
        if path in trace.declared:
            trace.declare(path, out)
        trace.path = stack[-1] if stack else ""

    handles = []
    for path, part in module.named_modules():
        handles += [part.register_forward_pre_hook(enter(path)), part.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def traced(module: nn.Module, x: torch.Tensor, declared: Mapping[str, str] | None = None) -> tuple[Trace, Any]:
    """Return the trace of the forward pass of a module on the meta device, and its output. `declared`: path of a module
    -> name of the axis of its output's channels; operations inside it are trusted."""
    trace = Trace(module, declared)
    return trace, _ran(module, x, trace)


def check_runs(module: nn.Module, x: torch.Tensor) -> Any:
    """Return the output of a module on the meta device. Raise Untraceable, with the module that fails."""
    return _ran(module, x, Trace(None))


def _ran(module: nn.Module, x: torch.Tensor, trace: Trace) -> Any:
    fast = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), _paths(module, trace), trace:
            return module(x)
    except Misnamed:
        raise
    except Exception as error:
        reason = ": ".join([type(error).__name__, *str(error).rstrip(".").splitlines()[:1]])
        refused = Untraceable(f"{trace.path or 'the network'} does not run on the meta device ({reason})")
        refused.path, refused.reason, refused.done = trace.path, reason, trace.done
        raise refused from error
    finally:
        mha.set_fastpath_enabled(fast)
