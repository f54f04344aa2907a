"""Files of small sweeps, and why they are refused."""

import pytest
import yaml
from helpers import TINY

from rayfl.config import ConfigError
from rayfl.tuning.load import load_sweep

ROUNDS = 12
LR = {"training.lr": {"grid": [0.1, 0.2]}}


def write(tmp_path, rows=("heterofl",), experiment=None, **search):
    """A file of rows that are methods, or of `rows` as a mapping. On four CPUs the trials take turns, in the same
    processes."""
    path = tmp_path / "small.yaml"
    run = {"chunk": 1, "actors": 1, "cpus": 4}
    given = TINY | {"rounds": ROUNDS, "evaluation": {"every": 3}, "run": run} | (experiment or {})
    rows = rows if isinstance(rows, dict) else {row: {"method": row} for row in rows}
    path.write_text(yaml.safe_dump({"experiment": given, "rows": rows, "search": search}, sort_keys=False))
    return path


def refused(path, settings=None, rows=None) -> str:
    """Why, without the file's name."""
    with pytest.raises(ConfigError) as error:
        load_sweep(path, settings, rows)
    assert str(error.value).startswith((f"{path}: ", "--set "))
    return str(error.value).removeprefix(f"{path}: ")
