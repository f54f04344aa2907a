"""FedRolex: every client trains a window of channels that rolls over the server model.

Paper: Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction",
NeurIPS 2022, https://arxiv.org/abs/2212.01548.

Symbols: $K$ the width of an axis in the server's network, $k$ the number of positions in a client's window, $t$ the
round, $s$ the stride, $x$ the global parameters.

    $S$           positions $(s t + u) mod K$ for $u = 0 ... k - 1$, with equal $t$ for all clients of a round; $s = 1$:
                one position per round (section 3)
    $y$           SGD from $S x$, with HeteroFL's Scaler and masked loss
    $x$           $<- (sum S^T y)/(sum S^T 1)$ over the clients of the round, elsewhere unchanged

Cost per round: the client's narrow network down and up, its training, one sum on the server.

All axes of a width share one offset. So a client of $k$ channels trains weight $(o, i)$ only if the circular distance
of $o$ and $i$ is less than $k$: $2 k - 1$ of $K$ pairs. Only wider clients train the rest.

Departures:
1. Sizes are ceil(r K) as in the code; the paper writes floor.
2. The authors' code rolls in the other direction: `direction: -1`. Its `--overlap` option advances once per client and
   shuffles the axes; here `overlap` is as defined in the paper.
3. Attention rolls within each head. The code rolls over all heads concatenated and then cuts each, which mixes two
   heads in one: `heads: flattened`.
4. The holder mean is unweighted; the code's `updates` weights depend on the order of the cohort.
5. Devices run the window of the last round (`deploys: window`) or the prefix; the paper evaluates only the server's
   network.
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
    """Direction of the window. 1: upwards, as in the paper. -1: downwards, as in the authors' code."""
    heads: Literal["within", "flattened"] = "within"
    """Rolling of attention: within each head, or over the concatenated heads of a block, as in the authors' code."""
    overlap: float = Field(default=1.0, ge=0, le=1)
    """Overlap of the windows of successive rounds: stride floor(k (1 - overlap)) + 1. 1 as in the paper."""
    deploys: Literal["window", "prefix"] = "window"
    """Submodel deployed at a capacity: the window of the last round, or the first positions."""

    def select(self, state: State, client: Client) -> Selection:
        return self.of_vocabulary(self._rolled(client.round, client.capacity), client)

    def submodel(self, state: State, round: int, capacity: float) -> Slice:
        if self.deploys == "prefix":
            return self.prefix(capacity)
        return self._rolled(max(round - 1, 0), capacity)

    def stride(self, size: int) -> int:
        """Return the positions per round by which a window of this size moves, robust to rounding of `overlap`."""
        return math.floor(size * (1 - self.overlap) + 1e-9) + 1

    def _rolled(self, round: int, capacity: float) -> Slice:
        net = self.net_at(capacity)
        offsets = {name: self.direction * self.stride(axis.size) * round for name, axis in net.layout.axes.items()}
        rolled = windows(self.task.server, net, offsets)
        if self.heads == "within":
            return rolled
        flattened = {
            name: _concatenated(axis, part.size, offsets[name])
            for name, axis in rolled.whole_layout.axes.items()
            if axis.groups > 1 and (part := net.layout.axes[name]).size < axis.size
        }
        return replace(rolled, positions={**rolled.positions, **flattened})


def _concatenated(axis: Axis, size: int, offset: int) -> Positions:
    """Return the first `size` positions of every group, moved by an offset over the concatenated groups.

    >>> _concatenated(Axis("heads", size=4, groups=2), size=2, offset=3).positions
    (3, 4, 7, 0)
    """
    total = axis.groups * axis.size
    starts = range(offset, offset + total, axis.size)
    return Picks(tuple((start + u) % total for start in starts for u in range(size)), axis.size, axis.groups)
