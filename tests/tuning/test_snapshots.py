"""A snapshot of Ray Tune's is resumed whole, whatever a kill left of it."""

import json
import shutil

import cloudpickle
import pytest

from rayfl.config import ConfigError
from rayfl.tuning.snapshots import KEPT, exist, names, packed, restore

TRIALS, FOLLOWING = "experiment_state-2026-02-02_00-00-00.json", "basic-variant-state-2026-02-02_00-00-00.json"
FILES = {
    "tuner.pkl": cloudpickle.dumps({"any": 1}),
    TRIALS: json.dumps({"trial_data": []}).encode(),
    FOLLOWING: cloudpickle.dumps({"rows": {}}),
}


@pytest.fixture
def stage(tmp_path):
    """A stage's folder with a snapshot, kept and copied."""
    return made(tmp_path, FILES)


def made(tmp_path, files):
    staging, stage = tmp_path / "staging", tmp_path / "stage"
    staging.mkdir()
    for name, content in files.items():
        (staging / name).write_bytes(content)
    shutil.copytree(staging, stage)
    # that of a trial is not Tune's
    (staging / "trial").mkdir()
    # Tune writes it once, beside the others
    (staging / "tuner.pkl").unlink()
    (stage / KEPT).write_bytes(packed(str(stage), staging))
    return stage


@pytest.mark.parametrize("name", [*FILES, None])
@pytest.mark.parametrize("damage", ["cut", "empty", "zeros", "absent"])
def test_files_that_were_not_written_to_their_end_are_restored(stage, name, damage):
    for torn in FILES if name is None else [name]:
        whole = FILES[torn]
        left = {"cut": whole[: len(whole) // 2], "empty": b"", "zeros": bytes(len(whole))}
        (stage / torn).unlink() if damage == "absent" else (stage / torn).write_bytes(left[damage])
    (stage / TRIALS.replace("2026", "2027")).write_text("another's")
    (stage / "trial").mkdir()
    assert exist(stage, str(stage))
    restore(stage, str(stage))
    assert {name: (stage / name).read_bytes() for name in names(str(stage))} == FILES
    assert (stage / "trial").exists()


def test_a_damaged_copy_is_said(stage):
    (stage / KEPT).write_bytes((stage / KEPT).read_bytes()[:100])
    with pytest.raises(ConfigError) as error:
        restore(stage, str(stage))
    said = str(error.value)
    assert said.startswith(f"{stage}/snapshot.zip: Ray Tune's snapshot is damaged (")
    assert said.endswith("or remove the folder; all trials of this stage then start again")


@pytest.mark.parametrize("kind", [TRIALS, FOLLOWING])
def test_a_process_killed_before_the_first_snapshot_left_none(stage, kind):
    assert exist(stage, str(stage))
    (stage / KEPT).unlink()
    assert exist(stage, str(stage))
    (stage / kind).unlink()
    assert not exist(stage, str(stage)) and not exist(stage, str(stage / "absent"))


class Gone:
    """A class that another version does not have."""

    def __reduce__(self):
        return getattr, (json, "no such name")


@pytest.mark.parametrize("name", ["tuner.pkl", FOLLOWING])
def test_the_state_of_another_version_is_no_damage(tmp_path, name):
    stage = made(tmp_path, FILES | {name: cloudpickle.dumps(Gone())})
    with pytest.raises(AttributeError):
        restore(stage, str(stage))
