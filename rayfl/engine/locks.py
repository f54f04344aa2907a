"""One process at a time in a folder, and temporary folders that go with their process.

The lock is a file that says who holds it, and that the system itself holds for a process: it is free again when the
process is dead, however it died. So the next process can tell what a dead one left, and removes it.
"""

import fcntl
import json
import os
import shutil
import socket
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rayfl.config import ConfigError

LOCK = "lock"
"""The name of the file in a run's folder."""
TEMPORARY = ".rayfl-temporary"
"""Its name in a folder that goes with its process."""
PREFIX = "rayfl-"
"""What the names of temporary folders begin with."""


@dataclass(frozen=True)
class Holder:
    """A process that holds a folder, or held it."""

    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """This process alone works in a folder, which is made for it. A ConfigError says who else does.

    A folder that was made for it and is still empty goes again.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = take(folder)
        try:
            yield
        finally:
            release(folder, descriptor)
    finally:
        with suppress(OSError):
            for place in made:
                place.rmdir()


class Temporary:
    """A folder in the system's temporary one. It goes with this object, or when the next is made after its process was
    killed."""

    def __init__(self) -> None:
        clear_temporary()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.remove = weakref.finalize(self, _remove, self.path, take(self.path, TEMPORARY))

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def clear_temporary() -> None:
    """Removes the temporary folders that killed processes left."""
    clear(Path(tempfile.gettempdir()), f"{PREFIX}*")


def clear(place: Path, pattern: str, before: Callable[[Path], None] = lambda folder: None) -> None:
    """Removes the folders of this user that a process of this machine held as `TEMPORARY` and that died. `before` is
    told each."""
    for folder in place.glob(pattern):
        if (descriptor := _left(folder)) is not None:
            before(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _left(folder: Path) -> int | None:
    """The lock of a dead process's temporary folder, held by this one. None if it is anything else."""
    file = folder / TEMPORARY
    try:
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            return None
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder = _holder(descriptor)
        if holder is not None and holder.host == socket.gethostname() and _is_at(file, descriptor):
            return descriptor
    os.close(descriptor)
    return None


def _remove(folder: Path, descriptor: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)


def take(folder: Path, name: str = LOCK) -> int:
    """Holds a folder until `release`, or until this process is dead. A ConfigError says who else holds it."""
    file = folder / name
    while True:
        descriptor = _opened(file)
        holder = _holder(descriptor)
        if not _is_free(descriptor, holder):
            os.close(descriptor)
            raise ConfigError(
                f"{folder}: {holder or 'another process'} works in it; wait until that ended, or give another folder"
            )
        if _is_at(file, descriptor):
            break
        # it was released meanwhile
        os.close(descriptor)
    if holder is not None and holder.host != socket.gethostname():
        os.close(descriptor)
        raise ConfigError(
            f"{folder}: {holder} works in it, or died; if no process works in it any more, remove {file}; else wait "
            "until that ended, or give another folder"
        )
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(asdict(Holder(socket.gethostname(), os.getpid()))).encode())
    return descriptor


def release(folder: Path, descriptor: int) -> None:
    """Gives up what `take` gave."""
    (folder / LOCK).unlink(missing_ok=True)
    # a forked process may have the descriptor too
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _opened(file: Path) -> int:
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}; allowed: a folder that can be") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{file}: cannot be written: it is no file; remove it")
    return descriptor


def _is_free(descriptor: int, holder: Holder | None) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # a file system without locks: what the file says is all that is known
        return holder is None or holder.host != socket.gethostname() or not _runs(holder.pid)
    return True


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_at(file: Path, descriptor: int) -> bool:
    """Whether a file is still the one that was opened."""
    try:
        return os.path.samestat(os.stat(file, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> Holder | None:
    """Who a lock says holds it; None where it says nothing yet."""
    try:
        said = json.loads(os.pread(descriptor, 4096, 0))
        return Holder(str(said["host"]), int(said["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
