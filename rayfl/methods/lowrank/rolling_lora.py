"""Rolling LoRA: clients train a window that rolls over the components. A method of rayfl, after FedRolex.

After: Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS 2022,
https://arxiv.org/abs/2212.01548, on the rank axis.

Symbols: as in `base`; $t$ the round.

    $J_k$             components $(t + u) mod R$ for $u = 0 ... r_k - 1$, of every layer, the same for all clients of a
                    round up to their $r_k$
    $A_k, B_k$        steps from $A[J_k]$, $B[:, J_k]$; with `others: folded` on the base
                    $W_0 + s sum_(j !in J_k) b_j a_j$
    $A[j], B[:, j]$   $<-$ the mean over the clients that trained $j$, weighted by $w_k$

Cost per round: $R (d + o)$ numbers per layer down, with `others: left_out` $r_k (d + o)$; $r_k (d + o)$ up; the
client's training; one sum on the server.

It is Fed-PLoRA with a deterministic window: in $R$ rounds every client trains every component $r_k$ times.

Departures:
1. FedRolex leaves out everything outside the window: `others: left_out`. An adapter is the sum of its components, so
   the others can be folded into the base.
"""

from typing import Literal

from rayfl.core.fold import State
from rayfl.core.submodel import Selection, Slice, rolling
from rayfl.methods.base import Client
from rayfl.methods.lowrank.components import Components


class RollingLoRA(Components):
    name: Literal["rolling_lora"] = "rolling_lora"

    def select(self, state: State, client: Client) -> Selection:
        return self._window(client.round, client.capacity)

    def submodel(self, state: State, round: int, capacity: float) -> Slice:
        return self._window(max(round - 1, 0), capacity)  # of the last round

    def _window(self, round: int, capacity: float) -> Slice:
        return rolling(self.task.server, self.task.nets[capacity], round)
