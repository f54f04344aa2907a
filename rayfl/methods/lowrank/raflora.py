"""raFLoRA: FlexLoRA with every component averaged over its holders, so that high ranks do not collapse.

Paper: Wu et al., "raFLoRA: rank-partitioned aggregation", 2026, https://arxiv.org/abs/2602.13486.

Symbols: as in `base`; 0 < r_(1) < ... < r_(S) the ranks of the population, segment h the components from r_(h-1) to
r_(h); H_h the weights of all clients with r_k >= r_(h).

    A_k, B_k       steps from the first r_k directions
    P*     =   sum_h sum over k with r_k >= r_(h) of (w_k / H_h) s_k B_k[:, h] A_k[h]
    A, B           from the singular value decomposition of P*, as FlexLoRA
    down and up    r_k (in + out) per layer

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
