"""What a network is to learn, and how well it does, from logits and labels.

A score adds up: every batch, on whatever worker, gives a vector of counts; their sum gives the number.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from rayfl.config import Kind, Named


class Score(Named, ABC):
    """One number of an evaluation. A subclass adds its fields, and says `counts` and `value`."""

    better: ClassVar[Literal["max", "min"]] = "max"
    """Which end is the good one."""

    @property
    def label(self) -> str:
        """What the number is called in metrics: the name; of a class of your own package, the class's."""
        return self.name.rpartition(":")[2]

    @abstractmethod
    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Of a batch: logits [B, C], labels y [B] -> [k] int64 or float64, to be added up over all batches."""

    @abstractmethod
    def value(self, sums: torch.Tensor) -> float:
        """The number, of the sum [k] of all counts."""

    def values(self, sums: torch.Tensor) -> np.ndarray:
        """The numbers [n] float64 of n sums [n, k]."""
        return np.array([self.value(one) for one in sums], np.float64)


class Mean(Score):
    """A score whose counts are a sum over samples, and their number."""

    def value(self, sums: torch.Tensor) -> float:
        total, count = sums.tolist()
        return total / count

    def values(self, sums: torch.Tensor) -> np.ndarray:
        totals, counts = sums.double().numpy().T
        return totals / counts


class Accuracy(Mean):
    """The share of samples whose largest logit is their label's; of equal logits the first counts."""

    name: Literal["accuracy"] = "accuracy"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Correct samples, and samples."""
        return _shares(logits.argmax(1) == y)


class CrossEntropy(Mean):
    """The mean of -log softmax(logits)[y] over the samples, in nats."""

    name: Literal["loss"] = "loss"
    better: ClassVar = "min"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The batch's float32 sum, and its samples, in float64."""
        total = F.cross_entropy(logits, y, reduction="sum").double()
        return torch.stack([total, total.new_full((), len(y))])


class TopK(Mean):
    """The share of samples whose label is among the `k` largest logits; with k classes or fewer it is 1."""

    name: Literal["top_k"] = "top_k"
    k: int = Field(default=5, ge=1)
    """Guesses a sample."""

    @property
    def label(self) -> str:
        return f"top{self.k}"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Samples with a right guess, and samples."""
        guesses = logits.topk(min(self.k, logits.shape[1]), 1).indices
        return _shares((guesses == y[:, None]).any(1))


class MacroF1(Score):
    """The mean over classes of F1 = 2 TP / (predicted + labelled), every class alike, however rare it is. Classes that
    are neither predicted nor a label are left out (as scikit-learn's f1_score does with average="macro")."""

    name: Literal["macro_f1"] = "macro_f1"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """By class: right ones, predictions and labels, [3 C] in this order."""
        classes, predicted = logits.shape[1], logits.argmax(1)
        counted = [torch.bincount(found, minlength=classes) for found in (y[predicted == y], predicted, y)]
        return torch.cat(counted)

    def value(self, sums: torch.Tensor) -> float:
        right, predicted, labelled = sums.double().view(3, -1)
        seen = predicted + labelled > 0
        return float((2 * right[seen] / (predicted + labelled)[seen]).mean())


def _shares(right: torch.Tensor) -> torch.Tensor:
    """How many are true of `right` [B], and B: [2] int64."""
    total = right.sum()
    return torch.stack([total, total.new_full((), len(right))])


SCORES: dict[str, type[Score]] = {
    "accuracy": Accuracy,
    "loss": CrossEntropy,
    "top_k": TopK,
    "macro_f1": MacroF1,
}

SCORES_KIND = Kind("score", Score, SCORES, "rayfl.scores")


class Goal(ABC):
    """What is learned from samples: a loss, the scores, and the labels that say who gets which samples. Hashable."""

    classes: int
    """How many labels there are: 0 ... classes - 1."""
    scores: tuple[Score, ...]
    """What an evaluation gives."""
    padding: ClassVar[int | None] = None
    """A label whose samples count for nothing in the mean of the loss; None: there is none."""

    @abstractmethod
    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean over a batch, to be minimised: a scalar of logits [B, C] and y [B]."""

    @abstractmethod
    def labels(self, split: Mapping[str, np.ndarray]) -> np.ndarray:
        """One label of each sample of a split [N] int64: what partition rules look at."""


@dataclass(frozen=True)
class Classes(Goal):
    """One of `classes` classes a sample, `y` [N]; trained by cross-entropy."""

    classes: int
    scores: tuple[Score, ...] = (Accuracy(), CrossEntropy())
    padding: ClassVar[int | None] = -100

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y)

    def labels(self, split: Mapping[str, np.ndarray]) -> np.ndarray:
        return split["y"]


def present(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Which classes there are among labels [n]: [classes] bool."""
    return torch.bincount(labels, minlength=classes) > 0
