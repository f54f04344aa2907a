"""Scores of clients over time: a file per evaluation (`clients/round-000010.npy`), their table and their plot.

A run writes them with `run.client_scores: all`. Each file has one row per client (`rayfl.metrics.client_table`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rayfl.metrics import CLIENT_SCORES, Line, client_table, evaluated
from rayfl.results import files
from rayfl.results.summary import Facts

if TYPE_CHECKING:
    import pandas as pd

    from rayfl.results.drawing import Plot, Style

FOLDER = "clients"
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Quantiles of the plot: worst client, ..., median, ..., best client."""


def write(folder: Path, round: int, table: np.ndarray) -> None:
    """Write the table of an evaluated round into a run's folder."""
    (folder / FOLDER).mkdir(exist_ok=True)
    files.write_array(folder / FOLDER / f"round-{round:06}.npy", table)


def truncate_after(folder: Path, round: int) -> None:
    """Remove the tables of rounds after `round`."""
    for later, path in _tables(folder).items():
        if later > round:
            path.unlink()


def read(folder: Path, facts: Facts) -> dict[int, np.ndarray]:
    """Return round -> table of all evaluated rounds of a run that kept them."""
    return {round: files.read_array(path, client_table(facts.scores)) for round, path in _tables(folder).items()}


def frame(folder: Path, facts: Facts, lines: Sequence[Line]) -> "pd.DataFrame":
    """Return all tables as one, with the round as first column; without tables the last scores (`clients.npy`)."""
    import pandas as pd

    known = read(folder, facts)
    if not known and (seen := evaluated(lines)):
        scores = files.read_array(folder / "clients.npy", CLIENT_SCORES)
        return pd.DataFrame({"round": seen[-1]["round"], "client": scores["client"], facts.score: scores["score"]})
    rows = [pd.DataFrame(table) for table in known.values()]
    table = pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=client_table(facts.scores).names)
    table.insert(0, "round", np.repeat(list(known), [len(table) for table in known.values()]).astype(int))
    return table


def _tables(folder: Path) -> dict[int, Path]:
    """Return round -> file."""
    found = sorted((folder / FOLDER).glob("round-*.npy"))
    return {int(path.stem.partition("-")[2]): path for path in found}


def over_rounds(
    runs: Mapping[str, Sequence[Mapping[int, np.ndarray]]], score: str, axis: str, styles: "Mapping[str, Style]"
) -> "Plot | None":
    """Plot quantiles of the clients' scores over rounds, one panel per row: the median, bands of the middle 50 and 80 %
    of the clients, and dotted lines of the worst and the best. `runs`: name of a row -> tables of each seed (`read`),
    which are pooled. None without two evaluated rounds in any row."""
    from rayfl.results.drawing import Plot, panels

    found = {name: _quantiles(tables, score) for name, tables in runs.items()}
    found = {name: (rounds, values) for name, (rounds, values) in found.items() if len(rounds) > 1}
    if not found:
        return None
    figure, grid = panels(list(found), "round", axis)
    rows: list[list[Any]] = []
    for axes, (name, (rounds, values)) in zip(grid, found.items(), strict=True):
        color = styles[name]["color"]
        middle = len(QUANTILES) // 2
        for inside, alpha in ((1, 0.15), (2, 0.25)):
            axes.fill_between(rounds, values[inside], values[-1 - inside], color=color, alpha=alpha, linewidth=0)
        for end in (0, -1):
            axes.plot(rounds, values[end], color=color, linestyle=":", linewidth=1)
        axes.plot(rounds, values[middle], color=color, linewidth=1.8)
        rows += [[name, round, *of] for round, of in zip(rounds, values.T.tolist(), strict=True)]
    header = ["method", "round", *(f"{score} q{100 * quantile:g}" for quantile in QUANTILES)]
    return Plot(figure, header, rows)


def _quantiles(runs: Sequence[Mapping[int, np.ndarray]], score: str) -> tuple[list[int], np.ndarray]:
    """Return the rounds [R] that all runs have, and the quantiles [Q, R] of all finite scores."""
    rounds = sorted(set.intersection(*(set(tables) for tables in runs))) if runs else []
    pooled = [np.concatenate([tables[round][score] for tables in runs]) for round in rounds]
    finite = {round: values[np.isfinite(values)] for round, values in zip(rounds, pooled, strict=True)}
    finite = {round: values for round, values in finite.items() if len(values)}
    return list(finite), np.array([np.quantile(values, QUANTILES) for values in finite.values()]).T
