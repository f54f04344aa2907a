"""Partial sums of updates, computed on the nodes that hold them, so that one sum per branch crosses the network.

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
    """Parts of the update of a branch."""

    branch: Hashable
    sizes: Sequence[int]
    """Clients in each part."""
    parts: Sequence[Any]
    """References to packed updates, in order."""
    node: str
    """Node that has most of them."""


class Branches:
    """Training jobs by branch: the node of each branch, and answers of incomplete branches."""

    def __init__(self, jobs: Sequence[Job]):
        self.branch_of = [job.branch for job in jobs]
        self._members: dict[Hashable, list[int]] = {}
        for index, branch in enumerate(self.branch_of):
            self._members.setdefault(branch, []).append(index)
        self._homes: dict[Hashable, str] = {}
        """Branch -> the node of its first job."""
        self._answers: dict[int, tuple[Trained, Any, str]] = {}

    def choose(self, waiting: Iterable[int], node: str) -> int | None:
        """Return the first job whose branch has started on this node or nowhere, otherwise the first job."""
        first = None
        for index in waiting:
            first = index if first is None else first
            if self._homes.setdefault(self.branch_of[index], node) == node:
                return index
        return first

    def answered(self, index: int, answer: Trained, update: Any, node: str) -> Sum | None:
        """Record an answer. Return the sum to compute if it was the last of its branch. `update`: a reference to an
        object on `node`."""
        self._answers[index] = answer, update, node
        members = self._members[self.branch_of[index]]
        if not all(member in self._answers for member in members):
            return None
        answers, parts, nodes = zip(*(self._answers[member] for member in members), strict=True)
        [(most, _)] = Counter(nodes).most_common(1)
        return Sum(self.branch_of[index], [answer.size for answer in answers], parts, most)

    def close(self, sum_: Sum, updates: Sequence[Any]) -> dict[int, Trained]:
        """Return the answers of a branch's jobs, with one update each, or one for all of them."""
        found = {member: self._answers.pop(member)[0] for member in self._members[sum_.branch]}
        if len(updates) == len(found):
            return {i: replace(found[i], update=update) for i, update in zip(found, updates, strict=True)}
        last = max(found)
        found = {i: replace(answer, size=0) for i, answer in found.items()}
        return found | {last: replace(found[last], update=updates[0], size=sum(sum_.sizes))}

    def forget(self, branch: Hashable) -> list[int]:
        """Forget a branch whose parts are lost; return its jobs."""
        self._homes.pop(branch, None)
        for member in self._members[branch]:
            self._answers.pop(member, None)
        return self._members[branch]
