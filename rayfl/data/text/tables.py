"""Readers of files with one text per row: CSV, TSV, JSON lines, and LEAF's JSON."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rayfl.config import ConfigError

Table = Mapping[str, Sequence[str]]
"""Cells by column."""


def read_table(path: Path, field: str) -> Table:
    """Return all columns as text. `field` is the configuration field of the file, for errors."""
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise ConfigError(
            f"data.{field}: {str(path)!r} is not valid. Allowed: a file that ends in {', '.join(READERS)}"
        )
    try:
        return read(path)
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # decoding and JSON errors are ValueErrors
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"data.{field}: {str(path)!r} cannot be read ({reason}). Allowed: UTF-8 text: a table with a header line, "
            "one JSON object per line, or LEAF's JSON"
        ) from None


def column(table: Table, name: str, field: str, path: Path) -> Sequence[str]:
    """Return the column `name`, the value of `field`."""
    if name not in table:
        known = ", ".join(map(repr, table))
        hint = ""
        if len(table) == 1 and set(";,|\t") & set("".join(table)):
            hint = ". Hint: separate columns by commas in a .csv file, by tabs in a .tsv file"
        raise ConfigError(f"data.{field}: {path} has no column {name!r}. Allowed: one of its columns {known}{hint}")
    return table[name]


def not_empty(texts: Sequence[str], field: str, path: Path) -> Sequence[str]:
    """Return the cells of a column. Raise ConfigError if there are none or some are empty. A class may be a space."""
    empty = [i for i, text in enumerate(texts, 1) if not text or field != "label" and text.isspace()]
    if empty or not texts:
        given = f"empty cells (first: row {empty[0]}; {len(empty)} in all)" if empty else "no rows"
        raise ConfigError(f"data.{field}: {path} has {given}. Allowed: rows without empty cells")
    return texts


def _table(path: Path, separator: str, quoting: int) -> Table:
    import pandas

    found = pandas.read_csv(path, sep=separator, quoting=quoting, dtype=str, na_filter=False, encoding="utf-8")
    if not isinstance(found.index, pandas.RangeIndex):
        raise ValueError(f"rows have more cells than the header, which has {len(found.columns)}")
    return {str(name): found[name].tolist() for name in found}


def _lines(path: Path) -> Table:
    """Read one JSON object per line. Columns are the keys that every line has."""
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if not line.isspace()]
    names = [name for name in (rows[0] if rows else ()) if all(name in row for row in rows)]
    return {name: [_text(row[name]) for row in rows] for name in names}


def _leaf(path: Path) -> Table:
    """Read LEAF's {"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}: columns user, label, and text, or
    0, 1, ... if x are lists."""
    data = json.loads(path.read_text("utf-8"))
    of_users = [(user, data["user_data"][user]) for user in data["users"]]
    rows = [(user, x, y) for user, own in of_users for x, y in zip(own["x"], own["y"], strict=True)]
    table = {"user": [_text(user) for user, _, _ in rows], "label": [_text(y) for _, _, y in rows]}
    if rows and isinstance(rows[0][1], list):
        return table | {str(i): [_text(x[i]) for _, x, _ in rows] for i in range(len(rows[0][1]))}
    return table | {"text": [_text(x) for _, x, _ in rows]}


def _text(value: object) -> str:
    """Return a value as text; "" if it is missing."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


READERS: Mapping[str, Callable[[Path], Table]] = {
    ".csv": partial(_table, separator=",", quoting=csv.QUOTE_MINIMAL),
    ".tsv": partial(_table, separator="\t", quoting=csv.QUOTE_NONE),
    ".jsonl": _lines,
    ".json": _leaf,
}
