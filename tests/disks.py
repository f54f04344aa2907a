"""Files that a bad disk damages, and a disk that is full."""

import os
import resource
from contextlib import contextmanager
from pathlib import Path


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    os.chmod(file, 0o644)
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def becomes_a_pipe(file: Path) -> None:
    """Whoever reads it waits for ever."""
    file.unlink()
    os.mkfifo(file)


def becomes_endless(file: Path) -> None:
    """A link to a device that gives zeros without end."""
    file.unlink()
    file.symlink_to("/dev/zero")


def moves(path: Path, to: Path) -> None:
    """A file or folder that a user has put elsewhere, and a link in its place."""
    path.rename(to)
    path.symlink_to(to)


@contextmanager
def small_files(largest: int = 1000):
    """As on a disk that fills up while a file is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
