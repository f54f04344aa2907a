"""SIGTERM: a run ends its step, writes a checkpoint and leaves with 143; it goes on with the same bits."""

import os
import signal

import pytest
from helpers import simulate, tiny

import rayfl
from rayfl.engine import termination
from rayfl.engine.checkpoints import complete, read
from rayfl.engine.files import checksum
from rayfl.engine.termination import Terminated, heeded, kept
from rayfl.listeners import Listener
from rayfl.results.folder import RunFolder


@pytest.fixture(autouse=True)
def default():
    """As in a fresh process: Ray leaves a handler of its own in one that it was started in."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


class Signalling(Listener):
    """Sends this process SIGTERM after a round."""

    after: int
    times: int = 1

    def on_round(self, line):
        if line["round"] == self.after:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGTERM)


def experiment():
    return tiny(method="heterofl", rounds=6, evaluation={"every": 2}, run={"executor": "serial"})


def test_a_run_writes_a_checkpoint_and_goes_on_with_the_same_bits(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Terminated) as ended:
        rayfl.run(experiment(), folder, listeners=[Signalling(after=2)])
    assert ended.value.code == 143
    assert RunFolder.open(folder).status == "stopped"
    # checkpoints are otherwise half a minute apart
    assert [path.name for path in complete(folder / "checkpoints")] == ["round-000002"]
    assert len(RunFolder.open(folder).rounds()) == 2

    result = rayfl.run(experiment(), folder, resume=True)
    simulation = simulate(experiment(), tmp_path / "straight")
    lines = []
    while step := simulation.step():
        lines += step
    drop = {"seconds"}
    assert [{k: v for k, v in line.items() if k not in drop} for line in result.lines] == [
        {k: v for k, v in line.items() if k not in drop} for line in lines
    ]
    assert checksum(read(complete(folder / "checkpoints")[-1]).state) == checksum(simulation.state)


def test_a_second_one_ends_it_at_once(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Terminated):
        rayfl.run(experiment(), folder, listeners=[Signalling(after=2, times=2)])
    assert RunFolder.open(folder).status == "stopped"
    assert complete(folder / "checkpoints") == []


def test_a_step_that_does_not_end_is_left(monkeypatch):
    monkeypatch.setattr(termination, "GRACE_SECONDS", 0.05)
    with pytest.raises(Terminated), heeded():
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            signal.pause()


def test_what_fails_after_the_signal_is_no_failure():
    with pytest.raises(Terminated), heeded() as notice:
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice.given
        raise ConnectionError("its processes were told to end too")
    with pytest.raises(ConnectionError), heeded():
        raise ConnectionError("by itself")


def test_a_users_own_handler_stays_in_its_place():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
    try:
        with heeded() as notice:
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [True] and not notice.given
        with kept():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [True, True]
    finally:
        signal.signal(signal.SIGTERM, before)
