"""FLoRA: the clients' factors are stacked, merged into the base, and every round starts with new adapters.

Paper: Wang, Shen, He, Sun, Wang, Lyu, Li, "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous
Low-Rank Adaptations", NeurIPS 2024, https://arxiv.org/abs/2409.05976 (code: ATP-1010/FederatedLLM).

Symbols: as in `base`; W what has been merged into the base so far.

    A_k, B_k       steps from a new A_k, uniform within 1 / sqrt(in), and B_k = 0, on the base W0 + W
    W      <-  W + [B_1 | B_2 | ...] [w_1 s_1 A_1; w_2 s_2 A_2; ...]  =  W + P*, exactly
    up             r_k (in + out) a layer
    down           (in + out) sum_k r_k a layer, the stack of the last round, or in out, its product, if that is less

The weights stand on one factor: on both they would be squared.

    >>> from rayfl.methods import METHODS
    >>> METHODS["flora"]().changed(0)
    ()

Departures:
1. What is merged is added up in float32 beside the base, which stays as it is; the code rounds the base to half
   precision in every round.
2. A client who was not there in a round lacks its stack, which is sent and not counted.
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
