"""RBLA: clients train the first components, and the server averages every component over its holders.

Paper: Chen, Tian, Narayan-Chen, et al., "RBLA: Rank-Based-LoRA-Aggregation for Fine-Tuning Heterogeneous Models in
FLaaS", 2024, https://arxiv.org/abs/2408.08699.

Symbols: as in `base`.

    $A_k, B_k$    steps from the first $r_k$ rows of $A$ and columns of $B$
    $A[j]$        $<- (sum_(k: r_k > j) w_k A_k[j])/(sum_(k: r_k > j) w_k)$; $B[:, j]$ likewise

Cost per round: $r_k (d + o)$ numbers per layer down and up, the client's training, one sum on the server.

A round without training changes nothing. The rule equals *replication padding* (Byun, Lee, "Towards Federated Low-Rank
Adaptation of Language Models with Rank Heterogeneity", NAACL 2025, https://arxiv.org/abs/2406.17477), where the server
fills a client's missing components with their holders' mean $m$, and then averages over the cohort: with $h$ the weight
share of the holders, $h m + (1 - h) m = m$.

Departures:
1. Only the title and this rule of RBLA were available: the holder mean on the rank axis.
2. Replication from a single client of high rank and the allocation of ranks by loss are not implemented.
"""

from typing import Literal

from rayfl.methods.lowrank.base import LowRank


class RBLA(LowRank):
    name: Literal["rbla"] = "rbla"
