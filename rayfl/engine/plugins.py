"""Distribution of a user's own packages to all processes, as an archive in a message.

Ray's `runtime_env` ships folders too, but not into a running cluster, and it delays the start of each process by
seconds.
"""

import contextlib
import fcntl
import hashlib
import io
import os
import pickletools
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

from rayfl.config import ConfigError
from rayfl.core import values

MOST_BYTES = 64 * 2**20
INSTALLED = {"site-packages", "dist-packages"}
"""Folders of packages that must be installed on every node, like rayfl."""


def packed(value: Any) -> bytes:
    """Return an archive of the packages that a value needs: those named in its pickle, and all imported ones from the
    same folders; and of objects without a package (`rayfl.core.values`). b"" if there are none. Raise ConfigError if
    the packages are too large."""
    texts = _texts(value)[1]
    carried = [one for _, one in values.named_in(texts)]
    places = {place for name in _named([value, carried]) for place in own_places(name)}
    if not places and not carried:
        return b""
    roots = {place.parent for place in places}
    places |= {place for name in _tops(sys.modules) for place in own_places(name) if place.parent in roots}
    files = {str(file.relative_to(place.parent)): file for place in places for file in _files(place)}
    size = sum(file.stat().st_size for file in files.values())
    if size > MOST_BYTES:
        raise ConfigError(
            f"your own packages: {', '.join(sorted(map(str, places)))} have {size:,} bytes. Allowed: at most "
            f"{MOST_BYTES:,} bytes, because they are sent to every process. Hint: move data out of them, or install "
            "them on every node"
        )
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name in sorted(files):
            # without times, so that equal packages give equal archives
            file.writestr(zipfile.ZipInfo(name), files[name].read_bytes())
        for name, content in sorted(values.files(texts).items()):
            file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_STORED)
    return archive.getvalue()


def install(archive: bytes) -> None:
    """Make the packages of `packed` importable in this process, from a temporary folder of this user that all processes
    of a node share."""
    if not archive:
        return
    home = Path(tempfile.gettempdir(), f"rayfl-packages-{os.getuid()}")
    home.mkdir(mode=0o700, exist_ok=True)
    if home.stat().st_uid != os.getuid():
        raise PermissionError(f"{home}: belongs to another user")
    folder = home / hashlib.sha256(archive).hexdigest()
    while not _in_use(folder):
        partial = Path(tempfile.mkdtemp(dir=home))
        _in_use(partial)
        zipfile.ZipFile(io.BytesIO(archive)).extractall(partial)
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(partial)
    sys.path.insert(0, str(folder))
    values.FOLDERS.insert(0, folder)
    for other in home.iterdir():
        _remove_unused(other)


def _in_use(folder: Path) -> bool:
    """Mark a folder as used until this process ends. Return whether it exists."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    # another process may have removed it meanwhile
    return folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())


def _remove_unused(folder: Path) -> None:
    """Remove a folder that no process uses: packages of an older version, or of a run that has ended."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)


def _named(value: Any) -> set[str]:
    """Return the packages that a pickle of the value imports, including texts such as "package.module:Class"."""
    modules, texts = _texts(value)
    return _tops(modules | {name for text in texts if (name := text.partition(":")[0]) in sys.modules and ":" in text})


def _texts(value: Any) -> tuple[set[str], set[str]]:
    """Return the modules of the objects in a pickle of the value, and all texts in it."""
    pickler = _Naming(file := io.BytesIO())
    pickler.dump(value)
    return pickler.modules, {arg for _, arg, _ in pickletools.genops(file.getvalue()) if isinstance(arg, str)}


class _Naming(cloudpickle.Pickler):
    """Pickler that records the modules of pickled objects."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.modules: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType):
            self.modules.add(obj.__module__ or "")
        elif isinstance(obj, ModuleType):
            self.modules.add(obj.__name__)
        return super().reducer_override(obj)


def _tops(modules: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in list(modules)}


def own_places(package: str) -> Iterator[Path]:
    """Yield the file or folders of an imported package, unless it is rayfl, installed, or Python's own."""
    if package in ("rayfl", "__main__") or package in sys.stdlib_module_names:
        return
    found = sys.modules.get(package)
    for path in list(getattr(found, "__path__", [])) or [getattr(found, "__file__", None)]:
        place = Path(path or "").resolve()
        if path and place.exists() and not INSTALLED & set(place.parts):
            yield place


def _files(place: Path) -> Iterable[Path]:
    """Return the files of a package, without hidden and compiled ones."""
    if place.is_file():
        return [place]
    inside = ((file, file.relative_to(place).parts) for file in place.rglob("*") if file.is_file())
    return [file for file, parts in inside if not any(part[0] == "." or part == "__pycache__" for part in parts)]
