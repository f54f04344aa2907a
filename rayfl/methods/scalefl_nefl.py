"""ScaleFL as NeFL's authors ran it: submodels of fewer channels and blocks, and one classifier; all is averaged.

Paper: Kang et al., "NeFL: Nested Model Scaling for Federated Learning with System Heterogeneous Clients", IEEE
Transactions on Mobile Computing 2025, https://arxiv.org/abs/2308.07761 (section V-A, and the authors' code), after
Ilhan, Su, Liu, "ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients", CVPR 2023, which is
`scalefl`.

Symbols: x the global parameters, S_k the channels and blocks that submodel k has, M_k the participants of a round that
trained submodel k.

    y_k            SGD from S_k x on cross-entropy; skips past omitted blocks as in NeFL, no step sizes
    x  <-  sum over k of sum over M_k of S_k^T y_k / sum_k |M_k| S_k^T 1, elsewhere unchanged; the norms' weights,
                   biases and running statistics among it, channel by channel

That is NeFL-WD without parameters of a submodel's own. Of ScaleFL itself it lacks the early exits, their distillation
and the Scaler.

    >>> from rayfl.methods import METHODS
    >>> METHODS["scalefl_nefl"]().variants
    ('WD',)

Departures:
1. The paper speaks of a classifier behind additional downsampling; the code has that of the whole network, and the
   numbers are the code's.
2. Running statistics count no batches: their momentum is constant.
3. As for NeFL, projections of omitted blocks count as held, and what nobody trained keeps its value.
"""

from typing import Literal

from rayfl.methods.nested import UniformMethod


class ScaleFLNeFL(UniformMethod):
    name: Literal["scalefl_nefl"] = "scalefl_nefl"

    @property
    def variants(self) -> tuple[str, ...]:
        return ("WD",)
