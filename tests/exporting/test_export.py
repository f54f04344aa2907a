"""An exported submodel is what rayfl evaluates, and plain torch runs it."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import NESTED, message, run, simulate, tiny
from safetensors.torch import load_file
from torch import nn

import rayfl
from rayfl.config import ConfigError
from rayfl.core.net import Net
from rayfl.core.seeds import torch_generator, torch_scope
from rayfl.data import Arrays, ImageData, Images, InMemory
from rayfl.data.samples import Prepare
from rayfl.exporting.submodels import as_module, export_submodel
from rayfl.methods.base import Deployment
from rayfl.models import MODELS

PLAIN_TORCH = """
import sys
sys.modules["rayfl"] = None  # importing it would fail
import torch
net = torch.export.load(sys.argv[1] + "/model.pt2").module()
torch.save(net(torch.load(sys.argv[1] + "/x.pt")), sys.argv[1] + "/y.pt")
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A simulation that has made its rounds, and its last line."""
    simulation = simulate(tiny(method={"name": "heterofl"}), tmp_path_factory.mktemp("run"))
    return simulation, run(simulation)[-1]


def drawn(*shape):
    return torch.randn(shape, generator=torch_generator(0, "test:images"))


def test_the_exported_network_is_the_deployed_one(finished, tmp_path):
    simulation, line = finished
    deployed = simulation.deployment(0.2)
    about = {"capacity": 0.2, "client": None, "round": 2}
    module = export_submodel(deployed, tmp_path / "to", about, pytest.fail)
    config = json.loads((tmp_path / "to" / "config.json").read_text())
    assert config["parameters"] == deployed.net.parameters
    assert (config["capacity"], config["client"], config["round"], config["answer"]) == (0.2, None, 2, "last")
    data = simulation.experiment.data
    test = {name: torch.from_numpy(t) for name, t in data.arrays().test.items()}
    x, y = data.prepare.batch(data.prepare.whole(test), None)
    with torch.no_grad():
        assert (module(x).argmax(1) == y).float().mean().item() == pytest.approx(line["accuracy_0.2"])
        torch.testing.assert_close(module(x), as_module(deployed)(x), rtol=0, atol=0)
    assert not module.training


@pytest.mark.slow
def test_plain_torch_runs_it(finished, tmp_path):
    simulation, _ = finished
    module = export_submodel(simulation.deployment(0.1), tmp_path / "to", {}, pytest.fail)
    x = drawn(5, 1, 8, 8)
    torch.save(x, tmp_path / "to" / "x.pt")
    subprocess.run([sys.executable, "-c", PLAIN_TORCH, tmp_path / "to"], check=True)
    with torch.no_grad():
        torch.testing.assert_close(torch.load(tmp_path / "to" / "y.pt"), module(x))
    assert len({file.stat().st_mode for file in (tmp_path / "to").iterdir()}) == 1
    state = load_file(tmp_path / "to" / "model.safetensors")
    assert sum(t.numel() for n, t in state.items() if "running" not in n) == sum(p.numel() for p in module.parameters())
    assert any("running_mean" in name for name in state)


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "gpt2"])
def test_a_program_takes_batches_of_any_size(name, tmp_path):
    """Those of tables, series and small images: see `TAKEN`."""
    net = Net(MODELS[name](**MODELS[name].smallest))
    module = export_submodel(Deployment("own", net, net.initial(), net.statistics()), tmp_path / "to", {}, print)
    program = torch.export.load(tmp_path / "to" / "model.pt2").module()
    for count in (1, 5):
        x = net.model.example(count, "cpu")
        with torch.no_grad():
            torch.testing.assert_close(program(x), module(x))


def test_a_network_with_exits_answers_as_it_is_deployed(tmp_path):
    """By the mean of its exits, which its file says."""
    simulation = simulate(tiny(method={"name": "depthfl"}, rounds=1, **NESTED["depthfl"]), tmp_path / "run")
    run(simulation)
    deployed = simulation.deployment(0.2)
    module = export_submodel(deployed, tmp_path / "to", {}, pytest.fail)
    assert json.loads((tmp_path / "to" / "config.json").read_text())["answer"] == "mean"
    x = drawn(3, 1, 8, 8)
    program = torch.export.load(tmp_path / "to" / "model.pt2").module()
    last = as_module(replace(deployed, answer="last"))
    with torch.no_grad():
        assert module(x).shape == (3, 4)
        torch.testing.assert_close(program(x), module(x))
        assert not module(x).equal(last(x))
    # the names in the file are those of the network
    assert deployed.net.layout.shapes.keys() < load_file(tmp_path / "to" / "model.safetensors").keys()


def table(tmp_path):
    """A table with a number that is missing at times, and a category; the target is in hundreds."""
    age, kind = np.arange(60) % 7 * 10.0, np.arange(60) % 3
    y = 500 + 100 * age / 60 + 50 * (kind == 2)
    age[::5] = np.nan
    pd.DataFrame({"age": age, "kind": kind, "y": y}).to_csv(tmp_path / "a.csv", index=False)
    own = {"y": "y", "categories": ["kind"], "target": "numbers", "missing": "mean"}
    return {"name": "table", "train": str(tmp_path / "a.csv"), **own}


class Halved(Images):
    """A preparation of a user's own."""

    def module(self):
        return Prepare.module(self)

    def whole(self, samples):
        return samples | {"x": samples["x"].float() / 2}


class Own(ImageData):
    shape = (1, 8, 8)
    classes = 4

    def load(self):
        x = np.random.default_rng(0).normal(size=(60, 1, 8, 8)).astype(np.float32)
        split = {"x": x, "y": np.arange(60) % 4}
        return Arrays(split, split)

    @property
    def preprocessing(self):
        return Halved()


class Untraced(Halved):
    def whole(self, samples):
        return samples | {"x": samples["x"].float() / (2 if samples["x"].sum() > 0 else 1)}


class Unexported(Own):
    @property
    def preprocessing(self):
        return Untraced()


SERIES = np.random.default_rng(0).normal(3, 2, (60, 2, 6))
TAKEN = {
    "images of bytes": {"data": "digits", "model": "digits_cnn"},
    "images that are resized": {"data": {"name": "digits", "size": 12}, "model": "digits_cnn"},
    "a table of numbers": {"data": table, "model": "mlp"},
    "series": {"data": InMemory(SERIES, np.arange(60) % 2, missing="median"), "model": "lstm"},
    "a preparation of a user's own": {"data": Own(), "model": "liang_mlp"},
}


@pytest.mark.parametrize("kind", TAKEN)
def test_what_a_user_has_is_what_a_submodel_takes(kind, tmp_path):
    """The reported score, from samples as they are stored, of the module, of the program, and of any number type."""
    given = {"rounds": 1, "method": "heterofl", "partition": "iid", "run": {"executor": "serial"}, **TAKEN[kind]}
    if kind == "a table of numbers":
        given["data"] = table(tmp_path)
    result = rayfl.run(given | {"clients": {"count": 4, "cohort": 2, "capacities": [1, 0.5]}}, tmp_path / "run")
    data = result.experiment.data
    module = rayfl.export(tmp_path / "run", 0.5, tmp_path / "to", data=data if isinstance(data, InMemory) else None)
    program = torch.export.load(tmp_path / "to" / "model.pt2").module()
    test = data.arrays().test
    x, y = torch.from_numpy(test["x"]), torch.from_numpy(test["y"])
    name = data.goal.scores[0].label
    for of in (module, program, result.submodel(0.5)):
        # a preparation of a user's own is exported for one type
        for samples in [x] if isinstance(data, Own) else [x, x.double()]:
            with torch.no_grad():
                found = of(samples)
            value = found.argmax(1) == y if name == "accuracy" else (found - y).square()
            assert value.double().mean().item() == pytest.approx(result.summary[f"{name}_0.5"], rel=1e-5)
    raw = result.submodel(0.5, raw=True)
    assert module.network.state_dict().keys() == raw.state_dict().keys()
    assert not any("mean" in key and "running" not in key for key in module.state_dict())
    prepare = result.experiment.federate(data.arrays()).prepare
    inputs, _ = prepare.batch(prepare.whole({"x": x, "y": y}), None)
    with torch.no_grad():
        torch.testing.assert_close(module[:2](x), raw(inputs))


def test_a_preparation_that_torch_does_not_export_is_refused(tmp_path):
    given = {"data": Unexported(), "model": "liang_mlp", "method": "fedavg", "run": {"executor": "serial"}}
    result = rayfl.run(given | {"rounds": 1, "clients": {"count": 4, "cohort": 2}}, tmp_path / "run")
    assert result.submodel(1)(torch.ones(2, 1, 8, 8)).shape == (2, 4)
    said = message(rayfl.export, tmp_path / "run", 1, tmp_path / "to")
    assert said.startswith("export: torch does not export the preparation of the samples (")
    assert said.endswith("Hint: raw exports the bare network") and not (tmp_path / "to").exists()
    module = rayfl.export(tmp_path / "run", 1, tmp_path / "to", raw=True)
    assert not json.loads((tmp_path / "to" / "config.json").read_text())["prepares"]
    program = torch.export.load(tmp_path / "to" / "model.pt2").module()
    with torch.no_grad():
        torch.testing.assert_close(program(torch.ones(2, 1, 8, 8)), module(torch.ones(2, 1, 8, 8)))


def whole(model, *names):
    """A deployment of the widest network, of whose `names` the elements that are not 0 count."""
    net = Net(model)
    with torch_scope(0):
        params = {name: t.clone() for name, t in net.initial().items()}
    return Deployment("whole", net, params, masked=names)


def pruned(model):
    """A device lacks the filters and neurons whose weights are below the median of their layer, and single weights."""
    deployed = whole(model, *(f"{path}.weight" for path in Net(model).layers if path != "head"))
    for name in deployed.masked:
        t = deployed.params[name]
        rows = t.flatten(1).abs().mean(1)
        deployed.params[name] = torch.where(t.abs() > 1e-3, t, 0)
        deployed.params[name][rows < rows.median()] = 0
    return deployed


def test_a_masked_network_is_exported_without_the_filters_that_are_not_there(tmp_path):
    """9, 24 and 249 of 20, 50 and 500 filters and neurons are below their median. There is one pixel a channel behind
    the second layer."""
    deployed, said, to = pruned(MODELS["lenet5_caffe"](input=(1, 16, 16), classes=4)), [], tmp_path / "to"
    module = export_submodel(deployed, to, {}, said.append)
    x = drawn(5, 1, 16, 16)
    with torch.no_grad():
        expected = as_module(deployed)(x)
        torch.testing.assert_close(module(x), expected)
        torch.testing.assert_close(torch.export.load(to / "model.pt2").module()(x), expected)

    before = 20 * 25 + 50 * 20 * 25 + 500 * 50 + 4 * 500
    after = 11 * 25 + 26 * 11 * 25 + 251 * 26 + 4 * 251
    config, state = json.loads((to / "config.json").read_text()), load_file(to / "model.safetensors")
    nonzero = sum(int(t.count_nonzero()) for t in state.values())
    assert said == [f"{before:,} -> {after:,} parameters, {nonzero:,} of them nonzero; 282 of 570 filters removed"]
    assert config["parameters"] == after == sum(t.numel() for t in state.values())
    assert config["nonzero"] == nonzero < after
    assert (config["filters"], config["removed"], config["zeros"]) == (570, 282, 0)
    sizes = tuple((name, size) for name, size in config["net"].pop("sizes"))
    again = Net(MODELS["lenet5_caffe"](**config["model"]), sizes=sizes).build()
    again.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(again(x), expected)


class Sigmoids(MODELS["lenet5_caffe"]):
    def build(self, net):
        network = super().build(net)
        network.hidden_relu = nn.Sigmoid()
        return network


def test_a_network_that_makes_something_of_zeros_stays_whole(tmp_path):
    deployed, said = whole(Sigmoids(), "hidden.weight"), []
    deployed.params["hidden.weight"][:250] = 0
    export_submodel(deployed, tmp_path, {}, said.append)
    config = json.loads((tmp_path / "config.json").read_text())
    of_mask = {"nonzero": 430_500 - 250 * 800, "filters": 500, "removed": 0, "zeros": 250}
    assert of_mask.items() < config.items() and config["net"]["sizes"] == []
    assert said == [
        "no filters removed: without the pruned ones, model lenet5_caffe gives other outputs",
        "430,500 -> 430,500 parameters, 230,500 of them nonzero; 0 of 500 filters removed",
    ]


def test_filters_that_stay_are_said(tmp_path):
    """Two of the first layer's go; one class does not."""
    deployed, said = whole(MODELS["lenet5_caffe"](), "conv1.weight", "head.weight"), []
    deployed.params["conv1.weight"][:2] = 0
    deployed.params["head.weight"][0] = 0
    export_submodel(deployed, tmp_path, {}, said.append)
    assert len(said) == 2 and said[0].endswith("; 2 of 30 filters removed")
    assert said[1].startswith("1 pruned filters stay: ") and said[1].endswith("or a class needs them")


def test_an_untrained_network_is_noted(tmp_path):
    experiment, notes = tiny(method="standalone", rounds=1, clients={"cohort": 1}), []
    rayfl.run(experiment, tmp_path / "run")
    [trained] = experiment.clients.sample(experiment.seed, 0)
    for client in (None, (trained + 1) % 4, trained):
        rayfl.export(tmp_path / "run", 0.2, tmp_path / str(client), client, notify=notes.append)
    assert notes == [
        f"this network is untrained: method standalone trains a personal network per client, and {reason}"
        for reason in ("no client is given", f"client {(trained + 1) % 4} has not taken part yet")
    ]


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fails(*_):
        raise KeyboardInterrupt

    rayfl.run(tiny(method="heterofl", rounds=1), tmp_path / "run")
    (tmp_path / "there").mkdir()
    with monkeypatch.context() as disk:
        disk.setattr(torch.export, "save", fails)
        for name in ("new", "there"):
            with pytest.raises(KeyboardInterrupt):
                rayfl.export(tmp_path / "run", 0.3, tmp_path / name)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run", "there"]
    assert not any((tmp_path / "there").iterdir())
    rayfl.export(tmp_path / "run", 0.3, tmp_path / "there")
    assert (tmp_path / "there" / "model.pt2").exists()


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    rayfl.run(tiny(rounds=1), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"run: the folder is not empty\. Allowed: a new or empty folder"):
        rayfl.export(tmp_path / "run", 0.2, tmp_path / "run")
