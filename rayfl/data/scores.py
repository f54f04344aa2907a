"""Scores of an evaluation.

Scores are additive: every batch gives a vector of counts, and the sum over all batches and workers gives the value.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from rayfl.config import ConfigError, Kind, Named

MAX_PERPLEXITY = 1e4
"""Upper limit of reported perplexities."""
MOST_IN_MATRIX = 100
"""Maximum number of classes of a confusion matrix."""
SOFTMAX_CHUNK = 2**19
"""Maximum number of logits per softmax."""

Texts = dict[str, str]
"""A sample in words: prompt, answer and reference."""
Predict = Callable[[torch.Tensor], torch.Tensor]
"""A network: x -> logits, of early exits one prediction."""
Targets = Literal["class", "numbers", "labels"]
"""Kind of targets: one class per sample (or token), one or more numbers, or any number of labels."""


class Score(Named, ABC):
    """One metric of an evaluation. A subclass adds its fields and implements `counts` and `value`.

    >>> class Errors(Score):
    ...     better = "min"
    ...     def counts(self, logits, y):
    ...         return torch.stack([(logits.argmax(1) != y).sum(), torch.tensor(len(y))])
    ...     def value(self, sums):
    ...         return float(sums[0] / sums[1])
    >>> Errors().value(Errors().counts(torch.eye(2), torch.tensor([0, 0])))
    0.5
    """

    better: ClassVar[Literal["max", "min"]] = "max"
    """Direction of improvement."""
    of_targets: ClassVar[Targets] = "class"
    """Kind of targets that it scores."""

    @property
    def part(self) -> str:
        """Part of the rows that counts, a name in `Goal.parts`."""
        return "all"

    @property
    def label(self) -> str:
        """Name in metrics: `name`, or the class name for a class of another package."""
        return self.name.rpartition(":")[2]

    @property
    def counted_by(self) -> int | None:
        """Samples per call of `counts`, which an evaluation then passes forward at once. Default: any number."""
        return None

    @property
    def measure(self) -> Hashable:
        """Key that is equal for scores with equal counts, which are computed once."""
        return self.label

    @abstractmethod
    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the additive counts [k] int64 or float64 of a batch with logits [n, C] and labels y [n]."""

    @abstractmethod
    def value(self, sums: torch.Tensor) -> float:
        """Return the metric for the sum [k] of all counts."""

    def values(self, sums: torch.Tensor) -> np.ndarray:
        """Return the metrics [n] float64 for n sums [n, k]."""
        return np.array([self.value(one) for one in sums], np.float64)

    def counted(self, sums: torch.Tensor) -> np.ndarray:
        """Return which of n sums [n, k] include at least one row, [n] bool. The others have no value."""
        return np.ones(len(sums), bool)

    def matrix(self, sums: torch.Tensor) -> torch.Tensor | None:
        """Return a matrix that is kept and plotted beside the metric of a test set, rows are labels. Default: none."""
        return None


class Mean(Score):
    """A mean over rows: counts are the sum and the number of rows. Without rows the value is 0."""

    def value(self, sums: torch.Tensor) -> float:
        total, count = sums.tolist()
        return total / (count or 1)

    def values(self, sums: torch.Tensor) -> np.ndarray:
        totals, counts = sums.double().numpy().T
        return totals / np.maximum(counts, 1)

    def counted(self, sums: torch.Tensor) -> np.ndarray:
        return (sums[:, 1] > 0).numpy()


class OfPart(Mean):
    """A mean over a part of the positions of sequences, or over all samples."""

    of: str = "all"

    @property
    def part(self) -> str:
        return self.of

    @property
    def label(self) -> str:
        return super().label if self.of == "all" else f"{super().label}_{self.of}"


class Accuracy(OfPart):
    """Fraction of samples whose largest logit is that of their label. The first of equal logits counts."""

    name: Literal["accuracy"] = "accuracy"
    of: Literal["all", "words", "masked"] = "all"
    """Positions of sequences that count. words: labels that are not special tokens (TFF: without unknown words, begins,
    ends and padding). masked: positions hidden from a masked language model."""

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _shares(logits.argmax(1) == y)


class CrossEntropy(Mean):
    """Mean of -log softmax(logits)[y] over the samples, in nats."""

    name: Literal["loss"] = "loss"  # pyright: ignore[reportIncompatibleVariableOverride]
    better: ClassVar = "min"

    @property
    def measure(self) -> Hashable:
        return type(self).counts, self.part

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _cross_entropy(logits, y)


class Perplexity(OfPart, CrossEntropy):
    """exp of the mean of -log softmax(logits)[y] over all rows, at most `MAX_PERPLEXITY`."""

    name: Literal["perplexity"] = "perplexity"  # pyright: ignore[reportIncompatibleVariableOverride]
    of: Literal["all", "words", "masked"] = "all"
    """Positions that count, as for `Accuracy`."""

    def value(self, sums: torch.Tensor) -> float:
        return float(np.exp(min(super().value(sums), np.log(MAX_PERPLEXITY))))

    def values(self, sums: torch.Tensor) -> np.ndarray:
        return np.exp(np.minimum(super().values(sums), np.log(MAX_PERPLEXITY)))


class PerplexityOfBatches(Mean):
    """Mean of the perplexities of batches of samples, as in HeteroFL's code."""

    name: Literal["perplexity_heterofl"] = "perplexity_heterofl"
    better: ClassVar = "min"
    batch_size: int = Field(default=10, ge=1, le=10**6)
    """Samples per batch. With data set wikitext2, batches of 10 are HeteroFL's chunks."""

    @property
    def counted_by(self) -> int | None:
        return self.batch_size

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the perplexity of the batch and 1, or 0 and 0 without rows."""
        total, rows = _cross_entropy(logits, y)
        return torch.stack([torch.where(rows > 0, (total / rows).exp(), 0.0), (rows > 0).double()])

    def value(self, sums: torch.Tensor) -> float:
        return min(super().value(sums), MAX_PERPLEXITY)

    def values(self, sums: torch.Tensor) -> np.ndarray:
        return np.minimum(super().values(sums), MAX_PERPLEXITY)


class TopK(Mean):
    """Fraction of samples whose label is among the `k` largest logits. It is 1 for at most k classes."""

    name: Literal["top_k"] = "top_k"
    k: int = Field(default=5, ge=1)
    """Number of guesses per sample."""

    @property
    def label(self) -> str:
        return f"top{self.k}"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        guesses = logits.topk(min(self.k, logits.shape[1]), 1).indices
        return _shares((guesses == y[:, None]).any(1))


class ByClass(Score):
    """A score of three numbers per class: correct predictions, predictions and labels, [3 C]."""

    @property
    def measure(self) -> Hashable:
        return type(self).counts, self.part

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        classes, predicted = logits.shape[1], logits.argmax(1)
        counted = [torch.bincount(found, minlength=classes) for found in (y[predicted == y], predicted, y)]
        return torch.cat(counted)


class MacroF1(ByClass):
    """Unweighted mean over classes of F1 = 2 TP / (predicted + labelled). Classes without predictions and labels are
    ignored (as in scikit-learn's f1_score with average="macro")."""

    name: Literal["macro_f1"] = "macro_f1"

    def value(self, sums: torch.Tensor) -> float:
        right, predicted, labelled = sums.double().view(3, -1)
        seen = predicted + labelled > 0
        return float((2 * right[seen] / (predicted + labelled)[seen]).mean()) if seen.any() else 0.0


class Matthews(ByClass):
    """Correlation of predictions and labels (Matthews 1975; Gorodkin 2004 for more than two classes), from -1 to 1; 0
    if all predictions or all labels are one class, as in scikit-learn's matthews_corrcoef."""

    name: Literal["matthews"] = "matthews"

    def value(self, sums: torch.Tensor) -> float:
        right, guessed, labelled = sums.double().view(3, -1)
        total = labelled.sum()
        covariance = right.sum() * total - labelled @ guessed
        spread = (total**2 - labelled @ labelled) * (total**2 - guessed @ guessed)
        return float(covariance / spread.sqrt()) if spread > 0 else 0.0


class Confusion(Score):
    """Confusion matrix of the test set, kept in the lines of evaluated rounds (`Result.matrices`) and plotted. The
    metric is the balanced accuracy: the mean over labelled classes of the fraction of right predictions, as
    scikit-learn's balanced_accuracy_score."""

    name: Literal["confusion"] = "confusion"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the number of samples by label and prediction, [C * C]."""
        classes = logits.shape[1]
        if classes > MOST_IN_MATRIX:
            raise ConfigError(
                f"evaluation.scores: confusion is not valid for {classes:,} classes. Allowed: at most "
                f"{MOST_IN_MATRIX}, because every client has a matrix. Hint: macro_f1 or matthews"
            )
        return torch.bincount(y * classes + logits.argmax(1), minlength=classes**2)

    def value(self, sums: torch.Tensor) -> float:
        found = self.matrix(sums).double()
        labelled = found.sum(1)
        rates = found.diagonal() / labelled.clamp_min(1)
        return float(rates.sum() / (labelled > 0).sum().clamp_min(1))

    def counted(self, sums: torch.Tensor) -> np.ndarray:
        return (sums.sum(1) > 0).numpy()

    def matrix(self, sums: torch.Tensor) -> torch.Tensor:
        return sums.view(math.isqrt(len(sums)), -1)


class OfNetwork(Mean):
    """A score of what a network does with samples, in place of its logits: a mean over samples. A subclass is one of
    the two below."""

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # never asked for; a number of logits would be wrong
        raise NotImplementedError(f"{type(self).__name__} scores networks")

    @abstractmethod
    def check(self, goal: Any) -> None:
        """Raise a ConfigError if samples of a goal have no such score."""


class OfSplits(OfNetwork):
    """A score of the samples of the evaluated splits."""

    @abstractmethod
    def network_counts(
        self, module: nn.Module, x: torch.Tensor, y: torch.Tensor, goal: Any
    ) -> tuple[torch.Tensor, list[Texts]]:
        """Return the sum over samples and their number, [2], of a batch of a goal, and texts to show."""


class OfOwnSamples(OfNetwork):
    """A score of samples that it brings, for the networks of all capacities. It belongs to the test set."""

    @property
    @abstractmethod
    def samples(self) -> Sequence[Any]:
        """Samples, read on the server's machine and sent with the jobs."""

    @abstractmethod
    def own_counts(
        self, predict: Predict, samples: Sequence[Any], batch_size: int, goal: Any, device: torch.device
    ) -> torch.Tensor:
        """Return the sum over some of these samples and their number, [2], in forward passes of at most `batch_size`
        sequences."""


def scores_of(split: str, scores: Iterable[Score]) -> list[Score]:
    """Return the scores that a split has."""
    return [score for score in scores if split == "test" or not isinstance(score, OfOwnSamples)]


class SquaredError(Mean):
    """Mean squared error over samples and numbers, in squared units of the targets."""

    name: Literal["mse"] = "mse"
    better: ClassVar = "min"
    of_targets: ClassVar = "numbers"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _total((logits - y).double().square())


class AbsoluteError(Mean):
    """Mean absolute error over samples and numbers, in units of the targets."""

    name: Literal["mae"] = "mae"
    better: ClassVar = "min"
    of_targets: ClassVar = "numbers"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _total((logits - y).double().abs())


class R2(Score):
    """Coefficient of determination, 1 - squared error / squared deviation from the mean of the evaluated targets; the
    mean over numbers (as scikit-learn's r2_score). It has no value if the targets are equal."""

    name: Literal["r2"] = "r2"
    of_targets: ClassVar = "numbers"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return, of every number, the count, sum and sum of squares of the targets, and the squared error: [4 K]."""
        y, error = y.double(), (logits - y).double()
        return torch.cat([torch.full_like(y[:1].sum(0), len(y)), y.sum(0), y.square().sum(0), error.square().sum(0)])

    def value(self, sums: torch.Tensor) -> float:
        deviation, error = self._squares(sums)
        equal = torch.where(error > 0, 0.0, 1.0)
        return float(torch.where(deviation > 0, 1 - error / deviation.clamp_min(1e-300), equal).mean())

    def counted(self, sums: torch.Tensor) -> np.ndarray:
        return (self._squares(sums)[0] > 0).all(-1).numpy()

    def _squares(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the squared deviations and errors [..., K]."""
        count, total, squares, error = sums.double().unflatten(-1, (4, -1)).unbind(-2)
        deviation = squares - total.square() / count.clamp_min(1)
        # less is a rounding error of the difference
        return torch.where(deviation > 1e-12 * squares, deviation, 0.0), error


class LabelAccuracy(Mean):
    """Fraction of correct decisions over samples and labels. A label is predicted if its logit is positive."""

    name: Literal["label_accuracy"] = "label_accuracy"
    of_targets: ClassVar = "labels"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _shares(((logits > 0) == (y > 0)).flatten())


class ExactMatch(Mean):
    """Fraction of samples with exactly the right labels."""

    name: Literal["exact_match"] = "exact_match"
    of_targets: ClassVar = "labels"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _shares(((logits > 0) == (y > 0)).all(1))


class LabelF1(ByClass):
    """Unweighted mean over labels of F1 = 2 TP / (predicted + labelled). A label without predictions and labels counts
    0 (as in scikit-learn's f1_score with average="macro" and zero_division=0)."""

    name: Literal["label_f1"] = "label_f1"
    of_targets: ClassVar = "labels"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        predicted, labelled = logits > 0, y > 0
        return torch.cat([found.sum(0) for found in (predicted & labelled, predicted, labelled)])

    def value(self, sums: torch.Tensor) -> float:
        right, predicted, labelled = sums.double().view(3, -1)
        return float((2 * right / (predicted + labelled).clamp_min(1)).mean())


def _cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the float32 sum over rows [n, C] and n, as float64 [2]."""
    # chunks of large vocabularies fit into the CPU cache, which is four times as fast
    size = len(y) if logits.numel() <= SOFTMAX_CHUNK else max(SOFTMAX_CHUNK // logits.shape[1], 1)
    parts = zip(logits.split(size or 1), y.split(size or 1), strict=True)
    total = torch.stack([F.cross_entropy(some, of, reduction="sum").double() for some, of in parts]).sum()
    return torch.stack([total, total.new_full((), len(y))])


def _total(errors: torch.Tensor) -> torch.Tensor:
    """Return the sum over rows of the mean of errors [n, K], and n: [2] float64."""
    total = errors.mean(1).sum()
    return torch.stack([total, total.new_full((), len(errors))])


def _shares(right: torch.Tensor) -> torch.Tensor:
    """Return the number of true values of `right` [B], and B: [2] int64."""
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
    "confusion": Confusion,
    "mse": SquaredError,
    "mae": AbsoluteError,
    "r2": R2,
    "label_accuracy": LabelAccuracy,
    "exact_match": ExactMatch,
    "label_f1": LabelF1,
}

SCORES_KIND = Kind("score", Score, SCORES, "rayfl.scores")
