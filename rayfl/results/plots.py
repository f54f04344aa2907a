"""Plots of runs: each function draws a figure from lines or rows, or gives None where there is nothing to see.

`curves` are the lines of every run by label; labels are drawn as means over their runs (seeds).
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from rayfl.metrics import Line, label, named
from rayfl.results.drawing import Plot, Style, legend, line_of, new_figure, panels, said, styles_of
from rayfl.results.folder import RunFolder
from rayfl.results.tables import Record, by_label, capacities, facts_of, judge_of, values_of

Curves = Mapping[str, Sequence[Sequence[Line]]]
"""Label -> its runs -> their lines."""


def plots_of(records: Sequence[Record], metric: str | None = None) -> dict[str, Plot]:
    """Name -> plot of a comparison, of rows of runs on disk; `metric` in place of what judges them."""
    metric = metric or judge_of(records)
    groups = by_label(records, metric)
    facts = facts_of(records[0])
    runs = {name: [RunFolder.open(row["path"]) for row in rows] for name, rows in groups.items()}
    curves = {name: [run.rounds() for run in some] for name, some in runs.items()}
    scores = {name: [found["score"] for run in some if len(found := run.client_scores)] for name, some in runs.items()}
    score, split = facts.about(metric) or (metric, "test")
    styles, axis = styles_of(curves), said(score, split) if split == "clients" else metric.replace("_", " ")
    found = {
        "learning_curves": learning_curves(curves, metric, axis),
        "accuracy_by_traffic": by_traffic(curves, metric, axis) if len(curves) > 1 else None,
        "accuracy_by_capacity": by_capacity(records, styles),
        "curves_by_capacity": curves_by_capacity(curves, records, styles) if len(curves) > 1 else None,
        "client_accuracy": client_histogram(scores, facts.score) if all(scores.values()) else None,
    }
    return {name: plot for name, plot in found.items() if plot is not None}


def learning_curves(
    curves: Curves,
    metric: str,
    axis: str,
    styles: Mapping[str, Style] | None = None,
    **look: Any,
) -> Plot:
    """`metric` over rounds: mean and ± standard deviation over the runs of each label. `axis`: its name; `styles` in
    place of `styles_of`; `look` as yscale, ylim."""
    figure, axes = new_figure()
    for name, style in (styles or styles_of(curves)).items():
        _draw(axes, curves[name], metric, style, name)
    axes.set(xlabel="round", ylabel=axis, **look)
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    legend(axes)
    return Plot(figure, *_over_rounds(curves, metric))


def curves_by_capacity(curves: Curves, records: Sequence[Record], styles: Mapping[str, Style]) -> Plot | None:
    """The score of the network of every capacity that clients have over rounds, a panel a capacity (FIARSE, arXiv
    2407.19389, figure 3); nothing for one capacity, and of labels without such a number. `styles` of these labels and
    perhaps others."""
    score = facts_of(records[0]).score
    known = [capacity for capacity in capacities(records) if capacity in trained(records)]
    keys = [named(score, capacity) for capacity in known]
    curves = {name: runs for name, runs in curves.items() if any(key in line for key in keys for line in chain(*runs))}
    if len(known) < 2 or len(curves) < 2:
        return None
    figure, grid = panels([f"capacity {label(capacity)}" for capacity in known], "round", score)
    rows: list[list[Any]] = []
    for axes, capacity, key in zip(grid, known, keys, strict=True):
        for name, runs in curves.items():
            _draw(axes, runs, key, styles[name], name)
        rows += [[capacity, *row] for row in _over_rounds(curves, key)[1]]
    handles = {name: line for axes in grid for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), frameon=False, loc="outside right center")
    return Plot(figure, ["capacity", *_over_rounds(curves, score)[0]], rows)


def by_traffic(curves: Curves, metric: str, axis: str) -> Plot | None:
    """`metric` over what was communicated by then, up and down (SpaFL, arXiv 2406.00431, figure 2): for each label
    its runs' lines, means over the runs. On a log scale if the labels differ by ten times; one that sends nothing is
    a dotted line at its last value. Nothing if all send as much."""
    found = {}
    for name, runs in curves.items():
        sent = [_with_traffic(lines) for lines in runs]
        rounds, gbit = _common([[line for line in lines if metric in line] for lines in sent], "gbit")
        if rounds:
            found[name] = rounds, gbit.mean(0), _common(sent, metric)[1].mean(0)
    totals = [float(gbit[-1]) for _, gbit, _ in found.values()]
    if not any(totals) or max(totals) - min(totals) < 0.01 * max(totals):
        return None
    figure, axes = new_figure()
    styles = styles_of(curves)
    for name, (_, gbit, values) in found.items():
        style = styles[name]
        if gbit[-1]:
            axes.plot(gbit, values, label=name, **line_of(style, len(gbit)))
        else:
            axes.axhline(values[-1], label=f"{name}: sends nothing", color=style["color"], linestyle=":")
    if max(totals) > 10 * min(total for total in totals if total):
        axes.set_xscale("log")
    axes.set_xlabel("communicated by all clients, Gbit")
    axes.set_ylabel(axis)
    legend(axes)
    rows = [
        [name, round, float(x), float(y)] for name, some in found.items() for round, x, y in zip(*some, strict=True)
    ]
    return Plot(figure, ["method", "round", "gbit", metric], rows)


def by_capacity(records: Sequence[Record], styles: Mapping[str, Style]) -> Plot | None:
    """The test score of the network of every capacity (log2), mean and standard deviation over seeds. Markers of
    capacities that no client has are hollow (FIARSE, arXiv 2407.19389, figure 4). `styles` of their labels and perhaps
    others. Nothing where no network is shared."""
    score = facts_of(records[0]).score
    known = capacities(records)
    if not known:
        return None
    figure, axes = new_figure()
    everywhere, rows = trained(records), []
    for name, runs in by_label(records, named(score, "mean")).items():
        style = styles[name]
        values = {c: found for c in known if (found := values_of(runs, named(score, c)))}
        if not values:
            continue
        mean = {c: statistics.fmean(found) for c, found in values.items()}
        std = [statistics.stdev(found) if len(found) > 1 else 0.0 for found in values.values()]
        axes.errorbar(list(mean), list(mean.values()), std, label=name, capsize=3, markersize=5, **style)
        held = trained(runs)
        rows += [[name, c, m, s, int(c in held)] for (c, m), s in zip(mean.items(), std, strict=True)]
        new = [c for c in mean if c not in held]
        look = {"color": style["color"], "marker": style["marker"], "markersize": 5, "markerfacecolor": "white"}
        axes.plot(new, [mean[c] for c in new], linestyle="", zorder=3, **look)
    axes.set_xscale("log", base=2)
    ticks = _apart(sorted(everywhere & set(known), reverse=True) + known)
    axes.set_xticks(ticks, [label(c) for c in ticks])
    axes.minorticks_off()
    axes.set_xlabel("capacity of the client" + ("" if everywhere >= set(known) else "; hollow: no client has it"))
    axes.set_ylabel(score)
    legend(axes)
    return Plot(figure, ["method", "capacity", score, "std", "trained"], rows)


def trained(records: Iterable[Record]) -> set[float]:
    """The capacities that clients have in some row; a population may have others, of weight 0."""
    return {capacity for record in records for capacity in record["facts"]["trained"]}


def client_histogram(scores: Mapping[str, Sequence[np.ndarray]], score: str) -> Plot:
    """How many clients reach which score (FIARSE, arXiv 2407.19389, figure 2): for each label, in a panel of its own,
    the scores [clients] of its runs; counts are means over the runs, dashes are means of all scores. The axis goes from
    0 to 1, or as far as scores do."""
    all = {name: np.concatenate(runs) for name, runs in scores.items()}
    ends = [0.0, 1.0, *(end for values in all.values() for end in (values.min(), values.max()))]
    edges, rows = np.linspace(min(ends), max(ends), 21), []
    means = {name: values.mean() for name, values in all.items()}
    titles = [f"{name}: mean {mean:.3f}" for name, mean in means.items()]
    what = "clients, mean over seeds" if any(len(runs) > 1 for runs in scores.values()) else "clients"
    figure, grid = panels(titles, f"{score} of a client on its own test data", what)
    for axes, (name, style) in zip(grid, styles_of(scores).items(), strict=True):
        counts = np.mean([np.histogram(values, edges)[0] for values in scores[name]], axis=0)
        axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        axes.stairs(counts, edges, color=style["color"], fill=True, alpha=0.3)
        axes.stairs(counts, edges, color=style["color"])
        axes.axvline(means[name], color=style["color"], linestyle="--", linewidth=1)
        rows.append([name, *(f"{count:g}" for count in counts)])
    return Plot(figure, ["method", *(f"{edge:.2f}" for edge in edges[:-1])], rows)


def label_distribution(counts: np.ndarray) -> Plot:
    """Samples of every class at every client: counts [clients, classes]; above it, samples a client."""
    clients, classes = counts.shape
    figure = Figure(figsize=(8, 1.8 + min(4.5, 0.28 * classes)), dpi=150, layout="constrained")
    top, axes = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1, max(2, 0.28 * classes)]})
    top.bar(range(clients), counts.sum(1), width=1.0 if clients > 60 else 0.85, color="#0072B2")
    top.set_ylabel("samples")
    top.spines[["top", "right"]].set_visible(False)
    image = axes.imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest", vmin=0)
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(12, integer=True))
    figure.colorbar(image, ax=axes, label="samples of the class", pad=0.01)
    return Plot(figure, ["client", *map(str, range(classes))], [[id, *row] for id, row in enumerate(counts.tolist())])


def _apart(known: Sequence[float], least: float = 0.07) -> list[float]:
    """Of these capacities those that a log axis can name: the first, and all that are far enough from those before."""
    span = math.log(max(known) / min(known)) or 1.0
    chosen: list[float] = []
    for capacity in known:
        if all(abs(math.log(capacity / other)) >= least * span for other in chosen):
            chosen.append(capacity)
    return chosen


def _common(runs: Sequence[Sequence[Line]], metric: str) -> tuple[list[int], np.ndarray]:
    """The rounds in which all runs have the metric [R], and its values [runs, R]."""
    series = [{line["round"]: line[metric] for line in lines if metric in line} for lines in runs]
    rounds = sorted(set.intersection(*map(set, series)))
    return rounds, np.array([[one[round] for round in rounds] for one in series])


def _over_rounds(curves: Curves, metric: str) -> tuple[list[str], list[list[Any]]]:
    """A header and a row a round: of every label the mean over its runs and, of several, the standard deviation."""
    header, columns = ["round"], []
    for name, runs in curves.items():
        rounds, values = _common(runs, metric)
        header.append(name)
        columns.append(dict(zip(rounds, values.mean(0).tolist(), strict=True)) if rounds else {})
        if len(runs) > 1:
            header.append(f"{name} std")
            columns.append(dict(zip(rounds, values.std(0, ddof=1).tolist(), strict=True)) if rounds else {})
    rounds = sorted(set().union(*columns))
    return header, [[round, *(column.get(round, "") for column in columns)] for round in rounds]


def _draw(axes: Axes, runs: Sequence[Sequence[Line]], metric: str, style: Style, name: str) -> None:
    """`metric` over rounds: mean and standard deviation over the runs' lines."""
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    rounds, values = _common(runs, metric)
    if not rounds:
        return
    mean = values.mean(0)
    axes.plot(rounds, mean, label=name, **line_of(style, len(rounds)))
    if len(values) > 1:
        std = values.std(0, ddof=1)
        axes.fill_between(rounds, mean - std, mean + std, color=style["color"], alpha=0.15, linewidth=0)


def _with_traffic(lines: Iterable[Line]) -> list[Line]:
    """Lines with `gbit`: what all rounds up to theirs communicated, in 10^9 bits."""
    sent, found = 0.0, []
    for line in lines:
        sent += 8 * (line.get("bytes_down", 0) + line.get("bytes_up", 0)) / 1e9
        found.append(line | {"gbit": sent})
    return found


def write_plots(folder: Path, records: Sequence[Record], metric: str | None = None) -> None:
    """`plots_of` these rows, each as .png and .csv."""
    for name, plot in plots_of(records, metric).items():
        plot.write(folder / name)
