"""ScaleFL as NeFL's authors ran it: submodels of fewer channels and blocks, and one classifier; everything is averaged.

Paper: Kang et al., "NeFL: Nested Model Scaling for Federated Learning with System Heterogeneous Clients", IEEE
Transactions on Mobile Computing 2025, https://arxiv.org/abs/2308.07761 (section V-A, and the authors' code), after
Ilhan, Su, Liu, "ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients", CVPR 2023, which is
`scalefl`.

Symbols: x the global parameters, S_k the channels and blocks that submodel k has, M_k the participants of a round that
trained submodel k.

    y_k            SGD from S_k x on cross-entropy; skips past omitted blocks as in NeFL, no step sizes
    x  <-  sum over k of sum over M_k of S_k^T y_k / sum_k |M_k| S_k^T 1, elsewhere unchanged; the norms' weights,
                   biases and running statistics are averaged with the rest, channel by channel

That is NeFL-WD without a submodel's own parameters. It lacks ScaleFL's early exits, their distillation and the Scaler.

    >>> from rayfl.methods.sizes import published
    >>> from rayfl.models import MODELS
    >>> smallest = published(MODELS["resnet18"](), ("WD",), (0.2, 0.4, 0.6, 0.8, 1))[0.2]
    >>> smallest.width, smallest.blocks
    ('sqrt(0.34)', '11 11 11 10')

`evaluation.statistics` has no effect.

Departures:
1. The paper speaks of a classifier behind additional downsampling; the code has that of the whole network, and the
   numbers are the code's.
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


class ScaleFLNeFL(Dense):
    contract: ClassVar = Contract(wants="blocks", clients={"metric": "params"})

    name: Literal["scalefl_nefl"] = "scalefl_nefl"
    scaler: Literal[False] = False
    """No Scaler: the norms' running statistics would be those of divided activations."""
    submodels: Submodels = "auto"
    """The network of every capacity: the first channels and blocks that it buys by `clients.metric`; those of NeFL's
    paper, in the order of the capacities; or a list of {capacity, width, blocks}."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return nested(task, self.submodels, ("WD",))

    def init(self) -> State:
        return super().init() | {"statistics": self.task.server.statistics()}
