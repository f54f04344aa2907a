"""pFedMe: a client's network minimises its loss plus its distance to the global network, which moves towards it.

Paper: Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
https://arxiv.org/abs/2006.08848. Of its text, the abstract could be read; the algorithm is that of the code
(CharlieDinh/pFedMe, FLAlgorithms/users/userpFedMe.py and servers/serverbase.py).

Symbols: $f_k$ client $k$'s loss on a batch, $w$ the global network, $w_k$ a client's copy of it, $theta_k$ its own
network, $lambda$ `lam`, $K$ `inner_steps`, $eta$ `eta`, $l$ the learning rate, $n_k$ its number of samples.

    start       of a round: $w_k = theta_k = w$
    $theta_k$     $<- theta_k - l (grad f_k(theta_k) + lambda (theta_k - w_k))$, $K$ times on every batch
    $w_k$         $<- w_k - eta lambda (w_k - theta_k)$, after them
    $w$           $<- w + beta ((sum_k n_k w_k)/(sum_k n_k) - w)$ over the cohort

Cost per round: $w$ down and up, as in FedAvg; $K$ passes per batch; one sum on the server.

$l lambda$ must be less than 2, or the steps of $theta_k$ diverge.

Departures:
1. `training.lr` is the code's `personal_learning_rate`, `eta` its `learning_rate`; `training.steps` is its
   `local_epochs`, each of which is one batch. Batches are shuffled; the code takes them in stored order.
2. A client is evaluated with theta_k. In the code, `persionalized_model_bar` is the list of the network's own
   parameters, into which the end of a client's round copies w_k: its personal results are those of w_k.
3. The code adds 0.001 theta_k to the gradient of theta_k. `training.weight_decay: 0.001` does so too.
4. In the code all clients train in every round, of which the server averages a cohort. Here the cohort trains.
5. `steps`, `train_samples` and `train_loss` are per batch, a mean over its K steps. `train_flops` counts all steps.
   Warm-up and cosine decay of the learning rate count batches.
6. `size: own` is ours: w_k and theta_k have the size of the client's capacity, and w is a holder mean over submodels.
   A client is evaluated with its last theta_k, which fits one network, so its capacity is fixed.
"""

import itertools
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from rayfl import costs
from rayfl.core.fold import Fold, State, Update
from rayfl.core.net import params_of
from rayfl.core.tensors import Params, copied
from rayfl.methods.base import Payload, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.dense import pull
from rayfl.methods.personal.base import Personal


class PFedMe(Personal):
    contract: ClassVar = Contract(fedavg=None, plain={"inner_steps": 1})

    name: Literal["pfedme"] = "pfedme"
    weight: Literal["samples", "uniform"] = "samples"
    lam: float = Field(default=15.0, gt=0)
    """Strength lambda of the distance to the global network. The code has 15 to 30."""
    inner_steps: int = Field(default=5, ge=1)
    """Steps K of the client's own network on every batch."""
    eta: float = Field(default=0.005, gt=0)
    """Learning rate of a client's copy of the global network. The code has 0.005 to 0.01."""
    beta: float = Field(default=1.0, gt=0)
    """Step of the server towards the mean. 1: the mean. The code has 1 and 2."""

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        received, data, times = payload["params"], visit.data, self.inner_steps
        w: Params = {name: t.to(data.device, copy=True) for name, t in received.items()}
        module, counter = self.module(visit, received), itertools.count(1)

        def follow(module: nn.Module) -> None:
            if next(counter) % times == 0:
                for name, theta in params_of(module).items():
                    w[name].sub_(w[name] - theta, alpha=self.eta * self.lam)

        repeated = replace(visit, data=replace(data, repeats=times))
        metrics = self.fit(module, repeated, adjust=pull(w, self.lam), project=follow)
        flops = costs.training_flops(visit.net, int(metrics["train_samples"]))
        per_batch = {"train_loss": metrics["train_loss"] / times, "train_samples": metrics["train_samples"] // times}
        metrics |= {**per_batch, "steps": metrics["steps"] // times, "train_flops": flops}
        update = self.answer(w, {"params": received}, visit, metrics)
        update.client_states[visit.client.id] = {"own": copied(params_of(module))}
        return update

    def step(self, state: State, round: int, fold: Fold) -> State:
        new = super().step(state, round, fold)
        if self.beta == 1:
            return new
        old = state["params"]
        return new | {"params": {name: old[name] + self.beta * (t - old[name]) for name, t in new["params"].items()}}
