"""FIARSE for neurons: every client trains the channels with the largest weights.

Paper: none. Wu, Wang, Wang, Liu, Su, Gao, "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware
Submodel Extraction", NeurIPS 2024, https://arxiv.org/abs/2407.19389, selects single weights and names the importance
of neurons, computed from the parameters alone, as future work, because hardware gains little from sparse layers. This
method is ours.

Symbols: $K$ the width of an axis in the server's network, $r_k$ the width of client $k$'s capacity, $x$ the global
parameters.

    $I_a[p]$      importance of position $p$ of axis $a$: the sum of $|x|$ over all elements of all weights of
                convolutions and linear layers that belong to it, as rows (its inputs) and as columns (its readers)
    $S_k$         the $ceil(r_k K)$ positions of every axis $a$ with the largest $I_a[p]$, in their order; ties: the
                first; classes and image channels whole
    $y_k$         SGD from $S_k x$, in a dense narrow network
    $x$           $<- (sum_k S_k^T y_k)/(sum_k S_k^T 1)$, elsewhere unchanged

Cost per round: the client's narrow network down and up, its training, one sum and one ranking of positions on the
server.

The positions of a capacity are a subset of those of every larger one, and change with x from round to round. Networks
have the sizes of HeteroFL's. All positions of an axis have equally many elements, so sums rank them like means.

Departures from FIARSE:
1. All layers of a network have the width of its capacity (in the unit of `clients.metric`). FIARSE's single threshold
   gives layers different densities; here sums over different numbers of weights are not compared.
2. Local training is plain SGD with positions fixed for the round. The gradient term of FIARSE's threshold (Eq. 3) has
   no counterpart, because ranks have no gradient.
3. Biases, norms and embeddings do not count. If a norm follows, the scale of a layer's rows is arbitrary, and so is
   their part of I, as for single weights in FIARSE.
4. A channel of a residual stream has one importance, the sum over all layers that write or read it; a position inside
   attention heads has the sum over all heads.
5. No indices are sent: the server cuts, and clients train a dense network.
"""

from collections.abc import Iterable
from typing import Literal

import torch

from rayfl.core.axes import Layout, segments
from rayfl.core.fold import Fold, State
from rayfl.core.submodel import Slice, largest
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
        """Return the state: the parameters and the importance of each position, computed once per round."""
        server = self.task.server
        shapes = server.layout.shapes
        weights = [name for names in server.layers.values() for name in names if len(shapes[name]) > 1]
        return {"params": params, "importance": importance(server.layout, params, weights)}


def importance(layout: Layout, params: Params, weights: Iterable[str]) -> Params:
    """Return axis -> [K] float32: per position, the sum of |x| over its elements in the tensors `weights` of
    convolutions and linear layers [rows, columns, ...], over all groups and copies."""
    found = {name: torch.zeros(axis.size, dtype=torch.float64) for name, axis in layout.axes.items()}
    for name in weights:
        # float64, so that the float32 result, and thus the selection, hardly depends on the order of summation
        magnitudes = params[name].abs().reshape(*layout.shapes[name][:2], -1).sum(2, dtype=torch.float64)
        for d, dim in enumerate(layout.dims[name][:2]):
            for start, axis in segments(dim):
                if not axis.is_fixed:
                    elements = magnitudes.sum(1 - d)[start : start + axis.length]
                    found[axis.name] += elements.view(axis.groups, axis.size, axis.copies).sum((0, 2))
    return {name: total.float() for name, total in found.items()}
