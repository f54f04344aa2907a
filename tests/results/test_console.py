"""Progress on a terminal and in plain lines."""

import io
import math

import pytest
from rich.console import Console

from rayfl.results.console import RunProgress, SweepProgress, clock


@pytest.fixture
def pipe():
    return Console(file=io.StringIO(), force_terminal=False, width=100)


@pytest.fixture
def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=40)


def text(console):
    return console.file.getvalue()


def picture(progress):
    console = Console(file=io.StringIO(), width=100)
    console.print(progress.picture())
    return console.file.getvalue()


def test_a_pipe_gets_a_line_every_tenth_of_a_run(pipe):
    with RunProgress("heterofl", 40, console=pipe) as progress:
        for round in range(1, 41):
            evaluated = {"accuracy_mean": round / 100} if round % 20 == 0 else {}
            progress.update(round, {"round": round, "seconds": 1.5, "train_loss": 0.5} | evaluated)
    lines = text(pipe).splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("heterofl: round 4/40, loss 0.5000, 1.50 s/round, 0:00 elapsed")
    assert lines[6].startswith("heterofl: round 28/40, loss 0.5000, accuracy 0.2000 after round 20, 1.50 s/round")
    assert lines[9].endswith("accuracy 0.4000, 1.50 s/round, 0:00 elapsed")
    assert "\x1b" not in text(pipe)


def test_a_short_run_gets_a_line_each_round(pipe):
    with RunProgress("fedavg", 3, console=pipe) as progress:
        for round in (1, 2, 3):
            progress.update(round, {"seconds": 1.0})
    assert len(text(pipe).splitlines()) == 3


def test_a_run_shows_its_judge_metric(pipe):
    with RunProgress("spafl", 1, "local_accuracy_mean", console=pipe) as progress:
        progress.update(1, {"seconds": 1.0, "accuracy_mean": 0.1, "local_accuracy_mean": 0.875})
    assert text(pipe).startswith("spafl: round 1/1, local accuracy 0.8750, 1.00 s/round")


def test_a_terminal_shows_the_run(terminal):
    with RunProgress("fedavg", 8, first=4, console=terminal) as progress:
        progress.update(6, {"seconds": 2.0, "train_loss": 0.25, "accuracy_mean": 0.75})
        progress.note("MLflow is away [again]")
        progress.update(7, {"seconds": 2.0})
    shown = text(terminal)
    assert "fedavg: round 7/8, 0:00 elapsed, 0:00 left" in shown
    assert "loss 0.2500, accuracy 0.7500 after round 6, 2.00 s/round" in shown
    assert "MLflow is away [again]" in shown


def test_a_phase_is_shown_until_there_is_a_round(terminal, pipe):
    with RunProgress("fedavg", 8, console=pipe) as progress:
        progress.phase("starting Ray")
        assert "starting Ray, 0:00" in picture(progress) and "round" not in picture(progress)
        progress.phase("starting Ray")
        progress.update(1, {"seconds": 2.0})
        assert "starting Ray" not in picture(progress) and "round 1/8" in picture(progress)
        progress.phase("writing tables")
        assert "round 1/8" in picture(progress) and "writing tables, 0:00" in picture(progress)
    assert text(pipe).splitlines()[0] == "starting Ray ..." and text(pipe).count("starting Ray") == 1
    with RunProgress("fedavg", 8, console=terminal) as progress:
        progress.phase("starting Ray")
    # nothing came of it, and nothing of it stays
    assert "\n" not in text(terminal)


def test_the_time_that_is_left_is_that_of_the_rounds(pipe, monkeypatch):
    """Ray took 100 s to start, and a round takes 10: after 3 of 10 rounds 70 s are left, and not 300."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = RunProgress("fedavg", 10, console=pipe)
    for round in (1, 2, 3):
        now[0] = 100 + 10.0 * round
        progress.update(round, {"seconds": 10.0})
    assert text(pipe).splitlines()[-1].endswith("2:10 elapsed, 1:10 left")


def test_the_time_that_is_left_after_a_resume_is_that_of_this_process(pipe, monkeypatch):
    """Two of four trials are there; the others take 100 s each: after half of the third, 150 s are left."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = SweepProgress(4, 10, console=pipe)
    for trial in "ab":
        progress.start(trial, "fedavg", "", made=[{"round": round} for round in range(1, 11)])
        progress.done(trial, "finished")
    progress.resumed()
    progress.start("c", "fedavg", "")
    for round in range(1, 6):
        now[0] = 10.0 * round
        progress.update("c", round, {"seconds": 10.0})
        left = progress._times(progress._share)
    assert left == "0:50 elapsed, 2:30 left"


@pytest.mark.parametrize("columns", [80, 140])
def test_a_live_area_fits_its_terminal(columns):
    console = Console(file=io.StringIO(), force_terminal=True, width=columns, height=40, color_system=None)
    progress = SweepProgress(200, 500, "validation_accuracy_mean", console=console)
    for i in range(4):
        progress.start(str(i), "fedavg-smallest", f"training.lr=0.0{i}, method.submodels.0.width=0.5")
        progress.update(str(i), 400, {"validation_accuracy_mean": i / 7})
    progress.done("0", "finished")
    progress.phase("searching on seed 0")
    console.print(progress.picture())
    lines = text(console).splitlines()
    assert max(map(len, lines)) <= columns and len(lines) == 1 + 1 + 2 + 4 + 1
    assert all("400/500" in line and line.split()[-1] in ("running", "finished") for line in lines[4:8])
    assert ("…" in lines[4]) == (columns == 80) and "fedavg-smallest" in lines[4]


def test_a_path_is_shown_as_it_is(terminal):
    """It is no markup; what cannot be encoded does not end the run."""
    with RunProgress("[red]fedavg[/red]", 1, console=terminal) as progress:
        progress.note("results in runs/[bold]a/x\udcffy")
        progress.update(1, {"seconds": 1.0})
    shown = text(terminal)
    assert "results in runs/[bold]a/x?y" in shown and "[red]fedavg[/red]: round 1/1" in shown


def sweep(console):
    progress = SweepProgress(6, 10, console=console)
    for i, (label, point) in enumerate(
        [("fedavg", "lr=0.1"), ("fedavg", "lr=0.03"), ("heterofl", "lr=0.1"), ("fjord", "lr=0.1")]
    ):
        progress.start(f"t{i}", label, point)
    progress.update("t0", 10, {"accuracy_mean": 0.5})
    progress.update("t1", 8, {"accuracy_mean": 0.625})
    progress.update("t1", 9, {"train_loss": 1.0})
    progress.update("t2", 4, {"accuracy_mean": 0.75})
    progress.done("t0", "finished")
    progress.done("t2", "stopped")
    return progress


def test_the_picture_of_a_sweep(pipe):
    shown = [" ".join(line.split()) for line in picture(sweep(pipe)).splitlines()]
    assert "trials 2/6, rounds 23/60, 0:00 elapsed" in shown[0]
    assert shown[1:] == [
        "best heterofl: 0.7500 after round 4 (lr=0.1)",
        "best fedavg: 0.6250 after round 8 (lr=0.03)",
        "of",
        "method point round accuracy round state",
        "fedavg lr=0.1 10/10 0.5000 10 finished",
        "heterofl lr=0.1 4/10 0.7500 4 stopped",
        "fedavg lr=0.03 9/10 0.6250 8 running",
        "fjord lr=0.1 0/10 running",
    ]


def test_a_pipe_gets_a_line_for_every_ended_trial(pipe):
    sweep(pipe)
    first, second = text(pipe).splitlines()
    assert first.startswith("[1/6] fedavg lr=0.1: finished, round 10/10, accuracy 0.5000; 0:00 elapsed")
    assert second.startswith("[2/6] heterofl lr=0.1: stopped, round 4/10, accuracy 0.7500; 0:00 elapsed")


def test_the_last_three_ended_trials_are_shown(pipe):
    progress = SweepProgress(51, 1, console=pipe)
    for i in range(50):
        progress.start(str(i), "fedavg", f"lr={i}")
        progress.update(str(i), 1, {"accuracy_mean": i / 100})
        progress.done(str(i), "finished")
    progress.start("50", "fedavg", "lr=50")
    rows = [line for line in picture(progress).splitlines() if "finished" in line]
    assert [row.split()[1] for row in rows] == ["lr=47", "lr=48", "lr=49"]


def test_the_smallest_finite_loss_is_the_best(pipe):
    progress = SweepProgress(4, 1, "loss_mean", "min", console=pipe)
    for i, value in enumerate((math.nan, 2.0, 1.5, -math.inf)):
        progress.start(str(i), "fedavg[1]", f"lr={i}")
        progress.update(str(i), 1, {"loss_mean": value})
        progress.done(str(i), "finished")
    assert "best fedavg[1]: 1.5000 after round 1 (lr=2)" in picture(progress)


def test_a_trial_that_runs_again_counts_once(pipe):
    progress = SweepProgress(1, 10, console=pipe)
    for status in ("failed", "finished"):
        progress.start("t", "fedavg", "lr=0.1")
        progress.update("t", 10, {"accuracy_mean": 0.5})
        progress.done("t", status)
    shown = picture(progress)
    assert "trials 1/1, rounds 10/10" in shown
    assert "failed" not in shown


def test_clock():
    assert [clock(s) for s in (9, 62, 3599.6, 3723)] == ["0:09", "1:02", "1:00:00", "1:02:03"]
