"""Every method gives the numbers that version control keeps, and goldens.py finds what differs between two commits."""

import json
import math

import goldens
import pytest
from golden_cases import CASES, VALUES
from safetensors.torch import load_file, save_file

from rayfl.methods import METHODS

VALUES_KEPT = json.loads(goldens.KEPT.read_text())
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
"""Relative. A float32 run differs by some 1e-7 from one type of CPU to another, a float64 run by less than 1e-12."""
NAME = "scaffold-digits_cnn"


@pytest.fixture(scope="module")
def values():
    return goldens.values()


def test_every_method_has_values():
    assert set(VALUES_KEPT) == set(VALUES) == set(METHODS)


@pytest.mark.parametrize("method", sorted(VALUES_KEPT))
def test_a_method_gives_the_values_that_are_kept(method, values):
    found, kept = values[method], VALUES_KEPT[method]
    assert "error" not in found, found["error"]
    tolerance = TOLERANCE[kept["dtype"]]
    assert found["metrics"] == pytest.approx(kept["metrics"], rel=tolerance, abs=0)
    assert found["groups"].keys() == kept["groups"].keys()
    for group, (total, squares) in kept["groups"].items():
        # where terms cancel, a sum is as exact as its terms
        assert found["groups"][group] == [
            pytest.approx(total, rel=tolerance, abs=tolerance * math.sqrt(squares)),
            pytest.approx(squares, rel=tolerance, abs=0),
        ], group


# the tool


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("goldens") / "made.json"
    goldens.make(out, NAME)
    return out


@pytest.fixture
def other(made, tmp_path):
    """A copy of what was made, after `change` of its case and tensors."""

    def changed(change):
        golden = json.loads(made.read_text())
        tensors = load_file(made.with_suffix(".tensors") / f"{NAME}.safetensors")
        case = golden["cases"][NAME]
        change(case, tensors)
        case["tensors"] = {name: goldens.digest(t) for name, t in tensors.items()}
        out = tmp_path / "other.json"
        (folder := out.with_suffix(".tensors")).mkdir()
        save_file(tensors, folder / f"{NAME}.safetensors")
        out.write_text(json.dumps(golden))
        return out

    return changed


def compared(capsys, *arguments) -> tuple[int, str]:
    """The exit code, and the line of the case."""
    code = goldens.main(["compare", *map(str, arguments)])
    line, _ = capsys.readouterr().out.splitlines()
    assert line.startswith(NAME)
    return code, " ".join(line.removeprefix(NAME).split())


def test_make_holds_the_state_and_what_clients_keep(made):
    golden = json.loads(made.read_text())["cases"][NAME]
    assert [line["round"] for line in golden["lines"]] == [1, 2, 3]
    assert all("seconds" not in line for line in golden["lines"])
    owners = {name.partition("/")[0] for name in golden["tensors"]}
    assert "state" in owners and {owner.partition(" ")[0] for owner in owners} == {"state", "client"}


def test_two_runs_have_the_same_bits(made, tmp_path, capsys):
    goldens.make(tmp_path / "again.json", NAME)
    assert compared(capsys, made, tmp_path / "again.json") == (0, "same bits")


def test_a_tensor_that_differs_is_measured(made, other, capsys):
    def change(case, tensors):
        tensors["state/params/head.bias"] *= 2

    both = [made, other(change)]
    code, text = compared(capsys, *both)
    assert code == 1
    assert text.startswith("differs tensors: 1 of 96: state/params/head.bias (absolute ")
    assert text.endswith(", relative 1.0e+00)")
    assert compared(capsys, *both, "--except", "fedpm-*,scaffold-*") == (0, text.replace("differs", "excepted", 1))


def test_metrics_that_differ_come_and_go_are_named(made, other, capsys):
    def change(case, tensors):
        case["lines"][1]["train_loss"] = case["lines"][1]["train_loss"] * 1.5
        for line in case["lines"]:
            line["new"] = 1
            del line["steps"]

    after = other(change)
    code, text = compared(capsys, made, after)
    assert code == 1
    assert text.startswith("differs metrics vanished: steps; metrics appeared: new; metrics: 1 of")
    assert "train_loss in round 2 (" in text and text.endswith("relative 5.0e-01)")
    assert compared(capsys, made, after, "--ignore", "train_loss,new,steps") == (0, "same bits")


def test_names_that_changed_are_no_difference_and_lost_tensors_are(made, other, capsys):
    def rename(case, tensors):
        for name in [name for name in tensors if "/variate/" in name and name.startswith("state")]:
            tensors[name.replace("/variate/", "/own/")] = tensors.pop(name)

    assert compared(capsys, made, other(rename)) == (0, "same bits renamed: variate -> own (12)")


def test_tensors_that_vanish_are_a_difference(made, other, capsys):
    def lose(case, tensors):
        del tensors["state/params/head.bias"]

    assert compared(capsys, made, other(lose)) == (1, "differs vanished: state/params/head.bias")


def test_a_case_that_fails_is_a_difference(made, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(CASES, NAME, CASES[NAME] | {"rounds": "many"})
    goldens.make(tmp_path / "failed.json", NAME)
    code, text = compared(capsys, made, tmp_path / "failed.json")
    assert code == 1 and text.startswith("differs new: ConfigError: ")
