"""Matrices of scores (`Score.matrix`), such as confusion matrices, of the last evaluation of runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayfl.metrics import MATRICES, Line, evaluated
from rayfl.results.drawing import Plot, panels

TICKS = 20
"""Maximum number of classes that are all named on the axes, and of classes whose cells show numbers."""


def last_matrices(lines: Sequence[Line]) -> dict[str, dict[float, np.ndarray]]:
    """Return score -> capacity -> matrix of the last evaluation."""
    found: Mapping[str, Mapping[str, list[Any]]] = next((line.get(MATRICES, {}) for line in evaluated(lines)[::-1]), {})
    return {score: {float(c): np.array(m) for c, m in matrices.items()} for score, matrices in found.items()}


def matrix_plots(runs: Sequence[Sequence[Line]]) -> dict[str, Plot]:
    """Return score -> plot of its matrices, summed over runs (seeds), one panel per capacity. Colours are shares of the
    label."""
    found = [last_matrices(lines) for lines in runs]
    scores = dict.fromkeys(score for matrices in found for score in matrices)
    return {score: _plot([matrices[score] for matrices in found if score in matrices]) for score in scores}


def _plot(runs: Sequence[Mapping[float, np.ndarray]]) -> Plot:
    capacities = list(dict.fromkeys(capacity for run in runs for capacity in run))
    totals = {c: np.sum([run[c] for run in runs if c in run], axis=0) for c in capacities}
    figure, grid = panels([f"capacity {capacity:g}" for capacity in capacities], "prediction", "label")
    image = None
    for axes, matrix in zip(grid, totals.values(), strict=True):
        shares = matrix / np.maximum(np.abs(matrix).sum(1, keepdims=True), 1)
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.grid(False)
        if max(matrix.shape) <= TICKS:
            axes.set_xticks(range(matrix.shape[1]))
            axes.set_yticks(range(matrix.shape[0]))
            axes.tick_params(labelsize=7)
    if image is not None:
        figure.colorbar(image, ax=grid, label="share of the label", pad=0.01)
    rows = [
        [f"{capacity:g}", *at, value] for capacity, matrix in totals.items() for at, value in np.ndenumerate(matrix)
    ]
    return Plot(figure, ["capacity", "label", "prediction", "samples"], rows)
