"""The `clients:` section: number of clients, capacities and participation."""

import re
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from rayfl.config import Config
from rayfl.config.plain import shown
from rayfl.core.seeds import numpy_generator
from rayfl.metrics import label

LEVELS = {"a": 1.0, "b": 1 / 2, "c": 1 / 4, "d": 1 / 8, "e": 1 / 16}
"""HeteroFL's letters (section 4): fraction of the widest network's channels."""

FAR = 0.1
"""Maximum difference without a warning between the share of clients with a capacity and that of its weight."""

MOST_CLIENTS = 10**8
"""Maximum population; an index of its clients needs 0.8 GB."""


class Population(Config):
    """The `clients:` section: number of clients, capacities and participation."""

    count: int = Field(default=100, ge=1, le=MOST_CLIENTS)
    """Clients in the population; at most 10**8, because a partition needs an index of all of them."""
    cohort: int = Field(default=10, ge=1, le=MOST_CLIENTS)
    """Clients per round; the expected number with participation: poisson. The default is at most `count`."""
    participation: Literal["fixed", "poisson"] = "fixed"
    """Draw of a cohort. fixed: `cohort` clients, uniformly without replacement. poisson: every client independently,
    with probability cohort / count."""
    capacities: tuple[float, ...] | str = (1.0,)
    """Client capacities: fractions in (0, 1], or HeteroFL's notation, e.g. a1-b1-c8 (letters a = 1, b = 1/2, ...,
    e = 1/16, each with a weight; the first is the largest and the server's; weight 0: server only)."""
    weights: tuple[Annotated[int, Field(le=MOST_CLIENTS)], ...] = ()
    """Relative numbers of clients per capacity, in the order of `capacities`. Default: equal. Not allowed with the
    notation, which contains weights. With fixed capacities, blocks of count // sum(weights) clients per unit of weight;
    the last capacity with clients has the rest too (HeteroFL's code)."""
    assignment: Literal["fixed", "dynamic", "tiers"] = "fixed"
    """Assignment of capacities. fixed: blocks of client ids, in the order of `capacities`. dynamic: a new draw per
    client and round (HeteroFL). tiers: blocks of ids from the smallest capacity up, and a draw per client and round
    from the capacities within `reach` of its tier (NeFL)."""
    reach: int = Field(default=2, ge=0)
    """Only for tiers: maximum distance of a drawn capacity from the tier, in both directions."""
    metric: Literal["width", "params", "flops"] = "width"
    """Unit of capacities: fraction of the channels, parameters or multiply-adds of the full network."""

    @field_validator("capacities")
    @classmethod
    def _shares(cls, value: tuple[float, ...] | str) -> tuple[float, ...] | str:
        shares = [c for c, _ in parse_mode(value)] if isinstance(value, str) else value
        if not shares:
            raise ValueError("at least one capacity")
        for share in shares:
            if not 0 < share <= 1:
                raise ValueError(f"fractions in (0, 1]; {share} is not")
        if len(set(map(label, shares))) < len(shares):
            raise ValueError("each capacity once, to 6 digits; use weights for the numbers of clients")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "Population":
        if self.cohort > self.count and "cohort" not in self.model_fields_set:
            object.__setattr__(self, "cohort", self.count)
        if self.cohort > self.count:
            raise ValueError(f"a cohort of at most count = {self.count} clients; cohort is {self.cohort}")
        if isinstance(self.capacities, str) and self.weights:
            raise ValueError("weights inside the notation, or a list of capacities with weights; not both")
        if self.weights and len(self.weights) != len(self.capacities):
            raise ValueError(f"one weight for each of the {len(self.capacities)} capacities")
        weights = [weight for _, weight in self.levels]
        if min(weights) < 0 or sum(weights) == 0:
            raise ValueError("weights of at least 0, not all 0")
        if self.assignment == "tiers" and (self.weights or len(set(weights)) > 1):
            raise ValueError("no weights with tiers, which are equal blocks of clients")
        if self.assignment == "fixed" and sum(weights) > self.count:
            raise ValueError(f"fixed weights that sum to at most count = {self.count}; they sum to {sum(weights)}")
        return self

    @property
    def levels(self) -> list[tuple[float, int]]:
        """(capacity, weight), in the given order."""
        if isinstance(self.capacities, str):
            return parse_mode(self.capacities)
        return list(zip(self.capacities, self.weights or [1] * len(self.capacities), strict=True))

    @property
    def all_capacities(self) -> list[float]:
        """All capacities, including the server's, largest first."""
        return sorted((c for c, _ in self.levels), reverse=True)

    @property
    def own_capacities(self) -> list[float]:
        """The clients' capacities, largest first."""
        return sorted((c for c, weight in self.levels if weight), reverse=True)

    @property
    def notes(self) -> list[str]:
        """A note if the default cohort was lowered."""
        default = type(self).model_fields["cohort"].default
        if "cohort" in self.model_fields_set or self.cohort == default:
            return []
        return [
            f"clients.cohort: {self.cohort} instead of the default {default}, because there are {self.count} clients"
        ]

    @property
    def capacity_notes(self) -> list[str]:
        """A warning if the shares of fixed capacities are far from their weights."""
        capacities, weights = zip(*((c, weight) for c, weight in self.levels if weight), strict=True)
        total, numbers = sum(weights), [weight * (self.count // sum(weights)) for weight in weights]
        numbers[-1] += self.count - sum(numbers)
        far = max(abs(n / self.count - weight / total) for n, weight in zip(numbers, weights, strict=True))
        if self.assignment != "fixed" or far <= FAR:
            return []
        held = ", ".join(f"{n} of capacity {c:g}" for n, c in zip(numbers, capacities, strict=True))
        return [
            f"clients.weights: of {self.count} clients, {held}. Hint: a clients.count that is a multiple of {total}"
        ]

    def sample(self, seed: int, round: int, cohort: int | None = None) -> list[int]:
        """Return the ids of a round's cohort, ascending. The cost does not depend on the number of idle clients."""
        size, draw = self.cohort if cohort is None else cohort, numpy_generator(seed, "cohort", round)
        if self.participation == "poisson":
            size = int(draw.binomial(self.count, size / self.count))
        drawn = draw.choice(self.count, size, replace=False, shuffle=False)
        return sorted(drawn.tolist())

    def capacity(self, client: int, seed: int, round: int) -> float:
        """Return the capacity of a client in a round."""
        return float(self.capacities_of(np.array([client]), seed, round)[0])

    def capacities_of(self, ids: np.ndarray, seed: int, round: int) -> np.ndarray:
        """Return the capacities [n] float64 of clients [n] in a round. Drawn capacities need a generator per client."""
        if self.assignment == "fixed":
            return self._fixed(ids)
        return np.array([self._drawn(id, seed, round) for id in ids.tolist()], dtype=np.float64)

    def _fixed(self, ids: np.ndarray) -> np.ndarray:
        """Return capacities by blocks of count // sum(weights) ids per unit of weight; the rest has the last level with
        clients."""
        capacities, weights = zip(*self.levels, strict=True)
        ends = np.cumsum(weights)
        level = np.searchsorted(ends, ids // (self.count // ends[-1]), side="right")
        return np.array(capacities)[np.minimum(level, np.flatnonzero(weights)[-1])]

    def _drawn(self, client: int, seed: int, round: int) -> float:
        draw = numpy_generator(seed, "capacity", round, client)
        if self.assignment == "dynamic":
            capacities, weights = zip(*self.levels, strict=True)
            ends = np.cumsum(weights)
            return capacities[np.searchsorted(ends, draw.integers(ends[-1]), side="right")]
        ascending = self.all_capacities[::-1]
        # blocks of equal length; the block of the largest capacity includes the remainder (NeFL's code)
        tier = min(client // max(self.count // len(ascending), 1), len(ascending) - 1)
        low, high = max(tier - self.reach, 0), min(tier + self.reach, len(ascending) - 1)
        return ascending[int(draw.integers(low, high + 1))]


def parse_mode(mode: str) -> list[tuple[float, int]]:
    """Return HeteroFL's `a1-b2-e7` as [(1.0, 1), (0.5, 2), (0.0625, 7)]. A ValueError describes the notation."""
    levels = []
    for part in mode.split("-"):
        match = re.fullmatch(r"([a-e])([0-9]{1,9})", part)
        if match is None:
            raise ValueError(
                f"letters a to e with a whole weight of at most 9 digits, joined by '-', e.g. a1-e9; not {shown(part)}"
            )
        levels.append((LEVELS[match[1]], int(match[2])))
    if levels[0][0] != max(level for level, _ in levels):
        raise ValueError(f"the largest letter (the server's) first; {shown(mode)} starts with {mode[0]!r}")
    return levels
