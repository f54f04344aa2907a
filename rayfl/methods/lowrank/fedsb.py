"""Fed-SB: clients train a square core between two frozen factors, so that the mean is exact.

Paper: Singhal, Ponkshe, Vepakomma, "Fed-SB: A Silver Bullet for Extreme Communication Efficiency and Performance in
(Private) Federated LoRA Fine-Tuning", 2025, https://arxiv.org/abs/2502.15436.

Symbols: as in `base`; a layer is $W_0 x + s B M A x$, with $M$ $[r, r]$.

    $A, B$        frozen, with orthonormal rows and columns
    $M_k$         steps from $M$
    $M$           $<- sum_k w_k M_k$; $P = s B M A$, exactly, if all ranks are equal

Cost per round: $r_k^2$ numbers per layer down and up, independent of $d$ and $o$; the client's training; one sum on the
server.

`start: gradient`: the first round with updates trains nothing. Every client of the cohort sends $G_k$, the mean
gradient of its loss by $W_0$ over the batches of a round, truncated to its first $R$ singular directions; with
$U S V^T$ the singular value decomposition of $sum_k w_k G_k$ the server sets

    $A$   $<- V[:, :R]^T$
    $B$   $<- U[:, :R]$
    $M$   $<- -eta S[:R]/s$

which is the first step of full fine-tuning at the rate $eta$, truncated to rank $R$.

Departures:
1. In the code the gradient is of 50 samples, before the first round, and M = S. Here it is the cohort's and costs a
   round with $R (d + o)$ numbers per layer up, and down in the next round; the factor -eta / s makes M a descent step.
2. `start: seed`: A and B are random with orthonormal rows and columns, and M is 0. The paper reports better results
   with the gradient.
3. The paper has one rank. Here a client of rank r trains the first r rows and columns of M; every entry is averaged
   over its holders.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, cast

import torch
from torch import nn
from torch.func import functional_call

from rayfl import costs
from rayfl.core import factors as lowrank
from rayfl.core.fold import Factors, Fold, State, Update
from rayfl.core.net import Net, cached_module, load
from rayfl.core.seeds import stream, torch_generator, torch_scope
from rayfl.core.submodel import Selection
from rayfl.core.tensors import nbytes
from rayfl.methods.base import Payload, Task, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import LowRank, Part, adapters, part_of

START = "start"
"""Group of the state and the payload with the round of the gradients, or `NEVER`."""
NEVER = -1


class FedSB(LowRank):
    contract: ClassVar = Contract(wants="adapters", fedavg=None)

    name: Literal["fedsb"] = "fedsb"
    start: Literal["gradient", "seed"] = "gradient"
    """Origin of A and B: the first cohort's gradient, which takes one round, or the run's seed."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return adapters(task, core=True)

    def init(self) -> State:
        """Return the initial state: orthonormal A and B, and M = 0."""
        params = dict(super().init()["params"])
        for path in self.layers:
            a, b = f"{path}.lora.A", f"{path}.lora.B"
            params[a] = torch.linalg.qr(params[a].T).Q.T.contiguous()
            params[b] = torch.linalg.qr(params[b]).Q
        start = {START: {"round": torch.tensor(NEVER)}} if self.start == "gradient" else {}
        return {"params": params} | start

    def extract(self, state: State, selection: Selection) -> Payload:
        payload = super().extract(state, selection)
        return {**payload, START: state[START]} if START in state else payload

    @property
    def sends_products(self) -> bool:
        return self.start == "gradient"

    def trains(self, round: int) -> tuple[Part, ...]:
        return ("M",)

    def down(self, payload: Payload, round: int) -> int:
        """Return the bytes sent to a client: M, and in the round after that of the gradients A and B."""
        sent = super().down(payload, round)
        if START in payload and int(payload[START]["round"]) == round - 1 != NEVER:
            sent += nbytes({name: t for name, t in payload["params"].items() if part_of(name) in ("A", "B")})
        return sent

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        if START not in payload or int(payload[START]["round"]) != NEVER:
            return super().local_update(payload, visit)
        module = cached_module(visit.net, visit.data.device)
        load(module, payload["params"])
        gradients, metrics = self.gradients(module, visit)
        samples, targets = int(metrics["train_samples"]), sum(visit.net.layer_macs[path] for path in self.layers)
        metrics["train_flops"] = costs.training_flops(visit.net, samples) + 2 * targets * samples
        weight, products = self.weight_of(visit.data), {}
        for path, gradient in gradients.items():
            u, s, vt = lowrank.svd(gradient, None).truncated(self.rank(path))
            products[path] = Factors(u.to(gradient.dtype), (weight * s[:, None] * vt).to(gradient.dtype))
        metrics["bytes_down"] = self.down(payload, visit.round)
        metrics["bytes_up"] = sum(nbytes(product.tensors) for product in products.values())
        return Update({"params": {}}, weight, products=products, metrics=metrics)

    def gradients(self, module: nn.Module, visit: Visit) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Return the mean gradient [out, in] of the client's loss by every layer's W0 over the batches of a round, and
        metrics."""
        training, data, loss = self.task.training, visit.data, self.loss(visit)
        steps, generator = training.batches_of(len(data)), torch_generator(visit.seed, "batches")
        layers = {path: module.get_submodule(path) for path in self.layers}
        weights = {p: cast(torch.Tensor, m.weight).detach().clone().requires_grad_() for p, m in layers.items()}
        named = {f"{path}.weight": t for path, t in weights.items()}
        metrics = {"train_loss": 0.0, "train_samples": 0, "steps": 0}
        module.train()
        with torch_scope(stream(visit.seed, "dropout"), data.device):
            for x, y in data.batches(steps, training.batch_size, generator):
                value = loss(functional_call(module, named, (x,)), y)
                found = torch.autograd.grad(value / steps, list(weights.values()))
                for t, gradient in zip(weights.values(), found, strict=True):
                    t.grad = gradient if t.grad is None else t.grad + gradient
                metrics["train_loss"] += float(value.detach()) * len(y)
                metrics["train_samples"] += len(y)
                metrics["steps"] += 1
        whole = {path: torch.zeros_like(t) if t.grad is None else t.grad for path, t in weights.items()}
        # transformers' Conv1D stores its weight as [in, out]
        return {path: t if isinstance(layers[path], nn.Linear) else t.T for path, t in whole.items()}, metrics

    def step(self, state: State, round: int, fold: Fold) -> State:
        params = dict(fold.mean("params"))
        start = {START: {"round": torch.tensor(round)}} if fold.products else {}
        for path, mean in self.mean_products(fold).items():
            a, b, m = (f"{path}.lora.{part}" for part in "ABM")
            found = lowrank.svd(mean.left, mean.right)
            rank = min(found.rank, self.rank(path))
            u, s, vt = (t.to(params[a].dtype) for t in found.truncated(rank))
            params[a] = torch.cat([vt, params[a][rank:]])
            params[b] = torch.cat([u, params[b][:, rank:]], 1)
            first = torch.cat([s, s.new_zeros(self.rank(path) - rank)])
            params[m] = torch.diag(first * (-self.task.training.lr_at(0) / self.scale(path)))
        return {**state, **start, "params": params}
