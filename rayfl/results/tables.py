"""Tables of rows (`rayfl.results.rows`): one line per label, mean ± sample standard deviation over its seeds.

Scores of which more is better are fractions and shown in per cent; others are shown as they are. In each column of
scores the best mean is bold; means without a significant difference from it (`rayfl.results.spread`) are underlined
(Markdown: italic).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from rayfl.metrics import EPSILONS, IF_ANY, SIMULATED, SMALLEST_GROUP, WASTED, label, named
from rayfl.results.cells import HUMAN, PERCENT, PLAIN, as_csv, human_flops, line, mean, percent, plain, spread, tex
from rayfl.results.conditions import is_comparable
from rayfl.results.rows import Record, by_label, capacities, facts_of, finite_mean, judged, titles_of, values_of
from rayfl.results.spread import like_the_best
from rayfl.results.summary import DENSITY_AT_BEST, amounts, time_to
from rayfl.results.tuned import Best, names_of, notes

Mark = Literal["best", "like the best"]

MARKDOWN: Mapping[Mark | None, str] = {"best": "**{}**", "like the best": "*{}*", None: "{}"}
LATEX: Mapping[Mark | None, str] = {"best": r"\textbf{{{}}}", "like the best": r"\underline{{{}}}", None: "{}"}
TERMINAL: Mapping[Mark | None, str] = {"best": "bold", "like the best": "underline", None: ""}

FEWEST = 2
"""Minimum number of columns on a terminal."""


@dataclass(frozen=True)
class Table:
    """Printed cells of a table."""

    header: list[str]
    rows: list[list[str]]
    marks: Mapping[tuple[int, int], Mark] = field(default_factory=dict)
    """(Row, column) -> emphasis."""
    notes: Sequence[str] = ()
    """Sentences below the table."""
    file: str = ""
    """File with the columns that a narrow terminal omits."""

    def markdown(self) -> str:
        rule = ["---"] + ["---:"] * (len(self.header) - 1)
        escaped = [[line(cell).replace("|", r"\|") for cell in row] for row in (self.header, *self.rows)]
        rows = [escaped[0], rule, *self._marked(escaped[1:], MARKDOWN)]
        table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
        return table + "".join(f"\n{line(note)}\n" for note in self.notes)

    def latex(self) -> str:
        """Return a tabular for the package booktabs; notes become comments above it."""
        cells = [[tex(line(cell)) for cell in row] for row in (self.header, *self.rows)]
        lines = [" & ".join(row) + r" \\" for row in (cells[0], *self._marked(cells[1:], LATEX))]
        columns = "l" + "r" * (len(self.header) - 1)
        return "\n".join(
            [
                *(f"% {line(note)}" for note in self.notes),
                rf"\begin{{tabular}}{{{columns}}}",
                r"\toprule",
                lines[0],
                r"\midrule",
                *lines[1:],
                r"\bottomrule",
                r"\end{tabular}",
                "",
            ]
        )

    def rich(self, full: int = 3) -> "OnTerminal":
        """Return the table for a terminal, with ± only in the first `full` columns."""
        return OnTerminal(self, full)

    def _marked(self, rows: Sequence[Sequence[str]], forms: Mapping[Mark | None, str]) -> Iterator[list[str]]:
        for i, row in enumerate(rows):
            yield [forms[self.marks.get((i, j))].format(cell) for j, cell in enumerate(row)]


@dataclass(frozen=True)
class OnTerminal:
    """A table for rich: the leading columns that fit; the others are named below it."""

    table: Table
    full: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(max_width=10_000)
        count = len(self.table.header)
        while count > FEWEST and Measurement.get(console, wide, self._first(count)).maximum > options.max_width:
            count -= 1
        yield self._first(count)
        if left := self.table.header[count:]:
            where = f" (see {self.table.file})" if self.table.file else ""
            yield Text(f"not shown: {', '.join(left)}{where}", "dim")
        yield from map(Text, self.table.notes)

    def _first(self, count: int) -> RichTable:
        shown = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
        for i, title in enumerate(self.table.header[:count]):
            shown.add_column(Text(title), justify="right" if i else "left", overflow="fold", no_wrap=count > FEWEST)
        for i, row in enumerate(self.table.rows):
            cells = [cell if j < self.full else cell.partition(" ±")[0] for j, cell in enumerate(row[:count])]
            shown.add_row(*(Text(cell, TERMINAL[self.table.marks.get((i, j))]) for j, cell in enumerate(cells)))
        return shown


class _Columns:
    """Evaluation metrics of a comparison, by their names in rows."""

    def __init__(self, records: Sequence[Record], metric: str):
        self.records, self.metric, self.facts = records, metric, facts_of(records[0])
        score = self.facts.score
        self.local, self.mean, self.worst = named(score, "mean", "clients"), named(score, "mean"), named(score, "worst")

    @property
    def front(self) -> dict[str, str]:
        """Name -> title of the leading columns: clients' mean if it judges any row, and the mean over capacities."""
        unit = " %" if self.is_share else ""
        is_local = self.metric == self.local or any(row["facts"]["judge"] == self.local for row in self.records)
        titles = {self.local: f"local{unit}"} if is_local else {}
        return self.known(titles | {self.mean: f"{self.facts.score}{unit}"}) or {self.mean: self.facts.score + unit}

    @property
    def capacities(self) -> dict[str, str]:
        return {named(self.facts.score, c): f"@{label(c)}" for c in capacities(self.records)}

    @property
    def others(self) -> list[str]:
        """Means of the other scores."""
        return [*self.known({named(score, "mean"): "" for score in self.facts.scores if score != self.facts.score})]

    @property
    def is_share(self) -> bool:
        return self.facts.scores[self.facts.score] == "max"

    def known(self, titles: Mapping[str, str]) -> dict[str, str]:
        """Return the entries for which any row has a number."""
        return {name: title for name, title in titles.items() if values_of(self.records, name)}

    @property
    def scale(self) -> int:
        return 100 if self.is_share else 1

    def score(self, name: str, title: str) -> "Column":
        return Column(name, title, PERCENT if self.is_share else PLAIN, self.scale)

    @property
    def ranking(self) -> "Column":
        """Column of the metric that ranks rows."""
        title = self.metric.replace("_", " ")
        if self.facts.is_share(self.metric):
            return Column(self.metric, f"{title} %", PERCENT, 100)
        return Column(self.metric, title, PLAIN)

    def cell(self, values: Sequence[float]) -> str:
        return percent(values) if self.is_share else plain(values)


@dataclass(frozen=True)
class Column:
    """A column of numbers in a table of rows."""

    name: str
    """Key in rows."""
    title: str
    form: str
    """Form of its numbers (`cells.number`)."""
    scale: float = 1
    """Factor of the numbers shown: 100 for fractions in per cent."""

    @property
    def is_score(self) -> bool:
        """Scores are shown with their standard deviation and emphasis, costs as a mean."""
        return self.form not in HUMAN

    def numbers(self, runs: Iterable[Record]) -> list[float]:
        return [self.scale * value for value in values_of(runs, self.name)]

    def cell(self, runs: Sequence[Record]) -> str:
        numbers = self.numbers(runs)
        return spread(numbers, self.form) if self.is_score else mean(numbers, HUMAN[self.form]) + missing(numbers, runs)


def columns_of(records: Sequence[Record], metric: str = "accuracy_mean") -> tuple[list[Column], list[Column]]:
    """Return the columns of `table` before and after the tuned settings: `metric`, if it would have no column, and the
    leading scores; other scores and costs."""
    columns = _Columns(records, metric)
    front, rest = columns.front, columns.capacities | columns.known({columns.worst: "worst"})
    costs = [
        Column("epsilon", "epsilon", "epsilon"),
        Column("simulated_epsilon", "simulated epsilon", "epsilon"),
        Column(SMALLEST_GROUP, "smallest group", "count"),
        Column("bytes_down", "down", "bytes"),
        Column("bytes_up", "up", "bytes"),
        Column("bytes_public", "public data", "bytes"),
        Column("train_flops", "FLOPs", "flops"),
        Column("server_flops", "server FLOPs", "flops"),
        Column("wasted_bytes", "wasted", "bytes"),
        Column("wasted_flops", "wasted FLOPs", "flops"),
        Column("seconds", "time", "time"),
    ]
    seldom = (*IF_ANY, *WASTED, *EPSILONS, SMALLEST_GROUP)
    costs = [column for column in costs if column.name not in seldom or any(values_of(records, column.name))]
    if values_of(records, "sim_seconds"):
        shown = "{:.4g} %" if columns.is_share else "{:.4g}"
        reached = [
            Column(time_to(target), f"to {shown.format(columns.scale * target)}", "time")
            for target in columns.facts.targets
        ]
        costs = [*reached, Column("sim_seconds", "simulated", "time"), *costs]
    scores = [[columns.score(name, title) for name, title in titles.items()] for titles in (front, rest)]
    known = {column.name for column in (*scores[0], *scores[1], *costs)}
    added = [columns.ranking] if metric not in known and values_of(records, metric) else []
    return [*added, *scores[0]], [*scores[1], *costs]


def table(records: Sequence[Record], metric: str = "accuracy_mean", tuned: Mapping[str, Best] | None = None) -> Table:
    """Return a table with one line per label, the best by `metric` first: scores, tuned settings with their place among
    the values tried, and costs. A dash marks missing numbers, e.g. of personal networks on the global test set."""
    tuned = tuned or {}
    front, rest = columns_of(records, metric)
    scores = [column.name for column in (*front, *rest) if column.is_score]
    groups, titles, paths = by_label(records, metric), titles_of(records), _paths(tuned)
    rows = []
    for name, runs in groups.items():
        first = [column.cell(runs) for column in front]
        if not any(values_of(runs, score) for score in scores):
            first[0] = runs[0]["status"]
        chosen = [str(tuned[name].settings[i]) if name in tuned else "–" for i in range(len(paths))]
        rows.append([titles[name], str(len(runs)), *first, *chosen, *(column.cell(runs) for column in rest)])
    header = ["method", "seeds", *(c.title for c in front), *names_of(paths).values(), *(c.title for c in rest)]
    places = {name: 2 + i + (len(paths) if i >= len(front) else 0) for i, name in enumerate(scores)}
    marks = _marks(records, list(groups), places)
    below = [*notes(tuned, titles), *_places(groups, titles, tuned)]
    if all(metric != row["facts"]["judge"] for row in records):
        below.append(f"Ranked by {metric}")
    return Table(header, rows, marks, below, "results.csv")


def missing(numbers: Sequence[float], runs: Sequence[object]) -> str:
    """Return " (2 of 3)" if only some runs have a number, such as the time to a target."""
    return f" ({len(numbers)} of {len(runs)})" if 0 < len(numbers) < len(runs) else ""


def _places(groups: Mapping[str, Sequence[Record]], titles: Mapping[str, str], tuned: Mapping[str, Best]) -> list[str]:
    """Return a note with the folders of the best points' trials, of the first seed."""
    paths = {
        titles[name]: Path(runs[0]["path"]) for name, runs in groups.items() if name in tuned and "path" in runs[0]
    }
    places = [f"{title} {path.parent.name}/{path.name}" for title, path in paths.items()]
    return [f"Trials of the best points, first seed: {'; '.join(places)}"] if places else []


def results_csv(
    records: Sequence[Record], metric: str = "accuracy_mean", tuned: Mapping[str, Best] | None = None
) -> str:
    """Return plain numbers, one line per evaluated row, in the order of `table` and by seed. `standing`: "best" by
    `metric`, "like the best" without a significant difference from it, or empty."""
    columns, tuned = _Columns(records, metric), tuned or {}
    names = [*columns.front, *columns.known({columns.worst: ""}), *columns.capacities, *columns.others]
    groups, paths = by_label(records, metric), _paths(tuned)
    standing = {i: mark for (i, _), mark in _marks(records, list(groups), {metric: 0}).items()}
    more = {
        name: {"standing": standing.get(i, "")} | (_of_search(tuned[name]) if name in tuned else {})
        for i, name in enumerate(groups)
    }
    search = [name for path in paths for name in (path, f"{path} place")] + (["doubts"] if paths else [])
    times = columns.known({time_to(target): "" for target in columns.facts.targets} | dict.fromkeys(SIMULATED, ""))
    some = [name for name in (*IF_ANY, *EPSILONS, SMALLEST_GROUP) if any(values_of(records, name))]
    header = [*names, "bytes_down", "bytes_up", "train_flops", *some, *times, "seconds", "standing", *search]
    added = [name for name in columns.known({metric: ""}) if name not in header]
    return _csv(
        ["seed", *added, *header], {name: [{**row, **more[name]} for row in rows] for name, rows in groups.items()}
    )


def best_table(records: Sequence[Record], metric: str = "accuracy_mean") -> Table:
    """Return a table in the form of SpaFL's (arXiv 2406.00431), one line per label, ordered by the best `metric`, or by
    `metric` if rows have no best one: the best numbers of any evaluated round; for clients' own masked networks their
    density in the round with the best local accuracy; communication and multiply-adds per client (`amounts`). This
    density is a mean over layers. The densities of capacities (`density_0.5`) are fractions of all parameters and not
    shown."""
    columns, shown = _Columns(records, metric), _best(records, metric)
    groups, titles, rows = by_label(records, _best_of(records, metric)), titles_of(records), []
    for name, runs in groups.items():
        spent = [amounts(run) for run in runs]
        shares = {key: percent if key == DENSITY_AT_BEST else columns.cell for key in shown}
        cells = [cell(values_of(runs, key)) for key, cell in shares.items()]
        cells += [mean(values_of(spent, "gbit"), "{:.4g}".format), mean(values_of(spent, "client_macs"), human_flops)]
        rows.append([titles[name], str(len(runs)), *cells])
    places = {key: 2 + i for i, key in enumerate(shown) if key != DENSITY_AT_BEST}
    header = ["method", "seeds", *shown.values(), "Gbit", "MACs per client"]
    return Table(header, rows, _marks(records, list(groups), places), file="best.csv")


def best_csv(records: Sequence[Record], metric: str = "accuracy_mean") -> str:
    """Return plain numbers of `best_table`, one line per evaluated row."""
    spent = [{**row, **amounts(row)} for row in records]
    groups = by_label(spent, _best_of(records, metric))
    return _csv(["seed", *_best(records, metric), "gbit", "client_macs"], groups)


def _best_of(records: Sequence[Record], metric: str) -> str:
    """Return the name of the best `metric` of any evaluated round, or `metric` if no row has it."""
    best = f"best_{metric}"
    return best if values_of(records, best) else metric


def _best(records: Sequence[Record], metric: str) -> dict[str, str]:
    """Return name -> title of the rows' best numbers."""
    columns = _Columns(records, metric)
    unit = " %" if columns.is_share else ""
    titles = {f"best_{columns.local}": f"best local{unit}", f"best_{columns.mean}": f"best{unit}"}
    return columns.known(titles | {DENSITY_AT_BEST: "local density %"})


def _marks(records: Sequence[Record], lines: Sequence[str], places: Mapping[str, int]) -> dict[tuple[int, int], Mark]:
    """Return (line, column) -> emphasis, of labels with a finite mean; none if they ran under different conditions.
    `lines`: labels in table order; `places`: metric -> column."""
    marks: dict[tuple[int, int], Mark] = {}
    for metric, column in places.items():
        found = by_label(records, metric)
        groups = {name: rows for name, rows in found.items() if finite_mean(rows, metric) is not None}
        first, *others = groups.values() or [[]]
        if not others or not all(is_comparable(first, rows) for rows in others):
            continue
        marks[lines.index(next(iter(groups))), column] = "best"
        marks |= {(lines.index(name), column): "like the best" for name in like_the_best(groups, metric)}
    return marks


def _paths(tuned: Mapping[str, Best]) -> list[str]:
    return [setting.path for best in list(tuned.values())[:1] for setting in best.settings]


def _of_search(best: Best) -> dict[str, Any]:
    values: dict[str, Any] = {"doubts": "; ".join(best.doubts())}
    for setting in best.settings:
        values |= {setting.path: setting.value, f"{setting.path} place": setting.place}
    return values


def _csv(columns: Sequence[str], groups: Mapping[str, Iterable[Record]]) -> str:
    rows = [
        [name, row["title"], *(row.get(column, "") for column in columns)]
        for name, runs in groups.items()
        for row in judged(runs)
    ]
    return as_csv(["method", "title", *columns], rows)


def write_tables(
    folder: Path, records: Sequence[Record], metric: str = "accuracy_mean", tuned: Mapping[str, Best] | None = None
) -> None:
    """Write results and best, each as .csv, .md and .tex."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text, cells in (
        ("results", results_csv(records, metric, tuned), table(records, metric, tuned)),
        ("best", best_csv(records, metric), best_table(records, metric)),
    ):
        (folder / f"{name}.csv").write_text(text, encoding="utf-8")
        (folder / f"{name}.md").write_text(cells.markdown(), encoding="utf-8")
        (folder / f"{name}.tex").write_text(cells.latex(), encoding="utf-8")
