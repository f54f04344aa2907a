"""Generated answers of the last evaluation of runs."""

from collections.abc import Sequence

from rayfl.data.generated import TEXTS
from rayfl.metrics import ANSWERS, evaluated
from rayfl.results.folder import RunFolder
from rayfl.results.rows import Record, by_label, titles_of
from rayfl.results.tables import Table


def answers_of(records: Sequence[Record], metric: str) -> Table | None:
    """Return the table of the answers of every label's first run, if there are any."""
    titles, rows = titles_of(records), []
    for name, runs in by_label(records, metric).items():
        lines = evaluated(RunFolder.open(runs[0]["path"]).rounds())
        for score, networks in (lines[-1].get(ANSWERS, {}) if lines else {}).items():
            for capacity, samples in networks.items():
                rows += [[titles[name], score, capacity, *(one[text] for text in TEXTS)] for one in samples]
    return Table(["method", "score", "capacity", *TEXTS], rows) if rows else None
