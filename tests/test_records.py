"""A run's folder: whatever crashes or fills up, whole lines are kept and nothing half-written is read."""

import json
import os

import pytest

from rayfl.config import ConfigError
from rayfl.tracking import records
from rayfl.tracking.records import Run, flatten, runs, summary


@pytest.fixture
def run(tmp_path):
    config = {"seed": 3, "method": {"name": "fedavg"}, "clients": {"capacities": [1.0, 0.5]}}
    return Run.create(tmp_path / "run", "fedavg-largest", config, {"seed": 3, "method": "fedavg"})


def line(round, **metrics):
    return {"round": round, "seconds": 2.0} | metrics


def test_a_run_is_opened_as_it_was_created(run):
    assert Run.open(run.path) == run
    assert run.config["method"] == {"name": "fedavg"}
    assert run.tags == {"seed": "3", "method": "fedavg"}
    assert (run.status, run.result, run.rounds()) == ("running", {}, [])


def test_a_folder_holds_one_run(run, tmp_path):
    with pytest.raises(ConfigError, match="holds a run already; resume it, or give another folder"):
        Run.create(run.path, "x", {}, {})
    with pytest.raises(ConfigError, match="holds no run; allowed: a folder with a run.json"):
        Run.open(tmp_path)


def test_lines_are_appended_in_order(run):
    run.append([line(1), line(2, train_loss=0.5)])
    run.append([line(3)])
    assert Run.open(run.path).rounds() == [line(1), line(2, train_loss=0.5), line(3)]


@pytest.mark.parametrize("torn", ['{"round": 3, "sec', "x" * 200_000])
def test_a_torn_last_line_is_neither_read_nor_glued_to_the_next(run, torn):
    run.append([line(1), line(2)])
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    again = Run.open(run.path)
    assert again.rounds() == [line(1), line(2)]
    again.append([line(3)])
    assert again.rounds() == [line(1), line(2), line(3)]


def test_a_lone_torn_line_is_cut(run):
    (run.path / "metrics.jsonl").write_text('{"round"')
    run.append([line(1)])
    assert Run.open(run.path).rounds() == [line(1)]


def test_a_resumed_file_equals_a_straight_one(run):
    run.append([line(r) for r in range(1, 6)])
    straight = (run.path / "metrics.jsonl").read_bytes()
    run.truncate_after(3)
    assert run.rounds() == [line(1), line(2), line(3)]
    run.append([line(4), line(5)])
    assert (run.path / "metrics.jsonl").read_bytes() == straight


@pytest.mark.parametrize("taken", [0, 7], ids=["nothing", "a part"])
def test_a_full_disk_keeps_lines_for_later(run, monkeypatch, taken):
    run.append([line(1)])
    write = os.write
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", lambda fd, data: write(fd, data[:taken]))
        run.append([line(2)])
        run.append([line(3)])
    assert run.pending == [line(2), line(3)]
    assert run.rounds() == [line(1), line(2), line(3)]
    assert Run.open(run.path).rounds() == [line(1)]
    run.append([line(4)])
    assert run.pending == []
    assert Run.open(run.path).rounds() == [line(1), line(2), line(3), line(4)]


def test_a_replaced_file_is_whole_or_old(run, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        run.finish("finished", {"accuracy_mean": 1.0})
    assert Run.open(run.path).status == "running"
    assert Run.open(run.path).result == {}
    names = sorted(file.name for file in run.path.iterdir())
    assert names == ["config.json", "run.json"]


def test_finish_writes_what_is_pending_and_how_it_ended(run, monkeypatch):
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "full")))
        run.append([line(1)])
    run.finish("failed", {"method": "fedavg-largest", "rounds": 1}, error="client 7: no data")
    again = Run.open(run.path)
    assert again.rounds() == [line(1)]
    assert (again.status, again.error) == ("failed", "client 7: no data")
    again.resume()
    assert (Run.open(run.path).status, Run.open(run.path).error) == ("running", None)


def test_record_is_flat(run):
    run.finish("finished", summary([line(1, accuracy_mean=0.5)], run.label, 3))
    record = run.record()
    assert record["params"] == {
        "seed": 3,
        "method.name": "fedavg",
        "clients.capacities": [1.0, 0.5],
    }
    assert (record["label"], record["seed"], record["accuracy_mean"]) == ("fedavg-largest", 3, 0.5)
    assert json.loads(json.dumps(record)) == record


def test_runs_of_a_sweep_are_found_below_it(tmp_path):
    sweep = Run.create(tmp_path / "sweep", "digits", {}, {}, kind="sweep")
    for name in ("b", "a"):
        Run.create(sweep.path / name, name, {}, {"seed": 0}, sweep=sweep.id)
    Run.create(tmp_path / "other", "c", {}, {"seed": 0})
    assert [run.label for run in runs(tmp_path)] == ["c", "digits", "a", "b"]
    assert [r["label"] for r in records.records(tmp_path)] == ["c", "a", "b"]
    assert [r["label"] for r in records.records(tmp_path, sweep.id)] == ["a", "b"]


def test_summary_by_hand():
    accuracies = {2: 0.1, 4: 0.9, 6: 0.2, 8: 0.3, 10: 0.9, 12: 0.4}
    lines = [line(r, bytes_down=10, bytes_up=5, train_flops=100) for r in range(1, 14)]
    for round, accuracy in accuracies.items():
        lines[round - 1] |= {
            "accuracy_mean": accuracy,
            "accuracy_worst": accuracy / 2,
            "accuracy_0.125": accuracy / 2,
            "local_accuracy_mean": 1.0 - accuracy,
        }
    result = summary(lines, "heterofl", 7)
    last5 = result.pop("last5_accuracy_mean")
    assert last5 == pytest.approx((0.9 + 0.2 + 0.3 + 0.9 + 0.4) / 5)
    assert result.pop("last5_local_accuracy_mean") == pytest.approx(1 - last5)
    assert result == {
        "method": "heterofl",
        "seed": 7,
        "rounds": 13,
        "accuracy_mean": 0.4,
        "accuracy_worst": 0.2,
        "accuracy_0.125": 0.2,
        "local_accuracy_mean": 0.6,
        "best_local_accuracy_mean": 0.9,
        "best_accuracy_mean": 0.9,
        "best_round": 4,
        "bytes_down": 130,
        "bytes_up": 65,
        "train_flops": 1300,
        "seconds": 26.0,
    }


def test_summary_of_nothing():
    assert summary([], "x", 0) == {
        "method": "x",
        "seed": 0,
        "rounds": 0,
        "bytes_down": 0,
        "bytes_up": 0,
        "train_flops": 0,
        "seconds": 0,
    }


def test_flatten_keeps_lists_and_empty_sections():
    nested = {"a": {"b": {"c": 1}, "d": [1, 2]}, "e": {}}
    assert flatten(nested) == {"a.b.c": 1, "a.d": [1, 2], "e": {}}
