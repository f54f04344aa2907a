"""Fed-PLoRA: an adapter is parallel modules of rank one, of which a client trains a random few.

Paper: Zhang et al., "Fed-PLoRA", ICLR 2026, https://arxiv.org/abs/2602.16936.

Symbols: as in `base`.

    J_k            r_k of the R components, drawn uniformly, anew for every layer, client and round
    A_k, B_k       steps from A[J_k], B[:, J_k] on the base W0 + s sum over j not in J_k of b_j a_j
    A[j], B[:, j]  <-  the mean over those who trained j, weighted by w_k
    down           R (in + out) a layer: what is folded has to be known
    up             r_k (in + out) a layer

No client ever sees a truncated function.

    >>> from rayfl.methods import METHODS
    >>> METHODS["fed_plora"]().others
    'folded'

Departures:
1. Read in notes of others. A component that nobody drew keeps its value.
2. Every device runs the server's function, whatever its rank: what it does not train is merged into its base.
"""

from typing import ClassVar, Literal

from rayfl.core.fold import State
from rayfl.core.seeds import torch_generator
from rayfl.core.submodel import Selection, Slice, prefix, random_subset
from rayfl.methods.base import Client
from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.components import Components


class FedPLoRA(Components):
    contract: ClassVar = Contract(wants="adapters")

    name: Literal["fed_plora"] = "fed_plora"
    others: Literal["folded"] = "folded"

    def select(self, state: State, client: Client) -> Selection:
        generator = torch_generator(self.task.seed, "subset", client.round, client.id)
        return random_subset(self.task.server, self.task.nets[client.capacity], generator)

    def submodel(self, state: State, round: int, capacity: float) -> Slice:
        return prefix(self.task.server, self.task.nets[capacity])
