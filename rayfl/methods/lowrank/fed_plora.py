"""Fed-PLoRA: adapters are parallel modules of rank one, and clients train a random subset of them.

Paper: Zhang et al., "Fed-PLoRA", ICLR 2026, https://arxiv.org/abs/2602.16936.

Symbols: as in `base`.

    $J_k$             $r_k$ of the $R$ components, drawn uniformly for every layer, client and round
    $A_k, B_k$        steps from $A[J_k]$, $B[:, J_k]$ on the base $W_0 + s sum_(j !in J_k) b_j a_j$
    $A[j], B[:, j]$   $<-$ the mean over the clients that trained $j$, weighted by $w_k$

Cost per round: $R (d + o)$ numbers per layer down, because the folded components are needed too; $r_k (d + o)$ up; the
client's training; one sum on the server.

Every client trains within the full function.

Departures:
1. Implemented from secondary sources. A component that no client drew keeps its value.
2. Every device runs the server's function, whatever its rank: untrained components are merged into its base.
"""

from typing import Literal

from rayfl.core.fold import State
from rayfl.core.seeds import torch_generator
from rayfl.core.submodel import Selection, Slice, prefix, random_subset
from rayfl.methods.base import Client
from rayfl.methods.lowrank.components import Components


class FedPLoRA(Components):
    name: Literal["fed_plora"] = "fed_plora"
    others: Literal["folded"] = "folded"

    def select(self, state: State, client: Client) -> Selection:
        generator = torch_generator(self.task.seed, "subset", client.round, client.id)
        return random_subset(self.task.server, self.task.nets[client.capacity], generator)

    def submodel(self, state: State, round: int, capacity: float) -> Slice:
        return prefix(self.task.server, self.task.nets[capacity])
