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

from rayfl.models.inferred.rules import FACTORIES, RULES, UNARY, Layer, along_which, compact, flat


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
        self.joint: list[Layer] = []
        self.dims: dict[str, list[np.ndarray | None]] = {}
        """Name of a parameter or buffer -> the numbers of each dimension."""
        self.path = ""
        self._layers: dict[int, tuple[torch.Tensor, list[Layer]]] = {}
        for name, t in [*module.named_parameters(), *module.named_buffers()] if module is not None else []:
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

    # numbers of tensors

    def of(self, t: Any) -> list[Layer]:
        return self._layers[id(t)][1] if isinstance(t, torch.Tensor) and id(t) in self._layers else []

    def give(self, t: torch.Tensor, layers: Sequence[Layer]) -> None:
        kept = [layer for layer in map(compact, layers) if layer.numel() > 1 and bool(layer.any())]
        self._layers[id(t)] = (t, kept)
        self.joint += [layer for layer in kept if len(along_which(layer)) > 1]

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
        return out

    def pointwise(self, given: Sequence[torch.Tensor], out: Any) -> None:
        for one in flat(out):
            layers: list[Layer] = []
            for t in given:
                if t.dim() > one.dim():
                    continue
                for layer in self.of(t):
                    layers = self.merged(layers, layer.view(*[1] * (one.dim() - t.dim()), *layer.shape))
            # along these dimensions, another tensor has values and no numbers
            meets = [any(self._lacks(t, one.dim(), set(along_which(layer))) for t in given) for layer in layers]
            self.fix(*(layer for layer, met in zip(layers, meets, strict=True) if met))
            self.give(one, [layer for layer, met in zip(layers, meets, strict=True) if not met])

    def _lacks(self, t: torch.Tensor, dim: int, varying: set[int]) -> bool:
        """Return whether a tensor, broadcast to `dim` dimensions, has positions but no numbers along `varying`."""
        first = dim - t.dim()
        own = {first + d for layer in self.of(t) for d in along_which(layer)}
        return any(size > 1 and first + d in varying for d, size in enumerate(t.shape)) and not own & varying

    def merged(self, layers: list[Layer], new: Layer) -> list[Layer]:
        result = []
        for layer in layers:
            if set(along_which(layer)) & set(along_which(new)):
                a, b = torch.broadcast_tensors(layer, new)
                self.equal(a, b)
                new = torch.where(a != 0, a, b)
            else:
                result.append(layer)
        return [*result, new]

    def contract(self, a: list[Layer], b: list[Layer]) -> list[Layer]:
        """Return the numbers of the product of [..., n, k] and [..., k, m]: equal along k."""
        one, two = [layer.unsqueeze(-1) for layer in a], [layer.unsqueeze(-3) for layer in b]
        left, right = ([x for x in some if x.shape[-2] > 1] for some in (one, two))
        for x in left:
            for y in right:
                self.equal(*(t.numpy() for t in torch.broadcast_tensors(x, y)))
        for x in left if not right else right if not left else []:
            self.fix(x)
        kept: list[Layer] = []
        for x in (*one, *two):
            kept = self.merged(kept, x.squeeze(-2)) if x.shape[-2] == 1 else kept
        return kept

    # the result

    def components(self) -> np.ndarray:
        """Return the number of the set of every number; 0 for the set of what is never cut."""
        labels = self._connected()
        for layer in self.joint:
            # heads and channels inside of them: the same channels in every head
            now = compact(torch.from_numpy(labels)[layer])
            varying = along_which(now)
            if len(varying) > 1:
                last = now.movedim(varying[-1], -1).reshape(-1, now.shape[varying[-1]]).numpy()
                original = layer.expand([max(a, b) for a, b in zip(layer.shape, now.shape, strict=True)])
                rows = original.movedim(varying[-1], -1).reshape(-1, last.shape[-1]).numpy()
                self.operation = "view"
                self.equal(rows[:1], rows)
                labels = self._connected()
        return labels

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


def check_runs(module: nn.Module, x: torch.Tensor) -> None:
    """Raise Untraceable, with the module that fails, if a module does not run on the meta device."""
    _ran(module, x, Trace(None))


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
