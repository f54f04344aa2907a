"""Aggregation of a round's updates: sums, covers, and the holder mean that serves all methods.

    x_new = sum_k w_k S_k^T y_k / sum_k w_k S_k^T 1;    a coordinate without holders keeps its value

Updates are streamed: those of equal selections are summed pairwise into one `Update` (`PairwiseSum`), which the server
adds to a `Fold`, selection by selection.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import torch

from rayfl.core.server_optimizers import MOMENTS, Server, is_statistic
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params, Tensors, nbytes

ClientState = Mapping[str, Tensors]
"""What a client keeps: groups of tensors."""

Over = Literal["holders", "all"]
"""Whose weights a mean is divided by."""

State = dict
"""Group ("params", ...) -> name -> tensor: what the server holds, checkpointed as it is."""


@dataclass(frozen=True)
class Factors:
    """A sum of products of low rank. It adds up by lengthening its factors, and is a matrix where that is smaller."""

    left: torch.Tensor
    """[out, q]; the sum itself, [out, in], where `right` is None."""
    right: torch.Tensor | None
    """[q, in]."""

    def __add__(self, other: "Factors") -> "Factors":
        if self.right is None or other.right is None:
            return Factors(self.dense() + other.dense(), None)
        joined = Factors(torch.cat([self.left, other.left], 1), torch.cat([self.right, other.right]))
        return (
            joined
            if joined.nbytes < self.left.shape[0] * self.right.shape[1] * self.left.element_size()
            else (Factors(joined.dense(), None))
        )

    def dense(self) -> torch.Tensor:
        """The sum [out, in]."""
        return self.left if self.right is None else self.left @ self.right

    @property
    def tensors(self) -> Params:
        """What travels."""
        return {"left": self.left} | ({} if self.right is None else {"right": self.right})

    @property
    def nbytes(self) -> int:
        return nbytes(self.tensors)


@dataclass
class Update:
    """What clients of one selection send back. Everything adds."""

    sums: dict[str, Params]
    """Group -> name -> sum_k w_k y_k, in the shapes of the submodel. What is missing no client held. Read only for
    who receives it."""
    weight: float
    """Sum of the clients' weights."""
    whole: dict[str, Params] = field(default_factory=dict)
    """The same for tensors that the selection does not cut: a network's own norms, thresholds, masks."""
    row_weights: Params = field(default_factory=dict)
    """Parameter -> the divisor of each coordinate, where it is not `weight` everywhere (label rows): the sum of the
    weights of those who hold it, broadcastable to the submodel's tensor. Of the group "params"."""
    products: dict[str, Factors] = field(default_factory=dict)
    """Name -> sum_k w_k B_k A_k, of clients whose answer is a product of low rank."""
    derived: dict[str, Params] = field(default_factory=dict)
    """Like `whole`, of what the server finds out from a client's answer alone. It is found where the answer is made,
    and is no part of it: neither counted as traffic nor transformed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """By the names of `rayfl.metrics`; what is not listed there is a sum over clients. bytes_down, bytes_up and
    train_flops, where a method gives them, stand in place of what the worker counts."""
    client_states: dict[int, ClientState] = field(default_factory=dict)
    """Client -> what it keeps for its next round: groups of tensors. The group "own" is part of what it itself runs."""

    def __add__(self, other: "Update") -> "Update":
        """With another update of the same selection, in fresh tensors where both have one; their metrics are not looked
        at."""
        return Update(
            _plus(self.sums, other.sums),
            self.weight + other.weight,
            _plus(self.whole, other.whole),
            _plus({"": self.row_weights}, {"": other.row_weights})[""],
            _longer(self.products, other.products),
            _plus(self.derived, other.derived),
            client_states=self.client_states | other.client_states,
        )


def add_updates(one: Update | None, other: Update | None) -> Update | None:
    """The sum of those that are there."""
    return other if one is None else one if other is None else one + other


T = TypeVar("T")


class PairwiseSum(Generic[T]):
    """What comes in order, added up pair by pair: ((1 + 2) + (3 + 4)) + (5 + 6).

    Floating point addition is not associative. Here its order follows from the places alone, so whoever adds up an
    aligned part of the sum, 2**k neighbours from a multiple of 2**k on, comes to the same bits.
    """

    def __init__(self, plus: Callable[[T, T], T]):
        self.plus = plus
        self._parts: list[tuple[int, T]] = []
        """(how many it adds up, the sum), from the left; the numbers fall."""

    def add(self, value: T, size: int = 1) -> None:
        """The next value, or the sum of the next aligned part, of so many values."""
        while self._parts and self._parts[-1][0] == size:
            _, before = self._parts.pop()
            value, size = self.plus(before, value), 2 * size
        self._parts.append((size, value))

    @property
    def total(self) -> T:
        """Of at least one value."""
        (_, total), *larger = self._parts[::-1]
        for _, part in larger:
            total = self.plus(part, total)
        return total


def aligned(count: int, most: int) -> Iterator[slice]:
    """`count` places as aligned parts, the largest first, of at most `most` places each."""
    size, start = 1 << (most.bit_length() - 1), 0
    while start < count:
        while size > count - start:
            size //= 2
        yield slice(start, start + size)
        start += size


class Fold:
    """A round's updates, added up. What is not asked for costs a sum and nothing else."""

    def __init__(self, state: State, server: Server | None = None):
        """`state`: the server's before the round, with the moments of its optimizer, which is the mean unless given."""
        self.state, self.server = state, server or Server()
        self.weight = 0.0
        """Sum of the weights of all clients."""
        self.moments: State = {}
        """The optimizer's moments after the round, of the groups whose mean was asked for."""
        self._groups: dict[str, HolderMean] = {}
        self.products: dict[str, Factors] = {}
        """Name -> sum_k w_k B_k A_k over all clients who sent it."""

    def add(self, selection: Selection, update: Update) -> None:
        self.weight += update.weight
        for group, sums in update.sums.items():
            rows = update.row_weights if group == "params" else {}
            self._of(group, sums).add(selection, sums, update.weight, rows)
        for group, sums in (update.whole | update.derived).items():
            self._of(group, sums).add(None, sums, update.weight)
        self.products = _longer(self.products, update.products)

    def mean(self, group: str, over: Over = "holders") -> Params:
        """Where the server's optimizer goes from a group of the state towards its mean, which is the mean itself unless
        an optimizer was chosen. In fresh tensors where somebody answered the group. Once a group.

        `over`: whose weights divide: a coordinate's holders', or all clients', so that who does not hold it counts as 0
        (padding with zeros; then what nobody held is 0).
        """
        if group not in self._groups:
            return self.state[group]
        found = self._groups[group].mean(self.weight if over == "all" else None)
        if self.server.optimizer == "mean":
            return {name: mean for name, (mean, _) in found.items()}
        old, new = self.state[group], {}
        letters = self.server.init(old)
        before = {letter: self.state.get(f"{MOMENTS}{letter} {group}", t) for letter, t in letters.items()}
        after: dict[str, Params] = {letter: dict(t) for letter, t in before.items()}
        for name, (mean, held) in found.items():
            if is_statistic(name):
                new[name] = mean
                continue
            moments = {letter: t[name] for letter, t in before.items()}
            new[name], moved = self.server.update(old[name], mean, held, moments)
            for letter, t in moved.items():
                after[letter][name] = t
        self.moments |= {f"{MOMENTS}{letter} {group}": t for letter, t in after.items()}
        return new

    def sum(self, group: str) -> Params:
        """sum_k w_k S_k^T y_k, in the server's shapes; {} if nobody sent the group."""
        return self._groups[group].totals if group in self._groups else {}

    def weights(self, group: str) -> dict[str, float]:
        """Name -> the sum of the weights of the clients that hold a part of it, of what somebody holds."""
        return self._groups[group].weights if group in self._groups else {}

    def _of(self, group: str, sums: Params) -> "HolderMean":
        if group not in self._groups:
            # a group that the state does not have is sent whole: masks
            self._groups[group] = HolderMean(self.state.get(group, sums))
        return self._groups[group]


class HolderMean:
    """The streaming holder mean of one group. Feed it sums in a fixed order."""

    def __init__(self, old: Params):
        self.old = old
        self.totals = {name: torch.zeros_like(t) for name, t in old.items()}
        self._covers: Params = {}
        self._holders: dict[tuple[Hashable, frozenset[str]], tuple[Selection | None, float]] = {}

    def add(self, selection: Selection | None, sums: Params, weight: float, row_weights: Params | None = None) -> None:
        """`weight` is that of the clients in `sums`, who hold what `sums` names; `row_weights` replaces it by name.
        Without a selection they hold the tensors whole."""
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
        """Name -> the weight of those who hold a part of it whose divisor is no matter of rows."""
        found: dict[str, float] = {}
        for (_, names), (_, weight) in self._holders.items():
            for name in names:
                found[name] = found.get(name, 0.0) + weight
        return found

    def mean(self, weight: float | None = None) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
        """Name -> x_new in a fresh tensor, and the coordinates that somebody held (bool; None: all). `weight` divides
        in place of that of a coordinate's holders, and then all coordinates of what was answered count as held. Uses up
        the totals."""
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
        held = cover > 0
        return torch.where(held, total.div_(cover), old), held


def _mark(selection: Selection | None, name: str, value: float | torch.Tensor, whole: torch.Tensor) -> None:
    if selection is None:
        whole.add_(value)
    else:
        selection.mark(name, value, whole)


def _longer(one: dict[str, Factors], other: dict[str, Factors]) -> dict[str, Factors]:
    """Name by name, in the order of the arguments."""
    return one | other | {name: one[name] + other[name] for name in one if name in other}


def _plus(one: dict[str, Params], other: dict[str, Params]) -> dict[str, Params]:
    """Group by group, and name by name."""
    total = one | other
    for group in one.keys() & other.keys():
        mine, theirs = one[group], other[group]
        total[group] = mine | theirs | {name: mine[name] + theirs[name] for name in mine if name in theirs}
    return total
