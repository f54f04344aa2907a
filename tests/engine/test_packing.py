"""Packing of a package that only this process can import, and its unpacking."""

import fcntl
import importlib
import io
import os
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from helpers import tiny

from rayfl.config import ConfigError
from rayfl.engine import plugins

SOURCES = {
    "mine/methods.py": """
from pathlib import Path

from mine.deeper.factors import FACTOR
from neighbour import HALF
from rayfl import Dense


class Mine(Dense):
    def weight_of(self, data):
        return FACTOR * HALF * float(Path(__file__).with_name("factor.txt").read_text())
""",
    "mine/deeper/factors.py": "FACTOR = 3.0",
    "mine/factor.txt": "2.0",
    "mine/.hidden/secret.txt": "no",
    "mine/__pycache__/old.pyc": "no",
    "neighbour.py": "HALF = 0.5",
    "stranger.py": "",
}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Where the package `mine` is, which has no __init__.py, and the module that it imports from beside it."""
    for name, source in SOURCES.items():
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    yield tmp_path / "lib"
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mine", "neighbour")]:
        del sys.modules[name]


def names(archive):
    return zipfile.ZipFile(io.BytesIO(archive)).namelist()


SHIPPED = ["mine/deeper/factors.py", "mine/factor.txt", "mine/methods.py", "neighbour.py"]


def test_what_is_packed(mine):
    """The package of every class in it, named or pickled, with all files that count and what it imports from beside it.
    Installed packages and rayfl itself stay where they are."""
    experiment = tiny(method="mine.methods:Mine")
    archive = plugins.packed(experiment.described())
    assert names(archive) == SHIPPED
    assert names(plugins.packed({"method": {"name": "mine.methods:Mine"}})) == SHIPPED
    assert plugins.packed(tiny(method="fedavg").described()) == b""
    assert plugins.packed({"of": "sklearn.datasets:load_digits", "what": "os:path", "not": "mine.nowhere:X"}) == b""
    assert plugins.packed({"neighbour": "mine", "text": "mine.methods"}) == b"", "words, not classes"
    assert names(plugins.packed(importlib.import_module("neighbour"))) == SHIPPED
    (mine / "mine" / "methods.py").touch()
    assert plugins.packed(experiment.described()) == archive


def test_a_package_that_is_too_large(mine, monkeypatch):
    monkeypatch.setattr(plugins, "MOST_BYTES", 100)
    with pytest.raises(ConfigError) as error:
        plugins.packed(tiny(method="mine.methods:Mine"))
    size, given = sum(len(SOURCES[name]) for name in SHIPPED), f"{mine / 'mine'}, {mine / 'neighbour.py'}"
    assert str(error.value) == (
        f"your own packages: {given} have {size} bytes. Allowed: at most 100 bytes, because they are sent to every "
        "process. Hint: move data out of them, or install them on every node"
    )


def test_what_is_installed_comes_first(mine, tmp_path, monkeypatch):
    """Twice: the second process of a node finds the files of the first."""
    monkeypatch.setattr(plugins.tempfile, "tempdir", str(tmp_path))
    archive = plugins.packed(tiny(method="mine.methods:Mine"))
    for name in ("mine.methods", "mine", "neighbour"):
        sys.modules.pop(name, None)
    (mine / "mine" / "methods.py").write_text("raise ImportError")
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [*sys.path])
            plugins.install(archive)
            importlib.invalidate_caches()
            module = importlib.import_module("mine.methods")
            assert str(module.__file__).startswith(str(tmp_path / "rayfl-packages-"))
        for name in ("mine.methods", "mine", "neighbour"):
            sys.modules.pop(name, None)
    [home] = tmp_path.glob("rayfl-packages-*")
    assert len(list(home.iterdir())) == 1 and home.stat().st_mode & 0o077 == 0


def test_packages_of_older_versions_go(tmp_path, monkeypatch):
    """Those that no process uses: here one of another process that lives, and one of a process that has ended."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    home = tmp_path / f"rayfl-packages-{os.getuid()}"
    for name in ("old", "used"):
        (home / name / "inside").mkdir(parents=True)
    descriptor = os.open(home / "used", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("own_package_of_a_test.py", "VALUE = 3")
    for _ in range(2):
        plugins.install(archive.getvalue())
        new = Path(sys.path[0])
        assert {folder.name for folder in home.iterdir()} == {"used", new.name}
        assert (new / "own_package_of_a_test.py").read_text() == "VALUE = 3"
    os.close(descriptor)
    plugins.install(archive.getvalue())
    assert list(home.iterdir()) == [new]
