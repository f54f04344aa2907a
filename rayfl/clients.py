"""The clients: how many, how able, who takes part in a round."""

import re
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from rayfl.config import Config
from rayfl.config.plain import shown
from rayfl.core.seeds import numpy_generator

LEVELS = {"a": 1.0, "b": 1 / 2, "c": 1 / 4, "d": 1 / 8, "e": 1 / 16}
"""HeteroFL's letters (section 4): share of the widest network's channels."""

MOST_CLIENTS = 10**8
"""An index of so large a population takes 0.8 GB."""


class Population(Config):
    """The `clients:` section: how many, how able, and who takes part in a round."""

    count: int = Field(default=100, ge=1, le=MOST_CLIENTS)
    """Clients in the population; at most 10**8, because a partition holds an index of all of them."""
    cohort: int = Field(default=10, ge=1, le=MOST_CLIENTS)
    """Clients that take part in a round, drawn uniformly without replacement."""
    capacities: tuple[float, ...] | str = (1.0,)
    """What clients can run: shares in (0, 1], or HeteroFL's notation, e.g. a1-b1-c8 (letters a = 1, b = 1/2,
    ..., e = 1/16, each with its weight; the first is the server's and the largest; weight 0: server only)."""
    weights: tuple[Annotated[int, Field(le=MOST_CLIENTS)], ...] = ()
    """Relative numbers of clients of each capacity; equal unless given. Part of the notation if that is used."""
    assignment: Literal["fixed", "dynamic", "tiers"] = "fixed"
    """fixed: blocks of client ids, in the order of `capacities`. dynamic: every client draws anew in every
    round (HeteroFL). tiers: blocks of ids from the smallest capacity up, each client draws every time from
    the capacities within `reach` of its tier (NeFL)."""
    reach: int = Field(default=2, ge=0)
    """For tiers: how many neighbours down and up a client may draw."""
    metric: Literal["width", "params", "flops"] = "width"
    """What a capacity is a share of: channels, parameters, or multiply-adds of the full network."""

    @field_validator("capacities")
    @classmethod
    def _shares(cls, value: tuple[float, ...] | str) -> tuple[float, ...] | str:
        shares = [c for c, _ in parse_mode(value)] if isinstance(value, str) else value
        if not shares:
            raise ValueError("at least one capacity")
        for share in shares:
            if not 0 < share <= 1:
                raise ValueError(f"a share in (0, 1]; {share} is not")
        if len(set(shares)) < len(shares):
            raise ValueError("every capacity once; weights say how many clients have it")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "Population":
        if self.cohort > self.count:
            raise ValueError(f"a cohort of at most count = {self.count} clients; cohort is {self.cohort}")
        if isinstance(self.capacities, str) and self.weights:
            raise ValueError("weights inside the notation, or a list of capacities with weights; not both")
        if self.weights and len(self.weights) != len(self.capacities):
            raise ValueError(f"one weight for each of the {len(self.capacities)} capacities")
        weights = [weight for _, weight in self.levels]
        if min(weights) < 0 or sum(weights) == 0:
            raise ValueError("weights of at least 0, not all 0")
        if self.weights and self.assignment == "tiers":
            raise ValueError("no weights with tiers: they are equal blocks of clients")
        if self.assignment == "fixed" and sum(weights) > self.count:
            raise ValueError(f"fixed weights that sum to at most count = {self.count}; they sum to {sum(weights)}")
        return self

    @property
    def levels(self) -> list[tuple[float, int]]:
        """(capacity, weight), as given."""
        if isinstance(self.capacities, str):
            return parse_mode(self.capacities)
        return list(zip(self.capacities, self.weights or [1] * len(self.capacities), strict=True))

    @property
    def all_capacities(self) -> list[float]:
        """Every capacity, the server's included, largest first."""
        return sorted((c for c, _ in self.levels), reverse=True)

    def sample(self, seed: int, round: int) -> list[int]:
        """The ids of a round's cohort, ascending. Its cost does not grow with the idle clients."""
        drawn = numpy_generator(seed, "cohort", round).choice(self.count, self.cohort, replace=False, shuffle=False)
        return sorted(drawn.tolist())

    def capacity(self, client: int, seed: int, round: int) -> float:
        """What this client can run in this round."""
        return float(self.capacities_of(np.array([client]), seed, round)[0])

    def capacities_of(self, ids: np.ndarray, seed: int, round: int) -> np.ndarray:
        """What these clients [n] can run in this round, [n] float64. Fixed capacities of all clients cost little; what
        is drawn costs a generator a client."""
        if self.assignment == "fixed":
            return self._fixed(ids)
        return np.array([self._drawn(id, seed, round) for id in ids.tolist()], dtype=np.float64)

    def _fixed(self, ids: np.ndarray) -> np.ndarray:
        """Blocks of count // sum(weights) ids a unit of weight; the remaining ids get the last level."""
        capacities, weights = zip(*self.levels, strict=True)
        ends = np.cumsum(weights)
        level = np.searchsorted(ends, ids // (self.count // ends[-1]), side="right")
        return np.array(capacities)[np.minimum(level, len(capacities) - 1)]

    def _drawn(self, client: int, seed: int, round: int) -> float:
        draw = numpy_generator(seed, "capacity", round, client)
        if self.assignment == "dynamic":
            capacities, weights = zip(*self.levels, strict=True)
            ends = np.cumsum(weights)
            return capacities[np.searchsorted(ends, draw.integers(ends[-1]), side="right")]
        ascending = self.all_capacities[::-1]
        # blocks of equal length, of which the largest capacity's takes the rest (NeFL's code)
        tier = min(client // max(self.count // len(ascending), 1), len(ascending) - 1)
        low, high = max(tier - self.reach, 0), min(tier + self.reach, len(ascending) - 1)
        return ascending[int(draw.integers(low, high + 1))]


def parse_mode(mode: str) -> list[tuple[float, int]]:
    """HeteroFL's `a1-b2-e7` as [(1.0, 1), (0.5, 2), (0.0625, 7)]. A ValueError says what the notation
    allows."""
    levels = []
    for part in mode.split("-"):
        match = re.fullmatch(r"([a-e])([0-9]{1,9})", part)
        if match is None:
            raise ValueError(
                f"letters a to e with a whole weight of at most 9 digits, joined by '-', e.g. a1-e9; not {shown(part)}"
            )
        levels.append((LEVELS[match[1]], int(match[2])))
    if levels[0][0] != max(level for level, _ in levels):
        raise ValueError(f"the largest letter first, it is the server's; {shown(mode)} starts with {mode[0]!r}")
    return levels
