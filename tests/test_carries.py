"""What clients keep: one file a client, linked into checkpoints."""

import os

import pytest
import torch
from disks import flip_a_bit, small_files

from rayfl.engine import carries as carries_of
from rayfl.engine import checkpoints, files
from rayfl.engine.carries import Carries
from rayfl.engine.checkpoints import DamagedCheckpoint, latest, read, write
from rayfl.engine.files import NotWritten, load_tensors

CONFIG = {"seed": 0}


def state(value: float) -> dict:
    return {"params": {"w": torch.full((4,), value)}}


def test_who_keeps_a_network_of_its_own_is_known_without_reading(tmp_path):
    """Also over a resume: the file's name in a checkpoint says it."""
    carries = Carries(tmp_path / "a")
    carries.put(3, 0, {"own": {"w": torch.ones(2)}, "g": {"w": torch.zeros(2)}})
    carries.put(4, 0, {"variate": {"w": torch.ones(2)}})
    carries.put(5, 0, {"own": {}})
    assert carries.owners == {3, 5}
    path = write(tmp_path / "checkpoints", 1, CONFIG, state(1), carries)
    assert sorted(file.name for file in path.iterdir() if file.name[0] in "oc") == [
        "carry-4.safetensors",
        "own-3.safetensors",
        "own-5.safetensors",
    ]
    again = Carries(tmp_path / "b")
    again.restore(read(path).carries)
    assert again.owners == {3, 5} and set(again.files) == {3, 4, 5}
    again.put(4, 1, {"own": {"w": torch.ones(2)}})
    again.put(3, 1, {"g": {"w": torch.ones(2)}})
    assert again.owners == {4, 5}
    path = write(tmp_path / "checkpoints", 2, CONFIG, state(2), again)
    assert {client for client, kept in read(path).carries.items() if kept.is_own} == {4, 5}


def test_carries_are_linked_and_restored(tmp_path):
    carries = Carries(tmp_path / "a")
    assert carries.get(3) is None
    carries.put(3, 0, {"head": {"w": torch.ones(2)}})
    carries.put(12, 0, {"w": torch.zeros(1)})
    path = write(tmp_path / "checkpoints", 1, CONFIG, state(1), carries)
    assert os.path.samefile(path / "carry-3.safetensors", carries.files[3].path)
    carries.put(3, 1, {"head": {"w": torch.full((2,), 7.0)}})
    assert carries.get(3)["head"]["w"].tolist() == [7, 7]
    assert len(list((tmp_path / "a").iterdir())) == 2

    files = latest(tmp_path / "checkpoints", CONFIG, pytest.fail).carries
    for folder in ("a", "b"):
        fresh = Carries(tmp_path / folder)
        fresh.restore(files)
        assert set(fresh.files) == {3, 12}
        assert fresh.get(3)["head"]["w"].tolist() == [1, 1]
        # what is kept after the checkpoint does not write through the link
        fresh.put(3, 1, {"head": {"w": torch.zeros(2)}})
        fresh.put(3, 1, {"head": {"w": torch.full((2,), 5.0)}})
    assert read(path).carries.keys() == {3, 12}


def test_an_old_checkpoint_keeps_its_own_carries(tmp_path):
    carries = Carries(tmp_path / "carries")
    paths = []
    for round in (0, 1):
        carries.put(3, round, {"w": torch.full((2,), float(round))})
        carries.put(4, 0, {"w": torch.zeros(1)}) if round == 0 else None
        paths.append(write(tmp_path, round + 1, CONFIG, state(round), carries))
    found = [load_tensors(path / "carry-3.safetensors")["w"].tolist() for path in paths]
    assert found == [[0, 0], [1, 1]]
    assert os.path.samefile(paths[0] / "carry-4.safetensors", paths[1] / "carry-4.safetensors")


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


def test_a_checkpoint_reads_only_what_changed(tmp_path, monkeypatch):
    """Each file that a client keeps is hashed and synced once, also over a resume."""
    read_again: list[str] = []
    for name in ("sha256", "sync"):
        real = getattr(files, name)
        for module in (carries_of, checkpoints):
            monkeypatch.setattr(module, name, lambda path, real=real: (read_again.append(path.name), real(path))[1])

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
    carries.restore(latest(tmp_path / "checkpoints", CONFIG, pytest.fail).carries)
    assert checkpoint(5) == set()
    carries.put(4, 5, {"w": torch.zeros(2)})
    assert checkpoint(6) == {"4-5.safetensors"}
    assert set(latest(tmp_path / "checkpoints", CONFIG, pytest.fail).carries) == set(range(5))


def test_a_sum_is_of_what_was_kept_not_of_what_a_bad_disk_made_of_it(tmp_path):
    """A later checkpoint does not vouch for a file that was damaged since its first."""
    carries = Carries(tmp_path / "carries")
    carries.put(3, 0, {"w": torch.ones(2)})
    for round in (1, 2):
        path = write(tmp_path / "checkpoints", round, CONFIG, state(round), carries)
        if round == 1:
            flip_a_bit(carries.files[3].path)
    with pytest.raises(DamagedCheckpoint, match="carry-3.safetensors: its SHA-256 is not"):
        read(path)


def test_where_links_are_not_possible_files_are_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *paths: (_ for _ in ()).throw(OSError("another file system")))
    carries = Carries(tmp_path / "carries")
    carries.put(3, 0, {"w": torch.ones(2)})
    for round in (1, 2):
        path = write(tmp_path / "checkpoints", round, CONFIG, state(round), carries)
        assert not os.path.samefile(path / "carry-3.safetensors", carries.files[3].path)
        carries.restore(read(path).carries)
    assert carries.get(3)["w"].tolist() == [1, 1]
