"""Tables and plots from rows of runs (`Run.record`, or the same read back from MLflow).

A row is one run: `label`, `seed`, `params`, and the numbers of its result.json. Rows of a label are seeds of
one method; tables show mean ± sample standard deviation over them.
"""

import csv
import io
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rayfl.tracking.records import Line, Run, read_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table as RichTable

Record = Mapping[str, Any]

# Okabe and Ito's palette, darkest first; then the same with another line
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX"


# which rows


def best_trials(records: Iterable[Record], metric: str, mode: Literal["max", "min"] = "max") -> list[Record]:
    """The rows of each label's best point: the parameters, but the seed, with the best mean of `metric`.

    Points that ran on more seeds come first: a sweep confirms only the best of its first seed on the others.
    Rows without a finite `metric` (failed, stopped early) count for no point. Of equals, the first.
    """
    points: dict[str, dict[Any, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if math.isfinite(record.get(metric, math.nan)):
            points[record["label"]][_point(record)].append(record)
    sign = 1 if mode == "max" else -1
    return [
        record
        for of_label in points.values()
        for record in max(of_label.values(), key=lambda rows: (len(rows), sign * _mean(rows, metric)))
    ]


def judged_by(metric: str) -> str:
    """What the methods of a sweep are ranked by: clients' own accuracy if they were tuned by that."""
    return "local_accuracy_mean" if metric.startswith("local_") else "accuracy_mean"


def by_label(records: Iterable[Record], metric: str = "accuracy_mean") -> dict[str, list[Record]]:
    """The rows of each label by seed; labels by falling mean of the metric, those without any last."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record["label"]].append(record)
    ranked = sorted(groups, key=lambda label: (-_mean(groups[label], metric), label))
    return {label: sorted(groups[label], key=lambda r: r["seed"]) for label in ranked}


def capacities(records: Iterable[Record]) -> list[float]:
    """The capacities of which a row has an accuracy, largest first."""
    found = {
        float(match[1]) for record in records for key in record if (match := re.fullmatch(r"accuracy_(\d.*)", key))
    }
    return sorted(found, reverse=True)


def _point(record: Record) -> tuple:
    return tuple(sorted((k, str(v)) for k, v in record["params"].items() if k != "seed"))


def _values(records: Iterable[Record], key: str) -> list[float]:
    return [record[key] for record in records if key in record]


def _mean(records: Iterable[Record], key: str) -> float:
    values = _values(records, key)
    return statistics.fmean(values) if values else -math.inf


# what accuracy costs


@dataclass(frozen=True)
class Offer:
    """The network of one capacity, after the runs of one point of a search: what it costs and what it reaches."""

    label: str
    point: str
    capacity: float
    parameters: int
    macs: int
    accuracy: float
    """The mean over the point's seeds, at their last evaluation."""


def offers(records: Iterable[Record], kind: str = "accuracy") -> list[Offer]:
    """Every capacity of every point of which rows have the accuracy of this kind (accuracy_0.5, ...) and the costs."""
    groups: dict[tuple, list[Record]] = defaultdict(list)
    for record in records:
        for key, value in record.items():
            match = re.fullmatch(rf"{kind}_(\d.*)", key)
            if match and f"macs_{match[1]}" in record and math.isfinite(value):
                groups[match[1], record["label"], _point(record)].append(record)
    return [
        Offer(
            label=label,
            point=rows[0].get("point", ""),
            capacity=float(capacity),
            parameters=rows[0][f"parameters_{capacity}"],
            macs=rows[0][f"macs_{capacity}"],
            accuracy=_mean(rows, f"{kind}_{capacity}"),
        )
        for (capacity, label, _), rows in groups.items()
    ]


def pareto(found: Iterable[Offer]) -> list[Offer]:
    """Those that no other one dominates, by rising cost: none is better for as few multiply-adds, or cheaper and as
    good."""
    front: list[Offer] = []
    for offer in sorted(found, key=lambda offer: (offer.macs, -offer.accuracy)):
        if not front or offer.accuracy > front[-1].accuracy:
            front.append(offer)
    return front


# tables


@dataclass(frozen=True)
class Table:
    """Cells as they are printed."""

    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        rule = ["---"] + ["---:"] * (len(self.header) - 1)
        lines = [self.header, rule, *self.rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def latex(self) -> str:
        """A tabular in booktabs style."""
        lines = [" & ".join(map(_tex, line)) + r" \\" for line in (self.header, *self.rows)]
        columns = "l" + "r" * (len(self.header) - 1)
        return "\n".join(
            [
                rf"\begin{{tabular}}{{{columns}}}",
                r"\toprule",
                lines[0],
                r"\midrule",
                *lines[1:],
                r"\bottomrule",
                r"\end{tabular}",
                "",
            ]
        )

    def rich(self, full: int = 3) -> "RichTable":
        """For the terminal: ± only in the first `full` columns; a narrow one cuts the last columns."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
        shown = [self.header]
        shown += [row[:full] + [cell.partition(" ±")[0] for cell in row[full:]] for row in self.rows]
        for i, cells in enumerate(zip(*shown, strict=True)):
            width = max(map(len, cells))
            table.add_column(cells[0], justify="right" if i else "left", min_width=width)
        for row in shown[1:]:
            table.add_row(*map(Text, row))
        return table


def table(records: Sequence[Record], metric: str = "accuracy_mean") -> Table:
    """One line a label, the best by `metric` first: accuracies in per cent, then what the training cost."""
    local = [metric] if metric != "accuracy_mean" else []
    columns = [*local, "accuracy_mean", *map(_accuracy, capacities(records)), "accuracy_worst"]
    header = ["method", "seeds", *(["local %"] if local else []), "accuracy %"]
    header += [f"@{capacity:g}" for capacity in capacities(records)]
    header += ["worst", "down", "up", "FLOPs", "time"]
    costs = {
        "bytes_down": human_bytes,
        "bytes_up": human_bytes,
        "train_flops": human_flops,
        "seconds": human_time,
    }
    rows = []
    for label, runs in by_label(records, metric).items():
        cells = [percent(_values(runs, column)) for column in columns]
        cells += [_cost(_values(runs, key), human) for key, human in costs.items()]
        if not _values(runs, "accuracy_mean"):
            cells[0] = runs[0]["status"]
        rows.append([label, str(len(runs)), *cells])
    return Table(header, rows)


def results_csv(records: Sequence[Record], metric: str = "accuracy_mean") -> str:
    """Plain numbers, one line a row with an accuracy, in the order of `table` and by seed."""
    local = [metric] if metric != "accuracy_mean" else []
    columns = ["seed", *local, "accuracy_mean", "accuracy_worst", *map(_accuracy, capacities(records))]
    columns += ["bytes_down", "bytes_up", "train_flops", "seconds"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", *columns])
    for label, runs in by_label(records, metric).items():
        for run in runs:
            if "accuracy_mean" in run:
                writer.writerow([label, *(run.get(column, "") for column in columns)])
    return text.getvalue()


def pareto_table(front: Iterable[Offer], kind: str = "accuracy") -> Table:
    """One line an offer."""
    header = ["method", "point", "capacity", "parameters", "MACs", f"{kind.replace('_', ' ')} %"]
    return Table(
        header,
        [
            [o.label, o.point or "–", f"{o.capacity:g}", f"{o.parameters:,}", f"{o.macs:,}", percent([o.accuracy])]
            for o in front
        ],
    )


def pareto_csv(found: Iterable[Offer], kind: str = "accuracy") -> str:
    """Plain numbers, one line an offer by rising cost; `front`: whether no other one dominates it."""
    found = sorted(found, key=lambda offer: (offer.macs, -offer.accuracy))
    front = pareto(found)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "point", "capacity", "parameters", "macs", kind, "front"])
    writer.writerows([*astuple(offer), int(offer in front)] for offer in found)
    return text.getvalue()


def percent(values: Sequence[float]) -> str:
    """Shares as "81.20 ± 0.35", in per cent; one value has no ±, none is a dash."""
    if not values:
        return "–"
    mean = f"{100 * statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.2f}"


def human_bytes(amount: float) -> str:
    """Decimal units: "1.23 GB"."""
    return _scaled(amount, "B")


def human_flops(amount: float) -> str:
    """ "1.23 T" for 1.23e12."""
    return _scaled(amount, "").rstrip()


def human_time(seconds: float) -> str:
    """ "9.5 s", "3 min 05 s" or "2 h 07 min"."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def _scaled(amount: float, unit: str) -> str:
    prefixes = " kMGTPE"
    while amount >= 999.5 and len(prefixes) > 1:
        amount, prefixes = amount / 1000, prefixes[1:]
    return f"{amount:.3g} {prefixes[0].strip()}{unit}"


def _cost(values: Sequence[float], human: Any) -> str:
    return human(statistics.fmean(values)) if values else "–"


def _accuracy(capacity: float) -> str:
    return f"accuracy_{capacity:g}"


def _tex(cell: str) -> str:
    special = {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "±": r"$\pm$", "–": "--"}
    return "".join(special.get(letter, letter) for letter in cell)


# plots: each writes one PNG


def write_report(folder: str | Path, records: Sequence[Record], metric: str = "accuracy_mean") -> None:
    """results.csv, .md, .tex and the plots of a comparison into a folder; rows are of runs on disk."""
    folder = Path(folder)
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    (folder / "results.csv").write_text(results_csv(records, metric))
    (folder / "results.md").write_text(table(records, metric).markdown())
    (folder / "results.tex").write_text(table(records, metric).latex())
    ranked = [record for runs in by_label(records, metric).values() for record in runs]
    curves: dict[str, list[list[Line]]] = defaultdict(list)
    for record in ranked:
        curves[record["label"]].append(Run.open(record["path"]).rounds())
    learning_curves(folder / "plots" / "learning_curves.png", curves, metric)
    accuracy_by_capacity(folder / "plots" / "accuracy_by_capacity.png", ranked)
    clients: dict[str, list[float]] = defaultdict(list)
    for record in ranked:
        clients[record["label"]] += read_json(Path(record["path"]) / "clients.json").values()
    if all(clients.values()):
        accuracy_histogram(folder / "plots" / "client_accuracy.png", clients)


def write_pareto(folder: str | Path, records: Sequence[Record], metric: str = "accuracy_mean") -> None:
    """pareto.csv, .md and the plot of all trials into a folder, where their networks differ in cost. What is chosen by
    validation or local accuracies (`metric`) is drawn by them."""
    folder, match = Path(folder), re.match(r"((validation|local)_)?accuracy(?=_)", metric)
    kind = match[0] if match else "accuracy"
    found = offers(records, kind)
    if len({offer.macs for offer in found}) < 2:
        return
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    (folder / "pareto.csv").write_text(pareto_csv(found, kind))
    (folder / "pareto.md").write_text(pareto_table(pareto(found), kind).markdown())
    pareto_front(folder / "plots" / "pareto.png", found, kind)


def learning_curves(
    path: str | Path, curves: Mapping[str, Sequence[Sequence[Line]]], metric: str = "accuracy_mean"
) -> None:
    """`metric` over rounds: for each label its runs' lines; mean and ± standard deviation over the runs."""
    figure, axes = new_figure()
    for label, style in styles_of(curves).items():
        rounds, values = _common(curves[label], metric)
        if not len(rounds):
            continue
        mean = values.mean(0)
        marker = {"marker": style["marker"], "markersize": 4} if len(rounds) <= 12 else {}
        line = {"color": style["color"], "linestyle": style["linestyle"]} | marker
        axes.plot(rounds, mean, label=label, linewidth=1.8, **line)
        if len(values) > 1:
            std = values.std(0, ddof=1)
            axes.fill_between(rounds, mean - std, mean + std, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_xlabel("round")
    axes.set_ylabel(metric.replace("_", " "))
    _legend(axes)
    save(figure, path)


def accuracy_by_capacity(path: str | Path, records: Sequence[Record]) -> None:
    """Test accuracy of the submodel of every capacity (log2), mean and standard deviation over seeds."""
    figure, axes = new_figure()
    groups = by_label(records)
    known = capacities(records)
    for label, style in styles_of(groups).items():
        values = {c: v for c in known if (v := _values(groups[label], _accuracy(c)))}
        mean = [statistics.fmean(v) for v in values.values()]
        std = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values.values()]
        axes.errorbar(list(values), mean, std, label=label, capsize=3, markersize=5, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(known, [f"{c:g}" for c in known])
    axes.minorticks_off()
    axes.set_xlabel("capacity of the client")
    axes.set_ylabel("accuracy")
    _legend(axes)
    save(figure, path)


def pareto_front(path: str | Path, found: Sequence[Offer], kind: str = "accuracy") -> None:
    """Accuracy over multiply-adds (log) of every offer; those that no other one dominates are joined, and say their
    capacity."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure, axes = new_figure()
    front = pareto(found)
    axes.plot([o.macs for o in front], [o.accuracy for o in front], color="#888888", linewidth=1.2, zorder=1)
    styles = styles_of(sorted({offer.label for offer in found}))
    for label, style in styles.items():
        for some, alpha, size in ((found, 0.35, 22), (front, 1.0, 44)):
            own = [offer for offer in some if offer.label == label]
            look = {"color": style["color"], "marker": style["marker"], "linewidths": 0, "alpha": alpha}
            axes.scatter([o.macs for o in own], [o.accuracy for o in own], s=size, **look)
        if len(styles) > 1:
            axes.plot([], [], label=label, color=style["color"], marker=style["marker"], linestyle="")
    for offer in front:
        place = {"xytext": (-4, 5), "textcoords": "offset points", "ha": "right"}
        axes.annotate(f"{offer.capacity:g}", (offer.macs, offer.accuracy), fontsize=8, **place)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda macs, _: human_flops(macs)))
    axes.minorticks_off()
    axes.margins(0.08)
    axes.set_xlabel("multiply-adds of one sample")
    axes.set_ylabel(kind.replace("_", " "))
    _legend(axes)
    save(figure, path)


def label_distribution(path: str | Path, counts: np.ndarray) -> None:
    """Samples of every class at every client: counts [clients, classes]; above it, samples a client."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

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
    save(figure, path)


def accuracy_histogram(path: str | Path, accuracies: Mapping[str, Sequence[float]]) -> None:
    """How many clients reach which accuracy: for each label the accuracies [clients]; dashes are means."""
    figure, axes = new_figure()
    for label, style in styles_of(accuracies).items():
        values = np.asarray(accuracies[label])
        color = style["color"]
        axes.hist(values, bins=20, range=(0, 1), histtype="stepfilled", color=color, alpha=0.15)
        axes.hist(values, bins=20, range=(0, 1), histtype="step", color=color, label=label)
        axes.axvline(values.mean(), color=color, linestyle="--", linewidth=1)
    axes.set_xlabel("accuracy of a client on its own test data")
    axes.set_ylabel("clients")
    _legend(axes)
    save(figure, path)


def _common(runs: Sequence[Sequence[Line]], metric: str) -> tuple[list[int], np.ndarray]:
    """The rounds in which all runs have the metric [R], and its values [runs, R]."""
    series = [{line["round"]: line[metric] for line in lines if metric in line} for lines in runs]
    rounds = sorted(set.intersection(*map(set, series)))
    return rounds, np.array([[one[round] for round in rounds] for one in series])


def styles_of(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Color, line and marker of each label: the same in all plots of the same labels, however ranked."""
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


def new_figure() -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(axes: "Axes") -> None:
    """Inside while it is short, to the right of the axes when it is not."""
    _, labels = axes.get_legend_handles_labels()
    if len(labels) > 5:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif labels:
        axes.legend(frameon=False)


def save(figure: "Figure", path: str | Path) -> None:
    figure.savefig(path)
