"""Write the tables of studies in README files from `tune_configs/results/`.

    python scripts/tables.py                                        # write the tables
    python scripts/tables.py --check                                # write nothing; exit code 1 if a table is stale
    python scripts/tables.py add runs/quickstart                    # add the table of a finished sweep or run
    python scripts/tables.py add runs/time --columns "method,seeds,accuracy %,server %=accuracy_server"
    python scripts/tables.py add runs/table1 --columns "method,published %,ours %=best_accuracy_server,points"

A table is NAME.csv and its entry in index.yaml: the facts of its run, and the columns that are shown, each with the
form of its numbers (`rayfl.results.cells.number`, or `text`). A column of the CSV file has the title that is shown, and
numbers in the unit of that title. Beside it: `TITLE std`, the standard deviation over seeds; `TITLE values`, the
numbers in the order of the seeds; `TITLE standing`, "best" or "like the best" (no significant difference); `TITLE
note`, a text after the number, such as "(2 of 3)".

In a README file or a study's page a table is between the lines `<!-- table: NAME -->` and `<!-- end -->`. A part:
`<!-- table: NAME (TITLE; TITLE) of FIRST CELL; FIRST CELL -->`, with these columns and rows, in this order.
"""

import argparse
import csv
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rayfl.config import Config, ConfigError, choose, load_yaml, parse, shown
from rayfl.config.plain import write_yaml
from rayfl.metrics import ROUND
from rayfl.results.cells import HUMAN, PERCENT, PLAIN, as_csv, number
from rayfl.results.findings import Findings, found_in
from rayfl.results.folder import RunFolder
from rayfl.results.published import from_config, is_share
from rayfl.results.rows import by_label, facts_of, values_of
from rayfl.results.spread import deviation
from rayfl.results.summary import amounts
from rayfl.results.tables import MARKDOWN, Column, Table, columns_of, missing, table
from rayfl.results.tuned import MISSING, names_of

READMES = ("README.md", "tune_configs/README.md")
BLOCK = re.compile(
    r"(<!-- table: (?P<name>\S+)(?: \((?P<columns>[^)\n]+)\))?(?: of (?P<rows>[^\n]+))? -->\n)"
    r"(?:(?!<!-- table:).)*?(<!-- end -->)",
    re.S,
)
HEAD = "# Facts of the studies whose tables README files show, and the columns shown (scripts/tables.py)\n"
ENDS = ("", " std", " values", " standing", " note")
TEXT = "text"
UNKNOWN = "not recorded"
OF_SHARES = {"published %": ".2f", "points": "+.2f"}
OF_OTHERS = {"published": ".4g", "difference": "+.2f"}
"""Title -> form of a published number and of the difference from it, for fractions and for other scores."""
UNITS = {"bytes": "bytes", "operations": "flops", "seconds": "time"}
"""Unit of a metric -> form."""


class Study(Config):
    """Entry of a table in index.yaml. Unknown facts are "not recorded"."""

    command: str
    rayfl: str
    """Version."""
    commit: str
    """Commit of rayfl; several if the study was resumed with another one."""
    machine: str
    hours: float | str
    """Wall-clock time of the study."""
    date: str
    """Day of the start (UTC)."""
    columns: dict[str, str]
    """Title -> form."""


class Results:
    """The folder of tables, and the README files that show them."""

    def __init__(self, root: Path):
        self.root, self.folder = root, root / "tune_configs/results"
        self.index = self.folder / "index.yaml"
        self.studies = {name: parse(Study, entry, f"{self.index}: {name}") for name, entry in self._entries().items()}

    def _entries(self) -> Mapping[str, Any]:
        return load_yaml(self.index) if self.index.exists() else {}

    def markdown(self, name: str, titles: str | None = None, labels: str | None = None) -> str:
        """Return a table as Markdown. `titles`, `labels`: only these columns, and rows with these first cells,
        separated by semicolons."""
        study = choose(self.studies, name, str(self.index), "table")
        with (self.folder / f"{name}.csv").open(newline="") as file:
            lines = csv.DictReader(file)
            rows, known = list(lines), dict.fromkeys(lines.fieldnames or ())
        for title in study.columns:
            choose(known, title, f"{self.index}: {name}: columns", "column of the CSV file")
        where = f"{self.folder}/{name}.csv"
        forms = {title: choose(study.columns, title, where, "column") for title in _parts(titles, study.columns)}
        first = next(iter(study.columns))
        labelled = {row[first]: row for row in rows}
        if labels:
            rows = [choose(labelled, label, where, "row") for label in _parts(labels, ())]
        cells = [[_cell(row, title, form, where) for title, form in forms.items()] for row in rows]
        return Table(list(forms), cells).markdown()

    def stale(self) -> dict[Path, str]:
        """Return the README files that are not up to date, with their new text."""
        texts = self._texts()
        new = {path: BLOCK.sub(self._made, text) for path, text in texts.items()}
        return {path: text for path, text in new.items() if text != texts[path]}

    def unused(self) -> list[str]:
        """Return the tables that no README file shows, and CSV files without an entry."""
        used = {found["name"] for text in self._texts().values() for found in BLOCK.finditer(text)}
        return sorted({*self.studies, *(file.stem for file in self.folder.glob("*.csv"))} - used)

    def _texts(self) -> dict[Path, str]:
        paths = [*(self.root / name for name in READMES), *sorted(self.folder.glob("*.md"))]
        return {path: path.read_text() for path in paths}

    def _made(self, block: re.Match[str]) -> str:
        return block[1] + self.markdown(block["name"], block["columns"], block["rows"]) + block[block.re.groups]

    def add(self, folder: Path, name: str | None, columns: Iterable[str]) -> str:
        """Write the table of a finished sweep or run, and its entry. `columns`: titles of its own table, or keys of
        result.json as KEY or TITLE=KEY. Default: its own table. Default name: the folder's. Return the name."""
        run = RunFolder.open(folder)
        if run.status != "finished":
            raise ConfigError(f"{folder}: the status is {run.status}. Allowed: finished. Hint: --resume continues it")
        name = name or folder.resolve().name
        keys = {title: key or title for title, _, key in (column.partition("=") for column in columns)}
        rows, forms = _numbers(found_in(folder), keys)
        filled = {key for row in rows for key, cell in row.items() if cell != ""}
        header = [title + end for title in forms for end in ENDS if title + end in filled or not end]
        self.folder.mkdir(exist_ok=True)
        (self.folder / f"{name}.csv").write_text(as_csv(header, [[row.get(key, "") for key in header] for row in rows]))
        self.studies[name] = _study(run, {title: forms[title] for title in keys or forms})
        entries = {name: study.model_dump() for name, study in self.studies.items()}
        dumped = write_yaml(entries, width=120, default_flow_style=None)
        self.index.write_text(HEAD + dumped)
        return name


def _parts(text: str | None, default: Iterable[str]) -> list[str]:
    return text.split("; ") if text else list(default)


def _cell(row: Mapping[str, str], title: str, form: str, where: str) -> str:
    value, std, note = (row.get(title + end, "") for end in ("", " std", " note"))
    if not value:
        return "–"
    try:
        # a standard deviation has no sign
        both = ((value, form), (std, form.removeprefix("+")))
        parts = value if form == TEXT else " ± ".join(number(float(part), some) for part, some in both if part)
    except ValueError:
        raise ConfigError(
            f"{where}: {title}: {shown(value)} does not fit the form {shown(form)}. Allowed: numbers for "
            f"{', '.join(HUMAN)} and format specifications of Python, anything for {TEXT}"
        ) from None
    standing: Any = row.get(f"{title} standing") or None
    return MARKDOWN[standing].format(f"{parts} {note}".rstrip())


def _numbers(found: Findings, keys: Mapping[str, str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the lines of a CSV file, and title -> form: the rows' own table and further `keys` (title -> key)."""
    own, best = table(found.best, found.judge, found.tuned), [{**row, **amounts(row)} for row in found.best]
    columns = {column.title: column for part in columns_of(best, found.judge) for column in part}
    theirs = _published(found)
    known = [*own.header, *(title for cells in theirs.values() for title in cells)]
    more = {title: key for title, key in keys.items() if title not in known or key != title}
    results = dict.fromkeys(key for row in best for key, value in row.items() if type(value) in (int, float))
    for title, key in more.items():
        choose(results | (dict.fromkeys(known) if title == key else {}), key, "--columns", "column or result")
    columns |= {title: _column(best, title, key) for title, key in more.items()}
    paths, titles = names_of(found.paths), dict.fromkeys((*known, *columns))
    forms = {
        title: columns[title].form if title in columns else (OF_SHARES | OF_OTHERS).get(title, TEXT) for title in titles
    }
    rows = []
    for i, (label, runs) in enumerate(by_label(best, found.judge).items()):
        cells: dict[str, Any] = dict.fromkeys(titles, "") | {"method": own.rows[i][0], "seeds": len(runs)}
        for setting in found.tuned[label].settings if label in found.tuned else ():
            title = paths[setting.path]
            cells |= {title: "" if setting.value == MISSING else setting.value, f"{title} note": setting.note}
            if isinstance(setting.value, float):
                forms[title] = ".3g"
        for j, title in enumerate(titles):
            if title in columns and (numbers := columns[title].numbers(runs)):
                cells[title] = statistics.fmean(numbers)
                if not columns[title].is_score:
                    cells[f"{title} note"] = missing(numbers, runs).strip()
                elif len(numbers) > 1:
                    cells[f"{title} std"] = deviation(numbers)
                    cells[f"{title} values"] = " ".join(f"{value:.6g}" for value in numbers)
                cells[f"{title} standing"] = own.marks.get((i, j), "") if title not in more else ""
        rows.append(cells | theirs.get(label, {}))
    return rows, forms


def _published(found: Findings) -> dict[str, dict[str, float]]:
    """Return row -> its published number, and the difference of ours, if one score was published. Fractions are in per
    cent."""
    published, _ = from_config(found.config)
    if published is None or len(published.numbers) > 1:
        return {}
    [(metric, theirs)] = published.numbers.items()
    numbers = {row: values_of(runs, metric) for row, runs in by_label(found.best).items() if row in theirs}
    share = is_share(metric, found.best)
    means = {row: (100 if share else 1) * statistics.fmean(values) for row, values in numbers.items() if values}
    # a pair is a number and its standard deviation
    known = {row: number[0] if isinstance(number, tuple) else number for row, number in theirs.items()}
    titles = OF_SHARES if share else OF_OTHERS
    return {row: dict(zip(titles, (known[row], mean - known[row]), strict=True)) for row, mean in means.items()}


def _column(records: list[dict[str, Any]], title: str, key: str) -> Column:
    """Return the column of a key of result.json."""
    facts, units = facts_of(records[0]), {metric.name: metric.unit for metric in ROUND}
    if about := facts.about(key):
        return Column(key, title, PERCENT, 100) if facts.scores[about[0]] == "max" else Column(key, title, PLAIN)
    return Column(key, title, "flops" if "macs" in key else UNITS.get(units.get(key, ""), PLAIN))


def _study(run: RunFolder, columns: dict[str, str]) -> Study:
    def each(values: Iterable[str]) -> str:
        return "; ".join(dict.fromkeys(values)) or UNKNOWN

    return Study(
        command=each(_typed(made.command) for made in run.made),
        rayfl=each(made.versions["rayfl"] for made in run.made),
        commit=each(made.rayfl_commit for made in run.made),
        machine=each(", ".join([f"{made.cores} cores of {made.cpu}", *made.gpus]) for made in run.made),
        hours=round(run.seconds / 3600, 3) or UNKNOWN,
        date=datetime.fromtimestamp(run.started, UTC).date().isoformat(),
        columns=columns,
    )


def _typed(command: str) -> str:
    """Return a command as a reader types it: `rayfl` in place of the script, without the place of the output."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output")
    parser.add_argument("--resume", action="store_true")
    program, *words = parser.parse_known_args(shlex.split(command))[1]
    return shlex.join(["rayfl" if program == "sweep.py" else program, *words])


def main(arguments: list[str] | None = None, root: Path = Path(__file__).parents[1]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a table is stale")
    add = parser.add_subparsers(dest="command").add_parser("add", help="add the table of a finished sweep or run")
    add.add_argument("folder", type=Path, help="folder of the sweep or run")
    add.add_argument("--name", help="name of the table (default: the folder's)")
    add.add_argument(
        "--columns", default="", help="columns shown: TITLE, KEY or TITLE=KEY of result.json (default: all)"
    )
    given = parser.parse_args(arguments)
    try:
        results = Results(root)
        if given.command:
            name = results.add(given.folder, given.name, filter(None, given.columns.split(",")))
            print(f"added: {results.folder / name}.csv and its entry in {results.index}")
        stale, unused = results.stale(), results.unused()
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in unused:
        print(f"{name}: no README file shows the table. Hint: add <!-- table: {name} --> and <!-- end --> to one")
    for path, text in stale.items():
        if given.check:
            print(f"{path}: a table is not up to date. Hint: python scripts/tables.py")
        else:
            path.write_text(text)
            print(f"written: {path}")
    return int(given.check and bool(stale or unused))


if __name__ == "__main__":
    sys.exit(main())
