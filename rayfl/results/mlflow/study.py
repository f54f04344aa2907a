"""Contents of the MLflow runs of a sweep and its rows: pure functions of their folders."""

import hashlib
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayfl.metrics import Line, named
from rayfl.results.folder import RunFolder, records
from rayfl.results.made import Made
from rayfl.results.rows import Record, best_trials, by_label, facts_of, titles_of, values_of
from rayfl.results.spread import deviation, differences
from rayfl.results.summary import Facts
from rayfl.results.tables import table
from rayfl.results.tuned import Best, tuned

ALL = "All"
"""Section of charts with one line per row, prefix of its metrics. MLflow sorts sections as text, upper case first."""
ALL_OF = ALL + "/{}"
"""Name of a metric's mean in a row's run."""

CLOCK = "sim_time"
"""Metric of simulated time; all charts share its name."""

Curves = Mapping[str, Sequence[tuple[int, float]]]
"""Name of a metric -> (round, value)."""


@dataclass(frozen=True)
class DataUsed:
    """A data set or partition in the form of MLflow's datasets."""

    name: str
    context: str
    """Context: data or partition."""
    digest: str
    """Digest of all settings that determine it: equal digests mean equal data."""
    settings: str
    """Settings as JSON."""


@dataclass(frozen=True)
class Study:
    """An ended sweep: its folder and the rows of each label's best point, the best label first."""

    folder: RunFolder
    rows: Mapping[str, Sequence[Record]]
    tuned: Mapping[str, Best]
    """Label -> search result."""

    @classmethod
    def of(cls, folder: RunFolder) -> "Study":
        search = folder.config.get("search", {})
        judged_by = search.get("metric"), search.get("mode", "auto")
        trials = records(folder.path, folder.id)
        best = best_trials([trial for trial in trials if trial["status"] == "finished"], *judged_by)
        found = tuned(best, trials, folder.facts.tuned, judged_by[0])
        return cls(folder, by_label(best, folder.facts.judge), found)

    @property
    def judge(self) -> str:
        return self.folder.facts.judge

    @property
    def is_timed(self) -> bool:
        """True if all rows have simulated time."""
        return all("sim_seconds" in row for rows in self.rows.values() for row in rows)

    def first_runs(self) -> dict[str, Record]:
        """Return label -> run of its best point with the first seed, as `rayfl export --row`: test data choose none."""
        return {label: rows[0] for label, rows in self.rows.items()}

    def summary(self) -> Curves:
        """Return the judge metric over rounds, whose last values form the ranked table: means over seeds
        (`heterofl/accuracy_mean`) and, for several seeds, standard deviations (`heterofl/accuracy_mean_std`). With
        simulated time the last values only, because rows have different times."""
        found = {}
        for label, rows in self.rows.items():
            name, series = metric_name(f"{label}/{self.judge}"), _series(_lines(rows), self.judge)
            series = series[-1:] if self.is_timed else series
            found[name] = [(round, statistics.fmean(values)) for round, values in series]
            if len(rows) > 1:
                found[f"{name}_std"] = [(round, deviation(values)) for round, values in series]
        return found

    def view(self) -> str:
        """Return JSON with the columns of MLflow's list of runs: scores and tuned settings. By default the list has no
        metrics. It is not sorted, because MLflow would then separate trials from their sweep. With simulated time, it
        is the horizontal axis of all charts."""
        shown = [ALL_OF.format(name) for name in scores_of(self.folder.facts)] + [self.judge]
        columns = [f"metrics.`{name}`" for name in shown] + [f"params.`{name}`" for name in self.folder.facts.tuned]
        view: dict[str, Any] = {"selectedColumns": columns}
        if self.is_timed:
            axis = {"xAxisKey": "metric", "selectedXAxisMetricKey": CLOCK, "lineSmoothness": 0}
            view["globalLineChartConfig"] = axis
        return json.dumps(view)

    def description(self) -> str:
        """Return Markdown: question, ranked table, notes on significance, and commands to reproduce it."""
        parts = [self.folder.config.get("question", "")]
        if best := [row for rows in self.rows.values() for row in rows]:
            # MLflow would show "@1" as a mention
            cells = table(best, self.judge, self.tuned).markdown().replace("@", "@\N{WORD JOINER}")
            parts += [_wide(cells), not_significant(self.rows, self.judge)]
        parts += [f"The section {ALL} of the experiment's charts compares all rows."]
        return "\n\n".join(filter(None, [*parts, reproduced(self.folder.made)]))


def _wide(markdown: str) -> str:
    """Return a table with a space after every cell: MLflow shows columns without a gap."""
    lines = markdown.splitlines()
    return "\n".join(
        line.replace(" |", "&ensp;|") if line.startswith("| ") and not line.startswith("| ---") else line
        for line in lines
    )


def means(rows: Sequence[Record]) -> Curves:
    """Return the means over rows (seeds) of the judge metric, the first test scores, the training loss and simulated
    time, with the names of a row's run."""
    lines = _lines(rows)
    known = {name for line in lines[0] for name in line}
    names = {name: ALL_OF.format(name) for name in (*scores_of(facts_of(rows[0])), "train_loss")} | {CLOCK: CLOCK}
    return {
        shown: [(round, statistics.fmean(values)) for round, values in _series(lines, name)]
        for name, shown in names.items()
        if name in known
    }


def scores_of(facts: Facts) -> list[str]:
    """Return the names of the judge metric and of the first test scores."""
    return list(dict.fromkeys([facts.judge, *(named(facts.score, of) for of in (*facts.capacities, "mean", "worst"))]))


def over_rounds(found: Curves, started: float) -> list[tuple[str, float, float, int]]:
    """Return the curves as (name, value, time, step), with one second per round."""
    return [(name, value, started + round, round) for name, points in found.items() for round, value in points]


def _lines(rows: Sequence[Record]) -> list[list[Line]]:
    return [RunFolder.open(row["path"]).rounds() for row in rows]


def _series(runs: Sequence[Sequence[Line]], name: str) -> list[tuple[int, list[float]]]:
    """Return (round, values of all runs) for the rounds in which all runs have this metric. A run that ended earlier
    keeps its last value."""
    series = [{line["round"]: line[name] for line in lines if name in line} for lines in runs]
    if not all(series):
        return []
    last = [max(one) for one in series]
    known = [
        round
        for round in sorted(set().union(*series))
        if all(round in one or round > end for one, end in zip(series, last, strict=True))
    ]
    return [(round, [one.get(round, one[end]) for one, end in zip(series, last, strict=True)]) for round in known]


def row_description(rows: Sequence[Record]) -> str:
    one, seeds = rows[0], ", ".join(str(row["seed"]) for row in rows)
    return "\n\n".join(
        [
            f"**{one['title']}**: means over the runs of its best point (seeds {seeds}).",
            f"Point: {one['point'] or 'no tuned settings'}.",
            facts_of(one).judge + ": " + ", ".join(f"{value:.4g}" for value in values_of(rows, facts_of(one).judge)),
        ]
    )


def not_significant(groups: Mapping[str, Sequence[Record]], metric: str) -> str:
    """Return a note on rows without a significant difference from the best; "" for a single row."""
    found, titles = differences(groups, metric), titles_of(row for rows in groups.values() for row in rows)
    alike = [titles[label] for label, difference in found.items() if difference.is_clear is False]
    unknown = [titles[label] for label, difference in found.items() if difference.is_clear is None]
    notes = [f"No significant difference from the best row: {', '.join(alike)}."] if alike else []
    notes += [f"Not tested because of a single seed: {', '.join(unknown)}."] if unknown else []
    return " ".join(notes)


def reproduced(made: Sequence[Made]) -> str:
    """Return Markdown with commands, versions, commits and machines of a run's processes."""
    parts = []
    for one in made:
        versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
        machine = ", ".join([f"{one.cores} cores of {one.cpu}", *one.gpus, one.system])
        commits = f"commit {one.commit}; rayfl's own {one.rayfl_commit}"
        parts.append(f"```sh\n{one.command}\n```\n\n{versions}; {commits}; {machine}.")
    return "\n\n".join(parts)


def data_used(config: Mapping[str, Any]) -> list[DataUsed]:
    data = config.get("data", {})
    name = data.get("of") if data.get("name") == "function" else data.get("name")
    split = {name: config[name] for name in ("data", "partition", "seed") if name in config}
    split["clients"] = config.get("clients", {}).get("count")
    kept = ("holdout", "local_holdout")
    split["evaluation"] = {name: value for name, value in config.get("evaluation", {}).items() if name in kept}
    found = [(name, "data", data), (config.get("partition", {}).get("name"), "partition", split)]
    return [_used(name, context, settings) for name, context, settings in found if name]


def data_of(runs: Iterable[Record]) -> list[DataUsed]:
    """Return the distinct data sets and partitions of several runs."""
    return list(dict.fromkeys(used for run in runs for used in data_used(RunFolder.open(run["path"]).config)))


def _used(name: str, context: str, settings: Mapping[str, Any]) -> DataUsed:
    text = json.dumps(settings, sort_keys=True)
    return DataUsed(name, context, hashlib.sha256(text.encode()).hexdigest()[:16], text)


def metric_name(text: str) -> str:
    """Return a metric name valid in MLflow; other characters become "_"."""
    return re.sub(r"[^\w./: -]", "_", text)
