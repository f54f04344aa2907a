"""A run resumes with the data, files and code that it was started with, or says what changed."""

import importlib
import sys
import textwrap

import numpy as np
import pytest
from helpers import tiny

import rayfl
from rayfl.config import ConfigError
from rayfl.data.base import Arrays
from rayfl.engine.inputs import changed, inputs_of

SERIAL = {"executor": "serial"}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A user's method in a file, and a function that it imports from another one."""
    write(tmp_path / "own_helper.py", "FACTOR = 1.0\ndef half(x): return x / 2\n")
    write(
        tmp_path / "own_method.py",
        """
        import rayfl
        from own_helper import half
        class Mine(rayfl.Dense):
            pass
        """,
    )
    write(tmp_path / "unrelated.py", "")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    forget()


def write(file, text):
    file.write_text(textwrap.dedent(text))


def forget():
    for name in ("own_method", "own_helper"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def inputs(**sections):
    experiment = tiny(**sections)
    return inputs_of([experiment], experiment.data.arrays())


def test_every_array_has_a_digest():
    arrays = Arrays(
        {"x": np.zeros((4, 3), np.float32), "y": np.arange(4)}, {"x": np.zeros((0, 3)), "y": np.arange(0)},
        np.array(["a", "b", "a", "c"]),
    )  # fmt: skip
    found = inputs_of([], arrays)
    assert [*found] == ["data: train x", "data: train y", "data: test x", "data: test y", "data: users"]
    for name, other in (
        ("train", arrays.train | {"x": arrays.train["x"].T.reshape(4, 3) + 1}),
        ("users", np.arange(4)),
    ):
        assert len(changed(found, inputs_of([], Arrays(**(vars(arrays) | {name: other}))))) == 1


def test_columns_that_are_swapped_change_the_data():
    x = np.random.default_rng(0).random((4, 3), np.float32)
    one, two = (inputs_of([], Arrays({"x": given, "y": np.arange(4)}, {})) for given in (x, x[:, [1, 0, 2]]))
    assert changed(one, two) == ["data: train x"]


def test_code_is_that_of_the_class_and_of_what_it_uses(package):
    before = inputs(method="own_method:Mine")
    assert [name for name in before if name.startswith("code")] == ["code own_helper", "code own_method"]
    write(package / "unrelated.py", "pass")
    assert changed(before, inputs(method="own_method:Mine")) == []
    write(package / "own_helper.py", "FACTOR = 2.0\ndef half(x): return x / 2\n")
    assert changed(before, inputs(method="own_method:Mine")) == ["code own_helper"]
    assert [name for name in inputs(method="fedavg") if name.startswith("code")] == []


def test_files_of_settings_are_inputs(tmp_path):
    (file := tmp_path / "devices.csv").write_text("name,gflops\n" + "a,1\n" * 6)
    system = {"devices": {"name": "table", "file": str(file)}}
    before = inputs(system=system)
    assert f"file {file}" in before
    file.write_text("name,gflops\n" + "a,2\n" * 6)
    assert changed(before, inputs(system=system)) == [f"file {file}"]


def test_a_run_with_changed_inputs_resumes_only_if_its_user_accepts_them(tmp_path, package):
    given = {"method": "own_method:Mine", "run": SERIAL}
    rayfl.run(tiny(rounds=1, **given), tmp_path / "run")
    again = rayfl.run(tiny(rounds=2, **given), tmp_path / "run", resume=True)
    assert again.folder.changes == ()
    write(package / "own_helper.py", "def half(x): return x / 3\n")
    with pytest.raises(ConfigError) as error:
        rayfl.run(tiny(rounds=3, **given), tmp_path / "run", resume=True)
    assert str(error.value) == (
        f"{tmp_path / 'run'}: these inputs changed since the run was started:\n  code own_helper\nHint: restore them, "
        'start again in another folder, or continue with them by --resume-changed (resume="changed")'
    )
    last = rayfl.run(tiny(rounds=3, **given), tmp_path / "run", resume="changed")
    assert last.folder.changes == ("after round 2: code own_helper",)
    assert "resuming with changed inputs: code own_helper" in last.notes
    assert rayfl.run(tiny(rounds=4, **given), tmp_path / "run", resume=True).folder.changes == last.folder.changes
