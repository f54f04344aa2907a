"""FedEx-LoRA: the server averages factors, and merges into the base what their product lacks.

Paper: Singhal, Ponkshe, Vepakomma, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large
Language Models", ACL 2025, https://arxiv.org/abs/2410.09432 (code: CERT-Lab/fedex-lora).

Symbols: as in `base`; W what has been merged into the base so far.

    A_k, B_k       steps from A, B on the base W0 + W
    A  <-  sum_k w_k A_k,   B  <-  sum_k w_k B_k
    W  <-  W + P* - s B A: with it the round is exact
    up             r (in + out) a layer
    down           r (in + out) a layer, and the residual, of a rank of at most sum_k r_k: so many (in + out), or
                   in out if that is less

    >>> from rayfl.methods import METHODS
    >>> METHODS["fedex_lora"]().changed(4)
    ('A', 'B')

Departures:
1. The paper has one rank. Of unequal ones factors, and the products in P*, are averaged over those who hold a
   component, as by raFLoRA. With the plain P* a round without any training would take from W what narrow clients do not
   have, and the next round again.
2. The code adds the residual transposed, which is right for GPT-2's layers and wrong for linear ones.
3. The residual is worked out in float64 and kept in float32 beside the base.
4. A client who was not there in a round lacks its residual, which is sent and not counted.
5. `server:` optimizers step on the factors; the residual makes up for that too.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from rayfl.core.fold import Fold, State, Update
from rayfl.core.net import Net
from rayfl.core.submodel import Selection
from rayfl.methods.base import Payload, Task, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import LowRank, adapters, merged, rank_sent


class FedExLoRA(LowRank):
    contract: ClassVar = Contract(wants="adapters", fedavg=None)

    name: Literal["fedex_lora"] = "fedex_lora"

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return adapters(task, merged=True)

    def init(self) -> State:
        """`merged`: by layer the rank of what the last round merged."""
        return super().init() | {"merged": {path: torch.tensor(0) for path in self.layers}}

    def extract(self, state: State, selection: Selection) -> Payload:
        return super().extract(state, selection) | {"merged": state["merged"]}

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        trained, metrics = self.train(payload["params"], visit)
        return self.answer(trained, payload, visit, metrics, products="segments")

    def step(self, state: State, round: int, fold: Fold) -> State:
        params, residuals = fold.mean("params"), {}
        ranks = {path: torch.tensor(0) for path in self.layers}
        for path, mean in self.mean_segments(fold).items():
            b, a = params[f"{path}.lora.B"].double(), params[f"{path}.lora.A"].double()
            residuals[path] = mean.dense() - self.scale(self.rank) * b @ a
            ranks[path] = rank_sent(mean)
        return {"params": merged(params, residuals), "merged": ranks}
