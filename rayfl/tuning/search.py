"""Conversion to Ray Tune: configurations of trials, domains, searchers and schedulers.

Searchers and schedulers are checked before Ray starts. Ray is imported only inside functions.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from rayfl.config import Config, ConfigError, choose, parse
from rayfl.config.plain import last, short
from rayfl.core.seeds import stream
from rayfl.tuning.space import Domain, Point, Search, text_of


class Asha(Config):
    """`search.options` of asha: asynchronous successive halving (Li et al., MLSys 2020). At certain rounds, the rungs,
    only the best fraction of the trials continues."""

    grace_period: int = Field(default=1, ge=1)
    """Minimum rounds of every trial."""
    reduction_factor: float = Field(default=4, ge=1.1, le=1000)
    """One in `reduction_factor` trials continues at a rung; the next rung has `reduction_factor` times its rounds."""
    brackets: int = Field(default=1, ge=1, le=100)
    """Groups of trials; each has one rung fewer than the one before."""


class Hyperband(Config):
    """`search.options` of hyperband (Li et al., JMLR 2018)."""

    reduction_factor: float = Field(default=3, ge=1.1, le=1000)
    """One in `reduction_factor` trials continues at a rung."""


class Median(Config):
    """`search.options` of median: a trial stops if its best value is below the median of the other trials' means
    (Golovin et al., KDD 2017)."""

    grace_period: float = Field(default=1, ge=0)
    """Minimum rounds of every trial."""
    min_samples_required: int = Field(default=3, ge=1)
    """Minimum number of trials for a median."""
    min_time_slice: int = Field(default=0, ge=0)
    """Rounds that a trial runs before others can replace it."""
    hard_stop: bool = True
    """Stop a trial. False: it waits until the others have ended."""


NAME_BYTES = 120
"""Maximum length of a trial's folder name, without its id."""

OPTIONS: dict[str, type[Config]] = {"asha": Asha, "hyperband": Hyperband, "median": Median}


def scheduler_of(search: Search, rounds: int, where: str) -> Any:
    """Return Ray Tune's scheduler for trials of `rounds` rounds; None for fifo. Raise ConfigError if it is invalid."""
    if search.scheduler == "fifo":
        return None
    options = parse(OPTIONS[search.scheduler], search.options, f"{where}: search.options")
    if isinstance(options, Asha | Median) and options.grace_period > rounds:
        raise ConfigError(
            f"{where}: search.options.grace_period: {options.grace_period:g} is not valid. Allowed: at most the run's "
            f"{rounds} rounds"
        )
    from ray.tune import schedulers

    class HyperBand(schedulers.HyperBandScheduler):
        def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
            # after a resume Tune adds the trials that have ended too, and a bracket would wait for them
            if not trial.is_finished():
                super().on_trial_add(tune_controller, trial)

    kinds = {
        "asha": schedulers.AsyncHyperBandScheduler,
        "hyperband": HyperBand,
        "median": schedulers.MedianStoppingRule,
    }
    longest = {} if search.scheduler == "median" else {"max_t": rounds}
    return kinds[search.scheduler](time_attr="round", **longest, **options.model_dump())


def searcher_of(search: Search, mode: str, where: str) -> Any:
    """Return Ray Tune's searcher, or None for random. Raise ConfigError if its name is unknown or its package is not
    installed."""
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
            f"{where}: search.searcher: Ray Tune cannot make {search.searcher!r} "
            f"({' '.join(str(error).split())}). Allowed: random, or a searcher whose package is installed"
        ) from None


def domain_of(domain: Domain) -> Any:
    """Return a domain as Ray Tune's."""
    from ray import tune

    if domain.kind in ("grid", "choice"):
        return tune.choice(list(domain.values))
    return getattr(tune, domain.kind)(*domain.values)


def trial_config(row: str, seed: int, point: Point) -> dict[str, Any]:
    """Return Tune's configuration of a trial."""
    return {"row": row, "seed": seed} | {f"point:{path}": value for path, value in point.items()}


def trial_of(config: Mapping[str, Any]) -> tuple[str, int, Point]:
    """Return (row, seed, point) of Tune's configuration of a trial."""
    config = config.get("trial", config)
    return config["row"], config["seed"], point_of(config)


def called(row: str, point: Point, seed: int) -> str:
    """Return a trial's readable name: "fedrolex (lr=0.1, seed 0)"."""
    return f"{row} ({', '.join(filter(None, [text_of(point), f'seed {seed}']))})"


def folder_name(row: str, point: Point, seed: int, trial_id: str) -> str:
    """Return the name of a trial's folder in `trials/`: one component of a path, for any values of the point."""
    name = "-".join([row, *(f"{last(path)}={short(value)}" for path, value in point.items()), f"s{seed}"])
    plain = re.sub(r"[^\w.=+-]", "_", name).encode()[:NAME_BYTES].decode(errors="ignore")
    return f"{plain}-{trial_id}"


def trial_id_of(folder: str | Path) -> str:
    """Return the trial's id from the name of its folder."""
    return Path(folder).name.rpartition("-")[2]


def point_of(config: Mapping[str, Any]) -> Point:
    return {key.removeprefix("point:"): value for key, value in config.items() if key.startswith("point:")}


def space_of(search: Search, row: str) -> dict[str, Any]:
    """Return Tune's search space of a row."""
    return trial_config(row, search.seeds[0], {path: domain_of(domain) for path, domain in search.space.items()})
