"""FedRolex: every client trains a window of channels that rolls over the server model.

Paper: Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction",
NeurIPS 2022, https://arxiv.org/abs/2212.01548.

Symbols: K the width of an axis in the server's network, k what the client holds of it, t the round.

    S_k            positions (s t + phase + u) mod K for u = 0 .. k - 1, the same for every client of a
                   round up to its k; s = 1: one position a round (section 3)
    y_k, x         as HeteroFL: Scaler, masked loss, holder mean

    >>> from rayfl.methods import METHODS
    >>> METHODS["fedrolex"](overlap=0.5).stride(8)
    5

Departures:
1. The sizes are ceil(r K) as in the code; the paper writes floor.
2. The authors' code rolls the other way round: `direction: -1`. Its `--overlap` option advances once a client and
   shuffles the axes; here `overlap` is what the paper means by it.
3. Attention heads roll inside each head; the code rolls the flattened axis, which mixes heads.
4. A plain mean over holders; the code's `updates` weights depend on the order of the cohort.
5. `axis_phase`, `coprime_stride` and `capacity_phase` are not the paper's defaults. All axes of a width share
   one offset, so that weight (o, i) is only ever trained by a client of k channels if o and i are less than
   k apart (circularly): 2 k - 1 of K pairs. `axis_phase` moves that band, `coprime_stride` sweeps all pairs;
   `capacity_phase` is the poster's Figure 1.
6. A device runs the window of the last round (`deploys: window`), or the prefix; the paper evaluates only the
   server's network.
"""

import hashlib
import math
from typing import Literal, Self

from pydantic import Field, model_validator

from rayfl.methods.base import Client, State
from rayfl.methods.width import WidthMethod
from rayfl.submodel import Selection, Slice, windows
from rayfl.training import Fill


class FedRolex(WidthMethod):
    name: Literal["fedrolex"] = "fedrolex"
    scaler: bool = True
    mask: Fill = "zero"
    label_rows: Literal["all", "present"] = "present"
    direction: Literal[1, -1] = 1
    """1: the window's start moves up, as in the paper; -1: down, as in the authors' code."""
    overlap: float = Field(default=1.0, ge=0, le=1)
    """Share of a window that stays in the next round: stride floor(k (1 - overlap)) + 1; 1 is the paper's."""
    axis_phase: bool = False
    """Give every axis its own constant offset (a hash of its name), so that axes of a width differ."""
    coprime_stride: bool = False
    """Give every axis its own stride, coprime with its size K, and one position more after every K rounds.
    It still trains every position equally often; two axes meet in all pairs of positions, up to k^2 / K
    of them in the first K rounds (unless their names happen to give one stride)."""
    capacity_phase: int = Field(default=0, ge=0)
    """Positions by which each next smaller capacity starts later (the poster's figure: 2)."""
    deploys: Literal["window", "prefix"] = "window"
    """What a device of a capacity runs outside training: the last round's window, or the first positions."""

    @model_validator(mode="after")
    def _one_stride(self) -> Self:
        if self.coprime_stride and self.overlap != 1:
            raise ValueError("overlap 1 with coprime_stride, which sets every axis's stride")
        return self

    def select(self, state: State, round: int, client: Client, seed: int) -> Selection:
        return self._rolled(round, client.capacity)

    def window(self, state: State, round: int, capacity: float) -> Selection:
        if self.deploys == "prefix":
            return self.prefix(capacity)
        return self._rolled(max(round - 1, 0), capacity)

    def stride(self, kept: int) -> int:
        """Positions that a window of `kept` moves a round."""
        return math.floor(kept * (1 - self.overlap)) + 1

    def _rolled(self, round: int, capacity: float) -> Slice:
        net, task = self.net_at(capacity), self.task
        whole, part = task.layout(task.server), task.layout(net)
        late = self.capacity_phase * list(task.nets).index(capacity)

        def offset(name: str, kept: int, size: int) -> int:
            moved = self.stride(kept) * round
            if self.coprime_stride:
                moved = _coprime(_hash(name) % size + 1, size) * round + round // size
            phase = late + (_hash(name) if self.axis_phase else 0)
            return self.direction * (moved + phase)

        offsets = {name: offset(name, axis.size, whole.axes[name].size) for name, axis in part.axes.items()}
        return windows(whole, part, net, offsets)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")


def _coprime(start: int, size: int) -> int:
    """The first number from `start` up that shares no factor with `size`."""
    return next(n for n in range(start, start + size + 1) if math.gcd(n, size) == 1)
