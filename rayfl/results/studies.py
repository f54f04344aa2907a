"""Comparison of studies for `rayfl compare`: tuned rows and the significance of differences."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from rayfl.results.conditions import HARDWARE, Conditions, is_comparable, listed
from rayfl.results.findings import unranked
from rayfl.results.made import Made
from rayfl.results.rows import Record, best_trials, by_label, facts_of, judge_of, point_of, titles_of
from rayfl.results.spread import PAIRED, Difference, by_seed, difference
from rayfl.results.tuned import MISSING, Best, tuned


@dataclass(frozen=True)
class Study:
    """A sweep and its trials."""

    sweep: Record
    trials: Sequence[Record]

    @property
    def runs(self) -> list[Record]:
        return [trial for trial in self.trials if trial["status"] == "finished"]

    def best(self) -> tuple[list[Record], dict[str, Best]]:
        """Return the rows of each label's best point, by the sweep's metric, and the search results."""
        params, paths = self.sweep["params"], facts_of(self.sweep).tuned
        search = params.get("search.metric"), params.get("search.mode", "auto")
        best = best_trials(self.runs, *search)
        return best, tuned(best, self.trials, paths, search[0])


def side_by_side(studies: Sequence[Study], metric: str | None = None) -> tuple[list[Record], str, dict[str, Best]]:
    """Return the best rows of all studies, the metric that ranks them, and the search results if all studies tuned the
    same settings. `metric`: ranks the rows. With several studies, labels begin with the study's name. Rows have their
    `conditions`, so that only rows of equal conditions are tested."""
    best: list[Record] = []
    found: dict[str, Best] = {}
    for before, study in zip(_prefixes(studies), studies, strict=True):
        rows, chosen = study.best()
        best += [
            {**row, "label": before + row["label"], "title": before + row["title"]}
            | {"conditions": Conditions.of(row, study.sweep)}
            for row in rows
        ]
        found |= {before + label: point for label, point in chosen.items()}
    judges = {study.sweep["facts"]["judge"] for study in studies}
    paths = {facts_of(study.sweep).tuned for study in studies}
    judge = metric or (judges.pop() if len(judges) == 1 or not best else judge_of(best))
    return best, judge, found if len(paths) == 1 else {}


def ranking_said(studies: Sequence[Study], metric: str, *, is_chosen: bool = False) -> list[str]:
    """Return a note if studies are judged by another metric than `metric`, or differ in seeds. `is_chosen`: the user
    chose the metric."""
    judges = {name: study.sweep["facts"]["judge"] for name, study in zip(_names(studies), studies, strict=True)}
    others = {name: judge for name, judge in judges.items() if judge != metric and not is_chosen}
    found = [f"{name} is judged by {judge}" for name, judge in others.items()]
    seeds = dict.fromkeys(str(sorted({run["seed"] for run in study.runs})) for study in studies)
    found += [f"seeds differ: {', '.join(seeds)}"] if len(seeds) > 1 else []
    runs = [run for study in studies for run in study.runs]
    hints = [f". Hint: --metric {judge}" for judge in others.values() if all(judge in run for run in runs)]
    return [f"ranked by {metric}; {'; '.join(found)}{''.join(hints[:1])}"] if found else []


def apart_said(studies: Sequence[Study]) -> list[str]:
    """Return a note for each section in which the best rows of different studies differ beside the row (its method, its
    changes in the sweep's file, and tuned settings), one for the search, and one that these rows are not tested."""
    rows: dict[tuple[str, str], Conditions] = {}
    for name, study in zip(_names(studies), studies, strict=True):
        rows |= {(name, row["label"]): Conditions.of(row, study.sweep) for row in study.best()[0]}
    found = [
        (path, name, value)
        for ((one, _), mine), ((other, _), theirs) in combinations(rows.items(), 2)
        if one != other
        for path, values in mine.apart(theirs).items()
        for name, value in zip((one, other), values, strict=True)
    ]
    searches = {
        name: {path: str(value) for path, value in study.sweep["params"].items() if _is_search(path)}
        for name, study in zip(_names(studies), studies, strict=True)
    }
    paths = dict.fromkeys(path for search in searches.values() for path in search)
    differing = [path for path in paths if len({search.get(path) for search in searches.values()}) > 1]
    tried = [(path, name, search.get(path, MISSING)) for path in differing for name, search in searches.items()]
    sections = dict.fromkeys(path.partition(".")[0] for path, _, _ in found)
    why = [f"Rows of studies that differ in {', '.join(sections)} are not tested, and no row is emphasised"]
    return [*listed(found), *listed(tried), *(why if found else [])]


def _is_search(path: str) -> bool:
    """Return whether a parameter of a sweep is one of its search that `ranking_said` does not compare."""
    return path.startswith("search.") and path not in ("search.seeds", "search.metric", "search.mode")


def unranked_said(studies: Sequence[Study]) -> list[str]:
    """Return a note on each row without a ranked trial, by the name of `side_by_side`."""
    return [
        before + note
        for before, study in zip(_prefixes(studies), studies, strict=True)
        for note in unranked(study.best()[0], study.trials, study.sweep["params"]["search.metric"])
    ]


def _prefixes(studies: Sequence[Study]) -> list[str]:
    """Return the beginning of each study's labels: its name if there are several studies."""
    return [f"{name}/" if len(studies) > 1 else "" for name in _names(studies)]


def _names(studies: Sequence[Study]) -> list[str]:
    """Return unique names: labels, otherwise experiments. If neither are unique, the second "quickstart" becomes
    "quickstart (2)"."""
    for key in ("label", "experiment"):
        found = [study.sweep[key] for study in studies]
        if len(set(found)) == len(found):
            return found
    names: list[str] = []
    for study in studies:
        name = study.sweep["label"]
        before = sum(known.partition(" (")[0] == name for known in names)
        names.append(f"{name} ({before + 1})" if before else name)
    return names


def differences_said(best: Sequence[Record], metric: str) -> list[str]:
    """Return a sentence for each pair of comparable rows, of the best row and another or of neighbours, without
    significant difference."""
    groups = by_label(best, metric)
    found = {label: seeds for label, rows in groups.items() if (seeds := by_seed(rows, metric))}
    if not found:
        return []
    labels, titles, amount = list(found), titles_of(best), _amount(best, metric)
    pairs = dict.fromkeys([*((labels[0], other) for other in labels[1:]), *pairwise(labels)])
    between = {
        (one, other): difference(found[one], found[other])
        for one, other in pairs
        if is_comparable(groups[one], groups[other])
    }
    notes = [
        f"No significant difference between {titles[one]} and {titles[other]}: {_why(apart, amount)}"
        for (one, other), apart in between.items()
        if apart.is_clear is False
    ]
    if any(apart.is_clear is None for apart in between.values()):
        notes.append("Differences between rows with one seed each cannot be tested; add seeds to search.seeds")
    return notes


def _why(apart: Difference, amount: Callable[[float], str]) -> str:
    if apart.p is None:
        return "results are equal"
    how = f" over {apart.seeds} seeds, p = {apart.p:.2g} (paired t-test)"
    return amount(abs(apart.by)) + (how if apart.seeds >= PAIRED else f", p = {apart.p:.2g} (t-test)")


def _amount(rows: Sequence[Record], metric: str) -> Callable[[float], str]:
    """Return the formatter of differences: percentage points for fractions, plain numbers otherwise."""
    is_share = facts_of(rows[0]).is_share(metric)
    return (lambda value: f"{100 * value:.2f} points") if is_share else "{:.4g}".format


def machines_said(runs: Iterable[Record], metric: str) -> list[str]:
    """Return notes on runs from several types of machines: that bits may differ, and the largest difference of `metric`
    between runs with equal configuration and seed."""
    made = [(run, Made(**run["made"][0])) for run in runs if run["made"]]
    kinds: list[Made] = []
    for _, one in made:
        if not any(one.same_bits(kind) for kind in kinds):
            kinds.append(one)
    if len(kinds) < 2:
        return []
    runs = [run for run, _ in made]
    notes = [f"Runs used {len(kinds)} types of machines, so bits may differ: {'; '.join(map(_machine, kinds))}"]
    same: dict[tuple, list[tuple[Record, Made]]] = defaultdict(list)
    for run, one in made:
        if math.isfinite(run.get(metric, math.nan)):
            same[_configuration(run)].append((run, one))
    apart = [
        abs(run[metric] - other[metric])
        for group in same.values()
        for i, (run, one) in enumerate(group)
        for other, there in group[:i]
        if not one.same_bits(there)
    ]
    if apart:
        most = _amount(runs, metric)(max(apart))
        notes.append(f"{metric} of runs repeated on another type of machine differs by at most {most}")
    return notes


def _configuration(run: Record) -> tuple:
    return run["seed"], *((name, value) for name, value in point_of(run) if not name.startswith(HARDWARE))


def _machine(made: Made) -> str:
    return ", ".join(
        [made.cpu, *made.gpus, f"torch {made.versions.get('torch')}", f"numpy {made.versions.get('numpy')}"]
    )
