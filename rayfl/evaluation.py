"""The `evaluation:` section, and scoring of a network on a part of a split, on a worker.

Workers return sums (`Judged`); `rayfl.engine.evaluator` plans evaluations and computes metrics from the sums.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field, StrictBool, field_validator
from torch import nn

from rayfl.config import Config, ConfigError, ask
from rayfl.core import norms
from rayfl.core.net import Answer, net_of
from rayfl.core.seeds import numpy_generator, torch_generator
from rayfl.core.tensors import as_tensor
from rayfl.data.arrays import Arrays
from rayfl.data.base import DataSet
from rayfl.data.samples import Batch, ClientData, equal_batches
from rayfl.data.scores import SCORES_KIND, OfNetwork, OfSplits, Score, Texts
from rayfl.training.settings import Fill, answered, every_exit, mask_logits

K = TypeVar("K", bound=Hashable)
PROBED, MOST_OUTPUTS = 256, 2**20
"""Maximum numbers of samples and outputs with which scores are checked before a run."""


class Evaluation(Config):
    """The `evaluation:` section: all capacities on the global test set, clients on their own test splits."""

    every: int = Field(default=10, ge=1)
    """Rounds between evaluations; the last round is always evaluated."""
    batch_size: int = Field(default=500, ge=1, le=10**6)
    """Samples per forward pass, a setting of memory: results are equal up to rounding."""
    holdout: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of the training set held out as the server's validation data, stratified. Used for tuning, so that
    test data are never used for it. 0: none."""
    local_holdout: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of each client's training data held out for validation (local_validation_*). Used to tune personalised
    methods. 0: none."""
    clients: StrictBool | Annotated[int, Field(ge=1)] = True
    """Evaluate clients on their own test splits: all, or this many, drawn once by the seed (equal in all rounds and
    rows of a sweep)."""
    local: Literal["deployed", "server"] = "deployed"
    """Network for clients' own test splits: the network that the method deploys, or the server's (HeteroFL's Local,
    with `label_mask: zero`)."""
    label_mask: Fill = "none"
    """Logits of classes that a client lacks, on its own test split: unchanged, 0 (HeteroFL's Local), or -inf."""
    statistics: Literal["exact", "cumulative", "pooled", "batch"] = "exact"
    """Statistics of static norms for evaluation; see rayfl/core/norms.py."""
    statistics_batch: int | None = Field(default=None, ge=2, le=10**6)
    """Samples per batch from which these statistics are computed: of the training data or, for `batch`, of the
    evaluated data. Default: 100 for `exact`, otherwise `training.batch_size`."""
    statistics_clients: int | None = Field(default=None, ge=1)
    """Number of clients for these statistics, drawn again each time. Default: all."""
    scores: tuple[Any, ...] = ()
    """Scores in addition to those of the data set, by name ("macro_f1") or as "package.module:Class"."""

    @field_validator("scores")
    @classmethod
    def _read(cls, given: tuple[Any, ...]) -> tuple[Score, ...]:
        return tuple(SCORES_KIND.read(score, f"scores.{i}") for i, score in enumerate(given))

    def judged(self, count: int, seed: int) -> np.ndarray:
        """Return the evaluated clients [n] of `count` clients, ascending."""
        if self.clients is True or self.clients >= count:
            return np.arange(count)
        drawn = numpy_generator(seed, "judged").choice(count, int(self.clients), replace=False, shuffle=False)
        return np.sort(drawn)

    @property
    def piece(self) -> int:
        """Samples per job."""
        return 4 * self.batch_size


def check_scores(scores: Sequence[Score], data: DataSet, arrays: Arrays) -> None:
    """Raise a ConfigError if a score cannot be computed for a few test samples and random outputs."""
    goal, total = data.goal, arrays.test_samples

    def targets(count: int) -> torch.Tensor:
        rows = np.linspace(0, total - 1, min(count, total)).astype(np.int64)
        samples = {name: as_tensor(array[rows]) for name, array in arrays.test.items()}
        return data.prepare.batch(data.prepare.whole(samples), None)[1]

    def outputs(y: torch.Tensor) -> torch.Tensor:
        shape = (*y.shape, goal.classes) if goal.targets == "class" else y.shape
        return torch.randn(shape, generator=torch_generator(0, "scores"))

    for score in scores:
        if isinstance(score, OfNetwork):
            score.check(goal)
    y = targets(max(1, min(PROBED, MOST_OUTPUTS // outputs(targets(1)).numel())))
    for score in _of_logits(scores):
        try:
            counts = counted(score, *goal.rows(outputs(y), y, score.part))
            value = score.value(counts)
            size = np.size(np.asarray(value))
            if size != 1:
                raise ConfigError(
                    f"evaluation.scores: {score.name}.value returns {size} numbers. Allowed: one number. Hint: a "
                    "method `matrix` keeps and plots more"
                )
            _ = float(value), score.values(counts[None]), score.counted(counts[None])
        except ConfigError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(
                f"evaluation.scores: {score.name} fails on {len(y)} test samples and random outputs ({reason}). "
                "Allowed: `counts` that returns a tensor [k] of numbers that add up over batches, and `value` that "
                "returns a number"
            ) from error


# on a worker


def _of_logits(scores: Sequence[Score]) -> list[Score]:
    return [score for score in scores if not isinstance(score, OfNetwork)]


def counted(score: Score, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the counts [k] of rows. A ConfigError names the score if it returns something else."""
    found = score.counts(logits, y)
    if isinstance(found, torch.Tensor) and found.dim() == 1:
        return found
    shape = f" of shape {list(found.shape)}" if isinstance(found, torch.Tensor | np.ndarray) else ""
    raise ConfigError(
        f"evaluation.scores: {score.name}.counts returns {type(found).__name__}{shape}. Allowed: a tensor [k] of "
        "numbers that add up over batches"
    )


def _counts(score: Score, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ask(f"evaluation.scores: {score.name}, counts", partial(counted, score, logits, y))


def values_of(score: Score, sums: torch.Tensor) -> np.ndarray:
    """Return the metrics [n] of sums [n, k]."""
    return ask(f"evaluation.scores: {score.name}, values", partial(score.values, sums))


def value_of(score: Score, sums: torch.Tensor) -> float:
    """Return the metric of sums [k]."""
    return ask(f"evaluation.scores: {score.name}, value", lambda: float(score.value(sums)))


def _name(module: nn.Module) -> str:
    net = net_of(module)
    return net.model.name if net else type(module).__name__


@dataclass(frozen=True)
class Judged:
    """Sums of scores of a network on one part of a split."""

    count: int
    """Number of samples."""
    sums: Mapping[str, torch.Tensor]
    """Score -> sums, which can be added over parts."""
    exits: tuple[torch.Tensor, ...] = ()
    """Sums of the first score per exit."""
    texts: Mapping[str, list[Texts]] = field(default_factory=dict)
    """Score -> texts of some samples."""


@torch.no_grad()
def judge(
    module: nn.Module,
    pieces: Sequence[ClientData],
    scores: Sequence[Score],
    batch_size: int,
    answer: Answer = "last",
    fill: Fill = "none",
    present: Sequence[torch.Tensor] | None = None,
) -> list[Judged]:
    """Return the sums of all scores per piece. Small pieces share forward passes, except where norms lack statistics.
    `answer`: prediction from several exits. `present` (per piece, [C]) and `fill`: mask of the logits of absent
    classes."""
    module.eval()
    sums: list[dict[str, torch.Tensor]] = [{} for _ in pieces]
    exits: list[dict[int, torch.Tensor]] = [{} for _ in pieces]
    texts: list[dict[str, list[Texts]]] = [{} for _ in pieces]
    of_logits = _of_logits(scores)
    of_network = [score for score in scores if isinstance(score, OfSplits)]
    measures = {score.measure: score for score in of_logits}
    for batches in _passes(pieces, batch_size, norms.has_statistics(module)):
        inputs = [x for _, x, _ in batches]
        x = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
        outputs = every_exit(ask(f"model: {_name(module)}, forward", partial(module, x)))
        for (i, _, y), *given in zip(batches, *(z.split([len(x) for x in inputs]) for z in outputs), strict=True):
            if present is not None:
                given = [mask_logits(logits, present[i], fill) for logits in given]
            goal = pieces[i].goal
            if len(given) > 1:
                first = scores[0]
                add_to(exits[i], {k: _counts(first, *goal.rows(z, y, first.part)) for k, z in enumerate(given)})
            logits = answered(tuple(given), answer)
            rows = {part: goal.rows(logits, y, part) for part in {score.part for score in of_logits}}
            counts = {measure: _counts(score, *rows[score.part]) for measure, score in measures.items()}
            add_to(sums[i], {score.label: counts[score.measure] for score in of_logits})
        for score in of_network:
            for i, x, y in batches:
                counts, shown = score.network_counts(module, x, y, pieces[i].goal)
                add_to(sums[i], {score.label: counts})
                texts[i].setdefault(score.label, shown)
    return [
        Judged(len(piece), {name: t.cpu() for name, t in found.items()}, tuple(t.cpu() for t in early.values()), shown)
        for piece, found, early, shown in zip(pieces, sums, exits, texts, strict=True)
    ]


def _passes(pieces: Sequence[ClientData], batch_size: int, shared: bool) -> Iterator[list[tuple[int, *Batch]]]:
    """Yield the (piece, x, y) of every forward pass. If `shared`, it may have samples of several pieces of one
    shape."""
    batches: list[tuple[int, *Batch]] = []
    samples = 0
    for i, piece in enumerate(pieces):
        for x, y in piece.in_batches(equal_batches(len(piece), batch_size)):
            samples += len(x)
            if batches and not (shared and samples <= batch_size and x.shape[1:] == batches[0][1].shape[1:]):
                yield batches
                batches, samples = [], len(x)
            batches.append((i, x, y))
    yield batches


def add_to(totals: dict[K, torch.Tensor], more: Mapping[K, torch.Tensor]) -> None:
    for key, t in more.items():
        totals[key] = totals[key] + t if key in totals else t
