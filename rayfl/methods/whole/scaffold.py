"""SCAFFOLD: control variates correct the client drift in every local step.

Paper: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
https://arxiv.org/abs/1910.06378 (Algorithm 1).

Symbols: $x$ the global parameters, $c$ the server's variate, $c_k$ client $k$'s, both initially zero; $g_k$ a gradient
of its loss, $K$ its steps per round, $eta$ the learning rate, $M$ the number of clients, $A$ the clients of a round.

    $y_k$         $K$ steps from $x$ of $y <- y - eta (g_k(y) + c - c_k)$
    $c_k^+$       option I: the gradient of $k$'s loss at $x$;
                option II: $c_k - c + (x - y_k)/(K eta)$, which is the mean of the $K$ gradients $g_k(y)$
    $x$           $<- x + eta_g 1/|A| sum_(k in A) (y_k - x)$ with $eta_g = 1$, or `server: {optimizer: sgd, lr: eta_g}`
    $c$           $<- c + 1/M sum_(k in A) (c_k^+ - c_k)$, the mean of all clients' variates
    $c_k$         $<- c_k^+$

Cost per round: $x$ and $c$ down, $y_k$ and $c_k^+ - c_k$ up, twice the bytes of FedAvg; the client's training, with
option I one more pass over its data; two sums on the server.

Departures:
1. Option II averages the K gradients. With plain SGD this equals the paper's difference; with momentum, weight decay
   or clipping it still is the mean of g_k, unlike the paper's difference. Clipping bounds g_k + c - c_k.
2. Option I passes over all of the client's data, in training mode, in batches of `training.batch_size`, without
   shuffling or augmentation; its FLOPs are counted.
3. Submodels (`size: own`) are unpublished: variates have the server's shapes, a client uses and updates its part of
   them, and they are zero at coordinates that it never held; c changes by 1/M of the sum, not by a holder mean.
4. `weight: samples` and `label_rows: present` apply to the mean of x only; variates are summed with equal weights.
5. A client that makes no steps does not change its variate.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, cast

import torch
from torch import nn

from rayfl import costs
from rayfl.core.fold import Fold, State, Update
from rayfl.core.net import Net, params_of
from rayfl.core.seeds import stream, torch_scope
from rayfl.core.tensors import Params
from rayfl.methods.base import Payload, Task, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.methods.sizes import Size, same


class Scaffold(Dense):
    sent: ClassVar[tuple[str, ...]] = ("params", "variate")
    contract: ClassVar = Contract(fedavg_rounds=1, traffic=lambda whole, head: (2 * whole, 2 * whole))

    needs_exact_updates: ClassVar = "a client keeps its variate as it computed it"

    name: Literal["scaffold"] = "scaffold"
    size: Size = "largest"
    """Network: that of the largest or of the smallest capacity for all, or that of each client's own capacity."""
    option: Literal["I", "II"] = "II"
    """New variate of a client. I: its gradient at the received parameters, which needs one more pass over its data. II:
    the mean of its training gradients, at no extra cost."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return same(task, self.size)

    def init(self) -> State:
        params = self.task.initial()
        return {"params": params, "variate": {name: torch.zeros_like(t) for name, t in params.items()}}

    @property
    def synchronous(self) -> str:
        return "its control variates change in every round"

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        data, steps = visit.data, self.task.training.batches_of(len(visit.data))
        variate = self._variate(visit)
        part = visit.selection.take(variate)
        correction = {name: (c - part[name]).to(data.device) for name, c in payload["variate"].items()}
        module = self.module(visit, payload["params"])
        mean = {name: torch.zeros_like(t) for name, t in correction.items()}
        if self.option == "I" and steps:
            mean |= self._gradient(module, visit)

        def correct(module: nn.Module) -> None:
            for name, gradient in _gradients(module).items():
                if self.option == "II":
                    mean[name].add_(gradient, alpha=1 / steps)
                gradient.add_(correction[name])

        metrics = self.fit(module, visit, adjust=correct)
        update = self.answer(params_of(module), {"params": payload["params"]}, visit, metrics)
        if steps:
            update.sums["variate"] = {name: mean[name].cpu() - t for name, t in part.items()}
            update.as_is = frozenset({"variate"})
            variate = {name: t.clone() for name, t in variate.items()}
            visit.selection.put(update.sums["variate"], variate)
            update.client_states[visit.client.id] = {"variate": variate}
            if self.option == "I":
                seen = int(metrics["train_samples"]) + len(data)
                update.metrics["train_flops"] = costs.training_flops(visit.net, seen)
        return update

    def step(self, state: State, round: int, fold: Fold) -> State:
        variate = state["variate"]
        if changes := fold.sum("variate"):
            variate = {name: c + changes[name] / self.task.clients for name, c in variate.items()}
        return {"params": fold.mean("params"), "variate": variate}

    def _variate(self, visit: Visit) -> Params:
        """Return c_k in the server's shapes."""
        if visit.client_state is not None:
            return cast(Params, visit.client_state["variate"])
        return {name: torch.zeros(shape) for name, shape in self.task.server.layout.shapes.items()}

    def _gradient(self, module: nn.Module, visit: Visit) -> Params:
        """Return the gradient of the client's loss over all its data, at the parameters of the module."""
        data, loss = visit.data, self.loss(visit)
        module.train()
        module.zero_grad()
        with torch_scope(stream(visit.seed, "variate"), data.device):
            for x, y in data.in_order(self.task.training.batch_size):
                (loss(module(x), y) * (len(y) / len(data))).backward()
        return _gradients(module)


def _gradients(module: nn.Module) -> Params:
    """Return the gradients by name, not copied."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
