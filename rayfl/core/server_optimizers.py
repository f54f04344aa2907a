"""Server optimizers: the server's step from the mean of a round's updates, for every method that takes one.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, https://arxiv.org/abs/2003.00295 (Algorithm 2); momentum
after Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
2019, https://arxiv.org/abs/1909.06335 (FedAvgM). With the server's value x, the holder mean y, and d = y - x:

    mean       x <- y
    sgd        m <- momentum m + d;                             x <- x + lr m
    adagrad    m <- b1 m + (1 - b1) d;  v <- v + d^2;           x <- x + lr m / (sqrt(v) + tau)
    adam       m as adagrad;  v <- b2 v + (1 - b2) d^2;         x as adagrad
    yogi       m as adagrad;  v <- v - (1 - b2) d^2 sgn(v - d^2);  x as adagrad

m starts at 0 and v at tau^2, without bias correction, as in Algorithm 2. In the paper's experiments adagrad has no
momentum, b1 = 0, which is its default here. Updates are lazy: coordinates without holders in
a round keep x, m and v. Running statistics of norms always take their mean.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator

from rayfl.config import Config
from rayfl.core.tensors import Params

NORM = "server clip"
"""Group of a state with the adapted clipping norm of a private run."""
MOMENTS = ("server m ", "server v ", NORM)
"""Prefixes of the groups of a state that methods do not see: "server m params", and `NORM`."""


def moment_of(letter: str, group: str) -> str:
    """Return the name of the group with a moment of another group: "server m params"."""
    return f"server {letter} {group}"


class Server(Config):
    """The `server:` section: the server's step from the aggregated updates of a round."""

    optimizer: Literal["mean", "sgd", "adagrad", "adam", "yogi"] = "mean"
    """Server optimizer. mean: the holder mean, as in FedAvg. The others use holder mean - server value as direction."""
    lr: float = Field(default=1.0, gt=0)
    """Learning rate of the server. Published values for adagrad, adam and yogi: 0.01 to 0.1."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of sgd (FedAvgM: 0.9)."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    """Decay rates b1 and b2 of adagrad, adam and yogi (adagrad uses b1 only, by default 0)."""
    tau: float = Field(default=1e-3, gt=0)
    """Degree of adaptivity of adagrad, adam and yogi; smaller values adapt more."""

    @model_validator(mode="before")
    @classmethod
    def _without_momentum(cls, given: Any) -> Any:
        is_adagrad = isinstance(given, Mapping) and given.get("optimizer") == "adagrad"
        return {"betas": (0.0, 0.99), **given} if is_adagrad else given

    @model_validator(mode="after")
    def _of_its_optimizer(self) -> Self:
        given = {name for name in self.model_fields_set - {"optimizer"} if getattr(self, name) != DEFAULTS[name]}
        used = {"mean": set(), "sgd": {"lr", "momentum"}}.get(self.optimizer, {"lr", "betas", "tau"})
        if unused := given - used:
            raise ValueError(
                f"{', '.join(sorted(unused))} only with an optimizer that uses it, not with {self.optimizer}"
            )
        return self

    def init(self, params: Params) -> dict[str, Params]:
        """Return the moments before round 0, by letter."""
        zeros = {name: torch.zeros_like(t) for name, t in params.items()}
        if self.optimizer == "sgd":
            return {"m": zeros} if self.momentum else {}
        return {"m": zeros, "v": {name: torch.full_like(t, self.tau**2) for name, t in params.items()}}

    def update(
        self, old: torch.Tensor, mean: torch.Tensor, covered: torch.Tensor | None, moments: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Params]:
        """Return the next value of one tensor and its moments. `covered`: coordinates with holders, bool; None: all."""
        d = mean - old
        if self.optimizer != "sgd":
            step, new = self._adaptive(d, moments)
        elif self.momentum:
            step = self.momentum * moments["m"] + d
            new = {"m": step}
        else:
            step, new = d, {}
        x = old + self.lr * step
        if covered is None:
            return x, new
        return torch.where(covered, x, old), {name: torch.where(covered, t, moments[name]) for name, t in new.items()}

    def _adaptive(self, d: torch.Tensor, moments: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Params]:
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
