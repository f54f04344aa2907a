"""Partial sums of updates, made on the nodes that hold the updates, so that one sum per branch crosses the network.

`rayfl.core.fold.PairwiseSum` gives an aligned part of a sum the same bits wherever it is computed, so no result depends
on this.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayfl.engine.jobs import Job, Trained


@dataclass(frozen=True)
class Sum:
    """What adds up to the update of a branch."""

    branch: Hashable
    sizes: Sequence[int]
    """How many clients each part stands for."""
    parts: Sequence[Any]
    """References to packed updates, in order."""
    node: str
    """Where most of them are."""


class Branches:
    """The jobs of a batch of training, by branch: where they run, and what they answered until all of a branch have."""

    def __init__(self, jobs: Sequence[Job]):
        self.branch_of = [job.branch for job in jobs]
        self._members: dict[Hashable, list[int]] = {}
        for index, branch in enumerate(self.branch_of):
            self._members.setdefault(branch, []).append(index)
        self._homes: dict[Hashable, str] = {}
        """Branch -> the node of its first job."""
        self._answers: dict[int, tuple[Trained, Any, str]] = {}

    def choose(self, waiting: Iterable[int], node: str) -> int | None:
        """The first job of a branch that the node has begun, or nobody has; else the first."""
        first = None
        for index in waiting:
            first = index if first is None else first
            if self._homes.setdefault(self.branch_of[index], node) == node:
                return index
        return first

    def answered(self, index: int, answer: Trained, update: Any, node: str) -> Sum | None:
        """What there is to add up, if that was the last answer of its branch. `update`: a reference, to what is on the
        node."""
        self._answers[index] = answer, update, node
        members = self._members[self.branch_of[index]]
        if not all(member in self._answers for member in members):
            return None
        answers, parts, nodes = zip(*(self._answers[member] for member in members), strict=True)
        [(most, _)] = Counter(nodes).most_common(1)
        return Sum(self.branch_of[index], [answer.size for answer in answers], parts, most)

    def close(self, sum_: Sum, updates: Sequence[Any]) -> dict[int, Trained]:
        """The answers of a branch's jobs, with their updates, or with one that stands for all of them."""
        found = {member: self._answers.pop(member)[0] for member in self._members[sum_.branch]}
        if len(updates) == len(found):
            return {i: replace(found[i], update=update) for i, update in zip(found, updates, strict=True)}
        last = max(found)
        found = {i: replace(answer, size=0) for i, answer in found.items()}
        return found | {last: replace(found[last], update=updates[0], size=sum(sum_.sizes))}

    def forget(self, branch: Hashable) -> list[int]:
        """The jobs of a branch whose parts are lost."""
        self._homes.pop(branch, None)
        for member in self._members[branch]:
            self._answers.pop(member, None)
        return self._members[branch]
