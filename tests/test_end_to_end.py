"""Stop a run or a sweep as you like and say --resume: the real command line, with Ray and MLflow."""

import csv
import json

import pytest
import yaml
from helpers import TINY
from processes import Command, alive, until

from rayfl.checkpoints import checksum, complete, read
from rayfl.cli import main
from rayfl.experiment import load_experiment
from rayfl.tracking.mlflow import Mlflow, default_uri
from rayfl.tracking.records import Run, runs
from rayfl.tuning import load_sweep

pytestmark = [
    pytest.mark.ray,
    # MLflow 3.17's tables use what SQLAlchemy 2.1 deprecates
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
]

ROUNDS = 60
EXPERIMENT = TINY | {
    "rounds": ROUNDS,
    "evaluation": {"every": 5},
    # every step of a run ends with a checkpoint
    "run": {"chunk": 1, "checkpoint_seconds": 0},
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
    return [{k: v for k, v in line.items() if k != "seconds"} for line in Run.open(folder).rounds()]


def made(folder):
    """How many rounds a run has recorded."""
    return len(Run.open(folder).rounds()) if Run.exists(folder) else 0


def straight(experiment, folder):
    """(lines, checksum of the state, client accuracies) of a serial run that nobody stopped."""
    simulation = experiment.simulation(experiment.data.load(), folder)
    lines = []
    while step := simulation.step():
        lines += [{k: v for k, v in line.items() if k != "seconds"} for line in step]
    clients = {str(id): value for id, value in simulation.client_accuracy().items()}
    return lines, checksum(simulation.state), clients


def recorded(folder):
    """The same, of a run's folder."""
    round, _, state, _ = read(complete(folder / "checkpoints")[-1])
    assert round == made(folder)
    return lines_of(folder), checksum(state), json.loads((folder / "clients.json").read_text())


def test_a_run_that_is_stopped_three_times(tmp_path, monkeypatch, capsys):
    config, output, folder = tmp_path / "tiny.yaml", tmp_path / "runs", tmp_path / "runs" / "tiny"
    config.write_text(yaml.safe_dump(EXPERIMENT | {"method": "fedrolex"}))
    arguments = ("run", config, "--output", output)

    first = Command(*arguments)
    until(lambda: made(folder) >= 5, first)
    first.interrupt()
    code, printed = first.finish()
    assert code == 130
    assert "the same command with --resume goes on" in printed and "Traceback" not in printed
    assert Run.open(folder).status == "stopped"
    assert complete(folder / "checkpoints")

    code, printed = rayfl(monkeypatch, capsys, *arguments)
    assert code == 2 and "holds a run already; --resume" in printed

    before = made(folder)
    second = Command(*arguments, "--resume")
    until(lambda: made(folder) >= before + 5, second)
    started = second.kill()
    assert second.finish()[0] == -9
    until(lambda: not alive(started))
    assert before + 5 <= made(folder) < ROUNDS

    code, printed = rayfl(monkeypatch, capsys, *arguments, "--resume", "--set", "training.lr=0.5")
    assert code == 2
    assert "training.lr: 0.1 there, 0.5 here" in printed
    newest = complete(folder / "checkpoints")[-1]
    with (newest / "state.safetensors").open("r+b") as file:
        file.truncate(100)
    # not even what runs it has to be the same
    code, printed = rayfl(monkeypatch, capsys, *arguments, "--resume", "--set", "run.executor=serial")
    assert code == 0, printed
    assert f"{newest.name}/state.safetensors" in printed and "going back to the checkpoint before it" in printed
    assert recorded(folder) == straight(load_experiment(config), tmp_path / "straight")
    ended = (folder / "clients.json").read_bytes()
    assert rayfl(monkeypatch, capsys, *arguments, "--resume", "--set", "run.executor=serial")[0] == 0
    assert (folder / "clients.json").read_bytes() == ended
    assert Run.open(folder).status == "finished"
    assert histories(output) == {("fedrolex", None): list(range(1, ROUNDS + 1))}


def histories(output):
    """(label, point) of each of MLflow's runs -> the steps of its training loss."""
    client = Mlflow(default_uri(output), "rayfl", note=pytest.fail)._client
    [experiment] = [e for e in client.search_experiments() if e.name == "rayfl"]
    found = {}
    for run in client.search_runs([experiment.experiment_id]):
        assert run.info.status == "FINISHED"
        name = (run.data.tags["rayfl.label"], run.data.tags.get("point"))
        history = client.get_metric_history(run.info.run_id, "train_loss")
        found[name] = sorted({metric.step for metric in history})
    return found
