"""What the submodels of a run are made of: figures of NeFL (arXiv 2308.07761), FIARSE (2407.19389), SpaFL (2406.00431).

Over rounds:

    submodels   accuracy of every capacity, but where clients keep networks of their own
    layers      of masked networks that are clients' own: share of every layer that they keep (SpaFL's
                figure 3)
    shares      of masked networks: share of the dense network's multiply-adds and parameters, by capacity

After the newest checkpoint, of what `Method.deploy` gives a device of a capacity; no data are loaded for it:

    weights     mean |w| of every convolution and linear layer, by capacity (NeFL's figure 5a); of masked ones, of what
                is there
    kept        of masked networks: share of every layer that is there, by capacity
    steps       learned step sizes of the residual branches, by capacity

Each is a .png and a .csv, and written where there is something of it.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from torch import nn

from rayfl import report
from rayfl.axes import on_meta
from rayfl.checkpoints import latest
from rayfl.config import ConfigError
from rayfl.experiment import parse_experiment
from rayfl.methods import Deployment
from rayfl.models.layers import Step
from rayfl.population import label
from rayfl.report import COLORS, MARKERS, Record, as_csv
from rayfl.tracking.records import Line, Run

Profile = dict[float, dict[str, float]]
"""Capacity -> module path -> a number, for what its network has, in the network's order."""

TICKS = 60
"""Names that fit below a plot."""

SHARES = (0.0, 1.03)
"""Limits of an axis of shares."""


def write_anatomy(
    folder: str | Path, records: Sequence[Record], say: Callable[[str], None], metric: str = "accuracy_mean"
) -> None:
    """The figures of each label into `folder`/plots/<label>, or into `folder`/plots if it is that run's own.

    What is over rounds is a mean over the label's rows (seeds), the others are of the one with the best `metric`. `say`
    is told of a run whose networks cannot be had, as without a checkpoint.
    """
    for name, rows in report.by_label(records, metric).items():
        best = Path(max(rows, key=lambda row: row.get(metric, -math.inf))["path"])
        plots = Path(folder) / "plots"
        place = plots if best == Path(folder) else plots / name
        runs = [Run.open(row["path"]).rounds() for row in rows]
        if not report.is_personal(rows[0]["params"]):
            submodel_curves(place / "submodels.png", runs)
        layer_curves(place / "layers.png", runs)
        share_curves(place / "shares.png", runs, report.trained(rows))
        try:
            deployed = deployments(best, say)
        except ConfigError as error:
            say(f"{error}; no plots of its weights")
            continue
        write_profile(place / "weights", weights(deployed), "layer", "mean |weight|")
        if masked := {capacity: dict(d.held.layers) for capacity, d in deployed.items() if d.masked}:
            write_profile(place / "kept", masked, "layer", "share of the weights that is there")
        if any((found := steps(deployed)).values()):
            write_profile(place / "steps", found, "residual branch", "step size")


def deployments(folder: Path, say: Callable[[str], None]) -> dict[float, Deployment]:
    """What a device of every capacity runs after a run's newest whole checkpoint, largest capacity first.

    A ConfigError where there is none, where it is not of the run's configuration, or where there is no one network.
    """
    experiment = parse_experiment(Run.open(folder).config, str(folder / "config.json"))
    found = latest(folder / "checkpoints", experiment.result_config(), say, experiment.today)
    if found is None:
        raise ConfigError(f"{folder}: has no checkpoint")
    round, state, _ = found
    method = experiment.bound_method()
    if method.is_personal:
        raise ConfigError(f"{folder}: with method {method.name} every client has a network of its own")
    return {capacity: method.deploy(state, round, capacity) for capacity in experiment.clients.all_capacities}


def weights(deployed: Mapping[float, Deployment]) -> Profile:
    """Mean absolute value of the weight of every convolution and linear layer: its L1 norm a weight that is there."""
    return {
        capacity: {path: _mean_weight(d, f"{path}.weight") for path in _modules(d, nn.Conv2d, nn.Linear)}
        for capacity, d in deployed.items()
    }


def _mean_weight(deployed: Deployment, name: str) -> float:
    """0 of a masked weight of which nothing is there."""
    weight = deployed.params[name].abs()
    if name in deployed.masked:
        weight = weight[weight > 0]
    return weight.mean().item() if len(weight) else 0.0


def steps(deployed: Mapping[float, Deployment]) -> Profile:
    """The step size of every residual branch, by the path of the branch."""
    return {
        capacity: {path.rpartition(".")[0]: d.params[f"{path}.scale"].item() for path in _modules(d, Step)}
        for capacity, d in deployed.items()
    }


def write_profile(path: Path, profile: Profile, what: str, value: str) -> None:
    """`path`.csv, a column a capacity and blank where its network has no such module, and `path`.png, where that
    is a gap. `what` are the modules, `value` the numbers."""
    names = list(dict.fromkeys(name for of_capacity in profile.values() for name in of_capacity))
    figure, axes = report.new_figure()
    figure.set_size_inches(min(14, 6 + 0.15 * len(names)), 4.8)
    lines = {_legend(capacity): numbers for capacity, numbers in profile.items()}
    for text, style in report.styles_of(lines).items():
        heights = [lines[text].get(name, math.nan) for name in names]
        axes.plot(range(len(names)), heights, label=text, linewidth=1.4, markersize=3.5, **style)
    every = math.ceil(len(names) / TICKS)
    axes.set_xticks(range(0, len(names), every), names[::every], rotation=90, fontsize=7)
    axes.set_xlabel(what)
    axes.set_ylabel(value)
    axes.margins(x=0.02)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    report.save(figure, path.with_suffix(".png"))
    rows = [[name, *(numbers.get(name, "") for numbers in profile.values())] for name in names]
    path.with_suffix(".csv").write_text(as_csv([what, *map(label, profile)], rows))


def submodel_curves(path: Path, runs: Sequence[Sequence[Line]]) -> None:
    """Test accuracy of every capacity over rounds: mean and ± standard deviation over the runs' lines."""
    capacities = report.capacities(line for lines in runs for line in lines)
    keys = {_legend(capacity): f"accuracy_{label(capacity)}" for capacity in capacities}
    report.learning_curves(path, _curves(runs, keys, "accuracy"), "accuracy")


def layer_curves(path: Path, runs: Sequence[Sequence[Line]]) -> None:
    """What clients' own masked networks keep of every layer over rounds, and the mean over layers: means over clients,
    then over the runs. Nothing without such networks."""
    found = dict.fromkeys(key for lines in runs for line in lines for key in line if key.startswith("local_density"))
    if found:
        keys = {key.removeprefix("local_density_"): key for key in found if key != "local_density"}
        keys |= {"mean of the layers": "local_density"}
        report.learning_curves(path, _curves(runs, keys, "share kept"), "share kept", ylim=SHARES)


def share_curves(path: Path, runs: Sequence[Sequence[Line]], capacities: Collection[float]) -> None:
    """Shares of the dense network's multiply-adds (lines) and parameters (dashes) that the masked networks of these
    capacities have, over rounds. Nothing without such networks."""
    found = {key for lines in runs for line in lines for key in line}
    keys, styles = {}, {}
    masked = [c for c in map(label, sorted(capacities, reverse=True)) if f"density_{c}" in found]
    for i, capacity in enumerate(masked):
        for kind, name, line in (("macs_share", "multiply-adds", "-"), ("density", "parameters", "--")):
            legend = f"{name} at {capacity}"
            keys[legend] = f"{kind}_{capacity}"
            styles[legend] = {"color": COLORS[i % len(COLORS)], "linestyle": line, "marker": MARKERS[i % len(MARKERS)]}
    if keys:
        share = "share of the dense network"
        report.learning_curves(path, _curves(runs, keys, share), share, styles, yscale="log")


def _curves(runs: Sequence[Sequence[Line]], keys: Mapping[str, str], name: str) -> dict[str, list[list[Line]]]:
    """For every legend the lines of every run that have its key, under the same `name`."""
    return {
        legend: [[{"round": line["round"], name: line[key]} for line in lines if key in line] for lines in runs]
        for legend, key in keys.items()
    }


def _legend(capacity: float) -> str:
    return f"capacity {label(capacity)}"


def _modules(deployed: Deployment, *kinds: type[nn.Module]) -> list[str]:
    """The paths of a network's modules of these kinds."""
    net = on_meta(deployed.model.build, deployed.net)
    return [path for path, module in net.named_modules() if isinstance(module, kinds)]
