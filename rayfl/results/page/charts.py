"""Interactive plots of the page, as JSON for plotly.js.

Colours, shades, names and units are those of `rayfl.results.drawing`. The script adds light or dark colours and the
page's width.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rayfl.config.plain import short
from rayfl.metrics import SPLITS, label, named
from rayfl.results.drawing import MARKERS, Style
from rayfl.results.findings import Findings
from rayfl.results.folder import RunFolder
from rayfl.results.page.series import AXES, COARSE, curves_of
from rayfl.results.pareto import candidates, front, offers
from rayfl.results.plots import axis_of, counts_in, named_styles, with_unit
from rayfl.results.rows import by_label, capacities, facts_of, titles_of, values_of
from rayfl.results.tuned import names_of, responses

DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
NAMES = "circle square diamond triangle-up triangle-down cross x triangle-left triangle-right pentagon"
SYMBOLS = dict(zip(MARKERS, NAMES.split(), strict=True))
HOVER = "%{y:.4g} at %{x}<extra>%{fullData.name}</extra>"
QUANTILES = 501
"""Number of quantiles that replace a larger number of clients."""
MOST_CELLS = 2_000_000
"""Maximum size of a label map; larger ones are only in plots/."""


@dataclass(frozen=True)
class Chart:
    """A plot: its texts, and its data for plotly.js or the script."""

    id: str
    section: str
    title: str
    text: str
    data: Mapping[str, Any]
    height: int = 420
    controls: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of a menu -> choices."""

    @property
    def described(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("id", "section", "title", "text", "height", "controls")}


def charts_of(found: Findings) -> list[Chart]:
    styles = named_styles(found.best)
    makers = (_curves, _by_capacity, _pareto, _clients)
    charts = [chart for make in makers for chart in [make(found, styles)] if chart is not None]
    return [*charts, *_settings(found), *_labels(found.folder)]


def _curves(found: Findings, styles: Mapping[str, Style]) -> Chart | None:
    curves = curves_of(found)
    if not curves.best:
        return None
    used = [curve for of_metric in curves.best.values() for curve in of_metric.values()]
    axes = [cost for cost in AXES if any(any(curve[cost.unit]) for curve in used)]
    data = {
        "kind": "curves",
        "metrics": {
            title: [{"name": name, **_line(styles[name]), **curve} for name, curve in curves.best[metric].items()]
            for metric, title in curves.titles.items()
        },
        "axes": [{"of": "x", "title": "round"}, *({"of": cost.unit, "title": cost.axis} for cost in axes)],
        "chosen": curves.titles.get(found.metric, ""),
        "others": [{"name": name, "point": point, **_line(styles[name]), **c} for name, point, c in curves.others],
    }
    text = "Means over the seeds of every row's best point, with bands of ± one standard deviation."
    if curves.others:
        text += f" For {data['chosen']}, thin lines show all other trials of the search, with at most {COARSE} rounds."
    if curves.left_out:
        text += f" Left out because of their size: {', '.join(curves.left_out)} (see metrics.jsonl of each run)."
    controls = {"metric": list(curves.titles.values()), "axis": [axis["title"] for axis in data["axes"]]}
    return Chart("plot-curves", "curves", "Over rounds", text, data, 480, controls)


def _by_capacity(found: Findings, styles: Mapping[str, Style]) -> Chart | None:
    facts, titles, known = facts_of(found.best[0]), titles_of(found.best), capacities(found.best)
    if len(known) < 2:
        return None
    unit = with_unit(facts.score, facts, facts.score)
    factor = 100 if unit.endswith("%") else 1
    traces = []
    for of, rows in by_label(found.best, named(facts.score, "mean")).items():
        values = {c: np.array(some) * factor for c in known if (some := values_of(rows, named(facts.score, c)))}
        if values:
            spread = [float(some.std(ddof=1)) if len(some) > 1 else 0.0 for some in values.values()]
            traces.append(
                _trace(titles[of], styles[titles[of]], list(values), [float(some.mean()) for some in values.values()])
                | ({"error_y": {"array": spread, "thickness": 1}} if any(spread) else {})
            )
    axis = {"title": "capacity of the client", "type": "log", "tickvals": known, "ticktext": [*map(label, known)]}
    text = "Score of each capacity's network on the global test set, mean and standard deviation over seeds."
    return Chart("plot-capacities", "curves", "By capacity", text, _figure(traces, axis, {"title": unit}))


def _pareto(found: Findings, styles: Mapping[str, Style]) -> Chart | None:
    facts = facts_of(found.best[0])
    _, split = facts.about(found.metric) or ("", "test")
    rows, better = candidates(found.best, found.finished), facts.scores[facts.score]
    some = offers(rows, split)
    if len({offer.macs for offer in some}) < 2:
        return None
    unit = with_unit(f"{SPLITS[split]}{facts.score}".replace("_", " "), facts, facts.score)
    factor = 100 if unit.endswith("%") else 1
    best, titles = front(some, better), titles_of(rows)
    traces: list[dict[str, Any]] = [
        {
            "x": [offer.macs for offer in best],
            "y": [factor * offer.value for offer in best],
            "name": "front",
            "mode": "lines",
            "line": {"color": "#888888", "width": 1},
            "hoverinfo": "skip",
        }
    ]
    for of in dict.fromkeys(offer.label for offer in some):
        # the legend takes the style of the first point
        own = sorted((offer for offer in some if offer.label == of), key=lambda offer: offer not in best)
        style = styles[titles[of]]
        trace = _trace(titles[of], style, [o.macs for o in own], [factor * o.value for o in own])
        marker = {"size": 11, "opacity": [1.0 if offer in best else 0.45 for offer in own]}
        named = {
            "mode": "markers",
            "marker": trace["marker"] | marker,
            "text": [f"{o.parameters:,} parameters, capacity {label(o.capacity)}, {o.point}" for o in own],
            "hovertemplate": "%{y:.4g} at %{x:.3s}<br>%{text}<extra>%{fullData.name}</extra>",
        }
        traces.append(trace | named)
    axis = {"title": "multiply-adds of one sample", "type": "log", "tickformat": "~s", "dtick": "D2"}
    text = "Cost and score of networks. The line connects the Pareto front; faint points are dominated."
    return Chart("plot-pareto", "curves", "Score and cost", text, _figure(traces, axis, {"title": unit}))


def _clients(found: Findings, styles: Mapping[str, Style]) -> Chart | None:
    """Return the chart of the scores of all clients and seeds of a row; of many clients only quantiles."""
    facts, titles = facts_of(found.best[0]), titles_of(found.best)
    unit = axis_of(facts, named(facts.score, "mean", "clients"))
    factor, traces = 100 if unit.endswith("%") else 1, []
    for of, rows in by_label(found.best, found.judge).items():
        runs = [scores["score"] for row in rows if len(scores := RunFolder.open(row["path"]).client_scores)]
        if not runs:
            continue
        scores = factor * np.concatenate(runs)
        shown = scores if len(scores) <= QUANTILES else np.quantile(scores, np.linspace(0, 1, QUANTILES))
        color = styles[titles[of]]["color"]
        traces.append(
            {
                "type": "violin",
                "name": titles[of],
                "x": shown.tolist(),
                "orientation": "h",
                "points": False,
                "spanmode": "hard",
                "box": {"visible": True},
                "meanline": {"visible": True},
                "line": {"color": color, "width": 1.5},
                "fillcolor": f"{color}40",
                "hoverinfo": "x+name",
            }
        )
    if not traces:
        return None
    text = "Scores of clients on their own test data, over all seeds; boxes show quartiles, dashed lines the means."
    figure = _figure(traces, {"title": unit}, {"autorange": "reversed", "automargin": True}, showlegend=False)
    return Chart("plot-clients", "clients", "Over clients", text, figure, 130 + 75 * len(traces))


def _settings(found: Findings) -> Iterator[Chart]:
    """Iterate over charts of the search metric by tuned setting."""
    titles, styles, names = titles_of(found.finished), named_styles(found.finished), names_of(found.paths)
    unit = axis_of(facts_of(found.best[0]), found.metric)
    factor = 100 if unit.endswith("%") else 1
    for path in found.paths:
        heights = responses(found.finished, path, found.metric, found.mode)
        values = list(dict.fromkeys(value for some in heights.values() for value in some))
        if len(values) < 2:
            continue
        numbers = [value for value in values if not isinstance(value, str)]
        wide = len(numbers) == len(values) and min(numbers) > 0 and max(numbers) >= 8 * min(numbers)
        axis: dict[str, Any] = {"title": names[path], "type": "log" if wide else "-"}
        if len(values) <= 10:
            axis |= {"tickvals": values, "ticktext": [short(value) for value in values]}
        traces = [
            _trace(titles[of], styles[titles[of]], list(some), [factor * height for height in some.values()])
            for of, some in heights.items()
        ]
        text = "Search metric by value of this setting: the best of all points with the value."
        figure = _figure(traces, axis, {"title": unit})
        yield Chart(f"plot-tuned-{path}", "search", f"Over {names[path]}", text, figure, 360)


def _labels(folder: Path) -> Iterator[Chart]:
    """Iterate over charts of classes per client, from the CSV files of the label plots."""
    for name, counts in counts_in(folder / "plots").items():
        clients, classes = counts.shape
        if counts.size > MOST_CELLS:
            continue
        trace = {
            "type": "heatmap",
            "x": list(range(clients)),
            "y": [str(i) for i in range(classes)],
            "z": counts.T.tolist(),
            "colorscale": [[0, "rgba(0,114,178,0)"], [1, "rgb(0,114,178)"]],
            "hovertemplate": "client %{x}, class %{y}: %{z} samples<extra></extra>",
            "colorbar": {"title": "samples", "thickness": 12},
        }
        of = name.removeprefix("labels").removeprefix("-")
        title = f"Classes per client, {of}" if of else "Classes per client"
        height = 200 + min(420, 18 * classes)
        figure = _figure([trace], {"title": "client"}, {"title": "class", "type": "category"})
        text = f"Training samples of each class at each of {clients:,} clients."
        yield Chart(f"plot-{name}", "clients", title, text, figure, height)


def _trace(name: str, style: Style, x: Sequence[Any], y: Sequence[float]) -> dict[str, Any]:
    marker = {"symbol": SYMBOLS[style["marker"]], "color": style["color"], "size": 8}
    line = {"color": style["color"], "dash": DASHES[style["linestyle"]], "width": 2}
    look = {"mode": "lines+markers", "marker": marker, "line": line}
    return {"name": name, "x": list(x), "y": list(y), "hovertemplate": HOVER, **look}


def _line(style: Style) -> dict[str, str]:
    return {"color": style["color"], "dash": DASHES[style["linestyle"]]}


def _figure(
    traces: Sequence[Mapping[str, Any]], x: Mapping[str, Any], y: Mapping[str, Any], **layout: Any
) -> dict[str, Any]:
    axes = {name: {**axis, "title": {"text": axis.get("title", "")}} for name, axis in (("xaxis", x), ("yaxis", y))}
    return {"kind": "plotly", "traces": list(traces), "layout": axes | layout}
