"""Aggregation of the updates of a round by the holder mean, shared by all methods.

    x_new = sum_k w_k S_k^T y_k / sum_k w_k S_k^T 1;    a coordinate without holders keeps its value

Updates are streamed: those with equal selections are summed pairwise (`PairwiseSum`), and the server adds the sums to a
`Fold`.
"""

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Literal, TypeVar

import torch

from rayfl.core.norms import is_statistic
from rayfl.core.server_optimizers import Server, moment_of
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params, Tensors, nbytes

ClientState = Mapping[str, Tensors]
"""State of a client between rounds: groups of tensors."""

Over = Literal["holders", "all"]
"""Denominator of a mean: weights of the holders of each coordinate, or of all clients."""

State = dict
"""State of the server, as in checkpoints: group ("params", ...) -> name -> tensor."""


@dataclass(frozen=True)
class Factors:
    """A sum of low-rank products. Addition concatenates the factors, or stores the matrix if that is smaller."""

    left: torch.Tensor
    """[out, q]; the sum [out, in] itself if `right` is None."""
    right: torch.Tensor | None
    """[q, in]."""

    def __add__(self, other: "Factors") -> "Factors":
        if self.right is None or other.right is None:
            return Factors(self.dense() + other.dense(), None)
        joined = Factors(torch.cat([self.left, other.left], 1), torch.cat([self.right, other.right]))
        dense_bytes = self.left.shape[0] * self.right.shape[1] * self.left.element_size()
        return joined if joined.nbytes < dense_bytes else Factors(joined.dense(), None)

    def dense(self) -> torch.Tensor:
        """Return the sum [out, in]."""
        return self.left if self.right is None else self.left @ self.right

    @property
    def tensors(self) -> Params:
        """Tensors to send."""
        return {"left": self.left} | ({} if self.right is None else {"right": self.right})

    @property
    def nbytes(self) -> int:
        return nbytes(self.tensors)


@dataclass
class Update:
    """The sum of the updates of clients with the same selection.

    >>> y, samples = torch.tensor([0.5, 1.0]), 40
    >>> Update({"params": {"w": y * samples}}, weight=samples, metrics={"steps": 10}).sums["params"]["w"]
    tensor([20., 40.])
    """

    sums: dict[str, Params]
    """Group -> name -> sum_k w_k y_k in the submodel's shapes. Tensors without holders are missing. Read only."""
    weight: float
    """Sum of the clients' weights."""
    whole: dict[str, Params] = field(default_factory=dict)
    """Sums like `sums`, of tensors that the selection does not cut: personal norms, thresholds, masks."""
    row_weights: Params = field(default_factory=dict)
    """Parameter of the group "params" -> divisor of each coordinate, if it is not `weight` everywhere (label rows): sum
    of the holders' weights, broadcastable to the tensor of the submodel."""
    products: dict[str, Factors] = field(default_factory=dict)
    """Name -> sum_k w_k B_k A_k, of clients that send low-rank products."""
    derived: dict[str, Params] = field(default_factory=dict)
    """Sums like `whole`, of values that follow from the updates as they are before `updates.transforms`: neither
    transformed nor counted as traffic. Without transforms the server could compute them."""
    as_is: frozenset[str] = frozenset()
    """Groups whose values one client's transforms change as they are. In others a change is the value divided by
    `weight`, less the received tensor of the same name."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics by the names of `rayfl.metrics`; others are summed over clients. bytes_down, bytes_up and train_flops of
    a method replace the values that the worker counts (`training.passes`)."""
    client_states: dict[int, ClientState] = field(default_factory=dict)
    """Client -> its state for its next round. The group "own" is part of the client's personal network."""

    def plus(self, other: "Update", reuse: bool = False) -> "Update":
        """Return the sum with another update of the same selection, without metrics, in new tensors; with `reuse`, in
        those of this update, which must be a sum itself."""
        return Update(
            _plus_by_group(self.sums, other.sums, reuse),
            self.weight + other.weight,
            _plus_by_group(self.whole, other.whole, reuse),
            _plus(self.row_weights, other.row_weights, reuse),
            _longer(self.products, other.products),
            _plus_by_group(self.derived, other.derived, reuse),
            client_states=self.client_states | other.client_states,
        )


def add_updates(one: Update | None, other: Update | None, reuse: bool = False) -> Update | None:
    """Return the sum of the updates that are not None; `reuse` as for `Update.plus`."""
    return other if one is None else one if other is None else one.plus(other, reuse)


T = TypeVar("T")


class PairwiseSum(Generic[T]):
    """Pairwise sum of a sequence: ((1 + 2) + (3 + 4)) + (5 + 6).

    Floating point addition is not associative. The order of additions depends on the positions only, so that partial
    sums of aligned parts (2**k neighbours, starting at a multiple of 2**k) give the same bits.
    """

    def __init__(self, plus: Callable[[T, T], T], plus_to_sum: Callable[[T, T], T] | None = None):
        """`plus_to_sum`: `plus` for a first argument that this object has computed, whose memory it may reuse.
        Default: `plus`."""
        self.plus, self.plus_to_sum = plus, plus_to_sum or plus
        self._parts: list[_Part[T]] = []
        """From the left, with descending counts."""

    def add(self, value: T, size: int = 1) -> None:
        """Add the next value, or the sum of the next aligned part of `size` values."""
        part = _Part(size, value, False)
        while self._parts and self._parts[-1].count == part.count:
            part = self._joined(self._parts.pop(), part)
        self._parts.append(part)

    @property
    def total(self) -> T:
        """Sum of all values; at least one must have been added."""
        while len(self._parts) > 1:
            last = self._parts.pop()
            self._parts.append(self._joined(self._parts.pop(), last))
        return self._parts[0].value

    def _joined(self, one: "_Part[T]", other: "_Part[T]") -> "_Part[T]":
        value = (self.plus_to_sum if one.is_computed else self.plus)(one.value, other.value)
        given = [part.is_computed for part in (one, other) if part.value is value]
        return _Part(one.count + other.count, value, all(given))


@dataclass(frozen=True)
class _Part(Generic[T]):
    count: int
    """Number of values."""
    value: T
    """Their sum."""
    is_computed: bool
    """True for a result of an addition, False for a value that was given."""


def sum_of_updates() -> PairwiseSum[Update | None]:
    """Return an empty sum of updates, which reuses its partial sums: of 2**k updates it holds at most k."""
    return PairwiseSum(add_updates, partial(add_updates, reuse=True))


def aligned(count: int, most: int) -> Iterator[slice]:
    """Yield `count` positions as aligned parts of at most `most` positions, the largest first."""
    size, start = 1 << (most.bit_length() - 1), 0
    while start < count:
        while size > count - start:
            size //= 2
        yield slice(start, start + size)
        start += size


class Fold:
    """The sums of the updates of a round. Means are computed on request.

    >>> fold = Fold({"params": {"w": torch.zeros(2)}})
    >>> for y in (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0])):
    ...     fold.add(None, Update({}, weight=1.0, whole={"params": {"w": y}}))
    >>> fold.mean("params")
    {'w': tensor([2., 2.])}
    """

    def __init__(self, state: State, server: Server | None = None):
        """`state`: state of the server before the round; `server`: its optimizer. Default: the mean."""
        self.state, self.server = state, server or Server()
        self.weight = 0.0
        """Sum of the weights of all clients."""
        self.moments: State = {}
        """Moments of the optimizer after the round, of groups with a computed mean."""
        self.optimized = False
        """True if the optimizer made a step."""
        self._groups: dict[str, HolderMean] = {}
        self.products: dict[str, Factors] = {}
        """Name -> sum_k w_k B_k A_k over all clients that sent it."""

    def add(self, selection: Selection, update: Update) -> None:
        self.weight += update.weight
        for group, sums in update.sums.items():
            rows = update.row_weights if group == "params" else {}
            self._of(group, sums).add(selection, sums, update.weight, rows)
        for group, sums in (update.whole | update.derived).items():
            self._of(group, sums).add(None, sums, update.weight)
        self.products = _longer(self.products, update.products)

    def mean(self, group: str, over: Over = "holders") -> Params:
        """Return the new value of a group after the step of the server optimizer, in new tensors if a client sent it.
        Call it once per group. `over`: denominator of the mean: clients that hold the coordinate, or all clients
        (missing values count as 0, and coordinates without holders become 0)."""
        found = self._mean(group, over)
        if found is None:
            return self.state[group]
        if self.server.optimizer == "mean":
            return {name: mean for name, (mean, _) in found.items()}
        self.optimized = True
        old, new = self.state[group], {}
        letters = self.server.init(old)
        before = {letter: self.state.get(moment_of(letter, group), t) for letter, t in letters.items()}
        after: dict[str, Params] = {letter: dict(t) for letter, t in before.items()}
        for name, (mean, covered) in found.items():
            if is_statistic(name):
                new[name] = mean
                continue
            moments = {letter: t[name] for letter, t in before.items()}
            new[name], moved = self.server.update(old[name], mean, covered, moments)
            for letter, t in moved.items():
                after[letter][name] = t
        self.moments |= {moment_of(letter, group): t for letter, t in after.items()}
        return new

    def _mean(self, group: str, over: Over) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]] | None:
        """Return name -> mean, and the coordinates with holders (`HolderMean.mean`); None if no client sent a group."""
        return self._groups[group].mean(self.weight if over == "all" else None) if group in self._groups else None

    def mean_so_far(self, group: str) -> Params:
        """Return the holder mean of a group over the clients added so far, in new tensors; more can be added."""
        if group not in self._groups:
            return self.state[group]
        so_far = copy.copy(self._groups[group])
        # a mean overwrites both
        so_far.totals = {name: t.clone() for name, t in so_far.totals.items()}
        so_far._covers = {name: t.clone() for name, t in so_far._covers.items()}
        return {name: mean for name, (mean, _) in so_far.mean().items()}

    def sum(self, group: str) -> Params:
        """Return sum_k w_k S_k^T y_k in the server's shapes; {} if no client sent the group."""
        return self._groups[group].totals if group in self._groups else {}

    def weights(self, group: str) -> dict[str, float]:
        """Return name -> sum of the weights of the clients that hold a part of it."""
        return self._groups[group].weights if group in self._groups else {}

    def _of(self, group: str, sums: Params) -> "HolderMean":
        if group not in self._groups:
            # groups that the state lacks (masks) are sent whole
            self._groups[group] = HolderMean(self.state.get(group, sums))
        return self._groups[group]


class HolderMean:
    """The streaming holder mean of one group. Sums must be added in a fixed order."""

    def __init__(self, old: Params):
        self.old = old
        self.totals = {name: torch.zeros_like(t) for name, t in old.items()}
        self._covers: Params = {}
        self._holders: dict[tuple[Hashable, frozenset[str]], tuple[Selection | None, float]] = {}

    def add(self, selection: Selection | None, sums: Params, weight: float, row_weights: Params | None = None) -> None:
        """Add sums of clients of this weight, which `row_weights` replaces by name. No selection: whole tensors."""
        if selection is None:
            for name, t in sums.items():
                self.totals[name] = self.totals[name].add_(t) if name in self.totals else t.clone()
        else:
            selection.put(sums, self.totals)
        row_weights = row_weights or {}
        key = (selection and selection.key, frozenset(sums.keys() - row_weights.keys()))
        _, before = self._holders.get(key, (selection, 0.0))
        self._holders[key] = (selection, before + weight)
        for name, rows in row_weights.items():
            if name in sums:
                if name not in self._covers:
                    self._covers[name] = torch.zeros_like(self.old[name])
                _mark(selection, name, rows, self._covers[name])

    @property
    def weights(self) -> dict[str, float]:
        """Name -> weight of the clients that hold a part of it, without those with row weights."""
        found: dict[str, float] = {}
        for (_, names), (_, weight) in self._holders.items():
            for name in names:
                found[name] = found.get(name, 0.0) + weight
        return found

    def mean(self, weight: float | None = None) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
        """Return name -> x_new in a new tensor, and the coordinates with holders (bool; None: all). Overwrites the
        totals. `weight`: denominator in place of the weight of the holders; then all coordinates of the sent tensors
        are covered."""
        if weight is None:
            return {name: self._mean(name) for name in self.old}
        answered = self.weights.keys() | self._covers.keys()
        return {n: (t.div_(weight) if n in answered else self.old[n], None) for n, t in self.totals.items()}

    def _mean(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        old, total = self.old[name], self.totals[name]
        holders = [holder for (_, names), holder in self._holders.items() if name in names]
        cover = self._covers.get(name)
        if cover is None:
            if holders and all(selection is None or selection.covers(name) for selection, _ in holders):
                return total.div_(sum(weight for _, weight in holders)), None
            cover = torch.zeros_like(old)
        for selection, weight in holders:
            _mark(selection, name, weight, cover)
        covered = cover > 0
        return torch.where(covered, total.div_(cover), old), covered


def _mark(selection: Selection | None, name: str, value: float | torch.Tensor, whole: torch.Tensor) -> None:
    if selection is None:
        whole.add_(value)
    else:
        selection.mark(name, value, whole)


def _longer(one: dict[str, Factors], other: dict[str, Factors]) -> dict[str, Factors]:
    """Return the sum by name, in the order of the arguments."""
    return one | other | {name: one[name] + other[name] for name in one if name in other}


def _plus_by_group(one: dict[str, Params], other: dict[str, Params], reuse: bool) -> dict[str, Params]:
    return {group: _plus(one.get(group, {}), other.get(group, {}), reuse) for group in one | other}


def _plus(one: Params, other: Params, reuse: bool) -> Params:
    """Return the sum by name: in new tensors, or in those of `one`."""

    def plus(name: str) -> torch.Tensor:
        if name in one and name in other:
            return one[name].add_(other[name]) if reuse else one[name] + other[name]
        return one[name] if name in one and reuse else (one if name in one else other)[name].clone()

    return {name: plus(name) for name in one | other}
