"""APFL: every client uses a mixture of the global network and one of its own, and learns the share.

Paper: Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020, https://arxiv.org/abs/2003.13461 (code:
MLOPTPSU/FedTorch, comms/trainings/federated/apfl.py). Of its text, the abstract could be read. The steps of w_k and v_k
below are those of litian96/ditto (flearn/trainers_MTL/apfl.py); that of alpha_k is FedTorch's.

Symbols: $f_k$ client $k$'s loss on a batch, $w_k$ its copy of the global network $w$, $v_k$ its own, $alpha_k$ its
share, $eta$ the learning rate, $A$ the cohort.

    $m_k$         $= alpha_k v_k + (1 - alpha_k) w_k$, the network that the client uses
    each step   $w_k <- w_k - eta grad f_k(w_k)$;
                $v_k <- v_k - eta alpha_k grad f_k(m_k)$, $m_k$ before both steps
    $alpha_k$     with `adaptive`, in the first step of a round, within 0 ... 1:
                $<- alpha_k - eta ((v_k - w_k)^T grad f_k(m_k) + 0.02 alpha_k)$
    $w$           $<- 1/|A| sum_(k in A) w_k$; $w_k = w$ at the start of a round

Cost per round: $w$ down and up, as in FedAvg; the training of two networks; one sum on the server.

$alpha = 0$: $m_k$ is FedAvg's local network, and $v_k$ does not train. $alpha = 1$ without `adaptive`: clients train
alone.

Departures:
1. FedTorch mixes the outputs of the two networks, not their parameters, which needs both on a device and equals m_k for
   linear networks only. It takes the gradient of v_k after w_k's step.
2. 0.02 alpha_k is in FedTorch only. FedTorch's gradient by alpha takes v_k and w_k after their steps, and their
   gradients for the mixed output; here it is the derivative of f_k(m_k) by alpha_k.
3. v_k starts as the first w that the client receives; in the codes, as the start of w.
4. litian96/ditto takes the first gradient of v_k in a round at the mixture that its last round left; here m_k has the
   new w.
5. A client is evaluated with the m_k of the end of its own training, as in FedTorch. The other code takes the mean w.
6. `training` has the optimiser of w_k and v_k. Clipping bounds the norm of both gradients together.
7. `steps`, `train_samples` and `train_loss` are those of w_k. `train_flops` counts both networks.
8. `size: own` is ours: w_k and v_k have the size of the client's capacity, and w is a holder mean over submodels. A
   client's v_k fits one network, so its capacity is fixed.
"""

import copy
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import nn

from rayfl import costs
from rayfl.core.fold import Update
from rayfl.core.joined import call
from rayfl.core.net import cached_module, load, params_of
from rayfl.core.tensors import Params, copied
from rayfl.methods.base import Payload, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.personal.base import Personal

DECAY = 0.02
"""Factor of alpha in its own gradient (FedTorch's `alpha_update`)."""


class APFL(Personal):
    contract: ClassVar = Contract(plain={"alpha": 0})

    name: Literal["apfl"] = "apfl"
    alpha: float = Field(default=0.5, ge=0, le=1)
    """Share of the client's own network in the mixture; with `adaptive`, its start."""
    adaptive: bool = False
    """Whether every client learns its share, one step per round."""

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        received: Params = payload["params"]
        kept = cast(dict[str, Params], visit.client_state or {})
        share = kept.get("share", {"alpha": torch.tensor(self.alpha)})["alpha"]
        pair = Pair(cached_module(visit.net, visit.data.device), share, self.adaptive)
        load(pair.w, received)
        load(pair.v, kept.get("local", received))
        objective = self.loss(visit)

        def loss(outputs: tuple[torch.Tensor, torch.Tensor | None], y: torch.Tensor) -> torch.Tensor:
            value = objective(outputs[0], y)
            if outputs[1] is None:
                return value
            mixed = objective(outputs[1], y)
            return value + (mixed - mixed.detach())  # the value is that of w_k

        rate = self.task.training.rate(visit.round, len(visit.data))
        lr = rate(0) if callable(rate) else rate
        metrics = self.fit(pair, visit, loss=loss, adjust=lambda _: pair.adapt(lr))
        metrics["train_flops"] = (1 + pair.is_mixed) * costs.training_flops(visit.net, int(metrics["train_samples"]))
        update = self.answer(params_of(pair.w), {"params": received}, visit, metrics)
        state = {"own": copied(pair.mixture()), "local": copied(params_of(pair.v))}
        if self.adaptive:
            state["share"] = {"alpha": pair.alpha.detach().cpu()}
        update.client_states[visit.client.id] = state
        return update


class Pair(nn.Module):
    """The networks w_k and v_k, and the share alpha_k []."""

    def __init__(self, like: nn.Module, alpha: torch.Tensor, adaptive: bool):
        super().__init__()
        self.w, self.v = copy.deepcopy(like), copy.deepcopy(like)
        self.alpha = alpha.to(next(like.parameters()).device, copy=True).requires_grad_(adaptive)
        self.is_mixed = adaptive or bool(alpha)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs of w_k and of the mixture; None for the mixture if it always is w_k."""
        output = self.w(x)
        if not self.is_mixed:
            return output, None
        # w_k draws what FedAvg's networks draw
        with torch.random.fork_rng([x.device] if x.is_cuda else []):
            return output, call(self.v, self.mixture(), x)

    def mixture(self) -> Params:
        """Return alpha v + (1 - alpha) w, with gradients by alpha and v."""
        w = params_of(self.w)
        return {name: self.alpha * v + (1 - self.alpha) * w[name] for name, v in self.v.named_parameters()}

    def adapt(self, lr: float) -> None:
        """Make the step of alpha, after the first backward pass of a round."""
        if self.alpha.grad is not None:
            alpha = self.alpha.detach()
            self.alpha = (alpha - lr * (self.alpha.grad + DECAY * alpha)).clamp(0, 1)
