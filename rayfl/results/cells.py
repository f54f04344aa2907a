"""Formatting of numbers for table cells, CSV and LaTeX."""

import csv
import io
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rayfl.results.spread import deviation

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of cells that spreadsheets run as formulas."""


def as_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([safe(cell) for cell in row] for row in (header, *rows))
    return text.getvalue()


def safe(cell: Any) -> Any:
    """Return a cell of a CSV file; text that a spreadsheet would run as a formula begins with an apostrophe. Columns of
    capacities ("@0.25") name no cell or function."""
    if not isinstance(cell, str) or not cell.startswith(FORMULA) or re.match(r"@\d", cell):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def line(cell: str) -> str:
    """Return a cell on one line."""
    return " ".join(cell.split())


PERCENT, PLAIN = ".2f", ".4g"
"""Forms of scores: in per cent, and other scores."""


def percent(values: Sequence[float]) -> str:
    """Return fractions in per cent as "81.20 ± 0.35"; no ± for one value, a dash for none."""
    return spread([100 * value for value in values], PERCENT)


def plain(values: Sequence[float]) -> str:
    """Return numbers with four digits as "0.5312 ± 0.01"."""
    return spread(values, PLAIN)


def number(value: float, form: str) -> str:
    """Return a number in a form: a key of `HUMAN`, or a format specification of Python, such as ".2f"."""
    return HUMAN[form](value) if form in HUMAN else format(value, form)


def human_bytes(amount: float) -> str:
    """Return bytes in decimal units: "1.23 GB"."""
    return _scaled(amount, "B")


def human_flops(amount: float) -> str:
    """Return "1.23 T" for 1.23e12."""
    return _scaled(amount, "").rstrip()


def human_time(seconds: float) -> str:
    """Return "9.5 s", "3 min 05 s" or "2 h 07 min"."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


HUMAN: Mapping[str, Callable[[float], str]] = {
    "bytes": human_bytes,
    "flops": human_flops,
    "time": human_time,
    "epsilon": "{:.3g}".format,
    "count": "{:g}".format,
}
"""Forms of costs."""


def _scaled(amount: float, unit: str) -> str:
    prefixes = " kMGTPE"
    while amount >= 999.5 and len(prefixes) > 1:
        amount, prefixes = amount / 1000, prefixes[1:]
    return f"{amount:.3g} {prefixes[0].strip()}{unit}"


def spread(values: Sequence[float], form: str) -> str:
    """Return mean ± sample standard deviation in a form; no ± for one value, a dash for none."""
    if not values:
        return "–"
    mean = number(statistics.fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {number(deviation(values), form)}"


def mean(values: Sequence[float], human: Callable[[float], str]) -> str:
    return human(statistics.fmean(values)) if values else "–"


def tex(cell: str) -> str:
    special = {letter: f"\\{letter}" for letter in "%_&#${}"} | {
        "±": r"$\pm$",
        "–": "--",
        "↑": r"$\uparrow$",
        "↓": r"$\downarrow$",
    }
    special |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(letter, letter) for letter in cell)
