"""Shared parts of plots: figures with their numbers, colours of rows and capacities, and axes.

A row's colour follows from its label, so it is equal in all plots of a folder and in most studies; it changes only if
another label takes the same colour (`styles_of`). Capacities have shades, darkest for the largest (`shades_of`). Axes
show fractions in per cent; the CSV files contain plain numbers.
"""

import io
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from rayfl.metrics import SPLITS
from rayfl.results.cells import as_csv

Style = Mapping[str, Any]
"""Colour, line style and marker of a label."""

# Okabe and Ito's palette with grey for black, which is invisible on dark pages, and three of Paul Tol's muted colours
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#767676", "#882255", "#7A6BD0", "#999933")
LINES = ("-", "--", "-.", ":")
HATCHES = dict(zip(LINES, ("", "//", "xx", ".."), strict=True))
"""Line style -> hatch of bars."""
MARKERS = "osD^vPX<>p"

SALT = 1477
"""First salt that gives the most frequent labels of our comparisons different colours."""

PAPER: Any = {
    "pdf.fonttype": 42,  # TrueType: text stays text; journals reject Type 3
    "svg.fonttype": "none",  # text stays searchable and editable
    "svg.hashsalt": "rayfl",
}
FORMATS: Mapping[str, Mapping[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
"""Format of plots for papers -> metadata removed so that equal plots are equal files."""


@dataclass(frozen=True)
class Plot:
    """A figure and its numbers."""

    figure: Figure
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()

    def write(self, path: Path, formats: Iterable[str] = ()) -> None:
        """Write `path`.png, `path`.csv if there are numbers, and other `FORMATS`; create the folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(PAPER):
            self.figure.savefig(path.with_name(f"{path.name}.png"))
            # all formats share the layout of the first
            self.figure.set_layout_engine("none")
            for ending in formats:
                self.figure.savefig(path.with_name(f"{path.name}.{ending}"), metadata=FORMATS[ending])
        if self.header:
            path.with_name(f"{path.name}.csv").write_text(as_csv(self.header, self.rows), encoding="utf-8")

    def _repr_png_(self) -> bytes:
        """For notebooks."""
        data = io.BytesIO()
        self.figure.savefig(data, format="png")
        return data.getvalue()


def styles_of(labels: Iterable[str]) -> dict[str, Style]:
    """Return label -> style, independent of order. If labels share a colour, the first by name keeps it and others get
    the next free one; once all colours are taken, line styles differ."""
    labels = list(labels)
    taken: dict[tuple[int, int], str] = {}
    displaced = []
    for name in sorted(labels):
        home = zlib.crc32(f"{SALT}{name}".encode()) % len(COLORS)
        if taken.setdefault((0, home), name) != name:
            displaced.append((name, home))
    for name, home in displaced:
        wanted = ((line, (home + step) % len(COLORS)) for line in count() for step in range(len(COLORS)))
        taken[next(place for place in wanted if place not in taken)] = name
    places = {name: place for place, name in taken.items()}
    return {
        name: {
            "color": COLORS[color],
            "linestyle": LINES[line % len(LINES)],
            "marker": MARKERS[(color + line) % len(MARKERS)],
        }
        for name in labels
        for line, color in [places[name]]
    }


def shades_of(capacities: Iterable[float]) -> dict[float, Style]:
    """Return capacity -> style, from dark (the largest) to light. `capacities`: all of the study."""
    ranked = sorted(set(capacities), reverse=True)
    shades = matplotlib.colormaps["viridis"]
    return {
        capacity: {
            "color": to_hex(shades(0.85 * i / max(1, len(ranked) - 1))),
            "linestyle": "-",
            "marker": MARKERS[i % len(MARKERS)],
        }
        for i, capacity in enumerate(ranked)
    }


def line_of(style: Style, points: int) -> dict[str, Any]:
    """Return the options of a line; with markers for at most 12 points."""
    marker = {"marker": style["marker"], "markersize": 4} if points <= 12 else {}
    return {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.8} | marker


def axis_name(score: str, split: str) -> str:
    """Return the axis title of a score on a split, without unit."""
    data = {"clients": "their own test data", "client_validation": "their own validation data"}
    return f"{score} of clients on {data[split]}" if split in data else f"{SPLITS[split]}{score}".replace("_", " ")


def title_axis(axis: Axis, title: str) -> None:
    """Set the title of an axis. If it ends with %, fractions are shown in per cent."""
    axis.set_label_text(title)
    _show(axis, title)


def _show(axis: Axis, title: str) -> None:
    factor = 100 if title.endswith("%") else 1
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{factor * value:g}"))


def new_figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    _bare(axes)
    return figure, axes


def panels(titles: Sequence[str], xlabel: str, ylabel: str) -> tuple[Figure, list[Axes]]:
    """Return a figure and one axes per title with shared scales, at most three per line."""
    lines = math.ceil(len(titles) / 3)
    columns = math.ceil(len(titles) / lines)
    size = (7, 4.2) if len(titles) == 1 else (3.1 * columns + 1, 2.4 * lines + 0.4)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, title in zip(grid, titles, strict=False):
        _bare(axes)
        axes.set_title(title, fontsize=10)
        _show(axes.xaxis, xlabel)
        _show(axes.yaxis, ylabel)
    for i, axes in enumerate(grid[: len(titles)]):
        axes.tick_params(labelbottom=i + columns >= len(titles))
    for axes in grid[len(titles) :]:
        axes.remove()
    figure.supxlabel(xlabel, fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    return figure, list(grid[: len(titles)])


def legend(axes: Axes) -> None:
    """Draw the legend inside the axes for up to three labels, otherwise to their right."""
    _, labels = axes.get_legend_handles_labels()
    if len(labels) > 3:
        size = min(10, 160 / len(labels))
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=size)
    elif labels:
        axes.legend(frameon=False)


def name_points(axes: Axes, points: Iterable[tuple[float, float, str]]) -> None:
    """Write text next to points (x, y, text), in order of priority. Texts that would cover another text or a point, or
    leave the axes, are left out; points may have none. Call it after everything else is drawn."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    inside, points = axes.get_window_extent(renderer), list(points)
    # a marker's radius
    radius = 3 * figure.dpi / 72
    marks = [axes.transData.transform((x, y)) for x, y, _ in points]
    taken = [Bbox.from_extents(x - radius, y - radius, x + radius, y + radius) for x, y in marks]
    for x, y, text in points:
        for dx, dy, ha, va in PLACES if text else ():
            name = axes.annotate(
                text, (x, y), (dx, dy), textcoords="offset points", ha=ha, va=va, fontsize=8, color="#444444"
            )
            name.set_in_layout(False)
            box = name.get_window_extent(renderer)
            if inside.x0 <= box.x0 and box.x1 <= inside.x1 and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            name.remove()


PLACES = ((-4, 5, "right", "bottom"), (4, -5, "left", "top"), (-4, -5, "right", "top"), (4, 5, "left", "bottom"))
"""Offsets of a text from its point, in points, with its alignment."""


def _bare(axes: Axes) -> None:
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
