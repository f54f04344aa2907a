"""Locks of folders, and temporary folders that are removed after their process died.

A lock is a file with its process's host and id, locked by `flock`. The system releases it when the process dies in any
way, so the next process can recognise and remove what a dead one left.
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
"""Lock file in a run's folder."""
TEMPORARY = ".rayfl-temporary"
"""Lock file in a temporary folder."""
PREFIX = "rayfl-"
"""Prefix of temporary folders."""


@dataclass(frozen=True)
class Holder:
    """Process that locks a folder, or did."""

    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process, creating it if needed. Raise ConfigError if another process has it.

    Folders created here that are still empty at the end are removed.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{folder}: the folder cannot be made: {error.strerror}. Allowed: a folder in a writable one"
            ) from None
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
    """Folder in the system's temporary one, removed with this object or, if its process was killed, when the next is
    made."""

    def __init__(self) -> None:
        clear_temporary()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.remove = weakref.finalize(self, _remove, self.path, take(self.path, TEMPORARY))

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def clear_temporary() -> None:
    """Remove the temporary folders of killed processes."""
    clear(Path(tempfile.gettempdir()), f"{PREFIX}*")


def clear(place: Path, pattern: str, before: Callable[[Path], None] = lambda folder: None) -> None:
    """Remove this user's temporary folders in `place` whose process on this machine died, calling `before` on each."""
    for folder in place.glob(pattern):
        if (descriptor := _left(folder)) is not None:
            before(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _left(folder: Path) -> int | None:
    """Take the lock of a dead process's temporary folder and return its descriptor; None for any other folder."""
    file = folder / TEMPORARY
    try:
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            return None
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with suppress(OSError):
        holder = _holder(descriptor)
        # a file without a holder is new, and its own process is about to lock it
        if holder is not None and holder.host == socket.gethostname():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, descriptor):
                return descriptor
    os.close(descriptor)
    return None


def _remove(folder: Path, descriptor: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)


def take(folder: Path, name: str = LOCK) -> int:
    """Lock a folder until `release` or the end of this process. Raise ConfigError if another process has it."""
    file = folder / name
    while True:
        descriptor = _opened(file)
        holder = _holder(descriptor)
        if not _is_free(descriptor, holder):
            os.close(descriptor)
            raise ConfigError(
                f"{folder}: {holder or 'another process'} is using the folder. Hint: wait for it, or choose another "
                "folder"
            )
        if _is_at(file, descriptor):
            break
        # it was released meanwhile
        os.close(descriptor)
    if holder is not None and holder.host != socket.gethostname():
        os.close(descriptor)
        raise ConfigError(
            f"{folder}: {holder} is using the folder, or died. Hint: remove {file} if that process has ended, "
            "otherwise wait for it or choose another folder"
        )
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(asdict(Holder(socket.gethostname(), os.getpid()))).encode())
    return descriptor


def release(folder: Path, descriptor: int) -> None:
    """Release a lock taken by `take`."""
    (folder / LOCK).unlink(missing_ok=True)
    # a forked process may have the descriptor too
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _opened(file: Path) -> int:
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}. Allowed: a writable folder") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{file}: cannot be written: it is not a regular file. Hint: remove it")
    return descriptor


def _is_free(descriptor: int, holder: Holder | None) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # a file system without locks: only the file's content is known
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
    """Return whether the path still refers to the opened file."""
    try:
        return os.path.samestat(os.stat(file, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> Holder | None:
    """Return the process written in a lock file; None if there is none yet."""
    try:
        written = json.loads(os.pread(descriptor, 4096, 0))
        return Holder(str(written["host"]), int(written["pid"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
