"""FedMRL: a common network and every client's own one learn through a joint representation, nested in two sizes.

Paper: Yi et al., "Federated Model Heterogeneous Matryoshka Representation Learning", NeurIPS 2024,
https://arxiv.org/abs/2406.00488 (its equations were not read). The algorithm is that of the authors' code,
LipingYi/FedMRL, `FedMRL_hetero.py`; TsingZ0/HtFLlib, `clientmrl.py`, has the same steps, but does not keep the trained
P_k: every round and every evaluation has its first values.

Symbols: $f_k(x)$ $[D]$ the features of client $k$'s network and $F_k$ its classifier; $g(x)$ $[d]$ and $G$ those of the
common network, $d <= D$; $P_k$ a linear layer $[d + D]$ to $[D]$; $r_d$ the first $d$ elements of $r$.

    $r$           $= P_k([g(x), f_k(x)])$
    a client    $f_k, F_k, P_k, g_k, G_k <-$ SGD from $f_k, F_k, P_k, g, G$ on $CE(F_k(r), y) + CE(G_k(r_d), y)$
    $g, G$        $<-$ the mean of $g_k, G_k$ over the round's clients

Cost per round: the common network down and up; the training of both networks; one sum on the server.

A device runs $F_k(r)$ with its own $f_k$, $F_k$, $P_k$ and the newest $g$, so it holds both networks. It is evaluated
on the client's own split. $D$ may differ between clients. $d$ is `features`, with a linear projection behind the common
network's last features, otherwise the number of features of the common network.

Departures:
1. In the code, the "mean" of g_k and G_k is the network of the last client of the round, because the state dicts of all
   clients refer to the tensors of one module. Here, as in HtFLlib, it is their mean.
2. The code evaluates a client with its own trained g_k, before averaging. Here, as in HtFLlib, it is the newest g.
3. The code weights clients by their training, validation and test samples. Here it is by training samples
   (`weight: samples`); HtFLlib's mean is `weight: uniform`.
4. The code clips the gradients of f_k, P_k and g_k at norm 50 each, and trains with momentum 0.9. Here both are
   settings of `training`; `clip` is for all three together.
5. In the code, the momentum of g, G and P_k carries over to the next client and round, because all clients share one
   optimizer for each. Here the optimizer is reset for every client and round.
6. In the code for equal architectures (`FedMRL_homo.py`), G_k is the first d columns of F_k. Here it is not.
7. Multiply-adds count both classifiers twice, because the networks also compute their logits without P_k.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.fold import ClientState, State
from rayfl.core.net import Net
from rayfl.core.tensors import prefixed
from rayfl.methods.base import Deployment, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.pairs import COMMON, Featured, Pair, WithCommon
from rayfl.metrics import label
from rayfl.models.features import feature_size
from rayfl.models.mix import Projected
from rayfl.training.settings import Loss


class Nested(Featured):
    """Returns G(r_1..d) and F(r), [B, C] each."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, _, common, own = self.both(x)
        r = self.project(torch.cat([common, own], 1))
        of_own, of_common = self.own.get_submodule(self.paths[0]), self.common.get_submodule(self.paths[1])
        return of_common(r[:, : common.shape[1]]), of_own(r)


class NestedPair(Pair):
    def build(self, net: Net) -> nn.Module:
        size = feature_size(self.own_net(net))
        return self.featured(net, size + feature_size(self.common_net), size, True, Nested)


class FedMRL(WithCommon):
    contract: ClassVar = Contract(wants="features", short={"features": 3})
    pair: ClassVar = NestedPair

    name: Literal["fedmrl"] = "fedmrl"
    weight: Literal["samples", "uniform"] = "samples"
    """Weight of a client in the mean of the common network: its training samples, or 1."""
    features: int | None = Field(default=None, ge=1)
    """d, features of the common network. Default: the architecture's own number."""

    def paired(self, net: Net, common: Net) -> Net:
        if self.features is not None:
            of = common.model.of if isinstance(common.model, Projected) else common.model
            common = Net(Projected(of=of, features=self.features), common.width)  # pyright: ignore[reportArgumentType]
        return super().paired(net, common)

    def check(self, rounds: int, clients: Population) -> None:
        super().check(rounds, clients)
        d = feature_size(self.common_net)
        for capacity, net in self.task.nets.items():
            if (size := feature_size(self.own_net(net))) < d:
                raise ConfigError(
                    f"method.features: the common network has {d} features, and that of capacity {label(capacity)} "
                    f"has {size}. Allowed: at most {size}. Hint: set method.features"
                )

    def pair_loss(self, visit: Visit) -> Loss:
        loss = self.loss(visit)
        return lambda logits, y: loss(logits[1], y) + loss(logits[0], y)

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        """Return the client's own network and projection, or the initial ones, with the common network."""
        given = self.own(client_state, capacity) | prefixed(COMMON, state[COMMON])
        return Deployment.of(self.group(capacity), self.task.nets[capacity], given, client_state is None)
