"""What one client holds, as tensors by name, and how they become batches."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from rayfl.data.goal import Goal

Samples = dict[str, torch.Tensor]
"""Tensors by name ("x", "y", ...). Their first dimension is the sample."""
Batch = tuple[torch.Tensor, torch.Tensor]
"""What a network sees and what it should say: (x [B, ...], y [B, ...])."""


class Prepare(ABC):
    """From stored samples to what a network sees, in two steps."""

    @abstractmethod
    def whole(self, samples: Samples) -> Samples:
        """What is done to samples before they are cut into batches: to every sample by itself."""

    @abstractmethod
    def batch(self, samples: Samples, generator: torch.Generator | None) -> Batch:
        """What is done to every batch of what `whole` gave: augmented by the generator's draws, or plain without."""

    def arrange(self, samples: Samples, batch_size: int, generator: torch.Generator | None) -> torch.Tensor | None:
        """In which order stored samples are cut into batches: rows [N], or None: as they are stored. With a generator
        it is that of an epoch, at random by its draws; without, that of an evaluation."""
        return None if generator is None else torch.randperm(_count(samples), generator=generator)

    def renumbered(self, classes: int) -> "Prepare":
        """The same of samples whose tokens are 0 ... `classes` - 1, and a mask, where there is one, is the next."""
        return self

    def plain(self) -> dict[str, Any]:
        """What is done to samples that are not augmented, as plain JSON: config.json of an exported network has it."""
        return {}


@dataclass(frozen=True)
class ClientData:
    """What one client (or one piece of a test set) holds, on the device that computes."""

    samples: Samples
    """As stored; this process's own memory."""
    prepare: Prepare
    goal: Goal
    is_augmented: bool = True
    """Whether training batches are."""

    def __len__(self) -> int:
        return _count(self.samples)

    @property
    def device(self) -> torch.device:
        return next(iter(self.samples.values())).device

    @property
    def present(self) -> torch.Tensor:
        """The client's label set as [classes] bool."""
        return self.goal.present(self.samples)

    def labeled(self, y: torch.Tensor) -> "ClientData":
        """The same samples with other labels, or with targets in their place, [N, ...]."""
        return replace(self, samples=self.samples | {"y": y.to(self.device)})

    @property
    def still(self) -> "ClientData":
        """The same samples, never augmented."""
        return replace(self, is_augmented=False)

    def picked(self, rows: torch.Tensor) -> "ClientData":
        """The samples of these rows [n], in this order."""
        return replace(self, samples=_picked(self.samples, rows.to(self.device)))

    def plain(self, batch_size: int) -> Iterator[Batch]:
        """All samples once, as they stand, not augmented."""
        for start in range(0, len(self), batch_size):
            yield self.prepare.batch(self.prepare.whole(_rows(self.samples, start, batch_size)), None)

    def batches(self, steps: int, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        """So many augmented training batches, shuffled as `prepare` says; the last batch of an epoch may be smaller."""
        while steps:
            # an epoch's samples are picked at once, and as they are stored, because that is little memory to move
            order = self.prepare.arrange(self.samples, batch_size, generator)
            order = torch.arange(len(self)) if order is None else order
            order = order[: steps * batch_size].to(self.device)
            shuffled = self.prepare.whole(_picked(self.samples, order))
            for start in range(0, len(order), batch_size):
                yield self.prepare.batch(_rows(shuffled, start, batch_size), generator if self.is_augmented else None)
                steps -= 1

    def in_order(self, batch_size: int, generator: torch.Generator | None = None) -> Iterator[Batch]:
        """All samples once, in order: as for evaluation, or augmented by a generator's draws."""
        order = self.prepare.arrange(self.samples, batch_size, None)
        samples = self.samples if order is None else _picked(self.samples, order.to(self.device))
        for start in range(0, len(self), batch_size):
            yield self.prepare.batch(self.prepare.whole(_rows(samples, start, batch_size)), generator)


def _count(samples: Samples) -> int:
    return len(next(iter(samples.values())))


def _picked(samples: Samples, rows: torch.Tensor) -> Samples:
    return {name: t.index_select(0, rows) for name, t in samples.items()}


def _rows(samples: Samples, start: int, count: int) -> Samples:
    return {name: t[start : start + count] for name, t in samples.items()}
