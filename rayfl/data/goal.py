"""Learning tasks. A `Goal` is the one place that says what targets are: their stored form, the number of outputs, the
loss, the scores and the labels for partition rules. Classes, numbers, sets of labels, and tokens.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rayfl.data.arrays import Column
from rayfl.data.modules import Constants
from rayfl.data.scores import (
    R2,
    AbsoluteError,
    Accuracy,
    CrossEntropy,
    ExactMatch,
    LabelAccuracy,
    LabelF1,
    Perplexity,
    Score,
    SquaredError,
    Targets,
)

SURE, RARE = 10, 5
"""More than `SURE` classes of fewer than `RARE` samples each, in the mean, may be numbers."""
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

    def module(self) -> nn.Module:
        """Return a module from the outputs of a network to predictions in the units of the targets. Default:
        unchanged."""
        return nn.Identity()

    @abstractmethod
    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over a batch: a scalar from logits [B, ..., C] and y [B, ...]."""

    @abstractmethod
    def labels(self, split: Mapping[str, np.ndarray], train: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
        """Return one label per sample of a split, [N] int64 from 0 to `kinds` - 1, for partition rules. Labels that
        depend on other samples are those of the training split `train`, by default of the split itself."""

    def weight(self, y: torch.Tensor) -> int | torch.Tensor:
        """Return the number of targets in the mean of `loss`, with which losses of parts of a batch add up."""
        return len(y) if self.padding is None else (y != self.padding).sum()

    @property
    def kinds(self) -> int:
        """Number of different labels for partition rules."""
        return self.classes

    def doubt(self, split: Mapping[str, np.ndarray]) -> str:
        """Return a hint for errors and notes if the targets of a split look like those of another goal. Default: ""."""
        return ""

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

    def labels(self, split: Mapping[str, np.ndarray], train: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
        return split["y"]

    def doubt(self, split: Mapping[str, np.ndarray]) -> str:
        samples, found = len(split["y"]), len(np.unique(split["y"]))
        if found <= SURE or samples >= RARE * found:
            return ""
        return f". Hint: data.target: numbers, if y are numbers (there are {found} classes and {samples} samples)"

    def present(self, samples: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return label_set(samples["y"], self.classes)


@dataclass(frozen=True)
class Numbers(Goal):
    """Regression: `classes` numbers per sample, `y` [N, K]. Trained by the mean squared error of standardised targets,
    (y - mean) / std over the clients' training samples. Scores are in the units of the targets."""

    classes: int
    quantiles: int = 10
    """Labels for partition rules: equal parts of the training split, ordered by the first number."""
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

    def module(self) -> nn.Module:
        return _Units(self)

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean, std = (on_device(values, y.device) for values in (self.mean, self.std))
        return F.mse_loss(logits, ((y - mean) / std).to(logits.dtype))

    def rows(self, logits: torch.Tensor, y: torch.Tensor, part: str = "all") -> tuple[torch.Tensor, torch.Tensor]:
        """Return predictions [n, K] and targets [n, K] in the units of the targets."""
        mean, std = (on_device(values, y.device) for values in (self.mean, self.std))
        return logits * std + mean, y

    def labels(self, split: Mapping[str, np.ndarray], train: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
        y, of = (one["y"][:, 0].astype(np.float64) for one in (split, train or split))
        edges = np.quantile(of, np.arange(1, self.quantiles) / self.quantiles)
        return np.searchsorted(edges, y, side="right")

    @property
    def kinds(self) -> int:
        return self.quantiles


class _Units(Constants):
    """Outputs [B, K] -> numbers in the units of the targets."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, numbers: Numbers):
        super().__init__((-1,), mean=numbers.mean, std=numbers.std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.std + self.mean

    def extra_repr(self) -> str:
        return f"x * std + mean, {super().extra_repr()}"


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

    def labels(self, split: Mapping[str, np.ndarray], train: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
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

    def labels(self, split: Mapping[str, np.ndarray], train: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
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

    def weight(self, y: torch.Tensor) -> torch.Tensor:
        return (y >= (self.classes if self.loss_on == "masked" else 0)).sum()

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
