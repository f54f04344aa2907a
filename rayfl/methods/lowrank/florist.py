"""FLoRIST: FLoRA with the stack truncated to the singular directions with most of its energy.

Paper: Ramesh, Dass, "FLoRIST: Singular Value Thresholding for Efficient and Accurate Federated Fine-Tuning of Large
Language Models", 2025, https://arxiv.org/abs/2506.09199.

Symbols: as in `base`; $W$ the update merged into the base so far, $tau$ the threshold.

    $A_k, B_k$    steps from a new $A_k$, uniform within $1/sqrt(d)$, and $B_k = 0$, on the base $W_0 + W$
    $U S V^T$     the singular value decomposition of $P$, computed from the stacked factors
    $p$           the smallest rank with $S_1^2 + ... + S_p^2 >= tau (S_1^2 + S_2^2 + ...)$, per layer
    $W$           $<- W + U[:, :p] S[:p] V[:, :p]^T$

Cost per round: $r_k (d + o)$ numbers per layer up; $p (d + o)$ down, or $d o$ if that is less; the client's training;
one decomposition per layer on the server.

$tau = 1$ is FLoRA.

Departures:
1. The paper selects the best tau from 0.8 to 0.99 for every cell of its tables.
2. The decomposition is by QR of both stacks, in float64; the paper's, by singular values of both, is equivalent.
3. Merging, absent clients, the head and server optimizers are as for FLoRA.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field

from rayfl.core import factors as lowrank
from rayfl.core.fold import Fold, State
from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import merged
from rayfl.methods.lowrank.restarting import Restarting


class FLoRIST(Restarting):
    contract: ClassVar = Contract(wants="adapters", over="products", fedavg=None)

    name: Literal["florist"] = "florist"
    tau: float = Field(default=0.9, gt=0, le=1)
    """Share of the energy to keep in every layer."""

    def step(self, state: State, round: int, fold: Fold) -> State:
        added, ranks = {}, {path: torch.tensor(0) for path in self.layers}
        for path, mean in self.mean_products(fold).items():
            found = lowrank.svd(mean.left, mean.right)
            ranks[path] = torch.tensor(found.rank_of(self.tau))
            u, s, vt = found.truncated(int(ranks[path]))
            added[path] = u * s @ vt
        return {"params": merged(fold.mean("params"), added), "merged": ranks}
