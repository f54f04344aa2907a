"""Faults of real runs and sweeps, in processes of their own: what their folders say, and the bits after --resume."""

import json
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from helpers import TINY, PersonalHead, run, simulate, tiny
from processes import descendants, named, until

from rayfl.engine.checkpoints import complete, read
from rayfl.engine.files import checksum
from rayfl.results.folder import RunFolder, runs

GIB = 2**30
pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_some_seconds_of_chaos(start):
    given = ("--minutes", "0.1", "--rounds", "8", "--seed", "0")
    code, printed = start("scripts/chaos.py", *given, program=(sys.executable,)).finish()
    assert code == 0, printed
    for count in (r"^ *all +(\d+)", r"^(\d+) runs equal to their serial twins"):
        assert int(re.findall(count, printed, re.M)[0]) > 0, printed


PROGRAM = """
import json, sys
from pathlib import Path
import rayfl
import ray
from faults import Faulty, Impatient
from helpers import tiny

folder, fault, options = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
if options:
    ray.init(address="local", include_dashboard=False, log_to_driver=False, **options)
run = {"executor": "ray", "chunk": 1, "cpus": 0.5, "actors": 2, "checkpoint_seconds": 0}
sections = json.loads(sys.argv[4]) | {"run": run, "listeners": [Impatient(seconds=float(sys.argv[5]))]}
rayfl.run(tiny(method=Faulty(**fault), **sections), folder, resume=(folder / "run.json").exists())
if options:
    from ray._private.internal_api import memory_summary
    print(memory_summary(ray.get_runtime_context().gcs_address, stats_only=True))
"""


def assert_serial(folder, sections, other):
    """A run's lines and last state have the bits of a serial one without faults."""
    simulation = simulate(tiny(method=PersonalHead(), **sections), other)
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in RunFolder.open(folder).rounds()]
    assert lines == run(simulation)
    assert checksum(read(complete(folder / "checkpoints")[-1]).state) == checksum(simulation.state)


@pytest.fixture
def disturbed(start, tmp_path, monkeypatch):
    """Starts a run with a fault in a process of its own: (the command, its folder)."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))

    def begin(fault, sections, patience=600, **options):
        given = {"client": 4, "fault": "die", "times": 0, "marker": str(tmp_path / "marker")} | fault
        arguments = [tmp_path / "run", *map(json.dumps, (given, options, sections, patience))]
        return start(*arguments, program=(sys.executable, "-c", PROGRAM)), tmp_path / "run"

    return begin


def test_an_actor_that_stands_still_answers_too_late(disturbed, tmp_path):
    """Its work goes to another one; it goes on when the run did."""
    sections = {"rounds": 40}
    command, folder = disturbed({}, sections, patience=8)

    def made():
        return len(RunFolder.open(folder).rounds()) if RunFolder.exists(folder) else 0

    until(lambda: made() >= 5, command)
    actor = named(descendants(command.process.pid), "ray::ClientActor")[0]
    before = made()
    os.kill(actor, signal.SIGSTOP)
    # a step that was under way may end without it
    until(lambda: made() > before + 10, command)
    with suppress(ProcessLookupError):
        os.kill(actor, signal.SIGCONT)
    code, printed = command.finish()
    assert code == 0, printed
    assert_serial(folder, sections, tmp_path / "serial")


def test_an_object_store_that_is_full(disturbed, tmp_path):
    """The data set alone fills most of it; messages and answers go to the disk."""
    data = {"samples": 70_000, "shape": [1, 28, 28]}
    clients = {"cohort": 6, "capacities": [1.0, 0.5]}
    sections = {"rounds": 2, "data": data, "model": {"name": "mcmahan_cnn"}, "clients": clients}
    command, folder = disturbed({}, sections, object_store_memory=80_000_000, num_cpus=2)
    code, printed = command.finish()
    assert code == 0, printed
    assert "Spilled" in printed, printed
    assert_serial(folder, sections, tmp_path / "serial")


def test_an_actor_that_takes_all_memory(disturbed, tmp_path, monkeypatch):
    """Ray's memory monitor kills it, and may kill others too: the run goes on by itself or with --resume."""
    sections = {"rounds": 20, "clients": {"cohort": 6}}
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    available = int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    if available < 10 * GIB:
        pytest.skip("needs 10 GiB of free memory")
    # what all processes of the run may take together
    monkeypatch.setenv("RAY_min_memory_free_bytes", str(available - 5 * GIB))
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.1")
    fault = {"fault": "hoard", "times": 1}
    command, folder = disturbed(fault, sections)
    code, printed = command.finish()
    [pid] = (tmp_path / "marker").read_text().split()
    assert not (tmp_path / "marker-survived").exists()
    if code:
        monkeypatch.delenv("RAY_min_memory_free_bytes")
        monkeypatch.delenv("RAY_memory_usage_threshold")
        # a run of the same configuration; the fault has happened as often as it may
        code, printed = disturbed(fault, sections)[0].finish()
    assert code == 0, printed
    assert_serial(folder, sections, tmp_path / "serial")


@pytest.mark.parametrize("to_ray", [signal.SIGTERM, signal.SIGKILL])
def test_who_ends_everything_gets_a_checkpoint_where_there_can_be_one(start, tmp_path, to_ray):
    """As of a machine that is taken away: all processes are told, or Ray's are gone already."""
    config, folder = tmp_path / "tiny.yaml", tmp_path / "runs" / "tiny"
    config.write_text(yaml.safe_dump(TINY | {"rounds": 2000, "run": {"chunk": 1, "actors": 2}}))
    command = start("run", config, "--output", tmp_path / "runs")
    until(lambda: RunFolder.exists(folder) and len(RunFolder.open(folder).rounds()) >= 5, command)
    # asleep, so that it meets its own signal and what became of Ray at once
    command.process.send_signal(signal.SIGSTOP)
    command.terminate()
    for pid in descendants(command.process.pid):
        os.kill(pid, to_ray)
    command.process.send_signal(signal.SIGCONT)
    code, printed = command.finish()
    assert code == 143 and printed.splitlines()[-1].startswith("to continue: rayfl run ")
    record = RunFolder.open(folder)
    assert record.status == "stopped"
    saved = [path.name for path in complete(folder / "checkpoints")]
    assert saved == ([f"round-{len(record.rounds()):06}"] if to_ray == signal.SIGTERM else [])


def test_a_sweep_whose_ray_dies_says_so(start, tmp_path):
    """Its raylet; a run whose gcs_server dies is in `test_end_to_end.py`."""
    config, folder = tmp_path / "small.yaml", tmp_path / "runs" / "small"
    experiment = TINY | {"rounds": 500, "run": {"chunk": 1}}
    config.write_text(yaml.safe_dump({"experiment": experiment, "rows": {"avg": {"method": "fedavg"}}}))
    command = start("sweep", config, "--output", tmp_path / "runs")

    def trials():
        return [run for run in runs(folder) if run.kind == "run"] if folder.exists() else []

    until(lambda: any(len(trial.rounds()) >= 5 for trial in trials()), command)
    [process] = named(descendants(command.process.pid), "/raylet")
    os.kill(process, signal.SIGKILL)
    code, printed = command.finish()
    assert code == 1, printed
    record = RunFolder.open(folder)
    assert record.status == "failed" and "(raylet) died. Run the same command with --resume" in str(record.error)
    assert [trial.status for trial in trials()] == ["stopped"]
