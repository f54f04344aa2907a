"""FedIT: all clients train adapters of one rank, and the server averages their factors.

Paper: Zhang, Vahidian, Kuo, Li, Zhang, Yu, Wang, Chen, "Towards Building the Federated GPT: Federated Instruction
Tuning", 2023, https://arxiv.org/abs/2305.05644 (code: JayZhang42/FederatedGPT-Shepherd).

Symbols: as in `base`; r the one rank, n_k a client's number of samples, w_k = n_k / sum n.

    A_k, B_k       steps from A, B
    A  <-  sum_k w_k A_k,   B  <-  sum_k w_k B_k
    down and up    r (in + out) a layer

The product of the means is not the mean P* of the products. With one client it is.

    >>> from rayfl.methods import METHODS
    >>> METHODS["fedit"]().trains(0)
    ('A', 'B')

Departures:
1. The code averages what PEFT saves; here a trained head is averaged with it.
2. The factors of a cohort with one capacity are FedAvg's, to the bit. `size` says whose rank it is where capacities
   differ; the paper has one.
3. FLoRA's authors compare with a FedIT that keeps the first client's factors alone, by a mistake in their code. This is
   the paper's.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from rayfl.core.net import Net
from rayfl.methods.base import Task
from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import LowRank, adapters
from rayfl.methods.sizes import same


class FedIT(LowRank):
    contract: ClassVar = Contract(wants="adapters")

    name: Literal["fedit"] = "fedit"
    size: Literal["largest", "smallest"] = "largest"
    """The one rank: that of the largest capacity, or of the smallest."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        adapters(task)
        return same(task, self.size)
