"""RoLoRA: clients train B in one round and A in the next.

Paper: Chen, Zhou, Zhang, et al., "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA", NeurIPS
2025, https://arxiv.org/abs/2502.01755.

Symbols: as in `base`; t the round, counted from 0.

    t even         B_k: steps from B, with A at rest;   B  <-  sum_k w_k B_k
    t odd          A_k: steps from A, with B at rest;   A  <-  sum_k w_k A_k
    down and up    r_k out or r_k in a layer: half. P* is exact, where all ranks are equal

It begins with B, because A has no gradient as long as B is 0.

    >>> from rayfl.methods import METHODS
    >>> [METHODS["rolora"]().trains(t) for t in range(3)]
    [('B',), ('A',), ('B',)]

Departures:
1. The paper has one rank. Of unequal ones every component is averaged over those who hold it.
2. Down goes what the round before has trained, as the paper counts; a client who was not there lacks the other factor,
   which is sent too and not counted.
3. A trained head is trained in all rounds.
"""

from typing import ClassVar, Literal

from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import LowRank, Part


class RoLoRA(LowRank):
    contract: ClassVar = Contract(wants="adapters", fedavg=None)

    name: Literal["rolora"] = "rolora"

    def trains(self, round: int) -> tuple[Part, ...]:
        return ("A",) if round % 2 else ("B",)
