"""The comparison with HtFLlib refuses numbers of rounds that the study does not evaluate."""

import sys

import pytest


@pytest.fixture
def compare(script):
    return script("compare_htfllib")


@pytest.mark.parametrize("rounds", [-10, 0, 5, 15])
def test_rounds_that_are_no_multiple_of_the_evaluations_are_refused(compare, monkeypatch, capsys, rounds):
    monkeypatch.setattr(sys, "argv", ["compare_htfllib.py", ".", f"--rounds={rounds}"])
    monkeypatch.setattr(compare, "line_of", lambda *_: {"method": "none"})
    with pytest.raises(SystemExit) as ended:
        compare.main()
    assert ended.value.code == 2
    expected = f"--rounds: {rounds} is not a positive multiple of 10. Allowed: 10, 20, ...\n"
    assert capsys.readouterr().err.endswith(expected)


def test_multiples_are_compared(compare, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare_htfllib.py", ".", "--rounds=20", "--methods", "FML"])
    monkeypatch.setattr(compare, "line_of", lambda checkout, cases: {"method": cases[0].name, "at": cases[0].rounds})
    compare.main()
    assert capsys.readouterr().out.split() == ["FML", "20", "method,at", "FML,20"]
