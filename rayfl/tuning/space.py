"""The `search:` section: space, budget of networks, and the points of every row."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice, product
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
"""Limit of points per row; each is a federated run."""
MOST_SEEDS = 1000
EXAMPLES = 100
"""Points that are checked for a searcher of Tune, which draws its own."""

Point = dict[str, Any]
"""Dotted path -> value, as set by a trial."""


class Excess(NamedTuple):
    """Distance of a point from the budget."""

    by: float
    """Largest distance of a network, in shares; 0 if all are within."""
    capacity: float
    share: float
    """Cost of that network / (capacity * cost of the full one)."""


class Budget(Config):
    """The `search.budget:` section: cost limits of every capacity's network, relative to the network of capacity 1."""

    metric: Literal["params", "flops"] = "params"
    """Parameters, or multiply-adds of one sample's forward pass."""
    low: float = Field(default=0.9, ge=0)
    """Minimum cost of the network of capacity c: low * c times the full one."""
    high: float = Field(default=1.0, gt=0)
    """Maximum cost of the network of capacity c: high * c times the full one."""

    @model_validator(mode="after")
    def _ordered(self) -> "Budget":
        if self.low > self.high:
            raise ValueError(f"low at most high; {self.low:g} and {self.high:g}")
        return self

    def excess(self, task: Task) -> Excess:
        """Return the network of a bound method's task that is farthest outside."""
        cost = costs.cost_of(self.metric)
        full = cost(task.nets.get(1.0, Net(task.model)))
        shares = {c: cost(_alike(task, net)) / (c * full) for c, net in task.nets.items() if c != 1}
        # a capacity computed as a ratio of two counts must allow exactly that count
        slack = 1e-9
        outside = [
            Excess(max(share - self.high - slack, self.low - share - slack, 0.0), c, share)
            for c, share in shares.items()
        ]
        return max(outside, default=Excess(0.0, 1.0, 1.0))

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g} of the {self.metric}"


def _alike(task: Task, net: Net) -> Net:
    """Return one network for all widths that give the same sizes, so that its cost is counted once."""
    axes = replace(task.server, width=1.0).layout.axes.values()
    widths = [size_at(net.width, axis.size, net.rounding) / axis.size for axis in axes]
    return replace(net, width=min(widths) if net.rounding == "up" else max(widths), scale=1.0)


class Domain(Config):
    """Domain of one setting: exactly one of these."""

    grid: tuple[Any, ...] = Field(default=(), min_length=1)
    """Every one of these values."""
    choice: tuple[Any, ...] = Field(default=(), min_length=1)
    """One of these values, with equal probability."""
    uniform: tuple[float, ...] = Field(default=(), min_length=2, max_length=2)
    """A number in [low, high)."""
    loguniform: tuple[float, ...] = Field(default=(), min_length=2, max_length=2)
    """A number in [low, high) with a uniform logarithm."""
    randint: tuple[int, ...] = Field(default=(), min_length=2, max_length=2)
    """A whole number from low to high - 1."""

    @model_validator(mode="before")
    @classmethod
    def _with_a_kind(cls, given: Any) -> Any:
        if isinstance(given, list | tuple):
            raise ValueError(f"{{grid: {shown(given)}}}, or choice, uniform, loguniform or randint in place of grid")
        return given

    @field_validator("uniform", "loguniform", "randint", mode="before")
    @classmethod
    def _bounds(cls, bounds: Any) -> Any:
        if isinstance(bounds, list | tuple) and any(isinstance(bound, str) for bound in bounds):
            raise ValueError("numbers without quotes")
        return bounds

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
        """Values, or both ends of the range."""
        return getattr(self, self.kind)

    @property
    def extremes(self) -> tuple[Any, ...]:
        """Values, or the smallest and the largest number of the range."""
        if self.kind in ("grid", "choice"):
            return self.values
        low, high = self.values
        return low, high - 1 if self.kind == "randint" else math.nextafter(high, low)

    @property
    def is_numeric_grid(self) -> bool:
        """True for a grid of at least two numbers."""
        numbers = [value for value in self.grid if isinstance(value, int | float) and not isinstance(value, bool)]
        return len(numbers) == len(self.grid) > 1

    def draw(self, count: int, generator: np.random.Generator) -> list[Any]:
        """Return stratified draws: one from each of `count` equally likely parts of the domain, in random order."""
        shares = (generator.permutation(count) + generator.random(count)) / count
        if self.kind == "choice":
            return [self.values[int(share * len(self.values))] for share in shares]
        low, high = self.values
        if self.kind == "uniform":
            return [float(low + share * (high - low)) for share in shares]
        if self.kind == "loguniform":
            return [float(low * (high / low) ** share) for share in shares]
        return [math.floor(low + share * (high - low)) for share in shares]


def _identity(value: Any) -> Any:
    """Return a key that is equal for 1 and 1.0, but not for 1 and true."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else repr(value)


class Search(Config):
    """The `search:` section: search space, algorithm and budget, the same for every row except for `spaces`."""

    space: dict[str, Domain] = {}
    """Dotted path -> {grid: [...]}, {choice: [...]}, {uniform: [a, b]}, {loguniform: [a, b]} or
    {randint: [a, b]} (b excluded). Every combination of the grids is tried. Entries of lists have their index as a key:
    method.submodels.0.width."""
    spaces: dict[str, dict[str, Domain]] = {}
    """Row -> domains of this row, in addition to `space` or in place of its domains: of settings that other rows lack,
    such as the learning rate of a server. More draws are not more points; more grids are."""
    trials: int = Field(default=1, ge=1, le=MOST_POINTS)
    """Draws of the domains that are not grids, per combination of the grids. With a searcher of Ray Tune: all points of
    a row; it draws from grids too."""
    widen: int = Field(default=0, ge=0, exclude_if=lambda steps: steps == 0)
    """Values that a row may try beyond each end of a grid of numbers, one after another, as long as its best value is
    the outermost: 0.1, 0.3, then 0.9. Values that the setting does not allow, or outside the budget, are not tried.
    All rows have the same right, but not the same number of trials; tables show it ("4 of 5"). Only with searcher
    random and scheduler fifo."""
    budget: Budget | None = None
    """Cost limits of a point's networks. Points outside are never trained; drawing continues until `trials` points are
    within, so every row tries equally many. Grid combinations without a point within are skipped."""
    metric: str = "validation_accuracy_mean"
    """Metric to optimise, at the last evaluation of a run."""
    allow_test: bool = False
    """Allow a metric of test data. The reported result is then biased upwards."""
    mode: Literal["auto", "max", "min"] = "auto"
    """Direction of the metric. auto: the metric's own."""
    searcher: str = "random"
    """random: stratified draws, the same for every row. Otherwise a searcher of Ray Tune, such as optuna."""
    scheduler: Literal["fifo", "asha", "hyperband", "median"] = "fifo"
    """fifo: every trial runs all rounds, so that the comparison is fair and repeatable. The others, of Ray Tune, stop
    trials of a row early; after `--resume` they compare only with trials that were not done."""
    options: dict[str, Any] = {}
    """Options of the scheduler, such as {grace_period: 5}: the fields of `Asha`, `Hyperband` and `Median`."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1, max_length=MOST_SEEDS)
    """Seeds. The search uses the first; every row's best point then runs on all."""
    max_failures: int = Field(default=2, ge=0)
    """Restarts of a trial from its checkpoint after it died."""

    @field_validator("seeds")
    @classmethod
    def _once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("every seed once")
        return seeds

    @field_validator("space", "spaces")
    @classmethod
    def _no_seed(cls, given: dict[str, Any]) -> dict[str, Any]:
        if "seed" in given or any(isinstance(own, dict) and "seed" in own for own in given.values()):
            raise ValueError("settings other than seed; search.seeds lists the seeds")
        return given

    @model_validator(mode="after")
    def _consistent(self) -> "Search":
        if self.options and self.scheduler == "fifo":
            raise ConfigError(
                f"options: {shown(self.options)} are not used by scheduler fifo, which stops no trials. Allowed: none"
            )
        spaces = [self.space, *self.spaces.values()]
        if self.widen and not self.is_fair:
            raise ConfigError(
                f"widen: {self.widen} needs the results of whole grids. Allowed: 0, or searcher random and scheduler "
                "fifo"
            )
        if self.widen and not any(domain.is_numeric_grid for space in spaces for domain in space.values()):
            raise ConfigError(f"widen: {self.widen}, but space has no grid of at least two numbers. Allowed: 0")
        for space in ({}, *self.spaces.values()):
            domains = (self.space | space).values()
            grids = [len(domain.values) for domain in domains if domain.kind == "grid"]
            # `trials` are draws, of which grids have none
            count = math.prod(grids) * (self.trials if len(grids) < len(domains) else 1)
            if count > MOST_POINTS and self.searcher == "random":
                raise ConfigError(
                    f"space: the grids and `trials` give {count} points per row. Allowed: at most {MOST_POINTS}"
                )
        return self

    def of(self, row: str) -> "Search":
        """Return the search of a row, with its own domains in `space`."""
        return self.model_copy(update={"space": self.space | self.spaces.get(row, {}), "spaces": {}})

    @property
    def is_drawn(self) -> bool:
        """True if some domain is not a grid."""
        return any(domain.kind != "grid" for domain in self.space.values())

    @property
    def is_fair(self) -> bool:
        """True if all points are known and run to the end, so that one Tuner can run all rows."""
        return self.searcher == "random" and self.scheduler == "fifo"

    @property
    def grids(self) -> list[str]:
        """Paths of the grids."""
        return [path for path, domain in self.space.items() if domain.kind == "grid"]

    def grid(self) -> Iterator[Point]:
        """Yield every combination of the grids."""
        paths = self.grids
        return (dict(zip(paths, values, strict=True)) for values in product(*(self.space[p].values for p in paths)))

    def draws(self, seed: int) -> Iterator[Point]:
        """Yield draws of the domains that are not grids, without end, stratified in every `trials` draws; one empty
        point if all are grids."""
        drawn = {path: domain for path, domain in self.space.items() if domain.kind != "grid"}
        generators = {path: numpy_generator(seed, "search", path) for path in drawn}
        while drawn:
            values = {path: domain.draw(self.trials, generators[path]) for path, domain in drawn.items()}
            yield from ({path: values[path][i] for path in drawn} for i in range(self.trials))
        yield {}

    def points(self, seed: int) -> list[Point]:
        """Return the different points of every row for the random searcher; some examples for others."""
        drawn = (grid | draw for grid in self.grid() for draw in islice(self.draws(seed), self.trials))
        return different(drawn if self.searcher == "random" else islice(drawn, EXAMPLES))


def different(points: Iterable[Point], besides: Iterable[Point] = ()) -> list[Point]:
    """Return different points of the same paths, without those of `besides`, in their order."""

    def key(point: Point) -> tuple[Any, ...]:
        return tuple(map(_identity, point.values()))

    left_out, found = set(map(key, besides)), {}
    for point in points:
        if key(point) not in left_out:
            found.setdefault(key(point), point)
    return list(found.values())


def text_of(point: Point) -> str:
    """Return a point as text: "training.lr=0.03, method.submodels.0.width=0.5"."""
    return ", ".join(f"{path}={short(value)}" for path, value in point.items())
