"""rayfl as a library, as a notebook uses it: built in Python, run serially and on Ray, round by round or whole."""

import gc
import json
import math
import os
import pkgutil
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pandas as pd
import pytest
import torch
from faults import Faulty
from helpers import TINY, PersonalHead, assert_same, message, simulate, tiny
from matplotlib.figure import Figure
from rows import study
from sklearn.datasets import load_digits
from torch import nn

import rayfl
from rayfl.config import ConfigError
from rayfl.config.failures import PluginFailed
from rayfl.core.net import cached_module
from rayfl.driver import check_folder
from rayfl.engine.checked import Diverged
from rayfl.engine.checkpoints import Best, complete, read
from rayfl.engine.locks import locked
from rayfl.engine.simulation import Simulation
from rayfl.listeners import EarlyStopping, Listener
from rayfl.methods import Dense
from rayfl.metrics import EVALUATED
from rayfl.models.cnn import DigitsCNN
from rayfl.networks import at_checkpoint
from rayfl.results.folder import RunFolder
from rayfl.system import Sampler


class Told(Listener):
    """Remembers what it is told, and ends the run after `until` rounds."""

    until: int = 0

    def remember(self):
        self.__dict__["told"] = []
        return self

    def on_start(self, config, folder, round):
        self.__dict__["told"].append(("start", config["rounds"], round))

    def on_round(self, line):
        self.__dict__["told"].append(("round", line["round"]))
        return line["round"] == self.until

    def on_note(self, text):
        self.__dict__["told"].append(("note", text))

    def on_end(self, status):
        self.__dict__["told"].append(("end", status))


def in_memory(**fields):
    digits = load_digits()
    return rayfl.InMemory(digits.images[:, None].astype("float32") / 16, digits.target, **fields)


def without_seconds(result):
    return result.metrics.drop(columns="seconds")


def test_every_public_name_is_there():
    """Also once all modules are imported: a module of that name would take its place."""
    for module in pkgutil.walk_packages(rayfl.__path__, "rayfl."):
        if not module.name.startswith("rayfl.testing"):
            __import__(module.name)
    assert [name for name in rayfl.__all__ if isinstance(getattr(rayfl, name), type(rayfl))] == []
    with pytest.raises(
        AttributeError, match="module 'rayfl' has no attribute 'ruun'. Public names: .*run, scaler, start, sweep"
    ):
        rayfl.ruun  # noqa: B018


def test_a_run_of_objects_and_mappings():
    experiment = rayfl.Experiment(
        data=in_memory(),
        model=DigitsCNN(norm="none"),
        method={"name": "heterofl", "scaler": False},
        clients={"count": 8, "cohort": 3, "capacities": [1, 0.25]},
        training={"steps": 2},
        evaluation={"every": 2},
        run={"executor": "serial"},
        rounds=4,
    )
    result = rayfl.run(experiment)
    assert isinstance(result.metrics, pd.DataFrame) and list(result.metrics.index) == [1, 2, 3, 4]
    evaluated = result.metrics["accuracy_mean"].dropna()
    assert list(evaluated.index) == [2, 4] and evaluated[4] == result.summary["accuracy_mean"]
    small = result.submodel(0.25)
    assert type(small).__module__.startswith("torch.nn") and not small.training
    assert small(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert all(isinstance(plot, Figure) for plot in result.plots.values())
    assert {"learning_curves", "accuracy_by_capacity", "weights"} <= set(result.plots)
    assert "no plot is called 'weight'. Did you mean 'weights'? Allowed: " in message(
        result.plots.__getitem__, "weight"
    )
    assert message(result.submodel, 0.5) == "capacity: 0.5 is not valid. Allowed: 1, 0.25"
    assert message(result.submodel, 1, client=8) == "client: 8 is not valid. Allowed: 0 to 7"
    folder = result.folder.path
    assert folder.exists()
    del result
    gc.collect()
    assert not folder.exists()


def test_what_is_wrong_is_said_before_anything_is_written(tmp_path):
    assert message(rayfl.run, TINY | {"rounds": 0}, tmp_path / "new") == (
        "experiment: rounds: 0 is not valid. Allowed: at least 1"
    )
    assert message(rayfl.run, TINY | {"where": 3}).startswith("experiment: unknown key 'where'. Allowed: clients")
    assert message(rayfl.run, tiny(clients={"count": 200}), tmp_path / "new").startswith(
        "clients.count: 200 is not valid."
    )
    rayfl.run(tiny(rounds=1), tmp_path / "run")
    assert message(rayfl.run, tiny(rounds=1), tmp_path / "run") == (
        f"{tmp_path / 'run'}: the folder holds a run. Allowed: a new folder, or --resume to continue the run. Hint: "
        "--name NAME chooses the folder; in Python folder and resume=True"
    )
    file = tmp_path / "run" / "run.json"
    assert message(rayfl.run, tiny(), file / "x") == (
        f"{file / 'x'}: the folder cannot be made: {file} is a file. Allowed: a new or an existing folder"
    )
    said = message(rayfl.run, tiny(training={"lr": 0.3}), tmp_path / "run", resume=True)
    assert (
        "at_is_wrong_is_said_bef0/run/config.json: the checkpoint has another configuration. Differences:\n  tr" in said
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_goes_on_with_the_bits_of_one_that_was_never_stopped(tmp_path):
    """With more rounds, which its folder then states."""
    whole = rayfl.run(tiny(rounds=4, evaluation={"every": 2}), tmp_path / "whole")
    rayfl.run(tiny(rounds=2, evaluation={"every": 2}), tmp_path / "parts")
    told = Told().remember()
    parts = rayfl.run(tiny(rounds=4, evaluation={"every": 2}), tmp_path / "parts", resume=True, listeners=[told])
    assert without_seconds(parts).equals(without_seconds(whole))
    assert_same(parts.submodel(0.3).state_dict(), whole.submodel(0.3).state_dict())
    assert told.told == [
        ("start", 4, 2),
        ("note", "resuming at round 3"),
        ("round", 3),
        ("round", 4),
        ("end", "finished"),
    ]
    again = RunFolder.open(tmp_path / "parts")
    assert (again.config["rounds"], again.facts.rounds, again.status) == (4, 4, "finished")
    saved = (tmp_path / "parts" / "clients.npy").read_bytes()
    rayfl.run(tiny(rounds=4, evaluation={"every": 2}), tmp_path / "parts", resume=True)
    assert (tmp_path / "parts" / "clients.npy").read_bytes() == saved


class Intruder(Listener):
    """Starts the run's command a second time, after its first round."""

    def on_start(self, config, folder, round):
        self.__dict__.update(experiment=config, folder=folder, told=[])

    def on_round(self, line):
        if line["round"] == 1:
            experiment, folder, told = (self.__dict__[name] for name in ("experiment", "folder", "told"))
            before = sorted(folder.rglob("*"))
            told += [message(rayfl.run, experiment, folder, resume=resume) for resume in (True, False)]
            assert sorted(folder.rglob("*")) == before


def test_a_second_command_in_a_runs_folder_is_refused(tmp_path):
    """And changes nothing, what clients keep included."""
    intruder, experiment, folder = Intruder(), tiny(method="scaffold", rounds=3), tmp_path / "run"
    found = rayfl.run(experiment, folder, listeners=[intruder])
    assert intruder.__dict__["told"] == [
        f"{folder}: process {os.getpid()} on {socket.gethostname()} is using the folder. Hint: wait for it, or choose "
        "another folder",
        f"{folder}: the folder holds a run. Allowed: a new folder, or --resume to continue the run. Hint: "
        "--name NAME chooses the folder; in Python folder and resume=True",
    ]
    assert list((folder / "client_states").iterdir()) and not (folder / "lock").exists()
    assert without_seconds(found).equals(without_seconds(rayfl.run(experiment)))


def test_a_second_command_in_a_sweeps_folder_is_refused(tmp_path):
    plan = {"experiment": TINY | {"run": {}}, "rows": {"avg": {"method": "fedavg"}}}
    with locked(tmp_path):
        assert "is using the folder. Hint: wait for it" in message(rayfl.sweep, plan, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_metrics_are_damaged_goes_on_before_the_damage(tmp_path):
    """Or not at all; never with a hole, and with the bits of a run that was never stopped."""
    experiment = tiny(rounds=6, evaluation={"every": 2}, run={"executor": "serial", "checkpoint_seconds": 0})
    whole = rayfl.run(experiment, tmp_path / "run")
    state = whole.submodel(0.3).state_dict()
    folder = tmp_path / "run"
    file = folder / "metrics.jsonl"
    assert [path.name for path in complete(folder / "checkpoints")] == ["round-000005", "round-000006"]
    lines = file.read_text().splitlines(keepends=True)

    file.write_text("".join([*lines[:5], lines[5].replace('"round": 6', '"round": 7')]))
    told = Told().remember()
    again = rayfl.run(experiment, folder, resume=True, listeners=[told])
    assert told.told[:3] == [
        ("start", 6, 5),
        (
            "note",
            f"{file}: line 6: the SHA-256 differs from the one inside the file. Hint: restore a copy of the file, or "
            "remove the run's folder; resuming from an earlier checkpoint",
        ),
        ("note", "resuming at round 6"),
    ]
    assert without_seconds(again).equals(without_seconds(whole))
    assert_same(again.submodel(0.3).state_dict(), state)

    file.write_text("".join([*lines, "\n"]))
    told = Told().remember()
    rayfl.run(experiment, folder, resume=True, listeners=[told])
    [(_, text), (_, resumed)] = [entry for entry in told.told if entry[0] == "note"]
    assert resumed == "all 6 rounds are done"
    assert "line 7: '' is not JSON" in text and text.endswith("; this round and later ones are repeated")
    assert [line["round"] for line in RunFolder.open(folder).rounds()] == list(range(1, 7))

    file.write_text("".join(lines[1:]))
    before = sorted(folder.rglob("*"))
    assert message(rayfl.run, experiment, folder, resume=True) == (
        f"{file}: line 1: the line is of round 2. Allowed: round 1; {folder / 'checkpoints'} has no valid "
        "checkpoint of an earlier round. Hint: restore the file from a copy, or start again in another folder"
    )
    assert sorted(folder.rglob("*")) == before and RunFolder.open(folder).status == "finished"


def test_a_run_that_fails_says_so_in_its_folder(tmp_path):
    told = Told().remember()
    with pytest.raises(RuntimeError, match="the update of client "):
        rayfl.run(tiny(training={"lr": 1e30}, updates={"policy": "stop"}), tmp_path, listeners=[told])
    record = RunFolder.open(tmp_path)
    assert record.status == "failed" and "lower training.lr" in str(record.error)
    assert told.told[-1] == ("end", "failed")


def test_the_rounds_before_a_failure_are_kept(tmp_path, monkeypatch):
    """Those that the same step has made, too: they show how the run diverged."""

    def advance(self):
        self.round += 1
        if self.round > 3:
            raise Diverged("round 4: nothing is finite")
        return {"round": self.round, "train_loss": 10.0**self.round}

    monkeypatch.setattr(Simulation, "advance", advance)
    told = Told().remember()
    with pytest.raises(Diverged, match="round 4"):
        rayfl.run(tiny(rounds=9), tmp_path, listeners=[told])
    assert [line["train_loss"] for line in RunFolder.open(tmp_path).rounds()] == [10.0, 100.0, 1000.0]
    assert told.told[-4:] == [*(("round", n) for n in (1, 2, 3)), ("end", "failed")]


def test_an_address_without_ray_is_refused(tmp_path):
    assert message(rayfl.run, tiny(), tmp_path / "run", address="10.0.0.1:6379") == (
        "address: 10.0.0.1:6379 is not valid with run.executor: serial. Allowed: run.executor: ray"
    )
    assert not (tmp_path / "run").exists()


def test_a_listener_ends_a_run_with_an_evaluated_round(tmp_path):
    """The next one, or the round that it is told of."""
    experiment = tiny(rounds=9, evaluation={"every": 3})
    for until, last in ((2, 3), (6, 6)):
        told = Told(until=until).remember()
        result = rayfl.run(experiment, tmp_path / str(until), listeners=[told])
        assert [line["round"] for line in result.lines] == list(range(1, last + 1))
        assert EVALUATED in result.lines[-1] and result.folder.status == "finished"
        assert told.told[-2:] == [("round", last), ("end", "finished")]
        assert complete(result.folder.path / "checkpoints")[-1].name == f"round-{last:06d}"
    # a listener of the experiment itself, named as in a file
    listeners = [{"name": "early_stopping", "metric": "train_loss", "mode": "max", "patience": 1}]
    stopping = tiny(rounds=9, evaluation={"every": 1}, listeners=listeners)
    first, second = rayfl.run(stopping), rayfl.run(stopping)
    assert len(first.lines) < 9 and without_seconds(first).equals(without_seconds(second))
    assert isinstance(stopping.listeners[0], EarlyStopping)


ENDING = {
    "rounds": 40,
    "evaluation": {"every": 1},
    "run": {"executor": "serial", "checkpoint_seconds": 0, "patience": 2},
}


def test_patience_ends_a_run_where_it_would_have_ended_without_a_stop(tmp_path):
    """Two evaluations in a row were not better than the best before them, and no two before these."""
    whole = rayfl.run(tiny(**ENDING), tmp_path / "whole")
    found = list(whole.metrics["validation_accuracy_mean"])
    late = [i for i in range(2, 40) if i < len(found) and max(found[i - 1 : i + 1]) <= max(found[: i - 1])]
    assert late == [len(found) - 1] and len(found) < 40
    stop = Told(until=len(found) - 1).remember()
    rayfl.run(tiny(**ENDING), tmp_path / "parts", listeners=[stop])
    told = Told().remember()
    why = "early stopping: validation_accuracy_mean has not improved for 2 evaluations"
    for _ in range(2):
        parts = rayfl.run(tiny(**ENDING), tmp_path / "parts", resume=True, listeners=[told])
        assert without_seconds(parts).equals(without_seconds(whole))
    assert [line for line in told.told if line[0] == "round"] == [("round", len(found))]
    notes = [line[1] for line in told.told if line[0] == "note" and "early" in line[1]]
    assert notes == [f"round {len(found)}: {why}", why]
    more = rayfl.run(tiny(**ENDING | {"run": {"executor": "serial"}}), tmp_path / "parts", resume=True)
    assert len(more.lines) == 40


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_the_best_round_is_kept_beside_the_newest(tmp_path, method):
    """With the bits of a run that ended there, what clients keep included, and after a stop too."""
    serial = {"executor": "serial", "checkpoint_seconds": 1000, "checkpoint": "best"}
    best = tiny(method=method, rounds=9, evaluation={"every": 2, "local_holdout": 0.2}, run=serial)
    whole = rayfl.run(best, tmp_path / "whole")
    values = whole.metrics[best.chosen_by].dropna()
    round = int(values.idxmax())
    assert round < 9 and best.chosen_by == "validation_accuracy_mean"
    short = rayfl.run(best.with_(rounds=round), tmp_path / "short")
    for folder in (tmp_path / "whole", tmp_path / "parts"):
        if not folder.exists():
            rayfl.run(best.with_(rounds=4), folder)
            rayfl.run(best, folder, resume=True)
        [path] = complete(folder / "checkpoints" / "best")
        assert path.name == f"round-{round:06d}"
        assert json.loads((path.parent / "best.json").read_text())["value"] == values[round]
        kept, ended = read(path), read(complete(tmp_path / "short" / "checkpoints")[-1])
        assert_same(kept.state, ended.state)
        assert {c: file.read_bytes() for c, file in kept.client_states.files.items()} == {
            c: file.read_bytes() for c, file in ended.client_states.files.items()
        }
        assert complete(folder / "checkpoints")[-1].name == "round-000009"
    assert_same(whole.submodel(0.3, best=True).state_dict(), short.submodel(0.3).state_dict())
    rayfl.export(tmp_path / "whole", 0.3, tmp_path / "exported", best=True)
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["round"] == round
    rayfl.run(tiny(rounds=1), tmp_path / "last")
    assert message(rayfl.export, tmp_path / "last", 0.3, tmp_path / "x", best=True) == (
        f"{tmp_path / 'last'}: the run has no best checkpoint. Allowed: a run with `run.checkpoint: best`"
    )


def test_a_best_round_that_was_saved_and_not_kept_is_kept_by_resume(tmp_path, monkeypatch):
    serial = {"executor": "serial", "checkpoint_seconds": 1000, "checkpoint": "best"}
    best = tiny(rounds=6, evaluation={"every": 1}, run=serial)
    whole = rayfl.run(best, tmp_path / "whole")
    [kept] = complete(tmp_path / "whole" / "checkpoints" / "best")
    keep = Best.keep

    def interrupted(self, line):
        if line["round"] == int(kept.name[-6:]):
            raise KeyboardInterrupt
        keep(self, line)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Best, "keep", interrupted)
        rayfl.run(best, tmp_path / "parts")
    parts = rayfl.run(best, tmp_path / "parts", resume=True)
    assert without_seconds(parts).equals(without_seconds(whole))
    [again] = complete(tmp_path / "parts" / "checkpoints" / "best")
    assert again.name == kept.name
    assert_same(read(again).state, read(kept).state)


@pytest.mark.parametrize(
    ("sections", "metric"),
    [
        ({}, "validation_accuracy_mean"),
        ({"evaluation": {"holdout": 0}}, "accuracy_mean"),
        ({"method": "standalone"}, "local_accuracy_mean"),
        ({"method": "standalone", "evaluation": {"local_holdout": 0.2}}, "local_validation_accuracy_mean"),
        ({"method": "standalone", "evaluation": {"clients": False}}, "validation_accuracy_mean"),
    ],
    ids=str,
)
def test_rounds_are_chosen_on_what_is_held_out(sections, metric):
    experiment = tiny(**sections)
    assert experiment.chosen_by == metric and metric in experiment.metrics()
    assert experiment.with_(run={"patience": 3}).all_listeners() == (
        EarlyStopping(metric=metric, patience=3, mode="max"),
    )


def test_round_by_round():
    experiment = tiny(rounds=3)
    whole, losses, networks = rayfl.run(experiment), [], []
    with rayfl.start(experiment) as session:
        for line in session:
            losses.append(line["train_loss"])
            networks.append(session.submodel(0.3).state_dict())
            if line["round"] == 2:
                break
        assert [line["round"] for line in session] == [3]
        assert session.metrics.drop(columns="seconds").equals(without_seconds(whole))
        assert message(session.submodel, 7) == "capacity: 7 is not valid. Allowed: 0.3, 0.2, 0.1"
        # as it is printed
        assert all(map(torch.equal, *(session.submodel(c).state_dict().values() for c in (0.3, 0.30000001))))
    assert losses == list(whole.metrics["train_loss"])[:2]
    assert any(not torch.equal(networks[0][name], networks[1][name]) for name in networks[0])


def test_a_session_tells_listeners_which_may_end_it():
    """As a run does: patience is a listener too."""
    told = Told(until=3).remember()
    experiment = tiny(rounds=6, evaluation={"every": 2}, listeners=[told])
    assert [line["round"] for line in rayfl.start(experiment)] == [1, 2, 3, 4]
    first, (what, text), *others = told.told
    assert first == ("start", 6, 0) and what == "note" and text.startswith("method fedavg ignores capacities: ")
    assert others == [*[("round", r) for r in (1, 2, 3, 4)], ("end", "finished")]
    told = told.remember()
    with rayfl.start(experiment) as session:
        for line in session:
            if line["round"] == 3:
                break
        # it was ended before the loop was left
        assert [line["round"] for line in session] == [4]
    told = told.remember()
    with rayfl.start(experiment) as session:
        next(iter(session))
    assert [one[0] for one in told.told] == ["start", "note", "round", "end"] and told.told[-1] == ("end", "stopped")


def test_runs_in_threads_do_not_see_each_other():
    """They would share the modules in which clients train, and torch's generators."""
    experiments = [tiny(seed=seed, training={"steps": 8}, method="fjord") for seed in range(3)]
    alone = [without_seconds(rayfl.run(experiment)) for experiment in experiments]
    with ThreadPoolExecutor(3) as pool:
        together = [without_seconds(result) for result in pool.map(rayfl.run, experiments)]
    assert all(one.equals(other) for one, other in zip(alone, together, strict=True))


def test_a_run_leaves_the_users_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    cached_module.cache_clear()
    result = rayfl.run(tiny(rounds=1))
    result.submodel(0.1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_result_whose_folder_is_gone_says_so(tmp_path):
    result = rayfl.run(tiny(rounds=1), tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    for look in (lambda: result.lines, lambda: result.summary, lambda: result.metrics):
        assert message(look) == f"{tmp_path}/run: the run's folder is gone. Hint: `rayfl.run(..., folder=...)` keeps it"


def test_what_is_no_experiment_is_refused():
    for given in (None, 5, ["fedavg"], b"file.yaml"):
        assert message(rayfl.run, given).startswith(f"experiment: {given!r} is not valid. Allowed: an Experiment, a ")


def test_what_is_no_folder_no_listener_or_no_data_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    comparison = {"experiment": tiny(run={"executor": "ray"}), "rows": {"a": {}}}
    for folder in (5, "", ["run"]):
        for function, given in ((rayfl.run, tiny()), (rayfl.sweep, comparison)):
            assert message(function, given, folder) == f"folder: {folder!r} is not valid. Allowed: a path"
    assert message(rayfl.run, tiny(), resume=True).startswith("resume: True is not valid without a folder")
    for plan in (3, tiny()):
        said = message(rayfl.sweep, plan, "~/run")
        assert said.startswith("sweep: ") and said.endswith("Allowed: a mapping of sections, or a YAML file's path")
    for listener in ("early_stopping", print, EarlyStopping):
        said = message(lambda one=listener: rayfl.run(tiny(), "~/run", listeners=[one]))
        assert said.startswith("listeners.0: ") and said.endswith("is not valid. Allowed: an object of rayfl.Listener")
    said = message(lambda: rayfl.run(tiny(), "~/run", listeners=EarlyStopping()))
    assert said.startswith("listeners: ") and said.endswith("Allowed: a list of objects of rayfl.Listener")
    for function in (
        lambda: rayfl.run(tiny(), "~/run", arrays=[1, 2]),
        lambda: list(rayfl.start(tiny(), arrays=[1, 2])),
    ):
        assert message(function).startswith("arrays: [1, 2] is not valid. Allowed: an object of rayfl.Arrays, such as")
    assert not [*tmp_path.iterdir()]
    rayfl.run(tiny(rounds=1), "~/run")
    assert RunFolder.exists(tmp_path / "run")


def test_arrays_in_memory_are_the_data_sets_own():
    """A change by the caller would not be in its digest."""
    digits = load_digits()
    x, y = digits.images[:, None].astype("float32") / 16, digits.target.astype("int64")
    data = rayfl.InMemory(x[:1500], y[:1500], x[1500:], y[1500:])
    before = {name: array.copy() for name, array in data.arrays().train.items()}
    x[:] = 0
    y[:] = 0
    assert all((data.arrays().train[name] == array).all() for name, array in before.items())


def test_a_session_without_a_block_ends_with_its_loop():
    experiment = tiny(rounds=2)
    session = rayfl.start(experiment)
    lines = [line["round"] for line in session]
    assert lines == [1, 2] and list(session.metrics.index) == lines
    assert session.metrics.drop(columns="seconds").equals(without_seconds(rayfl.run(experiment)))
    with pytest.raises(RuntimeError, match="the run has ended. Hint: `with rayfl.start"):
        session.submodel(0.3)
    with pytest.raises(RuntimeError, match="the run has ended. Hint: `rayfl.start` starts another one"):
        next(iter(session))
    assert [line["round"] for line in session.lines] == lines


def test_a_file_is_run_as_its_content(tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(json.dumps(dict(TINY) | {"rounds": 1}))
    for given in (file, str(file)):
        assert without_seconds(rayfl.run(given)).equals(without_seconds(rayfl.run(tiny(rounds=1))))
    assert message(rayfl.start, tmp_path / "absent.yaml").startswith(str(tmp_path / "absent.yaml"))


class NotANumber(Dense):
    """Sends updates that the server refuses."""

    def local_update(self, payload, visit):
        update = self.trained(payload, visit)
        return replace(update, sums={"params": {n: t * math.nan for n, t in update.sums["params"].items()}})


def test_a_run_whose_model_never_changed_says_so():
    told = Told().remember()
    result = rayfl.run(tiny(method=NotANumber(), rounds=2), listeners=[told])
    notes = [text for kind, text, *_ in told.told if kind == "note"]
    assert notes[-1] == "rounds in which all updates were refused, and the model did not change: 2"
    # who has no listener sees them in the result
    assert list(result.notes) == notes and repr(notes[-1]) in repr(result)


class Nobody(Sampler):
    """Asks no client."""

    def choose(self, wanted, free, round, memory):
        return [], memory


def test_a_run_that_nobody_took_part_in_says_so():
    result = rayfl.run(tiny(system={"devices": "phones", "sampler": Nobody()}, rounds=2))
    assert result.notes[-1] == "rounds in which too few updates arrived, and the model did not change: 2"


class Misspelt(Listener):
    def on_round(self, line):
        return line["acuracy_mean"] > 1


def test_what_is_refused_leaves_a_finished_run_as_it_is(tmp_path):
    """Another number of threads changes bits."""
    rayfl.run(tiny(rounds=2, run={"executor": "serial"}), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    other = tiny(rounds=3, run={"executor": "serial", "threads": 2})
    assert "threads" in message(rayfl.run, other, tmp_path / "run", resume=True)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_rounds_without_a_checkpoint_are_repeated_with_a_note(tmp_path):
    first = rayfl.run(tiny(rounds=2), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    again = rayfl.run(tiny(rounds=2), tmp_path / "run", resume=True)
    assert f"{tmp_path / 'run' / 'checkpoints'}: there is no checkpoint; rounds 1 to 2 are repeated" in again.notes
    assert without_seconds(again).equals(without_seconds(first))
    (tmp_path / "run" / "run.json").unlink()
    assert message(rayfl.run, tiny(rounds=2), tmp_path / "run") == (
        f"{tmp_path / 'run'}: the folder has checkpoints of another run. Allowed: a new folder"
    )


def test_the_best_checkpoint_is_that_of_the_metrics(tmp_path):
    """A run that begins to keep its best round, and one that ends to."""
    ways = {kind: {"executor": "serial", "checkpoint": kind} for kind in ("last", "best")}
    experiment = {"evaluation": {"every": 1}, "method": "heterofl"}
    for first, then in (("last", "best"), ("best", "last")):
        folder = tmp_path / first
        rayfl.run(tiny(rounds=4, run=ways[first], **experiment), folder)
        result = rayfl.run(tiny(rounds=6, run=ways[then], **experiment), folder, resume=True)
        values = result.metrics["validation_accuracy_mean"]
        if then == "last":
            assert any("best: removed, because run.checkpoint is last now" in one for one in result.notes)
        if then == "best" and values.idxmax() >= 4:
            assert json.loads((folder / "checkpoints/best/best.json").read_text())["round"] == values.idxmax()
        else:
            assert not (folder / "checkpoints/best").exists()
            assert "no best checkpoint" in message(result.submodel, 0.3, best=True)


def test_a_metric_that_no_evaluation_has_is_said():
    sections = {"method": "standalone", "evaluation": {"every": 1, "clients": False}}
    result = rayfl.run(tiny(rounds=2, run={"executor": "serial", "checkpoint": "best"}, **sections))
    assert result.notes[-1].startswith("no best checkpoint: no evaluation has a better ")


def test_data_that_are_given_are_checked_too(tmp_path):
    experiment = tiny(rounds=1, system={"devices": "phones", "mode": {"name": "sync", "deadline_s": 1e-9}})
    said = message(rayfl.run, experiment, tmp_path / "run", arrays=experiment.data.arrays())
    assert said.startswith("system.mode.deadline_s: no client can finish within 1e-09 seconds")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({3: 4}, "experiment: the key 3 is not valid. Allowed: names of sections"),
        ({None: 4}, "experiment: the key None is not valid. Allowed: names of sections"),
        ({"training": {None: 3}}, "experiment: training: a key is not valid. Allowed: text"),
        ({"evaluation": {"clients": 0}}, "experiment: evaluation.clients: 0 is not valid. Allowed: true or false, or "),
    ],
)
def test_keys_and_values_of_odd_types_are_refused(given, said):
    assert message(rayfl.run, TINY | given).startswith(said)


def test_capacities_and_clients_of_odd_types_are_refused(tmp_path):
    result = rayfl.run(tiny(rounds=1), tmp_path / "run")
    for capacity in ("0.3", None, True):
        assert "Allowed: 0.3, 0.2, 0.1" in message(result.submodel, capacity)
    for client in ("1", 1.5):
        assert "Allowed: 0 to 5" in message(result.submodel, 0.3, client)
    for folder in (None, "a\0b"):
        assert message(rayfl.export, folder, 0.3, tmp_path / "to").startswith("folder: ")
        assert message(rayfl.export, tmp_path / "run", 0.3, folder).startswith("to: ")


def test_an_error_in_a_users_code_is_said_with_its_type_and_place(tmp_path):
    with pytest.raises(PluginFailed):
        rayfl.run(tiny(rounds=1), tmp_path, listeners=[Misspelt()])
    error = str(RunFolder.open(tmp_path).error)
    assert "listeners: test_driver:Misspelt, on_round: KeyError: 'acuracy_mean'\nTraceback" in error
    assert 'return line["acuracy_mean"] > 1' in error


def test_a_sweep_is_not_continued_with_more_rounds_or_points(tmp_path):
    """What it would need is said before anything is loaded, and the folder stays as it is."""
    folder = study(tmp_path / "swept").path
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    config = RunFolder.open(folder).config
    longer = config | {"experiment": {"rounds": 9}}
    more = config | {"search": config["search"] | {"seeds": [0, 1, 2, 3]}}
    for changed, said in ((longer, "experiment.rounds: 3 -> 9"), (more, "search.seeds: [0, 1, 2] -> [0, 1, 2, 3]")):
        with pytest.raises(ConfigError) as error:
            check_folder(folder, changed, True, "sweep")
        assert str(error.value) == (
            f"{folder}: the sweep was started with other settings: {said}. Allowed: the same settings, because a sweep "
            "cannot be continued with more rounds, points, rows or seeds. Hint: run the changed file in a new folder "
            "(--name NAME), and `rayfl compare` the two"
        )
    check_folder(folder, config | {"question": "Another one?"}, True, "sweep")
    assert before == {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_run_is_not_resumed_with_fewer_rounds_than_it_has(tmp_path):
    rayfl.run(tiny(rounds=3), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    said = message(rayfl.run, tiny(rounds=2), tmp_path / "run", resume=True)
    assert said == f"{tmp_path / 'run'}: rounds: 2 is not valid. Allowed: at least the 3 rounds done"
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}


def test_a_result_prints_as_one_line(tmp_path):
    result = rayfl.run(tiny(method="heterofl", rounds=1), tmp_path / "run")
    assert re.fullmatch(r"Result\(heterofl, 1 rounds, accuracy_mean=0\.\d{4}, folder='.*/run'\)", repr(result))


def test_a_clients_own_network():
    result = rayfl.run(tiny(method=PersonalHead(), clients={"cohort": 6}, rounds=1))
    x = torch.ones(2, 1, 8, 8)
    with torch.no_grad():
        heads = [result.submodel(0.3, client)(x) for client in (0, 1)]
    assert not torch.equal(*heads)
    assert message(result.submodel, 0.1, client=0) == "capacity: 0.1 is not valid with client 0. Allowed: 0.3, its own"


def test_a_clients_own_network_is_as_large_as_its_device_allows(tmp_path):
    """Of a result, whose arrays are loaded, and of a session that has them. By ids the first three clients would have
    the large one."""
    file = tmp_path / "devices.csv"
    file.write_text("name,gflops,memory_mb\n" + "".join(f"{i},1,{0.001 if i < 3 else 1000}\n" for i in range(6)))
    system = {"devices": {"name": "table", "file": str(file)}, "capacities": "memory"}
    experiment = tiny(
        method="ditto", clients={"count": 6, "cohort": 6, "capacities": [1, 0.3]}, rounds=1, system=system
    )
    result = rayfl.run(experiment, tmp_path / "run")
    with rayfl.start(experiment, arrays=experiment.data.arrays()) as session:
        next(iter(session))
        # a result counts the work of a visit for each question
        for source, clients in ((result, [(0, 0.3, 1)]), (session, [(0, 0.3, 1), (5, 1, 0.3)])):
            for client, own, other in clients:
                assert parameters(source.submodel(own, client)) == parameters(session.submodel(own))
                assert message(source.submodel, other, client) == (
                    f"capacity: {other} is not valid with client {client}. Allowed: {own}, its own"
                )


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def test_a_network_from_inside_a_round_says_so(tmp_path):
    experiment = tiny(method={"name": "feddf", "distillation": {"steps": 2}}, data={"public": {"share": 0.2}}, rounds=2)
    simulation = simulate(experiment, tmp_path)
    saved, notes = tmp_path / "saved", []
    simulation.run_round()
    simulation.save(saved)
    at_checkpoint(experiment, saved, 0.3, None, pytest.fail)
    assert simulation.advance() is None
    simulation.save(saved)
    round, _ = at_checkpoint(experiment, saved, 0.3, None, notes.append)
    assert round == 1 and notes == [
        f"{saved}: the newest checkpoint is inside round 2, whose server tasks are not done. Hint: resume the run for "
        "the network of a whole round"
    ]


def test_export_of_arrays_in_memory(tmp_path, capsys):
    """Whoever has the arrays exports a network whose norms need them."""
    sections = {"data": in_memory(), "model": "digits_cnn", "rounds": 1, "run": {"executor": "serial"}}
    experiment = rayfl.Experiment(**sections, clients={"count": 4, "cohort": 2, "capacities": [1, 0.5]})
    result = rayfl.run(experiment, tmp_path / "run")
    assert "without the samples. Allowed: rayfl.InMemory with the arrays" in message(
        rayfl.export, tmp_path / "run", 0.5, tmp_path / "small"
    )
    module = rayfl.export(tmp_path / "run", 0.5, tmp_path / "small", data=experiment.data)
    assert isinstance(module, nn.Module)
    x = torch.rand(5, 1, 8, 8)
    program = torch.export.load(tmp_path / "small" / "model.pt2").module()
    for given in (program, result.submodel(0.5)):
        assert torch.allclose(given(x), module(x), atol=1e-5)
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["samples"] == {"scale": 1.0, "mean": [0.0], "std": [1.0], "size": None}
    assert message(rayfl.export, tmp_path / "run", 0.5, tmp_path / "small", data=experiment.data) == (
        f"{tmp_path / 'small'}: the folder is not empty. Allowed: a new or empty folder"
    )
    assert message(rayfl.export, tmp_path, 0.5, tmp_path / "x") == (
        f"{tmp_path}: the folder contains no run. Allowed: a folder with a run.json"
    )
    assert capsys.readouterr().out == ""


@pytest.mark.ray
def test_a_notebooks_own_cluster_is_used_as_it_is(ray_cluster, tmp_path, monkeypatch):
    """And the run has the bits of a serial one, though its arrays are in memory and its folder is a relative one."""
    monkeypatch.chdir(tmp_path)
    sections = TINY | {"data": in_memory(), "partition": "iid", "method": PersonalHead(), "evaluation": {"every": 1}}
    serial = rayfl.run(sections)
    on_ray = sections | {"run": {"chunk": 1, "actors": 2}}
    found = rayfl.run(on_ray, "runs/ray")
    assert ray_cluster.is_initialized() and (tmp_path / "runs" / "ray" / "run.json").exists()
    assert without_seconds(found).equals(without_seconds(serial))
    with rayfl.start(on_ray | {"run": {"chunk": 1, "actors": 1}}) as session:
        assert [line["round"] for line in session] == [1, 2]
        assert session.metrics.drop(columns="seconds").equals(without_seconds(serial))
        assert_same(session.submodel(0.1).state_dict(), serial.submodel(0.1).state_dict())


@pytest.mark.ray
def test_what_a_user_did_wrong_is_one_sentence_from_an_actor_too(ray_cluster, tmp_path):
    refusing = Faulty(client=4, fault="refuse", times=9, marker=str(tmp_path / "marker"))
    sections = TINY | {"method": refusing, "clients": {"count": 6, "cohort": 6}, "run": {"chunk": 1, "actors": 1}}
    assert message(rayfl.run, sections, tmp_path / "run") == "method.client: a client is not valid. Allowed: nobody"
    record = RunFolder.open(tmp_path / "run")
    assert (record.status, record.error) == ("failed", "method.client: a client is not valid. Allowed: nobody")


@pytest.mark.ray
@pytest.mark.slow
def test_a_comparison_of_objects(ray_cluster, tmp_path):
    sections = TINY | {"data": in_memory(), "partition": "iid", "run": {"chunk": 1, "actors": 1}, "rounds": 1}
    experiment = rayfl.Experiment(**sections, seed=7)
    plan = {"experiment": experiment, "rows": {"own": {"method": PersonalHead()}, "avg": {"method": "fedavg"}}}
    plan["search"] = {"metric": "local_accuracy_mean", "allow_test": True}
    found = rayfl.sweep(plan, tmp_path / "sweep")
    assert isinstance(found.table, pd.DataFrame) and set(found.table["method"]) == {"own", "avg"}
    [own] = found.table[found.table["method"] == "own"].to_dict("records")
    alone = rayfl.run(experiment.with_(method=PersonalHead(), seed=0))
    assert own["local_accuracy_mean"] == alone.summary["local_accuracy_mean"]
    assert all(isinstance(plot, Figure) for plot in found.plots.values())
    assert found.folder.status == "finished" and (tmp_path / "sweep" / "results.md").exists()
    assert message(rayfl.sweep, plan, tmp_path / "sweep").endswith(
        "the folder holds a sweep. Allowed: a new folder, or --resume to continue the sweep. Hint: "
        "--name NAME chooses the folder; in Python folder and resume=True"
    )


CELLS = """
    import numpy as np
    import torch
    from torch import nn

    import rayfl

    class Tiny(rayfl.ImageModel):
        width: int = 16

        def build(self, net):
            pixels = self.image.repeat(self.input[1] * self.input[2])
            hidden = net.axis("hidden", self.width)
            layers = rayfl.linear(pixels, hidden), nn.ReLU(), rayfl.linear(hidden, self.labels)
            return nn.Sequential(nn.Flatten(), *layers)

    class Mine(rayfl.Dense):
        boost: float = 2.0

        def weight_of(self, data):
            return self.boost * super().weight_of(data)

    class Wrong(rayfl.Score):
        better = "min"

        def counts(self, logits, y):
            wrong = (logits.argmax(1) != y).sum()
            return torch.stack([wrong, wrong.new_full((), len(y))])

        def value(self, sums):
            return float(sums[0] / sums[1])

    y = np.arange(240) % 3
    x = np.random.default_rng(0).normal(size=(240, 1, 4, 4)) + y[:, None, None, None]
    sections = {"model": Tiny(), "method": Mine(), "data": rayfl.InMemory(x, y), "evaluation": {"scores": [Wrong()]},
                "rounds": 2, "clients": {"count": 6, "cohort": 4, "capacities": [1, 0.5]}}
    found = [rayfl.run({**sections, "run": run}).metrics for run in ({"actors": 2}, {"executor": "serial"})]
    assert "Wrong_mean" in found[0]
    assert found[0].drop(columns="seconds").equals(found[1].drop(columns="seconds"))
"""


@pytest.mark.ray
@pytest.mark.slow
def test_classes_of_a_notebooks_cells_reach_the_actors(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CELLS)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
