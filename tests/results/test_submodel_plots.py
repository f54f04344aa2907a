"""The figures of NeFL, FIARSE and SpaFL: numbers by hand, and files in a run's folder."""

import csv
import math
from dataclasses import replace

import pytest
import torch
from helpers import Perceptron, model_of, simulate, tiny
from helpers import run as run_to_its_end
from matplotlib.axes import Axes
from rows import FACTS, PERSONAL, folder, line

from rayfl.config import ConfigError
from rayfl.core.net import Net
from rayfl.methods.base import Deployment
from rayfl.models.resnet import ResNet18
from rayfl.results.drawing import shades_of
from rayfl.results.folder import records
from rayfl.results.submodels import (
    kept,
    layer_curves,
    of_networks,
    profile_plot,
    share_curves,
    steps,
    submodel_curves,
    weights,
    write_submodels,
)

BRANCHES = [f"stage{s}.{b}.residual" for s in (1, 2, 3, 4) for b in (0, 1)]
SHADES = shades_of([1.0, 0.5, 0.25])
CAPACITIES = FACTS | {"capacities": [0.3, 0.2, 0.1], "trained": [0.3, 0.2, 0.1]}


@pytest.fixture
def drawn(monkeypatch):
    """The lines of every plot that is made: its axes -> label -> heights."""
    found = {}
    plot = Axes.plot

    def remembered(self, x, y, *args, label, **options):
        found.setdefault(id(self), {})[label] = list(y)
        return plot(self, x, y, *args, label=label, **options)

    monkeypatch.setattr(Axes, "plot", remembered)
    return found


def made(path, name, facts=CAPACITIES, seed=0, **judged):
    """A run's folder with two lines."""
    judged = judged or {"accuracy_0.3": 0.5, "accuracy_0.2": 0.25, "accuracy_0.1": 0.1}
    return folder(path, name, [line(r, accuracy_mean=(r + seed) / 4, **judged) for r in (1, 2)], facts=facts, seed=seed)


def deployed(simulation):
    """Capacity -> what a device runs now."""
    state, round = simulation.state, simulation.round
    return {c: simulation.method.deploy(state, round, c) for c in simulation.clients.all_capacities}


def plots_of(path):
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def table_of(plot):
    """Its numbers as text."""
    return [[str(cell) for cell in row] for row in [plot.header, *plot.rows]]


# of networks


def test_mean_weights_by_hand():
    params = {
        "hidden0.weight": torch.tensor([[1.0, -2.0], [0.0, 5.0]]),
        "hidden0.bias": torch.full((2,), 9.0),
        "head.weight": torch.tensor([[1.0, -1.0]] * 4),
        "head.bias": torch.zeros(4),
    }
    wide = Deployment("wide", Net(Perceptron()), params)
    part = {name: t[:, :1] if t.dim() > 1 else t for name, t in params.items()}
    part["hidden0.weight"] = params["hidden0.weight"][:1]
    narrow = replace(wide, net=Net(Perceptron(), 0.5), params=part)
    assert weights({1.0: wide, 0.5: narrow}) == {1.0: {"hidden0": 2.0, "head": 1.0}, 0.5: {"hidden0": 1.5, "head": 1.0}}
    assert steps({1.0: wide, 0.5: narrow}) == {1.0: {}, 0.5: {}}
    assert kept({1.0: wide}) == {} and list(of_networks({1.0: wide})) == ["weights"]


def test_a_frozen_base_is_left_out():
    net = Net(model_of("lora"))
    params = net.initial()
    [(_, found)] = weights({1.0: Deployment(1.0, net, params)}).items()
    assert found == {"head": pytest.approx(float(params["head.weight"].abs().mean()))}


def test_the_remaining_part_of_masked_networks():
    """Half of the hidden layer remains, and nothing of the head."""
    params = {
        "hidden0.weight": torch.tensor([[-2.0, -2.0], [0.0, 0.0]]),
        "hidden0.bias": torch.zeros(2),
        "head.weight": torch.zeros(4, 2),
        "head.bias": torch.ones(4),
    }
    masked = {1.0: Deployment("a", Net(Perceptron()), params, masked=("hidden0.weight", "head.weight"))}
    assert weights(masked) == {1.0: {"hidden0": 2.0, "head": 0.0}}
    assert kept(masked) == {1.0: {"hidden0": 0.5, "head": 0.0}}
    found = of_networks(masked)
    assert list(found) == ["weights", "kept"]
    assert table_of(found["kept"]) == [["layer", "1"], ["hidden0", "0.5"], ["head", "0.0"]]


def test_steps_and_layers_are_those_that_a_network_has():
    net = Net(ResNet18(), 1 / 32, without=("stage1.1", "stage2.0"), steps=True)
    params = {name: torch.full(shape, -0.5) for name, shape in net.layout.shapes.items()}
    for i, name in enumerate(n for n in params if n.endswith("scale")):
        params[name] = torch.tensor(i + 1.0)
    networks = {0.5: Deployment("a", net, params)}
    held = [branch for branch in BRANCHES if branch not in ("stage1.1.residual", "stage2.0.residual")]
    assert steps(networks) == {0.5: dict(zip(held, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), strict=True))}
    # the stem, two in each of six branches, three projections (that of a block left out too), the head
    layers = weights(networks)[0.5]
    assert len(layers) == 1 + 2 * 6 + 3 + 1 and set(layers.values()) == {0.5}
    assert list(layers)[:3] == ["conv", "stage1.0.residual.conv1", "stage1.0.residual.conv2"]
    assert "stage2.0.projection.conv" in layers and list(layers)[-1] == "head"


def test_missing_modules_are_blank_and_a_gap(tmp_path, drawn):
    profile = {1.0: {"a": 1.0, "b": 0.5, "c": 2.0}, 0.25: {"a": 0.75, "c": 1.5}}
    profile_plot(profile, "branch", "step size", SHADES).write(tmp_path / "steps")
    assert (tmp_path / "steps.csv").read_text() == "branch,1,0.25\na,1.0,0.75\nb,0.5,\nc,2.0,1.5\n"
    [lines] = drawn.values()
    assert lines["capacity 1"] == [1.0, 0.5, 2.0]
    first, gap, last = lines["capacity 0.25"]
    assert (first, last) == (0.75, 1.5) and math.isnan(gap)
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    assert profile_plot({1.0: {}}, "branch", "step size", SHADES) is None


# over rounds


def test_curves_are_means_over_runs(drawn):
    runs = [[{"round": r, "accuracy_1": a * r, "accuracy_0.5": 0.25} for r in (1, 2)] for a in (0.2, 0.4)]
    lines = [[{"round": 0, "train_loss": 1.0}, *lines] for lines in runs]
    submodel_curves(lines, "accuracy", [1.0, 0.5], SHADES, "accuracy %")
    [lines] = drawn.values()
    assert lines == {"capacity 1": pytest.approx([0.3, 0.6]), "capacity 0.5": pytest.approx([0.25, 0.25])}


def test_densities_over_rounds(drawn):
    dense = [{"round": 1, "accuracy_1": 0.5, "local_accuracy_mean": 0.5}]
    assert layer_curves([dense]) is share_curves([dense], [1.0], SHADES) is None
    assert submodel_curves([dense], "accuracy", [], SHADES, "accuracy %") is None
    own = {"local_density": 0.75, "local_density_conv1": 1.0, "local_density_stage1.0.conv": 0.5}
    plot = layer_curves([[dense[0] | own], [dense[0] | own | {"local_density_conv1": 0.5}]])
    assert plot.header[::2] == ["round", "conv1 std", "stage1.0.conv std", "mean of the layers std"]
    shares = {"density_1": 1.0, "macs_share_1": 1.0, "density_0.25": 0.25, "macs_share_0.25": 0.375}
    lines = [dense[0] | shares, {"round": 2} | shares | {"macs_share_0.25": 0.5}]
    share_curves([lines], [0.5, 0.25], SHADES)
    layers, shares = drawn.values()
    assert layers == {"conv1": [0.75], "stage1.0.conv": [0.5], "mean of the layers": [0.75]}
    # no client has capacity 1, and of 0.5 nothing is masked
    assert shares == {"multiply-adds at 0.25": [0.375, 0.5], "parameters at 0.25": [0.25, 0.25]}


# what a folder gets


def test_a_run_without_steps(tmp_path):
    simulation = simulate(tiny(method="heterofl"), tmp_path / "client_states")
    run_to_its_end(simulation, 1)
    networks = deployed(simulation)
    made(tmp_path / "run", "heterofl")
    write_submodels(tmp_path / "run", records(tmp_path), lambda _: networks, pytest.fail)
    plots = tmp_path / "run" / "plots"
    assert plots_of(plots) == ["submodels.csv", "submodels.png", "weights.csv", "weights.png"]
    header, *rows = csv.reader((plots / "weights.csv").read_text().splitlines())
    assert header == ["layer", "0.3", "0.2", "0.1"]
    params = networks[0.2].params
    assert [row[0] for row in rows] == [n.removesuffix(".weight") for n, t in params.items() if t.dim() > 1]
    for name, _, value, _ in rows:
        assert float(value) == params[f"{name}.weight"].abs().mean().item()


def test_personal_networks_are_not_drawn(tmp_path):
    simulation = simulate(tiny(method="standalone"), tmp_path / "client_states")
    run, said = folder(tmp_path / "run", "standalone", [line(1, local_accuracy_mean=0.5)], facts=PERSONAL), []
    write_submodels(run.path, records(tmp_path), lambda _: deployed(simulation), said.append)
    assert said == [f"{run.path}: every client has its own network; plots of weights are skipped"]
    assert not (run.path / "plots").exists()


def test_plots_are_of_the_best_run_of_each_label(tmp_path):
    """Its networks; a run without any is said."""
    for i, (name, seed) in enumerate((("heterofl", 0), ("heterofl", 1), ("other", 0))):
        made(tmp_path / "abc"[i], name, seed=seed)
    asked, said = [], []

    def deployments(path):
        asked.append(path.name)
        if path.name == "c":
            raise ConfigError(f"{path}: has no checkpoint")
        return {0.5: Deployment("x", Net(Perceptron()), Net(Perceptron()).initial())}

    write_submodels(tmp_path, records(tmp_path), deployments, said.append)
    assert asked == ["b", "c"] and said == [f"{tmp_path / 'c'}: has no checkpoint; plots of its weights are skipped"]
    assert plots_of(tmp_path / "plots") == [
        "heterofl/submodels.csv",
        "heterofl/submodels.png",
        "heterofl/weights.csv",
        "heterofl/weights.png",
        "other/submodels.csv",
        "other/submodels.png",
    ]


def test_the_best_run_by_loss_is_the_smallest(tmp_path):
    for name, loss in (("a", 1.5), ("b", 1.25)):
        made(tmp_path / name, "x", loss_mean=loss)
    asked = []

    def deployments(path):
        asked.append(path.name)
        raise ConfigError("none")

    write_submodels(tmp_path, records(tmp_path), deployments, lambda _: None, "loss_mean")
    assert asked == ["b"]
