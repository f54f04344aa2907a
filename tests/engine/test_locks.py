"""One process at a time in a folder: who holds it is said, and what a dead process held is free."""

import errno
import fcntl
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rayfl.config import ConfigError
from rayfl.engine.locks import TEMPORARY, Temporary, clear, clear_temporary, locked, take

HOLDING = "import sys; from pathlib import Path; from rayfl.engine.locks import take; take(Path(sys.argv[1])); print()"


@pytest.fixture
def other(tmp_path):
    """Another process that holds the folder until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{HOLDING}; sys.stdout.flush(); sys.stdin.read()", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    yield process
    process.kill()
    process.communicate()


def refusal(folder) -> str:
    with pytest.raises(ConfigError) as error, locked(folder):
        pass
    return str(error.value)


def says(folder, **holder) -> None:
    """A lock as another process may have left it."""
    (folder / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()} | holder))


def dead() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_who_holds_a_folder_is_said_until_it_is_dead(other, tmp_path):
    assert json.loads((tmp_path / "lock").read_text()) == {"host": socket.gethostname(), "pid": other.pid}
    assert refusal(tmp_path) == (
        f"{tmp_path}: process {other.pid} on {socket.gethostname()} is using the folder. Hint: wait for it, or choose "
        "another folder"
    )
    other.kill()
    other.wait()
    assert (tmp_path / "lock").exists()
    with locked(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


def test_one_process_cannot_hold_it_twice(tmp_path):
    with locked(tmp_path):
        assert f"process {os.getpid()} on " in refusal(tmp_path)
        assert (tmp_path / "lock").exists()
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": "elsewhere"}', "\x00" * 9])
def test_a_lock_that_was_torn_is_nobodys(content, tmp_path):
    (tmp_path / "lock").write_text(content)
    with locked(tmp_path):
        pass


def test_a_copy_of_a_lock_holds_nothing(tmp_path):
    """Its process lives, and works in another folder."""
    says(tmp_path)
    with locked(tmp_path):
        pass


def test_of_another_host_nobody_can_tell(tmp_path):
    says(tmp_path, host="elsewhere", pid=7)
    assert refusal(tmp_path) == (
        f"{tmp_path}: process 7 on elsewhere is using the folder, or died. Hint: remove {tmp_path}/lock if that "
        "process has ended, otherwise wait for it or choose another folder"
    )
    (tmp_path / "lock").unlink()
    with locked(tmp_path):
        pass


def test_without_locks_of_the_file_system_what_the_file_says_counts(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    says(tmp_path)
    assert "is using the folder. Hint: wait" in refusal(tmp_path)
    says(tmp_path, pid=dead())
    with locked(tmp_path):
        assert "is using the folder. Hint: wait" in refusal(tmp_path)


def test_what_was_made_for_it_goes_if_it_stays_empty(tmp_path):
    with locked(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / "lock").exists()
    assert os.listdir(tmp_path) == []
    with locked(tmp_path / "a" / "b"):
        (tmp_path / "a" / "run.json").write_text("{}")
    assert os.listdir(tmp_path) == ["a"] and os.listdir(tmp_path / "a") == ["run.json"]


def test_a_lock_that_is_released_while_another_waits_for_it_is_not_taken_twice(tmp_path, monkeypatch):
    """The file that was opened is gone by the time that it is locked."""
    real = fcntl.flock
    opened = []

    def replace(descriptor, how):
        if not opened:
            opened.append(os.fstat(descriptor).st_ino)
            (tmp_path / "lock").rename(tmp_path / "gone")
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", replace)
    with locked(tmp_path):
        assert os.stat(tmp_path / "lock").st_ino != opened[0]
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


# what goes with its process


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The system's temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left(place, name="rayfl-left", **holder):
    """A temporary folder of a process that is dead."""
    folder = place / name
    (folder / "client_states").mkdir(parents=True)
    (folder / "client_states" / "3-0.safetensors").write_text("kept")
    (folder / TEMPORARY).write_text(json.dumps({"host": socket.gethostname(), "pid": dead()} | holder))
    return folder


def test_a_temporary_folder_goes_with_what_made_it(place):
    with Temporary() as folder:
        assert folder.parent == place and os.listdir(folder) == [TEMPORARY]
    made = Temporary()
    (made.path / "a").mkdir()
    assert made.path.exists() and not folder.exists()
    del made
    gc.collect()
    assert os.listdir(place) == []


def test_what_a_killed_process_left_goes_when_the_next_is_made(place):
    code = "from rayfl.engine.locks import Temporary; made = Temporary(); print(made.path, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(place)},
    )
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    assert path.parent == place
    with Temporary():
        assert path.exists()
    process.kill()
    process.communicate()
    assert path.exists()
    with Temporary():
        assert not path.exists()


def test_only_what_is_surely_a_dead_processs_goes(place, monkeypatch):
    """Not a run that a user keeps there, another host's, another user's, or what was not marked."""
    kept = [left(place, "rayfl-host", host="elsewhere"), left(place, "rayfl-torn"), left(place, "rayfl-run")]
    (kept[1] / TEMPORARY).write_text("")
    (kept[2] / TEMPORARY).rename(kept[2] / "lock")
    elsewhere = left(place, "elsewhere")
    (place / "rayfl-link").symlink_to(elsewhere)
    (place / "rayfl-file").write_text("")
    mine = left(place, "rayfl-mine")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: os.stat(place).st_uid + 1)
        with Temporary():
            assert mine.exists()
    with Temporary():
        assert not mine.exists()
    assert sorted(os.listdir(place)) == [
        "elsewhere",
        "rayfl-file",
        "rayfl-host",
        "rayfl-link",
        "rayfl-run",
        "rayfl-torn",
    ]
    assert all((folder / "client_states" / "3-0.safetensors").exists() for folder in [*kept, elsewhere])


def test_a_process_that_cleans_up_does_not_lock_a_folder_that_another_is_making(place, monkeypatch):
    """Its file is there, not locked yet."""
    folder, real = place / "rayfl-new", fcntl.flock
    folder.mkdir()
    (folder / TEMPORARY).touch()

    def taken_meanwhile(descriptor, how):
        real(descriptor, how)
        os.close(take(folder, TEMPORARY))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", taken_meanwhile)
        clear_temporary()
    os.close(take(folder, TEMPORARY))
    assert json.loads((folder / TEMPORARY).read_text())["pid"] == os.getpid()


def test_what_outlives_its_process_can_be_ended_first(place):
    folder, told = left(place, "session_1"), []
    clear(place, "session_*", lambda session: told.append((session, session.exists())))
    assert told == [(folder, True)] and not folder.exists()


@pytest.mark.parametrize("make", [lambda file: os.symlink("/dev/null", file), os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused(make, tmp_path):
    make(tmp_path / "lock")
    assert refusal(tmp_path).startswith(f"{tmp_path}/lock: cannot be written: ")
