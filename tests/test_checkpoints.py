"""Checkpoints survive crashes and damage, and refuse another configuration."""

import json
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers import assert_same, tiny

from rayfl import checkpoints
from rayfl.checkpoints import Carries, DamagedCheckpoint, NotWritten, checksum, complete, latest, read, write
from rayfl.config import ConfigError

CONFIG = {"training": {"lr": 0.1, "milestones": [1, 2]}, "seed": 0}
STATE = {
    "params": {"b": torch.randn(3, 4), "a": torch.tensor([0.1, float("nan"), -0.0])},
    "extra": {"deep": {"count": torch.tensor(3)}, "half": torch.ones(2, dtype=torch.float16)},
}


def state(value: float) -> dict:
    return {"params": {"w": torch.full((4,), value)}}


def names(folder: Path) -> list[str]:
    return [path.name for path in complete(folder)]


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    os.chmod(file, 0o644)
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def test_round_trip(tmp_path):
    path = write(tmp_path, 12, CONFIG, STATE)
    assert path == tmp_path / "round-000012"
    round, config, found, carries = read(path)
    assert (round, config, carries) == (12, CONFIG, {})
    assert checksum(found) == checksum(STATE)
    assert list(found) == ["params", "extra"] and list(found["params"]) == ["b", "a"]
    assert found["extra"]["half"].dtype == torch.float16


def test_there_is_none(tmp_path):
    assert latest(tmp_path / "nowhere", CONFIG, print) is None
    assert complete(tmp_path / "nowhere") == []


def test_the_newest_two_are_kept(tmp_path):
    for round in (9, 10, 100):
        write(tmp_path, round, CONFIG, state(round))
    assert names(tmp_path) == ["round-000010", "round-000100"]
    round, found, _ = latest(tmp_path, CONFIG, print)
    assert round == 100
    assert_same(found, state(100))


def test_a_crash_while_writing_leaves_the_old_one(tmp_path, monkeypatch):
    write(tmp_path, 1, CONFIG, state(1))

    def crash(*args):
        raise OSError("no space left on device")

    for place in ("pathlib.Path.rename", "pathlib.Path.write_text", "rayfl.checkpoints.save_file"):
        with monkeypatch.context() as patch:
            patch.setattr(place, crash)
            with pytest.raises(NotWritten) as error:
                write(tmp_path, 2, CONFIG, state(2))
        assert str(error.value) == (
            f"{tmp_path}/round-000002: the checkpoint of round 2 cannot be written: no space left on device; "
            "--resume goes on once the disk takes it"
        )
        assert os.listdir(tmp_path) == ["round-000001"]
        assert latest(tmp_path, CONFIG, pytest.fail)[0] == 1
    write(tmp_path, 2, CONFIG, state(2))
    assert sorted(os.listdir(tmp_path)) == ["round-000001", "round-000002"]


def test_what_a_killed_process_left_half_written_goes(tmp_path):
    (tmp_path / ".partial-round-000002").mkdir()
    (tmp_path / ".partial-round-000002" / "state.safetensors").write_text("half")
    write(tmp_path, 3, CONFIG, state(3))
    assert os.listdir(tmp_path) == ["round-000003"]


def test_a_round_that_was_written_before_is_replaced(tmp_path):
    write(tmp_path, 1, CONFIG, state(1))
    write(tmp_path, 1, CONFIG, state(2))
    assert_same(latest(tmp_path, CONFIG, pytest.fail)[1], state(2))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: flip_a_bit(path / "state.safetensors"), "{path}/state.safetensors: its SHA-256 is not"),
        (lambda path: truncate(path / "state.safetensors"), "{path}/state.safetensors: its SHA-256 is not"),
        (lambda path: (path / "state.safetensors").unlink(), "{path}: not a whole checkpoint: "),
        (lambda path: (path / "manifest.json").unlink(), "{path}: not a whole checkpoint: "),
        (lambda path: truncate(path / "manifest.json"), "{path}: not a whole checkpoint: "),
        (lambda path: (path / "manifest.json").write_text("[]"), "{path}: not a whole checkpoint: "),
        (lambda path: (path / "manifest.json").write_text("{}"), "{path}: not a whole checkpoint: "),
        (lambda path: flip_a_bit(path / "carry-3.safetensors"), "{path}/carry-3.safetensors: its SHA-256 is"),
    ],
    ids=["bit", "truncated", "no state", "no manifest", "cut manifest", "list", "empty", "carry"],
)
def test_a_damaged_one_is_passed_over_and_said(damage, said, tmp_path):
    carries = Carries(tmp_path / "carries")
    carries.put(3, 0, {"w": torch.ones(2)})
    write(tmp_path, 1, CONFIG, state(1))
    newest = write(tmp_path, 2, CONFIG, state(2), carries)
    damage(newest)
    heard = []
    round, found, _ = latest(tmp_path, CONFIG, heard.append)
    assert round == 1
    assert_same(found, state(1))
    [line] = heard
    assert line.startswith(said.format(path=newest))
    assert line.endswith("; going back to the checkpoint before it")


def test_if_none_is_whole_the_run_does_not_start_anew_by_itself(tmp_path):
    for round in (1, 2):
        flip_a_bit(write(tmp_path, round, CONFIG, state(round)) / "state.safetensors")
    heard = []
    with pytest.raises(DamagedCheckpoint) as error:
        latest(tmp_path, CONFIG, heard.append)
    assert str(error.value) == f"{tmp_path}: none of its 2 checkpoints is whole; start anew"
    assert len(heard) == 2


def test_what_an_earlier_version_wrote_has_today_s_defaults(tmp_path):
    """An option that is newer than the checkpoint; but not one that it has with another value."""
    spec = tiny()
    old = spec.result_config()
    del old["training"]["floor"], old["method"]["weight"]
    write(tmp_path, 1, old, state(1))
    assert latest(tmp_path, spec.result_config(), pytest.fail, spec.today)[0] == 1
    with pytest.raises(ConfigError, match="training.lr: 0.05 -> 0.5"):
        latest(tmp_path, tiny(training={"lr": 0.5}).result_config(), pytest.fail, spec.today)
    assert spec.today({"training": {"unknown": 1}}) == {"training": {"unknown": 1}}


def test_another_configuration_is_refused_with_what_differs(tmp_path):
    path = write(tmp_path, 1, CONFIG, state(1))
    other = {"training": {"lr": 0.2, "milestones": (1, 2), "clip": 1.0}, "seed": 0}
    with pytest.raises(ConfigError) as error:
        latest(tmp_path, other, pytest.fail)
    assert str(error.value) == (
        f"{path}: a checkpoint of another configuration; it differs in\n"
        "  training.clip: None -> 1.0\n"
        "  training.lr: 0.1 -> 0.2\n"
        "resume with the configuration that wrote it, or choose another output folder"
    )


def test_no_pickle(tmp_path):
    path = write(tmp_path, 1, CONFIG, STATE)
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "state.safetensors"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["sha256"].keys() == {"state.safetensors"}


# what clients keep


def test_carries_are_linked_and_restored(tmp_path):
    carries = Carries(tmp_path / "a")
    assert carries.get(3) is None
    carries.put(3, 0, {"head": {"w": torch.ones(2)}})
    carries.put(12, 0, {"w": torch.zeros(1)})
    path = write(tmp_path / "checkpoints", 1, CONFIG, state(1), carries)
    assert os.path.samefile(path / "carry-3.safetensors", carries.files[3])
    carries.put(3, 1, {"head": {"w": torch.full((2,), 7.0)}})
    assert carries.get(3)["head"]["w"].tolist() == [7, 7]
    assert len(list((tmp_path / "a").iterdir())) == 2

    _, _, files = latest(tmp_path / "checkpoints", CONFIG, pytest.fail)
    for folder in ("a", "b"):
        fresh = Carries(tmp_path / folder)
        fresh.restore(files)
        assert set(fresh.files) == {3, 12}
        assert fresh.get(3)["head"]["w"].tolist() == [1, 1]
        # what is kept after the checkpoint does not write through the link
        fresh.put(3, 1, {"head": {"w": torch.zeros(2)}})
        fresh.put(3, 1, {"head": {"w": torch.full((2,), 5.0)}})
    assert read(path)[3].keys() == {3, 12}


def test_an_old_checkpoint_keeps_its_own_carries(tmp_path):
    carries = Carries(tmp_path / "carries")
    paths = []
    for round in (0, 1):
        carries.put(3, round, {"w": torch.full((2,), float(round))})
        carries.put(4, 0, {"w": torch.zeros(1)}) if round == 0 else None
        paths.append(write(tmp_path, round + 1, CONFIG, state(round), carries))
    found = [checkpoints.load_tensors(path / "carry-3.safetensors")["w"].tolist() for path in paths]
    assert found == [[0, 0], [1, 1]]
    assert os.path.samefile(paths[0] / "carry-4.safetensors", paths[1] / "carry-4.safetensors")


@contextmanager
def small_files(largest: int = 1000):
    """As on a disk that fills up while a file is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_carry_that_the_disk_does_not_take(tmp_path):
    """Nothing half written is left, and what was kept before is still there."""
    carries = Carries(tmp_path)
    carries.put(3, 0, {"w": torch.ones(2)})
    for client in (3, 4):
        with small_files(), pytest.raises(NotWritten) as error:
            carries.put(client, 7, {"w": torch.zeros(1000)})
        assert str(error.value).startswith(
            f"{tmp_path}/{client}-7.safetensors: what client {client} keeps of round 8 cannot be written: "
        )
        assert str(error.value).endswith("; --resume goes on once the disk takes it")
    assert os.listdir(tmp_path) == ["3-0.safetensors"]
    assert carries.get(3)["w"].tolist() == [1, 1] and carries.get(4) is None


def test_a_checkpoint_that_the_disk_does_not_take_leaves_the_ones_before(tmp_path):
    carries = Carries(tmp_path / "carries")
    carries.put(3, 0, {"w": torch.ones(2)})
    write(tmp_path, 1, CONFIG, state(1), carries)
    with small_files(), pytest.raises(NotWritten, match="checkpoint of round 2 cannot be written: .*large"):
        write(tmp_path, 2, CONFIG, {"w": torch.zeros(1000)}, carries)
    assert sorted(os.listdir(tmp_path)) == ["carries", "round-000001"]
    write(tmp_path, 2, CONFIG, state(2), carries)
    assert latest(tmp_path, CONFIG, pytest.fail)[0] == 2


def test_a_checkpoint_reads_only_what_changed(tmp_path, monkeypatch):
    """Each file that a client keeps is hashed and synced once, also over a resume."""
    read_again: list[str] = []
    for name in ("_sha256", "_sync"):
        real = getattr(checkpoints, name)
        monkeypatch.setattr(checkpoints, name, lambda path, real=real: (read_again.append(path.name), real(path))[1])

    def checkpoint(round: int) -> set[str]:
        read_again.clear()
        write(tmp_path / "checkpoints", round, CONFIG, state(round), carries)
        return {name for name in read_again if read_again.count(name) == 2 and name != "state.safetensors"}

    carries = Carries(tmp_path / "carries")
    for client in range(5):
        carries.put(client, 0, {"w": torch.full((2,), float(client))})
    assert checkpoint(1) == {f"{client}-0.safetensors" for client in range(5)}
    carries.put(2, 1, {"w": torch.zeros(2)})
    carries.put(2, 2, {"w": torch.ones(2)})
    assert checkpoint(3) == {"2-2.safetensors"}
    assert checkpoint(4) == set()
    assert read_again == ["state.safetensors"] * 2 + ["manifest.json", ".partial-round-000004", "checkpoints"]

    carries = Carries(tmp_path / "carries")
    carries.restore(latest(tmp_path / "checkpoints", CONFIG, pytest.fail)[2])
    assert checkpoint(5) == set()
    carries.put(4, 5, {"w": torch.zeros(2)})
    assert checkpoint(6) == {"4-5.safetensors"}
    assert set(latest(tmp_path / "checkpoints", CONFIG, pytest.fail)[2]) == set(range(5))


def test_a_sum_is_of_what_was_kept_not_of_what_a_bad_disk_made_of_it(tmp_path):
    """A later checkpoint does not vouch for a file that was damaged since its first."""
    carries = Carries(tmp_path / "carries")
    carries.put(3, 0, {"w": torch.ones(2)})
    for round in (1, 2):
        path = write(tmp_path / "checkpoints", round, CONFIG, state(round), carries)
        if round == 1:
            flip_a_bit(carries.files[3])
    with pytest.raises(DamagedCheckpoint, match="carry-3.safetensors: its SHA-256 is not"):
        read(path)


def test_where_links_are_not_possible_files_are_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *paths: (_ for _ in ()).throw(OSError("another file system")))
    carries = Carries(tmp_path / "carries")
    carries.put(3, 0, {"w": torch.ones(2)})
    for round in (1, 2):
        path = write(tmp_path / "checkpoints", round, CONFIG, state(round), carries)
        assert not os.path.samefile(path / "carry-3.safetensors", carries.files[3])
        carries.restore(read(path)[3])
    assert carries.get(3)["w"].tolist() == [1, 1]


# fingerprints


def test_a_checksum_sees_every_bit():
    a = {"p": {"w": torch.tensor([1.0, 0.0])}}
    others = [
        {"p": {"w": torch.tensor([1.0, -0.0])}},
        {"p": {"w": torch.tensor([1.0 + 2**-23, 0.0])}},
        {"p": {"v": torch.tensor([1.0, 0.0])}},
        {"w": torch.tensor([1.0, 0.0])},
        {"p": {"w": torch.tensor([1.0, 0.0]), "x": torch.zeros(1)}},
        {"p": {"w": torch.tensor([[1.0], [0.0]])}},
        {"p": {"w": torch.tensor([1065353216, 0], dtype=torch.int32)}},
    ]
    assert checksum(a) == checksum({"p": {"w": torch.tensor([1.0, 0.0])}})
    assert checksum(a) not in [checksum(other) for other in others]


def test_a_checksum_does_not_see_order_or_strides():
    a, b = torch.randn(2, 3), torch.randn(2)
    assert checksum({"a": a, "b": b}) == checksum({"b": b, "a": a.t().contiguous().t()})
