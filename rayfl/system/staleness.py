"""Weights of updates that were trained from an older version of the model.

With x the server's parameters now, x_v those of version v, y_k the trained ones, w_k the client's weight, tau the
versions between, and s(tau) <= 1:

    count     x_j <- x_j + sum_k s w_k (y_kj - x_vj) / sum_k w_k      stale updates move the model less
    weights   x_j <- x_j + sum_k s w_k (y_kj - x_vj) / sum_k s w_k

over the holders of coordinate j, each update with the selection of its own version. FedBuff divides by the number of
updates (`count`); FedScale's implementation by the weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, Self

import torch
from pydantic import Field, model_validator

from rayfl.config import Config
from rayfl.core.fold import Fold, State, Update
from rayfl.core.norms import is_statistic
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params


@dataclass(frozen=True)
class Stale:
    """The sum of updates that were trained from the same older version, with the same selection."""

    update: Update
    selection: Selection
    then: State
    """State of the server before the round of that version."""
    tau: int
    """Versions between."""


OPTIONS = {"constant": (), "polynomial": ("a",), "hinge": ("a", "b"), "refl": ("beta", "c")}
"""Weight -> its options."""


class Staleness(Config):
    """Weight s(tau) of an update that is tau versions old: 1 for tau = 0."""

    weight: Literal["constant", "polynomial", "hinge", "refl"] = "polynomial"
    """constant: 1. polynomial: (1 + tau)^-a (FedBuff: a = 0.5). hinge: 1 up to tau = b, then 1 / (a (tau - b) + 1)
    (FedAsync). refl: (1 - beta) / (1 + tau) + beta (1 - exp(-r / r_max) / c) (REFL), where r is the squared distance of
    the update from the mean update of the round's own clients, over the held coordinates and relative to that mean, and
    r_max the largest of the round. With mode: sync and divide: weights only."""
    a: float = Field(default=0.5, ge=0)
    """Only for polynomial and hinge: rate of decay."""
    b: float = Field(default=4, ge=0)
    """Only for hinge: largest staleness with weight 1."""
    beta: float = Field(default=0.35, ge=0, le=1)
    """Only for refl: share of the weight that follows from the distance."""
    c: float = Field(default=10, ge=1)
    """Only for refl: divisor of the damping of small distances. Default: that of REFL's code."""
    divide: Literal["count", "weights"] = "count"
    """Divisor of the mean: the clients' weights, or these times s(tau)."""

    @model_validator(mode="after")
    def _normalised(self) -> Self:
        if self.compares and self.divide != "weights":
            raise ValueError("divide: weights with weight: refl")
        for name in dict.fromkeys(chain(*OPTIONS.values())):
            value = getattr(self, name)
            if name not in OPTIONS[self.weight] and value != type(self).model_fields[name].default:
                some = " or ".join(weight for weight, names in OPTIONS.items() if name in names)
                raise ValueError(f"{name} only with weight: {some}; {name} is {value:g}")
        return self

    @property
    def compares(self) -> bool:
        """True if a weight depends on the other updates of the round: every stale client is then a group of its own,
        and stale updates are aggregated last."""
        return self.weight == "refl"

    def of(self, tau: int, distance: float = 1.0) -> float:
        """Return s(tau). `distance`: r / r_max."""
        if self.weight == "constant":
            return 1.0
        if self.weight == "polynomial":
            return (1 + tau) ** -self.a
        if self.weight == "refl":
            return (1 - self.beta) / (1 + tau) + self.beta * (1 - math.exp(-distance) / self.c)
        return 1.0 if tau <= self.b else 1 / (self.a * (tau - self.b) + 1)

    def weights(self, stale: Sequence[Stale], fold: Fold) -> list[float]:
        """Return s of every stale update. `fold`: the sums of the round's own clients."""
        if not self.compares:
            return [self.of(one.tau) for one in stale]
        means = {group: fold.mean_so_far(group) for group in {group for one in stale for group in one.update.sums}}
        distances = [_distance(one, means, fold.state) for one in stale]
        most = max(distances, default=0.0)
        return [self.of(one.tau, 1.0 if r == most else r / most) for one, r in zip(stale, distances, strict=True)]

    def moved(self, stale: Stale, now: State, s: float) -> Update:
        """Return the sum of stale updates as a sum for the state `now`: w (x + s (y - x_v)) replaces w y. Statistics of
        norms are mixed instead, w ((1 - s) x + s y), so that variances stay positive."""
        update, selection, then = stale.update, stale.selection, stale.then
        c = s if self.divide == "weights" else 1.0

        def tensor(name: str, sum: torch.Tensor, old: torch.Tensor, new: torch.Tensor, rows: Params) -> torch.Tensor:
            weight = rows.get(name, update.weight)
            if is_statistic(name):
                return (c - s) * weight * new + s * sum
            return c * weight * new + s * (sum - weight * old)

        def group(name: str, sums: Params, cut: bool) -> Params:
            old, new = (selection.take(state[name]) if cut else state[name] for state in (then, now))
            rows = update.row_weights if name == "params" else {}
            return {key: tensor(key, t, old[key], new[key], rows) for key, t in sums.items()}

        return replace(
            update,
            sums={name: group(name, sums, True) for name, sums in update.sums.items()},
            whole={name: group(name, sums, False) for name, sums in update.whole.items()},
            weight=c * update.weight,
            row_weights={name: c * rows for name, rows in update.row_weights.items()},
        )


def _distance(stale: Stale, means: State, now: State) -> float:
    """Return |u - v|^2 / |v|^2 with the update u of one client and the mean update v, over the coordinates that the
    client holds; v is 0 where no other client holds them."""
    update, apart, size = stale.update, 0.0, 0.0
    for group, sums in update.sums.items():
        old, new, mean = (stale.selection.take(state[group]) for state in (stale.then, now, means))
        for name, t in sums.items():
            if is_statistic(name):
                continue
            weight = torch.as_tensor(
                update.row_weights.get(name, update.weight) if group == "params" else update.weight
            )
            is_held = weight > 0
            u = torch.where(is_held, t / weight - old[name], 0.0).double()
            v = torch.where(is_held, mean[name] - new[name], 0.0).double()
            apart, size = apart + float((u - v).square().sum()), size + float(v.square().sum())
    return apart / size if size else math.inf
