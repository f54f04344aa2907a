"""Client states: one file per client, linked into checkpoints."""

import os
import shutil

import pytest
import torch
from disks import flip_a_bit, small_files

from rayfl.engine import checkpoints, files
from rayfl.engine import client_states as client_states_of
from rayfl.engine.checkpoints import DamagedCheckpoint, complete, latest, read, write
from rayfl.engine.client_states import ClientStates
from rayfl.engine.files import NotWritten, load_tensors

CONFIG = {"seed": 0}


def state(value: float) -> dict:
    return {"params": {"w": torch.full((4,), value)}}


def kept_in(folder) -> list[str]:
    """The names in the folder of what clients keep at all checkpoints of a folder."""
    return sorted(os.listdir(folder / "kept"))


def test_who_keeps_a_network_of_its_own_is_known_without_reading(tmp_path):
    """Also over a resume."""
    client_states = ClientStates(tmp_path / "a")
    client_states.put(3, 0, {"own": {"w": torch.ones(2)}, "g": {"w": torch.zeros(2)}})
    client_states.put(4, 0, {"variate": {"w": torch.ones(2)}})
    client_states.put(5, 0, {"own": {}})
    assert client_states.owners == {3, 5}
    path = write(tmp_path / "checkpoints", 1, CONFIG, state(1), client_states)
    again = ClientStates(tmp_path / "b")
    again.restore(read(path).client_states)
    assert again.owners == {3, 5} and set(again.files) == {3, 4, 5}
    again.put(4, 1, {"own": {"w": torch.ones(2)}})
    again.put(3, 1, {"g": {"w": torch.ones(2)}})
    assert again.owners == {4, 5}
    path = write(tmp_path / "checkpoints", 2, CONFIG, state(2), again)
    rows = read(path).client_states.rows
    assert dict(zip(rows["client"].tolist(), rows["own"].tolist(), strict=True)) == {3: False, 4: True, 5: True}


def test_carries_are_linked_and_restored(tmp_path):
    client_states = ClientStates(tmp_path / "a")
    assert client_states.get(3) is None
    client_states.put(3, 0, {"head": {"w": torch.ones(2)}})
    client_states.put(12, 0, {"w": torch.zeros(1)})
    assert client_states.get(2) is None and client_states.get(10**6) is None
    path = write(tmp_path / "checkpoints", 1, CONFIG, state(1), client_states)
    assert os.path.samefile(tmp_path / "checkpoints" / "kept" / "3-0.safetensors", client_states.files[3])
    client_states.put(3, 1, {"head": {"w": torch.full((2,), 7.0)}})
    assert client_states.get(3)["head"]["w"].tolist() == [7, 7]
    assert len(list((tmp_path / "a").iterdir())) == 2

    found = latest(tmp_path / "checkpoints", CONFIG, pytest.fail).client_states
    for folder in ("a", "b"):
        fresh = ClientStates(tmp_path / folder)
        fresh.restore(found)
        assert set(fresh.files) == {3, 12}
        assert fresh.get(3)["head"]["w"].tolist() == [1, 1]
        # what is kept after the checkpoint does not write through the link
        fresh.put(3, 0, {"head": {"w": torch.zeros(2)}})
        fresh.put(3, 1, {"head": {"w": torch.full((2,), 5.0)}})
    assert read(path).client_states.files.keys() == {3, 12}


def test_an_old_checkpoint_keeps_its_own_carries(tmp_path):
    client_states = ClientStates(tmp_path / "client_states")
    paths = []
    for round in (0, 1):
        client_states.put(3, round, {"w": torch.full((2,), float(round))})
        client_states.put(4, 0, {"w": torch.zeros(1)}) if round == 0 else None
        paths.append(write(tmp_path, round + 1, CONFIG, state(round), client_states))
    found = [read(path).client_states.files for path in paths]
    assert [load_tensors(files[3])["w"].tolist() for files in found] == [[0, 0], [1, 1]]
    assert found[0][4] == found[1][4]


def test_what_no_checkpoint_names_goes(tmp_path):
    """Whatever a resume finds, goes back to, or a killed process left; what one names stays."""
    client_states = ClientStates(tmp_path / "client_states")

    def checkpoint(round: int, *clients: int) -> list[str]:
        for client in clients:
            client_states.put(client, round - 1, {"w": torch.full((2,), float(round))})
        write(tmp_path, round, CONFIG, state(round), client_states)
        for path in complete(tmp_path):
            assert read(path).round
        return kept_in(tmp_path)

    def of(*names: str) -> list[str]:
        return [f"{name}.safetensors" for name in names]

    assert checkpoint(1, 3, 4) == of("3-0", "4-0")
    assert checkpoint(2, 3) == of("3-0", "3-1", "4-0")
    client_states.put(3, 2, {"w": torch.ones(2)})  # no checkpoint ever names it
    assert checkpoint(4, 3) == of("3-1", "3-3", "4-0")

    client_states = ClientStates(tmp_path / "client_states")
    client_states.restore(latest(tmp_path, CONFIG, pytest.fail).client_states)
    (tmp_path / "kept" / "5-4.safetensors").write_text("half")
    assert checkpoint(5, 4) == of("3-1", "3-3", "4-0", "4-4", "5-4")
    assert checkpoint(6) == of("3-3", "4-4", "5-4")

    flip_a_bit(tmp_path / "round-000006" / "kept.npy")
    client_states = ClientStates(tmp_path / "client_states")
    client_states.restore(latest(tmp_path, CONFIG, lambda said: None).client_states)
    assert checkpoint(6, 3, 5) == of("3-3", "3-5", "4-4", "5-4", "5-5")
    assert checkpoint(7, 3) == of("3-5", "3-6", "4-4", "5-5")
    assert client_states.get(4)["w"].tolist() == [5, 5]


def test_what_was_killed_before_its_first_checkpoint_leaves_nothing(tmp_path):
    client_states = ClientStates(tmp_path / "client_states")
    client_states.put(3, 0, {"w": torch.ones(2)})
    client_states.save(tmp_path / "kept", 1)
    client_states = ClientStates(tmp_path / "client_states")
    client_states.put(4, 0, {"w": torch.ones(2)})
    write(tmp_path, 1, CONFIG, state(1), client_states)
    assert kept_in(tmp_path) == ["4-0.safetensors"]
    # a user removes all checkpoints while the run goes on
    shutil.rmtree(tmp_path / "round-000001")
    write(tmp_path, 2, CONFIG, state(2), client_states)
    assert latest(tmp_path, CONFIG, pytest.fail).client_states.files.keys() == {4}


def test_the_same_round_made_again_takes_the_place_of_what_was_left_of_it(tmp_path):
    """And does not go with it."""
    client_states = ClientStates(tmp_path / "client_states")
    client_states.put(3, 0, {"w": torch.ones(2)})
    write(tmp_path, 1, CONFIG, state(1), client_states)
    (tmp_path / "kept" / "3-1.safetensors").write_text("half")
    client_states = ClientStates(tmp_path / "client_states")
    client_states.restore(latest(tmp_path, CONFIG, pytest.fail).client_states)
    client_states.put(3, 1, {"w": torch.zeros(2)})
    for round in (2, 3, 4):
        write(tmp_path, round, CONFIG, state(round), client_states)
    assert kept_in(tmp_path) == ["3-1.safetensors"]
    assert latest(tmp_path, CONFIG, pytest.fail).round == 4


@pytest.mark.parametrize("folders", ["another", "removed"])
def test_a_checkpoint_in_another_folder_has_all_that_it_names(tmp_path, folders):
    """Ray Tune gives a folder a checkpoint; a user may remove one while the run goes on."""
    client_states = ClientStates(tmp_path / "client_states")
    for client in range(3):
        client_states.put(client, 0, {"w": torch.full((2,), float(client))})
    write(tmp_path / "first", 1, CONFIG, state(1), client_states)
    client_states.put(1, 1, {"w": torch.zeros(2)})
    to = tmp_path / ("second" if folders == "another" else "first")
    if folders == "removed":
        shutil.rmtree(to)
    write(to, 2, CONFIG, state(2), client_states)
    assert kept_in(to) == ["0-0.safetensors", "1-1.safetensors", "2-0.safetensors"]
    assert latest(to, CONFIG, pytest.fail).round == 2
    checkpoints.copy(to, tmp_path / "copy")
    checkpoints.copy(to, tmp_path / "copy")
    shutil.rmtree(to)
    again = ClientStates(tmp_path / "again")
    again.restore(latest(tmp_path / "copy", CONFIG, pytest.fail).client_states)
    assert [again.get(client)["w"].tolist() for client in range(3)] == [[0, 0], [0, 0], [2, 2]]


def test_checkpoints_in_two_folders_by_turns(tmp_path):
    """A trial keeps its best round beside the checkpoints of Ray Tune, which Tune moves away."""
    client_states = ClientStates(tmp_path / "client_states")
    for round in range(6):
        for client in range(2) if round != 3 else ():
            client_states.put(client, round, {"w": torch.full((2,), float(round))})
        for folder in ("best", f"tune-{round}"):
            write(tmp_path / folder, round + 1, CONFIG, state(round), client_states)
        shutil.rmtree(tmp_path / f"tune-{round}")
        for path in complete(tmp_path / "best"):
            assert len(read(path).client_states.files) == 2
    assert kept_in(tmp_path / "best") == [f"{client}-{round}.safetensors" for client in (0, 1) for round in (4, 5)]


def test_a_checkpoint_touches_only_the_files_of_clients_that_changed(tmp_path, monkeypatch):
    client_states = ClientStates(tmp_path / "client_states")
    for client in range(50):
        client_states.put(client, 0, {"w": torch.zeros(1)})
    write(tmp_path, 1, CONFIG, state(1), client_states)
    touched = []
    for name in ("link", "unlink", "open", "stat", "listdir", "scandir", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real, **k: (touched.append(str(a[0])), real(*a, **k))[1])
    for round in (2, 3, 4):
        client_states.put(7, round, {"w": torch.ones(1)})
        write(tmp_path, round, CONFIG, state(round), client_states)
    assert touched and {name.split("/")[-1].split("-")[0] for name in touched if "/kept/" in name} == {"7"}
    monkeypatch.undo()
    assert latest(tmp_path, CONFIG, pytest.fail).client_states.files.keys() == set(range(50))


def test_a_carry_that_the_disk_does_not_take(tmp_path):
    """Nothing half written is left, and what was kept before is still there."""
    client_states = ClientStates(tmp_path)
    client_states.put(3, 0, {"w": torch.ones(2)})
    for client in (3, 4):
        with small_files(), pytest.raises(NotWritten) as error:
            client_states.put(client, 7, {"w": torch.zeros(1000)})
        assert str(error.value).startswith(
            f"{tmp_path}/{client}-7.safetensors: the state of client {client} after round 8 cannot be written: "
        )
        assert str(error.value).endswith(". Hint: --resume once the disk works")
    assert os.listdir(tmp_path) == ["3-0.safetensors"]
    assert client_states.get(3)["w"].tolist() == [1, 1] and client_states.get(4) is None


def test_a_checkpoint_reads_only_what_changed(tmp_path, monkeypatch):
    """Each file that a client keeps is hashed and synced once, also over a resume."""
    read_again: list[str] = []
    for name in ("sha256", "sync"):
        real = getattr(files, name)
        for module in (client_states_of, checkpoints):
            monkeypatch.setattr(module, name, lambda path, real=real: (read_again.append(path.name), real(path))[1])

    def checkpoint(round: int) -> set[str]:
        read_again.clear()
        write(tmp_path / "checkpoints", round, CONFIG, state(round), client_states)
        return {
            name
            for name in read_again
            if read_again.count(name) == 2 and name.endswith("s") and name != "state.safetensors"
        }

    client_states = ClientStates(tmp_path / "client_states")
    for client in range(5):
        client_states.put(client, 0, {"w": torch.full((2,), float(client))})
    assert checkpoint(1) == {f"{client}-0.safetensors" for client in range(5)}
    client_states.put(2, 1, {"w": torch.zeros(2)})
    client_states.put(2, 2, {"w": torch.ones(2)})
    assert checkpoint(3) == {"2-2.safetensors"}
    assert checkpoint(4) == set()
    assert set(read_again) == {"state.safetensors", "kept.npy", "manifest.json", ".partial-round-000004", "checkpoints"}

    client_states = ClientStates(tmp_path / "client_states")
    client_states.restore(latest(tmp_path / "checkpoints", CONFIG, pytest.fail).client_states)
    assert checkpoint(5) == set()
    client_states.put(4, 5, {"w": torch.zeros(2)})
    assert checkpoint(6) == {"4-5.safetensors"}
    assert set(latest(tmp_path / "checkpoints", CONFIG, pytest.fail).client_states.files) == set(range(5))


def test_a_sum_is_of_what_was_kept_not_of_what_a_bad_disk_made_of_it(tmp_path):
    """A later checkpoint does not vouch for a file that was damaged since its first."""
    client_states = ClientStates(tmp_path / "client_states")
    client_states.put(3, 0, {"w": torch.ones(2)})
    for round in (1, 2):
        path = write(tmp_path / "checkpoints", round, CONFIG, state(round), client_states)
        if round == 1:
            flip_a_bit(client_states.files[3])
    with pytest.raises(DamagedCheckpoint, match="3-0.safetensors: the SHA-256 differs from the one in .*kept.npy"):
        read(path)


def test_where_links_are_not_possible_files_are_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *paths: (_ for _ in ()).throw(OSError("another file system")))
    client_states = ClientStates(tmp_path / "client_states")
    client_states.put(3, 0, {"w": torch.ones(2)})
    for round in (1, 2):
        path = write(tmp_path / "checkpoints", round, CONFIG, state(round), client_states)
        assert not os.path.samefile(path.parent / "kept" / "3-0.safetensors", client_states.files[3])
        client_states.restore(read(path).client_states)
    assert client_states.get(3)["w"].tolist() == [1, 1]
