"""What a number of an evaluation costs: the networks of all trials of a search, and the front of those that none beats
in both."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from matplotlib.ticker import FuncFormatter, LogLocator

from rayfl.metrics import SPLITS, label, named
from rayfl.results.drawing import Plot, Style, legend, new_figure, said, styles_of
from rayfl.results.tables import Record, Table, as_csv, facts_of, human_flops, mean_of, percent, plain, point_of


@dataclass(frozen=True)
class Offer:
    """The network of one capacity, after the runs of one point of a search: what it costs and what it reaches. Of a
    masked network only what is left of it costs, a mean over the point's seeds."""

    label: str
    point: str
    capacity: float
    parameters: int
    macs: int
    value: float
    """The mean of its score over the point's seeds, at their last evaluation."""


def offers(records: Iterable[Record], split: str = "test") -> list[Offer]:
    """Every capacity of every point of which rows have the score on this split (accuracy_0.5, ...) and the costs."""
    groups: dict[tuple, list[Record]] = defaultdict(list)
    for record in records:
        facts = facts_of(record)
        for capacity in facts.capacities:
            name = named(facts.score, capacity, split)
            if math.isfinite(record.get(name, math.nan)) and named("macs", capacity) in record:
                groups[capacity, name, record["label"], point_of(record)].append(record)
    return [
        Offer(
            label=of,
            point=rows[0].get("point", ""),
            capacity=capacity,
            parameters=round(mean_of(rows, named("parameters", capacity))),
            macs=round(mean_of(rows, named("macs", capacity))),
            value=mean_of(rows, name),
        )
        for (capacity, name, of, _), rows in groups.items()
    ]


def front(found: Iterable[Offer], better: str = "max") -> list[Offer]:
    """Those that no other one dominates, by rising cost: none is better for as few multiply-adds, or cheaper and as
    good."""
    best: list[Offer] = []
    sign = 1 if better == "max" else -1
    for offer in sorted(found, key=lambda offer: (offer.macs, -sign * offer.value)):
        if not best or sign * offer.value > sign * best[-1].value:
            best.append(offer)
    return best


def write_pareto(folder: Path, records: Sequence[Record], metric: str = "accuracy_mean") -> None:
    """pareto.csv, .md and the plot of all trials into a folder, where their networks differ in cost. What is chosen by
    a number of another split (`metric`: of a validation set, or of clients' own data) is drawn by that split's."""
    facts = facts_of(records[0])
    _, split = facts.about(metric) or ("", "test")
    found = offers(records, split)
    if len({offer.macs for offer in found}) < 2:
        return
    kind = f"{SPLITS[split]}{facts.score}"
    better = facts.scores[facts.score]
    cell = percent if better == "max" else plain
    folder.mkdir(parents=True, exist_ok=True)
    ranked = sorted(found, key=lambda offer: (offer.macs, offer.value if better == "min" else -offer.value))
    best = front(found, better)
    header = ["method", "point", "capacity", "parameters", "macs", kind, "front"]
    (folder / "pareto.csv").write_text(as_csv(header, [[*astuple(o), int(o in best)] for o in ranked]))
    title = kind.replace("_", " ") + (" %" if better == "max" else "")
    rows = [
        [o.label, o.point or "–", label(o.capacity), f"{o.parameters:,}", f"{o.macs:,}", cell([o.value])] for o in best
    ]
    table = Table(["method", "point", "capacity", "parameters", "MACs", title], rows)
    (folder / "pareto.md").write_text(table.markdown())
    styles = styles_of({record["label"] for record in records})
    pareto_front(found, best, said(facts.score, split), styles).write(folder / "plots" / "pareto")


def pareto_front(found: Sequence[Offer], best: Sequence[Offer], value: str, styles: Mapping[str, Style]) -> Plot:
    """A score (`value`: its name) over multiply-adds (log) of every offer; those of the front are joined, and say their
    capacity. `styles` of their labels and perhaps others. Its numbers are in pareto.csv."""
    figure, axes = new_figure()
    axes.plot([o.macs for o in best], [o.value for o in best], color="#888888", linewidth=1.2, zorder=1)
    labels = sorted({offer.label for offer in found})
    for of in labels:
        style = styles[of]
        for some, alpha, size in ((found, 0.35, 22), (best, 1.0, 44)):
            own = [offer for offer in some if offer.label == of]
            look = {"color": style["color"], "marker": style["marker"], "linewidths": 0, "alpha": alpha}
            axes.scatter([o.macs for o in own], [o.value for o in own], s=size, **look)
        if len(labels) > 1:
            axes.plot([], [], label=of, color=style["color"], marker=style["marker"], linestyle="")
    for offer in best:
        place = {"xytext": (-4, 5), "textcoords": "offset points", "ha": "right"}
        axes.annotate(label(offer.capacity), (offer.macs, offer.value), fontsize=8, **place)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda macs, _: human_flops(macs)))
    axes.minorticks_off()
    axes.margins(0.08)
    axes.set_xlabel("multiply-adds of one sample")
    axes.set_ylabel(value)
    legend(axes)
    return Plot(figure)
