"""Runs that are ended in the middle of the server's work, in processes of their own, and the bits after --resume."""

import functools
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml
from helpers import assert_same, run, simulate, tiny
from processes import until

from rayfl.engine.checkpoints import MANIFEST, complete, read
from rayfl.engine.files import load_tensors
from rayfl.experiment import read_experiment
from rayfl.results.folder import RunFolder
from rayfl.testing.networks import SPLIT

STUDENTS = {
    "rounds": 2,
    "data": {"name": "digits", "public": {"share": 0.2}},
    "partition": "iid",
    "clients": {"count": 6, "cohort": 4, "capacities": [0.2, 0.1]},
    "model": "digits_cnn",
    "training": {"batch_size": 10, "steps": 5},
    "evaluation": {"holdout": 0.1},
    "method": {
        "name": "feddf",
        "distillation": {
            "steps": 500,
            "batch_size": 4,
            "optimizer": "adam",
            "lr": 1e-3,
            "patience": 1000,
            "validate_every": 100,
        },
    },
}
"""Two students of two lessons each, in every round."""
TRUNK = STUDENTS | {
    "clients": {"count": 6, "cohort": 4, "capacities": [0.3, 0.1], "weights": [0, 1]},
    "model": {"name": "mix", "networks": {name: SPLIT["networks"][name] for name in ("0.3", "0.1")}},
    "method": {"name": "fedgkt", "server": {"epochs": 20, "batch_size": 32}},
}
"""A trunk that learns of four clients in turn, twenty times a round, from what these keep: for some seconds."""


RUNS = {"students": STUDENTS, "trunk": TRUNK}


def inside(folder):
    """Return the partial round of the newest checkpoint, {} between rounds; None without a checkpoint."""
    for path in complete(folder / "checkpoints")[-1:]:
        try:
            return json.loads((path / MANIFEST).read_text())["begun"]
        except OSError:  # one that is just replaced
            return {}
    return {}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Name -> (a run in this process that nobody ended, its lines)."""

    @functools.cache
    def ran(name):
        simulation = simulate(read_experiment(RUNS[name], "test"), tmp_path_factory.mktemp(name))
        return simulation, run(simulation)

    return ran


def assert_same_run(folder, simulation, expected):
    """Lines, last state, and what clients keep."""
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in RunFolder.open(folder).rounds()]
    assert lines == expected
    found = read(complete(folder / "checkpoints")[-1])
    assert (found.round, found.partial_round) == (simulation.rounds, {})
    assert_same(found.state, simulation.state)
    assert found.client_states.files.keys() == simulation.client_states.files.keys()
    for client, file in found.client_states.files.items():
        assert_same(load_tensors(file), simulation.client_states.get(client) or {})


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "executor", "how"), [("trunk", "serial", signal.SIGTERM), ("students", "ray", signal.SIGKILL)]
)
def test_a_run_that_ends_inside_a_round_goes_on_there(start, tmp_path, undisturbed, name, executor, how):
    config, folder = tmp_path / "lessons.yaml", tmp_path / "runs" / "lessons"
    resources = {"executor": executor, "checkpoint_seconds": 0}
    if executor == "ray":
        resources |= {"actors": 1, "cpus": 0.5}
    config.write_text(yaml.safe_dump(RUNS[name] | {"run": resources}))
    command = start("run", config, "--output", tmp_path / "runs")
    until(lambda: (said := inside(folder)).get("round") == 1 and said.get("server_steps"), command)
    if how == signal.SIGTERM:
        command.terminate()
        assert command.finish()[0] == 143
        assert RunFolder.open(folder).status == "stopped"
    else:
        # a machine without power: nobody is left to write anything
        for pid in command.kill():
            os.kill(pid, signal.SIGKILL)
        command.finish()
    saved = read(complete(folder / "checkpoints")[-1])
    assert saved.partial_round["round"] == saved.round == 1
    if name == "students":
        steps = {int(tensors["step"]) for group, tensors in saved.state.items() if group.startswith("student ")}
        assert steps and max(steps) > 0 and not any(step % 250 for step in steps)
    else:
        assert "place" in saved.state

    code, printed = start("run", config, "--output", tmp_path / "runs", "--resume").finish()
    assert code == 0, printed
    assert_same_run(folder, *undisturbed(name))


PEAK = """
import json, resource, sys
from pathlib import Path
from helpers import simulate
from rayfl.experiment import read_experiment

simulation = simulate(read_experiment(json.loads(sys.argv[1]), "test"), Path(sys.argv[2]))
simulation.run_round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.slow
def test_an_ensemble_is_never_in_memory(start, tmp_path, monkeypatch):
    """A round with a hundred teachers takes about the memory of one with ten."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    sections = {
        "rounds": 1,
        "data": {
            "name": "synthetic",
            "samples": 1000,
            "test_samples": 40,
            "shape": [1, 28, 28],
            "public": {"share": 0.1},
        },
        "partition": "iid",
        "model": "mcmahan_cnn",
        "training": {"batch_size": 4, "steps": 1},
        "method": {"name": "feddf", "distillation": {"steps": 5, "batch_size": 8}},
        "run": {"executor": "serial"},
    }

    def peak(cohort):
        """MiB."""
        given = sections | {"clients": {"count": 100, "cohort": cohort}}
        code, printed = start(json.dumps(given), tmp_path / f"{cohort}", program=(sys.executable, "-c", PEAK)).finish()
        assert code == 0, printed
        return float(printed)

    network = 4 * 1_663_370 / 2**20
    assert peak(100) - peak(10) < 15 * network


@pytest.mark.parametrize(("public", "is_copied"), [({"noise": 30}, False), ({"share": 0.2}, True)])
def test_a_public_split_of_its_own_is_not_copied(tmp_path, public, is_copied):
    """Rows of the training set are."""
    simulation = simulate(tiny(method="feddf", data={"public": public}, partition="iid"), tmp_path)
    worker = simulation.executor.worker
    used, stored = worker.public.samples["x"], worker.samples["train" if is_copied else "public"]["x"]
    shared = used.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
    assert shared == (not is_copied)
