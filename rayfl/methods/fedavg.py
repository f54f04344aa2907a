"""FedAvg: every client trains the whole network of one size.

Paper: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, https://arxiv.org/abs/1602.05629 (Algorithm 1).

    y_k  =  SGD from x on client k's data;    x  <-  sum_k n_k y_k / sum_k n_k

In a heterogeneous population it is the reference from above and from below (HeteroFL's rows a ... e,
FedRolex Table 2): `size: largest` lets every client train the largest network, whatever its capacity, which
no real device could; `size: smallest` gives everybody, server included, the network that the weakest can run;
`size: own` is its plain holder mean over nested submodels: HeteroFL without Scaler and masks.

    >>> from rayfl.methods import METHODS
    >>> METHODS["fedavg"](size="smallest").size
    'smallest'

Departures:
1. `deploy` gives the one global network for every capacity: with `largest` the accuracy at a small
   capacity is that of a network which does not fit there.
"""

from typing import Literal

from rayfl.methods.width import SizedMethod


class FedAvg(SizedMethod):
    name: Literal["fedavg"] = "fedavg"
    weight: Literal["samples", "uniform"] = "samples"
