"""Important LoRA: clients train the most important components. A method of rayfl, after FIARSE.

After: Wu et al., "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction", NeurIPS
2024, https://arxiv.org/abs/2407.19389, on the rank axis.

Symbols: as in `base`.

    $i_j$             $= norm(b_j a_j) = norm(b_j) norm(a_j)$, of the server's factors
    $J_k$             the $r_k$ components of every layer with the largest $i_j$; ties go to the first
    $A_k, B_k$        steps from $A[J_k]$, $B[:, J_k]$; with `others: folded` on the base
                    $W_0 + s sum_(j !in J_k) b_j a_j$
    $A[j], B[:, j]$   $<-$ the mean over the clients that trained $j$, weighted by $w_k$

Cost per round: $R (d + o)$ numbers per layer down, with `others: left_out` $r_k (d + o)$; $r_k (d + o)$ up; the
client's training; one sum on the server.

In round 0, $B$ is 0, all components are equal, and $J_k$ is the first ones.

Departures:
1. FIARSE selects single elements by one threshold, and its gradient moves them away from the threshold. Here whole
   components are selected, r_k per layer, with plain gradients.
2. FIARSE leaves out the elements below the threshold: `others: left_out`.
"""

from typing import Literal

from rayfl.core import factors as lowrank
from rayfl.core.fold import State
from rayfl.core.submodel import Positions, Slice, largest
from rayfl.methods.lowrank.base import rank_of
from rayfl.methods.lowrank.components import Components


class ImportantLoRA(Components):
    name: Literal["important_lora"] = "important_lora"

    def submodel(self, state: State, round: int, capacity: float) -> Slice:
        net, params = self.task.nets[capacity], state["params"]
        positions: dict[str, Positions] = {}
        for path in self.layers:
            found = lowrank.importance(params[f"{path}.lora.B"], params[f"{path}.lora.A"])
            positions[f"{path}.rank"] = largest(found, rank_of(net, path))
        return Slice(self.task.server, net, positions)
