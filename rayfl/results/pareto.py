"""Pareto front of score and cost over the networks of a search."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from matplotlib.ticker import FuncFormatter, LogLocator

from rayfl.metrics import SPLITS, label, named
from rayfl.results.cells import as_csv, human_flops, percent, plain
from rayfl.results.drawing import Plot, Style, axis_name, legend, name_points, new_figure, title_axis
from rayfl.results.plots import named_styles, with_unit
from rayfl.results.rows import Record, facts_of, mean_of, point_of, titles_of
from rayfl.results.tables import Table


@dataclass(frozen=True)
class Offer:
    """Cost and score of one capacity's network after the runs of one search point. Costs of masked networks count the
    remaining parameters, as a mean over the point's seeds."""

    label: str
    point: str
    capacity: float
    parameters: int
    macs: int
    value: float
    """Mean score over the point's seeds at the last evaluation."""


def offers(records: Iterable[Record], split: str = "test") -> list[Offer]:
    """Return an offer per capacity and point with a score on this split (accuracy_0.5, ...) and costs."""
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
    """Return the offers that no other one dominates in multiply-adds and score, by rising cost."""
    best: list[Offer] = []
    sign = 1 if better == "max" else -1
    for offer in sorted(found, key=lambda offer: (offer.macs, -sign * offer.value)):
        if not best or sign * offer.value > sign * best[-1].value:
            best.append(offer)
    return best


def candidates(best: Sequence[Record], trials: Iterable[Record]) -> list[Record]:
    """Return the rows of the best points, and of a label's other points if their networks differ in cost from those of
    its best point. Points with equal networks only differ in training and are left out."""
    chosen = {record["label"]: record for record in best}
    points = {(record["label"], point_of(record)) for record in best}
    others = [
        trial
        for trial in trials
        if trial["label"] in chosen
        and (trial["label"], point_of(trial)) not in points
        and not _alike(trial, chosen[trial["label"]])
    ]
    return [*best, *others]


def _alike(one: Record, other: Record) -> bool:
    """Return whether the dense networks of two rows have equal costs up to rounding."""
    costs = [[_dense(record, c) for c in facts_of(record).capacities] for record in (one, other)]
    return len(costs[0]) == len(costs[1]) and all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(*costs, strict=True))


def _dense(record: Record, capacity: float) -> float:
    return record.get(named("macs", capacity), 0) / (record.get(named("macs_share", capacity), 1) or 1)


def write_pareto(
    folder: Path,
    best: Sequence[Record],
    trials: Sequence[Record],
    metric: str = "accuracy_mean",
    formats: Sequence[str] = (),
) -> None:
    """Write pareto.csv, pareto.md and the plot into a folder if networks differ in cost. Scores are of the split of
    `metric`, the metric that selected the best points."""
    facts = facts_of(best[0])
    _, split = facts.about(metric) or ("", "test")
    rows = candidates(best, trials)
    found = offers(rows, split)
    if len({offer.macs for offer in found}) < 2:
        return
    kind = f"{SPLITS[split]}{facts.score}"
    better = facts.scores[facts.score]
    cell = percent if better == "max" else plain
    folder.mkdir(parents=True, exist_ok=True)
    ranked = sorted(found, key=lambda offer: (offer.macs, offer.value if better == "min" else -offer.value))
    ahead, titles = front(found, better), titles_of(rows)
    header = ["method", "point", "capacity", "parameters", "macs", kind, "front"]
    (folder / "pareto.csv").write_text(
        as_csv(header, [[*astuple(o), int(o in ahead)] for o in ranked]), encoding="utf-8"
    )
    cells = [
        [titles[o.label], o.point or "–", label(o.capacity), f"{o.parameters:,}", f"{o.macs:,}", cell([o.value])]
        for o in ahead
    ]
    title = with_unit(kind.replace("_", " "), facts, facts.score)
    table = Table(["method", "point", "capacity", "parameters", "MACs", title], cells)
    (folder / "pareto.md").write_text(table.markdown(), encoding="utf-8")
    axis = with_unit(axis_name(facts.score, split), facts, facts.score)
    pareto_front(found, ahead, axis, titles, named_styles(rows)).write(folder / "plots" / "pareto", formats)


def pareto_front(
    found: Sequence[Offer], best: Sequence[Offer], axis: str, titles: Mapping[str, str], styles: Mapping[str, Style]
) -> Plot:
    """Plot a score over multiply-adds (log) for every offer; the front is connected and named by its parameters, other
    offers are faint. `axis`: title of the score; `titles` of labels, `styles` of titles."""
    figure, axes = new_figure()
    axes.plot([o.macs for o in best], [o.value for o in best], color="#888888", linewidth=1.2, zorder=1)
    dominated = [offer for offer in found if offer not in best]
    labels = sorted({offer.label for offer in found}, key=titles.__getitem__)
    for of in labels:
        style = styles[titles[of]]
        look = {"color": style["color"], "marker": style["marker"]}
        for some, alpha, size in ((dominated, 0.55, 30), (best, 1.0, 44)):
            own = [offer for offer in some if offer.label == of]
            axes.scatter([o.macs for o in own], [o.value for o in own], s=size, alpha=alpha, linewidths=0, **look)
        axes.plot([], [], label=titles[of], linestyle="", **look)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda macs, _: human_flops(macs)))
    axes.minorticks_off()
    axes.margins(0.08)
    axes.set_xlabel("multiply-adds of one sample")
    title_axis(axes.yaxis, axis)
    legend(axes)
    texts = [f"{human_flops(offer.parameters)} parameters" for offer in best] + [""] * len(dominated)
    name_points(axes, [(o.macs, o.value, text) for o, text in zip((*best, *dominated), texts, strict=True)])
    return Plot(figure)
