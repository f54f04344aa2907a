"""raFLoRA: FlexLoRA with every component averaged over its holders, so that high ranks do not collapse.

Paper: Wu et al., "raFLoRA: rank-partitioned aggregation", 2026, https://arxiv.org/abs/2602.13486.

Symbols: as in `base`; $0 < rho_1 < ... < rho_H$ the ranks of the population, segment $h$ the components from
$rho_(h - 1)$ to $rho_h$; $c_h$ the sum of the weights of all clients with $r_k >= rho_h$.

    $A_k, B_k$    steps from the first $r_k$ directions
    $P$           $= sum_h sum_(k: r_k >= rho_h) w_k/c_h s_k B_k[:, h] A_k[h]$
    $U S V^T$     the singular value decomposition of $P$
    $B$           $<- U[:, :R] S[:R]/s$
    $A$           $<- V[:, :R]^T$

Cost per round: $r_k (d + o)$ numbers per layer down and up, the client's training, one decomposition per layer on the
server.

A round without training does not change the function.

Departures:
1. The formula follows the paper's abstract, the only part available.
2. A segment without a holder in the cohort keeps the server's product. The formula would set it to 0.
3. Signs, missing directions, head and server optimizers are as for FlexLoRA.
"""

from typing import ClassVar, Literal

from rayfl.methods.lowrank.flexlora import FlexLoRA


class RaFLoRA(FlexLoRA):
    products_sent: ClassVar = "segments"

    name: Literal["raflora"] = "raflora"  # pyright: ignore[reportIncompatibleVariableOverride]
