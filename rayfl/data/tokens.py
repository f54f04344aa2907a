"""Sequences of tokens: what all data sets of them have, and how stored ones become what a network sees."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from rayfl.core.seeds import numpy_generator
from rayfl.data.arrays import Column, Split
from rayfl.data.goal import NOTHING, Classes, Goal, MaskedTokens, NextToken
from rayfl.data.samples import Batch, Prepare, Samples

PAD = -1
"""The token behind the end of a sequence."""
Order = Literal["lengths", "shuffled", "stored"]
TaskName = Literal["classes", "next_token", "masked_lm"]


@dataclass(frozen=True)
class Sequences(Prepare):
    """Sequences `x` [N, T] int32 of a class `y` [N] each. A batch is as long as its longest sequence."""

    order: Order = "lengths"
    """How an epoch is ordered. lengths: each batch has sequences of about one length, because a short one costs as much
    as the longest of its batch; the batches are in random order. shuffled: at random. stored: as they are stored."""

    def whole(self, samples: Samples) -> Samples:
        """With the length of each sequence, [N] on the CPU: a batch then asks no GPU for it."""
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

    def plain(self) -> dict[str, Any]:
        """What stands behind the end of a sequence."""
        return {"padding": PAD}


@dataclass(frozen=True)
class Following(Sequences):
    """Of `x` [N, T + 1] int32 all tokens but the last, and at each position the one that follows."""

    def batch(self, samples: Samples, generator: torch.Generator | None) -> Batch:
        x = _trimmed(samples, 2)
        y = x[:, 1:]
        return x[:, :-1], torch.where(y == PAD, NOTHING, y)


@dataclass(frozen=True)
class Hidden(Sequences):
    """Of `x` [N, T] int32 some tokens hidden: in training by the generator's draws, anew in every batch, in an
    evaluation those that `hidden` [N, T] uint8 says, by the mask. Labels as `MaskedTokens` has them."""

    classes: int = 0
    """What is added to the label of a token that is hidden."""
    mask: int = 0
    """The mask's token."""
    rate: float = 0.15
    """The probability that a token is hidden, each by itself."""
    rule: Literal["mask", "bert"] = "mask"
    """What hides a token in training. mask: the mask (HeteroFL). bert: with probability 0.8 the mask, 0.1 any token,
    0.1 nothing (Devlin et al. 2019)."""

    def batch(self, samples: Samples, generator: torch.Generator | None) -> Batch:
        x = _trimmed(samples)
        there = x != PAD
        if generator is None:
            hidden, instead = samples["hidden"][:, : x.shape[1]].bool(), self.mask
        else:
            hidden = (torch.rand(x.shape, generator=generator) < self.rate).to(x.device)
            instead = self.mask if self.rule == "mask" else self._instead(x, generator)
        hidden &= there
        y = torch.where(there, x + self.classes * hidden, NOTHING)
        return torch.where(hidden, instead, x), y

    def renumbered(self, classes: int) -> Prepare:
        return replace(self, classes=classes, mask=classes)

    def plain(self) -> dict[str, Any]:
        """With what stands for a hidden token."""
        return super().plain() | {"mask": self.mask}

    def _instead(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """What stands at a position of x [B, t] if its token is hidden, by BERT's rule."""
        ticket = torch.rand(x.shape, generator=generator).to(x.device)
        anything = torch.randint(self.classes, x.shape, generator=generator).to(x.device)
        return torch.where(ticket < 0.8, self.mask, torch.where(ticket < 0.9, anything, x))


def _lengths(x: torch.Tensor) -> torch.Tensor:
    """Of x [N, T], how many tokens each sequence has: [N] int64 on the CPU."""
    return (x != PAD).sum(1).cpu()


def _trimmed(samples: Samples, least: int = 1) -> torch.Tensor:
    """x [B, t] int64 without the columns at its end that are padding in all rows; at least so many stay."""
    return samples["x"][:, : max(int(samples["length"].max()), least)].long()


def _by_length(
    order: torch.Tensor, lengths: torch.Tensor, batch_size: int, generator: torch.Generator | None
) -> torch.Tensor:
    """Rows in random order [N], sorted by their length, with the batches that they then make in random order again. The
    last batch of an epoch, which may be smaller, is at random: it has the rows that are left over."""
    full = len(order) // batch_size * batch_size
    rows, rest = order[:full], order[full:]
    batches = rows[lengths[rows].argsort(stable=True)].view(-1, batch_size)
    return torch.cat([batches[torch.randperm(len(batches), generator=generator)].flatten(), rest])


@dataclass(frozen=True)
class TokenTask:
    """What is learned from sequences of tokens, and all that a data set of them says because of it."""

    name: TaskName
    ids: int
    """Number of tokens."""
    length: int
    """Tokens of the longest sequence that a network sees."""
    classes: int = 0
    """Classes of sequences, where these are learned."""
    special: tuple[int, ...] = ()
    """Tokens that are no words: the part "words" of a score leaves them out."""
    mask: int | None = None
    """The mask's token; None: one more than there are."""
    order: Order = "lengths"
    rate: float = 0.15
    rule: Literal["mask", "bert"] = "mask"
    loss_on: Literal["all", "masked"] = "all"
    pad: int | None = None
    """The token that stands for nothing in the vocabulary, and so in no sequence; None: it has none."""

    @property
    def stored(self) -> int:
        """Tokens of a stored sequence."""
        return self.length + (self.name == "next_token")

    @property
    def columns(self) -> Mapping[str, Column]:
        x = {"x": Column((self.stored,), below=self.ids, least=PAD, stored="int32")}
        if self.name == "classes":
            return x | {"y": Column((), below=self.classes)}
        return x | ({"hidden": Column((self.stored,), below=2, stored="uint8")} if self.name == "masked_lm" else {})

    def split(self, x: np.ndarray, y: np.ndarray | None, *address: str) -> Split:
        """The stored samples of sequences x [N, stored] int32 and their classes y [N], if these are learned. What an
        evaluation hides is drawn once, at an address."""
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
        """`ids`: what a network may be given, a mask included."""
        ids = self.ids + (self.name == "masked_lm" and self.mask is None)
        pad = {} if self.pad is None else {"pad": self.pad}
        return {"task": self.name, "ids": ids, "classes": self.goal.classes, "length": self.length} | pad
