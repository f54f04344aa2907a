"""Sweeps resume only from trusted snapshots."""

import pickle
import shutil
from pathlib import Path

import pytest
from sweeps import write

from rayfl.config import ConfigError
from rayfl.results.folder import RunFolder
from rayfl.tuning import stages, trust
from rayfl.tuning.load import load_sweep


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "rayfl" / "sweeps"


def test_a_folder_of_ones_own_until_its_stage_is_done(tmp_path, state):
    stage = tmp_path / "sweep" / "tune" / "search"
    trust.make(stage, "abc")
    trust.require(stage, "abc")
    assert state.stat().st_mode & 0o777 == 0o700
    # on one disk a folder may be moved
    (tmp_path / "sweep").rename(tmp_path / "moved")
    stage = tmp_path / "moved" / "tune" / "search"
    trust.require(stage, "abc")
    with pytest.raises(ConfigError):
        trust.require(stage, "another sweep")
    trust.forget(stage, "abc")
    assert list(state.iterdir()) == []


def test_a_copy_is_refused_until_its_owner_says_so(tmp_path):
    stage, copy = tmp_path / "mine" / "search", tmp_path / "copy" / "search"
    trust.make(stage, "abc")
    shutil.copytree(stage, copy)
    with pytest.raises(ConfigError) as error:
        trust.require(copy, "abc")
    said = str(error.value)
    assert said.startswith(f"{copy}: Ray Tune's snapshots were not made by this user on this disk. Allowed:")
    Path(said.partition("touch ")[2].partition("`")[0]).touch()
    trust.require(copy, "abc")


def test_a_sweep_without_a_place_for_its_notes_goes_on(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    trust.make(tmp_path / "search", "abc")
    with pytest.raises(ConfigError):
        trust.require(tmp_path / "search", "abc")


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
    with pytest.raises(ConfigError, match="not made by this user on this disk"):
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
