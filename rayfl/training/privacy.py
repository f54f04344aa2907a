"""Central differential privacy of clients: clipped changes, and Gaussian noise on their sum (DP-FedAvg).

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018,
https://arxiv.org/abs/1710.06963. With a client's change d_k = y_k - S_k x, after the transforms of `updates`, clipping
norm C, noise multiplier z, and N_j ~ N(0, 1):

    G_j    =  sum_k S_k^T clip(d_k, C) + z C N_j
    x_j   <-  x_j + G_j / c_j;      c_j = cohort / clients * (number of clients whose selection of this round has j)

A client changes the sum by at most C in the L2 norm whatever it holds, because S_k^T keeps norms. The denominator c_j
counts all clients, not those that came: selections depend on capacities, round and seed, which are public, and on the
server's model. Parameters that clients hold without returning them (`Method.withheld`) do not count. Coordinates with
c_j > 0 get noise also if no client of the cohort holds them. Coordinates with c_j = 0 keep their value. All clients
have weight 1. A server optimizer takes G_j / c_j as its direction.

With `quantile`, C is adapted (Andrew et al., NeurIPS 2021, https://arxiv.org/abs/1905.03871, Algorithm 1):

    C    <-  C exp(-rate (b - quantile));   b = 1/2 + (sum_k b_k + N(0, s^2)) / cohort
    b_k   =  1/2 if |d_k| <= C, -1/2 otherwise

A client changes the sum of b_k by 1/2 if it is added, and by 1 if its data are replaced, as it changes G by C and 2 C.
G has the multiplier (z^-2 - (2 s)^-2)^-1/2, so that both releases together have the multiplier z. The bit that a client
sends for b is not counted as traffic.

G_j has the same noise everywhere and c_j does not, so coordinates that few clients hold drown first. The metric
`snr_S` says so: root mean square of sum_k S_k^T clip(d_k, C) over the noise's standard deviation, over the coordinates
with c_j / cohort in (S - 1/8, S].

Epsilon is that of `dp-accounting`, for the sampling of the run (`clients.participation`):

    fixed     cohorts without replacement, neighbours differ in the data of one client. It moves the sum by up to 2 C,
              so the multiplier is z / 2 (Wang et al., AISTATS 2019, https://arxiv.org/abs/1808.00087, Theorem 27)
    poisson   every client with probability cohort / clients, neighbours differ in whether one client contributes,
              multiplier z

The list of clients with their capacities, from which c_j follows, is public. Epsilon holds for the parameters of the
server after every round. It does not hold for what a simulation reports about its clients: losses, numbers of clients,
traffic. What determines the shape of the network counts as public and is read from the training data without noise: the
number of classes, categories of tables, vocabularies made from training texts, the largest token. Other values computed
from the clients' data are refused: constants that scale or replace numbers, and those that scale targets. The noise is
pseudo-random, from the seed of the run, in float32.
"""

import functools
import importlib.util
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from rayfl.clients import Population
from rayfl.config import Config, ConfigError
from rayfl.core.fold import Fold, Over, State, Update
from rayfl.core.seeds import numpy_generator
from rayfl.core.server_optimizers import NORM, Server
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params
from rayfl.metrics import SNR, label

EIGHTHS = 8


class Deployed(Config):
    """Population that a small simulation stands for."""

    clients: int = Field(ge=1)
    """Number of clients."""
    cohort: int = Field(ge=1)
    """Clients per round."""

    @model_validator(mode="after")
    def _within(self) -> Self:
        if self.cohort > self.clients:
            raise ValueError(f"a cohort of at most clients = {self.clients}; cohort is {self.cohort}")
        return self


class Privacy(Config):
    """The `privacy:` section: central differential privacy of clients, with its epsilon."""

    clip: float = Field(ge=1e-30, le=1e30)
    """Clipping norm C of a client's whole change; with `quantile`, that of round 0."""
    noise: float = Field(ge=1e-3, le=1e6)
    """Noise multiplier z: standard deviation of the noise on the sum of changes, as a multiple of C."""
    delta: float = Field(gt=0, lt=1)
    """Delta of the reported epsilon, at most 1 / number of clients."""
    quantile: float | None = Field(default=None, gt=0, lt=1)
    """Adaptive clipping: target fraction of clients within C. Default: C is constant."""
    rate: float = Field(default=0.2, gt=0, le=1e3)
    """Learning rate of the adaptive clipping norm."""
    deviation: float | None = Field(default=None, gt=0, le=1e9)
    """Standard deviation s of the noise on the number of clients within C. Default: cohort / 20."""
    accountant: Literal["rdp", "pld"] = "rdp"
    """Accountant. rdp: Renyi differential privacy. pld: privacy loss distributions, tighter, a few seconds per
    evaluation, only with clients.participation: poisson."""
    stands_for: Deployed | None = None
    """Larger population and cohort of which this run is a small simulation: the noise is scaled by the ratio of the
    cohorts, and the reported `simulated_epsilon` is that of the larger cohort. Default: the run's own."""

    @model_validator(mode="after")
    def _adaptive(self) -> Self:
        if self.quantile is None and (self.rate != type(self).model_fields["rate"].default or self.deviation):
            raise ValueError("rate and deviation only with quantile")
        return self

    def check(self, clients: Population) -> None:
        """Raise a ConfigError if the section does not fit the population, or if dp-accounting is missing."""
        if importlib.util.find_spec("dp_accounting") is None:
            raise ConfigError("privacy: the package dp-accounting is not installed. Hint: uv sync --extra privacy")
        size, cohort = self._accounted(clients)
        if self.delta > 1 / size:
            raise ConfigError(
                f"privacy.delta: {self.delta:g} is not valid: publishing all data of one random client would satisfy "
                f"it. Allowed: at most 1 / {size}, the number of clients"
            )
        if self.accountant == "pld" and clients.participation != "poisson":
            raise ConfigError(
                "privacy.accountant: pld is not defined for cohorts of a fixed size. Allowed: rdp, or "
                "clients.participation: poisson"
            )
        if self.quantile is not None and self.noise >= 2 * self._deviation(cohort):
            raise ConfigError(
                f"privacy.deviation: {self._deviation(cohort):g} is too small for noise {self.noise:g}: the number of "
                f"clients within the clipping norm alone would have less noise. Allowed: more than {self.noise / 2:g}"
            )

    @property
    def metric(self) -> Literal["epsilon", "simulated_epsilon"]:
        return "epsilon" if self.stands_for is None else "simulated_epsilon"

    def epsilon(self, clients: Population, rounds: int) -> float:
        """Return epsilon after this many rounds."""
        size, cohort = self._accounted(clients)
        poisson = clients.participation == "poisson"
        return epsilon(self.accountant, poisson, size, cohort, self.noise, rounds, self.delta)

    def norm(self, state: State) -> float:
        """Return the clipping norm of the next round."""
        return float(state[NORM]["norm"]) if NORM in state else self.clip

    def multiplier(self, clients: Population) -> float:
        """Return the noise multiplier of the sum of this run's cohort."""
        _, cohort = self._accounted(clients)
        counted = 0.0 if self.quantile is None else (2 * self._deviation(cohort)) ** -2
        return (self.noise**-2 - counted) ** -0.5 * clients.cohort / cohort

    def adapted(self, norm: float, within: float, came: float, clients: Population, seed: int, round: int) -> State:
        """Return the group `NORM` after a round in which `within` of the `came` clients were within `norm`; {} if it is
        constant."""
        if self.quantile is None:
            return {}
        _, cohort = self._accounted(clients)
        noise = float(numpy_generator(seed, "noise", round, NORM).standard_normal())
        share = 0.5 + (within - came / 2) / clients.cohort + self._deviation(cohort) * noise / cohort
        new = norm * math.exp(-self.rate * (share - self.quantile))
        return {NORM: {"norm": torch.tensor(new, dtype=torch.float64)}}

    def _accounted(self, clients: Population) -> tuple[int, int]:
        """Return the number of clients and the cohort of epsilon."""
        stands_for = self.stands_for
        return (clients.count, clients.cohort) if stands_for is None else (stands_for.clients, stands_for.cohort)

    def _deviation(self, cohort: int) -> float:
        return cohort / 20 if self.deviation is None else self.deviation


@functools.lru_cache(maxsize=256)
def epsilon(
    accountant: str, poisson: bool, clients: int, cohort: int, noise: float, rounds: int, delta: float
) -> float:
    """Return epsilon of `rounds` rounds with this noise multiplier; see the module for the neighbours."""
    import dp_accounting
    from dp_accounting import pld, rdp

    if poisson:
        relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        event = dp_accounting.PoissonSampledDpEvent(cohort / clients, dp_accounting.GaussianDpEvent(noise))
    else:
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        gaussian = dp_accounting.GaussianDpEvent(noise / 2)
        event = dp_accounting.SampledWithoutReplacementDpEvent(clients, cohort, gaussian)
    kind = pld.PLDAccountant if accountant == "pld" else rdp.RdpAccountant
    # it warns about orders that it leaves out, which only makes the bound larger
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return float(kind(neighboring_relation=relation).compose(event, rounds).get_epsilon(delta))
    finally:
        log.setLevel(level)


@dataclass
class Released:
    """Noise of a round, and the public denominators."""

    cover: Mapping[str, torch.Tensor]
    """Parameter -> c_j, in the server's shapes."""
    deviation: float
    """Standard deviation of the noise on the sum."""
    seed: int
    round: int
    cohort: int
    """Clients per round, in units of c_j."""
    _powers: torch.Tensor = field(default_factory=lambda: torch.zeros(2, EIGHTHS + 1, dtype=torch.float64), repr=False)
    """By share of the clients in eighths: number of coordinates, and sum of squares of the changes' sum."""

    def mean(self, old: Params, totals: Params) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return name -> x + G / c in a new tensor, and the coordinates with c > 0. `totals`: sums of clipped changes,
        0 for missing ones."""
        return {name: self._mean(name, t, totals.get(name)) for name, t in old.items()}

    def _mean(self, name: str, old: torch.Tensor, total: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        # torch's generators use 32 bits of a seed, so that two of some ten thousand tensors would have the same noise
        generator = numpy_generator(self.seed, "noise", self.round, name)
        noisy = self.deviation * torch.as_tensor(generator.standard_normal(tuple(old.shape), np.float32))
        if total is not None:
            noisy += total
        self._measure(self.cover[name], total)
        covered = self.cover[name] > 0
        return torch.where(covered, old + noisy / self.cover[name], old), covered

    def _measure(self, cover: torch.Tensor, total: torch.Tensor | None) -> None:
        # sums of shares in float32 can be slightly more than an eighth
        eighth = (cover * (EIGHTHS / self.cohort) - 1e-4).ceil().long().flatten()
        self._powers[0] += eighth.bincount(minlength=EIGHTHS + 1)
        if total is not None:
            self._powers[1] += eighth.bincount(total.flatten().double().square(), minlength=EIGHTHS + 1)

    def snr(self) -> dict[str, float]:
        """Return metric -> signal-to-noise ratio, by the share of clients that hold a coordinate (see the module)."""
        return {
            f"{SNR}{label(eighth / EIGHTHS)}": math.sqrt(power / count) / self.deviation
            for eighth, (count, power) in enumerate(self._powers.T.tolist())
            if eighth and count
        }


class PrivateFold(Fold):
    """A fold of clipped changes, from which only the noisy mean of the parameters can be read."""

    def __init__(self, state: State, server: Server, released: Released):
        super().__init__(state, server)
        self.released = released

    def add(self, selection: Selection, update: Update) -> None:
        """Add sums of clipped changes in the group "params"."""
        groups = {**update.sums, **update.whole, **update.derived}
        if others := [group for group, params in groups.items() if params and group != "params"]:
            raise ConfigError(f"privacy: clients send {', '.join(sorted(others))}, which is not clipped. {ALLOWED}")
        super().add(selection, update)

    def _mean(self, group: str, over: Over) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]] | None:
        if over != "holders":
            self._refuse(group)
        return {**self.released.mean(self.state[group], super().sum(group))} if group == "params" else None

    def _refuse(self, group: str) -> "Params":
        raise ConfigError(f"privacy: the server's step reads more of {group} than its noisy mean. {ALLOWED}")

    sum = weights = mean_so_far = _refuse  # pyright: ignore[reportAssignmentType]


ALLOWED = "Allowed: methods whose server averages parameters only, such as fedavg, heterofl, fedrolex or fiarse"
