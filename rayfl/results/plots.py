"""Plots of runs, from lines or rows. Functions return None if there is nothing to plot.

`curves`: lines of every run by the name of its row. Rows are drawn as means over their runs (seeds), with bands of ± a
standard deviation. Styles, colours and names are equal in all plots of the same rows.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from rayfl.config.plain import short
from rayfl.metrics import UPDATES, Line, label, named
from rayfl.results import clients
from rayfl.results.budgets import COSTS, Cost, with_spent
from rayfl.results.cells import percent, plain
from rayfl.results.drawing import (
    HATCHES,
    Plot,
    Style,
    axis_name,
    legend,
    line_of,
    new_figure,
    panels,
    styles_of,
    title_axis,
)
from rayfl.results.folder import RunFolder
from rayfl.results.rows import Record, by_label, capacities, facts_of, judge_of, titles_of, values_of
from rayfl.results.spread import deviation
from rayfl.results.summary import Better, Facts
from rayfl.results.tuned import names_of, responses

Curves = Mapping[str, Sequence[Sequence[Line]]]
"""Label -> its runs -> their lines."""

LABEL = 0.12
"""Width of a tick's label, as a fraction of the axis."""


def plots_of(records: Sequence[Record], metric: str | None = None) -> dict[str, Plot]:
    """Return name -> plot of a comparison of runs on disk. Default metric, also if no round has `metric`: their judge
    metric."""
    metric = metric or judge_of(records)
    groups, titles, styles = by_label(records, metric), titles_of(records), named_styles(records)
    facts = facts_of(records[0])
    runs = {titles[name]: [RunFolder.open(row["path"]) for row in rows] for name, rows in groups.items()}
    curves = {name: [run.rounds() for run in some] for name, some in runs.items()}
    scores = {name: [found["score"] for run in some if len(found := run.client_scores)] for name, some in runs.items()}
    if not any(metric in line for runs in curves.values() for line in chain(*runs)):
        # results such as best_accuracy_mean have no curve
        metric = judge_of(records)
    axis, of_clients = axis_of(facts, metric), axis_of(facts, named(facts.score, "mean", "clients"))
    tables = {name: [clients.read(run.path, run.facts) for run in some] for name, some in runs.items()}
    found = {
        "learning_curves": learning_curves(curves, metric, axis, styles),
        **{
            f"accuracy_by_{name}": by_cost(curves, metric, axis, styles, cost) if len(curves) > 1 else None
            for name, cost in COSTS.items()
        },
        "accuracy_by_capacity": by_capacity(records, styles),
        "curves_by_capacity": curves_by_capacity(curves, records, styles) if len(curves) > 1 else None,
        "round_times": round_times(curves, styles),
        "participation": participation(curves, styles),
        "client_accuracy": client_histogram(scores, of_clients, styles) if all(scores.values()) else None,
        "clients_over_rounds": clients.over_rounds(tables, facts.score, of_clients, styles),
    }
    return {name: plot for name, plot in found.items() if plot is not None}


def axis_of(facts: Facts, metric: str) -> str:
    """Return the axis title of a metric, with its unit."""
    score, split = facts.about(metric) or (metric, "test")
    name = axis_name(score, split) if metric == named(score, "mean", split) else metric.replace("_", " ")
    return with_unit(name, facts, score)


def with_unit(name: str, facts: Facts, score: str) -> str:
    return f"{name} %" if facts.scores.get(score) == "max" else name


def named_styles(records: Iterable[Record]) -> dict[str, Style]:
    """Return name of a row -> style of its label."""
    titles = titles_of(records)
    return {titles[of]: style for of, style in styles_of(titles).items()}


def learning_curves(curves: Curves, metric: str, axis: str, styles: Mapping[str, Style], **look: Any) -> Plot | None:
    """Plot `metric` over rounds: mean ± standard deviation over runs. None without a point. `axis`: its title; `look`:
    e.g. yscale, ylim."""
    header, rows = _over_rounds(curves, metric)
    if not rows:
        return None
    figure, axes = new_figure()
    for name, runs in curves.items():
        _draw(axes, runs, metric, styles[name], name)
    axes.set(xlabel="round", **look)
    title_axis(axes.yaxis, axis)
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.minorticks_off()
    legend(axes)
    return Plot(figure, header, rows)


def curves_by_capacity(curves: Curves, records: Sequence[Record], styles: Mapping[str, Style]) -> Plot | None:
    """Plot the score of every trained capacity's network over rounds, one panel per capacity (FIARSE, arXiv 2407.19389,
    figure 3). None for one capacity or one row."""
    facts = facts_of(records[0])
    score, known = facts.score, [capacity for capacity in capacities(records) if capacity in trained(records)]
    keys = [named(score, capacity) for capacity in known]
    curves = {name: runs for name, runs in curves.items() if any(key in line for key in keys for line in chain(*runs))}
    if len(known) < 2 or len(curves) < 2:
        return None
    titles = [f"capacity {label(capacity)}" for capacity in known]
    figure, grid = panels(titles, "round", with_unit(score, facts, score))
    rows: list[list[Any]] = []
    for axes, capacity, key in zip(grid, known, keys, strict=True):
        for name, runs in curves.items():
            _draw(axes, runs, key, styles[name], name)
        rows += [[capacity, *row] for row in _over_rounds(curves, key)[1]]
    handles = {name: line for axes in grid for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), frameon=False, loc="outside right center")
    return Plot(figure, ["capacity", *_over_rounds(curves, score)[0]], rows)


def by_cost(curves: Curves, metric: str, axis: str, styles: Mapping[str, Style], cost: Cost) -> Plot | None:
    """Plot `metric` over accumulated cost (SpaFL, arXiv 2406.00431, figure 2): mean ± standard deviation over the runs
    of each row. The cost axis is logarithmic if totals differ by more than 10x. A row without cost is a dotted line at
    its last value. None if all costs are within 1 %."""
    found = {}
    for name, runs in curves.items():
        spent = [with_spent(lines, cost) for lines in runs]
        rounds, amount = common([[line for line in lines if metric in line] for lines in spent], cost.unit)
        if rounds:
            found[name] = rounds, amount.mean(0), *mean_and_std(common(spent, metric)[1])
    totals = [float(amount[-1]) for _, amount, *_ in found.values()]
    if not any(totals) or max(totals) - min(totals) < 0.01 * max(totals):
        return None
    figure, axes = new_figure()
    for name, (_, amount, values, std) in found.items():
        style = styles[name]
        if amount[-1]:
            axes.plot(amount, values, label=name, **line_of(style, len(amount)))
            _band(axes, amount, values, std, style)
        else:
            axes.axhline(values[-1], label=f"{name}: {cost.none}", color=style["color"], linestyle=":")
    if max(totals) > 10 * min(total for total in totals if total):
        axes.set_xscale("log")
    axes.set_xlabel(cost.axis)
    title_axis(axes.yaxis, axis)
    legend(axes)
    rows = [
        [name, round, float(x), float(y)]
        for name, (rounds, amount, values, _) in found.items()
        for round, x, y in zip(rounds, amount, values, strict=True)
    ]
    return Plot(figure, ["method", "round", cost.unit, metric], rows)


def round_times(curves: Curves, styles: Mapping[str, Style]) -> Plot | None:
    """Plot the share of rounds that took at most a simulated time, over all runs of each row. None without a clock."""
    times = {
        name: sorted(line["sim_seconds"] for line in chain(*runs) if "sim_seconds" in line)
        for name, runs in curves.items()
    }
    times = {name: found for name, found in times.items() if found}
    if not times:
        return None
    figure, axes = new_figure()
    rows: list[list[Any]] = []
    for name, found in times.items():
        shares = np.arange(1, len(found) + 1) / len(found)
        look = {key: styles[name][key] for key in ("color", "linestyle")}
        axes.step(found, shares, where="post", label=name, linewidth=1.8, **look)
        rows += [[name, seconds, share] for seconds, share in zip(found, shares.tolist(), strict=True)]
    if max(map(max, times.values())) > 10 * min(map(min, times.values())) > 0:
        axes.set_xscale("log")
    axes.set_xlabel("simulated seconds of a round")
    title_axis(axes.yaxis, "share of rounds")
    legend(axes)
    return Plot(figure, ["method", "seconds", "share"], rows)


def participation(curves: Curves, styles: Mapping[str, Style]) -> Plot | None:
    """Plot the share of each class of devices in the aggregated updates, one bar per row. None without a clock."""
    counts: dict[str, dict[str, float]] = {name: {} for name in curves}
    for name, runs in curves.items():
        for line in chain(*runs):
            for key in line:
                if key.startswith(UPDATES):
                    kind = key.removeprefix(UPDATES)
                    counts[name][kind] = counts[name].get(kind, 0) + line[key]
    counts = {name: found for name, found in counts.items() if found}
    kinds = sorted(set().union(*counts.values()))
    if not kinds:
        return None
    figure, axes = new_figure()
    width, rows = 0.8 / len(counts), []
    for i, (name, found) in enumerate(counts.items()):
        shares = [found.get(kind, 0) / sum(found.values()) for kind in kinds]
        places = np.arange(len(kinds)) + (i + 0.5) * width - 0.4
        hatch = HATCHES[styles[name]["linestyle"]]
        axes.bar(places, shares, 0.9 * width, label=name, color=styles[name]["color"], hatch=hatch, edgecolor="white")
        rows += [[name, kind, share] for kind, share in zip(kinds, shares, strict=True)]
    axes.set_xticks(range(len(kinds)), kinds)
    title_axis(axes.yaxis, "share of updates")
    legend(axes)
    return Plot(figure, ["method", "device", "share"], rows)


def by_capacity(records: Sequence[Record], styles: Mapping[str, Style]) -> Plot | None:
    """Plot the test score by capacity (log2 axis), mean and standard deviation over seeds. Capacities without clients
    have hollow markers (FIARSE, arXiv 2407.19389, figure 4). None without shared networks."""
    facts, titles = facts_of(records[0]), titles_of(records)
    score, known = facts.score, capacities(records)
    if not known:
        return None
    figure, axes = new_figure()
    everywhere, rows = trained(records), []
    for of, runs in by_label(records, named(score, "mean")).items():
        name = titles[of]
        style = styles[name]
        values = {c: found for c in known if (found := values_of(runs, named(score, c)))}
        if not values:
            continue
        mean = {c: statistics.fmean(found) for c, found in values.items()}
        std = [deviation(found) if len(found) > 1 else 0.0 for found in values.values()]
        axes.errorbar(list(mean), list(mean.values()), std, label=name, capsize=3, markersize=5, **style)
        own = trained(runs)
        rows += [[name, c, m, s, int(c in own)] for (c, m), s in zip(mean.items(), std, strict=True)]
        new = [c for c in mean if c not in own]
        look = {"color": style["color"], "marker": style["marker"], "markersize": 5, "markerfacecolor": "white"}
        axes.plot(new, [mean[c] for c in new], linestyle="", zorder=3, **look)
    axes.set_xscale("log", base=2)
    ticks = _apart(sorted(everywhere & set(known), reverse=True) + known)
    axes.set_xticks(ticks, [label(c) for c in ticks])
    axes.minorticks_off()
    axes.set_xlabel("capacity of the client" + ("" if everywhere >= set(known) else "; hollow: without clients"))
    title_axis(axes.yaxis, with_unit(score, facts, score))
    legend(axes)
    return Plot(figure, ["method", "capacity", score, "std", "trained"], rows)


def tuning_plots(
    trials: Sequence[Record], paths: Sequence[str], metric: str, mode: Better | Literal["auto"] = "auto"
) -> dict[str, Plot]:
    """Return name -> plot of the search metric over each tuned setting, one line per row: the best of all points with
    this value, on the seeds common to all points. Failed points are gaps. Settings with one value have no plot, and
    rows without a setting no line."""
    titles, styles, plots = titles_of(trials), named_styles(trials), {}
    for path, setting in names_of(paths).items():
        found = {titles[of]: heights for of, heights in responses(trials, path, metric, mode).items()}
        values = list(dict.fromkeys(value for heights in found.values() for value in heights))
        numbers = sorted(value for value in values if not isinstance(value, str))
        ordered = len(numbers) == len(values)
        if len(values) < 2:
            continue
        figure, axes = new_figure()
        for name, heights in found.items():
            places = list(heights) if ordered else [values.index(value) for value in heights]
            look = styles[name] if ordered else {**styles[name], "linestyle": ""}
            axes.plot(places, list(heights.values()), label=name, linewidth=1.8, markersize=5, **look)
        if not ordered:
            axes.set_xticks(range(len(values)), list(map(short, values)), rotation=0 if len(values) < 5 else 30)
        is_log = ordered and numbers[0] > 0 and numbers[-1] >= 8 * numbers[0]
        if is_log:
            axes.set_xscale("log")
        if ordered and len(values) <= 10:
            axes.set_xticks(numbers, spaced([math.log(n) for n in numbers] if is_log else numbers, map(short, numbers)))
            axes.minorticks_off()
        axes.set_xlabel(setting)
        title_axis(axes.yaxis, axis_of(facts_of(trials[0]), metric))
        legend(axes)
        rows = [[name, value, height] for name, heights in found.items() for value, height in heights.items()]
        plots[f"tuned_{setting}"] = Plot(figure, ["method", setting, metric], rows)
    return plots


def spaced(places: Sequence[float], labels: Iterable[str]) -> list[str]:
    """Return the labels of ascending places, "" where a label would be printed over the one before it."""
    shown, last = [], -math.inf
    for place, text in zip(places, labels, strict=True):
        is_free = place - last >= LABEL * (places[-1] - places[0])
        shown.append(text if is_free else "")
        last = place if is_free else last
    return shown


def trained(records: Iterable[Record]) -> set[float]:
    """Return the capacities of clients in any row, without those of weight 0."""
    return {capacity for record in records for capacity in record["facts"]["trained"]}


def client_histogram(scores: Mapping[str, Sequence[np.ndarray]], axis: str, styles: Mapping[str, Style]) -> Plot:
    """Plot histograms of client scores, one panel per row (FIARSE, arXiv 2407.19389, figure 2). `scores`: name ->
    scores [clients] of each run; counts are means over runs, dashed lines means of all scores. `axis`: title of the
    score axis, which spans 0 to 1 and all finite scores; others are left out."""
    scores = {name: [values[np.isfinite(values)] for values in runs] for name, runs in scores.items()}
    all = {name: np.concatenate(runs) for name, runs in scores.items()}
    ends = np.concatenate([[0.0, 1.0], *all.values()])
    edges, rows = np.linspace(ends.min(), ends.max(), 21), []
    means = {name: values.mean() if len(values) else math.nan for name, values in all.items()}
    shown = percent if axis.endswith("%") else plain
    titles = [f"{name}: mean {shown([mean])}" for name, mean in means.items()]
    what = "clients, mean over seeds" if any(len(runs) > 1 for runs in scores.values()) else "clients"
    figure, grid = panels(titles, axis, what)
    for axes, name in zip(grid, scores, strict=True):
        style = styles[name]
        counts = np.mean([np.histogram(values, edges)[0] for values in scores[name]], axis=0)
        axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        axes.stairs(counts, edges, color=style["color"], fill=True, alpha=0.3)
        axes.stairs(counts, edges, color=style["color"])
        axes.axvline(means[name], color=style["color"], linestyle="--", linewidth=1)
        rows.append([name, *(f"{count:g}" for count in counts)])
    return Plot(figure, ["method", *(f"{edge:.2f}" for edge in edges[:-1])], rows)


def label_distribution(counts: np.ndarray) -> Plot:
    """Plot samples per class and client, counts [clients, classes], and above them samples per client."""
    clients, classes = counts.shape
    figure = Figure(figsize=(8, 1.8 + min(4.5, 0.28 * classes)), dpi=150, layout="constrained")
    top, axes = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1, max(2, 0.28 * classes)]})
    top.bar(range(clients), counts.sum(1), width=1.0 if clients > 60 else 0.85, color="#0072B2")
    top.set_ylabel("samples")
    top.spines[["top", "right"]].set_visible(False)
    image = axes.imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest", vmin=0)
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
    figure.colorbar(image, ax=axes, label="samples of the class", pad=0.01)
    return Plot(figure, ["client", *map(str, range(classes))], [[id, *row] for id, row in enumerate(counts.tolist())])


def counts_in(plots: Path) -> dict[str, np.ndarray]:
    """Return name of a label plot in a folder -> its counts [clients, classes], from the CSV file."""
    files = sorted(plots.glob("labels*.csv"))
    return {file.stem: np.loadtxt(file, np.int64, delimiter=",", skiprows=1, ndmin=2)[:, 1:] for file in files}


def _apart(known: Sequence[float]) -> list[float]:
    """Return the capacities whose tick labels do not overlap on a log axis, in order of preference."""
    span = math.log(max(known) / min(known)) or 1.0
    chosen: list[float] = []
    for capacity in known:
        if all(abs(math.log(capacity / other)) >= 0.07 * span for other in chosen):
            chosen.append(capacity)
    return chosen


def common(runs: Sequence[Sequence[Line]], metric: str) -> tuple[list[int], np.ndarray]:
    """Return the rounds [R] in which all runs have the metric, and its values [runs, R]."""
    series = [{line["round"]: line[metric] for line in lines if metric in line} for lines in runs]
    rounds = sorted(set.intersection(*map(set, series)))
    return rounds, np.array([[one[round] for round in rounds] for one in series])


def _over_rounds(curves: Curves, metric: str) -> tuple[list[str], list[list[Any]]]:
    """Return header and one row per round: each label's mean over runs and, for several runs, standard deviation."""
    header, columns = ["round"], []
    for name, runs in curves.items():
        rounds, values = common(runs, metric)
        header.append(name)
        columns.append(dict(zip(rounds, values.mean(0).tolist(), strict=True)) if rounds else {})
        if len(runs) > 1:
            header.append(f"{name} std")
            columns.append(dict(zip(rounds, values.std(0, ddof=1).tolist(), strict=True)) if rounds else {})
    rounds = sorted(set().union(*columns))
    return header, [[round, *(column.get(round, "") for column in columns)] for round in rounds]


def _draw(axes: Axes, runs: Sequence[Sequence[Line]], metric: str, style: Style, name: str) -> None:
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    rounds, values = common(runs, metric)
    if not rounds:
        return
    mean, std = mean_and_std(values)
    axes.plot(rounds, mean, label=name, **line_of(style, len(rounds)))
    _band(axes, rounds, mean, std, style)


def mean_and_std(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation [R] of values [runs, R]; 0 for one run."""
    return values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])


def _band(axes: Axes, x: npt.ArrayLike, mean: np.ndarray, std: np.ndarray, style: Style) -> None:
    if std.any():
        axes.fill_between(x, mean - std, mean + std, color=style["color"], alpha=0.15, linewidth=0)


def write_plots(
    folder: Path, records: Sequence[Record], metric: str | None = None, formats: Sequence[str] = ()
) -> None:
    """Write the plots of these rows as .png and .csv, and in `formats`."""
    for name, plot in plots_of(records, metric).items():
        plot.write(folder / name, formats)
