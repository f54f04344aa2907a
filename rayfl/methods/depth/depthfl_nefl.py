"""DepthFL as NeFL's authors ran it: submodels of the first blocks, and one classifier; everything is averaged.

Paper: Kang et al., "NeFL: Nested Model Scaling for Federated Learning with System Heterogeneous Clients", IEEE
Transactions on Mobile Computing 2025, https://arxiv.org/abs/2308.07761 (section V-A, and the authors' code), after
Kim et al., "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR 2023, which is `depthfl`.

Symbols: x the global parameters, S_k the blocks that submodel k has, at full width, M_k the participants of a round
that trained submodel k.

    y_k            SGD from S_k x on cross-entropy; skips past omitted blocks as in NeFL, no step sizes
    x  <-  sum over k of sum over M_k of S_k^T y_k / sum_k |M_k| S_k^T 1, elsewhere unchanged; the norms' weights,
                   biases and running statistics are averaged with the rest

That is NeFL-D without a submodel's own parameters. It lacks DepthFL's early exits, the distillation between them and
FedDyn. Its ResNet34 and ResNet56 have other blocks than NeFL-D:

    >>> from rayfl.methods.sizes import published
    >>> from rayfl.models import MODELS
    >>> [published(MODELS["resnet56"](), (v,), (0.2, 0.4, 0.6, 0.8, 1))[0.2].blocks for v in ("DepthFL", "D")]
    ['111111111 111100000 100000000', '110000000 110000000 110000000']

`evaluation.statistics` has no effect.

Departures:
1. The paper says that its DepthFL has several classifiers; the code has one, and the numbers are the code's.
2. Running statistics count no batches: their momentum is constant.
3. As for NeFL, projections of omitted blocks count as held, and what nobody trained keeps its value.
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
    """No Scaler: the norms' running statistics would be those of divided activations."""
    submodels: Submodels = "auto"
    """The network of every capacity: the first blocks that it buys by `clients.metric`; those of NeFL's paper, in the
    order of the capacities; or a list of {capacity, width, blocks}."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return nested(task, self.submodels, ("DepthFL", "D"))

    def init(self) -> State:
        return super().init() | {"statistics": self.task.server.statistics()}
