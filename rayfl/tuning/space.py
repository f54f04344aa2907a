"""What a sweep searches: the space, the budget of networks, and the points of every row."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator, model_serializer, model_validator

from rayfl import costs
from rayfl.config import Config, ConfigError
from rayfl.config.plain import short, shown
from rayfl.core.axes import size_at
from rayfl.core.net import Net
from rayfl.core.seeds import numpy_generator
from rayfl.methods.base import Task

MOST_POINTS = 10_000
"""Points of one row; each is a federated run."""
MOST_SEEDS = 1000

Point = dict[str, Any]
"""Dotted path -> value: what a trial sets."""


class Excess(NamedTuple):
    """How far a point is outside the budget."""

    by: float
    """In shares, of the network that is the farthest outside; 0: all are within."""
    capacity: float
    share: float
    """What that network costs, divided by capacity times the cost of the full one."""


class Budget(Config):
    """The `search.budget:` section: what the network of every capacity may cost. That of capacity 1 is the full one."""

    metric: Literal["params", "flops"] = "params"
    """What is counted: parameters, or multiply-adds of one sample's forward pass."""
    low: float = Field(default=0.9, ge=0)
    """The network of capacity c costs at least low * c times the full one, so that no device runs far less than it
    can."""
    high: float = Field(default=1.0, gt=0)
    """It costs at most high * c times the full one."""

    @model_validator(mode="after")
    def _ordered(self) -> "Budget":
        if self.low > self.high:
            raise ValueError(f"low of at most high; {self.low:g} and {self.high:g}")
        return self

    def excess(self, task: Task) -> Excess:
        """The network of a bound method's task that is the farthest outside."""
        cost = costs.cost_of(self.metric)
        full = cost(task.nets.get(1.0, Net(task.model)))
        shares = {c: cost(_alike(task, net)) / (c * full) for c, net in task.nets.items() if c != 1}
        # a capacity that was computed as a ratio of two counts allows exactly that count
        slack = 1e-9
        outside = [
            Excess(max(share - self.high - slack, self.low - share - slack, 0.0), c, share)
            for c, share in shares.items()
        ]
        return max(outside, default=Excess(0.0, 1.0, 1.0))

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g} of the {self.metric}"


def _alike(task: Task, net: Net) -> Net:
    """The one network that stands for all widths with the sizes of this one, so that its cost is counted once."""
    axes = replace(task.server, width=1.0).layout.axes.values()
    widths = [size_at(net.width, axis.size, net.rounding) / axis.size for axis in axes]
    return replace(net, width=min(widths) if net.rounding == "up" else max(widths), scale=1.0)


class Domain(Config):
    """What one setting may be: exactly one of these."""

    grid: tuple[Any, ...] = Field(default=(), min_length=1)
    """Each of these values."""
    choice: tuple[Any, ...] = Field(default=(), min_length=1)
    """One of these values, all equally likely."""
    uniform: tuple[float, ...] = Field(default=(), min_length=2, max_length=2)
    """A number of [low, high)."""
    loguniform: tuple[float, ...] = Field(default=(), min_length=2, max_length=2)
    """A number of [low, high) whose logarithm is uniform."""
    randint: tuple[int, ...] = Field(default=(), min_length=2, max_length=2)
    """A whole number from low to high - 1."""

    @field_validator("grid", "choice")
    @classmethod
    def _values(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if any(isinstance(value, dict) for value in values):
            raise ValueError("single values; sections that differ are rows")
        if len(set(map(_identity, values))) < len(values):
            raise ValueError("every value once")
        return values

    @field_validator("uniform", "loguniform", "randint")
    @classmethod
    def _ends(cls, ends: tuple[float, ...]) -> tuple[float, ...]:
        if not ends[0] < ends[1]:
            raise ValueError("[low, high] with low < high")
        return ends

    @field_validator("loguniform")
    @classmethod
    def _positive(cls, ends: tuple[float, ...]) -> tuple[float, ...]:
        if ends[0] <= 0:
            raise ValueError("[low, high] with a low above 0")
        return ends

    @model_validator(mode="after")
    def _one(self) -> "Domain":
        if len(self.model_fields_set) != 1:
            raise ValueError(f"exactly one of {', '.join(type(self).model_fields)}")
        return self

    @model_serializer
    def _given(self) -> dict[str, Any]:
        return {self.kind: list(self.values)}

    @property
    def kind(self) -> str:
        return next(iter(self.model_fields_set))

    @property
    def values(self) -> tuple[Any, ...]:
        """The values, or both ends of the range."""
        return getattr(self, self.kind)

    def draw(self, count: int, generator: np.random.Generator) -> list[Any]:
        """Stratified draws: one from each of `count` equally likely parts of the domain, in random order."""
        shares = (generator.permutation(count) + generator.random(count)) / count
        if self.kind == "choice":
            return [self.values[int(share * len(self.values))] for share in shares]
        low, high = self.values
        if self.kind == "uniform":
            return [float(low + share * (high - low)) for share in shares]
        if self.kind == "loguniform":
            return [float(low * (high / low) ** share) for share in shares]
        return [int(low + share * (high - low)) for share in shares]


def _identity(value: Any) -> Any:
    """Equal for values that mean the same: 1 and 1.0, but not 1 and true."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else repr(value)


class Search(Config):
    """The `search:` section: the same for every row."""

    space: dict[str, Domain] = {}
    """Dotted path -> {grid: [...]}, {choice: [...]}, {uniform: [a, b]}, {loguniform: [a, b]} or
    {randint: [a, b]} (b excluded). Every combination of the grids is tried. A path reaches into a list by place:
    method.submodels.0.width."""
    trials: int = Field(default=1, ge=1, le=MOST_POINTS)
    """Draws of what is not a grid, for each combination of the grids: the budget of a row."""
    budget: Budget | None = None
    """What a point's networks may cost; a point outside is never trained. Drawing continues until `trials` points are
    within, so rows try equally many points, though not the same. A grid combination without a point within is
    skipped."""
    metric: str = "validation_accuracy_mean"
    """What is tuned by, at the last evaluation of a run."""
    allow_test: bool = False
    """Tune by a metric of test data. The same data then choose and judge, so the result is too good."""
    mode: Literal["auto", "max", "min"] = "auto"
    """Which end of the metric is best; auto: the metric's own."""
    searcher: str = "random"
    """random: stratified draws, the same for every row. Or a searcher of Ray Tune by name, e.g. optuna."""
    scheduler: Literal["fifo", "asha", "hyperband", "median"] = "fifo"
    """fifo: every trial runs its full rounds, so that the comparison is fair and repeatable. The others of Ray
    Tune stop trials early, among those of one row."""
    options: dict[str, Any] = {}
    """Options of the scheduler, e.g. {grace_period: 5}: the fields of `Asha`, `Hyperband` and `Median`."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1, max_length=MOST_SEEDS)
    """The first seed is tuned on; then every row's best point runs on all of them."""
    max_failures: int = Field(default=2, ge=0)
    """How often a trial is started again from its checkpoint after it died."""

    @field_validator("seeds")
    @classmethod
    def _once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("every seed once")
        return seeds

    @field_validator("space")
    @classmethod
    def _no_seed(cls, space: dict[str, Domain]) -> dict[str, Domain]:
        if "seed" in space:
            raise ValueError("settings other than seed; search.seeds lists the seeds")
        return space

    @model_validator(mode="after")
    def _consistent(self) -> "Search":
        if self.options and self.scheduler == "fifo":
            raise ConfigError(
                f"options: given {shown(self.options)}; allowed: nothing with scheduler fifo, which stops no trials"
            )
        count = self.trials * math.prod(len(domain.values) for domain in self.space.values() if domain.kind == "grid")
        if count > MOST_POINTS:
            raise ConfigError(
                f"space: given {count} points a row, as the grids and `trials` have it; allowed: at most {MOST_POINTS}"
            )
        return self

    @property
    def is_drawn(self) -> bool:
        """Whether anything is not a grid."""
        return any(domain.kind != "grid" for domain in self.space.values())

    @property
    def is_fair(self) -> bool:
        """Whether the points of all rows are known and run to the end, so that one Tuner can hold them all."""
        return self.searcher == "random" and self.scheduler == "fifo"

    def grid(self) -> list[Point]:
        """Every combination of the grids."""
        points: list[Point] = [{}]
        for path, domain in self.space.items():
            if domain.kind == "grid":
                points = [point | {path: value} for point in points for value in domain.values]
        return points

    def draws(self, seed: int) -> Iterator[Point]:
        """What is not a grid, without end, stratified in every `trials` draws; one empty point where all is."""
        drawn = {path: domain for path, domain in self.space.items() if domain.kind != "grid"}
        generators = {path: numpy_generator(seed, "search", path) for path in drawn}
        while drawn:
            values = {path: domain.draw(self.trials, generators[path]) for path, domain in drawn.items()}
            yield from ({path: values[path][i] for path in drawn} for i in range(self.trials))
        yield {}

    def points(self, seed: int) -> list[Point]:
        """The points of every row, when nothing but chance and grids chooses them."""
        return [grid | draw for grid in self.grid() for draw in islice(self.draws(seed), self.trials)]


def text_of(point: Point) -> str:
    """ "training.lr=0.03, method.submodels.0.width=0.5": as tables and progress have it."""
    return ", ".join(f"{path}={short(value)}" for path, value in point.items())
