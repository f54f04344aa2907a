"""ScaleFL as run by NeFL's authors: submodels of fewer channels and blocks with one classifier; all is averaged.

Paper: Kang et al., "NeFL: Nested Model Scaling for Federated Learning with System Heterogeneous Clients", IEEE
Transactions on Mobile Computing 2025, https://arxiv.org/abs/2308.07761 (section V-A, and the authors' code), after
Ilhan, Su, Liu, "ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients", CVPR 2023, which is
`scalefl`.

Symbols: $x$ the global parameters, $S_k$ the channels and blocks of submodel $k$, $M_k$ the participants of a round
that trained submodel $k$.

    $y_i$         for $i in M_k$: SGD from $S_k x$ on cross-entropy; skips past omitted blocks as in NeFL, no step sizes
    $x$           $<- (sum_k sum_(i in M_k) S_k^T y_i)/(sum_k |M_k| S_k^T 1)$, elsewhere unchanged; the norms' weights,
                biases and running statistics are averaged like the rest, channel by channel

Cost per round: the client's network with its statistics down and up, its training, one sum on the server.

This is NeFL-WD without submodel-specific parameters. It lacks ScaleFL's early exits, their distillation and the Scaler.
`evaluation.statistics` is ignored.

Departures:
1. The paper mentions a classifier after additional downsampling; the code, which produced the numbers, has the
   classifier of the whole network.
2. As departures 2 and 3 of `depthfl_nefl`.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from rayfl.core.fold import State
from rayfl.core.net import Net
from rayfl.methods.base import Task
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.methods.sizes import Submodels, nested


class ScaleFLNeFL(Dense):
    contract: ClassVar = Contract(wants="blocks", clients={"metric": "params"})

    name: Literal["scalefl_nefl"] = "scalefl_nefl"
    scaler: Literal[False] = False
    """Not supported: the Scaler divides activations, and norms keep running statistics of them."""
    submodels: Submodels = "auto"
    """Submodels of all capacities. auto: the first channels and blocks within the capacity by `clients.metric`.
    published: those of NeFL's paper, in the order of the capacities. Or a list of {capacity, width, blocks}."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return nested(task, self.submodels, ("WD",))

    def init(self) -> State:
        return super().init() | {"statistics": self.task.server.statistics()}
