"""Which rows count, and tables of them.

A row (`RunFolder.record`, or the same read back from MLflow) is one run: `label`, `seed`, `params`, `facts`, and the
numbers of its result.json. Rows of a label are seeds of one method; tables show mean ± sample standard deviation over
them. A score of which more is better is taken for a share and shown in per cent; others are shown as they are.
"""

import csv
import io
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rayfl.metrics import label, named
from rayfl.results.summary import DENSITY_AT_BEST, Better, Facts, amounts

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Record = Mapping[str, Any]


# which rows


def facts_of(record: Record) -> Facts:
    return Facts(**record["facts"])


def judged(records: Iterable[Record]) -> list[Record]:
    """The rows that have a number for the metric that they are judged by."""
    return [record for record in records if record["facts"]["judge"] in record]


def judge_of(records: Sequence[Record]) -> str:
    """What these rows are compared by, where no sweep says it: the first of their judges that all of them have a number
    for, so clients' own accuracy if only some are judged by that; else the first."""
    judges = list(dict.fromkeys(record["facts"]["judge"] for record in records))
    shared = (judge for judge in judges if all(judge in record for record in judged(records)))
    return next(shared, judges[0])


def best_trials(
    records: Iterable[Record], metric: str | None = None, mode: Better | Literal["auto"] = "auto"
) -> list[Record]:
    """The rows of each label's best point: the parameters, but the seed, with the best mean of `metric`; unless given,
    of what each row is judged by. `mode`: which end of it is best; auto: the good end, as rows state it.

    Points that ran on more seeds come first: a sweep confirms only the best of its first seed on the others.
    Rows without a finite `metric` (failed, stopped early) count for no point. Of equals, the first.
    """
    points: dict[str, dict[Any, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if math.isfinite(record.get(metric or record["facts"]["judge"], math.nan)):
            points[record["label"]][point_of(record)].append(record)

    def rank(rows: list[Record]) -> tuple[int, float]:
        judge = metric or rows[0]["facts"]["judge"]
        better = facts_of(rows[0]).better(judge) if mode == "auto" else mode
        return len(rows), (1 if better == "max" else -1) * mean_of(rows, judge)

    return [record for of_label in points.values() for record in max(of_label.values(), key=rank)]


def by_label(records: Iterable[Record], metric: str = "accuracy_mean") -> dict[str, list[Record]]:
    """The rows of each label by seed; labels from the best mean of the metric to the worst, those without any last."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record["label"]].append(record)

    def rank(name: str) -> tuple[bool, float, str]:
        rows = groups[name]
        sign = -1 if facts_of(rows[0]).better(metric) == "max" else 1
        found = values_of(rows, metric)
        return not found, sign * statistics.fmean(found) if found else 0.0, name

    return {name: sorted(groups[name], key=lambda row: row["seed"]) for name in sorted(groups, key=rank)}


def capacities(records: Iterable[Record]) -> list[float]:
    """The capacities whose networks were judged on the global test set in some row, largest first."""
    return sorted({c for row in records for c in row["facts"]["capacities"] if _capacity(row, c) in row}, reverse=True)


def point_of(record: Record) -> tuple:
    """What tells the points of a search apart: all parameters but the seed, as text, as MLflow keeps them."""
    return tuple(sorted((k, str(v)) for k, v in record["params"].items() if k != "seed"))


def values_of(records: Iterable[Record], key: str) -> list[float]:
    return [record[key] for record in records if key in record]


def mean_of(records: Iterable[Record], key: str) -> float:
    return statistics.fmean(values_of(records, key))


def _capacity(record: Record, capacity: float) -> str:
    return named(facts_of(record).score, capacity)


# tables


@dataclass(frozen=True)
class Table:
    """Cells as they are printed."""

    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        rule = ["---"] + ["---:"] * (len(self.header) - 1)
        lines = [[cell.replace("|", r"\|") for cell in line] for line in (self.header, rule, *self.rows)]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def latex(self) -> str:
        """A tabular in booktabs style."""
        lines = [" & ".join(map(_tex, line)) + r" \\" for line in (self.header, *self.rows)]
        columns = "l" + "r" * (len(self.header) - 1)
        return "\n".join(
            [
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

    def rich(self, full: int = 3) -> "RichTable":
        """For the terminal: ± only in the first `full` columns; a narrow one cuts the last columns."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
        shown = [self.header]
        shown += [row[:full] + [cell.partition(" ±")[0] for cell in row[full:]] for row in self.rows]
        for i, cells in enumerate(zip(*shown, strict=True)):
            width = max(map(len, cells))
            table.add_column(Text(cells[0]), justify="right" if i else "left", min_width=width)
        for row in shown[1:]:
            table.add_row(*map(Text, row))
        return table


@dataclass(frozen=True)
class _Columns:
    """The numbers of an evaluation that a comparison shows, by their names in rows."""

    records: Sequence[Record]
    metric: str
    facts: Facts
    local: str
    mean: str
    worst: str

    @classmethod
    def of(cls, records: Sequence[Record], metric: str) -> "_Columns":
        facts = facts_of(records[0])
        local = named(facts.score, "mean", "clients")
        return cls(records, metric, facts, local, named(facts.score, "mean"), named(facts.score, "worst"))

    @property
    def front(self) -> dict[str, str]:
        """Name -> title of the clients' own number, if some row is judged by it, and of the mean over capacities."""
        unit = " %" if self.is_share else ""
        is_local = self.metric == self.local or any(row["facts"]["judge"] == self.local for row in self.records)
        titles = {self.local: f"local{unit}"} if is_local else {}
        return self.known(titles | {self.mean: f"{self.facts.score}{unit}"}) or {self.mean: self.facts.score + unit}

    @property
    def capacities(self) -> dict[str, str]:
        return {named(self.facts.score, c): f"@{label(c)}" for c in capacities(self.records)}

    @property
    def others(self) -> list[str]:
        """The means of the other scores."""
        return list(
            self.known({named(score, "mean"): score for score in self.facts.scores if score != self.facts.score})
        )

    @property
    def is_share(self) -> bool:
        return self.facts.scores[self.facts.score] == "max"

    def known(self, titles: Mapping[str, str]) -> dict[str, str]:
        """Those of which some row has a number."""
        return {name: title for name, title in titles.items() if values_of(self.records, name)}

    def cell(self, values: Sequence[float]) -> str:
        return percent(values) if self.is_share else plain(values)


def table(records: Sequence[Record], metric: str = "accuracy_mean") -> Table:
    """One line a label, the best by `metric` first: what evaluations found, then what the training cost. A dash stands
    where there is no number: a network that every client has for itself was not judged on the global test set."""
    columns = _Columns.of(records, metric)
    titles = columns.front | columns.capacities | columns.known({columns.worst: "worst"})
    costs: dict[str, tuple[str, Callable[[float], str]]] = {
        "bytes_down": ("down", human_bytes),
        "bytes_up": ("up", human_bytes),
        "train_flops": ("FLOPs", human_flops),
        "seconds": ("time", human_time),
    }
    rows = []
    for name, runs in by_label(records, metric).items():
        cells = [columns.cell(values_of(runs, column)) for column in titles]
        if not any(values_of(runs, column) for column in titles):
            cells[0] = runs[0]["status"]
        cells += [_cost(values_of(runs, key), human) for key, (_, human) in costs.items()]
        rows.append([name, str(len(runs)), *cells])
    return Table(["method", "seeds", *titles.values(), *(title for title, _ in costs.values())], rows)


def results_csv(records: Sequence[Record], metric: str = "accuracy_mean") -> str:
    """Plain numbers, one line a row that was judged, in the order of `table` and by seed."""
    columns = _Columns.of(records, metric)
    names = [*columns.front, *columns.known({columns.worst: ""}), *columns.capacities, *columns.others]
    return _csv(["seed", *names, "bytes_down", "bytes_up", "train_flops", "seconds"], by_label(records, metric))


def best_table(records: Sequence[Record], metric: str = "accuracy_mean") -> Table:
    """One line a label as SpaFL's tables (arXiv 2406.00431) have it, the best by the best `metric` first: the best
    numbers of any evaluated round; if some clients have masked networks of their own, their density in the round
    with the best local accuracy; what training communicated, and its multiply-adds a client (`amounts`). That density
    is a mean over layers; those of capacities (`density_0.5`), which other masked methods have, are shares of all
    parameters, and in no column."""
    columns, titles = _Columns.of(records, metric), _best(records, metric)
    rows = []
    for name, runs in by_label(records, f"best_{metric}").items():
        spent = [amounts(run) for run in runs]
        shares = {key: percent if key == DENSITY_AT_BEST else columns.cell for key in titles}
        cells = [cell(values_of(runs, key)) for key, cell in shares.items()]
        cells += [_cost(values_of(spent, "gbit"), "{:.4g}".format), _cost(values_of(spent, "client_macs"), human_flops)]
        rows.append([name, str(len(runs)), *cells])
    return Table(["method", "seeds", *titles.values(), "Gbit", "MACs a client"], rows)


def best_csv(records: Sequence[Record], metric: str = "accuracy_mean") -> str:
    """Plain numbers of `best_table`, one line a row that was judged."""
    spent = [{**row, **amounts(row)} for row in records]
    return _csv(["seed", *_best(records, metric), "gbit", "client_macs"], by_label(spent, f"best_{metric}"))


def _best(records: Sequence[Record], metric: str) -> dict[str, str]:
    """Name -> title of the best numbers that rows have."""
    columns = _Columns.of(records, metric)
    unit = " %" if columns.is_share else ""
    titles = {f"best_{columns.local}": f"best local{unit}", f"best_{columns.mean}": f"best{unit}"}
    return columns.known(titles | {DENSITY_AT_BEST: "local density %"})


def _csv(columns: Sequence[str], groups: Mapping[str, Sequence[Record]]) -> str:
    rows = [[n, *(row.get(column, "") for column in columns)] for n, runs in groups.items() for row in judged(runs)]
    return as_csv(["method", *columns], rows)


def write_tables(folder: Path, records: Sequence[Record], metric: str = "accuracy_mean") -> None:
    """results and best, each as .csv, .md and .tex."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text, cells in (
        ("results", results_csv(records, metric), table(records, metric)),
        ("best", best_csv(records, metric), best_table(records, metric)),
    ):
        (folder / f"{name}.csv").write_text(text)
        (folder / f"{name}.md").write_text(cells.markdown())
        (folder / f"{name}.tex").write_text(cells.latex())


# cells


def as_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def percent(values: Sequence[float]) -> str:
    """Shares as "81.20 ± 0.35", in per cent; one value has no ±, none is a dash."""
    return _spread([100 * value for value in values], "{:.2f}".format)


def plain(values: Sequence[float]) -> str:
    """Numbers as "0.5312 ± 0.01": with four digits."""
    return _spread(values, "{:.4g}".format)


def human_bytes(amount: float) -> str:
    """Decimal units: "1.23 GB"."""
    return _scaled(amount, "B")


def human_flops(amount: float) -> str:
    """ "1.23 T" for 1.23e12."""
    return _scaled(amount, "").rstrip()


def human_time(seconds: float) -> str:
    """ "9.5 s", "3 min 05 s" or "2 h 07 min"."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def _scaled(amount: float, unit: str) -> str:
    prefixes = " kMGTPE"
    while amount >= 999.5 and len(prefixes) > 1:
        amount, prefixes = amount / 1000, prefixes[1:]
    return f"{amount:.3g} {prefixes[0].strip()}{unit}"


def _spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    if not values:
        return "–"
    mean = text(statistics.fmean(values))
    return mean if len(values) == 1 else f"{mean} ± {text(statistics.stdev(values))}"


def _cost(values: Sequence[float], human: Callable[[float], str]) -> str:
    return human(statistics.fmean(values)) if values else "–"


def _tex(cell: str) -> str:
    special = {letter: f"\\{letter}" for letter in "%_&#${}"} | {"±": r"$\pm$", "–": "--"}
    special |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(letter, letter) for letter in cell)
