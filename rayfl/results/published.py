"""The numbers that a paper printed, beside ours.

A sweep's file may have a `published:` section; `sweep`, `compare` and `report` then end with a table of the
published number, ours, and their difference, and say what was changed from the file.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from rayfl.config import Config
from rayfl.results.cells import percent
from rayfl.results.rows import Record, by_label, facts_of, titles_of
from rayfl.results.summary import AMOUNTS, amounts
from rayfl.results.tables import Table

Number = float | tuple[float, float]
"""Per cent, or an amount; with the published standard deviation, if there is one."""


class Published(Config):
    """The `published:` section of a sweep."""

    source: str
    """Which table or figure, of which paper."""
    note: str = ""
    """What this file does otherwise than the paper, if anything."""
    numbers: dict[str, Annotated[dict[str, Number], Field(min_length=1)]] = Field(min_length=1)
    """Our metric -> row -> the published number. A metric is a key of result.json, and the number in per cent, or as it
    is if less is better; or it is one of `AMOUNTS`: gbit, what was communicated in 10^9 bits, or client_macs,
    multiply-adds of training a client."""


def in_config(published: Published, changed: Sequence[str]) -> str:
    """The section, and what was changed from the file, as a sweep's configuration keeps them: one text, for rows
    and metrics may have dots in their names, and what keeps flat parameters separates by dots."""
    return json.dumps({"section": published.model_dump(mode="json"), "changed": list(changed)})


def from_config(config: Mapping[str, Any]) -> tuple[Published | None, list[str]]:
    """What `in_config` put into a sweep's configuration, or into its parameters in MLflow."""
    if "published" not in config:
        return None, []
    kept = json.loads(config["published"])
    return Published(**kept["section"]), kept["changed"]


def table(published: Published, records: Sequence[Record]) -> Table:
    """One line a row and metric: per cent; the difference in points, and in standard deviations of ours over
    the seeds (and the published one's, if it is known). Of amounts and losses the difference in per cent of the
    published one."""
    metrics, groups, titles = list(published.numbers), by_label(records), titles_of(records)
    shares = {metric for metric in metrics if _is_share(metric, records)}
    mixed = len(shares) < len(metrics)
    named = mixed or len(metrics) > 1
    header = ["method", *(["metric"] if named else [])]
    header += ["published", "ours", "difference"] if mixed else ["published %", "ours %", "points"]
    header += ["in stds", "seeds", "rounds"]
    rows = []
    for row in dict.fromkeys(row for numbers in published.numbers.values() for row in numbers):
        for metric in metrics:
            if row not in groups or row not in published.numbers[metric]:
                continue
            number = published.numbers[metric][row]
            theirs, spread = number if isinstance(number, tuple | list) else (number, 0.0)
            found = [amounts(record) if metric in AMOUNTS else record for record in groups[row]]
            ours = [record[metric] for record in found if metric in record]
            rounds = max(record["rounds"] for record in groups[row])
            name = [titles[row], *([f"{metric} %" if mixed and metric in shares else metric] if named else [])]
            cells = _shares(ours, theirs, spread) if metric in shares else _amounts(ours, theirs)
            rows.append([*name, *cells, str(len(ours)), str(rounds)])
    return Table(header, rows, file="published.md")


def _is_share(metric: str, records: Sequence[Record]) -> bool:
    return metric not in AMOUNTS and all(facts_of(record).better(metric) == "max" for record in records)


def _shares(ours: Sequence[float], theirs: float, spread: float) -> list[str]:
    cells = [f"{theirs:.2f}" + (f" ± {spread:.2f}" if spread else ""), percent(ours)]
    if not ours:
        return [*cells, "–", "–"]
    values = [100 * value for value in ours]
    difference = statistics.fmean(values) - theirs
    deviation = math.hypot(statistics.stdev(values) if len(values) > 1 else 0.0, spread)
    return [*cells, f"{difference:+.2f}", f"{difference / deviation:+.1f}" if deviation else "–"]


def _amounts(ours: Sequence[float], theirs: float) -> list[str]:
    mean = statistics.fmean(ours) if ours else math.nan
    difference = f"{mean / theirs - 1:+.2%}" if ours and theirs else "–"
    return [f"{theirs:.5g}", f"{mean:.5g}" if ours else "–", difference, "–"]


def caption(published: Published, changed: Sequence[str]) -> list[str]:
    """What the table is of, and what was changed, shortened most of all."""
    lines = [f"beside {published.source}" + (f" ({published.note})" if published.note else "")]
    return lines + ([f"changed from the file: {', '.join(changed)}"] if changed else [])


def markdown(published: Published, changed: Sequence[str], records: Sequence[Record]) -> str:
    return "\n\n".join([*caption(published, changed), table(published, records).markdown()])


def latex(published: Published, changed: Sequence[str], records: Sequence[Record]) -> str:
    comments = [f"% {line}" for line in caption(published, changed)]
    return "\n".join([*comments, table(published, records).latex()])
