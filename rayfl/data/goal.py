"""Learning tasks and scores. A `Goal` is the one place that says what targets are: their stored form, the number of
outputs, the loss, the scores and the labels for partition rules. Classes, numbers, sets of labels, and tokens.

Scores are additive: every batch gives a vector of counts, and the sum over all batches and workers gives the value.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from rayfl.config import Kind, Named
from rayfl.data.arrays import Column

MAX_PERPLEXITY = 1e4
"""Upper limit of reported perplexities."""
SOFTMAX_CHUNK = 2**19
"""Maximum number of logits per softmax."""

Targets = Literal["class", "numbers", "labels"]
"""Kind of targets: one class per sample (or token), one or more numbers, or any number of labels."""


class Score(Named, ABC):
    """One metric of an evaluation. A subclass adds its fields and implements `counts` and `value`."""

    better: ClassVar[Literal["max", "min"]] = "max"
    """Direction of improvement."""
    by_batch: ClassVar[bool] = False
    """True if the value depends on the batch size of the evaluation."""
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

    name: Literal["loss"] = "loss"
    better: ClassVar = "min"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _cross_entropy(logits, y)


class Perplexity(OfPart):
    """exp of the mean of -log softmax(logits)[y] over all rows, at most `MAX_PERPLEXITY`."""

    name: Literal["perplexity"] = "perplexity"
    better: ClassVar = "min"
    of: Literal["all", "words", "masked"] = "all"
    """Positions that count, as for `Accuracy`."""

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _cross_entropy(logits, y)

    def value(self, sums: torch.Tensor) -> float:
        return float(np.exp(min(super().value(sums), np.log(MAX_PERPLEXITY))))

    def values(self, sums: torch.Tensor) -> np.ndarray:
        return np.exp(np.minimum(super().values(sums), np.log(MAX_PERPLEXITY)))


class PerplexityOfBatches(Mean):
    """Mean of the perplexities of evaluation batches, as in HeteroFL's code. It depends on the batch size: with data
    set wikitext2 and `evaluation.batch_size: 10` the batches are HeteroFL's chunks."""

    name: Literal["perplexity_heterofl"] = "perplexity_heterofl"
    better: ClassVar = "min"
    by_batch: ClassVar = True

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


class MacroF1(Score):
    """Unweighted mean over classes of F1 = 2 TP / (predicted + labelled). Classes without predictions and labels are
    ignored (as in scikit-learn's f1_score with average="macro")."""

    name: Literal["macro_f1"] = "macro_f1"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return correct predictions, predictions and labels per class, [3 C]."""
        classes, predicted = logits.shape[1], logits.argmax(1)
        counted = [torch.bincount(found, minlength=classes) for found in (y[predicted == y], predicted, y)]
        return torch.cat(counted)

    def value(self, sums: torch.Tensor) -> float:
        right, predicted, labelled = sums.double().view(3, -1)
        seen = predicted + labelled > 0
        return float((2 * right[seen] / (predicted + labelled)[seen]).mean()) if seen.any() else 0.0


class Matthews(Score):
    """Correlation of predictions and labels (Matthews 1975; Gorodkin 2004 for more than two classes), from -1 to 1; 0
    if all predictions or all labels are one class, as in scikit-learn's matthews_corrcoef."""

    name: Literal["matthews"] = "matthews"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the confusion matrix, label by prediction, [C * C]."""
        classes = logits.shape[1]
        return torch.bincount(y * classes + logits.argmax(1), minlength=classes**2)

    def value(self, sums: torch.Tensor) -> float:
        found = sums.double().view(math.isqrt(len(sums)), -1)
        labelled, guessed, total = found.sum(1), found.sum(0), found.sum()
        covariance = found.trace() * total - labelled @ guessed
        spread = (total**2 - labelled @ labelled) * (total**2 - guessed @ guessed)
        return float(covariance / spread.sqrt()) if spread > 0 else 0.0


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


class LabelF1(MacroF1):
    """Unweighted mean over labels of F1, as `MacroF1`."""

    name: Literal["label_f1"] = "label_f1"
    of_targets: ClassVar = "labels"

    def counts(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        predicted, labelled = logits > 0, y > 0
        return torch.cat([found.sum(0) for found in (predicted & labelled, predicted, labelled)])


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
    "mse": SquaredError,
    "mae": AbsoluteError,
    "r2": R2,
    "label_accuracy": LabelAccuracy,
    "exact_match": ExactMatch,
    "label_f1": LabelF1,
}

SCORES_KIND = Kind("score", Score, SCORES, "rayfl.scores")


IGNORE_INDEX = -100
"""Label of padding, which losses and scores ignore."""


class Goal(ABC):
    """Learning task: targets, loss, scores, and the labels that partition rules use. Hashable."""

    targets: ClassVar[Targets] = "class"
    """Kind of targets."""
    learns: ClassVar[bool] = False
    """True if `fitted` needs training data."""
    classes: int
    """Number of outputs of a network per row: classes 0 ... classes - 1, numbers, or labels."""
    scores: tuple[Score, ...]
    """Default scores of evaluations."""
    padding: ClassVar[int | None] = None
    """Label that the mean of the loss ignores. None: there is none."""
    parts: ClassVar[tuple[str, ...]] = ("all",)
    """Valid parts for `rows`."""

    @property
    def column(self) -> Column:
        """Specification of the stored targets `y`. Default: one class per sample."""
        return Column((), below=self.classes)

    def fitted(self, split: Mapping[str, np.ndarray]) -> Self:
        """Return the goal with values computed from the clients' training samples. Default: unchanged."""
        return self

    def plain(self) -> dict[str, Any]:
        """Return what an output means as plain JSON, for config.json of an exported network."""
        return {}

    @abstractmethod
    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over a batch: a scalar from logits [B, ..., C] and y [B, ...]."""

    @abstractmethod
    def labels(self, split: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return one label per sample of a split, [N] int64 from 0 to `kinds` - 1, for partition rules."""

    @property
    def kinds(self) -> int:
        """Number of different labels for partition rules."""
        return self.classes

    def present(self, samples: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the label set of stored samples, [classes] bool. Default: all, where outputs are no classes of which
        a client can lack some."""
        return torch.ones(self.classes, dtype=torch.bool, device=samples["y"].device)

    def rows(self, logits: torch.Tensor, y: torch.Tensor, part: str = "all") -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a batch that scores count: logits [n, C] and labels [n], restricted to one of `parts`."""
        return logits, y


@dataclass(frozen=True)
class Classes(Goal):
    """Classification, trained by cross-entropy: one of `classes` classes per sample, `y` [N]."""

    classes: int
    scores: tuple[Score, ...] = (Accuracy(), CrossEntropy())
    padding: ClassVar[int | None] = IGNORE_INDEX

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y)

    def labels(self, split: Mapping[str, np.ndarray]) -> np.ndarray:
        return split["y"]

    def present(self, samples: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return label_set(samples["y"], self.classes)


@dataclass(frozen=True)
class Numbers(Goal):
    """Regression: `classes` numbers per sample, `y` [N, K]. Trained by the mean squared error of standardised targets,
    (y - mean) / std over the clients' training samples. Scores are in the units of the targets."""

    classes: int
    quantiles: int = 10
    """Labels for partition rules: equal parts of a split, ordered by the first number."""
    scores: tuple[Score, ...] = (SquaredError(), AbsoluteError(), R2())
    mean: tuple[float, ...] = (0.0,)
    """Mean of each number, or one for all."""
    std: tuple[float, ...] = (1.0,)
    targets: ClassVar = "numbers"
    learns: ClassVar = True

    @property
    def column(self) -> Column:
        return Column((self.classes,))

    def fitted(self, split: Mapping[str, np.ndarray]) -> Self:
        from sklearn.preprocessing import StandardScaler

        found: Any = StandardScaler().fit(split["y"].astype(np.float64))
        return replace(self, mean=tuple(found.mean_.tolist()), std=tuple(found.scale_.tolist()))

    def plain(self) -> dict[str, Any]:
        return {"target_mean": self.mean, "target_std": self.std}

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean, std = (on_device(values, y.device) for values in (self.mean, self.std))
        return F.mse_loss(logits, ((y - mean) / std).to(logits.dtype))

    def rows(self, logits: torch.Tensor, y: torch.Tensor, part: str = "all") -> tuple[torch.Tensor, torch.Tensor]:
        """Return predictions [n, K] and targets [n, K] in the units of the targets."""
        mean, std = (on_device(values, y.device) for values in (self.mean, self.std))
        return logits * std + mean, y

    def labels(self, split: Mapping[str, np.ndarray]) -> np.ndarray:
        y = split["y"][:, 0].astype(np.float64)
        edges = np.quantile(y, np.arange(1, self.quantiles) / self.quantiles)
        return np.searchsorted(edges, y, side="right")

    @property
    def kinds(self) -> int:
        return self.quantiles


@dataclass(frozen=True)
class LabelSets(Goal):
    """Several labels at once: `y` [N, L] of 0 and 1. Trained by the binary cross-entropy of every label, with logits.
    For partition rules, the label of a sample is its first one; that of a sample without labels is L."""

    classes: int
    scores: tuple[Score, ...] = (LabelAccuracy(), ExactMatch(), LabelF1())
    targets: ClassVar = "labels"

    @property
    def column(self) -> Column:
        return Column((self.classes,), below=2, stored="uint8")

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype))

    def labels(self, split: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.where(split["y"].any(1), split["y"].argmax(1), self.classes)

    @property
    def kinds(self) -> int:
        return self.classes + 1


@dataclass(frozen=True)
class NextToken(Goal):
    """Prediction of the next token at every position: y [B, T], with `IGNORE_INDEX` for padding. Samples are `x`
    [N, T + 1]."""

    classes: int
    scores: tuple[Score, ...] = (Accuracy(), Perplexity(), CrossEntropy())
    special: tuple[int, ...] = ()
    """Tokens that are not words. The part "words" ignores them."""
    padding: ClassVar[int | None] = IGNORE_INDEX
    parts: ClassVar = ("all", "words")

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = F.cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        # a batch may consist of padding only
        return total / (y != IGNORE_INDEX).sum().clamp(min=1)

    def labels(self, split: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return 0 for all samples, because a stream has no classes."""
        return np.zeros(len(split["x"]), np.int64)

    @property
    def kinds(self) -> int:
        return 1

    def present(self, samples: Mapping[str, torch.Tensor]) -> torch.Tensor:
        x = samples["x"]
        return label_set(x[x >= 0], self.classes)

    def rows(self, logits: torch.Tensor, y: torch.Tensor, part: str = "all") -> tuple[torch.Tensor, torch.Tensor]:
        counted = y != IGNORE_INDEX
        if part == "words":
            counted &= self._are_words(y)
        return _picked(logits, y, counted)

    def _are_words(self, tokens: torch.Tensor) -> torch.Tensor:
        return ~torch.isin(tokens, torch.tensor(self.special, dtype=tokens.dtype, device=tokens.device))


@dataclass(frozen=True)
class MaskedTokens(NextToken):
    """Prediction of tokens, some of which are hidden from the network: y [B, T] is the token, plus `classes` at hidden
    positions. The part "masked" are the hidden positions."""

    scores: tuple[Score, ...] = (Perplexity(), Perplexity(of="masked"), Accuracy(), CrossEntropy())
    loss_on: Literal["all", "masked"] = "all"
    """Positions in the loss (HeteroFL: all, BERT: masked)."""
    parts: ClassVar = ("all", "words", "masked")

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.loss_on == "masked":
            y = torch.where(y >= self.classes, y, IGNORE_INDEX)
        return super().loss(logits, torch.where(y >= 0, y % self.classes, y))

    def rows(self, logits: torch.Tensor, y: torch.Tensor, part: str = "all") -> tuple[torch.Tensor, torch.Tensor]:
        counted = y >= (self.classes if part == "masked" else 0)
        if part == "words":
            counted &= self._are_words(y % self.classes)
        logits, labels = _picked(logits, y, counted)
        return logits, labels % self.classes


def _picked(logits: torch.Tensor, y: torch.Tensor, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of logits [B, T, C] and y [B, T] that count, without a copy if all do."""
    if counted.all():
        return logits.flatten(0, -2), y.flatten()
    return logits[counted], y[counted]


@functools.lru_cache(maxsize=64)
def on_device(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return the values as float32 on a device, copied there once."""
    return torch.tensor(values, device=device)


def label_set(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Return which classes occur in labels [n]: [classes] bool."""
    return torch.bincount(labels.flatten(), minlength=classes)[:classes] > 0
