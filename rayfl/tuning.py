# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
# (ray.remote adds verbs to a class, and with_parameters arguments to a method, out of the type checker's sight)
"""Sweeps: every row of a comparison tuned with the same budget by Ray Tune, each trial one federated run.

A sweep runs in stages, each one a Tuner: the search on the first seed, then the best point of every row on the
other seeds. The driver alone writes records; a trial is a server actor and its client actors inside the trial's
own placement group, and those processes are used again by the next trial.
"""

import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import numpy as np
import ray
from pyarrow.fs import FileSelector
from pydantic import Field, field_validator, model_validator
from ray import tune
from ray.exceptions import RayError
from ray.tune.search import Searcher
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayfl import costs
from rayfl.axes import Net, size_at
from rayfl.checkpoints import DamagedCheckpoint, complete, link
from rayfl.config import (
    Config,
    ConfigError,
    choose,
    differences,
    load_yaml,
    nearest,
    parse,
    parse_setting,
    set_path,
)
from rayfl.data import Arrays
from rayfl.executors import cluster
from rayfl.executors.server import ServerActor
from rayfl.experiment import NAMED, Experiment, lay_over, parse_experiment, read_experiment
from rayfl.methods import Task
from rayfl.published import Published, in_config
from rayfl.report import Record, best_trials
from rayfl.seeds import numpy_generator, stream
from rayfl.tracking.console import SweepProgress
from rayfl.tracking.records import Run, Status, flatten, records, runs, summaries, summary

HEAD_BYTES = 64 * 2**20
DRAWS = 1000
"""Points outside the budget, one after another, after which the search for one within it is given up."""

Point = dict[str, Any]
"""Dotted path -> value: what a trial sets."""


class Interrupted(Exception):
    """The user stopped the sweep; `--resume` goes on."""


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
    """The network of capacity c costs at least low * c times the full one: whoever can carry more shall."""
    high: float = Field(default=1.0, gt=0)
    """It costs at most high * c times the full one."""

    @model_validator(mode="after")
    def _ordered(self) -> "Budget":
        if self.low > self.high:
            raise ValueError(f"low of at most high; {self.low:g} and {self.high:g}")
        return self

    def excess(self, task: Task) -> Excess:
        cost = costs.cost_of(self.metric)
        full = cost(task.model, task.nets.get(1.0, Net()))
        shares = {c: cost(task.model, _alike(task, net)) / (c * full) for c, net in task.nets.items() if c != 1}
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
    axes = task.layout(replace(task.server, width=1.0)).axes.values()
    widths = [size_at(net.width, axis.size, net.rounding) / axis.size for axis in axes]
    return replace(net, width=min(widths) if net.rounding == "up" else max(widths), scale=1.0)


class Search(Config):
    """The `search:` section: the same for every row."""

    space: dict[str, dict[str, Any]] = {}
    """Dotted path -> {grid: [...]}, {choice: [...]}, {uniform: [a, b]}, {loguniform: [a, b]} or
    {randint: [a, b]} (b excluded). Every combination of the grids is tried. A path reaches into a list by place:
    method.submodels.0.width."""
    trials: int = Field(default=1, ge=1)
    """Draws of what is not a grid, for each combination of the grids: the budget of a row."""
    budget: Budget | None = None
    """What a point's networks may cost; a point outside is never trained. Rows may then try different points, for
    what is allowed may depend on the row, but as many: draws go on until `trials` are within. Only of the grids a
    combination without a point within is left out."""
    metric: str = "validation_accuracy_mean"
    """What is tuned by, at the last evaluation of a run."""
    mode: Literal["max", "min"] = "max"
    """Which end of the metric is best."""
    searcher: str = "random"
    """random: stratified draws, the same for every row. Or a searcher of Ray Tune by name, e.g. optuna."""
    scheduler: Literal["fifo", "asha", "hyperband", "median"] = "fifo"
    """fifo: every trial runs its full rounds, so that the comparison is fair and repeatable. The others of Ray
    Tune stop trials early, among those of one row."""
    options: dict[str, Any] = {}
    """Arguments of the scheduler, e.g. {grace_period: 5}."""
    seeds: tuple[int, ...] = (0,)
    """The first seed is tuned on; then every row's best point runs on all of them."""
    max_failures: int = Field(default=2, ge=0)
    """How often a trial is started again from its checkpoint after it died."""

    @field_validator("seeds")
    @classmethod
    def _some(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if not seeds or len(set(seeds)) < len(seeds):
            raise ValueError("at least one seed, each once")
        return seeds

    @field_validator("space")
    @classmethod
    def _domains(cls, space: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for path, domain in space.items():
            kinds = {"grid", "choice", "uniform", "loguniform", "randint"}
            if len(domain) != 1 or not kinds >= set(domain):
                raise ValueError(f"{path}: one of {', '.join(sorted(kinds))}; not {domain}")
            [(kind, values)] = domain.items()
            if not isinstance(values, list) or not values:
                raise ValueError(f"{path}.{kind}: a list of values; not {values!r}")
            if any(isinstance(value, dict) for value in values):
                raise ValueError(f"{path}.{kind}: single values; sections that differ are rows")
            numbers = all(isinstance(value, int | float) for value in values)
            if kind not in ("grid", "choice") and not (numbers and len(values) == 2 and values[0] < values[1]):
                raise ValueError(f"{path}.{kind}: [low, high] with low < high; not {values}")
            if kind == "loguniform" and values[0] <= 0:
                raise ValueError(f"{path}.loguniform: a low above 0; not {values[0]}")
        return space

    @property
    def is_drawn(self) -> bool:
        """Whether anything is not a grid."""
        return any("grid" not in domain for domain in self.space.values())

    def grid(self) -> list[Point]:
        """Every combination of the grids."""
        points: list[Point] = [{}]
        for path, domain in self.space.items():
            if "grid" in domain:
                points = [point | {path: value} for point in points for value in domain["grid"]]
        return points

    def draws(self, seed: int) -> Iterator[Point]:
        """What is not a grid, without end, stratified in every `trials` draws; one empty point where all is."""
        drawn = {path: domain for path, domain in self.space.items() if "grid" not in domain}
        generators = {path: numpy_generator(seed, "search", path) for path in drawn}
        while drawn:
            values = {path: _draw(domain, self.trials, generators[path]) for path, domain in drawn.items()}
            yield from ({path: values[path][i] for path in drawn} for i in range(self.trials))
        yield {}

    def points(self, seed: int) -> list[Point]:
        """The points of every row, when nothing but chance and grids chooses them."""
        return [grid | draw for grid in self.grid() for draw in islice(self.draws(seed), self.trials)]


@dataclass(frozen=True)
class Sweep:
    """What a sweep's YAML file says: one experiment, rows that change it, and a search."""

    name: str
    where: str
    base: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Any]]
    search: Search
    published: Published | None = None
    changed: tuple[str, ...] = ()
    """What the command line changed of the file, as "path: old -> new"."""

    def experiment(self, row: str, point: Point, seed: int) -> Experiment:
        return parse_experiment(self._given(row, point) | {"seed": seed}, f"{self.where}: rows.{row}")

    def _given(self, row: str, point: Point) -> dict[str, Any]:
        """What a file of this row and point alone would hold."""
        given: dict[str, Any] = dict(self.base)
        for section, value in self.rows[row].items():
            old = given.get(section)
            chosen = section in NAMED and isinstance(value, Mapping) and "name" in value
            if isinstance(value, Mapping) and isinstance(old, Mapping) and not chosen:
                value = dict(old) | dict(value)
            given = set_path(given, section, value)
        try:
            for path, value in point.items():
                given = lay_over(given, path, value)
        except ConfigError as error:
            raise ConfigError(f"{self.where}: rows.{row}: search.space: {error}") from None
        return given

    @cached_property
    def points(self) -> dict[str, list[Point]]:
        """Row -> what it tries on the first seed; with a searcher of Tune, examples of that."""
        if self.search.budget is None:
            return dict.fromkeys(self.rows, self.search.points(self.search.seeds[0]))
        return {row: self._within(row) for row in self.rows}

    def example(self, row: str) -> Experiment:
        """The first of its trials, or what may be one."""
        return self.experiment(row, self.points[row][0], self.search.seeds[0])

    def excess(self, row: str, point: Point) -> Excess:
        """How far the networks of a point are outside the budget."""
        if self.search.budget is None:
            return Excess(0.0, 1.0, 1.0)
        where = f"{self.where}: rows.{row}"
        experiment = read_experiment(self._given(row, point), where)
        try:
            return self.search.budget.excess(experiment.bound_method().task)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None

    def left_out(self, row: str) -> list[Point]:
        """The combinations of the grids of which no point is within the budget."""
        return [grid for grid in self.search.grid() if not any(grid.items() <= p.items() for p in self.points[row])]

    def _within(self, row: str) -> list[Point]:
        """The points within the budget, of every combination of the grids that has some: the first as many draws as
        there are trials. One is enough of an example."""
        search = self.search
        wanted = search.trials if search.is_drawn and search.searcher == "random" else 1
        within: list[Point] = []
        outside: list[tuple[Excess, Point]] = []
        for grid in search.grid():
            found, vain = [], []
            for draw in search.draws(search.seeds[0]):
                point = grid | draw
                excess = self.excess(row, point)
                if excess.by:
                    vain.append((excess, point))
                else:
                    found.append(point)
                    vain.clear()
                if len(found) == wanted or len(vain) == DRAWS:
                    break
            if found and vain:
                raise self.too_few(row, len(found), vain)
            within += found
            outside += vain
        if not within:
            raise self.too_few(row, 0, outside)
        return within

    def too_few(self, row: str, found: int, outside: list[tuple[Excess, Point]]) -> ConfigError:
        """The error that says how near the nearest of `outside` came."""
        excess, point = min(outside, key=lambda tried: tried[0])
        return ConfigError(
            f"{self.where}: rows.{row}: search.budget: given {self.search.budget}; {found} points found, then none "
            f"in {len(outside)}. The nearest ({_text(point)}) gives capacity {excess.capacity:g} a network of "
            f"{excess.share:.3g} times its share; widen search.budget, or move search.space to networks of that cost"
        )

    def check(self) -> None:
        """Every row, at every value and every end of the search space; what the search itself names."""
        expected: dict[str, Any] = {}
        for row, changes in self.rows.items():
            for path in flatten(changes).keys() & self.search.space.keys():
                raise ConfigError(f"{self.where}: rows.{row}: {path} is in search.space, which decides it")
        for row in self.rows:
            middle = self.points[row][0]
            experiment = self.experiment(row, middle, self.search.seeds[0])
            for path, domain in self.search.space.items():
                for value in next(iter(domain.values())):
                    self.experiment(row, middle | {path: value}, self.search.seeds[0])
            metrics = experiment.metrics()
            choose(dict.fromkeys(metrics), self.search.metric, f"{self.where}: search.metric", "metric")
            if experiment.method.is_personal and expected_trials(self) > len(self.rows) * len(self.search.seeds):
                if not self.search.metric.startswith("local_"):
                    raise ConfigError(
                        f"{self.where}: search.metric: given {self.search.metric!r}; allowed with rows.{row}: "
                        "local_accuracy_mean or another of local_*, for its clients keep what they train"
                    )
            for metric, numbers in self.published.numbers.items() if self.published else ():
                if row in numbers:
                    known = dict.fromkeys([*metrics, *summaries(metrics)])
                    choose(known, metric, f"{self.where}: published.numbers", "metric")
            runs_on = experiment.run.model_dump(exclude={"chunk", "checkpoint_seconds"})
            if runs_on != expected.setdefault("run", runs_on):
                raise ConfigError(f"{self.where}: rows.{row}: run: {runs_on}; all rows run on the same actors")
            data = experiment.plain()["data"]
            if data != expected.setdefault("data", data):
                raise ConfigError(f"{self.where}: rows.{row}: data: {data}; all rows are of one data set")
        _searcher(self.search, self.where)
        _scheduler(self, next(iter(self.rows)))

    @property
    def is_fair(self) -> bool:
        """Whether the points of all rows are known and run to the end, so that one Tuner can hold them all."""
        return self.search.searcher == "random" and self.search.scheduler == "fifo"

    def plain(self) -> dict[str, Any]:
        return {
            "experiment": dict(self.base),
            "rows": {row: dict(changes) for row, changes in self.rows.items()},
            "search": self.search.model_dump(mode="json"),
        } | self._beside()

    def _beside(self) -> dict[str, Any]:
        if self.published is None:
            return {}
        return {"published": in_config(self.published, self.changed)}


SECTIONS = ("experiment", "rows", "search", "published")
"""What a sweep's file holds."""


def load_sweep(path: str | Path, settings: list[str] | None = None, rows: str | None = None) -> Sweep:
    """A checked sweep from a YAML file; `settings` change every row's experiment, or the search where they
    begin so."""
    where, given = str(path), load_yaml(path)
    if not isinstance(given.get("experiment"), Mapping):
        raise ConfigError(f"{where}: experiment: missing; a sweep file holds {', '.join(SECTIONS)}")
    for key in given:
        if key not in SECTIONS:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, SECTIONS)}")
    all_rows = given.get("rows") or {"run": {}}
    if not isinstance(all_rows, Mapping):
        raise ConfigError(f"{where}: rows: given {all_rows!r}; allowed: a mapping of rows' names to what they change")
    chosen = rows.split(",") if rows else list(all_rows)
    for row in chosen:
        if row not in all_rows:
            raise ConfigError(f"{where}: --rows: no row is called {row!r}; {nearest(row, all_rows)}")
    for row, changes in all_rows.items():
        if not re.fullmatch(r"[\w.-]+", str(row)):
            raise ConfigError(f"{where}: rows: given {row!r}; allowed: letters, digits and . _ - in a row's name")
        if not isinstance(changes, Mapping | None):
            raise ConfigError(f"{where}: rows.{row}: given {changes!r}; allowed: sections of the experiment")
    published = _published(given, all_rows, where)
    changed = given
    for text in settings or []:
        changed = _lay_over(changed, *parse_setting(text), where)
    sweep = _sweep(path, changed, chosen, published)
    if settings and published:
        sweep = replace(sweep, changed=tuple(_changes(_sweep(path, given, chosen, published), sweep)))
    sweep.check()
    return sweep


def _sweep(path: str | Path, given: Mapping[str, Any], chosen: list[str], published: Published | None) -> Sweep:
    where, rows = str(path), given.get("rows") or {"run": {}}
    search = parse(Search, given.get("search", {}), f"{where}: search")
    experiment = given["experiment"]
    return Sweep(Path(path).stem, where, experiment, {row: rows[row] or {} for row in chosen}, search, published)


def _lay_over(given: dict[str, Any], path: str, value: Any, where: str) -> dict[str, Any]:
    """The file with one setting: of the search, or of the experiment and of the rows that change its section."""
    if path.startswith("search."):
        return set_path(given, path, value)
    path = path.removeprefix("experiment.")
    if path == "seed":
        raise ConfigError(f"{where}: --set seed: a sweep's seeds are search.seeds; --set search.seeds=[{value}]")
    search = given.get("search")
    if isinstance(search, Mapping) and path in (search.get("space") or {}):
        raise ConfigError(f"{where}: --set {path}: search.space decides it; --set search.space={{}} for no search")
    section = path.partition(".")[0]
    rows = {
        row: lay_over(dict(changes), path, value) if changes and section in changes else changes
        for row, changes in (given.get("rows") or {}).items()
    }
    if rows and all(section in (changes or {}) for changes in rows.values()):
        return given | {"rows": rows}
    return given | {"experiment": lay_over(dict(given["experiment"]), path, value)} | ({"rows": rows} if rows else {})


def _published(given: Mapping[str, Any], rows: Mapping[str, Any], where: str) -> Published | None:
    if "published" not in given:
        return None
    published = parse(Published, given["published"], f"{where}: published")
    for metric, numbers in published.numbers.items():
        for row in numbers:
            choose(rows, row, f"{where}: published.numbers.{metric}", "row")
    return published


def _changes(file: Sweep, sweep: Sweep) -> list[str]:
    """What the settings changed in the rows, and in the search."""
    rows: dict[str, list[str]] = {}
    for row in sweep.rows:
        old, new = (s.experiment(row, {}, 0).plain() for s in (file, sweep))
        for change in differences(old, new):
            if not change.startswith(("run.", "data.root")):
                rows.setdefault(change, []).append(row)
    old, new = ({"search": s.search.model_dump(mode="json")} for s in (file, sweep))
    said = [c if len(of) == len(sweep.rows) else f"{', '.join(of)}: {c}" for c, of in rows.items()]
    return [*said, *differences(old, new)]


def _draw(domain: Mapping[str, Any], count: int, generator: np.random.Generator) -> list[Any]:
    """Stratified draws: one from each of `count` equally likely parts of the domain, in random order."""
    [(kind, values)] = domain.items()
    shares = (generator.permutation(count) + generator.random(count)) / count
    if kind == "choice":
        return [values[int(share * len(values))] for share in shares]
    low, high = values
    if kind == "uniform":
        return [float(low + share * (high - low)) for share in shares]
    if kind == "loguniform":
        return [float(low * (high / low) ** share) for share in shares]
    return [int(low + share * (high - low)) for share in shares]


def _domain(domain: Mapping[str, Any]) -> Any:
    """A domain of the space as Ray Tune's."""
    [(kind, values)] = domain.items()
    if kind in ("grid", "choice"):
        return tune.choice(values)
    return getattr(tune, kind)(*values)


# on the trial's node


class FederatedTrial(tune.Trainable):
    """One federated run as Ray Tune sees it. The next trial takes over its processes."""

    def setup(self, config: dict[str, Any], sweep: Sweep, refs: dict[str, Any]) -> None:
        self.sweep, self.refs = sweep, refs
        self.folder = Path(tempfile.mkdtemp(prefix="rayfl-"))
        group = get_current_placement_group()
        assert group is not None
        _, places = cluster.bundles(*refs["actors"])
        here = PlacementGroupSchedulingStrategy(group, 0)
        # bundle 0 holds this process and the server, the clients' bundles follow
        self.server = ServerActor.options(scheduling_strategy=here).remote(group, [p + 1 for p in places])
        self._load(config)

    def _load(self, config: dict[str, Any]) -> None:
        row, seed, point = trial_of(config)
        experiment = self.sweep.experiment(row, point, seed)
        self.rounds, self.checkpoint_seconds = experiment.rounds, experiment.run.checkpoint_seconds
        self.saved = time.monotonic()
        ray.get(self.server.load.remote(experiment, [self.refs["arrays"]], str(self.folder)))

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._load(new_config)
        return True

    def step(self) -> dict[str, Any]:
        lines = ray.get(self.server.step.remote())
        if not lines:
            # restored from its last checkpoint: what it says here was said before
            return {"lines": [], "done": True}
        while not self.sweep.is_fair and "accuracy_mean" not in lines[-1]:
            # schedulers and searchers want their metric in every result
            lines += ray.get(self.server.step.remote())
        result = {key: v for key, v in lines[-1].items() if isinstance(v, int | float)}
        result |= {"lines": lines, "done": lines[-1]["round"] >= self.rounds}
        if result["done"]:
            result["client_accuracy"] = ray.get(self.server.client_accuracy.remote())
        if time.monotonic() - self.saved > self.checkpoint_seconds:
            self.saved = time.monotonic()
            result["should_checkpoint"] = True
        return result

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        ray.get(self.server.save.remote(checkpoint_dir))

    def load_checkpoint(self, checkpoint: str) -> None:
        ray.get(self.server.restore.remote(checkpoint))

    def restore(self, result) -> None:  # pyright: ignore
        """From the trial's newest whole checkpoint, or from the start if there is none.

        Tune names the one of its last snapshot. A driver that was killed may have left newer ones, which
        replaced that.
        """
        named = result.checkpoint
        for folder in _newest_first(named):
            with suppress(DamagedCheckpoint):
                super().restore(type(result)(tune.Checkpoint(folder, named.filesystem), result.metrics))
                return

    def cleanup(self) -> None:
        with suppress(RayError):
            ray.get(self.server.close.remote())
        shutil.rmtree(self.folder, ignore_errors=True)


def _newest_first(checkpoint: tune.Checkpoint) -> list[str]:
    """The folders of a trial's checkpoints that are there, by falling round."""
    trial = PurePosixPath(checkpoint.path).parent
    assert checkpoint.filesystem is not None
    files = checkpoint.filesystem.get_file_info(FileSelector(str(trial), allow_not_found=True, recursive=True))
    paths = [PurePosixPath(file.path) for file in files]
    rounds = {str(path.parent): path.name for path in sorted(paths) if path.match("checkpoint_*/round-*")}
    return sorted(rounds, key=lambda folder: rounds[folder], reverse=True)


def trial_of(config: Mapping[str, Any]) -> tuple[str, int, Point]:
    """(row, seed, point) of a Tune configuration: a trial of a list, or one that a searcher chose."""
    config = config.get("trial", config)
    return config["row"], config["seed"], _point_of(config)


def _point_of(config: Mapping[str, Any]) -> Point:
    return {key.removeprefix("point:"): value for key, value in config.items() if key.startswith("point:")}


# on the driver


class Within(Searcher):
    """A searcher of Ray Tune that is asked again until its point is within the budget. The others failed, as it is
    told, and no trial is made of them."""

    def __init__(self, searcher: Searcher, sweep: Sweep, row: str):
        super().__init__(searcher.metric, searcher.mode)
        self.searcher, self.sweep, self.row = searcher, sweep, row
        self.asked: dict[str, str] = {}

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict, **spec) -> bool:
        return self.searcher.set_search_properties(metric, mode, config, **spec)

    def suggest(self, trial_id: str) -> dict | str | None:
        outside: list[tuple[Excess, Point]] = []
        while len(outside) < DRAWS:
            asked = f"{trial_id}.{len(outside)}"
            config = self.searcher.suggest(asked)
            if config is None or config == Searcher.FINISHED:
                return config
            point = _point_of(config)
            excess = self.sweep.excess(self.row, point)
            if not excess.by:
                self.asked[trial_id] = asked
                return config
            self.searcher.on_trial_complete(asked, error=True)
            outside.append((excess, point))
        raise self.sweep.too_few(self.row, len(self.asked), outside)

    def on_trial_result(self, trial_id: str, result: dict) -> None:
        self.searcher.on_trial_result(self.asked[trial_id], result)

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        self.searcher.on_trial_complete(self.asked[trial_id], result=result, error=error)

    # Tune saves what `searcher` knows by itself

    def get_state(self) -> dict:
        return {"asked": dict(self.asked)}

    def set_state(self, state: dict) -> None:
        self.asked = state["asked"]


class Recorder(tune.Callback):
    """Writes the trials' records as their results come in."""

    current: "Recorder | None" = None

    def __init__(self, sweep: Sweep, run: Run, progress: SweepProgress, follow: Callable[[Path], None]):
        self.sweep, self.run, self.progress, self.follow = sweep, run, progress, follow
        self.trials: dict[str, Run] = {}
        Recorder.current = self

    def __reduce__(self):
        # Tune stores its callbacks; a restored one is the one of the process that restores it
        return _current_recorder, ()

    def recall(self) -> None:
        """Shows the trials that finished before this process began, and has them sent."""
        for record in runs(self.run.path):
            if record.sweep == self.run.id and record.status == "finished":
                trial_id = record.path.name.rpartition("-")[2]
                self._show(trial_id, record)
                self.progress.done(trial_id, "finished")
                # its end may not have been sent
                self.follow(record.path)
        self.progress.resumed()

    def _show(self, trial_id: str, record: Run) -> None:
        self.progress.start(trial_id, record.label, record.tags["point"], record.config["rounds"])
        if lines := record.rounds():
            latest = {key: value for line in lines for key, value in line.items()}
            self.progress.update(trial_id, latest["round"], latest)

    def on_trial_start(self, iteration: int, trials: list, trial, **info) -> None:
        row, seed, point = trial_of(trial.config)
        name = "-".join([row, *(f"{_last(k)}={_short(v)}" for k, v in point.items()), f"s{seed}"])
        path = self.run.path / "trials" / f"{name}-{trial.trial_id}"
        if Run.exists(path):
            record = Run.open(path)
            record.resume()
        else:
            experiment = self.sweep.experiment(row, point, seed)
            tags = experiment.tags() | {"point": _text(point)}
            record = Run.create(path, row, experiment.plain(), tags, sweep=self.run.id, costs=experiment.costs())
        self.trials[trial.trial_id] = record
        self._show(trial.trial_id, record)
        self.follow(path)

    def on_trial_result(self, iteration: int, trials: list, trial, result: dict, **info) -> None:
        record, lines = self.trials[trial.trial_id], result.pop("lines")
        accuracies = result.pop("client_accuracy", None)
        known = record.rounds()
        if lines and known and known[-1]["round"] >= lines[0]["round"]:
            record.truncate_after(lines[0]["round"] - 1)
        record.append(lines)
        if accuracies:
            record.save_clients(accuracies)
        for line in lines:
            self.progress.update(trial.trial_id, line["round"], line)
            if "refusals" in line:
                self.progress.note(f"{record.label}: round {line['round']}: refused {line['refusals']}")

    def on_trial_complete(self, iteration: int, trials: list, trial, **info) -> None:
        record = self.trials[trial.trial_id]
        if trial.checkpoint is not None:
            with trial.checkpoint.as_directory() as folder:
                for checkpoint in complete(Path(folder)):
                    to = record.path / "checkpoints" / checkpoint.name
                    shutil.copytree(checkpoint, to, copy_function=link, dirs_exist_ok=True)
        done = record.rounds()[-1]["round"] >= record.config["rounds"]
        self._end(trial, "finished" if done else "stopped")

    def on_trial_error(self, iteration: int, trials: list, trial, **info) -> None:
        error = trial.get_error()
        self.progress.note(f"{self.trials[trial.trial_id].label} failed: {error}")
        self._end(trial, "failed", str(error))

    def _end(self, trial, status: Status, error: str | None = None) -> None:
        record = self.trials[trial.trial_id]
        result = summary(record.rounds(), record.label, int(record.tags["seed"]))
        record.finish(status, result, error)
        self.progress.done(trial.trial_id, status)


def _current_recorder() -> Recorder | None:
    return Recorder.current


def run_sweep(
    sweep: Sweep,
    run: Run,
    arrays: Arrays,
    progress: SweepProgress,
    follow: Callable[[Path], None],
) -> list[Record]:
    """All stages of a sweep, those that are done passed over. Returns the records of the best points, all seeds.

    `run` is the sweep's own folder; `follow` is told the folder of every trial. Ray is running.
    """
    recorder = Recorder(sweep, run, progress, follow)
    recorder.recall()
    for row in sweep.rows:
        if left_out := sweep.left_out(row):
            progress.note(f"{row}: outside search.budget: {'; '.join(map(_text, left_out))}")
    data = ray.put(arrays)
    search, first = sweep.search, sweep.search.seeds[0]
    stages = [[row] for row in sweep.rows] if not sweep.is_fair else [list(sweep.rows)]
    for stage in stages:
        name = "search" if sweep.is_fair else f"search-{stage[0]}"
        if search.searcher == "random":
            tried = zip_longest(*(sweep.points[row] for row in stage))
            trials = [
                _trial(r, first, p) for points in tried for r, p in zip(stage, points, strict=True) if p is not None
            ]
            space: dict[str, Any] = {"trial": tune.grid_search(trials)}
        else:
            space = {f"point:{path}": _domain(domain) for path, domain in search.space.items()}
            space |= {"row": stage[0], "seed": first}
        _run_stage(sweep, run, name, space, data, recorder, stage[0])
    tuned = [record for record in _finished(run) if record["seed"] == first]
    best = best_trials(tuned, search.metric, search.mode)
    confirm = [
        _trial(record["label"], seed, {path: record["params"][path] for path in search.space})
        for seed in search.seeds[1:]
        for record in best
    ]
    if confirm:
        _run_stage(sweep, run, "confirm", {"trial": tune.grid_search(confirm)}, data, recorder)
        best = best_trials(_finished(run), search.metric, search.mode)
    return best


def expected_trials(sweep: Sweep) -> int:
    """How many trials all stages have."""
    search = sweep.search
    points = [len(sweep.points[row]) if search.searcher == "random" else search.trials for row in sweep.rows]
    return sum(points) + len(points) * (len(search.seeds) - 1)


def _finished(run: Run) -> list[Record]:
    """The trials that ran their full rounds: one that a scheduler stopped early is no candidate."""
    return [record for record in records(run.path, run.id) if record["status"] == "finished"]


def _trial(row: str, seed: int, point: Point) -> dict[str, Any]:
    return {"row": row, "seed": seed} | {f"point:{path}": value for path, value in point.items()}


def _run_stage(
    sweep: Sweep,
    run: Run,
    name: str,
    space: dict[str, Any],
    arrays: ray.ObjectRef,
    recorder: Recorder,
    row: str | None = None,
) -> None:
    """One Tuner, from its start, from where it was stopped, or not at all if it is done. `row`: whose trials they
    are, if a scheduler may stop them early."""
    search, folder = sweep.search, run.path / "tune"
    marker = folder / name / "done"
    if marker.exists():
        return
    actors = _actors(sweep)
    trainable = tune.with_resources(
        tune.with_parameters(FederatedTrial, sweep=sweep, refs={"arrays": arrays, "actors": actors}),
        tune.PlacementGroupFactory(_trial_bundles(sweep, actors)),
    )
    path = folder / name
    if tune.Tuner.can_restore(str(path)):
        _fill_gaps(path)
        tuner = tune.Tuner.restore(str(path), trainable, resume_errored=True, param_space=space)
    else:
        shutil.rmtree(path, ignore_errors=True)
        tuner = tune.Tuner(
            trainable,
            param_space=space,
            tune_config=tune.TuneConfig(
                metric=search.metric,
                mode=search.mode,
                num_samples=search.trials if "trial" not in space else 1,
                scheduler=_scheduler(sweep, row) if row and not sweep.is_fair else None,
                search_alg=_searching(sweep, row) if row and "trial" not in space else None,
                reuse_actors=True,
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=tune.RunConfig(
                name=name,
                storage_path=str(folder),
                callbacks=[recorder],
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=search.max_failures),
                checkpoint_config=tune.CheckpointConfig(num_to_keep=2, checkpoint_at_end=True),
            ),
        )
    with _interrupts() as interrupted:
        results = tuner.fit()
        if interrupted():
            raise Interrupted
    failed = [result for result in results if result.error is not None]
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(results)} trials failed; --resume tries them again. The first:\n{failed[0].error}"
        )
    marker.touch()


def _fill_gaps(stage: Path) -> None:
    """Empty folders for checkpoints that were removed after Tune's last snapshot: it removes them again, and
    an absent one is an error to it."""
    for trial in stage.iterdir():
        numbers = [int(folder.name.removeprefix("checkpoint_")) for folder in trial.glob("checkpoint_*")]
        for number in range(max(numbers, default=0)):
            (trial / f"checkpoint_{number:06d}").mkdir(exist_ok=True)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether there was a Ctrl-C: Tune handles it itself, and its `fit` then returns as if all were well.

    Tune takes the place of any handler, but Python also writes the number of a signal to a descriptor.
    """
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

        def interrupted() -> bool:
            with suppress(BlockingIOError):
                return signal.SIGINT in reader.recv(4096)
            return False

        try:
            yield interrupted
        finally:
            signal.set_wakeup_fd(before)


def check_room(sweep: Sweep, address: str | None) -> None:
    """Refuses a sweep whose trials can never start."""
    cluster.require_room(*_actors(sweep), address)


def _actors(sweep: Sweep) -> tuple[int, float, float]:
    """(client actors of a trial, CPUs and GPUs of each). auto: trials side by side first."""
    experiment = sweep.example(next(iter(sweep.rows)))
    run = experiment.run
    jobs = -(-experiment.clients.cohort // experiment.chunk)
    share = max(1, cluster.room(run.cpus, run.gpus) // expected_trials(sweep))
    return (min(share, jobs) if run.actors == "auto" else run.actors), run.cpus, run.gpus


def _trial_bundles(sweep: Sweep, actors: tuple[int, float, float]) -> list[dict[str, float]]:
    """The trial and its server in the first bundle, clients in the others."""
    clients, _ = cluster.bundles(*actors)
    return [{"memory": HEAD_BYTES}, *clients]


def _scheduler(sweep: Sweep, row: str) -> Any:
    search = sweep.search
    known = {"asha": "async_hyperband", "median": "median_stopping_rule"}
    rounds = sweep.experiment(row, {}, 0).rounds
    options: dict[str, Any] = {"time_attr": "round"}
    if search.scheduler in ("asha", "hyperband"):
        options["max_t"] = rounds
    try:
        return tune.create_scheduler(known.get(search.scheduler, search.scheduler), **options | search.options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{sweep.where}: search.scheduler: given {search.scheduler!r}: {error}") from None


def _searcher(search: Search, where: str) -> Any:
    """Ray Tune's searcher, None for the random one that is ours."""
    if search.searcher == "random":
        return None
    seed = stream(search.seeds[0], "searcher") % 2**31
    try:
        return tune.create_searcher(search.searcher, metric=search.metric, mode=search.mode, seed=seed)
    except (ValueError, TypeError, ImportError, AssertionError) as error:
        raise ConfigError(f"{where}: search.searcher: given {search.searcher!r}: {error}") from None


def _searching(sweep: Sweep, row: str) -> Any:
    """The searcher of a row, which keeps to the budget."""
    searcher = _searcher(sweep.search, sweep.where)
    return searcher if sweep.search.budget is None else Within(searcher, sweep, row)


def _text(point: Point) -> str:
    return ", ".join(f"{path}={_short(value)}" for path, value in point.items())


def _last(path: str) -> str:
    """The end of a path that tells entries of a list apart: lr, 0.width."""
    *_, before, last = ["", *path.split(".")]
    return f"{before}.{last}" if before.isdecimal() else last


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
