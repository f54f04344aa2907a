"""SCAFFOLD: control variates take out of every local step what sets a client apart from the others.

Paper: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
https://arxiv.org/abs/1910.06378 (Algorithm 1).

Symbols: x the global parameters, c the server's variate, c_k client k's, both zero at first; g_k a gradient of
its loss, K its steps of a round, M the number of clients, A those of a round.

    y_k     =  K steps from x of  y <- y - lr (g_k(y) + c - c_k)
    c_k+    =  option I: the gradient of k's loss at x
               option II: c_k - c + (x - y_k) / (K lr), which is the mean of the K gradients g_k(y)
    x      <-  x + server_lr mean_A (y_k - x)
    c      <-  c + 1/M sum_A (c_k+ - c_k): the mean of all clients' variates

x and c travel down, y_k and c_k+ - c_k up: twice the traffic of FedAvg.

    >>> from rayfl.methods import METHODS
    >>> METHODS["scaffold"]().option
    'II'

Departures:
1. Option II sums up the K gradients: the same with plain SGD, and with momentum, weight decay and clipping still the
   mean of g_k, where the paper's difference is not. Clipping bounds g_k + c - c_k.
2. Option I passes over all of the client's data, in training mode, in batches of `training.batch_size` but not
   shuffled or augmented; its cost is counted.
3. Submodels (`size: own`) are unpublished: variates have the server's shapes, a client uses and changes its part
   of them, zero where it never held; c changes by 1/M of the sum there too, and not by a mean over holders.
4. `weight: samples` and `label_rows: present` are about the mean of x; variates are summed alike and whole.
5. A client that makes no step keeps its variate.
"""

from collections.abc import Iterator
from typing import Literal, cast

import torch
from pydantic import Field
from torch import nn

from rayfl import costs
from rayfl.methods.base import Client, Payload, State, Update
from rayfl.methods.width import SizedMethod
from rayfl.seeds import stream, torch_scope
from rayfl.submodel import NestedMean, Selection
from rayfl.tensors import Params
from rayfl.training import ClientData


class Scaffold(SizedMethod):
    name: Literal["scaffold"] = "scaffold"
    option: Literal["I", "II"] = "II"
    """A client's new variate. I: its gradient at what it received, one more pass over its data. II: the mean of
    the gradients that it trained with, for nothing."""
    server_lr: float = Field(default=1.0, gt=0)
    """eta_g: the server's step along the mean of the clients' changes; 1 takes their mean."""

    def init(self, seed: int) -> State:
        state = super().init(seed)
        return state | {"variate": {name: torch.zeros_like(t) for name, t in state["params"].items()}}

    def extract(self, state: State, selection: Selection) -> Payload:
        return {group: selection.take(tensors) for group, tensors in state.items()}

    def local_update(
        self, payload: Payload, selection: Selection, client: Client, data: ClientData, round: int, seed: int
    ) -> Update:
        kept = self._kept(client)
        own = selection.take(kept)
        correction = {name: (c - own[name]).to(data.device) for name, c in payload["variate"].items()}
        net = self.network(payload["params"], selection.net, data)
        mean = {name: torch.zeros_like(t) for name, t in correction.items()}
        steps = self.task.training.batches_of(len(data))
        if self.option == "I" and steps:
            mean |= self._gradient(net, data, round, seed)

        def correct(net: nn.Module) -> None:
            for name, gradient in _gradients(net).items():
                if self.option == "II":
                    mean[name].add_(gradient, alpha=1 / steps)
                gradient.add_(correction[name])

        metrics = self.train(net, data, round, seed, adjust=correct)
        update = self.answer(net, selection, data, metrics)
        if steps:
            update.sums["variate"] = {name: mean[name].cpu() - t for name, t in own.items()}
            kept = {name: t.clone() for name, t in kept.items()}
            selection.put(update.sums["variate"], kept)
            update.carries[client.id] = {"variate": kept}
            if self.option == "I":
                seen = int(metrics["train_samples"]) + len(data)
                update.metrics["train_flops"] = costs.training_flops(self.task.model, selection.net, seen)
        return update

    def _kept(self, client: Client) -> Params:
        """c_k in the server's shapes."""
        if client.carry is not None:
            return cast(Params, client.carry["variate"])
        return {name: torch.zeros(shape) for name, shape in self.task.layout(self.task.server).shapes.items()}

    def _gradient(self, net: nn.Module, data: ClientData, round: int, seed: int) -> Params:
        """The gradient of the client's loss over all its data, at the parameters of `net`."""
        loss = self.loss(data, round)
        net.train()
        net.zero_grad()
        with torch_scope(stream(seed, "variate"), data.device):
            for x, y in data.in_order(self.task.training.batch_size):
                (loss(net(x), y) * (len(y) / len(data))).backward()
        return _gradients(net)

    def aggregate(self, state: State, round: int, updates: Iterator[tuple[Selection, Update]]) -> State:
        mean = NestedMean(state["params"])
        variate = {name: c.clone() for name, c in state["variate"].items()}
        for selection, update in updates:
            mean.add(selection, update.sums["params"], update.weight, update.held)
            selection.put(update.sums.get("variate", {}), variate, alpha=1 / self.task.clients)
        params = {name: state["params"][name].lerp(y, self.server_lr) for name, y in mean.mean().items()}
        return {"params": params, "variate": variate}


def _gradients(net: nn.Module) -> Params:
    """The gradients themselves, no copies."""
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
