"""The real command line in processes of its own, and what it starts."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rayfl.results.folder import RunFolder

PATIENCE = 600.0
ROOT = Path(__file__).parent.parent


def until(condition: Callable[[], object], command: "Command | None" = None) -> None:
    """Waits for a condition; fails if it does not come true, or the command ends before."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        assert command is None or command.process.poll() is None, command.finish()
        time.sleep(0.02)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def named(pids: list[int], name: str) -> list[int]:
    """Return the processes whose command line contains a name."""
    found = []
    for pid in pids:
        try:
            if name in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
        except OSError:
            continue
    return found


def alive(pids: list[int]) -> list[int]:
    """Return the running processes, without zombies."""
    found = []
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
        except OSError:
            continue
    return found


def _hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Command:
    """A command in a process group of its own, as a shell starts it."""

    def __init__(self, *arguments: str | Path, program: tuple[str, ...] = ()):
        program = program or (str(Path(sys.executable).with_name("rayfl")),)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [*program, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # a shell's background jobs ignore Ctrl-C, and so would what the tests start in one
            preexec_fn=_hear_interrupts,
            env=environment,
            cwd=ROOT,
        )

    def interrupt(self) -> None:
        """Ctrl-C, which a terminal sends to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """SIGTERM to this process alone, as a container gets it."""
        self.process.terminate()

    def kill(self) -> list[int]:
        """kill -9 of this process alone: those that it had started."""
        started = descendants(self.process.pid)
        self.process.kill()
        return started

    def finish(self) -> tuple[int, str]:
        """(exit code, everything that it printed)."""
        printed, _ = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, printed


def assert_terminated(command: Command, folder: Path) -> None:
    """It has ended by SIGTERM: in order, and with the command to continue."""
    code, printed = command.finish()
    assert code == 143, printed
    last = printed.splitlines()[-1]
    assert last.startswith("to continue: rayfl ") and " --resume" in last
    assert "Traceback" not in printed and "***" not in printed
    assert RunFolder.open(folder).status == "stopped"
