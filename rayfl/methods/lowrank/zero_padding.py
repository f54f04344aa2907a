"""Zero-padding: clients train the first components, and missing components count as 0 in the mean.

Published as the baseline "FedIT, zero-padded" of FLoRA (https://arxiv.org/abs/2409.05976) and FLoRIST
(https://arxiv.org/abs/2506.09199), and as HetLoRA without weights and pruning.

Symbols: as in `base`.

    $A_k, B_k$    steps from the first $r_k$ rows of $A$ and columns of $B$
    $A[j]$        $<- (sum_(k: r_k > j) w_k A_k[j])/(sum_k w_k)$; $B[:, j]$ likewise

Cost per round: $r_k (d + o)$ numbers per layer down and up, the client's training, one sum on the server.

A round without training multiplies component j of both factors by the weight share of its holders: with ranks
2, 2, 4, 8 and equal weights the last four components shrink to 1/4 per round, their product to 1/16.

Departures:
1. A trained head, which all clients have, is averaged as usual.
2. Components without a holder in the cohort become 0, as in the formula, and stay 0: A and B have no gradient there.
"""

from typing import ClassVar, Literal

from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import LowRank


class ZeroPadding(LowRank):
    contract: ClassVar = Contract(wants="adapters", over="all")
    over: ClassVar = "all"

    name: Literal["zero_padding"] = "zero_padding"
