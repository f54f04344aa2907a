"""An exported submodel is what rayfl evaluates, and plain torch runs it."""

import json
import subprocess
import sys

import pytest
import torch
from helpers import NESTED, run, simulate, tiny
from safetensors.torch import load_file

from rayfl.config import ConfigError
from rayfl.costs import parameters
from rayfl.export import export_submodel
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
