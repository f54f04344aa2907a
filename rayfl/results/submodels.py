"""What the submodels of a run are made of: figures of NeFL (arXiv 2308.07761), FIARSE (2407.19389), SpaFL (2406.00431).

Over rounds, of lines:

    submodels   the score of every capacity's network, where clients share one
    layers      of masked networks that are clients' own: share of every layer that they keep (SpaFL's figure 3)
    shares      of masked networks: share of the dense network's multiply-adds and parameters, by capacity

Of networks, of what `Method.deploy` gives a device of a capacity:

    weights     mean |w| of every convolution and linear layer, by capacity (NeFL's figure 5a); of masked ones, of what
                is left
    kept        of masked networks: share of every layer that is left, by capacity
    steps       learned step sizes of the residual branches, by capacity
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rayfl.config import ConfigError
from rayfl.methods.base import Deployment
from rayfl.metrics import Line, label, named
from rayfl.results.drawing import Plot, Style, new_figure, shades_of, styles_of, title_axis
from rayfl.results.folder import RunFolder
from rayfl.results.plots import learning_curves, trained, with_unit
from rayfl.results.rows import Record, by_label, capacities, facts_of
from rayfl.results.summary import DENSITY

Deployments = Mapping[float, Deployment]
"""Capacity -> what a device of this capacity runs, largest first."""

Profile = Mapping[float, Mapping[str, float]]
"""Capacity -> module path -> a number, for what its network has, in the network's order."""

TICKS = 60
"""Names that fit below a plot."""

SHARES = (0.0, 1.03)
"""Limits of an axis of shares."""


def write_submodels(
    folder: Path,
    records: Sequence[Record],
    deployments: Callable[[Path], Deployments],
    notify: Callable[[str], None],
    metric: str = "accuracy_mean",
    formats: Sequence[str] = (),
) -> None:
    """The figures of each label into `folder`/plots/<label>, or into `folder`/plots if it is that run's own.

    What is over rounds is a mean over the label's rows (seeds), the others are of the one with the best `metric`:
    `deployments` gives its networks, or raises a ConfigError that says why they cannot be had, which `say` is told.
    """
    for name, rows in by_label(records, metric).items():
        sign = 1 if facts_of(rows[0]).better(metric) == "max" else -1
        best = Path(max(rows, key=lambda row: sign * row.get(metric, -sign * math.inf))["path"])
        plots = folder / "plots" if best == folder else folder / "plots" / name
        for of, plot in over_rounds(rows).items():
            plot.write(plots / of, formats)
        try:
            deployed = deployments(best)
        except ConfigError as error:
            notify(f"{error}; no plots of its weights")
            continue
        if all(d.is_start for d in deployed.values()):
            notify(f"{best}: every client has a network of its own; no plots of its weights")
            continue
        for of, plot in of_networks(deployed).items():
            plot.write(plots / of, formats)


def over_rounds(records: Sequence[Record]) -> dict[str, Plot]:
    """Name -> plot of what the networks of one label became over rounds: means over the rows, which are of runs on
    disk. What there is nothing of is left out."""
    runs = [RunFolder.open(row["path"]).rounds() for row in records]
    facts = facts_of(records[0])
    shades = shades_of(facts.capacities)
    found = {
        "submodels": submodel_curves(
            runs, facts.score, capacities(records), shades, with_unit(facts.score, facts, facts.score)
        ),
        "layers": layer_curves(runs),
        "shares": share_curves(runs, sorted(trained(records), reverse=True), shades),
    }
    return {name: plot for name, plot in found.items() if plot is not None}


def of_networks(deployed: Deployments) -> dict[str, Plot]:
    """Name -> plot of networks. What there is nothing of is left out."""
    shades = shades_of(deployed)
    found = {
        "weights": profile_plot(weights(deployed), "layer", "mean |weight|", shades),
        "kept": profile_plot(kept(deployed), "layer", "weights that are left %", shades),
        "steps": profile_plot(steps(deployed), "residual branch", "step size", shades),
    }
    return {name: plot for name, plot in found.items() if plot is not None}


# of networks


def weights(deployed: Deployments) -> Profile:
    """Mean absolute value of the weight of every convolution and linear layer that is not frozen: its L1 norm a weight
    that is left."""
    return {
        c: {path: _mean_weight(d, f"{path}.weight") for path in d.net.layers if f"{path}.weight" in d.params}
        for c, d in deployed.items()
    }


def kept(deployed: Deployments) -> Profile:
    """Share of the weight of every masked layer that is left, of masked networks."""
    return {capacity: d.present.layers for capacity, d in deployed.items() if d.masked}


def steps(deployed: Deployments) -> Profile:
    """The step size of every residual branch, by the path of the branch: a network's only parameters without axes."""
    return {
        capacity: {
            name.rpartition(".")[0].rpartition(".")[0]: d.params[name].item()
            for name, shape in d.net.layout.shapes.items()
            if not shape
        }
        for capacity, d in deployed.items()
    }


def profile_plot(profile: Profile, what: str, value: str, shades: Mapping[float, Style]) -> Plot | None:
    """Numbers of modules, a line a capacity, a gap where its network has no such module; None without numbers. `what`
    are the modules, `value` the numbers; `shades` of these capacities and perhaps others."""
    names = list(dict.fromkeys(name for of_capacity in profile.values() for name in of_capacity))
    if not names:
        return None
    figure, axes = new_figure()
    figure.set_size_inches(min(14, 6 + 0.15 * len(names)), 4.8)
    for capacity, numbers in profile.items():
        heights, style = [numbers.get(name, math.nan) for name in names], shades[capacity]
        axes.plot(range(len(names)), heights, label=_legend(capacity), linewidth=1.4, markersize=3.5, **style)
    every = math.ceil(len(names) / TICKS)
    axes.set_xticks(range(0, len(names), every), names[::every], rotation=90, fontsize=7)
    axes.set_xlabel(what)
    title_axis(axes.yaxis, value)
    axes.margins(x=0.02)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    rows = [[name, *(numbers.get(name, "") for numbers in profile.values())] for name in names]
    return Plot(figure, [what, *map(label, profile)], rows)


def _mean_weight(deployed: Deployment, name: str) -> float:
    """0 of a masked weight of which nothing is left."""
    weight = deployed.params[name].abs()
    if name in deployed.masked:
        weight = weight[weight > 0]
    return weight.mean().item() if len(weight) else 0.0


# over rounds


def submodel_curves(
    runs: Sequence[Sequence[Line]],
    score: str,
    capacities: Sequence[float],
    shades: Mapping[float, Style],
    axis: str,
) -> Plot | None:
    """Test score of the network of every capacity over rounds: mean and ± standard deviation over the runs' lines.
    `shades` of these capacities and perhaps others; `axis`: the score's name."""
    keys = {_legend(capacity): named(score, capacity) for capacity in capacities}
    styles = {_legend(capacity): shades[capacity] for capacity in capacities}
    return learning_curves(_curves(runs, keys, score), score, axis, styles) if keys else None


def layer_curves(runs: Sequence[Sequence[Line]]) -> Plot | None:
    """What clients' own masked networks keep of every layer over rounds, and the mean over layers: means over clients,
    then over the runs. Nothing without such networks."""
    start = f"{DENSITY}_"
    found = dict.fromkeys(key for lines in runs for line in lines for key in line if key.startswith(start))
    keys = {key.removeprefix(start): key for key in found} | {"mean of the layers": DENSITY}
    curves = _curves(runs, keys, "share kept")
    return learning_curves(curves, "share kept", "weights kept %", styles_of(curves), ylim=SHARES) if found else None


def share_curves(
    runs: Sequence[Sequence[Line]], capacities: Sequence[float], shades: Mapping[float, Style]
) -> Plot | None:
    """Shares of the dense network's multiply-adds (lines) and parameters (dashes) that the masked networks of these
    capacities have, over rounds. `shades` of these capacities and perhaps others. Nothing without such networks."""
    found = {key for lines in runs for line in lines for key in line}
    keys, styles = {}, {}
    for capacity in capacities:
        if named("density", capacity) in found:
            for kind, name, line in (("macs_share", "multiply-adds", "-"), ("density", "parameters", "--")):
                legend = f"{name} at {label(capacity)}"
                keys[legend] = named(kind, capacity)
                styles[legend] = {**shades[capacity], "linestyle": line}
    share = "share of the dense network"
    return learning_curves(_curves(runs, keys, share), share, f"{share} %", styles, yscale="log") if keys else None


def _curves(runs: Sequence[Sequence[Line]], keys: Mapping[str, str], name: str) -> dict[str, list[list[Line]]]:
    """For every legend the lines of every run that have its key, under the same `name`."""
    return {
        legend: [[{"round": line["round"], name: line[key]} for line in lines if key in line] for lines in runs]
        for legend, key in keys.items()
    }


def _legend(capacity: float) -> str:
    return f"capacity {label(capacity)}"
