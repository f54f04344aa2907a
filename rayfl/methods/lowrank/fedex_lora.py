"""FedEx-LoRA: the server averages factors, and merges the residual of their product into the base.

Paper: Singhal, Ponkshe, Vepakomma, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large
Language Models", ACL 2025, https://arxiv.org/abs/2410.09432 (code: CERT-Lab/fedex-lora).

Symbols: as in `base`; $W$ the update merged into the base so far.

    $A_k, B_k$    steps from $A$, $B$ on the base $W_0 + W$
    $A$           $<- sum_k w_k A_k$
    $B$           $<- sum_k w_k B_k$
    $W$           $<- W + P - s B A$, which makes the round exact

Cost per round: $r (d + o)$ numbers per layer up; as many down, and the residual of rank $p <= sum_k r_k$ of the last
round's clients, $p (d + o)$ or $d o$ if that is less; the client's training; sums and a product per layer on the
server.

Departures:
1. The paper has one rank. With several ranks, factors and the products in P are averaged over the holders of a
   component, as by raFLoRA. With the plain P, every round, even without training, would subtract from W the components
   that clients of low rank lack.
2. The code adds the residual transposed, which is correct for GPT-2's layers but not for linear layers.
3. The residual is computed in float64 and stored in float32 beside the base.
4. A client that missed a round also receives its residual; these bytes are not counted.
5. `server:` optimizers step on the factors; the residual compensates for that too, and p is larger by r.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from rayfl.core.fold import Fold, State
from rayfl.core.net import Net
from rayfl.core.submodel import Selection
from rayfl.methods.base import Payload, Task
from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import LowRank, adapters, merged, rank_sent


class FedExLoRA(LowRank):
    contract: ClassVar = Contract(wants="adapters", fedavg=None)
    products_sent: ClassVar = "segments"

    one_scale: ClassVar = True

    name: Literal["fedex_lora"] = "fedex_lora"

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return adapters(task, merged=True)

    def init(self) -> State:
        """Return the initial state. `merged`: rank of the last round's merged update, by layer."""
        return super().init() | {"merged": {path: torch.tensor(0) for path in self.layers}}

    def extract(self, state: State, selection: Selection) -> Payload:
        return super().extract(state, selection) | {"merged": state["merged"]}

    def step(self, state: State, round: int, fold: Fold) -> State:
        params, residuals = fold.mean("params"), {}
        ranks = {path: torch.tensor(0) for path in self.layers}
        for path, mean in self.mean_products(fold).items():
            b, a = params[f"{path}.lora.B"].double(), params[f"{path}.lora.A"].double()
            residuals[path] = mean.dense() - self.scale(path) * b @ a
            whole = self.rank(path)
            sent = (fold.products[segment] for segment in self.segments(path, whole) if segment in fold.products)
            # an optimizer's step starts from the old factors
            rank = sum(int(rank_sent(product)) for product in sent) + whole * (fold.server.optimizer != "mean")
            ranks[path] = torch.tensor(min(rank, *residuals[path].shape))
        return {"params": merged(params, residuals), "merged": ranks}
