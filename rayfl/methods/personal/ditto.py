"""Ditto: beside the global network, every client trains one of its own, which is pulled towards the global one.

Paper: Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
https://arxiv.org/abs/2012.04221. Of its text, the abstract could be read; the algorithm is that of the code
(litian96/ditto, flearn/trainers_MTL/ditto.py), with which TsingZ0/PFLlib (clientditto.py) agrees.

Symbols: $F_k$ client $k$'s loss, $w$ the global network, $v_k$ client $k$'s own network, $lambda$ `lam`, $A$ the
cohort.

    $w_k$         SGD from $w$ on $F_k$
    $v_k$         SGD from $v_k$ on $h_k(v) = F_k(v) + lambda/2 |v - w|^2$, $w$ as it was received
    $w$           $<- 1/|A| sum_(k in A) w_k$

Cost per round: $w$ down and up, as in FedAvg; the training of two networks; one sum on the server.

$lambda = 0$: clients train alone; a large $lambda$: $v_k$ is near $w$.

Departures:
1. v_k starts as the first w that the client receives; in the code, as the start of w. Both are equal for clients of the
   first round, and the client's start need not be sent.
2. The code trains v_k and w_k on the same batches, one step each in turn. So does this file by default, one network
   after the other, with equal results. `personal_epochs` sets the passes for v_k, as PFLlib's `plocal_epochs`.
3. `training` has the optimiser of both networks, with the proximal gradient inside momentum and clipping. The code has
   plain SGD.
4. The code draws cohorts in proportion to the clients' samples and averages them equally. Here cohorts are uniform.
5. The robust means, attacks and the choice of lambda on validation data (`dynamic_lam`: 0.1, 1, 2) are not here.
6. `steps`, `train_samples` and `train_loss` are those of w. `train_flops` counts both networks.
7. `size: own` is ours: w and v_k have the size of the client's capacity, and w is a holder mean over submodels. A
   client's v_k fits one network, so its capacity is fixed.
"""

from typing import ClassVar, Literal, cast

from pydantic import Field

from rayfl import costs
from rayfl.core.fold import Update
from rayfl.core.net import params_of
from rayfl.core.tensors import Params, copied
from rayfl.methods.base import Payload, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.dense import pull
from rayfl.methods.personal.base import Personal


class Ditto(Personal):
    contract: ClassVar = Contract(plain={"personal_epochs": 0})

    name: Literal["ditto"] = "ditto"
    lam: float = Field(default=1.0, ge=0)
    """Strength lambda of the proximal term. The code has 0.1, 1 and 2."""
    personal_epochs: int | None = Field(default=None, ge=0)
    """Passes over the client's data per round that train its own network. Default: the work of `training`."""

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        update = self.trained(payload, visit)
        received = payload["params"]
        own = cast(Params, visit.client_state["own"]) if visit.client_state else received
        module = self.module(visit, own)
        epochs = self.personal_epochs
        training = None if epochs is None else self.task.training.for_epochs(epochs)
        center = {name: t.to(visit.data.device) for name, t in received.items()}
        personal = self.fit(module, visit, training=training, adjust=pull(center, self.lam))
        samples = int(update.metrics["train_samples"] + personal["train_samples"])
        update.metrics["train_flops"] = costs.training_flops(visit.net, samples)
        update.client_states[visit.client.id] = {"own": copied(params_of(module))}
        return update
