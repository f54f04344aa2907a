"""Faults of real runs and sweeps, in processes of their own: what their folders say, and the bits after --resume."""

import os
import signal
import sys

import pytest
import yaml
from helpers import TINY
from processes import descendants, named, until

from rayfl.results.folder import RunFolder, runs

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_minute_of_chaos(start):
    code, printed = start("scripts/chaos.py", "--minutes", "1", "--seed", "0", program=(sys.executable,)).finish()
    assert code == 0, printed
    assert "runs equal to their serial twins" in printed


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
