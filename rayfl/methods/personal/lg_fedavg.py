"""LG-FedAvg: some layers are averaged, the others stay on their client.

Paper: Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
NeurIPS 2019 workshop on federated learning, https://arxiv.org/abs/2001.01523 (Algorithm 1; code: pliang279/LG-FedAvg).

Symbols: $theta_g$ the shared layers, $theta_k$ client $k$'s own layers, $A$ the cohort.

    $theta_k, theta_g$   start from a network trained by FedAvg (`warmup` rounds), equal for all clients
    $(theta_k, y_k)$     SGD on client $k$'s data from $(theta_k, theta_g)$, all layers together
    $theta_g$            $<- 1/|A| sum_(k in A) y_k$, used by all clients

Cost per round: $theta_g$ down and up, the start of $theta_k$ down once per client; the client's training; one sum on
the server.

The authors' splits, as `shared`:

    model      | shared                  | parameters sent
    liang_mlp  | hidden2, hidden3, head  | 99,978 of 633,226 (MNIST)
    liang_cnn  | conv1, conv2            | 2,872 of 64,102 (CIFAR-10)

Departures:
1. The authors start from a FedAvg checkpoint (of 400 to 1,800 rounds, the best on the test set). Here the FedAvg
   rounds are the first rounds of the run, with its training settings, and clients start from their last network.
2. `shared` is a list of layers. In the code it is the tail of a list of weights, whose order shares the last layers
   for MNIST (as in the paper's figure) and the first layers for CIFAR-10.
3. The authors select every client's best network on the test set, and report the mean of these networks and their
   ensemble as global results. Here a client uses its last network; the global network is theta_g with the layers that
   every client started from.
4. `size: own` is ours: theta_g is a holder mean over submodels. A client's own layers fit one network, so its capacity
   is fixed.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.fold import State
from rayfl.core.net import Net
from rayfl.core.submodel import Slice
from rayfl.methods.base import Client
from rayfl.methods.contract import Contract
from rayfl.methods.personal.base import Partial, below, check_paths


class LGFedAvg(Partial):
    contract: ClassVar = Contract(fedavg={"warmup": 2}, traffic=lambda whole, head: (whole, head))

    name: Literal["lg_fedavg"] = "lg_fedavg"
    shared: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Averaged layers, by path: a layer ("conv1") or all layers below it ("stage1"). Default: the classifier, as in the
    paper's figure (local representations, one global head); in language models also the embedding of tokens."""
    warmup: int = Field(default=0, ge=0)
    """Number of initial rounds in which all layers are averaged (FedAvg)."""

    def check(self, rounds: int, clients: Population) -> None:
        check_paths("method.shared", self.shared or (), self.task.server)
        if self.warmup >= rounds:
            raise ConfigError(
                f"method.warmup: {self.warmup} is not valid. Allowed: fewer than the run's {rounds} rounds"
            )
        super().check(rounds, clients)

    def kept(self, net: Net) -> tuple[str, ...]:
        shared = net.layout.classifier if self.shared is None else below(net, self.shared)
        return tuple(name for name in net.layout.dims if name not in shared)

    def select(self, state: State, client: Client) -> Slice:
        selection = super().select(state, client)
        return replace(selection, names=None) if client.round < self.warmup else selection
