"""The copy in MLflow: one run per run folder, each round once, sent at any time by any process."""

import csv
import functools
import json
import logging
import math
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rows import FACTS, line, study
from rows import folder as of_rows
from servers import answering, fail, late, trickle

import rayfl
from rayfl import cli, networks
from rayfl.config import ConfigError
from rayfl.engine.checkpoints import write
from rayfl.engine.client_states import ClientStates
from rayfl.results.drawing import styles_of
from rayfl.results.files import write_summed
from rayfl.results.folder import RunFolder
from rayfl.results.made import Made
from rayfl.results.mlflow import Copy, Reader, Sender, Store, copy, default_uri, models, sent, store, system, unsent
from rayfl.results.mlflow.sent import destine
from rayfl.results.mlflow.store import first_line
from rayfl.results.mlflow.study import Study
from rayfl.testing.tiny import TINY

# MLflow 3.17's tables use what SQLAlchemy 2.1 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """One store for the module: creating its tables takes seconds."""
    return default_uri(tmp_path_factory.mktemp("store"))


@pytest.fixture
def mlflow(uri, request, monkeypatch):
    """Every test has an experiment of its own, whatever its folders are called."""
    monkeypatch.setattr(copy, "experiment_of", lambda run: request.node.name)
    return Copy(Store(uri), note=pytest.fail)


def again(mlflow):
    """Return a copy as of another process on the same server."""
    return Copy(Store(mlflow.store.uri), note=pytest.fail)


def read(mlflow, *wanted):
    return Reader(Store(mlflow.store.uri), copy.experiment_of(None)).read(*wanted)


def create(path, label="heterofl", sweep=None, **config):
    tags = {"method": "heterofl", "seed": 1, "point": "lr=0.1"}
    return RunFolder.create(path, label, {"training": {"lr": 0.1}, "seed": 1} | config, tags, FACTS, sweep=sweep)


def lines(first, last):
    return [
        {
            "round": r,
            "seconds": 1.5,
            "evaluated": True,
            "accuracy_mean": r / 100,
            "bytes_down": 10,
            "refusals": "3: nan",
        }
        for r in range(first, last + 1)
    ]


def stored(mlflow):
    """All of MLflow's runs in the experiment."""
    experiment = mlflow.store.client.get_experiment_by_name(copy.experiment_of(None))
    return mlflow.store.client.search_runs([experiment.experiment_id])


def history(mlflow, run, metric="accuracy_mean"):
    found = mlflow.store.client.get_metric_history(run.info.run_id, metric)
    return sorted((m.step, m.value) for m in found)


def test_a_run_is_sent_once_over_processes_and_lost_memories(mlflow, tmp_path):
    run = create(tmp_path / "run")
    run.made = (run.made[0].model_copy(update={"commit": "abc123"}),)
    run.append(lines(1, 3))
    assert mlflow.sync(run) and mlflow.sync(run)
    run.append(lines(4, 5))
    assert again(mlflow).sync(RunFolder.open(run.path))
    (run.path / "mlflow.json").unlink()
    run.finish("finished")
    assert again(mlflow).sync(RunFolder.open(run.path))

    (found,) = stored(mlflow)
    assert history(mlflow, found) == [(r, r / 100) for r in range(1, 6)]
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "heterofl"
    assert found.data.params == {"training.lr": "0.1", "seed": "1"}
    assert found.data.tags["mlflow.source.git.commit"] == "abc123"
    assert read(mlflow)[0]["bytes_down"] == 50
    assert found.data.metrics["bytes_down"] == 10
    # what is no number
    assert not {"evaluated", "refusals"} & set(found.data.metrics)


def test_a_rerun_of_rounds_after_a_resume_is_not_sent_twice(mlflow, tmp_path):
    run = create(tmp_path / "run")
    run.append(lines(1, 6))
    run.finish("failed", "a node died")
    assert mlflow.sync(run)
    (failed,) = stored(mlflow)
    assert (failed.info.status, failed.data.tags["error"]) == ("FAILED", "a node died")

    run.resume()
    run.truncate_after(4)
    run.append([line | {"seconds": 9.0} for line in lines(5, 6)])
    assert again(mlflow).sync(run)
    assert stored(mlflow)[0].info.status == "RUNNING"
    assert "error" not in stored(mlflow)[0].data.tags
    run.append(lines(7, 8))
    run.title, run.facts = "HeteroFL", run.facts.model_copy(update={"rounds": 8})
    run.finish("finished")
    assert again(mlflow).sync(run)
    (found,) = stored(mlflow)
    assert (found.info.status, found.info.run_name, found.data.tags["title"]) == ("FINISHED", "HeteroFL", "HeteroFL")
    assert read(mlflow)[0]["facts"]["rounds"] == 8 and read(mlflow)[0]["error"] is None
    assert history(mlflow, found) == [(r, r / 100) for r in range(1, 9)]


def test_more_than_a_batch(mlflow, tmp_path):
    run = create(tmp_path / "run", many={f"p{i:03}": "x" * 7000 for i in range(150)})
    run.append([{"round": r} | {f"m{i}": float(r) for i in range(300)} for r in range(1, 6)])
    assert mlflow.sync(run)
    (found,) = stored(mlflow)
    assert len(found.data.params) == 152
    assert len(found.data.params["many.p149"]) == 6000
    assert history(mlflow, found, "m299") == [(r, float(r)) for r in range(1, 6)]


def test_a_sweep_is_the_parent_of_its_trials_and_reads_back(mlflow, tmp_path):
    sweep = RunFolder.create(tmp_path / "sweep", "digits", {"trials": 2}, {}, FACTS, kind="sweep")
    one = create(sweep.path / "one", "fedavg", sweep.id)
    two = create(sweep.path / "two", "heterofl", sweep.id)
    alone = create(tmp_path / "alone")
    one.append(lines(1, 2))
    one.finish("finished")
    two.finish("stopped")
    assert mlflow.sync(one), "a trial may come before its sweep"
    (sweep.path / "results.csv").write_text("method\n")
    (sweep.path / "plots").mkdir()
    (sweep.path / "plots" / "curves.png").write_bytes(b"png")
    for round in (5, 10):
        (one.path / "checkpoints" / f"round-{round:06}").mkdir(parents=True)
    alone.finish("finished")
    sweep.finish("finished")
    assert again(mlflow).sync_all(tmp_path) == 0

    found = {run.data.tags["rayfl.run_id"]: run for run in stored(mlflow)}
    row = found.pop(f"{sweep.id}/fedavg")
    assert len(found) == 4
    parent = found[sweep.id].info.run_id
    assert found[one.id].data.tags["mlflow.parentRunId"] == parent
    assert found[two.id].data.tags["mlflow.parentRunId"] == parent
    assert "mlflow.parentRunId" not in found[alone.id].data.tags
    assert found[two.id].info.status == "KILLED"
    assert found[sweep.id].info.run_name == "digits"
    assert found[two.id].info.run_name == "heterofl, lr=0.1, seed 1"
    assert row.info.run_name == "fedavg, mean of 1" and history(mlflow, row, "All/accuracy_mean")[-1] == (2, 0.02)
    files = {file.path for file in mlflow.store.client.list_artifacts(parent)}
    assert files == {"config.json", "plots", "results.csv"}

    rows = {row["label"]: row for row in read(mlflow, "run", sweep.id)}
    assert set(rows) == {"fedavg", "heterofl"}
    ours = one.record()
    del ours["path"]
    ours["params"] = {"training.lr": "0.1", "seed": "1"}
    more = {name: rows["fedavg"].pop(name) for name in ("tags", "made", "experiment")}
    assert rows["fedavg"] == ours
    assert more["experiment"] == copy.experiment_of(one) and more["tags"]["point"] == "lr=0.1"
    assert [Made(**made) for made in more["made"]] == list(one.made)
    assert {row["id"] for row in read(mlflow)} == {one.id, two.id, alone.id}


def test_only_the_last_checkpoint_is_stored(mlflow, tmp_path):
    run = create(tmp_path / "run")
    for round in (5, 10):
        folder = run.path / "checkpoints" / f"round-{round:06}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    run.finish("finished")
    assert mlflow.sync(run)
    run_id = stored(mlflow)[0].info.run_id
    kept = mlflow.store.client.list_artifacts(run_id, "checkpoints")
    assert [file.path for file in kept] == ["checkpoints/round-000010"]


def test_client_states_stay_in_the_run_folder(mlflow, tmp_path):
    run = create(tmp_path / "run")
    client_states = ClientStates(tmp_path / "client_states")
    for client in (3, 12):
        client_states.put(client, 0, {"w": torch.ones(2)})
    final = write(run.path / "checkpoints", 5, {}, {"params": {"w": torch.zeros(1)}}, client_states)
    run.finish("finished")
    assert mlflow.sync(run)
    (found,) = stored(mlflow)
    kept = mlflow.store.client.list_artifacts(found.info.run_id, "checkpoints/round-000005")
    assert {Path(file.path).name for file in kept} == {"kept.npy", "manifest.json", "state.safetensors"}
    assert found.data.tags["rayfl.client_states"] == f"in {final.parent / 'kept'}"


def test_a_missing_server_is_reported_once_and_receives_everything_later(mlflow, uri, tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    said = []
    mlflow.store, mlflow.note = Store(f"http://me:secret@127.0.0.1:{port}"), said.append
    first, second = create(tmp_path / "1"), create(tmp_path / "2")
    first.append(lines(1, 2))
    assert not mlflow.sync(first)
    first.finish("finished")
    assert mlflow.sync_all(tmp_path) == 2
    assert len(said) == 1
    assert said[0].startswith(f"MLflow at http://127.0.0.1:{port} fails: ")
    assert "secret" not in said[0]

    mlflow.store = Store(uri)
    assert mlflow.sync_all(tmp_path) == 0
    assert said[1:] == [f"MLflow at {uri} works again"]
    assert len(stored(mlflow)) == 2
    assert {row["status"] for row in read(mlflow)} == {"finished", "running"}
    assert second.id in {row["id"] for row in read(mlflow)}


def test_a_rejected_run_does_not_block_others(mlflow, tmp_path):
    said = []
    mlflow.note = said.append
    bad, good = create(tmp_path / "bad"), create(tmp_path / "good")
    bad.append([{"round": 1, "not a name!": 1.0}])
    good.append(lines(1, 1))
    assert mlflow.sync_all(tmp_path) == 1
    assert mlflow.sync_all(tmp_path) == 1
    assert len(said) == 1 and f"rejects {bad.path}" in said[0]
    found = {run.data.tags["rayfl.run_id"]: run for run in stored(mlflow)}
    assert len(history(mlflow, found[good.id])) == 1


def test_a_run_deleted_in_mlflow_stays_deleted(mlflow, tmp_path):
    run = create(tmp_path / "run")
    run.finish("finished")
    assert mlflow.sync(run)
    mlflow.store.client.delete_run(stored(mlflow)[0].info.run_id)
    assert again(mlflow).sync(run)
    assert stored(mlflow) == []


@pytest.mark.parametrize("memory", [{"version": 3, "run_id": "0" * 32, "round": 2, "status": "finished"}, [], None])
def test_a_record_of_another_store_or_a_damaged_one_is_ignored(mlflow, tmp_path, memory):
    run = create(tmp_path / "run")
    run.append(lines(1, 2))
    (run.path / "mlflow.json").write_text(json.dumps(memory) if memory is not None else '{"run_id')
    assert mlflow.sync(run)
    assert len(history(mlflow, stored(mlflow)[0])) == 2


def test_the_sender_flushes_at_its_end(mlflow, tmp_path):
    runs = [create(tmp_path / name) for name in "ab"]
    with Sender(mlflow, seconds=0.01) as sender:
        for run in runs:
            sender.add(run.path)
            run.append(lines(1, 4))
        runs[0].finish("finished")
    found = {run.data.tags["rayfl.run_id"]: run for run in stored(mlflow)}
    assert found[runs[0].id].info.status == "FINISHED"
    assert found[runs[1].id].info.status == "RUNNING"
    assert len(history(mlflow, found[runs[0].id])) == len(history(mlflow, found[runs[1].id])) == 4


TRICKLED = """
import sys
from pathlib import Path
from rayfl.results.mlflow import Copy, Sender, Store

Store.SILENT_SECONDS = 0.5
with Sender(Copy(Store(sys.argv[1]))) as sender:
    sender.add(Path(sys.argv[2]))
print("ended")
"""


@pytest.mark.slow
def test_a_server_that_never_ends_its_answer_does_not_block_the_end(mlflow, tmp_path):
    """The process ends all the same, and the next one sends what is there."""
    run = create(tmp_path / "run")
    run.append(lines(1, 2))
    run.finish("finished")
    with answering(trickle) as uri:
        command = [sys.executable, "-c", TRICKLED, uri, str(run.path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said, last = ended.stdout.splitlines()
    assert said == f"MLflow at {uri} has not answered for 0.5 s; the next command sends the rest"
    assert last == "ended"

    with Sender(mlflow, tmp_path):
        pass
    (found,) = stored(mlflow)
    assert found.info.status == "FINISHED" and len(history(mlflow, found)) == 2


def test_reading_from_a_server_that_never_ends_its_answer_fails(tmp_path, monkeypatch):
    """`rayfl compare` does both."""
    create(tmp_path / "run").finish("finished")
    monkeypatch.setattr(Store, "SILENT_SECONDS", 0.2)
    with answering(trickle) as uri:
        for ask in (Reader(Store(uri)).read, lambda: Copy(Store(uri)).sync_all(tmp_path)):
            with pytest.raises(ConfigError) as error:
                ask()
            assert str(error.value) == f"{uri}: MLflow has not answered for 0.2 s. Hint: try again later"


@pytest.mark.parametrize("answer", [fail, late(3)])
def test_a_failing_server_is_reported_once_and_receives_everything_later(mlflow, tmp_path, answer, monkeypatch):
    monkeypatch.setattr(Store, "SILENT_SECONDS", 1.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    said = []
    with answering(answer) as uri, Sender(Copy(Store(uri), note=said.append), seconds=0.1) as sender:
        run = create(tmp_path / "run")
        sender.add(run.path)
        for line in lines(1, 3):
            run.append([line])
            time.sleep(0.2)
        run.finish("finished")
    assert len(said) == 1 and said[0].startswith(f"MLflow at {uri} ")
    assert unsent(tmp_path) == [run.path]

    with Sender(mlflow, tmp_path):
        pass
    (found,) = stored(mlflow)
    assert found.info.status == "FINISHED" and len(history(mlflow, found)) == 3


def test_only_runs_that_ended_and_were_not_sent_are_sent_again(mlflow, tmp_path):
    runs = {name: create(tmp_path / name) for name in ("running", "sent", "stopped", "damaged")}
    for name in ("sent", "stopped", "damaged"):
        runs[name].finish("stopped")
    assert mlflow.sync(runs["sent"])
    (runs["damaged"].path / "run.json").write_text("{")
    assert unsent(tmp_path) == [runs["stopped"].path]


def test_the_sender_ignores_a_run_without_a_folder(mlflow, tmp_path):
    run = create(tmp_path / "run")
    with Sender(mlflow, seconds=3600) as sender:
        for path in (tmp_path / "never", run.path):
            sender.add(path)
        run.append(lines(1, 1))
    assert len(history(mlflow, stored(mlflow)[0])) == 1


def test_a_stopped_sweep_has_no_rows_yet(mlflow, tmp_path):
    """Parameters of a row cannot change when the sweep is resumed and another point is the best."""
    sweep = RunFolder.create(tmp_path / "sweep", "digits", {"trials": 2}, {}, FACTS, kind="sweep")
    one = create(sweep.path / "one", "fedavg", sweep.id)
    one.append(lines(1, 2))
    one.finish("finished")
    for status, more in (("stopped", []), ("finished", [f"{sweep.id}/fedavg"])):
        sweep.finish(status)
        assert again(mlflow).sync_all(tmp_path) == 0
        assert sorted(run.data.tags["rayfl.run_id"] for run in stored(mlflow)) == sorted([sweep.id, one.id, *more])


def test_a_folder_that_cannot_be_read_does_not_block_others(mlflow, tmp_path):
    said = []
    mlflow.note = said.append
    bad, good = create(tmp_path / "bad"), create(tmp_path / "good")
    (bad.path / "run.json").write_text("?")
    good.append(lines(1, 1))
    assert mlflow.sync_all(tmp_path) == 0
    assert [text.startswith(f"not sent to MLflow: {bad.path}") for text in said] == [True]
    assert [run.data.tags["rayfl.run_id"] for run in stored(mlflow)] == [good.id]


def test_an_error_is_said_without_the_password_of_its_address():
    error = Exception("API request to http://me:secret@host/api failed\nmore")
    assert first_line(error) == "API request to http://host/api failed"


def test_a_damaged_run_does_not_block_others(mlflow, tmp_path):
    said = []
    mlflow.note = said.append
    bad, good = create(tmp_path / "bad"), create(tmp_path / "good")
    (bad.path / "metrics.jsonl").write_text("?\n")
    good.append(lines(1, 1))
    assert mlflow.sync_runs([bad, good]) == [bad]
    assert len(said) == 1 and f"does not receive a damaged file: {bad.path}/metrics.jsonl: line 1: '?'" in said[0]
    found = {run.data.tags["rayfl.run_id"]: run for run in stored(mlflow)}
    assert len(history(mlflow, found[good.id])) == 1


def test_a_database_whose_creation_is_interrupted_is_made_again(tmp_path, monkeypatch):
    """MLflow never completes one that it finds half made."""

    def interrupted(uri, database):
        database.write_bytes(b"half")
        raise OSError("stopped")

    with monkeypatch.context() as broken:
        broken.setattr(store, "_connected", interrupted)
        with pytest.raises(OSError, match="stopped"):
            _ = Store(default_uri(tmp_path)).client
    assert not [*tmp_path.iterdir()]
    assert Store(default_uri(tmp_path)).experiments()
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_a_store_in_a_folder_of_any_name(tmp_path):
    """Its database, its artifacts, and nothing beside it."""
    output = tmp_path / "\xe9" / "a[b] c?d%20e#"
    run = create(output / "run")
    run.append(lines(1, 2))
    run.finish("finished")
    mlflow = Copy(Store(default_uri(output)), note=pytest.fail)
    assert mlflow.sync(run)
    assert [row["id"] for row in Reader(mlflow.store).read()] == [run.id]
    assert sorted(file.name for file in output.iterdir()) == ["artifacts", "mlflow.db", "run"]
    assert {file.name for file in output.rglob("artifacts/*/*/*")} == {"config.json", "metrics.jsonl", "result.json"}
    assert [file.name for file in output.parent.iterdir()] == [output.name]


def test_a_run_that_was_sent_without_its_facts_is_described_again(mlflow, tmp_path):
    """Runs sent by rayfl 0.4 are not read until their folders are sent again."""
    run = create(tmp_path / "run")
    run.append(lines(1, 2))
    run.finish("finished")
    assert mlflow.sync(run)
    run_id = stored(mlflow)[0].info.run_id
    mlflow.store.client.delete_tag(run_id, "rayfl.facts")
    assert read(mlflow) == []
    memory = json.loads((run.path / "mlflow.json").read_text())
    del memory["version"]
    (run.path / "mlflow.json").write_text(json.dumps(memory))
    assert again(mlflow).sync(run)
    assert [row["facts"] for row in read(mlflow)] == [FACTS]
    assert len(history(mlflow, stored(mlflow)[0])) == 2


def test_a_run_deleted_while_it_is_sent_does_not_block_others(mlflow, tmp_path, monkeypatch):
    gone, kept = create(tmp_path / "a"), create(tmp_path / "b")
    send = Copy._send

    def delete(self, run):
        if run.path == gone.path:
            shutil.rmtree(run.path)
        send(self, run)

    monkeypatch.setattr(Copy, "_send", delete)
    kept.append(lines(1, 1))
    assert mlflow.sync_runs([gone, kept]) == []
    found = {run.data.tags["rayfl.run_id"]: run for run in stored(mlflow)}
    assert len(history(mlflow, found[kept.id])) == 1


def test_reading_without_server_or_experiment(mlflow, tmp_path):
    with pytest.raises(ConfigError, match="the file does not exist. Hint: run a sweep first"):
        Reader(Store(default_uri(tmp_path))).read()
    assert list(tmp_path.iterdir()) == []
    mlflow.sync(create(tmp_path / "run"))
    wrong = Reader(mlflow.store, copy.experiment_of(None)[:-1])
    with pytest.raises(ConfigError, match="there is no experiment .*. Did you mean 'test_reading"):
        wrong.read()


AS_RAY_TUNE = """
import sys
from rayfl.results.mlflow import Copy, Sender, Store

with Sender(Copy(Store("sqlite:///nowhere.db"))):
    assert sys.modules["mlflow"].MlflowClient
    import ray.air.integrations.mlflow
    from mlflow.telemetry import get_telemetry_client

assert get_telemetry_client() is None
"""


@pytest.mark.slow
def test_ray_tune_imports_mlflow_completely_and_without_telemetry(tmp_path):
    # of the environment nothing, for where a test or CI runs mlflow has no telemetry anyway
    subprocess.run([sys.executable, "-c", AS_RAY_TUNE], cwd=tmp_path, env={"HOME": str(tmp_path)}, check=True)


def test_nothing_is_logged_to_the_terminal(mlflow):
    mlflow.store.client  # noqa: B018 (the connection is what configures logging)
    assert logging.getLogger("mlflow").level == logging.ERROR
    assert logging.getLogger("alembic").level == logging.ERROR


# studies


def test_an_experiment_is_a_study(tmp_path):
    sweep = study(tmp_path / "quick", rounds=1)
    run = create(tmp_path / "alone")
    trial = RunFolder.open(next((sweep.path / "trials").iterdir()))
    assert [sent.experiment_of(one) for one in (sweep, trial, run)] == ["quick", "quick", "alone"]
    destine(sweep.path, "ours")
    destine(run.path, "mine")
    assert [sent.experiment_of(one) for one in (sweep, trial, run)] == ["ours", "ours", "mine"]


def test_the_description_of_a_sweep(mlflow, tmp_path):
    scores = {"heterofl": 0.8, "fjord": 0.6}
    sweep = study(
        tmp_path / "quick",
        rates=(0.1, 0.4),
        rounds=2,
        score=lambda row, lr, seed, r: scores[row] + seed / 100 - lr + r / 10,
    )
    assert mlflow.sync_all(tmp_path) == 0
    found = {run.data.tags["rayfl.run_id"]: run for run in stored(mlflow)}
    parent = found[sweep.id]
    # of the best point, over rounds and the seeds 0, 1, 2
    assert history(mlflow, parent, "heterofl/accuracy_mean") == [(1, pytest.approx(0.81)), (2, pytest.approx(0.91))]
    assert parent.data.metrics["fjord/accuracy_mean_std"] == pytest.approx(0.01)
    [shown] = [
        line for line in parent.data.tags["mlflow.note.content"].splitlines() if "Heterofl" in line and "|" in line
    ]
    # MLflow sets cells side by side
    assert "91.00 ± 1.00" in shown and shown.count("&ensp;|") == shown.count("|") - 1
    for part in ("Which one?", sweep.made[0].command, sweep.made[0].commit, f"torch {torch.__version__.split('+')[0]}"):
        assert part in parent.data.tags["mlflow.note.content"]
    assert parent.data.tags["mlflow.user"] == sweep.made[0].user

    # a run a row stands beside the parent, not below it
    rows = [run for run in found.values() if run.data.tags["rayfl.kind"] == "row"]
    assert [run.info.run_name for run in rows] == ["Heterofl, mean of 3", "Fjord, mean of 3"]
    styles = styles_of(["heterofl", "fjord"])
    assert all(run.data.tags["mlflow.runColor"] == styles[run.data.tags["label"]]["color"] for run in rows)
    assert all("mlflow.parentRunId" not in run.data.tags for run in rows)
    assert rows[0].data.params == {"training.lr": "0.1"}
    assert history(mlflow, rows[0], "All/accuracy_mean") == history(mlflow, parent, "heterofl/accuracy_mean")

    # both rows had the same data, and with each seed the same partition
    used = [sorted((one.dataset.name, one.dataset.digest) for one in run.inputs.dataset_inputs) for run in rows]
    assert used[0] == used[1] and [name for name, _ in used[0]] == ["digits", "iid", "iid", "iid"]
    assert len({digest for _, digest in used[0]}) == 4
    [experiment] = mlflow.store.experiments(f"name = '{copy.experiment_of(sweep)}'")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    page = mlflow.page(sweep.path)
    assert page.startswith(f"#/experiments/{experiment.experiment_id}/runs?")

    # the page lists rows with their scores
    view = json.loads(experiment.tags[copy.VIEW])
    assert page.endswith("&viewStateShareKey=rayfl") and copy.VIEW.endswith(".rayfl")
    assert view["selectedColumns"][0] == "metrics.`All/accuracy_mean`"
    assert view["selectedColumns"][-2:] == ["metrics.`accuracy_mean`", "params.`training.lr`"]
    again = copy.Copy(mlflow.store)
    assert again.sync(sweep) and again.page(sweep.path) == page


def test_a_seed_that_ended_earlier_keeps_its_last_value(mlflow, tmp_path):
    """As in the table: seeds that ended after rounds 2 and 4, at 0.2 and 0.8."""
    sweep = RunFolder.create(tmp_path / "early", "early", {"search": {}}, {}, FACTS, kind="sweep")
    for seed, rounds in enumerate((2, 4)):
        made = [line(r, accuracy_mean=(1 + seed) * r / 10, loss_mean=1 / r) for r in range(1, rounds + 1)]
        of_rows(sweep.path / "trials" / str(seed), "fedavg", made, seed=seed, sweep=sweep.id)
    found = Study.of(sweep)
    assert dict(found.summary()["fedavg/accuracy_mean"]) == pytest.approx({1: 0.15, 2: 0.3, 3: 0.4, 4: 0.5})
    assert found.first_runs()["fedavg"]["seed"] == 0


def test_charts_over_simulated_time(mlflow, tmp_path):
    """All rows have a clock: it is the horizontal axis, and the sweep's own run has last values only, as bars."""
    sweep = study(tmp_path / "timed", rounds=2, clock={"heterofl": 2.0, "fjord": 3.0})
    assert mlflow.sync_all(tmp_path) == 0
    [experiment] = mlflow.store.experiments(f"name = '{copy.experiment_of(sweep)}'")
    axis = json.loads(experiment.tags[copy.VIEW])["globalLineChartConfig"]
    assert (axis["xAxisKey"], axis["selectedXAxisMetricKey"]) == ("metric", "sim_time")
    rows = {run.data.tags["label"]: run for run in stored(mlflow) if run.data.tags["rayfl.kind"] == "row"}
    assert history(mlflow, rows["heterofl"], "sim_time") == [(1, 2.0), (2, 4.0)]
    assert history(mlflow, rows["fjord"], "sim_time") == [(1, 3.0), (2, 6.0)]
    [parent] = [run for run in stored(mlflow) if run.data.tags["rayfl.run_id"] == sweep.id]
    [(round, _)] = history(mlflow, parent, "fjord/accuracy_mean")
    assert round == 2


def test_a_result_of_any_length_comes_back_exactly(mlflow, tmp_path):
    run = create(tmp_path / "run")
    numbers = {f"local_accuracy_{i}": 1 / (3 + i) for i in range(1000)}
    run.append(lines(1, 1))
    run.finish("finished")
    write_summed(run.path / "result.json", run.result | numbers | {"nothing": float("nan")})
    assert mlflow.sync(run)
    [row] = read(mlflow)
    assert {name: row[name] for name in numbers} == numbers and math.isnan(row["nothing"])
    assert set(stored(mlflow)[0].data.metrics) == {"accuracy_mean", "bytes_down", "seconds"}


def test_a_cohort_of_any_size_has_the_same_metrics():
    of = [
        rayfl.run(
            TINY | {"rounds": 1, "data": {"name": "synthetic", "samples": 400}, "clients": {"count": n, "cohort": n}}
        )
        for n in (5, 100)
    ]
    assert [result.lines[0]["clients"] for result in of] == [5, 100]
    assert of[0].lines[0].keys() == of[1].lines[0].keys() and of[0].summary.keys() == of[1].summary.keys()


class Clock:
    """A monitor as MLflow's, which counts."""

    def __init__(self):
        self.count = 0

    def collect_metrics(self):
        self.count += 1

    def aggregate_metrics(self):
        return {"cpu_utilization_percentage": self.count}

    def clear_metrics(self):
        pass


def test_system_metrics_are_of_the_folder_and_sent_once(mlflow, tmp_path, monkeypatch):
    monkeypatch.delenv(system.SWITCH, raising=False)
    assert system.Sampler.wanted(pytest.fail) is None
    run = create(tmp_path / "run")
    sampler = system.Sampler([Clock()])
    sampler.sample(run.path)
    assert mlflow.sync(run)
    sampler.sample(run.path)
    system.Sampler([Clock()]).sample(run.path)
    assert again(mlflow).sync(run)
    name = "system/cpu_utilization_percentage"
    assert history(mlflow, stored(mlflow)[0], name) == [(1, 1.0), (2, 2.0), (3, 1.0)]


def test_a_submodel_is_a_model_of_mlflow(mlflow, tmp_path, monkeypatch):
    """It answers as `Result.submodel` does, and can be registered."""
    monkeypatch.setattr(models, "experiment_of", copy.experiment_of)
    sweep = RunFolder.create(tmp_path / "sweep", "sweep", {"search": {}}, {}, FACTS, kind="sweep")
    result = rayfl.run(TINY | {"method": "heterofl", "rounds": 1}, sweep.path / "trials" / "one")
    run = result.folder
    run.sweep = sweep.id
    run.finish("finished")
    sweep.finish("finished")
    assert mlflow.sync_all(tmp_path) == 0
    capacities = result.experiment.clients.all_capacities
    log = functools.partial(
        models.log_models, mlflow, sweep, lambda path: networks.deployments(path, notify=pytest.fail)
    )
    assert log() == len(capacities) and log() == 0
    [found] = [one for one in stored(mlflow) if one.data.tags["rayfl.run_id"] == run.id]
    logged = [mlflow.store.client.get_logged_model(one.model_id) for one in found.outputs.model_outputs]
    assert {one.tags["capacity"] for one in logged} == {f"{capacity:g}" for capacity in capacities}
    for one in logged:
        assert one.params == found.data.params and one.params["method.name"] == "heterofl"
        assert {metric.key: metric.value for metric in one.metrics} == found.data.metrics
    assert history(mlflow, found) == [(1, result.lines[0]["accuracy_mean"])]

    import mlflow as library
    from mlflow import pytorch

    library.set_tracking_uri(mlflow.store.uri)
    x = torch.randn(3, *result.experiment.model.example(1, "cpu").shape[1:])
    for one in logged:
        loaded = pytorch.load_model(one.model_uri)
        assert torch.equal(loaded(x), result.submodel(float(one.tags["capacity"]))(x))
    version = library.register_model(logged[0].model_uri, "small")
    assert version.source == logged[0].model_uri


def test_files_written_after_the_end_are_sent_too(mlflow, tmp_path):
    """`rayfl run` writes its plots after the run has ended, `rayfl report` at any time."""
    run = create(tmp_path / "run")
    names = ("labels.png", "weights.png", "heterofl/submodels.png")

    def sent_plots():
        run_id, client = stored(mlflow)[0].info.run_id, mlflow.store.client
        found = [file for folder in ("plots", "plots/heterofl") for file in client.list_artifacts(run_id, folder)]
        return {file.path for file in found if not file.is_dir}

    with Sender(mlflow, seconds=3600) as sender:
        sender.add(run.path)
        run.finish("finished")
        assert mlflow.sync(run) and sent_plots() == set()
        for name in names[:2]:
            (run.path / "plots").mkdir(exist_ok=True)
            (run.path / "plots" / name).write_bytes(b"png")
    assert sent_plots() == {f"plots/{name}" for name in names[:2]} and unsent(tmp_path) == []
    (run.path / "plots" / "heterofl").mkdir()
    (run.path / "plots" / names[2]).write_bytes(b"png")
    assert unsent(tmp_path) == [run.path] and mlflow.sync_all(tmp_path) == 0
    assert sent_plots() == {f"plots/{name}" for name in names} and unsent(tmp_path) == []


def test_an_experiment_is_described_by_the_question_of_its_first_sweep(mlflow, tmp_path):
    for question in ("", "Is it better?", "Is it worse?"):
        config = {"question": question, "search": {}}
        assert mlflow.sync(RunFolder.create(tmp_path / f"s{question}", "sweep", config, {}, FACTS, kind="sweep"))
    experiment = mlflow.store.client.get_experiment_by_name(copy.experiment_of(None))
    assert experiment.tags["mlflow.note.content"] == "Is it better?"


def test_own_data_are_named_by_their_function(mlflow, tmp_path):
    run = create(tmp_path / "run", data={"name": "function", "of": "mydata:load"}, partition={"name": "iid"})
    assert mlflow.sync(run)
    [found] = stored(mlflow)
    assert [one.dataset.name for one in found.inputs.dataset_inputs] == ["mydata:load", "iid"]


def test_an_error_of_a_model_is_reported_and_fails_nothing(mlflow, tmp_path):
    sweep, said = study(tmp_path / "quick", rounds=1), []
    mlflow.note = said.append

    def broken(path):
        raise ArithmeticError("on purpose")

    assert models.log_models(mlflow, sweep, broken) == 0
    assert said == [f"MLflow at {mlflow.store} receives no more models: on purpose"]
    said.clear()
    assert models.log_models(mlflow, sweep, lambda path: networks.place_of(path, best=False)) == 0
    rows = models.Study.of(sweep).first_runs()
    assert len(rows) > 1
    assert [line.partition(": ")[0] for line in said] == [
        f"MLflow at {mlflow.store} receives no models of {label}" for label in rows
    ]


@pytest.mark.slow
def test_studies_of_several_servers_side_by_side(mlflow, tmp_path, monkeypatch, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    study(here / "quick", rounds=1)
    slow = study(there / "slow", rounds=1, labels=("fedavg", "fjord"), score=lambda row, lr, seed, r: 0.5 + seed / 7)
    of_rows(there / "slow" / "trials" / "nefl", "nefl", status="failed", sweep=slow.id)
    for folder, uri in ((here, mlflow.store.uri), (there, default_uri(there))):
        assert Copy(Store(uri), note=pytest.fail).sync_all(folder) == 0
    servers = ["--tracking-uri", mlflow.store.uri, "--tracking-uri", default_uri(there)]
    where = ["--output", str(tmp_path / "nowhere"), *servers]
    cli.app(["compare", "quick", "slow", *where, "--format", "csv"], standalone_mode=False)
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert len(rows) == 12
    assert {row["method"] for row in rows} == {"quick/heterofl", "quick/fjord", "slow/fedavg", "slow/fjord"}
    cli.app(
        ["compare", "slow", *where, "--tag", "seed=2", "--tag", "method=fjord", "--format", "csv"],
        standalone_mode=False,
    )
    [row] = csv.DictReader(capsys.readouterr().out.splitlines())
    assert (row["method"], row["seed"]) == ("fjord", "2")
    cli.app(["compare", "slow", *where], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "No significant difference between Fedavg and Fjord: 0.00 points over 3 seeds, p = 1" in printed
    assert "nefl: not ranked, because no finished trial has a finite accuracy_mean" in printed
    # a sweep on both servers has its rows once
    assert Copy(Store(mlflow.store.uri), note=pytest.fail).sync_all(there) == 0
    cli.app(["compare", "slow", *where, "--format", "csv"], standalone_mode=False)
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [(row["method"], row["seed"]) for row in rows] == [(m, s) for m in ("fedavg", "fjord") for s in "012"]
    with pytest.raises(ConfigError, match="no sweep is called 'quik'. Did you mean 'quick'"):
        cli.app(["compare", "quik", *where], standalone_mode=False)
    capsys.readouterr()
    cli.app(["compare", "slow", *where, "--metric", "bytes_down"], standalone_mode=False)
    with pytest.raises(ConfigError) as error:
        cli.app(["compare", "slow", *where, "--metric", "error"], standalone_mode=False)
    assert str(error.value).startswith("--metric: no metric is called 'error'. Allowed: accuracy_1, accuracy_mean, ")
    assert "title" not in str(error.value)
