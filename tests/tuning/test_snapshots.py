"""A damaged snapshot of Ray Tune's is said before Tune would start all trials again."""

import json

import cloudpickle
import pytest

from rayfl.config import ConfigError
from rayfl.tuning.snapshots import exist, require_whole

TRIALS, FOLLOWING = "experiment_state-2026-02-02_00-00-00.json", "basic-variant-state-2026-02-02_00-00-00.json"


@pytest.fixture
def stage(tmp_path):
    trials = [[json.dumps({"trial_id": name}), "{}"] for name in ("a_0", "a_1")]
    (tmp_path / "tuner.pkl").write_bytes(cloudpickle.dumps({"any": 1}))
    (tmp_path / TRIALS).write_text(json.dumps({"trial_data": trials}))
    (tmp_path / FOLLOWING).write_bytes(cloudpickle.dumps({"rows": {"a_0": "row", "a_1": "row"}}))
    # those of an earlier session are not read
    for name in (TRIALS, FOLLOWING):
        (tmp_path / name.replace("2026", "2025")).write_text("{")
    return tmp_path


def refused(stage):
    with pytest.raises(ConfigError) as error:
        require_whole(str(stage))
    return str(error.value)


def test_a_whole_snapshot(stage):
    require_whole(str(stage))
    # of a searcher that is not rayfl's
    (stage / FOLLOWING).write_bytes(cloudpickle.dumps({"other": 1}))
    require_whole(str(stage))


@pytest.mark.parametrize("name", ["tuner.pkl", TRIALS, FOLLOWING])
@pytest.mark.parametrize("damage", ["cut", "empty", "zeros"])
def test_a_file_that_was_not_written_to_its_end(stage, name, damage):
    whole = (stage / name).read_bytes()
    (stage / name).write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "zeros": bytes(len(whole))}[damage])
    said = refused(stage)
    assert said.startswith(f"{stage}/{name}: Ray Tune's snapshot is damaged (")
    assert said.endswith("or remove the folder; all trials of this stage then start again")


def test_files_of_different_times(stage):
    (stage / FOLLOWING).write_bytes(cloudpickle.dumps({"rows": {"a_0": "row"}}))
    assert refused(stage).startswith(f"{stage}/{FOLLOWING}: Ray Tune's snapshot is damaged (it is not of the same time")


@pytest.mark.parametrize("kind", [TRIALS, FOLLOWING])
def test_a_process_killed_before_the_first_snapshot_left_none(stage, kind):
    assert exist(str(stage))
    for name in (kind, kind.replace("2026", "2025")):
        (stage / name).unlink()
    assert not exist(str(stage)) and not exist(str(stage / "absent"))


class Gone:
    """A class that another version does not have."""

    def __reduce__(self):
        return getattr, (json, "no such name")


def test_the_state_of_another_version_is_no_damage(stage):
    (stage / "tuner.pkl").write_bytes(cloudpickle.dumps(Gone()))
    with pytest.raises(AttributeError):
        require_whole(str(stage))
