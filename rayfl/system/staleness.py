"""Weights of updates that were trained from an older version of the model.

With x the server's parameters now, x_v those of version v, y_k the trained ones, w_k the client's weight, tau the
versions between, and s(tau) <= 1:

    count     x_j <- x_j + sum_k s w_k (y_kj - x_vj) / sum_k w_k      stale updates move the model less
    weights   x_j <- x_j + sum_k s w_k (y_kj - x_vj) / sum_k s w_k

over the holders of coordinate j, each update with the selection of its own version. FedBuff divides by the number of
updates (`count`); FedScale's implementation by the weights.
"""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from rayfl.config import Config
from rayfl.core.fold import State, Update
from rayfl.core.server_optimizers import is_statistic
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params


class Staleness(Config):
    """Weight s(tau) of an update that is tau versions old: 1 for tau = 0."""

    weight: Literal["constant", "polynomial", "hinge"] = "polynomial"
    """constant: 1. polynomial: (1 + tau)^-a (FedBuff: a = 0.5). hinge: 1 up to tau = b, then 1 / (a (tau - b) + 1)
    (FedAsync)."""
    a: float = Field(default=0.5, ge=0)
    """Rate of decay."""
    b: float = Field(default=4, ge=0)
    """Only for hinge: largest staleness with weight 1."""
    divide: Literal["count", "weights"] = "count"
    """Divisor of the mean: the clients' weights, or these times s(tau)."""

    def of(self, tau: int) -> float:
        """Return s(tau)."""
        if self.weight == "constant":
            return 1.0
        if self.weight == "polynomial":
            return (1 + tau) ** -self.a
        return 1.0 if tau <= self.b else 1 / (self.a * (tau - self.b) + 1)

    def moved(self, update: Update, selection: Selection, then: State, now: State, tau: int) -> Update:
        """Return the sum of updates of version `then` as a sum for the state `now`: w (x + s (y - x_v)) replaces w y.
        Statistics of norms are mixed instead, w ((1 - s) x + s y), so that variances stay positive."""
        s = self.of(tau)
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
