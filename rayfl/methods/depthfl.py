"""DepthFL: clients train networks of several depths, whose exits teach each other.

Paper: Kim, Yu, Kim, Moon, "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR 2023,
https://openreview.net/forum?id=pf8RIZTMU58; with FedDyn: Acar et al., "Federated Learning Based on Dynamic
Regularization", ICLR 2021, https://arxiv.org/abs/2111.04263.

Symbols: n the exits of a client's network, z_i the logits of its i-th, p_i their softmax, x_t the global parameters
in round t, N the number of clients, g_k client k's FedDyn gradient and h the server's, both zero at first.

    S_n            the network up to the n-th exit with exits 1 .. n, at full width
    lambda_t       exp(-5 (1 - min(t, 300) / 300)^2)
    L_k(y)    =    sum_i CE(z_i, y) + lambda_t / (n - 1) sum_i sum_{j != i} KL(p_j || p_i), p_j held constant
    y_k       =    SGD from S_n x_t on L_k(y) - <g_k, y> + alpha / 2 |y - x_t|^2
    g_k      <-    g_k - alpha (y_k - x_t)
    m         =    mean of y_k, over the clients of the round that have a tensor; |A| counts them
    h        <-    h - alpha |A| / N (m - x_t)
    x_{t+1}   =    m - h / alpha, where |A| > 0; elsewhere unchanged

h is the mean of all clients' g_k, where those that do not have a tensor count as zero. The norms' running statistics
are averaged as the parameters are, without h. The global model answers by the mean of all its exits' logits.

    >>> from rayfl.methods import METHODS
    >>> [round(METHODS["depthfl"]().ramp(t), 3) for t in (0, 150, 300, 999)]
    [0.007, 0.287, 1.0, 1.0]

Departures:
1. N is the population, as in FedDyn and in the authors' Flower baseline, also for tensors that only large clients
   have: there h is smaller than the mean over those who could train them.
2. The divergence is exact; the baseline adds 1e-7 to the target's probabilities.
3. `alpha: 0` is plain averaging, without g_k and h; with `distill: false` it is "DepthFL (FedAvg)".
4. `exits_trained: last` stands for InclusiveFL (Liu et al., KDD 2022, https://arxiv.org/abs/2202.08036) without its
   momentum distillation: a client's earlier exits are neither trained nor sent. The baseline averages them in as they
   were sent out. They run along, and are counted in `train_flops`.
5. Absent classes are masked in the cross-entropies alone; `training.clip` bounds the gradient with FedDyn's terms.
   `train_loss` is L_k, the sum over the client's exits.
6. A client that makes no step keeps its g_k.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import nn

from rayfl.axes import Net
from rayfl.methods.base import Client, Deployment, Payload, State, Task, Update, add_metrics
from rayfl.methods.exits import ExitMethod, every_exit
from rayfl.methods.width import GroupedMethod
from rayfl.submodel import Selection
from rayfl.tensors import Params
from rayfl.training import ClientData, Loss

STATISTICS = "statistics"


class DepthFL(ExitMethod, GroupedMethod):
    name: Literal["depthfl"] = "depthfl"
    distill: bool = True
    """The exits of a client's network teach each other."""
    ramp_rounds: int = Field(default=300, ge=0)
    """With `distill`: rounds until lambda_t is 1."""
    alpha: float = Field(default=0.1, ge=0)
    """FedDyn's regularisation. 0: none, plain averaging."""
    exits_trained: Literal["all", "last"] = "all"
    """all exits of a client's network, and a device answers by their mean; or its last alone, which then answers
    (InclusiveFL)."""
    norms: Literal["running", "static"] = "running"
    """Static batch norms. running: they have running statistics, as torch keeps them, and `evaluation.statistics` has
    no effect. static: statistics are collected before an evaluation, as for HeteroFL."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.distill and self.ramp_rounds != 300:
            raise ValueError("ramp_rounds with distill: true only")
        if self.distill and self.exits_trained == "last":
            raise ValueError("distill: false with exits_trained: last, which leaves nobody to learn from")
        if self.alpha and (self.weight, self.label_rows) != ("uniform", "all"):
            raise ValueError("weight: uniform and label_rows: all, or alpha: 0, for FedDyn counts whole clients")
        return self

    def nets(self, task: Task, exits: Mapping[float, int]) -> dict[float, Net]:
        return {capacity: Net(exits=count) for capacity, count in exits.items()}

    @property
    def keeps_capacities(self) -> str:
        """With FedDyn, where depths differ: a client's g_k fits one network."""
        return "method.alpha: 0" if self.alpha and len(set(self.task.nets.values())) > 1 else ""

    @property
    def tracks(self) -> bool:
        return self.norms == "running"

    def group(self, net: Net) -> str:
        return STATISTICS

    def init(self, seed: int) -> State:
        state = super().init(seed)
        if self.norms == "running" and (statistics := self.task.model.statistics(self.task.server)):
            state[STATISTICS] = statistics
        if self.alpha:
            state["h"] = {name: torch.zeros_like(t) for name, t in state["params"].items()}
        return state

    def local_update(
        self, payload: Payload, selection: Selection, client: Client, data: ClientData, round: int, seed: int
    ) -> Update:
        received = {name: payload["params"][name] for name in self.trained_by(selection.net)}
        kept = cast(Params, client.carry) or {name: torch.zeros_like(t) for name, t in received.items()}
        pull = self._pull(received, kept, data.device) if self.alpha else None
        update = self.trained(payload, selection, data, round, seed, pull)
        sent = update.sums["params"] = {name: update.sums["params"][name] for name in received}
        if STATISTICS in update.sums:
            update.sums[STATISTICS] = _of_norms_in(sent, update.sums[STATISTICS])
        if self.alpha and update.metrics["steps"]:
            update.carries[client.id] = {
                name: g - self.alpha * (sent[name] - received[name]) for name, g in kept.items()
            }
        return update

    def trained_by(self, net: Net) -> list[str]:
        """The parameters that a client with this network trains: with `exits_trained: last` not those of the exits
        before, which are those that a network of one exit less has beside the trunk."""
        names, task = list(self.task.layout(net).dims), self.task
        if self.exits_trained == "all" or net.exits < 2:
            return names
        before, trunk = (
            task.layout(other).dims for other in (replace(net, exits=net.exits - 1), replace(net, exits=0))
        )
        return [name for name in names if name in trunk or name not in before]

    def _pull(self, received: Params, kept: Params, device: torch.device):
        """Adds FedDyn's alpha (y - x_t) - g_k to the gradients."""
        fixed = {name: (x.to(device), kept[name].to(device)) for name, x in received.items()}

        def pull(net: nn.Module) -> None:
            for name, parameter in net.named_parameters():
                if name in fixed and parameter.grad is not None:
                    x, g = fixed[name]
                    parameter.grad.add_(parameter.detach() - x, alpha=self.alpha).sub_(g)

        return pull

    def loss(self, data: ClientData, round: int) -> Loss:
        plain, ramp = super().loss(data, round), self.ramp(round)

        def of_all_exits(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = every_exit(logits)
            if self.exits_trained == "last":
                return plain(logits[-1], y)
            labels = torch.stack([plain(z, y) for z in logits]).sum()
            if not self.distill or len(logits) == 1:
                return labels
            return labels + ramp / (len(logits) - 1) * _divergences(logits)

        return of_all_exits

    def ramp(self, round: int) -> float:
        """lambda_t."""
        left = max(self.ramp_rounds - round, 0) / (self.ramp_rounds or 1)
        return math.exp(-5 * left**2)

    def aggregate(self, state: State, round: int, updates: Iterator[tuple[Selection, Update]]) -> State:
        holders: dict[str, float] = {}

        def counted() -> Iterator[tuple[Selection, Update]]:
            for selection, update in updates:
                add_metrics(holders, dict.fromkeys(update.sums["params"], update.weight))
                yield selection, update

        averaged = {group: tensors for group, tensors in state.items() if group != "h"}
        new = super().aggregate(averaged, round, counted())
        if not self.alpha:
            return new
        h, params = dict(state["h"]), new["params"]
        for name, count in holders.items():
            share = self.alpha * count / self.task.clients
            h[name] = h[name] - share * (params[name] - state["params"][name])
            params[name] = params[name] - h[name] / self.alpha
        return new | {"h": h}

    def deploy(self, state: State, round: int, capacity: float, client: Client | None = None) -> Deployment:
        deployed = super().deploy(state, round, capacity)
        return replace(deployed, answer="mean" if self.exits_trained == "all" else "last")


def _of_norms_in(params: Params, statistics: Params) -> Params:
    """The running statistics of the norms whose weights are in `params`."""
    return {name: t for name, t in statistics.items() if f"{name.rpartition('.')[0]}.weight" in params}


def _divergences(logits: torch.Tensor) -> torch.Tensor:
    """The sum over all pairs of exits of KL(p_j || p_i), p_j held constant, of logits [E, B, C]: the mean over the
    batch. A pair of an exit with itself adds nothing."""
    students = F.log_softmax(logits, 2)
    teachers = students.detach().unsqueeze(1)
    return F.kl_div(students.unsqueeze(0), teachers, reduction="sum", log_target=True) / logits.shape[1]
