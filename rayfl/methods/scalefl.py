"""ScaleFL: clients train networks that are cut in width and in depth, whose last exit teaches those before it.

Paper: Ilhan, Su, Liu, "ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients", CVPR 2023,
https://openaccess.thecvf.com/content/CVPR2023/html/Ilhan_ScaleFL_Resource-Adaptive_Federated_Learning_With_Heterogeneous_Clients_CVPR_2023_paper.html

Symbols: s the width and K the exits of a client's network, z_j the logits of its j-th exit, C a layer's channels in
the widest network, n classes, B a batch.

    S              the network up to the K-th exit with exits 1 .. K, of every layer the first floor(s C) channels;
                   what a convolution gives is divided by s
    D_j       =    KL(softmax(z_K / T) || softmax(z_j / T)), the first held constant
    l_j       =    CE(z_j, y) + gamma T^2 D_j from round `distill_from` on, for j < K;    l_K = CE(z_K, y)
    L         =    2 / (K (K + 1)) sum_j j l_j
    x        <-    sum_k S_k^T y_k / sum_k S_k^T 1, uniform weights, elsewhere unchanged

A device answers by its last exit. The authors' ResNet110 for CIFAR has exits behind 30, 38 and 46 of 54 blocks, and

    >>> from rayfl.methods import METHODS
    >>> METHODS["scalefl"](widths=(0.7, 0.7, 0.75, 1), exits=(1, 2, 3, 4)).exits
    (1, 2, 3, 4)

Departures:
1. `gamma: 0`, no distillation, is the default of the authors' code; its README takes 0.05 for text, from a quarter of
   the rounds on: floor(rounds / 4) + 1, where rounds count from 0.
2. The divergence is the mean over the batch, and its teacher is held constant. The code means over B n elements
   (`reduction: mean`) and trains the teacher by it too (`detach: false`).
3. The cross-entropy is not scaled by 1 - gamma, as in the code, which has that line commented out.
4. The division by s is HeteroFL's Scaler, relative to the server's width and in training alone; the code divides in
   evaluation too. Before a norm by the batch it changes nothing but what its eps is added to.
5. Norms are static: statistics are collected before an evaluation, as for HeteroFL. The code normalises by the test
   batch.
6. Without `widths` a capacity by parameters or multiply-adds decides how wide its network is; nothing is published
   for that.
7. Absent classes are masked in the cross-entropies alone. `train_loss` is L.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator

from rayfl import costs
from rayfl.axes import Net
from rayfl.config import ConfigError
from rayfl.methods.base import Task
from rayfl.methods.exits import ExitMethod, every_exit
from rayfl.models.base import Model, layout
from rayfl.training import ClientData, Loss


class ScaleFL(ExitMethod):
    name: Literal["scalefl"] = "scalefl"
    scaler: bool = True
    widths: tuple[float, ...] = ()
    """The width of every capacity, smallest capacity first. Unless given the largest at which its network, with its
    exits, costs at most its share of the full one; where capacities are widths, the capacity itself."""
    gamma: float = Field(default=0.0, ge=0)
    """How much the exits learn from the last. 0: no distillation."""
    temperature: float = Field(default=3.0, gt=0)
    """With `gamma`: T, which divides the logits in the divergence."""
    distill_from: int = Field(default=0, ge=0)
    """With `gamma`: the first round with distillation, counted from 0."""
    detach: bool = True
    """With `gamma`: hold the last exit's answer constant in the divergence."""
    reduction: Literal["batchmean", "mean"] = "batchmean"
    """With `gamma`: the divergence is a mean over samples, or over samples and classes."""

    @field_validator("widths")
    @classmethod
    def _ascending_widths(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if list(value) != sorted(value) or not all(0 < width <= 1 for width in value):
            raise ValueError("ascending widths in (0, 1], for a larger capacity has the channels of a smaller one too")
        return value

    @model_validator(mode="after")
    def _a_teacher(self) -> Self:
        if not self.gamma and (self.temperature, self.distill_from, self.detach, self.reduction) != (
            3,
            0,
            True,
            "batchmean",
        ):
            raise ValueError("temperature, distill_from, detach and reduction with gamma > 0 only")
        return self

    def check(self, rounds: int) -> None:
        if self.distill_from >= rounds:
            raise ValueError(
                f"method.distill_from: given {self.distill_from}; allowed: less than the run's {rounds} rounds"
            )

    def nets(self, task: Task, exits: Mapping[float, int]) -> dict[float, Net]:
        nets = {capacity: Net(exits=count, rounding="down") for capacity, count in exits.items()}
        if self.widths and len(self.widths) != len(nets):
            raise ConfigError(
                f"method.widths: given {list(self.widths)}; allowed: {len(nets)} widths, one for every capacity, "
                "smallest capacity first"
            )
        if self.widths:
            widths = dict(zip(sorted(nets), self.widths, strict=True))
        else:
            widths = {c: affordable_width(task.model, net, c, task.metric) for c, net in nets.items()}
        server = widths[task.server_capacity]
        return {c: replace(net, width=min(widths[c], server)) for c, net in nets.items()}

    def loss(self, data: ClientData, round: int) -> Loss:
        plain, distills = super().loss(data, round), self.gamma > 0 and round >= self.distill_from

        def of_all_exits(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            *students, last = every_exit(logits)
            teacher = last.detach() if self.detach else last
            losses = [plain(z, y) for z in (*students, last)]
            if distills:
                for j, z in enumerate(students):
                    losses[j] = losses[j] + self.gamma * self.temperature**2 * self._divergence(teacher, z)
            total = torch.stack([j * loss for j, loss in enumerate(losses, start=1)]).sum()
            return 2 / (len(losses) * (len(losses) + 1)) * total

        return of_all_exits

    def _divergence(self, teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
        """KL(softmax(teacher / T) || softmax(student / T)) of logits [B, C]."""
        target, given = (F.log_softmax(logits / self.temperature, 1) for logits in (teacher, student))
        total = F.kl_div(given, target, reduction="sum", log_target=True)
        return total / (len(student) if self.reduction == "batchmean" else student.numel())


def affordable_width(model: Model, net: Net, capacity: float, metric: costs.Metric) -> float:
    """The largest width at which `net` costs at most `capacity` times the model's full network with all its exits:
    one of the widths j / K at which a network changes. By `width` the capacity itself.

    A ConfigError if even one channel in the narrowest layer costs more.
    """
    if metric == "width":
        return capacity
    cost = costs.parameters if metric == "params" else costs.flops
    full = Net(exits=model.exit_count if model.exit_count > 1 else 0, rounding="down")
    sizes = {axis.size for axis in layout(model, full).axes.values()}
    # floor(j / K) channels: below 1 / min(sizes) some layer has none
    widths = sorted({j / size for size in sizes for j in range(-(-size // min(sizes)), size + 1)})
    # a capacity that was computed as a ratio of two counts must buy exactly that count
    budget = capacity * cost(model, full) * (1 + 1e-9)
    affordable = bisect_right(widths, budget, key=lambda width: cost(model, replace(net, width=width)))
    if not affordable:
        smallest = cost(model, replace(net, width=widths[0])) / cost(model, full)
        raise ConfigError(
            f"capacity {capacity:g} by {metric}: given model {model.name}, whose narrowest network up to exit "
            f"{net.exits or 1} already is {smallest:.3g}; take capacities from {smallest:.3g} to 1, or other "
            "method.exits"
        )
    return widths[affordable - 1]
