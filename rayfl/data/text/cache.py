"""What takes long to make of files, kept on disk by content: another file, setting or version is another entry."""

import contextlib
import functools
import hashlib
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Kept = Mapping[str, np.ndarray]
"""Arrays by name, read only."""

_recent: dict[str, Kept] = {}
RECENT = 2
"""Entries that a process keeps, because a data set is asked for its classes before it is asked for its samples."""


def cache_folder() -> Path:
    """The environment's RAYFL_CACHE; unless given `rayfl/` below XDG_CACHE_HOME, which is ~/.cache unless given."""
    if given := os.environ.get("RAYFL_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rayfl"


def digest(path: Path) -> str:
    """SHA-256 of a file's content; it is read again only if its size or its time has changed."""
    status = path.stat()
    return _digest(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _digest(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached(made_of: Any, make: Callable[[], Kept]) -> Kept:
    """What `make` gives, or gave for an equal `made_of` (plain JSON) before, perhaps in another process. A file that is
    damaged is made anew; a folder that cannot be written to is done without."""
    key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
    if key not in _recent:
        path = cache_folder() / f"{key}.npz"
        found = _read(path)
        if found is None:
            found = dict(make())
            with contextlib.suppress(OSError):
                _write(path, found)
        for array in found.values():
            array.flags.writeable = False
        _recent[key] = found
    # the latest last
    _recent[key] = _recent.pop(key)
    while len(_recent) > RECENT:
        del _recent[next(iter(_recent))]
    return _recent[key]


def _read(path: Path) -> Kept | None:
    """None: there is none, or it is damaged: every array has a checksum in the file."""
    try:
        # numpy leaves a file open that it cannot read
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    # zipfile says NotImplementedError where damage has made up a compression that it does not know
    except (OSError, EOFError, ValueError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error):
        return None


def _write(path: Path, arrays: Kept) -> None:
    """All of it or nothing, whoever else writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem[:12]}-", delete=False) as file:
        try:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
            file.close()
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
