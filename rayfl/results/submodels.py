"""Plots of a run's submodels, after figures of NeFL (arXiv 2308.07761), FIARSE (2407.19389) and SpaFL (2406.00431).

Over rounds, from lines:

    submodels   score of every capacity's shared network
    layers      clients' own masked networks: density of every layer (SpaFL's figure 3)
    shares      masked networks: fraction of the dense network's multiply-adds and parameters, by capacity
    confusion   matrix of this score at the last evaluation, by capacity

Of networks, from `Method.deploy`:

    weights     mean |w| of every convolution and linear layer, by capacity (NeFL's figure 5a); masked layers: of the
                remaining weights
    kept        masked networks: density of every layer, by capacity
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
from rayfl.results.matrices import matrix_plots
from rayfl.results.plots import learning_curves, trained, with_unit
from rayfl.results.rows import Record, by_label, capacities, facts_of
from rayfl.results.summary import DENSITY

Deployments = Mapping[float, Deployment]
"""Capacity -> deployed network, largest first."""

Profile = Mapping[float, Mapping[str, float]]
"""Capacity -> module path -> number, in the network's order."""

TICKS = 60
"""Maximum number of tick labels below a plot."""

SHARES = (0.0, 1.03)
"""Limits of an axis of fractions."""


def write_submodels(
    folder: Path,
    records: Sequence[Record],
    deployments: Callable[[Path], Deployments],
    notify: Callable[[str], None],
    metric: str = "accuracy_mean",
    formats: Sequence[str] = (),
) -> None:
    """Write each label's plots into `folder`/plots/<label>, or into `folder`/plots for a single run's folder.

    Plots over rounds are means over the label's rows (seeds). Plots of networks are of the row with the best `metric`:
    `deployments` returns its networks; its ConfigError is passed to `notify`.
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
            notify(f"{error}; plots of its weights are skipped")
            continue
        if all(d.is_start for d in deployed.values()):
            notify(f"{best}: every client has its own network; plots of weights are skipped")
            continue
        for of, plot in of_networks(deployed).items():
            plot.write(plots / of, formats)


def over_rounds(records: Sequence[Record]) -> dict[str, Plot]:
    """Return name -> plot of one label's networks over rounds, as means over its rows; only plots with data."""
    runs = [RunFolder.open(row["path"]).rounds() for row in records]
    facts = facts_of(records[0])
    shades = shades_of(facts.capacities)
    found = {
        "submodels": submodel_curves(
            runs, facts.score, capacities(records), shades, with_unit(facts.score, facts, facts.score)
        ),
        "layers": layer_curves(runs),
        "shares": share_curves(runs, sorted(trained(records), reverse=True), shades),
        **matrix_plots(runs),
    }
    return {name: plot for name, plot in found.items() if plot is not None}


def of_networks(deployed: Deployments) -> dict[str, Plot]:
    """Return name -> plot of networks; only plots with data."""
    shades = shades_of(deployed)
    found = {
        "weights": profile_plot(weights(deployed), "layer", "mean |weight|", shades),
        "kept": profile_plot(kept(deployed), "layer", "remaining weights %", shades),
        "steps": profile_plot(steps(deployed), "residual branch", "step size", shades),
    }
    return {name: plot for name, plot in found.items() if plot is not None}


# of networks


def weights(deployed: Deployments) -> Profile:
    """Return the mean absolute (remaining) weight of every convolution and linear layer that is not frozen."""
    return {
        c: {path: _mean_weight(d, f"{path}.weight") for path in d.net.layers if f"{path}.weight" in d.params}
        for c, d in deployed.items()
    }


def kept(deployed: Deployments) -> Profile:
    """Return the fraction of remaining weights of every masked layer."""
    return {capacity: d.present.layers for capacity, d in deployed.items() if d.masked}


def steps(deployed: Deployments) -> Profile:
    """Return the step size of every residual branch by its path: the only scalar parameters of a network."""
    return {
        capacity: {
            name.rpartition(".")[0].rpartition(".")[0]: d.params[name].item()
            for name, shape in d.net.layout.shapes.items()
            if not shape
        }
        for capacity, d in deployed.items()
    }


def profile_plot(profile: Profile, what: str, value: str, shades: Mapping[float, Style]) -> Plot | None:
    """Plot numbers of modules, one line per capacity, with gaps for missing modules; None without numbers. `what`:
    title of the modules, `value`: title of the numbers; `shades`: at least of these capacities."""
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
    """Return the mean absolute weight; 0 if a mask leaves nothing."""
    weight = deployed.params[name].abs()
    if name in deployed.masked:
        weight = weight[weight > 0]
    return weight.mean().item() if len(weight) else 0.0


# over rounds


def submodel_curves(
    runs: Sequence[Sequence[Line]], score: str, capacities: Sequence[float], shades: Mapping[float, Style], axis: str
) -> Plot | None:
    """Plot the test score of every capacity's network over rounds: mean ± standard deviation over runs. `shades`: at
    least of these capacities; `axis`: title of the score."""
    keys = {_legend(capacity): named(score, capacity) for capacity in capacities}
    styles = {_legend(capacity): shades[capacity] for capacity in capacities}
    return learning_curves(_curves(runs, keys, score), score, axis, styles) if keys else None


def layer_curves(runs: Sequence[Sequence[Line]]) -> Plot | None:
    """Plot the density of every layer of clients' own masked networks over rounds, and the mean over layers: means over
    clients, then over runs. None without such networks."""
    start = f"{DENSITY}_"
    found = dict.fromkeys(key for lines in runs for line in lines for key in line if key.startswith(start))
    keys = {key.removeprefix(start): key for key in found} | {"mean of the layers": DENSITY}
    curves = _curves(runs, keys, "share kept")
    return learning_curves(curves, "share kept", "weights kept %", styles_of(curves), ylim=SHARES) if found else None


def share_curves(
    runs: Sequence[Sequence[Line]], capacities: Sequence[float], shades: Mapping[float, Style]
) -> Plot | None:
    """Plot masked networks' fractions of the dense network's multiply-adds (solid) and parameters (dashed) over rounds,
    by capacity. `shades`: at least of these capacities. None without such networks."""
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
    """Return legend -> lines of every run with the legend's key, renamed to `name`."""
    return {
        legend: [[{"round": line["round"], name: line[key]} for line in lines if key in line] for lines in runs]
        for legend, key in keys.items()
    }


def _legend(capacity: float) -> str:
    return f"capacity {label(capacity)}"
