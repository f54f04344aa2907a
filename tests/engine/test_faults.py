"""Faults of disks, clocks and servers: a run ends, or goes on, with the bits of one that was not disturbed."""

import ast
import resource
import time
from pathlib import Path

import pytest
import yaml
from disks import small_files
from helpers import TINY, PersonalHead, assert_same, tiny
from servers import answering, fail, late

import rayfl
from rayfl.engine.checkpoints import complete, read
from rayfl.engine.files import NotWritten, load_tensors
from rayfl.listeners import Listener
from rayfl.results.folder import RunFolder
from rayfl.results.mlflow import Reader, Store, default_uri, unsent

ROUNDS = 6


def experiment(**run):
    """Return a run with client states and a checkpoint after every evaluation."""
    run = {"executor": "serial", "checkpoint_seconds": 0} | run
    return tiny(method=PersonalHead(), rounds=ROUNDS, evaluation={"every": 2}, run=run)


def result(folder):
    """A run's lines without seconds, its last state, and what its clients keep."""
    found = read(complete(folder / "checkpoints")[-1])
    assert found.round == ROUNDS
    kept = {str(client): load_tensors(file) for client, file in found.client_states.files.items()}
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in RunFolder.open(folder).rounds()]
    return lines, found.state, kept


def assert_equal(folder, other):
    ours, theirs = result(folder), result(other)
    assert ours[0] == theirs[0]
    for mine, yours in zip(ours[1:], theirs[1:], strict=True):
        assert_same(mine, yours)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return rayfl.run(experiment(), tmp_path_factory.mktemp("undisturbed") / "run").folder.path


class Filling(Listener):
    """The disk is full from a round on: of every file it takes so many bytes."""

    after: int
    takes: int

    def on_round(self, line):
        if line["round"] == self.after:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.takes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("takes", [0, 1000, 20_000])
def test_a_disk_that_fills_up_while_a_run_writes(tmp_path, undisturbed, takes):
    """Its records, its checkpoint, or what a client keeps."""
    folder = tmp_path / "run"
    with small_files(resource.RLIM_INFINITY), pytest.raises((NotWritten, OSError)):
        rayfl.run(experiment(), folder, listeners=[Filling(after=3, takes=takes)])
    assert len(RunFolder.open(folder).rounds()) < ROUNDS
    rayfl.run(experiment(), folder, resume=True)
    assert RunFolder.open(folder).status == "finished"
    assert_equal(folder, undisturbed)


def test_a_clock_that_jumps(tmp_path, undisturbed, monkeypatch):
    """An hour on or back whenever it is read."""
    now, reads = time.time, []

    def jumping():
        reads.append(True)
        return now() + 3600 * (-1) ** len(reads)

    monkeypatch.setattr(time, "time", jumping)
    run = rayfl.run(experiment(), tmp_path / "run")
    assert reads
    assert all(0 <= line["seconds"] < 3600 for line in run.lines)
    assert_equal(tmp_path / "run", undisturbed)


def test_limits_and_durations_are_of_clocks_that_do_not_jump():
    """The time of day is read where it is only shown: when a run began, an event came, a sample was taken."""
    found = []
    for file in sorted(Path("rayfl").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "datetime.now", "date.today"):
                found.append((file.as_posix(), ast.unparse(node)))
    shown = ("rayfl/results/events.py", "rayfl/results/folder.py", "rayfl/results/mlflow/system.py")
    assert found == [(file, "time.time") for file in shown]


@pytest.mark.slow
@pytest.mark.parametrize("answer", [fail, late(30)])
def test_a_run_whose_mlflow_is_not_well(start, tmp_path, answer):
    """It says so once and ends; the next command sends what it could not."""
    config, output = tmp_path / "tiny.yaml", tmp_path / "runs"
    config.write_text(yaml.safe_dump(TINY | {"method": "scaffold"}))
    with answering(answer) as uri:
        code, printed = start("run", config, "--output", output, "--tracking-uri", uri).finish()
    assert code == 0, printed
    assert printed.count(f"MLflow at {uri} ") == 1
    rayfl.run(tiny(method="scaffold"), tmp_path / "undisturbed")
    lines = [RunFolder.open(folder).rounds() for folder in (output / "tiny", tmp_path / "undisturbed")]
    assert [{k: v for k, v in line.items() if k != "seconds"} for line in lines[0]] == [
        {k: v for k, v in line.items() if k != "seconds"} for line in lines[1]
    ]
    assert unsent(output) == [output / "tiny"]
    code, printed = start("run", config, "--output", output, "--name", "next").finish()
    assert code == 0, printed
    rows = Reader(Store(default_uri(output))).read()
    assert sorted(row["id"] for row in rows) == sorted(RunFolder.open(output / name).id for name in ("tiny", "next"))
