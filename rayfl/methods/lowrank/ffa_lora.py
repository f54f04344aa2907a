"""FFA-LoRA: A stays as it was drawn, clients train B alone, and so the mean of factors is the mean of products.

Paper: Sun, Li, Li, Ding, "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024,
https://arxiv.org/abs/2403.12313.

Symbols: as in `base`; A0 the A that everybody draws from the run's seed.

    B_k            steps from B, with A0 at rest
    B  <-  sum_k w_k B_k;   P* = s B A0, exactly, where all ranks are equal
    down and up    r_k out a layer: half

    >>> from rayfl.methods import METHODS
    >>> METHODS["ffa_lora"]().trains(3)
    ('B',)

Departures:
1. The paper has one rank. Of unequal ones column j of B is averaged over those who hold it.
2. The paper freezes the head as it was drawn: `model.head: frozen`.
3. There is no noise of differential privacy; see `updates.transforms`.
4. It wants a larger rate than methods that train both factors.
"""

from typing import ClassVar, Literal

from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import LowRank, Part


class FFALoRA(LowRank):
    contract: ClassVar = Contract(wants="adapters", fedavg=None)

    name: Literal["ffa_lora"] = "ffa_lora"

    def trains(self, round: int) -> tuple[Part, ...]:
        return ("B",)
