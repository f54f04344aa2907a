"""What a number of an evaluation costs: the networks of the best points of a search, and the front of those that none
beats in both."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from matplotlib.ticker import FuncFormatter, LogLocator

from rayfl.metrics import SPLITS, label, named
from rayfl.results.cells import as_csv, human_flops, percent, plain
from rayfl.results.drawing import Plot, Style, legend, name_points, new_figure, said, title_axis
from rayfl.results.plots import named_styles, with_unit
from rayfl.results.rows import Record, facts_of, mean_of, point_of, titles_of
from rayfl.results.tables import Table


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


def candidates(best: Sequence[Record], trials: Iterable[Record]) -> list[Record]:
    """The rows of the best points, and of the points of a label whose networks are others than those of its best one: a
    search over networks has many that are worth a look. A point with the same networks is only a worse training."""
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
    """Whether their networks cost the same before anything is masked."""
    costs = [[_dense(record, c) for c in facts_of(record).capacities] for record in (one, other)]
    return len(costs[0]) == len(costs[1]) and all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-3), *costs))


def _dense(record: Record, capacity: float) -> float:
    return record.get(named("macs", capacity), 0) / (record.get(named("macs_share", capacity), 1) or 1)


def write_pareto(
    folder: Path,
    best: Sequence[Record],
    trials: Sequence[Record],
    metric: str = "accuracy_mean",
    formats: Sequence[str] = (),
) -> None:
    """pareto.csv, .md and the plot into a folder, where networks differ in cost. What is chosen by a number of another
    split (`metric`: of a validation set, or of clients' own data) is drawn by that split's."""
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
    (folder / "pareto.csv").write_text(as_csv(header, [[*astuple(o), int(o in ahead)] for o in ranked]))
    cells = [
        [titles[o.label], o.point or "–", label(o.capacity), f"{o.parameters:,}", f"{o.macs:,}", cell([o.value])]
        for o in ahead
    ]
    title = with_unit(kind.replace("_", " "), facts, facts.score)
    table = Table(["method", "point", "capacity", "parameters", "MACs", title], cells)
    (folder / "pareto.md").write_text(table.markdown())
    axis = with_unit(said(facts.score, split), facts, facts.score)
    pareto_front(found, ahead, axis, titles, named_styles(rows), better).write(folder / "plots" / "pareto", formats)


def pareto_front(
    found: Sequence[Offer],
    best: Sequence[Offer],
    axis: str,
    titles: Mapping[str, str],
    styles: Mapping[str, Style],
    better: str = "max",
) -> Plot:
    """A score over multiply-adds (log) of every offer; those of the front are joined, and say how many parameters they
    have. The score's axis, of this name, goes half as far below the front as the front is high, and says how many
    offers are worse than that. `titles` of labels, `styles` of titles. Its numbers are in pareto.csv."""
    figure, axes = new_figure()
    low, high = _limits([offer.value for offer in best], better)
    seen = [offer for offer in found if low <= offer.value <= high]
    axes.plot([o.macs for o in best], [o.value for o in best], color="#888888", linewidth=1.2, zorder=1)
    labels = sorted({offer.label for offer in seen}, key=titles.__getitem__)
    for of in labels:
        style = styles[titles[of]]
        for some, alpha, size in ((seen, 0.35, 22), (best, 1.0, 44)):
            own = [offer for offer in some if offer.label == of]
            look = {"color": style["color"], "marker": style["marker"], "linewidths": 0, "alpha": alpha}
            axes.scatter([o.macs for o in own], [o.value for o in own], s=size, **look)
        if len(labels) > 1:
            axes.plot([], [], label=titles[of], color=style["color"], marker=style["marker"], linestyle="")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda macs, _: human_flops(macs)))
    axes.minorticks_off()
    axes.margins(0.08)
    hidden = len(found) - len(seen)
    axes.set_xlabel("multiply-adds of one sample" + (f" (worse ones outside: {hidden})" if hidden else ""))
    title_axis(axes.yaxis, axis)
    legend(axes)
    name_points(axes, [(o.macs, o.value, f"{human_flops(o.parameters)} parameters") for o in best])
    return Plot(figure)


def _limits(values: Sequence[float], better: str) -> tuple[float, float]:
    """Of the offers that a plot of this front shows."""
    room = (max(values) - min(values)) / 2 or abs(max(values)) / 10
    return (min(values) - room, math.inf) if better == "max" else (-math.inf, max(values) + room)
