"""What a report finds in a folder: a sweep, a run, or several runs side by side."""

import math

import pytest
from helpers import message
from rows import folder, line, study

from rayfl.results.findings import found_in, unfinished, unranked


def run(path, lr=0.1, accuracy=0.5, **more):
    more = {"config": {"seed": more.get("seed", 0), "training": {"lr": lr}}} | more
    return folder(path, lines=[line(1, accuracy_mean=accuracy, accuracy_1=accuracy)], **more)


def test_runs_of_one_method_that_differ_are_rows_with_their_folders(tmp_path):
    """Not the points of a search, of which the best on the test set would be shown."""
    run(tmp_path / "slow", 0.1, 0.5)
    run(tmp_path / "slow-again", 0.1, 0.5, seed=1)
    run(tmp_path / "fast", 0.3, 0.75)
    run(tmp_path / "other", label="heterofl", title="HeteroFL")
    found = found_in(tmp_path)
    assert [(row["label"], row["title"], row["seed"]) for row in found.best] == [
        ("fast/fedavg", "fast/fedavg", 0),
        ("heterofl", "HeteroFL", 0),
        ("slow/fedavg", "slow/fedavg", 0),
        ("slow/fedavg", "slow/fedavg", 1),
    ]


def test_runs_that_differ_in_the_seed_are_one_row(tmp_path):
    for seed in (0, 1):
        run(tmp_path / f"s{seed}", seed=seed)
    assert [(row["label"], row["seed"]) for row in found_in(tmp_path).best] == [("fedavg", 0), ("fedavg", 1)]


def test_a_folder_without_results_says_what_is_missing(tmp_path):
    assert (
        message(found_in, tmp_path / "no")
        == f"{tmp_path}/no: there is no such folder. Allowed: the folder of a sweep or a run"
    )
    assert message(found_in, tmp_path).startswith(f"{tmp_path}: the folder contains no run. Allowed:")
    folder(tmp_path / "new", status="running")
    assert message(found_in, tmp_path).startswith(f"{tmp_path}: no run in the folder has been evaluated. Hint:")
    run(tmp_path / "diverged", accuracy=math.nan)
    why = f"{tmp_path}/diverged: no run in the folder has a finite accuracy_mean. Hint:"
    assert message(found_in, tmp_path / "diverged").startswith(why)
    study(tmp_path / "one")
    study(tmp_path / "below" / "two")
    assert message(found_in, tmp_path) == (
        f"{tmp_path}: the folder contains the sweeps below/two, one. Allowed: the folder of one sweep. Hint: `rayfl "
        "compare` compares several"
    )
    assert {row["label"] for row in found_in(tmp_path / "one").best} == {"heterofl", "fjord"}


def test_a_run_that_has_not_ended_has_the_results_of_its_lines(tmp_path):
    run(tmp_path / "run", status="running")
    [row] = found_in(tmp_path / "run").best
    assert (row["status"], row["accuracy_mean"], row["best_round"]) == ("running", 0.5, 1)
    # the rows of a sweep are of finished trials
    sweep = study(tmp_path / "sweep", labels=("heterofl",))
    run(sweep.path / "trials" / "new", accuracy=1.0, label="heterofl", status="running", sweep=sweep.id)
    run(sweep.path / "trials" / "only", label="fjord", status="running", sweep=sweep.id)
    found = found_in(sweep.path)
    assert {(row["label"], row["status"]) for row in found.best} == {("heterofl", "finished")}
    assert unranked(found.best, found.trials, found.metric) == [
        "fjord: not ranked, because no finished trial has a finite accuracy_mean"
    ]


@pytest.mark.parametrize(
    ("status", "words"),
    [("running", "has not ended"), ("stopped", "was stopped"), ("failed", "has failed"), ("finished", None)],
)
def test_results_that_are_not_final_are_said_to_be(tmp_path, status, words):
    records = [run(tmp_path / "a", status=status).record()]
    assert unfinished(records) == ([f"fedavg {words}: these results are not final"] if words else [])
