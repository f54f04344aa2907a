"""What all plots share: a figure with its numbers, colours by label, and axes."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rayfl.metrics import SPLITS
from rayfl.results.tables import as_csv

Style = Mapping[str, Any]
"""Color, linestyle and marker of a label."""

# Okabe and Ito's palette, darkest first; then the same with another line
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX"


@dataclass(frozen=True)
class Plot:
    """A figure, and the numbers that it shows."""

    figure: Figure
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()

    def write(self, path: Path) -> None:
        """`path`.png, and `path`.csv if it has numbers; the folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.figure.savefig(path.with_name(f"{path.name}.png"))
        if self.header:
            path.with_name(f"{path.name}.csv").write_text(as_csv(self.header, self.rows))

    def _repr_png_(self) -> bytes:
        """For notebooks."""
        data = io.BytesIO()
        self.figure.savefig(data, format="png")
        return data.getvalue()


def styles_of(labels: Iterable[str]) -> dict[str, Style]:
    """The style of each label: the same in all plots of the same labels, however ranked."""
    places = {label: i for i, label in enumerate(sorted(labels))}
    return {
        label: {
            "color": COLORS[i % len(COLORS)],
            "linestyle": LINES[i // len(COLORS) % len(LINES)],
            "marker": MARKERS[i % len(MARKERS)],
        }
        for label in labels
        for i in [places[label]]
    }


def line_of(style: Style, points: int) -> dict[str, Any]:
    """With markers while they are few."""
    marker = {"marker": style["marker"], "markersize": 4} if points <= 12 else {}
    return {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.8} | marker


def said(score: str, split: str) -> str:
    """A score on a split as an axis has it."""
    data = {"clients": "their own test data", "client_validation": "data that they hold out"}
    return f"{score} of clients on {data[split]}" if split in data else f"{SPLITS[split]}{score}".replace("_", " ")


def new_figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    _bare(axes)
    return figure, axes


def panels(titles: Sequence[str], xlabel: str, ylabel: str) -> tuple[Figure, list[Axes]]:
    """Axes of equal scales, one a title, in as few lines as are no wider than three."""
    lines = math.ceil(len(titles) / 3)
    columns = math.ceil(len(titles) / lines)
    size = (7, 4.2) if len(titles) == 1 else (3.1 * columns + 1, 2.4 * lines + 0.4)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, title in zip(grid, titles, strict=False):
        _bare(axes)
        axes.set_title(title, fontsize=10)
    for i, axes in enumerate(grid[: len(titles)]):
        axes.tick_params(labelbottom=i + columns >= len(titles))
    for axes in grid[len(titles) :]:
        axes.remove()
    figure.supxlabel(xlabel, fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    return figure, list(grid[: len(titles)])


def legend(axes: Axes) -> None:
    """Inside while it is short, to the right of the axes, as high as they are at most, where it would hide lines."""
    _, labels = axes.get_legend_handles_labels()
    if len(labels) > 3:
        size = min(10, 160 / len(labels))
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=size)
    elif labels:
        axes.legend(frameon=False)


def _bare(axes: Axes) -> None:
    """A light grid and no frame."""
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
