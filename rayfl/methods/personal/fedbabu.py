"""FedBABU: the body is averaged and the head stays random; every client fine-tunes a copy for itself.

Paper: Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022,
https://arxiv.org/abs/2106.06042. Of its text, the abstract could be read; the algorithm is that of the code
(jhoon-oh/FedBABU, main_fed.py with `--local_upt_part body --aggr_part body`; fine-tuning in analysis.ipynb).

Symbols: $B$ the body, $H$ the head, both drawn by the server, $A$ the cohort.

    $B_k$                SGD on $B$ alone from $(B, H)$ on client $k$'s data
    client's network   SGD from $(B, H)$ on $H$ (`tuned: head`) or on both (`all`), `tuning_epochs` passes
    $B$                  $<- 1/|A| sum_(k in A) B_k$

Cost per round: $B$ down and up, $H$ down once per client; the client's training and its fine-tuning; one sum on the
server.

Departures:
1. The authors fine-tune the final global network on every client. Here a client does this in each of its rounds, with
   the network that it received, because an evaluation does not train. With `tuned: head` it is evaluated with the
   server's present body and its last head, with `all` with its last fine-tuned network.
2. The notebook fine-tunes all layers at a learning rate of 0.001, 5 passes; the abstract says the head. Here it has the
   learning rate and the optimiser of the round.
3. `steps`, `train_samples` and `train_loss` are those of B. `train_flops` counts fine-tuning too: a step of the head as
   a forward pass and the backward pass of the head, any other step as one of the whole network.
4. `size: own` is ours: a head with the inputs of the client's narrow network, a part of H. B is a holder mean over
   submodels. The client's capacity is fixed.
"""

from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from rayfl.core.fold import Update
from rayfl.core.net import params_of
from rayfl.core.tensors import copied
from rayfl.methods.base import Payload, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.personal.base import PersonalLayers


class FedBABU(PersonalLayers):
    resumes: ClassVar = False
    contract: ClassVar = Contract(
        fedavg=None, plain={"tuning_epochs": 0}, traffic=lambda whole, head: (whole, whole - head)
    )

    name: Literal["fedbabu"] = "fedbabu"
    tuned: Literal["head", "all"] = "head"
    """Layers that clients fine-tune for themselves: the head, or all."""
    tuning_epochs: int = Field(default=5, ge=0)
    """Passes over the client's data that fine-tune its network, in each of its rounds. 0: the head stays random."""

    def train(self, module: nn.Module, visit: Visit) -> dict[str, float]:
        return self.train_shared(module, visit)

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        update = super().local_update(payload, visit)
        names = self.kept(visit.net) if self.tuned == "head" else tuple(visit.net.layout.dims)
        module = self.module(visit, payload["params"] | payload["start"])
        update.metrics["train_flops"] += self.tune(module, visit, names, self.tuning_epochs)
        tuned = params_of(module)
        update.client_states[visit.client.id] = {"own": copied({name: tuned[name] for name in names})}
        return update
