"""FLoRA: the server stacks the clients' factors and merges them into the base; every round has new adapters.

Paper: Wang, Shen, He, Sun, Wang, Lyu, Li, "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous
Low-Rank Adaptations", NeurIPS 2024, https://arxiv.org/abs/2409.05976 (code: ATP-1010/FederatedLLM).

Symbols: as in `base`; $W$ the update merged into the base so far.

    $A_k, B_k$    steps from a new $A_k$, uniform within $1/sqrt(d)$, and $B_k = 0$, on the base $W_0 + W$
    $W$           $<- W + [B_1 | B_2 | ...] [w_1 s_1 A_1; w_2 s_2 A_2; ...] = W + P$, exactly

Cost per round: $r_k (d + o)$ numbers per layer up; the stack of the last round down, $(d + o) sum_k r_k$, or its
product, $d o$, if that is less; the client's training; one product per layer on the server.

Only one factor is weighted; on both the weights would be squared.

Departures:
1. W is accumulated in float32 beside the unchanged base; the code rounds the base to half precision in every round.
2. A client that missed a round also receives its stack; these bytes are not counted.
3. A trained head is averaged over all clients.
4. `server:` optimizers step on the head alone.
"""

from typing import ClassVar, Literal

import torch

from rayfl.core.fold import Fold, State
from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import merged, rank_sent
from rayfl.methods.lowrank.restarting import Restarting


class FLoRA(Restarting):
    contract: ClassVar = Contract(wants="adapters", over="products", fedavg=None)

    name: Literal["flora"] = "flora"

    def step(self, state: State, round: int, fold: Fold) -> State:
        means = self.mean_products(fold)
        params = merged(fold.mean("params"), {path: mean.dense() for path, mean in means.items()})
        ranks = {path: rank_sent(means[path]) if path in means else torch.tensor(0) for path in self.layers}
        return {"params": params, "merged": ranks}
