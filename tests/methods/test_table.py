"""The table of all methods in rayfl/methods/README.md is complete, and agrees with what the methods declare."""

import re
from pathlib import Path

import pytest
from independent import MIX, experiment

from rayfl.config import ConfigError
from rayfl.methods import METHODS
from rayfl.methods.distillation import DISTILLATION
from rayfl.methods.distillation.pairs import WithCommon
from rayfl.methods.lowrank import LOWRANK
from rayfl.methods.masks.base import Masked
from rayfl.testing.networks import SPLIT

TEXT = Path("rayfl/methods/README.md").read_text()
[HEADER, TABLE] = re.findall(r"^(\| method \| a client holds .+)\n.+\n((?:\| .+\n)+)", TEXT, re.M)[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines()]
CELLS = {row[0].strip("`"): dict(zip(("holds", "travels", "judged", "public"), row[1:], strict=True)) for row in ROWS}


def test_each_method_has_one_row() -> None:
    assert sorted(row[0] for row in ROWS) == sorted(f"`{name}`" for name in METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_its_row_is_what_it_declares(name: str) -> None:
    cells, method = CELLS[name], METHODS[name]
    assert cells["judged"] == {"test": "server", "clients": "clients"}[method.judged_on]
    assert ("adapters" in cells["holds"]) == (name in LOWRANK)
    assert ("any model" in cells["holds"]) == (name in DISTILLATION and method.contract.wants != "extractors")
    assert ("a common one" in cells["holds"]) == issubclass(method, WithCommon)
    assert ("single weights" in cells["holds"]) == issubclass(method, Masked)
    assert ("blocks" in cells["holds"]) == (method.contract.wants == "blocks" or name == "nefl")
    assert ("exit" in cells["holds"]) == (method.contract.wants == "exits")


@pytest.mark.parametrize("name", METHODS)
def test_its_public_data_are_what_it_demands(name: str) -> None:
    """Without public data, or without their labels, exactly the methods that need them refuse to run."""
    demands = ""
    for public, demand in (({"share": 0.3}, "samples and labels"), (None, "samples")):
        try:
            _asked(name, public)
        except ConfigError as error:
            demands = demands or (demand if str(error).startswith("test: data.public") else "")
    assert CELLS[name]["public"] == (demands or "no")


def _asked(name: str, public: object) -> None:
    model = SPLIT if METHODS[name].contract.wants == "extractors" else MIX | {"features": 6}
    experiment(method={"name": name}, model=model, data={"public": public})
