"""Comparison with a paper's published numbers.

With a `published:` section in a sweep's file, `sweep`, `compare` and `report` end with a table of the published number,
ours, and their difference, and list the settings changed from the file.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from rayfl.config import Config, ConfigError
from rayfl.results.cells import percent, plain
from rayfl.results.rows import Record, by_label, facts_of, titles_of
from rayfl.results.spread import deviation
from rayfl.results.summary import AMOUNTS, amounts
from rayfl.results.tables import Table

Number = float | tuple[float, float]
"""Published number: per cent or an amount, or a pair with its standard deviation."""


class Published(Config):
    """The `published:` section of a sweep."""

    source: str
    """Paper and table or figure."""
    note: str = ""
    """Differences of this file from the paper."""
    numbers: dict[str, Annotated[dict[str, Number], Field(min_length=1)]] = Field(min_length=1)
    """Metric -> row -> published number. A metric is a key of result.json (number in per cent, or plain if less is
    better), `gbit` (communication in 10^9 bits) or `client_macs` (multiply-adds of training per client)."""


def in_config(published: Published, changed: Sequence[str]) -> str:
    """Return the section and the changed settings as one JSON text for a sweep's configuration. It is one text because
    names of rows and metrics may contain dots, which separate flat parameters."""
    return json.dumps({"section": published.model_dump(mode="json"), "changed": list(changed)})


def from_config(config: Mapping[str, Any]) -> tuple[Published | None, list[str]]:
    """Return what `in_config` stored in a configuration, or in parameters in MLflow. Raise ConfigError if it is
    damaged."""
    if "published" not in config:
        return None, []
    try:
        kept = json.loads(config["published"])
        return Published(**kept["section"]), list(kept["changed"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"published: the stored text is damaged: {reason}. Hint: restore a copy of it") from None


def table(published: Published, records: Sequence[Record]) -> Table:
    """Return a table with one line per row and metric: fractions in per cent, with the difference in points; amounts
    and losses with the difference in per cent. Differences of scores also in standard deviations (over seeds, and
    published if known)."""
    metrics, groups, titles = list(published.numbers), by_label(records), titles_of(records)
    shares = {metric for metric in metrics if is_share(metric, records)}
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
            cells = _amounts(ours, theirs) if metric in AMOUNTS else _scores(ours, theirs, spread, metric in shares)
            rows.append([*name, *cells, str(len(ours)), str(rounds)])
    return Table(header, rows, file="published.md")


def is_share(metric: str, records: Sequence[Record]) -> bool:
    """Return whether a metric of these records is a fraction, of which more is better."""
    return metric not in AMOUNTS and all(facts_of(record).better(metric) == "max" for record in records)


def _scores(ours: Sequence[float], theirs: float, spread: float, is_share: bool) -> list[str]:
    form, factor = (".2f", 100) if is_share else (".5g", 1)
    published = format(theirs, form) + (f" ± {spread:{form}}" if spread else "")
    if not ours:
        return [published, "–", "–", "–"]
    values = [factor * value for value in ours]
    difference = statistics.fmean(values) - theirs
    total = math.hypot(deviation(values) if len(values) > 1 else 0.0, spread)
    relative = f"{difference / theirs:+.2%}" if theirs else "–"
    return [
        published,
        percent(ours) if is_share else plain(ours),
        f"{difference:+.2f}" if is_share else relative,
        f"{difference / total:+.1f}" if total else "–",
    ]


def _amounts(ours: Sequence[float], theirs: float) -> list[str]:
    mean = statistics.fmean(ours) if ours else math.nan
    difference = f"{mean / theirs - 1:+.2%}" if ours and theirs else "–"
    return [f"{theirs:.5g}", f"{mean:.5g}" if ours else "–", difference, "–"]


def caption(published: Published, changed: Sequence[str]) -> list[str]:
    """Return the source of the numbers and the settings changed from the file, each on one line."""
    source, note = (" ".join(text.split()) for text in (published.source, published.note))
    lines = [f"Compared with {source}" + (f" ({note})" if note else "")]
    return lines + ([f"changed from the file: {', '.join(changed)}"] if changed else [])


def markdown(published: Published, changed: Sequence[str], records: Sequence[Record]) -> str:
    return "\n\n".join([*caption(published, changed), table(published, records).markdown()])


def latex(published: Published, changed: Sequence[str], records: Sequence[Record]) -> str:
    comments = [f"% {line}" for line in caption(published, changed)]
    return "\n".join([*comments, table(published, records).latex()])
