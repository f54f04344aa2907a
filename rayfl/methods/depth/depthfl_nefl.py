"""DepthFL as run by NeFL's authors: submodels of the first blocks with one classifier; all tensors are averaged.

Paper: Kang et al., "NeFL: Nested Model Scaling for Federated Learning with System Heterogeneous Clients", IEEE
Transactions on Mobile Computing 2025, https://arxiv.org/abs/2308.07761 (section V-A, and the authors' code), after
Kim et al., "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR 2023, which is `depthfl`.

Symbols: $x$ the global parameters, $S_k$ the blocks of submodel $k$, at full width, $M_k$ the participants of a round
that trained submodel $k$.

    $y_i$         for $i in M_k$: SGD from $S_k x$ on cross-entropy; skips past omitted blocks as in NeFL, no step sizes
    $x$           $<- (sum_k sum_(i in M_k) S_k^T y_i)/(sum_k |M_k| S_k^T 1)$, elsewhere unchanged; the norms' weights,
                biases and running statistics are averaged like the rest

Cost per round: the client's network with its statistics down and up, its training, one sum on the server.

This is NeFL-D without submodel-specific parameters. It lacks DepthFL's early exits, the distillation between them, and
FedDyn. Its published ResNet34 and ResNet56 have other blocks than NeFL-D (`nefl_submodels.yaml`).
`evaluation.statistics` is ignored.

Departures:
1. The paper says that its DepthFL has several classifiers; the code, which produced the numbers, has one.
2. The momentum of running statistics is constant: batches are not counted.
3. As in NeFL, projections of omitted blocks count as held, and coordinates without a holder are unchanged.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from rayfl.core.fold import State
from rayfl.core.net import Net
from rayfl.methods.base import Task
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.methods.sizes import Submodels, nested


class DepthFLNeFL(Dense):
    contract: ClassVar = Contract(wants="blocks", clients={"metric": "params"})

    name: Literal["depthfl_nefl"] = "depthfl_nefl"
    scaler: Literal[False] = False
    """Not supported: the Scaler divides activations, and norms keep running statistics of them."""
    submodels: Submodels = "auto"
    """Submodels of all capacities. auto: the first blocks within the capacity by `clients.metric`. published: those of
    NeFL's paper, in the order of the capacities. Or a list of {capacity, width, blocks}."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return nested(task, self.submodels, ("DepthFL", "D"))

    def init(self) -> State:
        return super().init() | {"statistics": self.task.server.statistics()}
