"""A sweep: one experiment, rows that change it, a search, and possibly published numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

from rayfl.config import Config, ConfigError
from rayfl.experiment import NAMED, Experiment, lay_over, opened, read_experiment, unchecked
from rayfl.metrics import named
from rayfl.results.published import Published, in_config
from rayfl.tuning.space import Excess, Point, Search, different, text_of

DRAWS = 1000
"""Consecutive points outside the budget after which drawing stops."""
MOST_TRIED = 5000
"""Limit of networks per row compared with the budget; each takes up to 20 ms."""
OF_NETWORKS = ("data", "clients", "model", "method")
"""Sections that decide the cost of networks."""


@dataclass(frozen=True)
class Sweep:
    """Content of a sweep's file. Its methods raise ConfigError with the invalid row."""

    name: str
    where: str
    """File, for error messages."""
    base: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Any]]
    """Label -> sections that the row changes."""
    search: Search
    published: Published | None = None
    question: str = ""
    """Question that the sweep answers."""
    titles: Mapping[str, str] = field(default_factory=dict)
    """Label -> readable name, of rows that have one."""
    changed: tuple[str, ...] = ()
    """Changes by the command line: "path: old -> new"."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, without cached values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def place(self, row: str) -> str:
        """Return the place of a row's settings in errors: that of all rows if it changes none."""
        return f"{self.where}: " + (f"rows.{row}" if self.rows[row] else "experiment")

    def experiment(self, row: str, point: Point, seed: int) -> Experiment:
        """Return the experiment of a trial. Errors in values of the search space name it."""
        place = self.place(row)
        try:
            return read_experiment(self._given(row, point) | {"seed": seed}, place)
        except ConfigError as error:
            problem = str(error)
            for path in point:
                of_row = path in self.search.spaces.get(row, {})
                space = f"search.spaces.{row}" if of_row else "search.space"
                problem = problem.replace(f"{place}: {path}:", f"{self.where}: {space}: {path}:")
            raise ConfigError(problem) from None

    def _given(self, row: str, point: Point) -> dict[str, Any]:
        """Return the content of a run's file for this row and point."""
        given: dict[str, Any] = dict(self.base)
        for section, value in self.rows[row].items():
            given[section] = _merged(opened(given, section), value)
        try:
            # `method` before `method.mu`
            for path in sorted(point, key=lambda path: path.count(".")):
                given = lay_over(given, path, point[path])
        except ConfigError as error:
            raise ConfigError(f"{self.place(row)}: search.space: {error}") from None
        return given

    def point(self, row: str, config: Mapping[str, Any]) -> Point:
        """Return the values of the row's search space in a trial's configuration."""
        return {path: _at(config, path) for path in self.search.of(row).space}

    @cached_property
    def points(self) -> dict[str, list[Point]]:
        """Row -> points tried on the first seed; for a searcher of Tune, examples."""
        if self.search.budget is None:
            return {row: self.search.of(row).points(self.search.seeds[0]) for row in self.rows}
        return {row: self._within(row) for row in self.rows}

    def example(self, row: str) -> Experiment:
        """Return the experiment of the row's first point."""
        return self.experiment(row, self.points[row][0], self.search.seeds[0])

    def given(self, row: str) -> dict[str, Any]:
        """Return the content of a run's file for the row's first point."""
        return self._given(row, self.points[row][0]) | {"seed": self.search.seeds[0]}

    @cached_property
    def first(self) -> Experiment:
        """Experiment of the first row's first point."""
        return self.example(next(iter(self.rows)))

    def described(self) -> "Sweep":
        """Return the sweep for other processes, with the data set's description instead of its files
        (`DataSet.described`)."""
        rows = {row: {key: v for key, v in changes.items() if key != "data"} for row, changes in self.rows.items()}
        return replace(self, base={**self.base, "data": self.first.data.described()}, rows=rows)

    # under a budget

    def excess(self, row: str, point: Point) -> Excess:
        """Return how far the networks of a point are outside the budget."""
        if self.search.budget is None:
            return Excess(0.0, 1.0, 1.0)
        experiment = unchecked(self._given(row, point), self.place(row))
        try:
            return self.search.budget.excess(experiment.bound().task)
        except ValueError as error:
            raise ConfigError(f"{self.place(row)}: {error}") from None

    def allows(self, row: str, point: Point) -> bool:
        """Return whether the row's experiment is valid at a point, and its networks are within the budget."""
        try:
            self.experiment(row, point, self.search.seeds[0])
            return not self.excess(row, point).by
        except ConfigError:
            return False

    def left_out(self, row: str) -> list[Point]:
        """Return the combinations of the grids without a point within the budget, which are not tried."""
        search = self.search.of(row)
        if search.budget is None or search.searcher != "random":
            return []
        within = different({path: point[path] for path in search.grids} for point in self.points[row])
        return different(search.grid(), besides=within)

    def _within(self, row: str) -> list[Point]:
        """Return the points within the budget: the first `trials` draws of every combination of the grids that has
        some; an example for a searcher of Tune."""
        search = self.search.of(row)
        is_random = search.searcher == "random"
        wanted = search.trials if search.is_drawn and is_random else 1
        within: list[Point] = []
        outside: list[tuple[Excess, Point]] = []
        known: dict[str, Excess] = {}
        for grid in search.grid():
            if within and not is_random:
                break
            found, vain = [], []
            for draw in search.draws(search.seeds[0]):
                point = grid | draw
                network = repr([(p, v) for p, v in point.items() if p.partition(".")[0] in OF_NETWORKS])
                if network not in known:
                    if len(known) == MOST_TRIED:
                        raise self._too_many(row, len(within) + len(found))
                    known[network] = self.excess(row, point)
                if (excess := known[network]).by:
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
        return different(within)

    def too_few(self, row: str, found: int, outside: Sequence[tuple[Excess, Point]]) -> ConfigError:
        """Return the error with the nearest of the points `outside`."""
        excess, point = min(outside, key=lambda tried: tried[0])
        return ConfigError(
            f"{self.where}: rows.{row}: search.budget: {self.search.budget} is too small; {found} points found, then "
            f"none in {len(outside)}. The nearest ({text_of(point)}) gives capacity {excess.capacity:g} a network of "
            f"{excess.share:.3g} times its share. Hint: widen search.budget, or move search.space to networks of that "
            "cost"
        )

    def _too_many(self, row: str, found: int) -> ConfigError:
        return ConfigError(
            f"{self.where}: rows.{row}: search.budget: only {found} points are within {self.search.budget}, of the "
            f"first {MOST_TRIED} networks. Hint: widen search.budget, or lower search.trials or the grids"
        )

    # evaluation

    @cached_property
    def mode(self) -> Literal["max", "min"]:
        """Direction of the search's metric."""
        if self.search.mode != "auto":
            return self.search.mode
        return self.first.metrics()[self.search.metric].better

    def facts(self) -> dict[str, Any]:
        """Return the facts for the sweep's folder: those of the first row, with the capacities of all rows. The main
        metric is local if the search's metric is."""
        examples = [self.example(row) for row in self.rows]
        facts = [example.facts() for example in examples]
        score = next(iter(facts[0]["scores"]))
        of_clients = self.first.metrics()[self.search.metric].split in ("clients", "client_validation")
        return facts[0] | {
            "tuned": list(dict.fromkeys(path for row in self.rows for path in self.search.of(row).space)),
            "judge": named(score, "mean", "clients" if of_clients else "test"),
            "capacities": sorted({c for fact in facts for c in fact["capacities"]}, reverse=True),
            "trained": sorted({c for fact in facts for c in fact["trained"]}, reverse=True),
        }

    @property
    def notes(self) -> list[str]:
        """Notes on the first points of the rows, each once, with its rows unless it is about all."""
        rows: dict[str, list[str]] = {}
        for row in self.rows:
            for text in self.example(row).notes:
                rows.setdefault(text, []).append(row)
        return [text if len(of) == len(self.rows) else f"{', '.join(of)}: {text}" for text, of in rows.items()]

    def points_of(self, row: str) -> int:
        """Return the number of points that the row tries on the first seed."""
        return len(self.points[row]) if self.search.searcher == "random" else self.search.trials

    @property
    def trials(self) -> int:
        """Number of trials in all stages."""
        return sum(map(self.points_of, self.rows)) + len(self.rows) * (len(self.search.seeds) - 1)

    def plain(self) -> dict[str, Any]:
        """Return the sweep as plain values; published numbers are one text."""
        plain = {
            "question": self.question,
            "titles": dict(self.titles),
            "experiment": _plain(self.base),
            "rows": _plain(self.rows),
            "search": self.search.model_dump(mode="json"),
        }
        if self.published is not None:
            plain["published"] = in_config(self.published, self.changed)
        return plain


def _merged(old: Any, new: Any) -> Any:
    """Return a section as a row changes it: nested mappings are merged, but one with a `name` replaces the old one."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping) or "name" in new:
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


def _plain(value: Any) -> Any:
    """Return sections, and objects in them, as plain values."""
    if isinstance(value, Config):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return {key: _plain(part) for key, part in value.items()} if isinstance(value, Mapping) else value


def _at(config: Any, path: str) -> Any:
    """Return the value at a dotted path; for a section chosen by name, the name."""
    for key in path.split("."):
        config = config[int(key)] if isinstance(config, list) else config[key]
    return config["name"] if path in NAMED else config
