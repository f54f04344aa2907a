"""What all plots share: a figure with its numbers, colours of rows and of capacities, and axes.

A row's colour is the same in all plots of a folder, and in most other studies: its label alone says which one it would
have, and it gets another only where an earlier label has it (`styles_of`). A capacity has a shade, the largest the
darkest (`shades_of`). Shares are drawn in per cent, as tables have them; the numbers beside a plot are plain.
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
"""Color, linestyle and marker of a label."""

# Okabe and Ito's palette with grey for black, which a dark page would swallow, and three of Paul Tol's muted colours
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#767676", "#882255", "#7A6BD0", "#999933")
LINES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX<>p"

SALT = 1477
"""Of all salts the first with which the rows that our comparisons have most often do not share a colour."""

PAPER: Any = {
    "pdf.fonttype": 42,  # TrueType: text stays text, and journals refuse Type 3
    "svg.fonttype": "none",  # text, too: small, searched and edited
    "svg.hashsalt": "rayfl",
}
FORMATS: Mapping[str, Mapping[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
"""Of plots for papers -> what is left out of them, so that equal plots are equal files."""


@dataclass(frozen=True)
class Plot:
    """A figure, and the numbers that it shows."""

    figure: Figure
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()

    def write(self, path: Path, formats: Iterable[str] = ()) -> None:
        """`path`.png, `path`.csv if it has numbers, and other `FORMATS`; the folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(PAPER):
            self.figure.savefig(path.with_name(f"{path.name}.png"))
            # what was laid out once stays where it is
            self.figure.set_layout_engine("none")
            for ending in formats:
                self.figure.savefig(path.with_name(f"{path.name}.{ending}"), metadata=FORMATS[ending])
        if self.header:
            path.with_name(f"{path.name}.csv").write_text(as_csv(self.header, self.rows))

    def _repr_png_(self) -> bytes:
        """For notebooks."""
        data = io.BytesIO()
        self.figure.savefig(data, format="png")
        return data.getvalue()


def styles_of(labels: Iterable[str]) -> dict[str, Style]:
    """The style of each label: the same in all plots of the same labels, however ranked. Of labels that want one
    colour the first by name has it, and the others the next free ones; when all colours are taken, with other lines."""
    labels = list(labels)
    taken: dict[tuple[int, int], str] = {}
    homeless = []
    for name in sorted(labels):
        home = zlib.crc32(f"{SALT}{name}".encode()) % len(COLORS)
        if taken.setdefault((0, home), name) != name:
            homeless.append((name, home))
    for name, home in homeless:
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
    """The style of each capacity of a study: from dark, the largest, to light. `capacities`: all that it has, so that
    its plots agree."""
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
    """With markers while they are few."""
    marker = {"marker": style["marker"], "markersize": 4} if points <= 12 else {}
    return {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.8} | marker


def said(score: str, split: str) -> str:
    """A score on a split as an axis has it."""
    data = {"clients": "their own test data", "client_validation": "data that they hold out"}
    return f"{score} of clients on {data[split]}" if split in data else f"{SPLITS[split]}{score}".replace("_", " ")


def title_axis(axis: Axis, title: str) -> None:
    """Names an axis. Where the name ends with %, shares are shown in per cent."""
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
    """Axes of equal scales, one a title, in as few lines as are no wider than three."""
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
    """Inside while it is short, to the right of the axes, as high as they are at most, where it would hide lines."""
    _, labels = axes.get_legend_handles_labels()
    if len(labels) > 3:
        size = min(10, 160 / len(labels))
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=size)
    elif labels:
        axes.legend(frameon=False)


def name_points(axes: Axes, points: Iterable[tuple[float, float, str]]) -> None:
    """Writes (x, y, text) beside points, first come first served: a name that would cover another one, or a point,
    or leave the axes, is left out. Call it when all else is drawn."""
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
        for dx, dy, ha, va in PLACES:
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
"""Around a point, in points, with the end of the name that is there."""


def _bare(axes: Axes) -> None:
    """A light grid and no frame."""
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
