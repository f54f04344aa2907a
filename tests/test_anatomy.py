"""The figures of NeFL: numbers by hand from made-up parameters, and what a run's folder gets."""

import csv
import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from helpers import Perceptron, run, simulate, tiny
from matplotlib.axes import Axes

from rayfl import cli
from rayfl.anatomy import (
    deployments,
    layer_curves,
    share_curves,
    steps,
    submodel_curves,
    weights,
    write_anatomy,
    write_profile,
)
from rayfl.axes import Net
from rayfl.config import ConfigError
from rayfl.methods import METHODS, Deployment
from rayfl.methods.width import PrefixMethod
from rayfl.models.base import layout
from rayfl.models.resnet import ResNet18
from rayfl.tracking.records import Run, records, summary

BRANCHES = [f"stage{s}.{b}.residual" for s in (1, 2, 3, 4) for b in (0, 1)]


class Stepped(PrefixMethod):
    """Every network has step sizes; the narrower one lacks a block."""

    name: Literal["stepped"] = "stepped"

    def bind(self, task):
        wide, narrow = task.nets
        nets = {wide: Net(wide, steps=True), narrow: Net(narrow, without=("stage2.1",), steps=True)}
        return super().bind(replace(task, nets=nets))


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


def finished(folder, sections, label, seed=0, rounds=None):
    """A run's folder with lines, a result and a checkpoint, and its simulation."""
    experiment = tiny(seed=seed, **sections)
    simulation = simulate(experiment, folder / "carries")
    lines = [{"round": r, "seconds": 1.0} | made(r + seed) for r in (1, 2)]
    run(simulation, rounds)
    record = Run.create(folder, label, experiment.plain(), {"seed": seed})
    record.append(lines)
    record.finish("finished", summary(lines, label, seed))
    simulation.save(folder / "checkpoints")
    return simulation


def made(r):
    return {"accuracy_mean": r / 4, "accuracy_0.3": r / 4, "accuracy_0.2": r / 8, "accuracy_0.1": 0.1}


def plots_of(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def table_of(file):
    with file.open() as lines:
        return list(csv.reader(lines))


def test_mean_weights_by_hand():
    params = {
        "hidden0.weight": torch.tensor([[1.0, -2.0], [0.0, 5.0]]),
        "hidden0.bias": torch.full((2,), 9.0),
        "head.weight": torch.tensor([[1.0, -1.0]] * 4),
        "head.bias": torch.zeros(4),
    }
    wide = Deployment("wide", Perceptron(), Net(), params)
    narrow = replace(wide, net=Net(0.5), params={name: t[:, :1] if t.dim() > 1 else t for name, t in params.items()})
    narrow.params["hidden0.weight"] = params["hidden0.weight"][:1]
    assert weights({1.0: wide, 0.5: narrow}) == {
        1.0: {"hidden0": 2.0, "head": 1.0},
        0.5: {"hidden0": 1.5, "head": 1.0},
    }
    assert steps({1.0: wide, 0.5: narrow}) == {1.0: {}, 0.5: {}}


def test_steps_and_layers_are_those_that_a_network_has():
    model = ResNet18()
    net = Net(1 / 32, without=("stage1.1", "stage2.0"), steps=True)
    params = {name: torch.full(shape, -0.5) for name, shape in layout(model, net).shapes.items()}
    for i, name in enumerate(n for n in params if n.endswith("scale")):
        params[name] = torch.tensor(i + 1.0)
    deployed = {0.5: Deployment("a", model, net, params)}
    held = [branch for branch in BRANCHES if branch not in ("stage1.1.residual", "stage2.0.residual")]
    assert steps(deployed) == {0.5: dict(zip(held, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), strict=True))}
    # the stem, two in each of six branches, three projections (that of a block left out too), the head
    layers = weights(deployed)[0.5]
    assert len(layers) == 1 + 2 * 6 + 3 + 1 and set(layers.values()) == {0.5}
    assert list(layers)[:3] == ["conv", "stage1.0.residual.conv1", "stage1.0.residual.conv2"]
    assert "stage2.0.projection.conv" in layers and list(layers)[-1] == "head"


def test_what_a_network_lacks_is_blank_and_a_gap(tmp_path, drawn):
    profile = {1.0: {"a": 1.0, "b": 0.5, "c": 2.0}, 0.25: {"a": 0.75, "c": 1.5}}
    write_profile(tmp_path / "steps", profile, "branch", "step size")
    assert (tmp_path / "steps.csv").read_text() == "branch,1,0.25\na,1.0,0.75\nb,0.5,\nc,2.0,1.5\n"
    [lines] = drawn.values()
    assert lines["capacity 1"] == [1.0, 0.5, 2.0]
    first, gap, last = lines["capacity 0.25"]
    assert (first, last) == (0.75, 1.5) and math.isnan(gap)
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_curves_are_means_over_runs(tmp_path, drawn):
    runs = [[{"round": r, "accuracy_1": a * r, "accuracy_0.5": 0.25} for r in (1, 2)] for a in (0.2, 0.4)]
    submodel_curves(tmp_path / "submodels.png", [[{"round": 0, "train_loss": 1.0}, *lines] for lines in runs])
    [lines] = drawn.values()
    assert lines == {"capacity 1": pytest.approx([0.3, 0.6]), "capacity 0.5": pytest.approx([0.25, 0.25])}


def test_what_masked_networks_keep_over_rounds(tmp_path, drawn):
    dense = [{"round": 1, "accuracy_1": 0.5, "local_accuracy_mean": 0.5}]
    layer_curves(tmp_path / "layers.png", [dense])
    share_curves(tmp_path / "shares.png", [dense], [1.0])
    assert plots_of(tmp_path) == []
    own = {"local_density": 0.75, "local_density_conv1": 1.0, "local_density_stage1.0.conv": 0.5}
    layer_curves(tmp_path / "layers.png", [[dense[0] | own], [dense[0] | own | {"local_density_conv1": 0.5}]])
    assert table_of(tmp_path / "layers.csv")[0][::2] == [
        "round",
        "conv1 std",
        "stage1.0.conv std",
        "mean of the layers std",
    ]
    shares = {"density_1": 1.0, "macs_share_1": 1.0, "density_0.25": 0.25, "macs_share_0.25": 0.375}
    lines = [dense[0] | shares, {"round": 2} | shares | {"macs_share_0.25": 0.5}]
    share_curves(tmp_path / "shares.png", [lines], {0.25, 0.5})
    layers, shares = drawn.values()
    assert layers == {"conv1": [0.75], "stage1.0.conv": [0.5], "mean of the layers": [0.75]}
    # no client has capacity 1, and of 0.5 nothing is masked
    assert shares == {"multiply-adds at 0.25": [0.375, 0.5], "parameters at 0.25": [0.25, 0.25]}


class Pruned(PrefixMethod):
    """Of the hidden layer every other row is there, of the head nothing."""

    name: Literal["pruned"] = "pruned"

    def deploy(self, state, round, capacity, client=None):
        deployed = super().deploy(state, round, capacity, client)
        masked = {name: torch.zeros_like(deployed.params[name]) for name in ("hidden.weight", "head.weight")}
        masked["hidden.weight"][::2] = -2.0
        return replace(deployed, params=deployed.params | masked, masked=tuple(masked))


def test_of_masked_networks_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "pruned", Pruned)
    finished(tmp_path, {"method": "pruned", "clients": {"capacities": [1, 0.5]}}, "pruned", rounds=0)
    write_anatomy(tmp_path, records(tmp_path), pytest.fail)
    kept, mean = table_of(tmp_path / "plots" / "kept.csv"), table_of(tmp_path / "plots" / "weights.csv")
    assert kept == [["layer", "1", "0.5"], ["hidden", "0.5", "0.5"], ["head", "0.0", "0.0"]]
    assert mean[3:] == [["hidden", "2.0", "2.0"], ["head", "0.0", "0.0"]]


def test_a_run_without_steps(tmp_path):
    simulation = finished(tmp_path / "run", {"method": "heterofl"}, "heterofl", rounds=1)
    write_anatomy(tmp_path / "run", records(tmp_path), pytest.fail)
    plots = tmp_path / "run" / "plots"
    assert plots_of(plots) == ["submodels.csv", "submodels.png", "weights.csv", "weights.png"]
    header, *rows = table_of(plots / "weights.csv")
    assert header == ["layer", "0.3", "0.2", "0.1"]
    deployed, _ = simulation.deployment(0.2)
    assert [row[0] for row in rows] == [n.removesuffix(".weight") for n, t in deployed.params.items() if t.dim() > 1]
    for name, _, value, _ in rows:
        assert float(value) == deployed.params[f"{name}.weight"].abs().mean().item()


def test_networks_of_clients_own_are_not_drawn(tmp_path):
    folder, said = tmp_path / "run", []
    finished(folder, {"method": "standalone"}, "standalone", rounds=1)
    write_anatomy(folder, records(tmp_path), said.append)
    assert said == [f"{folder}: with method standalone every client has a network of its own; no plots of its weights"]
    assert not (folder / "plots").exists()


def test_a_run_with_steps_from_its_newest_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "stepped", Stepped)
    sections = {"method": "stepped", "model": {"name": "resnet18"}, "clients": {"capacities": [1 / 32, 1 / 64]}}
    simulation = finished(tmp_path, sections, "stepped", rounds=0)
    for round, size in ((1, 3.0), (2, 0.25)):
        params = simulation.state["params"]
        new = {name: torch.full_like(t, size) if t.dim() == 0 else t for name, t in params.items()}
        simulation.round, simulation.state = round, {"params": new}
        simulation.save(tmp_path / "checkpoints")
    write_anatomy(tmp_path, records(tmp_path), pytest.fail)
    rows = [[branch, "0.25", "" if branch == "stage2.1.residual" else "0.25"] for branch in BRANCHES]
    assert table_of(tmp_path / "plots" / "steps.csv") == [["residual branch", "0.03125", "0.015625"], *rows]
    drawn = ("steps", "submodels", "weights")
    assert plots_of(tmp_path / "plots") == [f"{name}.{end}" for name in drawn for end in ("csv", "png")]


def test_of_several_runs_the_best_of_each_label(tmp_path):
    worse = finished(tmp_path / "a", {"method": "heterofl"}, "heterofl", seed=0, rounds=0)
    better = finished(tmp_path / "b", {"method": "heterofl"}, "heterofl", seed=1, rounds=0)
    other = Run.create(tmp_path / "c", "other", {"model": "digits_cnn"}, {"seed": 0})
    other.append([{"round": 1, "seconds": 1.0} | made(1)])
    other.finish("finished", summary(other.rounds(), "other", 0))
    said = []
    write_anatomy(tmp_path, records(tmp_path), said.append)
    assert said == [f"{tmp_path / 'c'}: has no checkpoint; no plots of its weights"]
    assert plots_of(tmp_path / "plots") == [
        "heterofl/submodels.csv",
        "heterofl/submodels.png",
        "heterofl/weights.csv",
        "heterofl/weights.png",
        "other/submodels.csv",
        "other/submodels.png",
    ]
    written = table_of(tmp_path / "plots" / "heterofl" / "weights.csv")[1][1]
    stems = [weights({0.3: simulation.deployment(0.3)[0]}) for simulation in (worse, better)]
    first, second = (next(iter(stem[0.3].values())) for stem in stems)
    assert first != second == float(written)


def test_the_command_says_what_it_cannot_draw(tmp_path, monkeypatch, capsys):
    record = Run.create(tmp_path, "made", tiny(method="heterofl").plain(), {"seed": 0})
    record.append([{"round": 1, "seconds": 1.0} | made(1)])
    record.finish("finished", summary(record.rounds(), "made", 0))
    monkeypatch.setattr("sys.argv", ["rayfl", "report", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert f"{tmp_path}: has no checkpoint; no plots of its weights" in capsys.readouterr().err
    assert (tmp_path / "plots" / "submodels.png").exists() and not (tmp_path / "plots" / "weights.png").exists()


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    finished(tmp_path, {"method": "heterofl"}, "heterofl", rounds=0)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace('"steps": 2', '"steps": 3'))
    with pytest.raises(ConfigError, match="another configuration"):
        deployments(tmp_path, pytest.fail)
