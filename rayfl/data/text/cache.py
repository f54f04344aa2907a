"""Disk cache of arrays, by a digest of source files, settings and version."""

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

from rayfl.core.permissions import as_new

CachedArrays = Mapping[str, np.ndarray]
"""Arrays by name, read-only."""

_recent: dict[str, CachedArrays] = {}
RECENT = 2
"""Number of entries cached in the process, because classes are read before samples."""


def cache_folder() -> Path:
    """Return RAYFL_CACHE. Default: `rayfl/` below XDG_CACHE_HOME, otherwise below ~/.cache."""
    if given := os.environ.get("RAYFL_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rayfl"


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, from a cache unless its size or modification time has changed."""
    status = path.stat()
    return _digest(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _digest(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached(source: Any, make: Callable[[], CachedArrays]) -> CachedArrays:
    """Return the result of `make` for `source` (plain JSON), from the cache if possible. Damaged files are replaced;
    without write access nothing is cached."""
    key = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()
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
    # move to the end: least recently used entries are deleted first
    _recent[key] = _recent.pop(key)
    while len(_recent) > RECENT:
        del _recent[next(iter(_recent))]
    return _recent[key]


def _read(path: Path) -> CachedArrays | None:
    """Return None if the file is missing or damaged. Every array in it has a checksum."""
    try:
        # np.load does not close a file that it cannot read
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    # zipfile raises NotImplementedError if damage results in an unknown compression
    except (OSError, EOFError, ValueError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error):
        return None


def _write(path: Path, arrays: CachedArrays) -> None:
    """Write the file atomically, also with concurrent writers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem[:12]}-", delete=False) as file:
        try:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
            file.close()
            as_new(Path(file.name))
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
