"""Sequences of tokens: what all data sets of them have, and how stored ones become what a network sees."""

from dataclasses import dataclass, replace

import torch

from rayfl.data.goal import NOTHING
from rayfl.data.samples import Batch, Prepare, Samples

PAD = -1
"""The token behind the end of a sequence."""


def trimmed(x: torch.Tensor, least: int = 1) -> torch.Tensor:
    """x [B, T] without the columns at its end that are padding in all rows; at least so many stay."""
    longest = int((x != PAD).sum(1).max()) if len(x) else 0
    return x[:, : max(longest, least)]


@dataclass(frozen=True)
class Sequences(Prepare):
    """Sequences `x` [N, T] int32 of a class `y` [N] each. A batch is as long as its longest sequence."""

    def whole(self, samples: Samples) -> Samples:
        return samples

    def batch(self, samples: Samples, generator: torch.Generator | None) -> Batch:
        return trimmed(samples["x"]).long(), samples["y"]


@dataclass(frozen=True)
class Following(Prepare):
    """Of `x` [N, T + 1] int32 all tokens but the last, and at each position the one that follows."""

    def whole(self, samples: Samples) -> Samples:
        return samples

    def batch(self, samples: Samples, generator: torch.Generator | None) -> Batch:
        x = trimmed(samples["x"], 2).long()
        y = x[:, 1:]
        return x[:, :-1], torch.where(y == PAD, NOTHING, y)


@dataclass(frozen=True)
class Hidden(Prepare):
    """Of `x` [N, T] int32 some tokens replaced by a mask: in training by the generator's draws, anew in every batch, in
    an evaluation those that `hidden` [N, T] uint8 says. Labels as `MaskedTokens` has them."""

    classes: int
    """What is added to the label of a token that is hidden."""
    mask: int
    """The mask's token."""
    rate: float = 0.15
    """The probability that a token is hidden, each by itself."""

    def whole(self, samples: Samples) -> Samples:
        return samples

    def batch(self, samples: Samples, generator: torch.Generator | None) -> Batch:
        x = trimmed(samples["x"]).long()
        if generator is None:
            hidden = samples["hidden"][:, : x.shape[1]].bool()
        else:
            hidden = (torch.rand(x.shape, generator=generator) < self.rate).to(x.device)
        there = x != PAD
        hidden &= there
        y = torch.where(there, x + self.classes * hidden, NOTHING)
        return torch.where(hidden, self.mask, x), y

    def renumbered(self, classes: int) -> Prepare:
        return replace(self, classes=classes, mask=classes)
