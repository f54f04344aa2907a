"""Files of texts, a text a row: CSV, TSV, JSON lines, and the JSON of LEAF's data sets."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rayfl.config import ConfigError

Table = Mapping[str, Sequence[str]]
"""Cells by column."""


def read_table(path: Path, field: str) -> Table:
    """All columns, as text. `field`: what names the file, for errors."""
    if not path.is_file():
        raise ConfigError(f"data.{field}: given {str(path)!r}; allowed: an existing file")
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise ConfigError(f"data.{field}: given {str(path)!r}; allowed: a file that ends in {', '.join(READERS)}")
    try:
        return read(path)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # decoding and JSON errors are ValueErrors
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"data.{field}: given {str(path)!r}, which cannot be read ({reason}); allowed: UTF-8 text; a table with a "
            "line of names, a JSON object a line, or LEAF's JSON"
        ) from None


def column(table: Table, name: str, field: str, path: Path) -> Sequence[str]:
    """The cells of a column that a field of the data set names."""
    if name not in table:
        raise ConfigError(
            f"data.{field}: given {name!r}, which {path} does not have; allowed: one of its columns "
            f"{', '.join(map(repr, table))}"
        )
    return table[name]


def not_empty(texts: Sequence[str], field: str, path: Path) -> Sequence[str]:
    """The texts, if there are some and all say something."""
    empty = [i for i, text in enumerate(texts, 1) if not text or text.isspace()]
    if empty or not texts:
        given = f"{len(empty)} empty texts, row {empty[0]} the first" if empty else "no texts"
        raise ConfigError(f"data.{field}: given {given}, in {path}; allowed: texts that are not empty")
    return texts


def _csv(path: Path) -> Table:
    return _table(path, ",", csv.QUOTE_MINIMAL)


def _tsv(path: Path) -> Table:
    return _table(path, "\t", csv.QUOTE_NONE)


def _table(path: Path, separator: str, quoting: int) -> Table:
    import pandas

    found = pandas.read_csv(path, sep=separator, quoting=quoting, dtype=str, na_filter=False, encoding="utf-8")
    return {str(name): found[name].tolist() for name in found}


def _lines(path: Path) -> Table:
    """Of one JSON object a line. A column is one that every line has."""
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if not line.isspace()]
    names = [name for name in (rows[0] if rows else ()) if all(name in row for row in rows)]
    return {name: [_text(row[name]) for row in rows] for name in names}


def _leaf(path: Path) -> Table:
    """LEAF's {"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}: columns user, label, and text, or 0, 1,
    ... where x are lists."""
    data = json.loads(path.read_text("utf-8"))
    of_users = [(user, data["user_data"][user]) for user in data["users"]]
    rows = [(user, x, y) for user, held in of_users for x, y in zip(held["x"], held["y"], strict=True)]
    table = {"user": [_text(user) for user, _, _ in rows], "label": [_text(y) for _, _, y in rows]}
    if rows and isinstance(rows[0][1], list):
        return table | {str(i): [_text(x[i]) for _, x, _ in rows] for i in range(len(rows[0][1]))}
    return table | {"text": [_text(x) for _, x, _ in rows]}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


READERS: Mapping[str, Callable[[Path], Table]] = {".csv": _csv, ".tsv": _tsv, ".jsonl": _lines, ".json": _leaf}
