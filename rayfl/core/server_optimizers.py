"""Server optimizers: how the server steps along what a round's clients found, for every method.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, https://arxiv.org/abs/2003.00295 (Algorithm 2); momentum
after Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
2019, https://arxiv.org/abs/1909.06335 (FedAvgM). With x what the server holds, y the holder mean, d = y - x:

    mean       x <- y
    sgd        m <- momentum m + d;                             x <- x + lr m
    adagrad    m <- b1 m + (1 - b1) d;  v <- v + d^2;           x <- x + lr m / (sqrt(v) + tau)
    adam       m as adagrad;  v <- b2 v + (1 - b2) d^2;         x as adagrad
    yogi       m as adagrad;  v <- v - (1 - b2) d^2 sgn(v - d^2);  x as adagrad

m starts at 0 and v at tau^2; there is no bias correction, as in the paper. Everything is lazy: a coordinate that nobody
held this round keeps x, m and v. Running statistics of norms take their mean, whatever the optimizer.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator

from rayfl.config import Config
from rayfl.core.norms import STATISTICS
from rayfl.core.tensors import Params

MOMENTS = "server "
"""How the groups of a state begin that are the optimizer's own: "server m params"."""


class Server(Config):
    """The `server:` section: how the server steps from what a round's clients found."""

    optimizer: Literal["mean", "sgd", "adagrad", "adam", "yogi"] = "mean"
    """mean: the server takes the holder mean, as FedAvg. The others step along it."""
    lr: float = Field(default=1.0, gt=0)
    """The server's learning rate; published for adagrad, adam and yogi: 0.01 to 0.1."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Of sgd (FedAvgM: 0.9)."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    """b1 and b2 of adagrad, adam and yogi."""
    tau: float = Field(default=1e-3, gt=0)
    """How far they adapt: the smaller, the more."""

    @model_validator(mode="after")
    def _of_its_optimizer(self) -> Self:
        given = {name for name in self.model_fields_set - {"optimizer"} if getattr(self, name) != DEFAULTS[name]}
        used = {"mean": set(), "sgd": {"lr", "momentum"}}.get(self.optimizer, {"lr", "betas", "tau"})
        if unused := given - used:
            raise ValueError(f"{', '.join(sorted(unused))} with an optimizer that uses it, not {self.optimizer}")
        return self

    def init(self, params: Params) -> dict[str, Params]:
        """The moments before round 0, by their letter."""
        zeros = {name: torch.zeros_like(t) for name, t in params.items()}
        if self.optimizer == "sgd":
            return {"m": zeros} if self.momentum else {}
        return {"m": zeros, "v": {name: torch.full_like(t, self.tau**2) for name, t in params.items()}}

    def update(
        self, old: torch.Tensor, mean: torch.Tensor, held: torch.Tensor | None, moments: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The next value of one tensor and of its moments. `held`: the coordinates that somebody held, bool in its
        shape; None: all."""
        d = mean - old
        if self.optimizer == "sgd":
            step, new = self._sgd(d, moments)
        else:
            step, new = self._adaptive(d, moments)
        x = old + self.lr * step
        if held is None:
            return x, new
        return torch.where(held, x, old), {name: torch.where(held, t, moments[name]) for name, t in new.items()}

    def _sgd(
        self, d: torch.Tensor, moments: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if not self.momentum:
            return d, {}
        m = self.momentum * moments["m"] + d
        return m, {"m": m}

    def _adaptive(
        self, d: torch.Tensor, moments: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        (b1, b2), square = self.betas, d * d
        m, v = b1 * moments["m"] + (1 - b1) * d, moments["v"]
        if self.optimizer == "adagrad":
            v = v + square
        elif self.optimizer == "adam":
            v = b2 * v + (1 - b2) * square
        else:
            v = v - (1 - b2) * square * (v - square).sign()
        return m / (v.sqrt() + self.tau), {"m": m, "v": v}


DEFAULTS = {name: field.default for name, field in Server.model_fields.items()}


def is_statistic(name: str) -> bool:
    """Whether a tensor is a norm's running statistic, and no parameter."""
    return name.endswith(STATISTICS)
