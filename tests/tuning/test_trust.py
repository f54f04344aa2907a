"""Sweeps resume only from trusted snapshots."""

import pickle
import shutil
import subprocess
from pathlib import Path

import pytest
from sweeps import write

from rayfl.config import ConfigError
from rayfl.results import files
from rayfl.results.folder import RunFolder
from rayfl.tuning import snapshots, stages, trust
from rayfl.tuning.load import load_sweep


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "rayfl" / "sweeps"


def snapshot(stage, content=b"{}", name="experiment_state-1.json"):
    """Write a snapshot as Tune does: staged, kept, copied."""
    staging = stage.parent / "staging"
    staging.mkdir(exist_ok=True)
    (staging / name).write_bytes(content)
    (stage / "tuner.pkl").write_bytes(b"tuner")
    trust.keep(stage, "abc", str(stage), staging)
    shutil.copyfile(staging / name, stage / name)


def test_a_folder_of_ones_own_until_its_stage_is_done(tmp_path, state):
    stage = tmp_path / "sweep" / "tune" / "search"
    trust.make(stage, "abc")
    assert not trust.has_begun(stage, "abc")
    snapshot(stage)
    assert trust.has_begun(stage, "abc")
    trust.require(stage, "abc")
    assert state.stat().st_mode & 0o777 == 0o700
    # a folder may be moved, and copied
    (tmp_path / "sweep").rename(tmp_path / "moved")
    stage = tmp_path / "moved" / "tune" / "search"
    trust.require(stage, "abc")
    with pytest.raises(ConfigError):
        trust.require(stage, "another sweep")
    trust.forget(stage, "abc")
    assert list(state.iterdir()) == []


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_kill_between_the_note_and_the_snapshot_is_no_harm(tmp_path, monkeypatch, before):
    """Also one of every process after another."""
    trust.make(stage := tmp_path / "search", "abc")
    for number in range(before):
        snapshot(stage, str(number).encode())

    written = files.replace

    def killed(path, data):
        if path == stage / snapshots.KEPT:
            raise KeyboardInterrupt
        written(path, data)

    for number in range(3):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(files, "replace", killed)
            snapshot(stage, f"newer {number}".encode())
        if before:
            trust.require(stage, "abc")
    snapshot(stage)
    trust.require(stage, "abc")


@pytest.mark.parametrize("gone", [False, True])
def test_content_that_was_replaced_is_refused_until_its_owner_says_so(tmp_path, gone):
    """Also in a file of the same inode, as after an archive is unpacked."""
    stage = tmp_path / "search"
    trust.make(stage, "abc")
    snapshot(stage)
    kept = stage / "snapshot.zip"
    if gone:
        kept.unlink()
    else:
        with kept.open("r+b") as file:
            file.write(b"other")
    with pytest.raises(ConfigError) as error:
        trust.require(stage, "abc")
    said = str(error.value)
    assert said.startswith(
        f"{kept}: Ray Tune's snapshot was not written by this user and this version of rayfl, or was changed. Allowed:"
    )
    subprocess.run(said.partition("run `")[2].partition("`")[0], shell=True, check=True)
    trust.require(stage, "abc")


def test_a_sweep_without_a_place_for_its_notes_goes_on(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    trust.make(stage := tmp_path / "search", "abc")
    snapshot(stage)
    with pytest.raises(ConfigError):
        trust.require(stage, "abc")


class Bomb:
    """Object that writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_code_in_somebody_elses_folder_does_not_run(tmp_path):
    plan = load_sweep(write(tmp_path))
    run = RunFolder.create(tmp_path / "runs", plan.name, plan.plain(), {}, plan.facts(), kind="sweep")
    stage = run.path / "tune" / "search"
    stage.mkdir(parents=True)
    hit = tmp_path / "hit"
    (stage / "tuner.pkl").write_bytes(pickle.dumps(Bomb(hit)))
    for kind in ("experiment_state", "basic-variant-state"):
        (stage / f"{kind}-2026.json").touch()
    given = stages._Stages(plan, run, None, None)  # pyright: ignore
    with pytest.raises(ConfigError, match="was not written by this user and this version of rayfl, or was changed"):
        given.listed("search", [])
    assert not hit.exists()
    pickle.loads((stage / "tuner.pkl").read_bytes())
    assert hit.exists()


def test_a_stage_continues_in_the_place_of_its_start(tmp_path):
    plan = load_sweep(write(tmp_path))
    run = RunFolder.create(tmp_path / "runs", plan.name, plan.plain(), {}, plan.facts(), kind="sweep")
    stage, bucket = run.path / "tune" / "search", f"file://{tmp_path}/bucket"

    def refused(storage):
        with pytest.raises(ConfigError, match="^--storage: the trials' checkpoints are in ") as error:
            stages._Stages(plan, run, None, None, storage).listed("search", [])  # pyright: ignore
        return str(error.value)

    trust.make(stage, run.id)
    (stage / "experiment_state-2026.json").touch()
    state = stage / "search_gen_state-2026.json"
    state.touch()
    assert f"are in {stage}, and this command looks for them in {bucket}/{run.id}/search. Allowed:" in refused(bucket)
    state.unlink()
    (stage / "storage").write_text("s3://theirs/search")
    for storage in (None, bucket):
        assert "are in s3://theirs/search, and" in refused(storage)
    assert stage.exists()
