"""FFA-LoRA: A is frozen and clients train B alone, so that the mean of factors is the mean of products.

Paper: Sun, Li, Li, Ding, "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024,
https://arxiv.org/abs/2403.12313.

Symbols: as in `base`; $A_0$ the $A$ that server and clients draw from the run's seed.

    $B_k$         steps from $B$, with $A_0$ frozen
    $B$           $<- sum_k w_k B_k$; $P = s B A_0$, exactly, if all ranks are equal

Cost per round: $r_k o$ numbers per layer down and up, half of those of FedIT; the client's training; one sum on the
server.

Departures:
1. The paper has one rank. With several ranks, column j of B is averaged over its holders.
2. The paper freezes the random head: `model.head: frozen`.
3. Noise of differential privacy is not included; see `updates.transforms`.
4. The method needs a larger learning rate than methods that train both factors.
"""

from typing import ClassVar, Literal

from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import LowRank, Part


class FFALoRA(LowRank):
    contract: ClassVar = Contract(wants="adapters", fedavg=None)

    name: Literal["ffa_lora"] = "ffa_lora"

    def trains(self, round: int) -> tuple[Part, ...]:
        return ("B",)
