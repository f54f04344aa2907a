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
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rayfl.methods import METHODS
from rayfl.population import Population
from rayfl.tracking.records import DENSITY_AT_BEST, Line, Run, amounts, read_json

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


def judged_by(params: Mapping[str, Any]) -> str:
    """What a sweep or a run with these flat parameters is judged by: clients' own accuracy in a sweep that is tuned by
    that, and in a run whose clients keep networks of their own, if they are evaluated; else the mean over
    capacities."""
    if "search.metric" in params:
        is_local = params["search.metric"].startswith("local_")
    else:
        is_local = is_personal(params) and params.get("evaluation.clients", True)
    return "local_accuracy_mean" if is_local else "accuracy_mean"


def is_personal(params: Mapping[str, Any]) -> bool:
    """Whether clients keep networks of their own in a run with these flat parameters: the server's is nobody's."""
    method = METHODS.get(params.get("method.name", ""))
    return method is not None and method.is_personal


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
    """The network of one capacity, after the runs of one point of a search: what it costs and what it reaches. Of a
    masked network only what is there costs, a mean over the point's seeds; if it is a client's own, all of it."""

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
            parameters=_there(rows, f"parameters_{capacity}", f"density_{capacity}"),
            macs=_there(rows, f"macs_{capacity}", f"macs_share_{capacity}"),
            accuracy=_mean(rows, f"{kind}_{capacity}"),
        )
        for (capacity, label, _), rows in groups.items()
    ]


def _there(rows: Sequence[Record], amount: str, share: str) -> int:
    return round(statistics.fmean(row[amount] * row.get(share, 1.0) for row in rows))


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
    rows = [
        [name, *(run.get(column, "") for column in columns)]
        for name, runs in by_label(records, metric).items()
        for run in runs
        if "accuracy_mean" in run
    ]
    return as_csv(["method", *columns], rows)


BEST = {"best_local_accuracy_mean": "best local %", "best_accuracy_mean": "best %", DENSITY_AT_BEST: "local density %"}


def best_table(records: Sequence[Record], metric: str = "accuracy_mean") -> Table:
    """One line a label as SpaFL's tables (arXiv 2406.00431) have it, the best by the best `metric` first: the best
    accuracies of any evaluated round; if some clients have masked networks of their own, their density in the round
    with the best local accuracy; what training communicated, and its multiply-adds a client (`amounts`). That density
    is a mean over layers; those of capacities (`density_0.5`), which other masked methods have, are shares of all
    parameters, and in no column."""
    shares = {key: name for key, name in BEST.items() if _values(records, key)}
    rows = []
    for name, runs in by_label(records, f"best_{metric}").items():
        spent = [amounts(run) for run in runs]
        cells = [percent(_values(runs, key)) for key in shares]
        cells += [_cost(_values(spent, "gbit"), "{:.4g}".format), _cost(_values(spent, "client_macs"), human_flops)]
        rows.append([name, str(len(runs)), *cells])
    return Table(["method", "seeds", *shares.values(), "Gbit", "MACs a client"], rows)


def best_csv(records: Sequence[Record], metric: str = "accuracy_mean") -> str:
    """Plain numbers of `best_table`, one line a row with an accuracy."""
    columns = [key for key in BEST if _values(records, key)] + ["gbit", "client_macs"]
    rows = [
        [name, run["seed"], *({**run, **amounts(run)}.get(column, "") for column in columns)]
        for name, runs in by_label(records, f"best_{metric}").items()
        for run in runs
        if "accuracy_mean" in run
    ]
    return as_csv(["method", "seed", *columns], rows)


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
    header = ["method", "point", "capacity", "parameters", "macs", kind, "front"]
    return as_csv(header, [[*astuple(offer), int(offer in front)] for offer in found])


def as_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
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


# plots: each writes one PNG; beside it, with the same name, a CSV of its numbers unless they are in a file already


def write_report(folder: str | Path, records: Sequence[Record], metric: str = "accuracy_mean") -> None:
    """Tables (results, best: .csv, .md, .tex) and plots of a comparison into a folder; rows are of runs on disk. Plots
    by capacity leave out methods whose clients keep networks of their own: their server's is nobody's."""
    folder = Path(folder)
    plots = folder / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    for name, text, cells in (
        ("results", results_csv(records, metric), table(records, metric)),
        ("best", best_csv(records, metric), best_table(records, metric)),
    ):
        (folder / f"{name}.csv").write_text(text)
        (folder / f"{name}.md").write_text(cells.markdown())
        (folder / f"{name}.tex").write_text(cells.latex())
    ranked = [record for runs in by_label(records, metric).values() for record in runs]
    curves: dict[str, list[list[Line]]] = defaultdict(list)
    clients: dict[str, list[list[float]]] = defaultdict(list)
    for record in ranked:
        curves[record["label"]].append(Run.open(record["path"]).rounds())
        accuracies = read_json(Path(record["path"]) / "clients.json")
        clients[record["label"]] += [list(accuracies.values())] if accuracies else []
    learning_curves(plots / "learning_curves.png", curves, metric)
    if len(curves) > 1:
        accuracy_by_traffic(plots / "accuracy_by_traffic.png", curves, metric)
    shared, styles = [record for record in ranked if not is_personal(record["params"])], styles_of(curves)
    if shared:
        accuracy_by_capacity(plots / "accuracy_by_capacity.png", shared, styles)
    if len(by_label(shared)) > 1:
        held = sorted(trained(shared), reverse=True)
        of_shared = {label: curves[label] for label in by_label(shared)}
        curves_by_capacity(plots / "curves_by_capacity.png", of_shared, held, styles)
    if all(clients.values()):
        accuracy_histogram(plots / "client_accuracy.png", clients)


def trained(records: Iterable[Record]) -> set[float]:
    """The capacities that clients have in some row; a population may have others, of weight 0."""
    found: set[float] = set()
    for record in records:
        section = {k.removeprefix("clients."): v for k, v in record["params"].items() if k.startswith("clients.")}
        found |= {capacity for capacity, weight in Population(**section).levels if weight}
    return found


def write_pareto(folder: str | Path, records: Sequence[Record], metric: str = "accuracy_mean") -> None:
    """pareto.csv, .md and the plot of all trials into a folder, where their networks differ in cost. What is chosen by
    validation or local accuracies (`metric`) is drawn by them; but for the local ones, without methods whose clients
    keep networks of their own."""
    folder, match = Path(folder), re.match(r"((validation|local)_)?accuracy(?=_)", metric)
    kind = match[0] if match else "accuracy"
    judged = [record for record in records if kind == "local_accuracy" or not is_personal(record["params"])]
    found = offers(judged, kind)
    if len({offer.macs for offer in found}) < 2:
        return
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    (folder / "pareto.csv").write_text(pareto_csv(found, kind))
    (folder / "pareto.md").write_text(pareto_table(pareto(found), kind).markdown())
    pareto_front(folder / "plots" / "pareto.png", found, kind, styles_of({record["label"] for record in records}))


def learning_curves(
    path: str | Path,
    curves: Mapping[str, Sequence[Sequence[Line]]],
    metric: str = "accuracy_mean",
    styles: Mapping[str, Mapping[str, Any]] | None = None,
    **axis: Any,
) -> None:
    """`metric` over rounds: for each label its runs' lines; mean and ± standard deviation over the runs. `styles` in
    place of `styles_of`; `axis` as yscale, ylim."""
    from matplotlib.ticker import LogLocator

    figure, axes = new_figure()
    for label, style in (styles or styles_of(curves)).items():
        _draw(axes, curves[label], metric, style, label)
    axes.set(xlabel="round", ylabel=_said(metric), **axis)
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    _legend(axes)
    save(figure, path)
    Path(path).with_suffix(".csv").write_text(as_csv(*_over_rounds(curves, metric)))


def curves_by_capacity(
    path: str | Path,
    curves: Mapping[str, Sequence[Sequence[Line]]],
    capacities: Sequence[float],
    styles: Mapping[str, Mapping[str, Any]],
) -> None:
    """Test accuracy of every capacity over rounds, a panel a capacity, as `learning_curves` (FIARSE, arXiv 2407.19389,
    figure 3); nothing for one capacity. `styles` of these labels and perhaps others."""
    if len(capacities) < 2:
        return
    figure, panels = _panels([f"capacity {capacity:g}" for capacity in capacities], "round", "accuracy")
    rows: list[list[Any]] = []
    for axes, capacity in zip(panels, capacities, strict=True):
        for label, runs in curves.items():
            _draw(axes, runs, _accuracy(capacity), styles[label], label)
        rows += [[capacity, *row] for row in _over_rounds(curves, _accuracy(capacity))[1]]
    lines = [line for axes in panels for line in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in lines}
    figure.legend(handles.values(), handles.keys(), frameon=False, loc="outside right center")
    save(figure, path)
    header, _ = _over_rounds(curves, "accuracy")
    Path(path).with_suffix(".csv").write_text(as_csv(["capacity", *header], rows))


def accuracy_by_traffic(
    path: str | Path, curves: Mapping[str, Sequence[Sequence[Line]]], metric: str = "accuracy_mean"
) -> None:
    """`metric` over what was communicated by then, up and down (SpaFL, arXiv 2406.00431, figure 2): for each label
    its runs' lines, means over the runs. On a log scale if the labels differ by ten times; one that sends nothing is
    a dotted line at its last value. Nothing if all send as much."""
    found = {}
    for label, runs in curves.items():
        sent = [_with_traffic(lines) for lines in runs]
        rounds, gbit = _common([[line for line in lines if metric in line] for lines in sent], "gbit")
        if rounds:
            found[label] = rounds, gbit.mean(0), _common(sent, metric)[1].mean(0)
    totals = [float(gbit[-1]) for _, gbit, _ in found.values()]
    if not any(totals) or max(totals) - min(totals) < 0.01 * max(totals):
        return
    figure, axes = new_figure()
    styles = styles_of(curves)
    for label, (_, gbit, values) in found.items():
        style = styles[label]
        if gbit[-1]:
            axes.plot(gbit, values, label=label, **_line(style, len(gbit)))
        else:
            axes.axhline(values[-1], label=f"{label}: sends nothing", color=style["color"], linestyle=":")
    if max(totals) > 10 * min(total for total in totals if total):
        axes.set_xscale("log")
    axes.set_xlabel("communicated by all clients, Gbit")
    axes.set_ylabel(_said(metric))
    _legend(axes)
    save(figure, path)
    rows = [
        [label, round, float(x), float(y)] for label, some in found.items() for round, x, y in zip(*some, strict=True)
    ]
    Path(path).with_suffix(".csv").write_text(as_csv(["method", "round", "gbit", metric], rows))


def accuracy_by_capacity(path: str | Path, records: Sequence[Record], styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Test accuracy of the submodel of every capacity (log2), mean and standard deviation over seeds. Markers of
    capacities that no client has are hollow (FIARSE, arXiv 2407.19389, figure 4). `styles` of their labels and perhaps
    others."""
    figure, axes = new_figure()
    groups = by_label(records)
    known, everywhere, rows = capacities(records), trained(records), []
    for label, runs in groups.items():
        style = styles[label]
        values = {c: v for c in known if (v := _values(runs, _accuracy(c)))}
        mean = {c: statistics.fmean(v) for c, v in values.items()}
        std = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values.values()]
        axes.errorbar(list(mean), list(mean.values()), std, label=label, capsize=3, markersize=5, **style)
        held = trained(runs)
        rows += [[label, c, m, s, int(c in held)] for (c, m), s in zip(mean.items(), std, strict=True)]
        new = [c for c in mean if c not in held]
        look = {"color": style["color"], "marker": style["marker"], "markersize": 5, "markerfacecolor": "white"}
        axes.plot(new, [mean[c] for c in new], linestyle="", zorder=3, **look)
    axes.set_xscale("log", base=2)
    ticks = _apart(sorted(everywhere & set(known), reverse=True) + known)
    axes.set_xticks(ticks, [f"{c:g}" for c in ticks])
    axes.minorticks_off()
    axes.set_xlabel("capacity of the client" + ("" if everywhere >= set(known) else "; hollow: no client has it"))
    axes.set_ylabel("accuracy")
    _legend(axes)
    save(figure, path)
    header = ["method", "capacity", "accuracy", "std", "trained"]
    Path(path).with_suffix(".csv").write_text(as_csv(header, rows))


def _apart(known: Sequence[float], least: float = 0.07) -> list[float]:
    """Of these capacities those that a log axis can name: the first, and all that are far enough from those before."""
    span = math.log(max(known) / min(known)) or 1.0
    chosen: list[float] = []
    for capacity in known:
        if all(abs(math.log(capacity / other)) >= least * span for other in chosen):
            chosen.append(capacity)
    return chosen


def pareto_front(path: str | Path, found: Sequence[Offer], kind: str, styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Accuracy over multiply-adds (log) of every offer; those that no other one dominates are joined, and say their
    capacity. `styles` of their labels and perhaps others."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure, axes = new_figure()
    front = pareto(found)
    axes.plot([o.macs for o in front], [o.accuracy for o in front], color="#888888", linewidth=1.2, zorder=1)
    labels = sorted({offer.label for offer in found})
    for label in labels:
        style = styles[label]
        for some, alpha, size in ((found, 0.35, 22), (front, 1.0, 44)):
            own = [offer for offer in some if offer.label == label]
            look = {"color": style["color"], "marker": style["marker"], "linewidths": 0, "alpha": alpha}
            axes.scatter([o.macs for o in own], [o.accuracy for o in own], s=size, **look)
        if len(labels) > 1:
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
    axes.set_ylabel(_said(kind))
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


def accuracy_histogram(path: str | Path, accuracies: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """How many clients reach which accuracy (FIARSE, arXiv 2407.19389, figure 2): for each label, in a panel of its
    own, the accuracies [clients] of its runs; counts are means over the runs, dashes of all accuracies."""
    from matplotlib.ticker import MaxNLocator

    edges, rows = np.linspace(0, 1, 21), []
    means = {label: statistics.fmean(chain(*runs)) for label, runs in accuracies.items()}
    titles = [f"{label}: mean {mean:.3f}" for label, mean in means.items()]
    what = "clients, mean over seeds" if any(len(runs) > 1 for runs in accuracies.values()) else "clients"
    figure, panels = _panels(titles, "accuracy of a client on its own test data", what)
    for axes, (label, style) in zip(panels, styles_of(accuracies).items(), strict=True):
        counts = np.mean([np.histogram(values, edges)[0] for values in accuracies[label]], axis=0)
        axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        axes.stairs(counts, edges, color=style["color"], fill=True, alpha=0.3)
        axes.stairs(counts, edges, color=style["color"])
        axes.axvline(means[label], color=style["color"], linestyle="--", linewidth=1)
        rows.append([label, *(f"{count:g}" for count in counts)])
    save(figure, path)
    Path(path).with_suffix(".csv").write_text(as_csv(["method", *(f"{edge:.2f}" for edge in edges[:-1])], rows))


def _common(runs: Sequence[Sequence[Line]], metric: str) -> tuple[list[int], np.ndarray]:
    """The rounds in which all runs have the metric [R], and its values [runs, R]."""
    series = [{line["round"]: line[metric] for line in lines if metric in line} for lines in runs]
    rounds = sorted(set.intersection(*map(set, series)))
    return rounds, np.array([[one[round] for round in rounds] for one in series])


def _over_rounds(curves: Mapping[str, Sequence[Sequence[Line]]], metric: str) -> tuple[list[str], list[list[Any]]]:
    """A header and a row a round: of every label the mean over its runs and, of several, the standard deviation."""
    header, columns = ["round"], []
    for label, runs in curves.items():
        rounds, values = _common(runs, metric)
        header.append(label)
        columns.append(dict(zip(rounds, values.mean(0).tolist(), strict=True)) if rounds else {})
        if len(runs) > 1:
            header.append(f"{label} std")
            columns.append(dict(zip(rounds, values.std(0, ddof=1).tolist(), strict=True)) if rounds else {})
    rounds = sorted(set().union(*columns))
    return header, [[round, *(column.get(round, "") for column in columns)] for round in rounds]


def _draw(axes: "Axes", runs: Sequence[Sequence[Line]], metric: str, style: Mapping[str, Any], label: str) -> None:
    """`metric` over rounds: mean and standard deviation over the runs' lines."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    rounds, values = _common(runs, metric)
    if not rounds:
        return
    mean = values.mean(0)
    axes.plot(rounds, mean, label=label, **_line(style, len(rounds)))
    if len(values) > 1:
        std = values.std(0, ddof=1)
        axes.fill_between(rounds, mean - std, mean + std, color=style["color"], alpha=0.15, linewidth=0)


def _said(metric: str) -> str:
    """A metric as an axis has it."""
    is_local = metric.startswith("local_accuracy")
    return "accuracy of clients on their own test data" if is_local else metric.replace("_", " ")


def _line(style: Mapping[str, Any], points: int) -> dict[str, Any]:
    """With markers while they are few."""
    marker = {"marker": style["marker"], "markersize": 4} if points <= 12 else {}
    return {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.8} | marker


def _with_traffic(lines: Iterable[Line]) -> list[Line]:
    """Lines with `gbit`: what all rounds up to theirs communicated, in 10^9 bits."""
    sent, found = 0.0, []
    for line in lines:
        sent += 8 * (line.get("bytes_down", 0) + line.get("bytes_up", 0)) / 1e9
        found.append(line | {"gbit": sent})
    return found


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
    _bare(axes)
    return figure, axes


def _panels(titles: Sequence[str], xlabel: str, ylabel: str) -> "tuple[Figure, list[Axes]]":
    """Axes of equal scales, one a title, in as few lines as are no wider than three."""
    from matplotlib.figure import Figure

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


def _bare(axes: "Axes") -> None:
    """A light grid and no frame."""
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: "Axes") -> None:
    """Inside while it is short, to the right of the axes, as high as they are at most, where it would hide lines."""
    _, labels = axes.get_legend_handles_labels()
    if len(labels) > 4:
        size = min(10, 160 / len(labels))
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=size)
    elif labels:
        axes.legend(frameon=False)


def save(figure: "Figure", path: str | Path) -> None:
    """Makes the file's folder too."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
