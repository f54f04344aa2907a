"""DepthFL as NeFL's authors ran it: submodels of the first blocks, and one classifier; nothing is a network's own.

Paper: Kang et al., "NeFL: Nested Model Scaling for Federated Learning with System Heterogeneous Clients", IEEE
Transactions on Mobile Computing 2025, https://arxiv.org/abs/2308.07761 (section V-A, and the authors' code), after
Kim et al., "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR 2023, which is `depthfl`.

Symbols: x the global parameters, S_k the blocks that submodel k has, at full width, M_k the participants of a round
that trained submodel k.

    y_k            SGD from S_k x on cross-entropy; skips past omitted blocks as in NeFL, no step sizes
    x  <-  sum over k of sum over M_k of S_k^T y_k / sum_k |M_k| S_k^T 1, elsewhere unchanged; the norms' weights,
                   biases and running statistics among it

That is NeFL-D without what NeFL adds to it: no parameters of a submodel's own. Of DepthFL itself it lacks the early
exits, the distillation between them and FedDyn.

    >>> from rayfl.methods import METHODS
    >>> METHODS["depthfl_nefl"]().variants
    ('DepthFL', 'D')

Departures:
1. The paper says that its DepthFL has several classifiers; the code has one, and the numbers are the code's.
2. Running statistics count no batches: their momentum is constant.
3. As for NeFL, projections of omitted blocks count as held, and what nobody trained keeps its value.
"""

from typing import Literal

from rayfl.methods.nested import UniformMethod


class DepthFLNeFL(UniformMethod):
    name: Literal["depthfl_nefl"] = "depthfl_nefl"

    @property
    def variants(self) -> tuple[str, ...]:
        return ("DepthFL", "D")
