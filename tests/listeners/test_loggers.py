"""Loggers: TensorBoard and Weights & Biases receive all metrics."""

import importlib.machinery
import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
from helpers import TINY, tiny

import rayfl
from rayfl.config import ConfigError
from rayfl.experiment import read_experiment
from rayfl.listeners import LISTENERS_KIND
from rayfl.listeners.tracking import name_of, numbers


@pytest.fixture
def wandb(monkeypatch):
    """Return a fake module that records calls."""
    module = ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    calls = []

    def init(**options):
        calls.append(("init", options))
        return SimpleNamespace(
            log=lambda values, step: calls.append(("log", step, values)),
            finish=lambda exit_code: calls.append(("finish", exit_code)),
        )

    module.__dict__.update(init=init, Settings=lambda **options: options, calls=calls)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_every_number_of_every_line(wandb, tmp_path):
    experiment = tiny(rounds=3, listeners=[{"name": "wandb", "project": "mine", "mode": "offline"}])
    result = rayfl.run(experiment, tmp_path / "run")
    (_, options), *logged, last = wandb.calls
    assert options["id"] == result.folder.id and options["name"] == "run" and options["config"] == experiment.plain()
    assert (options["project"], options["mode"], options["dir"]) == ("mine", "offline", tmp_path / "run")
    assert logged == [("log", line["round"], numbers(line)) for line in result.lines]
    assert "accuracy_mean" in logged[-1][2] and "round" not in logged[-1][2] and last == ("finish", 0)
    rayfl.run(experiment.with_(rounds=4), tmp_path / "run", resume=True)
    again = [entry for entry in wandb.calls if entry[0] == "init"][1][1]
    assert (again["id"], again["resume"]) == (result.folder.id, "allow")
    assert wandb.calls[-2][:2] == ("log", 4)


def test_runs_without_a_folder_are_runs_of_their_own_in_wandb(wandb):
    experiment = tiny(rounds=1, listeners=[{"name": "wandb", "mode": "offline"}])
    for _ in range(2):
        list(rayfl.start(experiment))
    assert [options["id"] for kind, options, *_ in wandb.calls if kind == "init"] == [None, None]


def test_tensorboard_has_every_number_of_every_line(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    experiment = tiny(rounds=3, listeners=["tensorboard"])
    result = rayfl.run(experiment, tmp_path / "run")
    rayfl.run(experiment.with_(rounds=4), tmp_path / "run", resume=True)
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    lines = result.folder.rounds()
    for key in ("train_loss", "accuracy_mean", "bytes_down"):
        found = [(event.step, event.value) for event in events.Scalars(key)]
        assert found == [(line["round"], pytest.approx(line[key])) for line in lines if key in line], key
    assert set(events.Tags()["scalars"]) == {key for line in lines for key in numbers(line)}


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_library_is_reported_before_the_run(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda library: None)
    with pytest.raises(ConfigError) as error:
        read_experiment(TINY | {"listeners": [name]}, "exp.yaml")
    assert f"the package {name} is not installed. Hint: uv sync --extra {name}" in str(error.value)
    assert name in LISTENERS_KIND.known()


def test_a_trial_needs_a_folder_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    config = tiny().plain()
    with pytest.raises(
        ConfigError, match="listeners: tensorboard.folder: a value is required in a sweep and with rayfl.start"
    ):
        LISTENERS_KIND.read("tensorboard", "listeners").on_start(config, None, 0)
    listener = LISTENERS_KIND.read({"name": "tensorboard", "folder": str(tmp_path)}, "listeners")
    listener.on_start(config, None, 0)
    listener.on_round({"round": 1, "train_loss": 0.5, "note": "text"})
    listener.on_end("finished")
    assert [path.name for path in tmp_path.iterdir()] == [name_of(config, None)]


def test_trials_have_unique_names(tmp_path):
    one, other = tiny().plain(), tiny(training={"lr": 0.3}).plain()
    assert name_of(one, None) == name_of(json.loads(json.dumps(one)), None) != name_of(other, None)
    assert name_of(one, None).startswith("fedavg-s0-") and name_of(one, tmp_path / "a") == "a"
