"""ScaleFL: clients train networks cut in width and depth, with distillation from the last exit to earlier ones.

Paper: Ilhan, Su, Liu, "ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients", CVPR 2023,
https://openaccess.thecvf.com/content/CVPR2023/html/Ilhan_ScaleFL_Resource-Adaptive_Federated_Learning_With_Heterogeneous_Clients_CVPR_2023_paper.html

Symbols: $s$ the width and $K$ the exits of a client's network, $z_j$ the logits of its $j$-th exit, $C$ a layer's
channels in the widest network, $T$ the temperature, $n$ classes, $B$ a batch, $x$ the global parameters.

    $S_k$         the network up to the $K$-th exit with exits $1 ... K$, with the first $floor(s C)$ channels of every
                layer; outputs of convolutions are divided by $s$
    $D_j$         $= KL(softmax(z_K/T) || softmax(z_j/T))$, the first held constant
    $l_j$         $= CE(z_j, labels) + gamma T^2 D_j$ from round `distill_from` on, for $j < K$;
                $l_K = CE(z_K, labels)$
    $L$           $= 2/(K (K + 1)) sum_j j l_j$
    $y_k$         SGD from $S_k x$ on $L$
    $x$           $<- (sum_k S_k^T y_k)/(sum_k S_k^T 1)$, uniform weights, elsewhere unchanged

Cost per round: the client's network with its exits down and up; its training, one backward pass for all exits; one sum
on the server.

The output of a device is its last exit. The authors' ResNet110 for CIFAR has exits after 30, 38 and 46 of 54 blocks;
at widths 0.7, 0.7, 0.75 and 1 its four networks have 157,453, 325,631, 783,402 and 1,982,136 parameters.

Departures:
1. `gamma: 0`, no distillation, is the default of the authors' code. Its README uses 0.05 for text, from round
   floor(rounds / 4) + 1 on, counted from 0.
2. The divergence is the mean over the batch, with a constant teacher. The code averages over B n elements (`reduction:
   mean`) and also trains the teacher by it (`detach: false`).
3. The cross-entropy is not scaled by 1 - gamma, as in the code, where that line is commented out.
4. The division by s is HeteroFL's Scaler, relative to the server's width and in training only; the code also divides in
   evaluation. Batch normalisation undoes it, up to its eps.
5. Norms are static: statistics are collected before an evaluation, as in HeteroFL. The code normalises by the test
   batch.
6. Without `widths`, the capacity by parameters or multiply-adds determines the width. That is ours.
7. Absent classes are masked in the cross-entropies only. `train_loss` is L.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator

from rayfl import costs
from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.net import Net
from rayfl.methods.base import Task, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.methods.sizes import Exits, by_exits
from rayfl.training.settings import Logits, Loss, divergence, every_exit


class ScaleFL(Dense):
    contract: ClassVar = Contract(wants="exits")

    name: Literal["scalefl"] = "scalefl"
    scaler: bool = True
    exits: Exits = ()
    """Last exit of every capacity, smallest capacity first, counted from 1. Default: 1, 2, ... if there are as many
    capacities as exits; the last exit for a single capacity."""
    widths: tuple[float, ...] = ()
    """Width of every capacity, smallest capacity first. Default: the capacity itself if `clients.metric` is width,
    otherwise the largest width at which the network with its exits costs at most that share of the full one."""
    gamma: float = Field(default=0.0, ge=0)
    """Weight of the distillation from the last exit. 0: no distillation."""
    temperature: float = Field(default=3.0, gt=0)
    """With `gamma`: temperature T of the divergence."""
    distill_from: int = Field(default=0, ge=0)
    """With `gamma`: first round with distillation, counted from 0."""
    detach: bool = True
    """With `gamma`: hold the last exit's output constant in the divergence."""
    reduction: Literal["batchmean", "mean"] = "batchmean"
    """With `gamma`: mean of the divergence over samples (batchmean), or over samples and classes (mean)."""

    @field_validator("widths")
    @classmethod
    def _ascending_widths(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if list(value) != sorted(value) or not all(0 < width <= 1 for width in value):
            raise ValueError(
                "ascending widths in (0, 1], because larger capacities include the channels of smaller ones"
            )
        return value

    @model_validator(mode="after")
    def _a_teacher(self) -> Self:
        distillation = self.temperature, self.distill_from, self.detach, self.reduction
        if not self.gamma and distillation != (3, 0, True, "batchmean"):
            raise ValueError("temperature, distill_from, detach and reduction only with gamma > 0")
        return self

    def sizes(self, task: Task) -> Mapping[float, Net]:
        nets = {capacity: replace(net, rounding="down") for capacity, net in by_exits(task, self.exits).items()}
        if self.widths and len(self.widths) != len(nets):
            raise ConfigError(
                f"method.widths: {list(self.widths)} is not valid. Allowed: {len(nets)} widths, one per capacity, "
                "smallest capacity first"
            )
        if self.widths:
            widths = dict(zip(sorted(nets), self.widths, strict=True))
        else:
            widths = {c: costs.width_for(net, c, task.metric) for c, net in nets.items()}
        server = widths[task.server_capacity]
        return {c: replace(net, width=min(widths[c], server)) for c, net in nets.items()}

    def check(self, rounds: int, clients: Population) -> None:
        if self.distill_from >= rounds:
            raise ConfigError(
                f"method.distill_from: {self.distill_from} is not valid. Allowed: less than the run's {rounds} rounds"
            )

    @property
    def needs_classes(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "its exits compare class probabilities" if self.gamma else ""

    def loss(self, visit: Visit) -> Loss:
        plain, rows = super().loss(visit), visit.data.goal.rows
        distills = self.gamma > 0 and visit.round >= self.distill_from

        def of_all_exits(logits: Logits, y: torch.Tensor) -> torch.Tensor:
            *students, last = every_exit(logits)
            teacher = last.detach() if self.detach else last
            losses = [plain(z, y) for z in (*students, last)]
            if distills:
                scale = self.gamma * self.temperature**2 / (last.shape[-1] if self.reduction == "mean" else 1)
                teacher, _ = rows(teacher, y)
                for j, z in enumerate(students):
                    losses[j] = losses[j] + scale * divergence(teacher, rows(z, y)[0], self.temperature)
            total = torch.stack([j * loss for j, loss in enumerate(losses, start=1)]).sum()
            return 2 / (len(losses) * (len(losses) + 1)) * total

        return of_all_exits
