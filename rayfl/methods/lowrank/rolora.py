"""RoLoRA: clients train B in one round and A in the next.

Paper: Chen, Zhou, Zhang, et al., "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA", NeurIPS
2025, https://arxiv.org/abs/2502.01755.

Symbols: as in `base`; $t$ the round, counted from 0.

    $t$ even      $B_k$: steps from $B$, with $A$ frozen; $B <- sum_k w_k B_k$
    $t$ odd       $A_k$: steps from $A$, with $B$ frozen; $A <- sum_k w_k A_k$

Cost per round: $r_k o$ or $r_k d$ numbers per layer down and up, half of those of FedIT; the client's training; one sum
on the server. $P$ is exact if all ranks are equal.

It starts with $B$, because $A$ has no gradient while $B$ is 0.

Departures:
1. The paper has one rank. With several ranks, every component is averaged over its holders.
2. The factor trained in the previous round is counted as sent down, as in the paper. A client that missed a round also
   receives the other factor; these bytes are not counted.
3. A trained head is trained in all rounds.
4. If round 0 has no updates (`system:`), round 1 trains A while B is 0, so that A has no gradient.
"""

from typing import ClassVar, Literal

from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import LowRank, Part


class RoLoRA(LowRank):
    contract: ClassVar = Contract(wants="adapters", fedavg=None)

    name: Literal["rolora"] = "rolora"

    def trains(self, round: int) -> tuple[Part, ...]:
        return ("A",) if round % 2 else ("B",)
