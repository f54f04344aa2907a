"""FedAvg: every client trains the whole network of one size.

Paper: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, https://arxiv.org/abs/1602.05629 (Algorithm 1).

Symbols: $x$ the global parameters, $n_k$ client $k$'s number of samples.

    $y_k$         SGD from $x$ on client $k$'s data
    $x$           $<- (sum_k n_k y_k)/(sum_k n_k)$

Cost per round: the network down and up, the client's training, one sum on the server.

In a heterogeneous population it is the upper and the lower reference (HeteroFL's rows a ... e, FedRolex Table 2).
`size: largest`: every client trains the largest network, whatever its capacity; real devices could not.
`size: smallest`: all clients and the server have the network of the smallest capacity.
`size: own`: plain holder mean over nested submodels, which is HeteroFL without Scaler and masks.

Departures:
1. `deploy` returns the global network for every capacity. With `largest`, the accuracy at a small capacity is that of
   a network that does not fit the device.
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
    """Network: that of the largest or of the smallest capacity for all, or that of each client's own capacity."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return same(task, self.size)
