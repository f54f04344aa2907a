"""Federated Dropout: every client trains a random subset of channels.

Paper: Caldas, Konecny, McMahan, Talwalkar, "Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements", 2018, https://arxiv.org/abs/1812.07210. With a subset of its own size for every capacity it is the
baseline of FedRolex, https://arxiv.org/abs/2212.01548.

Symbols: K the width of an axis in the server's network, r a client's capacity.

    S_k            ceil(r_k K) positions of every axis, drawn uniformly without replacement, anew for every
                   client and round; classes and image channels whole
    y_k, x         as HeteroFL: Scaler, masked loss, holder mean

    >>> from rayfl.methods import METHODS
    >>> METHODS["feddropout"](draw="round").draw
    'round'

Departures:
1. The paper's clients all drop the same share, of convolutional filters and of the units of hidden layers. Here
   the share is the client's capacity, as in FedRolex's code, which Scaler, masked loss and label rows follow too.
2. An axis is drawn once: channels that are added, or that a norm reads, are the same channels of the server. FedRolex's
   code draws for every convolution, so that an identity skip adds channels that differ on the server (where 32 of 64
   are held, one position in 64 agrees); its table was most likely made so. `tie_residual: false` does that.
3. An axis that a client holds whole stays in place then too; the code shuffles the skips of its largest clients.
4. Attention: one draw for all heads of a block, the same positions inside each head, because the queries, keys, values
   and the output layer's columns of a transformer share one axis. FedRolex's code draws for Q, for K, and for V and the
   output layer, each over the flattened axis, which mixes heads and multiplies queries with keys of other positions.
5. A random method has no submodel of a capacity to run outside training: `deploys` is ours. Both papers evaluate
   only the server's network.
"""

from typing import Literal

import torch

from rayfl.core.fold import State
from rayfl.core.seeds import torch_generator
from rayfl.core.submodel import Selection, Slice, random_subset
from rayfl.methods.base import Client
from rayfl.methods.width.vocabulary import OwnVocabulary
from rayfl.training.settings import Fill


class FedDropout(OwnVocabulary):
    name: Literal["feddropout"] = "feddropout"
    scaler: bool = True
    mask: Fill = "zero"
    label_rows: Literal["all", "present"] = "present"
    draw: Literal["client", "round"] = "client"
    """client: every client draws its own subset in every round. round: all clients of a capacity share one; that
    of a smaller capacity need not lie inside it."""
    tie_residual: bool = True
    """Draw once for all layers that are added to one another. False: every layer's outputs are drawn separately,
    in no order, and identity skips are misaligned, as in FedRolex's code; projections are not."""
    deploys: Literal["subset", "prefix"] = "subset"
    """What a device of a capacity runs outside training: a random subset of the last round (with `draw: round`
    the one that its clients trained), or the first positions."""

    def select(self, state: State, client: Client) -> Selection:
        if self.draw == "round":
            subset = self._shared(client.round, client.capacity)
        else:
            subset = self._subset(client.capacity, torch_generator(self.task.seed, "subset", client.round, client.id))
        return self.of_vocabulary(subset, client)

    def submodel(self, state: State, round: int, capacity: float) -> Slice:
        if self.deploys == "prefix":
            return self.prefix(capacity)
        return self._shared(max(round - 1, 0), capacity)

    def _shared(self, round: int, capacity: float) -> Slice:
        """The one subset of a capacity in a round."""
        return self._subset(capacity, torch_generator(self.task.seed, "subset", round, str(capacity)))

    def _subset(self, capacity: float, generator: torch.Generator) -> Slice:
        # the order matters only where differently drawn channels are added: sorted ones would agree more often
        tied = self.tie_residual
        return random_subset(self.task.server, self.net_at(capacity), generator, ordered=tied, tied=tied)
