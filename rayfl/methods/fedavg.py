"""FedAvg: every client trains the whole network of one size.

Paper: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, https://arxiv.org/abs/1602.05629 (Algorithm 1).

    y_k  =  SGD from x on client k's data;    x  <-  sum_k n_k y_k / sum_k n_k

In a heterogeneous population it is the reference from above and from below (HeteroFL's rows a ... e,
FedRolex Table 2): `size: largest` lets every client train the largest network, whatever its capacity, which
no real device could; `size: smallest` gives everybody, server included, the network that the weakest can run.

    >>> from rayfl.methods import METHODS
    >>> METHODS["fedavg"](size="smallest").size
    'smallest'

Departures:
1. `deploy` gives the one global network for every capacity: with `largest` the accuracy at a small
   capacity is that of a network which does not fit there.
"""

from dataclasses import replace
from typing import Literal

from rayfl.methods.base import Client, State, Task
from rayfl.methods.width import WidthMethod
from rayfl.submodel import Selection, prefix


class FedAvg(WidthMethod):
    name: Literal["fedavg"] = "fedavg"
    size: Literal["largest", "smallest"] = "largest"
    """The one network of all clients and the server: the largest capacity's, or the smallest's."""
    weight: Literal["samples", "uniform"] = "samples"

    def bind(self, task: Task) -> "FedAvg":
        """Every capacity runs the one network, and the server holds it."""
        pick = max if self.size == "largest" else min
        width = pick(task.widths.values())
        same = replace(task, widths=dict.fromkeys(task.widths, width))
        return self.model_copy(update={"task": same})

    def select(self, state: State, round: int, client: Client, seed: int) -> Selection:
        return self.window(round, client.capacity)

    def window(self, round: int, capacity: float) -> Selection:
        net, layout = self.task.server, self.task.layout(self.task.server)
        return prefix(layout, layout, net)
