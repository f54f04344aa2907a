"""FIARSE, neuron by neuron: every client trains the channels that have the largest weights.

Paper: none. Wu, Wang, Wang, Liu, Su, Gao, "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware
Submodel Extraction", NeurIPS 2024, https://arxiv.org/abs/2407.19389, keeps single weights. It names the importance of
neurons, from nothing but the parameters, as future work, because hardware gains little from sparse layers. This method
is ours.

Symbols: K the width of an axis in the server's network, r a client's capacity, x the global parameters.

    I_a[p]         importance of position p of axis a: the sum of |x| over all elements of all weights of convolutions
                   and linear layers that belong to it, as rows (what it reads) and as columns (what reads it)
    S_k            the ceil(r_k K) positions of every axis with the largest I, in their order; of equal ones the
                   first; classes and image channels whole
    y_k            SGD from S_k x, in a dense narrow network
    x  <-  sum_k S_k^T y_k / sum_k S_k^T 1, elsewhere unchanged

The positions of a capacity lie inside those of every larger one, and change with x from round to round. The networks
are as large as HeteroFL's. All positions of an axis have equally many elements: a sum ranks them as a mean would.

    >>> import torch
    >>> largest(torch.tensor([1.0, 3.0, 2.0, 3.0]), 2)
    Picks(positions=(1, 3), size=4, groups=1)

Departures from FIARSE:
1. A network is as wide as its capacity says in every layer (`clients.metric` says how that is measured). FIARSE's one
   threshold gives every layer a density of its own; sums over different numbers of weights are not compared here.
2. Local training is plain SGD, and positions stay for the round. The term that FIARSE's threshold adds to the gradient
   (Eq. 3) has no counterpart: ranks pass no gradient to a weight.
3. Biases, norms and embeddings have no say. Where a norm follows, the scale of a layer's rows is arbitrary, and so is
   that part of I, as single weights are for FIARSE.
4. A channel of a residual stream has one importance, the sum over all layers that add to it or read it; a position
   inside attention heads the sum over all heads.
5. No index travels: the server cuts, and clients see a dense network.
"""

from collections.abc import Iterable
from typing import Literal

import torch

from rayfl.core.axes import Layout
from rayfl.core.fold import Fold, State
from rayfl.core.submodel import Picks, Positions, Slice, Window
from rayfl.core.tensors import Params
from rayfl.methods.dense import Dense


class FIARSENeurons(Dense):
    name: Literal["fiarse_neurons"] = "fiarse_neurons"

    def init(self) -> State:
        return self._ranked(self.task.initial())

    def submodel(self, state: State, round: int, capacity: float) -> Slice:
        net = self.net_at(capacity)
        positions = {name: largest(state["importance"][name], axis.size) for name, axis in net.layout.axes.items()}
        return Slice(self.task.server, net, positions)

    def step(self, state: State, round: int, fold: Fold) -> State:
        return self._ranked(fold.mean("params"))

    def _ranked(self, params: Params) -> State:
        """The state of these parameters, with the importance of each position, which is found once a round."""
        server = self.task.server
        shapes = server.layout.shapes
        weights = [name for names in server.layers.values() for name in names if len(shapes[name]) > 1]
        return {"params": params, "importance": importance(server.layout, params, weights)}


def importance(layout: Layout, params: Params, weights: Iterable[str]) -> Params:
    """Axis -> [K] float32: of every position, the sum of |x| over what belongs to it in the tensors `weights` of
    convolutions and linear layers [rows, columns, ...], in all groups and copies."""
    found = {name: torch.zeros(axis.size, dtype=torch.float64) for name, axis in layout.axes.items()}
    for name in weights:
        # summed in float64: the float32 result, and so the choice, then hardly depends on the order of the sum
        magnitudes = params[name].abs().reshape(*layout.shapes[name][:2], -1).sum(2, dtype=torch.float64)
        for d, axis in enumerate(layout.dims[name][:2]):
            if axis is not None and not axis.is_fixed:
                elements = magnitudes.sum(1 - d).view(axis.groups, axis.size, axis.copies)
                found[axis.name] += elements.sum((0, 2))
    return {name: total.float() for name, total in found.items()}


def largest(values: torch.Tensor, count: int) -> Positions:
    """Where `values` [K] has its `count` largest elements, ascending; of equal ones the first. All of them are a
    window, whose tensors are views: training there is FedAvg, to the bit."""
    size = len(values)
    if count == size:
        return Window(0, size, size)
    order = values.argsort(descending=True, stable=True)
    return Picks(tuple(order[:count].sort().values.tolist()), size)
