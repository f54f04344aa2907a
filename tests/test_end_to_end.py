"""Stop a run or a sweep as you like and say --resume: the real command line, with Ray and MLflow."""

import csv
import os
import re
import signal
import sys

import pytest
import yaml
from helpers import TINY, simulate
from processes import alive, assert_terminated, descendants, named, until

from rayfl.cli import main
from rayfl.engine.checkpoints import complete, read
from rayfl.engine.files import checksum
from rayfl.experiment import load_experiment
from rayfl.results.folder import RunFolder, runs
from rayfl.results.mlflow import Store, default_uri
from rayfl.tuning.load import load_sweep

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROUNDS = 40
EXPERIMENT = TINY | {
    "rounds": ROUNDS,
    "evaluation": {"every": 5},
    # every step of a run ends with a checkpoint
    "run": {"chunk": 1, "actors": 1, "checkpoint_seconds": 0},
}


@pytest.fixture(autouse=True)
def embedded_defaults(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def rayfl(monkeypatch, capsys, *arguments):
    """A command in this process: (exit code, what it printed)."""
    monkeypatch.setattr("sys.argv", ["rayfl", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return ended.value.code or 0, printed.out + printed.err


def lines_of(folder):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in RunFolder.open(folder).rounds()]


def made(folder):
    """How many rounds a run has recorded."""
    return len(RunFolder.open(folder).rounds()) if RunFolder.exists(folder) else 0


def straight(experiment, folder):
    """(lines, checksum of the state, clients' scores) of a serial run that nobody stopped."""
    simulation = simulate(experiment, folder)
    lines = []
    while step := simulation.step():
        lines += [{k: v for k, v in line.items() if k != "seconds"} for line in step]
    return lines, checksum(simulation.state), simulation.client_scores.tolist()


def recorded(folder):
    """The same, of a run's folder."""
    found = read(complete(folder / "checkpoints")[-1])
    assert found.round == made(folder)
    return lines_of(folder), checksum(found.state), RunFolder.open(folder).client_scores.tolist()


def working(pids):
    """Return running processes without Ray's agents, which hold nothing and end within a minute."""
    running = alive(pids)
    return set(running) - set(named(running, "ray::DashboardAgent")) - set(named(running, "ray::RuntimeEnvAgent"))


def test_a_run_that_is_stopped_four_times(start, tmp_path, monkeypatch, capsys):
    # Ray's tags and sockets are ASCII
    config, output, folder = tmp_path / "größe.yaml", tmp_path / "läufe", tmp_path / "läufe" / "größe"
    (tmp_path / "größe").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "größe"))
    # long enough to be stopped in: some seconds are left when it is
    training = {"batch_size": 5, "steps": 20}
    config.write_text(yaml.safe_dump(EXPERIMENT | {"method": "fedrolex", "training": training}))
    arguments = ("run", config, "--output", output)

    first = start(*arguments)
    until(lambda: made(folder) >= 5, first)
    first.interrupt()
    code, printed = first.finish()
    assert code == 130
    assert "to continue: rayfl" in printed and "Traceback" not in printed
    assert RunFolder.open(folder).status == "stopped"
    assert complete(folder / "checkpoints")

    code, printed = rayfl(monkeypatch, capsys, *arguments)
    assert code == 2 and "the folder holds a run. Allowed: a new folder, or --resume to continue the run" in printed

    before = made(folder)
    second = start(*arguments, "--resume", "--set", "run.checkpoint_seconds=1000")
    until(lambda: made(folder) >= before + 5, second)
    second.terminate()
    assert_terminated(second, folder)
    assert complete(folder / "checkpoints")[-1].name == f"round-{made(folder):06}"

    before = made(folder)
    third = start(*arguments, "--resume")
    until(lambda: made(folder) >= before + 5, third)
    started = third.kill()
    assert third.finish()[0] == -9
    until(lambda: not working(started))
    assert before + 5 <= made(folder) < ROUNDS

    code, printed = rayfl(monkeypatch, capsys, *arguments, "--resume", "--set", "training.lr=0.5")
    assert code == 2
    assert "training.lr: 0.05 -> 0.5" in printed
    newest = complete(folder / "checkpoints")[-1]
    with (newest / "state.safetensors").open("r+b") as file:
        file.truncate(100)
    # not even what runs it has to be the same
    code, printed = rayfl(monkeypatch, capsys, *arguments, "--resume", "--set", "run.executor=serial")
    assert code == 0, printed
    assert f"{newest.name}/state.safetensors" in printed and "Using the checkpoint before it" in printed
    assert recorded(folder) == straight(load_experiment(config), tmp_path / "straight")
    ended = (folder / "clients.npy").read_bytes()
    assert rayfl(monkeypatch, capsys, *arguments, "--resume", "--set", "run.executor=serial")[0] == 0
    assert (folder / "clients.npy").read_bytes() == ended
    assert RunFolder.open(folder).status == "finished"
    assert histories(output) == {("fedrolex", None): list(range(1, ROUNDS + 1))}


def histories(output):
    """(label, point) of each of MLflow's runs -> the steps of its training loss."""
    store = Store(default_uri(output))
    client, found = store.client, {}
    for run in store.search([e.experiment_id for e in store.experiments()], "tags.`rayfl.kind` != 'row'"):
        assert run.info.status == "FINISHED"
        name = (run.data.tags["label"], run.data.tags.get("point"))
        history = client.get_metric_history(run.info.run_id, "train_loss")
        found[name] = sorted({metric.step for metric in history})
    return found


def test_a_run_whose_gcs_dies_says_so(start, tmp_path):
    """Ray's core would end the process within a minute, with a run that seems to go on."""
    config, folder = tmp_path / "tiny.yaml", tmp_path / "runs" / "tiny"
    config.write_text(yaml.safe_dump(EXPERIMENT | {"rounds": 2000}))
    command = start("run", config, "--output", tmp_path / "runs")
    until(lambda: made(folder) >= 5, command)
    [gcs] = named(descendants(command.process.pid), "/gcs_server")
    os.kill(gcs, signal.SIGKILL)
    code, printed = command.finish()
    said = (
        "Ray's control process (gcs_server) died. Run the same command with --resume to continue from the last "
        "checkpoint"
    )
    assert (code, printed.splitlines()[-1]) == (1, f"failed: {said}")
    assert (RunFolder.open(folder).status, RunFolder.open(folder).error) == ("failed", said)
    assert complete(folder / "checkpoints")


SWEEP = {
    "experiment": EXPERIMENT,
    "rows": {"smallest": {"method": {"name": "fedavg", "size": "smallest"}}, "heterofl": {"method": "heterofl"}},
    "search": {"space": {"training.lr": {"grid": [0.02, 0.2]}}, "seeds": [0, 1]},
}


WATCHED = """
import sys, threading

class Watch:
    def find_spec(self, name, *_):
        if name == "torch._dynamo":
            print("compiler imported by", threading.current_thread().name, flush=True)

sys.meta_path.insert(0, Watch())
from rayfl.cli import main
main()
"""
"""The command line that tells which thread imports torch's compiler. Meanwhile `_operator` and `_heapq` cannot be
imported, in any thread: Ray Tune failed with "import of _operator halted"."""


def trials_of(folder):
    return [run for run in runs(folder) if run.kind == "run"] if folder.exists() else []


def test_a_sweep_that_is_killed(start, tmp_path, monkeypatch, capsys):
    """One that is terminated is in `clusters/test_storage.py`."""
    config, output, folder = tmp_path / "small.yaml", tmp_path / "runs", tmp_path / "runs" / "small"
    config.write_text(yaml.safe_dump(SWEEP))
    arguments = ("sweep", config, "--output", output)

    def well_on():
        return sum(made(trial.path) for trial in trials_of(folder)) >= 2.5 * ROUNDS

    first = start(*arguments)
    until(well_on, first)
    started = first.kill()
    assert first.finish()[0] == -9
    until(lambda: not working(started))
    unfinished = [trial for trial in trials_of(folder) if trial.status != "finished"]
    assert unfinished and not (folder / "results.csv").exists()
    # as if the kill had hit Tune in the middle of a snapshot
    torn = [file for file in (folder / "tune" / "search").iterdir() if file.suffix in (".json", ".pkl")]
    assert len(torn) >= 3
    for file in torn:
        file.write_bytes(b"")

    code, printed = start(*arguments, "--resume", program=(sys.executable, "-c", WATCHED)).finish()
    assert code == 0, printed
    for word in ("warning", "traceback", "error"):
        assert word not in printed.lower(), printed
    assert re.findall("compiler imported by (.*)", printed) == ["MainThread"]

    # every trial ran its full rounds, to the bits of a serial run
    sweep, best = load_sweep(config), {}
    trials = trials_of(folder)
    assert len(trials) == 2 * 2 + 2
    for trial in trials:
        assert trial.status == "finished"
        point = {"training.lr": trial.config["training"]["lr"]}
        seed = trial.config["seed"]
        expected = straight(sweep.experiment(trial.label, point, seed), tmp_path / trial.id)
        assert recorded(trial.path) == expected
        if seed == 0:
            accuracy = expected[0][-1]["validation_accuracy_mean"]
            best[trial.label] = max(best.get(trial.label, (0, 0)), (accuracy, -point["training.lr"]))
    confirmed = {trial.label: trial.config["training"]["lr"] for trial in trials if trial.config["seed"] == 1}
    assert confirmed == {label: -lr for label, (_, lr) in best.items()}

    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    accuracies = ["accuracy_mean", "accuracy_worst", *(f"accuracy_{c:g}" for c in TINY["clients"]["capacities"])]
    costs = ["bytes_down", "bytes_up", "train_flops", "seconds"]
    search = ["training.lr", "training.lr place", "doubts"]
    assert list(rows[0]) == ["method", "title", "seed", *accuracies, "loss_mean", *costs, "standing", *search]
    assert sorted((row["method"], row["seed"]) for row in rows) == [
        (label, seed) for label in ("heterofl", "smallest") for seed in "01"
    ]
    for row in rows:
        [trial] = [
            t
            for t in trials
            if t.label == row["method"]
            and str(t.config["seed"]) == row["seed"]
            and t.config["training"]["lr"] == confirmed[t.label]
        ]
        assert float(row["accuracy_mean"]) == trial.result["accuracy_mean"]
        assert float(row["training.lr"]) == confirmed[row["method"]] and row["training.lr place"].endswith(" of 2")

    # MLflow: one parent, and every trial once with all its rounds
    found = histories(output)
    assert found.pop(("small", None)) == []
    assert len(found) == 4
    assert all(steps == list(range(1, ROUNDS + 1)) for steps in found.values())

    # the tables, from MLflow and from the folder
    table = (folder / "results.csv").read_text()
    code, printed = rayfl(monkeypatch, capsys, "compare", "small", "--output", output, "--format", "csv")
    assert (code, sorted(printed.splitlines())) == (0, sorted(table.splitlines()))
    for form, mark in (("markdown", "| heterofl |"), ("latex", "heterofl &"), ("table", "heterofl")):
        code, printed = rayfl(monkeypatch, capsys, "compare", "--output", output, "--format", form)
        assert code == 0 and mark in printed
    code, printed = rayfl(monkeypatch, capsys, "compare", "smal", "--output", output)
    assert code == 2 and "no sweep is called 'smal'" in printed and "small" in printed
    (folder / "results.csv").unlink()
    code, printed = rayfl(monkeypatch, capsys, "report", folder)
    assert code == 0 and (folder / "results.csv").read_text() == table
