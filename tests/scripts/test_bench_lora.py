"""The bench of low-rank clients measures rounds after the first, and runs no others."""

import contextlib

import pytest


@pytest.fixture
def bench(script):
    return script("bench_lora")


def test_no_round_runs_after_the_last_measured_one(bench, monkeypatch):
    """The first round receives 1,000 bytes of a base, every round 10 bytes of its own."""
    received = [0]

    def session():
        while True:
            received.append(received[-1] + 10 + (1000 if len(received) == 1 else 0))
            yield {"seconds": len(received) - 1.0}

    monkeypatch.setattr(bench, "experiment", lambda steps: None)
    monkeypatch.setattr(bench.rayfl, "start", lambda *_, **options: contextlib.nullcontext(session()))
    monkeypatch.setattr(bench, "came_to", lambda node: received[-1])
    assert bench.rounds(None, "node", 1) == (3, 1000)
    assert len(received) - 1 == 1 + bench.ROUNDS == 4
