"""Tasks on sequences of tokens, and the preprocessing of sequences."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from rayfl.core.seeds import numpy_generator, torch_generator
from rayfl.data.arrays import Column, Split
from rayfl.data.base import DataSet
from rayfl.data.goal import IGNORE_INDEX, Classes, Goal, MaskedTokens, NextToken
from rayfl.data.samples import Batch, Prepare, Samples

PAD = -1
"""Padding token after the end of a sequence."""
Order = Literal["lengths", "shuffled", "stored"]
TaskName = Literal["classes", "next_token", "masked_lm"]


@dataclass(frozen=True)
class Sequences(Prepare):
    """Sequences `x` [N, T] int32 with one class each, `y` [N]. A batch has the length of its longest sequence."""

    order: Order = "lengths"
    """Order of samples in an epoch. lengths: batches of sequences of similar length, in random order, which needs less
    padding. shuffled: random. stored: the stored order."""

    def whole(self, samples: Samples) -> Samples:
        """Add the length of each sequence, [N] on the CPU, so that a batch does not synchronise with the GPU."""
        return samples | {"length": _lengths(samples["x"])}

    def arrange(self, samples: Samples, batch_size: int, generator: torch.Generator | None) -> torch.Tensor | None:
        if self.order == "stored":
            return None
        order = super().arrange(samples, batch_size, generator)
        if self.order == "shuffled":
            return order
        lengths = _lengths(samples["x"])
        return lengths.argsort(stable=True) if order is None else _by_length(order, lengths, batch_size, generator)

    def batch(self, samples: Samples, generator: torch.Generator | None) -> Batch:
        return _trimmed(samples), samples["y"]

    def padding(self, x: torch.Tensor, batch_size: int) -> tuple[int, int]:
        """Return the number of padding tokens, and of all tokens, in the batches of an epoch of x [N, T]."""
        order = self.arrange({"x": x}, batch_size, torch_generator(0, "batches"))
        lengths = _lengths(x if order is None else x[order])
        total = sum(len(some) * int(some.max()) for some in lengths.split(batch_size))
        return total - int(lengths.sum()), total

    def plain(self) -> dict[str, Any]:
        """Return the padding token."""
        return {"padding": PAD}

    def module(self) -> nn.Module:
        return nn.Identity()


@dataclass(frozen=True)
class Following(Sequences):
    """Next-token prediction: all tokens of `x` [N, T + 1] int32 but the last, with the following token as label."""

    def batch(self, samples: Samples, generator: torch.Generator | None) -> Batch:
        x = _trimmed(samples, 2)
        y = x[:, 1:]
        return x[:, :-1], torch.where(y == PAD, IGNORE_INDEX, y)


@dataclass(frozen=True)
class Hidden(Sequences):
    """Masked tokens of `x` [N, T] int32: drawn anew for every training batch, in evaluations those of `hidden` [N, T]
    uint8. Labels are those of `MaskedTokens`."""

    classes: int = 0
    """Offset of the labels of hidden tokens."""
    mask: int = 0
    """Mask token."""
    rate: float = 0.15
    """Probability of hiding a token."""
    rule: Literal["mask", "bert"] = "mask"
    """Replacement of a hidden token in training. mask: the mask (HeteroFL). bert: with probability 0.8 the mask, 0.1 a
    random token, 0.1 the token itself (Devlin et al. 2019)."""

    def batch(self, samples: Samples, generator: torch.Generator | None) -> Batch:
        x = _trimmed(samples)
        there = x != PAD
        if generator is None:
            hidden, instead = samples["hidden"][:, : x.shape[1]].bool(), self.mask
        else:
            hidden = (torch.rand(x.shape, generator=generator) < self.rate).to(x.device)
            instead = self.mask if self.rule == "mask" else self._instead(x, generator)
        hidden &= there
        y = torch.where(there, x + self.classes * hidden, IGNORE_INDEX)
        return torch.where(hidden, instead, x), y

    def renumbered(self, classes: int) -> Prepare:
        return replace(self, classes=classes, mask=classes)

    def plain(self) -> dict[str, Any]:
        """Return the padding token and the mask token."""
        return super().plain() | {"mask": self.mask}

    def _instead(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw the replacements of hidden tokens at all positions of x [B, t], by BERT's rule."""
        ticket = torch.rand(x.shape, generator=generator).to(x.device)
        anything = torch.randint(self.classes, x.shape, generator=generator).to(x.device)
        return torch.where(ticket < 0.8, self.mask, torch.where(ticket < 0.9, anything, x))


def _lengths(x: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens of each sequence of x [N, T]: [N] int64 on the CPU."""
    return (x != PAD).sum(1).cpu()


def _trimmed(samples: Samples, least: int = 1) -> torch.Tensor:
    """Return x [B, t] int64 without the last columns that are padding in all rows, at least `least` columns."""
    return samples["x"][:, : max(int(samples["length"].max()), least)].long()


def _by_length(
    order: torch.Tensor, lengths: torch.Tensor, batch_size: int, generator: torch.Generator | None
) -> torch.Tensor:
    """Return rows [N] in batches of similar length, with the batches in random order. The last batch of an epoch, which
    may be smaller, has random rows."""
    full = len(order) // batch_size * batch_size
    rows, rest = order[:full], order[full:]
    batches = rows[lengths[rows].argsort(stable=True)].view(-1, batch_size)
    return torch.cat([batches[torch.randperm(len(batches), generator=generator)].flatten(), rest])


@dataclass(frozen=True)
class TokenTask:
    """Task on sequences of tokens, with the members of a data set that depend on it."""

    name: TaskName
    ids: int
    """Number of tokens."""
    length: int
    """Maximum number of tokens of a network input."""
    classes: int = 0
    """Number of classes of sequences, for task `classes`."""
    special: tuple[int, ...] = ()
    """Tokens that are not words. The part "words" of a score ignores them."""
    mask: int | None = None
    """Mask token. None: `ids`, a token outside of the vocabulary."""
    order: Order = "lengths"
    rate: float = 0.15
    rule: Literal["mask", "bert"] = "mask"
    loss_on: Literal["all", "masked"] = "all"
    pad: int | None = None
    """Padding token of the vocabulary, which is in no sequence. None: there is none."""

    @property
    def stored(self) -> int:
        """Number of tokens of a stored sequence."""
        return self.length + (self.name == "next_token")

    @property
    def columns(self) -> Mapping[str, Column]:
        x = {"x": Column((self.stored,), below=self.ids, least=PAD, stored="int32")}
        if self.name == "classes":
            return x | {"y": Column((), below=self.classes)}
        return x | ({"hidden": Column((self.stored,), below=2, stored="uint8")} if self.name == "masked_lm" else {})

    def split(self, x: np.ndarray, y: np.ndarray | None, *address: str) -> Split:
        """Return stored samples of sequences x [N, stored] int32 and, for task `classes`, their classes y [N]. Hidden
        tokens of evaluations are drawn once, with the seed address `address`."""
        if self.name == "classes":
            assert y is not None
            return {"x": x, "y": y}
        if self.name == "next_token":
            return {"x": x}
        drawn = numpy_generator(0, "hidden", *address).random(x.shape, np.float32)
        return {"x": x, "hidden": (drawn < self.rate).astype(np.uint8)}

    @property
    def prepare(self) -> Prepare:
        if self.name == "classes":
            return Sequences(self.order)
        if self.name == "next_token":
            return Following(self.order)
        mask = self.ids if self.mask is None else self.mask
        return Hidden(self.order, self.ids, mask, self.rate, self.rule)

    @property
    def goal(self) -> Goal:
        if self.name == "classes":
            return Classes(self.classes)
        if self.name == "next_token":
            return NextToken(self.ids, special=self.special)
        return MaskedTokens(self.ids, special=self.special, loss_on=self.loss_on)

    @property
    def offers(self) -> Mapping[str, Any]:
        """Defaults for model fields; `ids` includes the mask token."""
        ids = self.ids + (self.name == "masked_lm" and self.mask is None)
        pad = {} if self.pad is None else {"pad": self.pad}
        return {"task": self.name, "ids": ids, "classes": self.goal.classes, "length": self.length} | pad


class TokenData(DataSet, ABC):
    """A data set of sequences of tokens. Its task determines format, preprocessing and goal."""

    @property
    @abstractmethod
    def token_task(self) -> TokenTask:
        """Learning task."""

    @property
    def columns(self) -> Mapping[str, Column]:
        return self.token_task.columns

    @property
    def prepare(self) -> Prepare:
        return self.token_task.prepare

    @property
    def goal(self) -> Goal:
        return self.token_task.goal

    @property
    def offers(self) -> Mapping[str, Any]:
        return self.token_task.offers
