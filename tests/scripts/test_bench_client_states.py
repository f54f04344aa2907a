"""The bench of client states refuses methods that have none."""

import json
import sys

import pytest


@pytest.fixture
def bench(script):
    return script("bench_client_states")


def test_a_method_without_client_states_is_refused_before_ray_starts(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_client_states.py", "--method", "fedavg"])
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(
        "--method: fedavg has no client states. Allowed: a method with a network per client\n"
    )


def test_a_method_with_client_states_is_measured(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_client_states.py", "--method", "standalone", "--json"])
    monkeypatch.setattr(bench, "measure", lambda what, *_: {"method": what.method.name, "clients": what.clients.count})
    bench.main()
    assert json.loads(capsys.readouterr().out) == {"method": "standalone", "clients": 20}
