"""What a network is to learn, and how well it does, from logits and labels.

A score adds up: every batch, on whatever worker, gives a vector of counts; their sum gives the number.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from rayfl.config import Kind, Named

MOST = 1e4
"""A perplexity that is larger is said to be this."""
AT_ONCE = 2**19
"""Logits whose softmax is taken at a time."""


class Score(Named, ABC):
    """One number of an evaluation. A subclass adds its fields, and says `counts` and `value`."""

    better: ClassVar[Literal["max", "min"]] = "max"
    """Which end is the good one."""
    by_batch: ClassVar[bool] = False
    """Whether the number depends on how an evaluation is cut into batches."""

    @property
    def part(self) -> str:
        """Which rows of an answer count, by the names of `Goal.rows`."""
        return "all"

    @property
    def label(self) -> str:
        """What the number is called in metrics: the name; of a class of your own package, the class's."""
        return self.name.rpartition(":")[2]

    @abstractmethod
    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Of a batch's rows: logits [n, C], labels y [n] -> [k] int64 or float64, to be added up over all batches."""

    @abstractmethod
    def value(self, sums: torch.Tensor) -> float:
        """The number, of the sum [k] of all counts."""

    def values(self, sums: torch.Tensor) -> np.ndarray:
        """The numbers [n] float64 of n sums [n, k]."""
        return np.array([self.value(one) for one in sums], np.float64)

    def counted(self, sums: torch.Tensor) -> np.ndarray:
        """Which of n sums [n, k] are over any row, [n] bool: a client without one has no number."""
        return np.ones(len(sums), bool)


class Mean(Score):
    """A score whose counts are a sum over rows, and their number. Over no rows it is 0."""

    def value(self, sums: torch.Tensor) -> float:
        total, count = sums.tolist()
        return total / (count or 1)

    def values(self, sums: torch.Tensor) -> np.ndarray:
        totals, counts = sums.double().numpy().T
        return totals / np.maximum(counts, 1)

    def counted(self, sums: torch.Tensor) -> np.ndarray:
        return (sums[:, 1] > 0).numpy()


class OfPart(Mean):
    """A mean over a part of the positions of sequences; over all samples where they have no parts."""

    of: str = "all"

    @property
    def part(self) -> str:
        return self.of

    @property
    def label(self) -> str:
        return super().label if self.of == "all" else f"{super().label}_{self.of}"


class Accuracy(OfPart):
    """The share of samples whose largest logit is their label's; of equal logits the first counts."""

    name: Literal["accuracy"] = "accuracy"
    of: Literal["all", "words", "masked"] = "all"
    """Which positions of sequences count. words: those whose label is no special token, as TFF's accuracy without
    unknown words, begins, ends and padding. masked: those that a masked language model does not see."""

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Correct samples, and samples."""
        return _shares(logits.argmax(1) == y)


class CrossEntropy(Mean):
    """The mean of -log softmax(logits)[y] over the samples, in nats."""

    name: Literal["loss"] = "loss"
    better: ClassVar = "min"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The batch's float32 sum, and its rows, in float64."""
        return _cross_entropy(logits, y)


class Perplexity(OfPart):
    """exp of the mean of -log softmax(logits)[y] over all rows, at most `MOST`."""

    name: Literal["perplexity"] = "perplexity"
    better: ClassVar = "min"
    of: Literal["all", "words", "masked"] = "all"
    """Which positions count, as for `Accuracy`."""

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """As `CrossEntropy`."""
        return _cross_entropy(logits, y)

    def value(self, sums: torch.Tensor) -> float:
        return float(np.exp(min(super().value(sums), np.log(MOST))))

    def values(self, sums: torch.Tensor) -> np.ndarray:
        return np.exp(np.minimum(super().values(sums), np.log(MOST)))


class PerplexityOfBatches(Mean):
    """The mean over the batches of an evaluation of each one's perplexity, as in HeteroFL's code: another number with
    other batches. With data set wikitext2 and `evaluation.batch_size: 10` the batches are HeteroFL's chunks."""

    name: Literal["perplexity_heterofl"] = "perplexity_heterofl"
    better: ClassVar = "min"
    by_batch: ClassVar = True

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The batch's perplexity, and 1; of a batch without rows 0 and 0."""
        total, rows = _cross_entropy(logits, y)
        return torch.stack([torch.where(rows > 0, (total / rows).exp(), 0.0), (rows > 0).double()])

    def value(self, sums: torch.Tensor) -> float:
        return min(super().value(sums), MOST)

    def values(self, sums: torch.Tensor) -> np.ndarray:
        return np.minimum(super().values(sums), MOST)


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
        return float((2 * right[seen] / (predicted + labelled)[seen]).mean()) if seen.any() else 0.0


class Matthews(Score):
    """The correlation of guesses and labels (Matthews 1975; of more than two classes Gorodkin 2004), from -1 to 1; 0
    where all guesses, or all labels, are one class, as scikit-learn's matthews_corrcoef."""

    name: Literal["matthews"] = "matthews"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """By label and guess: how many, [C * C]."""
        classes = logits.shape[1]
        return torch.bincount(y * classes + logits.argmax(1), minlength=classes**2)

    def value(self, sums: torch.Tensor) -> float:
        found = sums.double().view(math.isqrt(len(sums)), -1)
        labelled, guessed, total = found.sum(1), found.sum(0), found.sum()
        covariance = found.trace() * total - labelled @ guessed
        spread = (total**2 - labelled @ labelled) * (total**2 - guessed @ guessed)
        return float(covariance / spread.sqrt()) if spread > 0 else 0.0


def _cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The float32 sum over rows [n, C], and n, in float64."""
    # of a vocabulary's logits a few rows at a time: they stay in the cache, and so it is four times as fast
    size = len(y) if logits.numel() <= AT_ONCE else max(AT_ONCE // logits.shape[1], 1)
    parts = zip(logits.split(size or 1), y.split(size or 1), strict=True)
    total = torch.stack([F.cross_entropy(some, of, reduction="sum").double() for some, of in parts]).sum()
    return torch.stack([total, total.new_full((), len(y))])


def _shares(right: torch.Tensor) -> torch.Tensor:
    """How many are true of `right` [B], and B: [2] int64."""
    total = right.sum()
    return torch.stack([total, total.new_full((), len(right))])


SCORES: dict[str, type[Score]] = {
    "accuracy": Accuracy,
    "loss": CrossEntropy,
    "perplexity": Perplexity,
    "perplexity_heterofl": PerplexityOfBatches,
    "top_k": TopK,
    "macro_f1": MacroF1,
    "matthews": Matthews,
}

SCORES_KIND = Kind("score", Score, SCORES, "rayfl.scores")


NOTHING = -100
"""The label of what counts for nothing: padding."""


class Goal(ABC):
    """What is learned from samples: a loss, the scores, and the labels that say who gets which samples. Hashable."""

    classes: int
    """How many labels there are: 0 ... classes - 1."""
    scores: tuple[Score, ...]
    """What an evaluation gives."""
    padding: ClassVar[int | None] = None
    """A label whose samples count for nothing in the mean of the loss; None: there is none."""
    parts: ClassVar[tuple[str, ...]] = ("all",)
    """What `rows` takes."""

    @abstractmethod
    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean over a batch, to be minimised: a scalar of logits [B, ..., C] and y [B, ...]."""

    @abstractmethod
    def labels(self, split: Mapping[str, np.ndarray]) -> np.ndarray:
        """One label of each sample of a split [N] int64, from 0 to `kinds` - 1: what partition rules look at."""

    @property
    def kinds(self) -> int:
        """How many labels partition rules tell apart."""
        return self.classes

    @abstractmethod
    def present(self, samples: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The label set of stored samples, [classes] bool."""

    def rows(self, logits: torch.Tensor, y: torch.Tensor, part: str = "all") -> tuple[torch.Tensor, torch.Tensor]:
        """What scores count of a batch, one row each: logits [n, C] and labels [n]. A goal may name parts of it."""
        return logits, y


@dataclass(frozen=True)
class Classes(Goal):
    """One of `classes` classes a sample, `y` [N]; trained by cross-entropy."""

    classes: int
    scores: tuple[Score, ...] = (Accuracy(), CrossEntropy())
    padding: ClassVar[int | None] = NOTHING

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y)

    def labels(self, split: Mapping[str, np.ndarray]) -> np.ndarray:
        return split["y"]

    def present(self, samples: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return found_in(samples["y"], self.classes)


@dataclass(frozen=True)
class NextToken(Goal):
    """The token that follows, at every position: y [B, T], `NOTHING` where none counts. Samples are `x` [N, T + 1]."""

    classes: int
    scores: tuple[Score, ...] = (Accuracy(), Perplexity(), CrossEntropy())
    special: tuple[int, ...] = ()
    """Tokens that are no words. The part "words" leaves them out."""
    padding: ClassVar[int | None] = NOTHING
    parts: ClassVar = ("all", "words")

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = F.cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=NOTHING, reduction="sum")
        # a batch may have nothing that counts
        return total / (y != NOTHING).sum().clamp(min=1)

    def labels(self, split: Mapping[str, np.ndarray]) -> np.ndarray:
        """A stream has no classes: all samples are of one kind."""
        return np.zeros(len(split["x"]), np.int64)

    @property
    def kinds(self) -> int:
        return 1

    def present(self, samples: Mapping[str, torch.Tensor]) -> torch.Tensor:
        x = samples["x"]
        return found_in(x[x >= 0], self.classes)

    def rows(self, logits: torch.Tensor, y: torch.Tensor, part: str = "all") -> tuple[torch.Tensor, torch.Tensor]:
        counted = y != NOTHING
        if part == "words":
            counted &= self._are_words(y)
        return _picked(logits, y, counted)

    def _are_words(self, tokens: torch.Tensor) -> torch.Tensor:
        return ~torch.isin(tokens, torch.tensor(self.special, dtype=tokens.dtype, device=tokens.device))


@dataclass(frozen=True)
class MaskedTokens(NextToken):
    """The token that stands at a position, of which some are hidden from the network: y [B, T] is the token, and the
    token + `classes` where it is hidden. Parts: "masked", what is hidden."""

    scores: tuple[Score, ...] = (Perplexity(), Perplexity(of="masked"), Accuracy(), CrossEntropy())
    loss_on: Literal["all", "masked"] = "all"
    """Positions that the loss is over (HeteroFL: all, BERT: masked)."""
    parts: ClassVar = ("all", "words", "masked")

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.loss_on == "masked":
            y = torch.where(y >= self.classes, y, NOTHING)
        return super().loss(logits, torch.where(y >= 0, y % self.classes, y))

    def rows(self, logits: torch.Tensor, y: torch.Tensor, part: str = "all") -> tuple[torch.Tensor, torch.Tensor]:
        counted = y >= (self.classes if part == "masked" else 0)
        if part == "words":
            counted &= self._are_words(y % self.classes)
        logits, labels = _picked(logits, y, counted)
        return logits, labels % self.classes


def _picked(logits: torch.Tensor, y: torch.Tensor, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of logits [B, T, C] and y [B, T] that count; no copy where all do."""
    if counted.all():
        return logits.flatten(0, -2), y.flatten()
    return logits[counted], y[counted]


def found_in(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Which classes there are among labels [n]: [classes] bool."""
    return torch.bincount(labels.flatten(), minlength=classes)[:classes] > 0
