"""Zero-padding: clients train the first components, and what a client lacks counts as 0 in the mean.

Published as the baseline "FedIT, zero-padded" of FLoRA (https://arxiv.org/abs/2409.05976) and FLoRIST
(https://arxiv.org/abs/2506.09199), and as HetLoRA without its weights and its pruning.

Symbols: as in `base`.

    A_k, B_k       steps from the first r_k rows of A and columns of B
    A[j]  <-  sum over k with r_k > j of w_k A_k[j]  /  sum over all k of w_k;   B[:, j] likewise
    down and up    r_k (in + out) a layer

A round without any training shrinks component j, of both factors, by the share of the weights of those who hold it:
with ranks 2, 2, 4, 8 the last four components are a quarter after a round, their product a sixteenth.

    >>> from rayfl.methods import METHODS
    >>> METHODS["zero_padding"]().over
    'all'

Departures:
1. A trained head, which everybody holds, is averaged as usual.
2. Components that nobody of a cohort holds become 0, as the formula says, and never come back: A and B have no
   gradient there.
"""

from typing import ClassVar, Literal

from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import LowRank


class ZeroPadding(LowRank):
    contract: ClassVar = Contract(wants="adapters", over="all")
    over: ClassVar = "all"

    name: Literal["zero_padding"] = "zero_padding"
