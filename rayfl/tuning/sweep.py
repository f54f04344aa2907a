"""A sweep: one experiment, rows that change it, a search, and perhaps a paper's numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

from rayfl.config import Config, ConfigError, set_path
from rayfl.experiment import NAMED, Experiment, lay_over, read_experiment, unchecked
from rayfl.metrics import named
from rayfl.results.published import Published, in_config
from rayfl.tuning.space import Excess, Point, Search, text_of

DRAWS = 1000
"""Points outside the budget, one after another, after which the search for one within it is given up."""
MOST_TRIED = 5000
"""Points of a row that are held against the budget; each may take 20 ms."""


@dataclass(frozen=True)
class Sweep:
    """What a sweep's file says. A ConfigError of any of its methods says which row is wrong."""

    name: str
    where: str
    """The file, for errors."""
    base: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Any]]
    """Label -> the sections of the experiment that this row changes."""
    search: Search
    published: Published | None = None
    question: str = ""
    """What it is to find out, for people."""
    titles: Mapping[str, str] = field(default_factory=dict)
    """Label -> the row's name as people read it, of rows that have one."""
    changed: tuple[str, ...] = ()
    """What the command line changed of the file, as "path: old -> new"."""

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone, and nothing that was made of them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def experiment(self, row: str, point: Point, seed: int) -> Experiment:
        """What a trial runs."""
        return read_experiment(self._given(row, point) | {"seed": seed}, f"{self.where}: rows.{row}")

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

    def point(self, config: Mapping[str, Any]) -> Point:
        """What the search chose, from the plain configuration of a trial's experiment."""
        return {path: _at(config, path) for path in self.search.space}

    @cached_property
    def points(self) -> dict[str, list[Point]]:
        """Row -> what it tries on the first seed; with a searcher of Tune, examples of that."""
        if self.search.budget is None:
            return dict.fromkeys(self.rows, self.search.points(self.search.seeds[0]))
        return {row: self._within(row) for row in self.rows}

    def example(self, row: str) -> Experiment:
        """The first of its trials, or what may be one."""
        return self.experiment(row, self.points[row][0], self.search.seeds[0])

    def given(self, row: str) -> dict[str, Any]:
        """What a file of this one trial would hold."""
        return self._given(row, self.points[row][0]) | {"seed": self.search.seeds[0]}

    @cached_property
    def first(self) -> Experiment:
        """An example of the first row."""
        return self.example(next(iter(self.rows)))

    def described(self) -> "Sweep":
        """The same sweep for other processes: all rows have the description of the one data set, so that nobody reads
        its files again (`DataSet.described`)."""
        rows = {row: {key: v for key, v in changes.items() if key != "data"} for row, changes in self.rows.items()}
        return replace(self, base={**self.base, "data": self.first.data.described()}, rows=rows)

    # under a budget

    def excess(self, row: str, point: Point) -> Excess:
        """How far the networks of a point are outside the budget."""
        if self.search.budget is None:
            return Excess(0.0, 1.0, 1.0)
        where = f"{self.where}: rows.{row}"
        experiment = unchecked(self._given(row, point), where)
        try:
            return self.search.budget.excess(experiment.bound().task)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None

    def left_out(self, row: str) -> list[Point]:
        """The combinations of the grids without a point within the budget."""
        return [grid for grid in self.search.grid() if not any(grid.items() <= p.items() for p in self.points[row])]

    def _within(self, row: str) -> list[Point]:
        """The points within the budget, of every combination of the grids that has some: the first as many draws as
        there are trials. One is enough of an example."""
        search = self.search
        wanted = search.trials if search.is_drawn and search.searcher == "random" else 1
        within: list[Point] = []
        outside: list[tuple[Excess, Point]] = []
        tried = 0
        for grid in search.grid():
            found, vain = [], []
            for draw in search.draws(search.seeds[0]):
                tried += 1
                if tried > MOST_TRIED:
                    raise self._too_many(row, len(within) + len(found))
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

    def too_few(self, row: str, found: int, outside: Sequence[tuple[Excess, Point]]) -> ConfigError:
        """The error that says how near the nearest of `outside` came."""
        excess, point = min(outside, key=lambda tried: tried[0])
        return ConfigError(
            f"{self.where}: rows.{row}: search.budget: given {self.search.budget}; {found} points found, then none "
            f"in {len(outside)}. The nearest ({text_of(point)}) gives capacity {excess.capacity:g} a network of "
            f"{excess.share:.3g} times its share; widen search.budget, or move search.space to networks of that cost"
        )

    def _too_many(self, row: str, found: int) -> ConfigError:
        return ConfigError(
            f"{self.where}: rows.{row}: search.budget: given {self.search.budget}, which {found} of the first "
            f"{MOST_TRIED} points are within; allowed: a search that ends by then; widen search.budget, or lower "
            "search.trials or the grids"
        )

    # what it is judged by

    @cached_property
    def mode(self) -> Literal["max", "min"]:
        """Which end of the search's metric is best."""
        if self.search.mode != "auto":
            return self.search.mode
        return self.first.metrics()[self.search.metric].better

    def facts(self) -> dict[str, Any]:
        """What the sweep's folder states of it: as of its first row, but with the capacities of all rows. It is judged
        by clients' own test splits if the search's metric is of clients."""
        examples = [self.example(row) for row in self.rows]
        facts = [example.facts() for example in examples]
        score = next(iter(facts[0]["scores"]))
        of_clients = self.first.metrics()[self.search.metric].split in ("clients", "client_validation")
        return facts[0] | {
            "tuned": list(self.search.space),
            "judge": named(score, "mean", "clients" if of_clients else "test"),
            "capacities": sorted({c for fact in facts for c in fact["capacities"]}, reverse=True),
            "trained": sorted({c for fact in facts for c in fact["trained"]}, reverse=True),
        }

    def points_of(self, row: str) -> int:
        """How many points the row tries on the first seed."""
        return len(self.points[row]) if self.search.searcher == "random" else self.search.trials

    @property
    def trials(self) -> int:
        """How many trials all stages have."""
        return sum(map(self.points_of, self.rows)) + len(self.rows) * (len(self.search.seeds) - 1)

    def plain(self) -> dict[str, Any]:
        """As YAML would say it, but for the paper's numbers, which are one text."""
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


def _plain(value: Any) -> Any:
    """Sections as YAML would say them, objects in them as well."""
    if isinstance(value, Config):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return {key: _plain(part) for key, part in value.items()} if isinstance(value, Mapping) else value


def _at(config: Any, path: str) -> Any:
    """What a configuration has at a dotted path; of a section whose name chooses its class, the name."""
    for key in path.split("."):
        config = config[int(key)] if isinstance(config, list) else config[key]
    return config["name"] if path in NAMED else config
