"""What Ray Tune is told: a trial's configuration, domains, and searchers and schedulers by name, which are checked
before Ray starts.

Ray is imported only where something of it is asked for.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from rayfl.config import Config, ConfigError, choose, parse
from rayfl.core.seeds import stream
from rayfl.tuning.space import Domain, Point, Search, text_of


class Asha(Config):
    """`search.options` of asha: asynchronous successive halving (Li et al., MLSys 2020). It lets the best share of all
    trials go on at certain rounds, the rungs."""

    grace_period: int = Field(default=1, ge=1)
    """Rounds that every trial runs."""
    reduction_factor: float = Field(default=4, ge=1.1, le=1000)
    """At a rung one trial in `reduction_factor` goes on; the next rung has `reduction_factor` times its rounds."""
    brackets: int = Field(default=1, ge=1, le=100)
    """Groups of trials; each group has one rung fewer than the group before."""


class Hyperband(Config):
    """`search.options` of hyperband (Li et al., JMLR 2018)."""

    reduction_factor: float = Field(default=3, ge=1.1, le=1000)
    """At a rung one trial in `reduction_factor` goes on."""


class Median(Config):
    """`search.options` of median: a trial stops if its best value is below the median of the other trials' means
    (Golovin et al., KDD 2017)."""

    grace_period: float = Field(default=60, ge=0)
    """Rounds that every trial runs."""
    min_samples_required: int = Field(default=3, ge=1)
    """Trials that a median is taken of, at least."""
    min_time_slice: int = Field(default=0, ge=0)
    """Rounds that a trial runs before it makes room for others."""
    hard_stop: bool = True
    """Stop a trial; otherwise it waits until the others have ended."""


OPTIONS: dict[str, type[Config]] = {"asha": Asha, "hyperband": Hyperband, "median": Median}


def scheduler_of(search: Search, rounds: int, where: str) -> Any:
    """Ray Tune's scheduler for trials of `rounds` rounds, None for fifo. A ConfigError names a wrong option."""
    if search.scheduler == "fifo":
        return None
    options = parse(OPTIONS[search.scheduler], search.options, f"{where}: search.options")
    if isinstance(options, Asha) and options.grace_period > rounds:
        raise ConfigError(
            f"{where}: search.options.grace_period: given {options.grace_period}; allowed: at most the run's "
            f"{rounds} rounds"
        )
    from ray.tune import schedulers

    kinds = {
        "asha": schedulers.AsyncHyperBandScheduler,
        "hyperband": schedulers.HyperBandScheduler,
        "median": schedulers.MedianStoppingRule,
    }
    longest = {} if search.scheduler == "median" else {"max_t": rounds}
    return kinds[search.scheduler](time_attr="round", **longest, **options.model_dump())


def searcher_of(search: Search, mode: str, where: str) -> Any:
    """Ray Tune's searcher, None for the random one that is ours. A ConfigError if there is none of that name, or its
    package is not installed."""
    if search.searcher == "random":
        return None
    from ray import tune
    from ray.tune.search import SEARCH_ALG_IMPORT

    known = {"random": None, **SEARCH_ALG_IMPORT}
    del known["variant_generator"]
    choose(known, search.searcher, f"{where}: search.searcher", "searcher")
    seed = stream(search.seeds[0], "searcher") % 2**31
    try:
        return tune.create_searcher(search.searcher, metric=search.metric, mode=mode, seed=seed)
    except (ValueError, TypeError, ImportError, AssertionError) as error:
        raise ConfigError(
            f"{where}: search.searcher: given {search.searcher!r}, which Ray Tune cannot make "
            f"({' '.join(str(error).split())}); allowed: random, or a searcher whose package is installed"
        ) from None


def domain_of(domain: Domain) -> Any:
    """A domain of the space as Ray Tune's."""
    from ray import tune

    if domain.kind in ("grid", "choice"):
        return tune.choice(list(domain.values))
    return getattr(tune, domain.kind)(*domain.values)


def trial_config(row: str, seed: int, point: Point) -> dict[str, Any]:
    """A trial as Tune has it."""
    return {"row": row, "seed": seed} | {f"point:{path}": value for path, value in point.items()}


def trial_of(config: Mapping[str, Any]) -> tuple[str, int, Point]:
    """(row, seed, point) of Tune's configuration of a trial: one of a list, or one that a searcher chose."""
    config = config.get("trial", config)
    return config["row"], config["seed"], point_of(config)


def called(row: str, point: Point, seed: int) -> str:
    """A trial as people read it: "fedrolex (lr=0.1, seed 0)"."""
    return f"{row} ({', '.join(filter(None, [text_of(point), f'seed {seed}']))})"


def point_of(config: Mapping[str, Any]) -> Point:
    return {key.removeprefix("point:"): value for key, value in config.items() if key.startswith("point:")}


def space_of(search: Search, row: str) -> dict[str, Any]:
    """Tune's space of what a searcher chooses for a row."""
    return trial_config(row, search.seeds[0], {path: domain_of(domain) for path, domain in search.space.items()})
