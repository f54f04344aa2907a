"""FedRep: clients first train their own head, then the shared representation, of which the mean is used by all.

Paper: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021, https://arxiv.org/abs/2102.07078. Of its text, the abstract could be read; the algorithm is that of the code
(lgcollins/FedRep, main_fedrep.py and models/Update.py, `--alg fedrep`).

Symbols: $phi$ the representation, $h_k$ client $k$'s head, $n_k$ its number of samples, $w_k$ its weight, $n_k$ or 1.

    $h_k$         SGD on $h_k$ alone from $(phi, h_k)$, `head_epochs` passes over its data
    $phi_k$       SGD on $phi$ alone from $(phi, h_k)$, with the new $h_k$; the training of a round
    $phi$         $<- (sum_k w_k phi_k)/(sum_k w_k)$ over the cohort

Cost per round: $phi$ down and up, the start of $h_k$ down once per client; the client's training, before it that of the
head; one sum on the server.

Departures:
1. The code has one number of local epochs for both parts, `local_ep`, of which the last `local_rep_ep` train phi. Here
   `training` sets those of phi, and `head_epochs` those of the head. The scripts have 10 and 1.
2. The code has momentum 0.5, and weight decay 0.0001 on weights, not on biases. Here `training` sets both, for all.
3. `weight: uniform` is the code's mean for CIFAR and MNIST. For FEMNIST and Sent140 it weighs by samples.
4. The code trains the heads of all clients after the last round, for 10 epochs or more, and then evaluates. Here a
   client is evaluated with the server's phi and its last head.
5. `steps`, `train_samples` and `train_loss` are those of phi. `train_flops` counts both parts: a step of the head as a
   forward pass and the backward pass of the head, a step of phi as one of the whole network.
6. `size: own` is ours: a personal head on a narrow network. phi is a holder mean over submodels, and h_k has the inputs
   of the client's network, so its capacity is fixed.
"""

from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from rayfl.methods.base import Visit
from rayfl.methods.contract import Contract
from rayfl.methods.personal.base import PersonalLayers


class FedRep(PersonalLayers):
    contract: ClassVar = Contract(
        fedavg=None, plain={"head_epochs": 0}, traffic=lambda whole, head: (whole, whole - head)
    )

    name: Literal["fedrep"] = "fedrep"
    head_epochs: int = Field(default=10, ge=0)
    """Passes over the client's data per round that train its own layers. 0: these layers keep their start."""

    def train(self, module: nn.Module, visit: Visit) -> dict[str, float]:
        flops = self.tune(module, visit, self.kept(visit.net), self.head_epochs)
        metrics = self.train_shared(module, visit)
        return metrics | {"train_flops": metrics["train_flops"] + flops}
