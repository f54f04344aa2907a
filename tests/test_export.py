"""An exported submodel is what rayfl evaluates, and plain torch runs it."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Literal

import pytest
import torch
from helpers import NESTED, run, simulate, tiny
from safetensors.torch import load_file
from torch import nn

from rayfl import costs
from rayfl.axes import Net
from rayfl.config import ConfigError
from rayfl.costs import parameters
from rayfl.export import _network, _without_zeros, export_submodel
from rayfl.methods import METHODS, Deployment
from rayfl.methods.width import SizedMethod
from rayfl.models import MODELS
from rayfl.tracking.records import Run
from rayfl.training import evaluate

PLAIN_TORCH = """
import sys
sys.modules["rayfl"] = None  # importing it would fail
import torch
net = torch.export.load(sys.argv[1] + "/model.pt2").module()
torch.save(net(torch.load(sys.argv[1] + "/x.pt")), sys.argv[1] + "/y.pt")
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run's folder with a checkpoint, and its simulation."""
    folder = tmp_path_factory.mktemp("run")
    experiment = tiny(method={"name": "heterofl"})
    simulation = simulate(experiment, folder)
    run(simulation)
    Run.create(folder, "heterofl", experiment.plain(), {"seed": 0})
    simulation.save(folder / "checkpoints")
    return folder, simulation


def test_the_exported_network_is_the_deployed_one(finished, tmp_path):
    folder, simulation = finished
    net = export_submodel(folder, 0.2, tmp_path / "to", None, pytest.fail)
    config = json.loads((tmp_path / "to" / "config.json").read_text())
    deployed, _ = simulation.deployment(0.2)
    assert config["parameters"] == parameters(deployed.model, deployed.net)
    worker = simulation.executor.worker
    sums = evaluate(net, worker._span("test", slice(None)), 7)
    assert sums.correct / sums.count == simulation.evaluate()["accuracy_0.2"]


def test_plain_torch_runs_it(finished, tmp_path):
    folder, _ = finished
    net = export_submodel(folder, 0.1, tmp_path / "to", None, pytest.fail)
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.save(x, tmp_path / "to" / "x.pt")
    subprocess.run([sys.executable, "-c", PLAIN_TORCH, tmp_path / "to"], check=True)
    with torch.no_grad():
        torch.testing.assert_close(torch.load(tmp_path / "to" / "y.pt"), net(x))
    state = load_file(tmp_path / "to" / "model.safetensors")
    assert sum(t.numel() for n, t in state.items() if "running" not in n) == sum(p.numel() for p in net.parameters())
    assert any("running_mean" in name for name in state)


def test_a_network_with_exits_answers_as_it_is_deployed(tmp_path):
    """By the mean of its exits, which its file says."""
    spec = tiny(method={"name": "depthfl"}, rounds=1, **NESTED["depthfl"])
    simulation = simulate(spec, tmp_path / "run")
    run(simulation)
    Run.create(tmp_path / "run", "depthfl", spec.plain(), {"seed": 0})
    simulation.save(tmp_path / "run" / "checkpoints")
    net = export_submodel(tmp_path / "run", 0.2, tmp_path / "to", None, pytest.fail)
    assert json.loads((tmp_path / "to" / "config.json").read_text())["answer"] == "mean"
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    program = torch.export.load(tmp_path / "to" / "model.pt2").module()
    with torch.no_grad():
        assert net(x).shape == (2, 3, 4)
        torch.testing.assert_close(program(x), net(x).mean(0))


class Pruned(SizedMethod):
    """A device lacks the filters and neurons whose weights are below the median of their layer, and single weights."""

    name: Literal["pruned"] = "pruned"

    def deploy(self, state, round, capacity, client=None):
        deployed = super().deploy(state, round, capacity)
        masked = tuple(f"{path}.weight" for path in costs.layer_macs(deployed.model, deployed.net) if path != "head")
        pruned = {}
        for name in masked:
            t = deployed.params[name]
            rows = t.flatten(1).abs().mean(1)
            pruned[name] = torch.where(t.abs() > 1e-3, t, 0)
            pruned[name][rows < rows.median()] = 0
        return replace(deployed, params=deployed.params | pruned, masked=masked)


def test_a_masked_network_is_exported_without_the_filters_that_are_not_there(tmp_path, monkeypatch):
    """Of 6, 15 and 150 filters and neurons, of the width 0.3, 2, 7 and 74 are below their median. There is one pixel a
    channel behind the second layer."""
    monkeypatch.setitem(METHODS, "pruned", Pruned)
    spec = tiny(method="pruned", model={"name": "lenet5_caffe"}, data={"shape": [1, 16, 16]}, rounds=1)
    simulation = simulate(spec, tmp_path / "run")
    Run.create(tmp_path / "run", "pruned", spec.plain(), {"seed": 0})
    simulation.save(tmp_path / "run" / "checkpoints")
    said, to = [], tmp_path / "to"
    net = export_submodel(tmp_path / "run", 0.3, to, None, said.append)

    deployed, statistics = simulation.deployment(0.3)
    x = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = _network(deployed, statistics)(x)
        torch.testing.assert_close(net(x), expected)
        torch.testing.assert_close(torch.export.load(to / "model.pt2").module()(x), expected)

    before, after = 6 * 25 + 15 * 6 * 25 + 150 * 15 + 4 * 150, 4 * 25 + 8 * 4 * 25 + 76 * 8 + 4 * 76
    config, state = json.loads((to / "config.json").read_text()), load_file(to / "model.safetensors")
    nonzero = sum(int(t.count_nonzero()) for t in state.values())
    assert said == [f"{before:,} -> {after:,} parameters, {nonzero:,} of them not 0; 83 of 171 filters removed"]
    assert config["parameters"] == after == sum(t.numel() for t in state.values())
    assert config["nonzero"] == nonzero < after
    assert (config["filters"], config["removed"], config["zeros"]) == (171, 83, 0)
    again = MODELS["lenet5_caffe"](**config["model"]).build(Net(**config["net"]))
    again.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(again(x), expected)


class Sigmoids(MODELS["lenet5_caffe"]):
    def build(self, net):
        network = super().build(net)
        network.hidden_relu = nn.Sigmoid()
        return network


def test_a_network_that_makes_something_of_zeros_stays_whole():
    model, said = Sigmoids(), []
    params = {name: p.detach() for name, p in model.build(Net()).named_parameters()}
    params["hidden.weight"][:250] = 0
    whole = Deployment("whole", model, Net(), params, masked=("hidden.weight",))
    net = _network(whole, {})
    deployed, same, of_mask = _without_zeros(whole, {}, net, said.append)
    assert deployed is whole and same is net
    assert of_mask == {"nonzero": 430_500 - 250 * 800, "filters": 500, "removed": 0, "zeros": 250}
    assert said == [
        "all filters stay: without the pruned ones model lenet5_caffe answers otherwise",
        "430,500 -> 430,500 parameters, 230,500 of them not 0; 0 of 500 filters removed",
    ]


def test_filters_that_stay_are_said():
    """Two of the first layer's go; one class does not."""
    model, said = MODELS["lenet5_caffe"](), []
    params = {name: p.detach().clone() for name, p in model.build(Net()).named_parameters()}
    params["conv1.weight"][:2] = 0
    params["head.weight"][0] = 0
    pruned = Deployment("pruned", model, Net(), params, masked=("conv1.weight", "head.weight"))
    _without_zeros(pruned, {}, _network(pruned, {}), said.append)
    assert len(said) == 2 and said[0].endswith("; 2 of 30 filters removed")
    assert said[1].startswith("1 pruned filters stay: ") and said[1].endswith("or a class needs them")


@pytest.mark.parametrize(
    ("method", "client", "start"),
    [
        ("standalone", None, "no --client: with method standalone every client has a network of its own"),
        ("standalone", 1, "--client 1: has not taken part yet: with method standalone"),
        ("standalone", 0, None),
        ("fedavg", 1, None),
    ],
)
def test_a_network_that_nobody_has_trained_is_said(tmp_path, method, client, start):
    spec, said = tiny(method=method, rounds=1), []
    simulation = simulate(spec, tmp_path / "run")
    if method == "standalone":
        simulation.carries.put(0, 0, simulation.method._initial(0.2))
    Run.create(tmp_path / "run", method, spec.plain(), {"seed": 0})
    simulation.save(tmp_path / "run" / "checkpoints")
    export_submodel(tmp_path / "run", 0.2, tmp_path / "to", client, said.append)
    assert [text.startswith(start) and text.endswith("this one nobody has trained") for text in said] == (
        [True] if start else []
    )


def test_what_cannot_be_exported(finished, tmp_path):
    folder, _ = finished
    with pytest.raises(ConfigError, match=r"--capacity: given 0.7; allowed: 0.3, 0.2, 0.1"):
        export_submodel(folder, 0.7, tmp_path / "to", None, pytest.fail)
    with pytest.raises(ConfigError, match="--client: given 6; allowed: 0 to 5"):
        export_submodel(folder, 0.2, tmp_path / "to", 6, pytest.fail)
    with pytest.raises(ConfigError, match="holds no run"):
        export_submodel(tmp_path, 0.2, tmp_path / "to", None, pytest.fail)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        export_submodel(folder, 0.2, tmp_path / "full", None, pytest.fail)
    assert not (tmp_path / "to").exists()
