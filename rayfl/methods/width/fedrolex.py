"""FedRolex: every client trains a window of channels that rolls over the server model.

Paper: Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction",
NeurIPS 2022, https://arxiv.org/abs/2212.01548.

Symbols: K the width of an axis in the server's network, k the number of its positions that a client holds, t the
round, s the stride.

    S_k            positions (s t + u) mod K for u = 0 .. k - 1, the same for all clients of a round up to their k;
                   s = 1: one position a round (section 3)
    y_k, x         as HeteroFL: Scaler, masked loss, holder mean

All axes of a width share one offset. So a client of k channels trains weight (o, i) only if o and i are less than k
apart, circularly: 2 k - 1 of K pairs. The rest is trained by wider clients alone.

    >>> from rayfl.methods import METHODS
    >>> METHODS["fedrolex"](overlap=0.5).stride(8)
    5

Departures:
1. The sizes are ceil(r K) as in the code; the paper writes floor.
2. The authors' code rolls the other way round: `direction: -1`. Its `--overlap` option advances once a client and
   shuffles the axes; here `overlap` is what the paper means by it.
3. Attention heads roll inside each head. The code rolls all heads end to end and then cuts each, so that what was two
   heads meets in one: `heads: flattened`.
4. The mean over holders is plain; the code's `updates` weights depend on the order of the cohort.
5. A device runs the window of the last round (`deploys: window`), or the prefix; the paper evaluates only the
   server's network.
"""

import math
from dataclasses import replace
from typing import Literal

from pydantic import Field

from rayfl.core.axes import Axis
from rayfl.core.fold import State
from rayfl.core.submodel import Picks, Positions, Selection, Slice, windows
from rayfl.methods.base import Client
from rayfl.methods.width.vocabulary import OwnVocabulary
from rayfl.training.settings import Fill


class FedRolex(OwnVocabulary):
    name: Literal["fedrolex"] = "fedrolex"
    scaler: bool = True
    mask: Fill = "zero"
    label_rows: Literal["all", "present"] = "present"
    direction: Literal[1, -1] = 1
    """1: the window's start moves up, as in the paper; -1: down, as in the authors' code."""
    heads: Literal["within", "flattened"] = "within"
    """How attention heads roll: each by itself, or all of a block end to end, as in the authors' code."""
    overlap: float = Field(default=1.0, ge=0, le=1)
    """Share of a window that stays in the next round: stride floor(k (1 - overlap)) + 1; 1 is the paper's."""
    deploys: Literal["window", "prefix"] = "window"
    """What a device of a capacity runs outside training: the last round's window, or the first positions."""

    def select(self, state: State, client: Client) -> Selection:
        return self.of_vocabulary(self._rolled(client.round, client.capacity), client)

    def submodel(self, state: State, round: int, capacity: float) -> Slice:
        if self.deploys == "prefix":
            return self.prefix(capacity)
        return self._rolled(max(round - 1, 0), capacity)

    def stride(self, kept: int) -> int:
        """Positions that a window of `kept` moves a round, without the one that binary noise would take."""
        return math.floor(kept * (1 - self.overlap) + 1e-9) + 1

    def _rolled(self, round: int, capacity: float) -> Slice:
        net = self.net_at(capacity)
        offsets = {name: self.direction * self.stride(axis.size) * round for name, axis in net.layout.axes.items()}
        rolled = windows(self.task.server, net, offsets)
        if self.heads == "within":
            return rolled
        flattened = {
            name: _end_to_end(axis, kept.size, offsets[name])
            for name, axis in rolled.whole_layout.axes.items()
            if axis.groups > 1 and (kept := net.layout.axes[name]).size < axis.size
        }
        return replace(rolled, positions={**rolled.positions, **flattened})


def _end_to_end(axis: Axis, kept: int, offset: int) -> Positions:
    """Of every group the first `kept` positions, all moved by an offset along the groups end to end.

    >>> _end_to_end(Axis("heads", size=4, groups=2), kept=2, offset=3).positions
    (3, 4, 7, 0)
    """
    total = axis.groups * axis.size
    starts = range(offset, offset + total, axis.size)
    return Picks(tuple((start + u) % total for start in starts for u in range(kept)), axis.size, axis.groups)
