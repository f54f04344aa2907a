"""Faults of real runs and sweeps, in processes of their own: what their folders say, and the bits after --resume."""

import os
import signal
import sys

import pytest
import yaml
from helpers import TINY
from processes import descendants, named, until

from rayfl.engine.checkpoints import complete
from rayfl.results.folder import RunFolder, runs

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_minute_of_chaos(start):
    code, printed = start("scripts/chaos.py", "--minutes", "1", "--seed", "0", program=(sys.executable,)).finish()
    assert code == 0, printed
    assert "runs equal to their serial twins" in printed


@pytest.mark.parametrize("to_ray", [signal.SIGTERM, signal.SIGKILL])
def test_who_ends_everything_gets_a_checkpoint_where_there_can_be_one(start, tmp_path, to_ray):
    """As of a machine that is taken away: all processes are told, or Ray's are gone already."""
    config, folder = tmp_path / "tiny.yaml", tmp_path / "runs" / "tiny"
    config.write_text(yaml.safe_dump(TINY | {"rounds": 2000, "run": {"chunk": 1, "actors": 2}}))
    command = start("run", config, "--output", tmp_path / "runs")
    until(lambda: RunFolder.exists(folder) and len(RunFolder.open(folder).rounds()) >= 5, command)
    command.terminate()
    for pid in descendants(command.process.pid):
        os.kill(pid, to_ray)
    code, printed = command.finish()
    assert (code, printed.splitlines()[-1]) == (
        143,
        "stopped; the same command with --resume goes on from the last checkpoint",
    )
    record = RunFolder.open(folder)
    assert record.status == "stopped"
    saved = [path.name for path in complete(folder / "checkpoints")]
    assert saved == ([f"round-{len(record.rounds()):06}"] if to_ray == signal.SIGTERM else [])


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_a_sweep_whose_ray_dies_says_so(start, tmp_path, name):
    config, folder = tmp_path / "small.yaml", tmp_path / "runs" / "small"
    experiment = TINY | {"rounds": 500, "run": {"chunk": 1}}
    config.write_text(yaml.safe_dump({"experiment": experiment, "rows": {"avg": {"method": "fedavg"}}}))
    command = start("sweep", config, "--output", tmp_path / "runs")

    def trials():
        return [run for run in runs(folder) if run.kind == "run"] if folder.exists() else []

    until(lambda: any(len(trial.rounds()) >= 5 for trial in trials()), command)
    [process] = named(descendants(command.process.pid), f"/{name}")
    os.kill(process, signal.SIGKILL)
    code, printed = command.finish()
    assert code == 1, printed
    record = RunFolder.open(folder)
    assert record.status == "failed" and f"({name}) died; the same command with --resume goes on" in str(record.error)
    assert [trial.status for trial in trials()] == ["stopped"]
