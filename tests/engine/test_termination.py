"""SIGTERM and Ctrl-C: a run ends its step and writes a checkpoint, and resumes with the same bits."""

import os
import signal

import pytest
from helpers import simulate, tiny

import rayfl
from rayfl.engine import termination
from rayfl.engine.checkpoints import complete, read
from rayfl.engine.files import checksum
from rayfl.engine.termination import Terminated, deferred, kept
from rayfl.listeners import Listener
from rayfl.results.folder import RunFolder


@pytest.fixture(autouse=True)
def default():
    """As in a fresh process: Ray leaves a handler of its own in one that it was started in."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


class Signalling(Listener):
    """Sends this process a signal after a round."""

    after: int
    times: int = 1
    kind: int = signal.SIGTERM

    def on_round(self, line):
        if line["round"] == self.after:
            for _ in range(self.times):
                os.kill(os.getpid(), self.kind)


class Notes(Listener):
    """Keeps a run's notes."""

    def on_note(self, text):
        NOTES.append(text)


NOTES = []


def experiment():
    return tiny(method="heterofl", rounds=6, evaluation={"every": 2}, run={"executor": "serial"})


@pytest.mark.parametrize(("kind", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_a_run_writes_a_checkpoint_and_resumes_with_the_same_bits(kind, error, tmp_path):
    folder = tmp_path / "run"
    NOTES.clear()
    # a shell starts background processes with SIGINT ignored, and then a run ignores it too
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(error) as ended:
            rayfl.run(experiment(), folder, listeners=[Signalling(after=2, kind=kind), Notes()])
    finally:
        signal.signal(signal.SIGINT, before)
    assert error is KeyboardInterrupt or ended.value.code == 143
    assert NOTES == [
        "stopping after this step; a second signal stops at once",
        "stopped after round 2, with a checkpoint",
    ]
    assert RunFolder.open(folder).status == "stopped"
    # checkpoints are otherwise half a minute apart
    assert [path.name for path in complete(folder / "checkpoints")] == ["round-000002"]
    assert len(RunFolder.open(folder).rounds()) == 2

    NOTES.clear()
    result = rayfl.run(experiment(), folder, resume=True, listeners=[Notes()])
    assert NOTES == ["resuming at round 3"]
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
    NOTES.clear()
    rayfl.run(experiment(), folder, resume=True, listeners=[Notes()])
    gone = f"{folder / 'checkpoints'}: there is no checkpoint; rounds 1 to 2 are repeated"
    assert NOTES == [gone, "resuming at round 1"]


def test_a_step_that_does_not_end_is_left(monkeypatch):
    monkeypatch.setattr(termination, "GRACE_SECONDS", 0.05)
    with pytest.raises(Terminated), deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            signal.pause()


def test_what_fails_after_the_signal_is_no_failure():
    with pytest.raises(Terminated), deferred() as notice:
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice.given == signal.SIGTERM
        raise ConnectionError("its processes were told to end too")
    with pytest.raises(ConnectionError), deferred():
        raise ConnectionError("by itself")


def test_a_users_own_handler_stays_in_its_place():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
    try:
        with deferred() as notice:
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [True] and not notice.given
        with kept():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [True, True]
    finally:
        signal.signal(signal.SIGTERM, before)
