"""Plots: lines, colours, numbers in CSV files, and cases without data."""

import csv
import io
import math
import statistics

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from rows import FACTS, PERSONAL, folder, line

from rayfl.results import plots
from rayfl.results.budgets import TRAFFIC
from rayfl.results.drawing import COLORS, FORMATS, axis_name, shades_of, styles_of
from rayfl.results.folder import records
from rayfl.results.pareto import write_pareto
from rayfl.results.plots import (
    axis_of,
    by_cost,
    client_histogram,
    label_distribution,
    learning_curves,
    plots_of,
    spaced,
    tuning_plots,
    write_plots,
)
from rayfl.results.rows import facts_of

SENT = {"fedavg": 250_000_000, "heterofl": 15_625_000}
"""Bytes a round: 2 and 1/8 Gbit."""


@pytest.fixture
def comparison(tmp_path):
    """Rows of two labels and two seeds; no client has capacity 0.1."""
    facts = FACTS | {"capacities": [1.0, 0.5, 0.1], "trained": [1.0, 0.5]}
    for name in ("fedavg", "heterofl"):
        for seed in (0, 1):
            lines = [
                line(r, accuracy_mean=r / 4, accuracy_worst=0.25, bytes_up=SENT[name])
                | {"accuracy_1": 0.5, "accuracy_0.5": (r + seed) / 4, "accuracy_0.1": 0.125}
                for r in (1, 2, 3)
            ]
            folder(tmp_path / f"{name}{seed}", name, lines, facts=facts, seed=seed)
    return records(tmp_path)


def table_of(plot):
    """Its numbers, as they are written."""
    text = io.StringIO()
    csv.writer(text).writerows([plot.header, *plot.rows])
    return [row for row in csv.reader(io.StringIO(text.getvalue()))]


def test_the_plots_of_a_comparison(comparison, tmp_path):
    write_plots(tmp_path / "plots", comparison)
    drawn = ("accuracy_by_capacity", "accuracy_by_traffic", "curves_by_capacity", "learning_curves")
    assert sorted(file.name for file in (tmp_path / "plots").iterdir()) == [
        f"{name}.{end}" for name in drawn for end in ("csv", "png")
    ]
    read = {name: (tmp_path / "plots" / f"{name}.csv").read_text() for name in drawn}
    assert read["learning_curves"] == (
        "round,fedavg,fedavg std,heterofl,heterofl std\n1,0.25,0.0,0.25,0.0\n2,0.5,0.0,0.5,0.0\n3,0.75,0.0,0.75,0.0\n"
    )
    assert read["accuracy_by_traffic"] == (
        "method,round,gbit,accuracy_mean\n"
        "fedavg,1,2.0,0.25\nfedavg,2,4.0,0.5\nfedavg,3,6.0,0.75\n"
        "heterofl,1,0.125,0.25\nheterofl,2,0.25,0.5\nheterofl,3,0.375,0.75\n"
    )
    header, *rows = csv.reader(read["accuracy_by_capacity"].splitlines())
    assert header == ["method", "capacity", "accuracy", "std", "trained"]
    # two seeds, of which one has 0.75 and one 1
    assert rows[:3] == [
        ["fedavg", "1.0", "0.5", "0.0", "1"],
        ["fedavg", "0.5", "0.875", str(statistics.stdev([0.75, 1.0])), "1"],
        ["fedavg", "0.1", "0.125", "0.0", "0"],
    ]
    header, *rows = csv.reader(read["curves_by_capacity"].splitlines())
    assert header == ["capacity", "round", "fedavg", "fedavg std", "heterofl", "heterofl std"]
    assert [row[:3] for row in rows] == [["1.0", str(r), "0.5"] for r in (1, 2, 3)] + [
        ["0.5", str(r), str((r + 0.5) / 4)] for r in (1, 2, 3)
    ]


@pytest.mark.parametrize("metric", ["best_accuracy_mean", "last5_accuracy_mean", "rounds"])
def test_a_result_without_curve_leaves_the_plots_of_the_judge_metric(comparison, metric):
    usual, found = plots_of(comparison), plots_of(comparison, metric)
    assert {name: table_of(plot) for name, plot in found.items()} == {
        name: table_of(plot) for name, plot in usual.items()
    }


def test_a_plot_is_a_figure_in_a_notebook(comparison):
    found = plots_of(comparison[:1])
    assert set(found) == {"accuracy_by_capacity", "learning_curves"}
    assert all(isinstance(plot.figure, Figure) and plot._repr_png_().startswith(b"\x89PNG") for plot in found.values())


def test_untrained_networks_are_not_drawn(tmp_path, monkeypatch):
    """Beside others only theirs, in the colours of the other plots; of such a run nothing by capacity."""
    drawn = {}
    plot = Axes.plot

    def remembered(self, *args, label="", **options):
        drawn.setdefault(label, set()).add(options.get("color"))
        return plot(self, *args, label=label, **options)

    monkeypatch.setattr(Axes, "plot", remembered)
    costs = {"1": {"parameters": 9, "macs": 9}, "0.125": {"parameters": 3, "macs": 3}}
    judged = {"accuracy_1": 0.5, "accuracy_0.125": 0.25, "accuracy_mean": 0.375, "accuracy_worst": 0.25}
    for name in ("alone", "b", "c"):
        facts, found = (PERSONAL, {}) if name == "alone" else (FACTS, judged)
        folder(tmp_path / name, name, [line(1, local_accuracy_mean=0.75, **found)], facts=facts, costs=costs)
    out, rows = tmp_path / "out", records(tmp_path)
    write_plots(out / "plots", rows)
    write_pareto(out, rows, rows)
    read = {name: (out / f"{name}.csv").read_text() for name in ("plots/accuracy_by_capacity", "pareto")}
    curves = (out / "plots" / "curves_by_capacity.csv").read_text()
    assert curves.startswith("capacity,round,b,c\n") and all("alone" not in text for text in read.values())
    # what all of them have
    assert (out / "plots" / "learning_curves.csv").read_text() == "round,alone,b,c\n1,0.75,0.75,0.75\n"
    assert drawn["b"] == {styles_of(["alone", "b", "c"])["b"]["color"]}
    one = plots_of([row for row in rows if row["label"] == "alone"])
    assert set(one) == {"learning_curves"}


def test_a_method_keeps_its_colour():
    """When the ranking changes, and in studies with other methods, unless an earlier name wants the same."""
    one, two = styles_of(["b", "a", "c"]), styles_of(["c", "b", "a"])
    assert one == two
    many = styles_of([f"m{i}" for i in range(25)])
    assert len({(s["color"], s["linestyle"]) for s in many.values()}) == 25
    assert len({s["color"] for s in styles_of([f"m{i}" for i in range(len(COLORS))]).values()}) == len(COLORS)
    often = ["fedavg-smallest", "heterofl", "fedrolex", "fiarse", "fjord", "nefl", "feddropout", "scalefl", "depthfl"]
    together = styles_of(often)
    assert all(styles_of([name])[name] == style for name, style in together.items())
    assert len({style["color"] for style in together.values()}) == len(often)


def test_a_capacity_has_a_shade():
    """From dark to light, whatever their order; the largest is the darkest."""
    shades = shades_of([0.25, 1.0, 0.5])
    assert shades == shades_of([1.0, 0.5, 0.25]) and list(shades) == [1.0, 0.5, 0.25]
    lightness = [sum(to_rgb(shade["color"])) for shade in shades.values()]
    assert lightness == sorted(lightness)


def test_axes_have_the_units_of_tables(comparison):
    plot = plots_of(comparison)["learning_curves"]
    [axes] = plot.figure.axes
    assert axes.get_ylabel() == "accuracy %"
    assert axes.yaxis.get_major_formatter()(0.07) == "7"
    facts = facts_of(comparison[0])
    names = [axis_of(facts, name) for name in ("loss_mean", "validation_accuracy_mean", "accuracy_worst", "seconds")]
    assert names == ["loss", "validation accuracy %", "accuracy worst %", "seconds"]


def test_rows_are_drawn_by_their_titles(comparison):
    """In the colour of their labels; with bands over seeds."""
    named = [row | {"title": row["label"].title()} for row in comparison]
    plot = plots_of(named)["curves_by_capacity"]
    assert list(plot.header)[2::2] == ["Fedavg", "Heterofl"]
    of_label = {style["color"] for style in styles_of(["fedavg", "heterofl"]).values()}
    assert {line.get_color() for axes in plot.figure.axes for line in axes.lines} == of_label
    # the seeds differ at capacity 0.5 alone
    assert [len(axes.collections) for axes in plot.figure.axes] == [0, 2]


def test_plots_of_tuned_settings(tmp_path):
    for name, scores in (("a", (0.5, 0.75, 0.25)), ("b", (0.25, None, 0.5))):
        for lr, score in zip((0.01, 0.1, 1.0), scores, strict=True):
            lines = [] if score is None else [line(1, accuracy_mean=score)]
            status = "failed" if score is None else "finished"
            folder(tmp_path / f"{name}{lr}", name, lines, status=status, config={"training": {"lr": lr}, "seed": 0})
    found = tuning_plots(records(tmp_path), ["training.lr"], "accuracy_mean")
    [plot] = found.values()
    assert list(found) == ["tuned_lr"] and list(plot.header) == ["method", "lr", "accuracy_mean"]
    assert plot.rows == [["a", 0.01, 0.5], ["a", 0.1, 0.75], ["a", 1, 0.25], ["b", 0.01, 0.25], ["b", 1, 0.5]]
    assert plot.figure.axes[0].get_xscale() == "log"
    assert tuning_plots(records(tmp_path), [], "accuracy_mean") == {}


def test_labels_of_near_values_are_left_out():
    assert spaced([0.0, 0.11, 0.13, 0.5, 1.0], "abcde") == ["a", "", "c", "d", "e"]
    assert spaced([1, 2, 3], "abc") == ["a", "b", "c"]


def test_a_plot_for_a_paper(tmp_path):
    """Its text is text, in fonts that it brings along, and two that are equal are equal files."""
    for name in "ab":
        plot = learning_curves({"x": [[{"round": r, "m": r} for r in (1, 2)]]}, "m", "metric", styles_of(["x"]))
        plot.write(tmp_path / name, FORMATS)
    pdf, svg = ((tmp_path / f"a.{ending}").read_bytes() for ending in ("pdf", "svg"))
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf
    assert b">metric</text>" in svg
    assert pdf == (tmp_path / "b.pdf").read_bytes() and svg == (tmp_path / "b.svg").read_bytes()


def test_curves_use_the_rounds_that_all_seeds_have():
    runs = [
        [{"round": 1, "a": 0.1}, {"round": 2}, {"round": 3, "a": 0.3}],
        [{"round": 3, "a": 0.5}, {"round": 5, "a": 0.7}],
    ]
    rounds, values = plots.common(runs, "a")
    assert rounds == [3]
    np.testing.assert_array_equal(values, [[0.3], [0.5]])


def test_traffic_is_drawn_where_it_differs():
    lines = [line(r, m=m, bytes_down=2320, bytes_up=2320) for r, m in ((1, 0.5), (2, 0.75))]
    silent = [line | {"bytes_down": 0, "bytes_up": 0} for line in lines]
    styles = styles_of(["a", "b", "c", "local"])
    assert by_cost({"a": [lines], "b": [lines, lines], "c": [[{"round": 1}]]}, "m", "m", styles, TRAFFIC) is None
    assert by_cost({"a": [silent], "b": [silent]}, "m", "m", styles, TRAFFIC) is None
    plot = by_cost({"a": [lines], "local": [silent]}, "m", "m", styles, TRAFFIC)
    assert plot is not None and list(plot.header) == ["method", "round", "gbit", "m"]
    assert plot.rows == [
        ["a", 1, 3.712e-05, 0.5],
        ["a", 2, 7.424e-05, 0.75],
        ["local", 1, 0.0, 0.5],
        ["local", 2, 0.0, 0.75],
    ]


def test_capacities_on_an_axis_are_apart():
    sizes = [1, 0.99, 0.9, 0.8, 0.64, 0.5, 0.36, 0.25, 0.125, 1 / 16, 0.04, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert plots._apart([1, 1 / 4, 1 / 16, 1 / 64, *sizes]) == [
        1,
        1 / 4,
        1 / 16,
        1 / 64,
        0.64,
        0.125,
        0.04,
        1 / 128,
        1 / 256,
    ]
    assert plots._apart([0.5]) == [0.5]


def arrays(scores):
    return {name: [np.array(run) for run in runs] for name, runs in scores.items()}


def test_histograms_of_client_scores():
    styles = styles_of(["a", "b"])
    plot = client_histogram(arrays({"a": [[0.1, 1.0]], "b": [[0.52, 0.5], [0.52, 0.9]]}), "accuracy %", styles)
    assert [axes.get_title() for axes in plot.figure.axes] == ["a: mean 55.00", "b: mean 61.00"]
    header, *rows = table_of(plot)
    assert [{edge: n for edge, n in zip(header, row, strict=True) if n != "0"} for row in rows] == [
        {"method": "a", "0.10": "1", "0.95": "1"},
        {"method": "b", "0.50": "1.5", "0.90": "0.5"},
    ]
    wide = client_histogram(arrays({"a": [[30.0, 50.0]]}), "perplexity", styles)
    assert (wide.header[1], wide.header[-1]) == ("0.00", "47.50")
    broken = client_histogram(arrays({"a": [[0.5, math.inf, math.nan]], "b": [[math.nan]]}), "accuracy %", styles)
    assert [axes.get_title() for axes in broken.figure.axes] == ["a: mean 50.00", "b: mean nan"]
    assert [sum(map(int, row[1:])) for row in table_of(broken)[1:]] == [1, 0]


def test_labels_per_client(tmp_path):
    plot = label_distribution(np.arange(6).reshape(2, 3))
    assert table_of(plot) == [["client", "0", "1", "2"], ["0", "0", "1", "2"], ["1", "3", "4", "5"]]
    plot.write(tmp_path / "plots" / "labels.of")
    assert sorted(file.name for file in (tmp_path / "plots").iterdir()) == ["labels.of.csv", "labels.of.png"]


def test_there_is_no_plot_without_lines():
    assert learning_curves({"a": [[{"round": 1}]]}, "accuracy_mean", "accuracy", styles_of(["a"])) is None


def test_how_an_axis_names_a_score():
    assert axis_name("accuracy", "test") == "accuracy"
    assert axis_name("accuracy", "validation") == "validation accuracy"
    assert axis_name("top5", "clients") == "top5 of clients on their own test data"


def test_means_over_seeds_that_differ():
    runs = [[{"round": 1, "m": m, "bytes_up": gbit * 1.25e8}] for m, gbit in ((0.5, 1), (0.75, 3))]
    styles = styles_of(("a", "b"))
    assert learning_curves({"a": runs}, "m", "m", styles).rows == [[1, 0.625, pytest.approx(0.25 / 2**0.5)]]
    plot = by_cost({"a": runs, "b": runs[:1]}, "m", "m", styles, TRAFFIC)
    assert plot is not None and plot.rows == [["a", 1, 2.0, 0.625], ["b", 1, 1.0, 0.5]]


def test_rounds_on_a_clock():
    lines = [{"round": r, "sim_seconds": s, "updates_fast": 2, "updates_slow": r - 1} for r, s in ((1, 4.0), (2, 1.0))]
    styles = styles_of(("a",))
    times, shares = (draw({"a": [lines]}, styles) for draw in (plots.round_times, plots.participation))
    assert times is not None and times.rows == [["a", 1.0, 0.5], ["a", 4.0, 1.0]]
    assert shares is not None and shares.rows == [["a", "fast", 0.8], ["a", "slow", 0.2]]
