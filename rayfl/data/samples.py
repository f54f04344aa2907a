"""Samples of one client as named tensors, and their batches."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from rayfl.data.arrays import Split
from rayfl.data.goal import Goal

Samples = dict[str, torch.Tensor]
"""Tensors by name ("x", "y", ...). The first dimension is the sample."""
Batch = tuple[torch.Tensor, torch.Tensor]
"""Network input and target: (x [B, ...], y [B, ...])."""


class Prepare(ABC):
    """Conversion of stored samples to network inputs, in two steps."""

    @property
    def learns(self) -> bool:
        """True if `fitted` computes values from training data."""
        return False

    def fitted(self, split: Split) -> Self:
        """Return the conversion with values computed from the clients' training samples. Default: unchanged."""
        return self

    @abstractmethod
    def whole(self, samples: Samples) -> Samples:
        """Process each sample independently, before batching."""

    @abstractmethod
    def batch(self, samples: Samples, generator: torch.Generator | None) -> Batch:
        """Process a batch of the result of `whole`. With a generator the batch is augmented."""

    def arrange(self, samples: Samples, batch_size: int, generator: torch.Generator | None) -> torch.Tensor | None:
        """Return the order of samples for batching: rows [N], or None for the stored order. With a generator it is the
        random order of a training epoch, otherwise the order of an evaluation."""
        return None if generator is None else torch.randperm(_count(samples), generator=generator)

    def renumbered(self, classes: int) -> "Prepare":
        """Return this conversion for the tokens 0 ... `classes` - 1, where the mask token, if any, is `classes`."""
        return self

    def plain(self) -> dict[str, Any]:
        """Return the processing without augmentation as plain JSON, for config.json of an exported network."""
        return {}

    def module(self) -> nn.Module:
        """Return the processing without augmentation as a module: x [B, ...] as stored -> network inputs. Default:
        `whole` and `batch`. `torch.nn.Identity`: networks take what is stored."""
        return _Prepared(self)


class _Prepared(nn.Module):
    """The processing of any `Prepare`."""

    def __init__(self, prepare: Prepare):
        super().__init__()
        self.prepare = prepare

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples = {"x": x, "y": x.new_zeros(x.shape[0])}
        return self.prepare.batch(self.prepare.whole(samples), None)[0]

    def extra_repr(self) -> str:
        return repr(self.prepare)


@dataclass(frozen=True)
class ClientData:
    """Samples of one client, or a part of a test set, on the computing device."""

    samples: Samples
    """Stored samples, in memory of this process."""
    prepare: Prepare
    goal: Goal
    is_augmented: bool = True
    """True if training batches are augmented."""
    repeats: int = 1
    """Times that each training batch comes, one after another."""

    def __len__(self) -> int:
        return _count(self.samples)

    @property
    def device(self) -> torch.device:
        return next(iter(self.samples.values())).device

    @property
    def present(self) -> torch.Tensor:
        """Label set of the client, [classes] bool."""
        return self.goal.present(self.samples)

    def labeled(self, y: torch.Tensor) -> "ClientData":
        """Return the samples with the labels or targets y [N, ...]."""
        return replace(self, samples=self.samples | {"y": y.to(self.device)})

    @property
    def still(self) -> "ClientData":
        """The same samples without augmentation."""
        return replace(self, is_augmented=False)

    def picked(self, rows: torch.Tensor) -> "ClientData":
        """Return the samples of these rows [n], in this order."""
        return replace(self, samples=_picked(self.samples, rows.to(self.device)))

    def plain(self, batch_size: int) -> Iterator[Batch]:
        """Yield all samples once, in stored order, without augmentation."""
        for start in range(0, len(self), batch_size):
            yield self.prepare.batch(self.prepare.whole(_rows(self.samples, start, batch_size)), None)

    def batches(self, steps: int, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Yield `steps` training batches, each `repeats` times, in the order of `prepare`. The last batch of an epoch
        may be smaller. A part of an epoch in stored order starts at a random batch."""
        while steps:
            # select the samples of an epoch at once, in their small stored format
            order = self.prepare.arrange(self.samples, batch_size, generator)
            if order is None:
                order = torch.arange(len(self))
                if steps * batch_size < len(self):
                    start = torch.randint(math.ceil(len(self) / batch_size), (), generator=generator)
                    order = order.roll(-batch_size * int(start))
            order = order[: steps * batch_size].to(self.device)
            shuffled = self.prepare.whole(_picked(self.samples, order))
            for start in range(0, len(order), batch_size):
                batch = self.prepare.batch(_rows(shuffled, start, batch_size), generator if self.is_augmented else None)
                yield from itertools.repeat(batch, self.repeats)
                steps -= 1

    def in_order(self, batch_size: int, generator: torch.Generator | None = None) -> Iterator[Batch]:
        """Yield all samples once, in evaluation order. With a generator they are augmented."""
        return self.in_batches([batch_size] * math.ceil(len(self) / batch_size), generator)

    def in_batches(self, sizes: Sequence[int], generator: torch.Generator | None = None) -> Iterator[Batch]:
        """As `in_order`, in batches of these sizes."""
        order = self.prepare.arrange(self.samples, max(sizes), None)
        samples = self.samples if order is None else _picked(self.samples, order.to(self.device))
        for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
            yield self.prepare.batch(self.prepare.whole(_rows(samples, start, size)), generator)


def equal_batches(samples: int, batch_size: int) -> list[int]:
    """Return the sizes of the fewest batches of at most `batch_size` samples, the sizes differing by at most 1. No
    batch has a single sample, which has no variance, unless it is the only one."""
    count = max(min(math.ceil(samples / batch_size), samples // 2), min(samples, 1))
    return [samples // count + (i < samples % count) for i in range(count)]


def _count(samples: Samples) -> int:
    return len(next(iter(samples.values())))


def _picked(samples: Samples, rows: torch.Tensor) -> Samples:
    return {name: t.index_select(0, rows) for name, t in samples.items()}


def _rows(samples: Samples, start: int, count: int) -> Samples:
    return {name: t[start : start + count] for name, t in samples.items()}
