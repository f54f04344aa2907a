"""Texts and tables of the page, as values of the template."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from rayfl.config import ConfigError
from rayfl.config.plain import write_yaml
from rayfl.methods import METHODS_KIND
from rayfl.metrics import label, named
from rayfl.results import published
from rayfl.results.answers import answers_of
from rayfl.results.cells import human_flops, human_time, percent, plain
from rayfl.results.findings import Findings
from rayfl.results.folder import RunFolder
from rayfl.results.made import Made
from rayfl.results.rows import Record, by_label, facts_of, mean_of, titles_of, values_of
from rayfl.results.tables import Table, best_table, table

Pairs = list[tuple[str, str]]


def contents_of(found: Findings) -> dict[str, Any]:
    runs = [RunFolder.open(record["path"]) for record in found.best]
    section, changed = published.from_config(found.config)
    is_local = found.judge.startswith("local_")
    return {
        "title": found.run.title or found.run.label if found.run else found.folder.name,
        "question": found.config.get("question", ""),
        "about": _about(found),
        "results": table(found.best, found.judge, found.tuned),
        "best": best_table(found.best, found.judge) if is_local else None,
        "trials": _trials(found) if len(found.trials) > len(found.best) else None,
        "costs": _costs(found),
        "answers": answers_of(found.best, found.judge),
        "papers": _papers(found),
        "changed": changed,
        "published": published.table(section, found.best) if section else None,
        "source": " ".join(published.caption(section, [])) if section else "",
        "config": _yaml(found, runs),
        "made": _made([*([found.run] if found.run else []), *runs]),
    }


def _about(found: Findings) -> Pairs:
    """Return name and text of the facts at the top of the page."""

    def each(of: Callable[[Record], str]) -> str:
        """Return the different texts of the rows."""
        return "; ".join(dict.fromkeys(filter(None, map(of, found.best))))

    def param(path: str, form: str = "{}") -> str:
        return each(lambda row: form.format(row["params"][path]) if row["params"].get(path) else "")

    seeds = sorted({record["seed"] for record in found.best})
    started = min(RunFolder.open(record["path"]).started for record in found.best)
    about = {
        "data": param("data.name"),
        "partition": param("partition.name"),
        "model": param("model.name"),
        "clients": each(lambda row: f"{facts_of(row).clients:,}"),
        "per round": param("clients.cohort", "{:,} clients"),
        "rounds": each(lambda row: f"{facts_of(row).rounds:,}"),
        "capacities": each(lambda row: ", ".join(map(label, facts_of(row).trained))),
        "seeds": ", ".join(map(str, seeds)),
        "runs": f"{len(found.trials):,}",
        "compared by": found.judge.replace("_", " "),
        "tuned by": found.metric.replace("_", " ") if found.paths else "",
        "started": datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    return [(name, text) for name, text in about.items() if text]


def _trials(found: Findings) -> Table:
    """Return the table of all runs, the best of each row first."""
    titles, facts = titles_of(found.trials), facts_of(found.best[0])
    cells = {metric: percent if facts.is_share(metric) else plain for metric in (found.metric, found.judge)}
    best = {record["id"] for record in found.best}
    rows = []
    for name, runs in by_label(found.trials, found.metric).items():
        for record in sorted(runs, key=lambda run: (run["id"] not in best, run["point"], run["seed"])):
            values = [cell(values_of([record], metric)) for metric, cell in cells.items()]
            place = [titles[name], record["point"] or "–", str(record["seed"]), record["status"]]
            rows.append([*place, str(record.get("rounds", 0)), *values, human_time(record.get("seconds", 0))])
    metrics = [f"{metric.replace('_', ' ')}{' %' if facts.is_share(metric) else ''}" for metric in cells]
    return Table(["method", "point", "seed", "status", "rounds", *metrics, "time"], rows)


def _costs(found: Findings) -> Table | None:
    """Return the costs of every capacity's network; masked networks: of the remaining part, mean over seeds."""
    known = sorted({c for record in found.best for c in facts_of(record).capacities}, reverse=True)
    known = [c for c in known if any(named("macs", c) in record for record in found.best)]
    if not known:
        return None
    titles, rows = titles_of(found.best), []
    for of, runs in by_label(found.best, found.judge).items():
        cells = []
        for capacity in known:
            names = named("parameters", capacity), named("macs", capacity)
            cells += [human_flops(mean_of(runs, name)) if values_of(runs, name) else "–" for name in names]
        rows.append([titles[of], *cells])
    return Table(["method", *(f"{what} @{label(c)}" for c in known for what in ("parameters", "MACs"))], rows)


def _papers(found: Findings) -> list[dict[str, Any]]:
    """Return summary, paper and departures of every method, from the docstring of its module."""
    names: dict[str, list[str]] = {}
    titles = titles_of(found.best)
    for record in found.best:
        rows = names.setdefault(str(record["params"].get("method.name", "")), [])
        rows += [titles[record["label"]]] if titles[record["label"]] not in rows else []
    return [{"rows": rows, **parsed(document_of(name))} for name, rows in names.items() if name]


def document_of(method: str) -> str:
    """Return the docstring of a method's module; "" if its class cannot be imported."""
    try:
        return sys.modules[METHODS_KIND.find(method, "method").__module__].__doc__ or ""
    except ConfigError:
        return ""


def parsed(document: str) -> dict[str, Any]:
    """Return summary, papers and numbered departures of a method's docstring."""
    first, *others = document.strip().split("\n\n")
    paper = next((part for part in others if part.startswith("Paper")), "")
    _, _, listed = document.partition("\nDepartures:\n")
    items = re.split(r"(?m)^\d+\. ", listed.split("\n\n")[0])[1:]
    return {
        "what": " ".join(first.split()),
        "paper": " ".join(paper.split()),
        "departures": [" ".join(item.split()) for item in items],
    }


def _yaml(found: Findings, runs: Sequence[RunFolder]) -> str:
    """Return the configuration of the sweep or run, without published numbers, which have their own table."""
    hidden = ("published", "question")
    config = found.config or (runs[0].config if len(runs) == 1 else {})
    return write_yaml({k: v for k, v in config.items() if k not in hidden and v != {}}, width=100)


def _made(runs: Sequence[RunFolder]) -> list[Pairs]:
    return [list(pairs) for pairs in dict.fromkeys(_described(made) for run in runs for made in run.made)]


def _described(made: Made) -> tuple[tuple[str, str], ...]:
    gpus = ", ".join(f"{count} x {name}" for name, count in Counter(made.gpus).items())
    pairs = {
        "command": made.command,
        "versions": ", ".join(f"{name} {version}" for name, version in made.versions.items()),
        "commit of rayfl": made.rayfl_commit,
        "commit of the working folder": made.commit,
        "processor": f"{made.cpu}, {made.cores} cores",
        "GPU": gpus or "none",
        "system": made.system,
        "machine": f"{made.host}, {made.user}",
    }
    return tuple(pairs.items())
