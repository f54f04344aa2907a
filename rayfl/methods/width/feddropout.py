"""Federated Dropout: every client trains a random subset of channels.

Paper: Caldas, Konecny, McMahan, Talwalkar, "Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements", 2018, https://arxiv.org/abs/1812.07210. With subsets sized by capacity it is the baseline of FedRolex,
https://arxiv.org/abs/2212.01548.

Symbols: $K$ the width of an axis in the server's network, $r_k$ the width of client $k$'s capacity, $x$ the global
parameters.

    $S_k$         $ceil(r_k K)$ positions of every axis, drawn uniformly without replacement, anew for every client and
                round; classes and image channels whole
    $y_k$         SGD from $S_k x$, with HeteroFL's Scaler and masked loss
    $x$           $<- (sum_k S_k^T y_k)/(sum_k S_k^T 1)$, elsewhere unchanged

Cost per round: the client's narrow network down and up, its training, one sum on the server.

Departures:
1. The paper's clients all drop the same share of convolutional filters and hidden units. Here the share kept is the
   client's capacity, as in FedRolex's code, which is also the source of Scaler, masked loss and label rows.
2. Each axis is drawn once: channels that are added, or that a norm reads, are the same channels of the server.
   FedRolex's code draws per convolution, so that an identity skip adds different channels of the server (with 32 of 64
   channels, one position in 64 agrees); its table was most likely made so. `tie_residual: false` does that.
3. With `tie_residual: false`, an axis that a client holds whole keeps its order; the code shuffles the skips of its
   largest clients.
4. Attention: one draw for all heads of a block, with the same positions in each head, because the queries, keys,
   values and output columns of a transformer share one axis. FedRolex's code draws separately for Q, for K, and for V
   with the output layer, each over the flattened axis, which mixes heads and multiplies queries with keys of other
   positions.
5. A random method defines no submodel of a capacity outside training: `deploys` is ours. Both papers evaluate only the
   server's network.
"""

from typing import Literal

import torch

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.fold import State
from rayfl.core.seeds import torch_generator
from rayfl.core.submodel import Selection, Slice, random_subset
from rayfl.methods.base import Client
from rayfl.methods.width.vocabulary import OwnVocabulary
from rayfl.models.base import TokenModel
from rayfl.training.settings import Fill


class FedDropout(OwnVocabulary):
    name: Literal["feddropout"] = "feddropout"
    scaler: bool = True
    mask: Fill = "zero"
    label_rows: Literal["all", "present"] = "present"
    draw: Literal["client", "round"] = "client"
    """client: every client draws its own subset per round. round: all clients of a capacity share one subset per round;
    the subsets of smaller capacities are not nested in it."""
    tie_residual: bool = True
    """Draw once for all layers whose outputs are added. False: draw every layer's outputs separately and unsorted, so
    that identity skips (not projections) are misaligned, as in FedRolex's code."""
    deploys: Literal["subset", "prefix"] = "subset"
    """Submodel deployed at a capacity: a random subset of the last round (with `draw: round` the trained one), or the
    first positions."""

    def check(self, rounds: int, clients: Population) -> None:
        super().check(rounds, clients)
        server = self.task.server
        dims = server.layout.dims.items()
        others = [name for name, axes in dims if len(axes) > 1 and name.rpartition(".")[0] not in server.layers]
        if not self.tie_residual and (others or isinstance(server.model, TokenModel)):
            raise ConfigError(
                f"method.tie_residual: false is not valid. Allowed: true, because model {server.model.name} has "
                "weights other than those of convolutions and linear layers, or shares them"
            )

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
        """Return the shared subset of a capacity in a round."""
        return self._subset(capacity, torch_generator(self.task.seed, "subset", round, str(capacity)))

    def _subset(self, capacity: float, generator: torch.Generator) -> Slice:
        # order matters only where different draws are added: sorted channels would agree more often
        tied = self.tie_residual
        return random_subset(self.task.server, self.net_at(capacity), generator, ordered=tied, tied=tied)
