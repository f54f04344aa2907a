"""FedIT: all clients train adapters of one rank, and the server averages their factors.

Paper: Zhang, Vahidian, Kuo, Li, Zhang, Yu, Wang, Chen, "Towards Building the Federated GPT: Federated Instruction
Tuning", 2023, https://arxiv.org/abs/2305.05644 (code: JayZhang42/FederatedGPT-Shepherd).

Symbols: as in `base`; $r$ the common rank, $n_k$ a client's number of samples, $w_k = n_k/(sum_k n_k)$.

    $A_k, B_k$    steps from $A$, $B$
    $A$           $<- sum_k w_k A_k$
    $B$           $<- sum_k w_k B_k$

Cost per round: $r (d + o)$ numbers per layer down and up, the client's training, one sum on the server.

The product of the means differs from the mean $P$ of the products, unless there is only one client.

Departures:
1. The code averages the tensors that PEFT saves; here a trained head is averaged too.
2. With one capacity the factors equal FedAvg's bit for bit. The paper has one capacity; with several, `size` selects
   the rank.
3. FLoRA's authors compare with a FedIT that keeps only the first client's factors, a mistake in their code. This is the
   paper's method.
"""

from collections.abc import Mapping
from typing import Literal

from rayfl.core.net import Net
from rayfl.methods.base import Task
from rayfl.methods.lowrank.base import LowRank, adapters
from rayfl.methods.sizes import same


class FedIT(LowRank):
    name: Literal["fedit"] = "fedit"
    size: Literal["largest", "smallest"] = "largest"
    """Capacity whose rank all clients have."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        adapters(task)
        return same(task, self.size)
