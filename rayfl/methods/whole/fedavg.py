"""FedAvg: every client trains the whole network of one size.

Paper: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, https://arxiv.org/abs/1602.05629 (Algorithm 1).

    y_k  =  SGD from x on client k's data;    x  <-  sum_k n_k y_k / sum_k n_k

In a heterogeneous population it is the reference from above and from below (HeteroFL's rows a ... e,
FedRolex Table 2). With `size: largest` every client trains the largest network, whatever its capacity: no real
device could. With `size: smallest` all clients and the server have the network that the weakest device can run.
`size: own` is the plain holder mean over nested submodels: HeteroFL without Scaler and masks.

    >>> from rayfl.methods import METHODS
    >>> METHODS["fedavg"](size="smallest").size
    'smallest'

Departures:
1. `deploy` gives the one global network for every capacity: with `largest`, the accuracy at a small capacity is that
   of a network which does not fit there.
"""

from collections.abc import Mapping
from typing import Literal

from rayfl.core.net import Net
from rayfl.methods.base import Task
from rayfl.methods.dense import Dense
from rayfl.methods.sizes import Size, same


class FedAvg(Dense):
    name: Literal["fedavg"] = "fedavg"
    weight: Literal["samples", "uniform"] = "samples"
    size: Size = "largest"
    """largest, smallest: clients and server have one network, of the largest capacity (a server's own too) or of the
    smallest. own: the server has the largest, and every client the first channels that it can carry."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return same(task, self.size)
