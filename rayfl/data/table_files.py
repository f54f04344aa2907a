"""Readers of tables in .csv, .tsv and .parquet files."""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfl.config import ConfigError

Frame = Any
"""A pandas.DataFrame. Its type stubs say of every column that it may be a number."""
NAMELESS = re.compile(r"Unnamed: \d+(\.\d+)?")
"""Names that pandas gives to columns without a name, such as the row numbers that `DataFrame.to_csv` writes."""


@dataclass(frozen=True)
class Format:
    """Format of the columns of a file."""

    names: tuple[str, ...]
    """Columns that are read as they are written: the type of no other value of the file changes them. Only their empty
    cells are missing."""
    separator: str | None = None
    decimal: str = "."


def _read_csv(file: Path, form: Format, sep: str = ",") -> Frame:
    import pandas as pd

    read: Any = functools.partial(pd.read_csv, file, sep=form.separator or sep, low_memory=False)
    frame = read(decimal=form.decimal)
    if not isinstance(frame.index, pd.RangeIndex):
        raise ValueError(f"rows have more cells than the header, which has {len(frame.columns)}")
    if columns := [name for name in form.names if name in frame]:
        exact = read(usecols=columns, dtype=str, keep_default_na=False, na_values=[""])
        frame = frame.assign(**{name: exact[name] for name in columns})
    return frame


def _read_parquet(file: Path, form: Format) -> Frame:
    import pandas as pd

    frame = pd.read_parquet(file)
    if columns := [name for name in form.names if name in frame]:
        # integers with missing values stay integers
        exact = pd.read_parquet(file, columns=columns, dtype_backend="numpy_nullable")
        frame = frame.assign(**{name: exact[name].array for name in columns})
    return frame


READERS: dict[str, Callable[[Path, Format], Frame]] = {
    ".csv": _read_csv,
    ".tsv": functools.partial(_read_csv, sep="\t"),
    ".parquet": _read_parquet,
}
"""Suffix of a file -> its reader."""


def separator_hint(header: str, separator: str = ",") -> str:
    """Return a hint if the first line of a file has another separator of columns."""
    found = next((mark for mark in ";\t|," if mark in header and mark != separator), None)
    if found is None or separator in header:
        return ""
    decimal = ' (and data.decimal: ",", if numbers are written so)' if found == ";" else ""
    return f". Hint: data.separator: {json.dumps(found)}{decimal}"


def read(field: str, path: str, form: Format) -> Frame:
    """Return the table in a file, the value of `data.<field>`."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"data.{field}: the file {path!r} does not exist. Allowed: an existing file")
    if file.suffix not in READERS:
        raise ConfigError(f"data.{field}: {path!r} is not valid. Allowed: files that end in {', '.join(READERS)}")
    return _read_once(field, file, file.stat().st_mtime_ns, form)


@functools.lru_cache(maxsize=4)
def _read_once(field: str, file: Path, changed: int, form: Format) -> Frame:
    try:
        return READERS[file.suffix](file, form)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = ""
        if file.suffix != ".parquet":
            with file.open(encoding="utf-8", errors="replace") as lines:
                hint = separator_hint(lines.readline(), form.separator or ("," if file.suffix == ".csv" else "\t"))
        allowed = f"Allowed: a {file.suffix} file{hint}"
        raise ConfigError(f"data.{field}: {file} cannot be read ({reason}). {allowed}") from None
