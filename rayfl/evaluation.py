"""The `evaluation:` section, and how a worker scores one network on one piece of a split.

Workers return counts (`Judged`), each with its own denominator; `rayfl.engine.evaluator` plans an evaluation and turns
the counts into metrics.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import nn

from rayfl.config import Config
from rayfl.core.net import Answer
from rayfl.core.seeds import numpy_generator
from rayfl.data.goal import SCORES_KIND, Score
from rayfl.data.samples import ClientData
from rayfl.training.settings import Fill, answered, every_exit, mask_logits

K = TypeVar("K", bound=Hashable)


class Evaluation(Config):
    """The `evaluation:` section: every capacity on the global test set, every client on its own split."""

    every: int = Field(default=10, ge=1)
    """Rounds between evaluations; the last round is always evaluated."""
    batch_size: int = Field(default=500, ge=1, le=10**6)
    """Samples a forward pass. Part of the result where norms use statistics of a batch."""
    holdout: float = Field(default=0.1, ge=0, lt=1)
    """Share of the training set that the server holds out, stratified, as the validation set: what methods
    are tuned by, so that the test set only judges. 0: none."""
    local_holdout: float = Field(default=0.0, ge=0, lt=1)
    """Share of its own training data that every client holds out (local_validation_*): what methods are tuned by whose
    clients have networks of their own. 0: none."""
    clients: bool | Annotated[int, Field(ge=1)] = True
    """Evaluate every client on its own test split, or so many of them, drawn once by the seed: the same ones in every
    round and for every row of a sweep."""
    local: Literal["deployed", "server"] = "deployed"
    """What runs on a client's own test split: what the method deploys there, or the server's network
    (HeteroFL's Local, with `label_mask: zero`)."""
    label_mask: Fill = "none"
    """Logits of classes that a client does not have, on its own test split: alone, 0 (as HeteroFL's Local), -inf."""
    statistics: Literal["exact", "cumulative", "pooled", "batch"] = "exact"
    """How static norms get their statistics before an evaluation (rayfl/core/norms.py)."""
    statistics_clients: int | None = Field(default=None, ge=1)
    """Clients whose data the statistics are taken from, drawn anew each time; all unless given."""
    scores: tuple[Any, ...] = ()
    """More scores than the data set's own, by name ("macro_f1") or as "package.module:Class"."""

    @field_validator("scores")
    @classmethod
    def _read(cls, given: tuple[Any, ...]) -> tuple[Score, ...]:
        return tuple(SCORES_KIND.read(score, f"scores.{i}") for i, score in enumerate(given))

    def judged(self, count: int, seed: int) -> np.ndarray:
        """The clients [n], ascending, that are evaluated of so many."""
        if self.clients is True or self.clients >= count:
            return np.arange(count)
        drawn = numpy_generator(seed, "judged").choice(count, int(self.clients), replace=False, shuffle=False)
        return np.sort(drawn)

    @property
    def piece(self) -> int:
        """Samples that one job takes."""
        return 4 * self.batch_size


# on a worker


@dataclass(frozen=True)
class Judged:
    """What a network got right on one piece."""

    count: int
    """Samples."""
    sums: Mapping[str, torch.Tensor]
    """Score -> its sums, which add over pieces."""
    exits: tuple[torch.Tensor, ...] = ()
    """The first score's sums, of each early exit alone."""


@torch.no_grad()
def judge(
    module: nn.Module,
    data: ClientData,
    scores: Sequence[Score],
    batch_size: int,
    answer: Answer = "last",
    fill: Fill = "none",
    present: torch.Tensor | None = None,
) -> Judged:
    """The sums of all scores. `answer`: which early exits count. `present` [C] with `fill` masks the logits of absent
    classes."""
    module.eval()
    sums: dict[str, torch.Tensor] = {}
    exits: dict[int, torch.Tensor] = {}
    for x, y in data.in_order(batch_size):
        given = every_exit(module(x))
        if present is not None:
            given = tuple(mask_logits(logits, present, fill) for logits in given)
        if len(given) > 1:
            first = scores[0]
            add_to(exits, {i: first.counts(*data.goal.rows(z, y, first.part)) for i, z in enumerate(given)})
        logits = answered(given, answer)
        rows = {part: data.goal.rows(logits, y, part) for part in {score.part for score in scores}}
        add_to(sums, {score.label: score.counts(*rows[score.part]) for score in scores})
    return Judged(len(data), {name: t.cpu() for name, t in sums.items()}, tuple(t.cpu() for t in exits.values()))


def add_to(totals: dict[K, torch.Tensor], more: Mapping[K, torch.Tensor]) -> None:
    for key, t in more.items():
        totals[key] = totals[key] + t if key in totals else t
