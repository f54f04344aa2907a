"""clusters/slurm.sh under commands that stand in for Slurm's and Ray's: what it starts, and when the job comes back."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

SCRIPT = Path("clusters/slurm.sh").resolve()
OPTIONS = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in SCRIPT.read_text().splitlines()
               if line.startswith("#SBATCH"))  # fmt: skip
RECORD = 'printf "%s\\n" "$(basename "$0") $*" >> "$LOG"\n'
COMMANDS = {
    "scontrol": RECORD + '[ "$1" != show ] || printf "node1\\nnode2\\n"',
    "ray": RECORD + "env > $LOG.env; echo a-token",
    # the head's part of a step: after `--` stands what `ray symmetric-run` runs on the head
    "srun": RECORD + 'while [[ "$1" = --* ]]; do shift; done\n'
    'if [ "$1" = ray ]; then while [ "$1" != -- ]; do shift; done; shift; fi\n'
    # the other nodes' part ends when this file is gone
    'code=0; "$@" || code=$?; while [ -e "$LOG.last" ]; do sleep 0.05; done; exit "$code"',
    "python": RECORD + "code=$CODE\ntrap 'exit $ON_TERM' TERM\n"
    'touch "$LOG.up"; while [ "$code" = stay ]; do sleep 0.05; done; exit "$code"',
}


class Job:
    """A job of the script in a folder of its own."""

    def __init__(self, folder, *arguments, code="0", on_term="143", **environment):
        self.log, self.folder = folder / "log", folder
        commands = folder / "commands"
        commands.mkdir()
        for name, text in COMMANDS.items():
            (commands / name).write_text(f"#!/bin/bash\n{text}\n")
            (commands / name).chmod(0o755)
        self.number = str(os.getpid() * 1000 + len(list(folder.parent.iterdir())))
        slurm = {"SLURM_JOB_ID": self.number, "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
        given = {"PATH": f"{commands}:/usr/bin:/bin", "HOME": str(folder), "LOG": str(self.log), "CODE": code}
        given |= slurm | {"SLURM_CPUS_PER_TASK": "32", "ON_TERM": on_term} | environment
        self.process = subprocess.Popen(
            [SCRIPT, *arguments],
            cwd=folder,
            env=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def warn(self):
        """The signal that Slurm sends before the time limit."""
        until = time.monotonic() + 60
        while not (self.folder / "log.up").exists():
            assert time.monotonic() < until and self.process.poll() is None
            time.sleep(0.02)
        self.process.send_signal(signal.SIGUSR1)
        return self

    def ended(self):
        """Exit code and commands."""
        if self.process.returncode is None:
            self.said, _ = self.process.communicate(timeout=60)
        return self.process.returncode, self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def came_back(self):
        return f"scontrol requeue {self.number}" in self.ended()[1]


def stand_in(folder, text):
    """Another srun, for the step alone: the script looks into .venv first."""
    path = folder / ".venv" / "bin" / "srun"
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/bash\ncase "$*" in *symmetric-run*) ;; *) exit 0;; esac\n{text}\n')
    path.chmod(0o755)


@pytest.fixture
def start(tmp_path):
    """Starts the one job of a test; afterwards nothing of it is left."""
    jobs = []

    def started(*arguments, **given):
        jobs.append(Job(tmp_path, *(arguments or ["tune_configs/quickstart.yaml"]), **given))
        return jobs[-1]

    yield started
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.communicate()
        for left in Path("/tmp").glob(f"r{job.number}*"):
            left.unlink()


def test_one_ray_for_all_nodes_and_the_sweep_on_its_head(start, tmp_path):
    job = start("tune_configs/quickstart.yaml", "--rounds", "10")
    code, lines = job.ended()
    assert code == 0
    short = f"/tmp/r{job.number}"
    sweep = f"tune_configs/quickstart.yaml --rounds 10 --name quickstart --output {tmp_path}/runs --address auto"
    token, show, step, python, clean = lines
    assert token == "ray get-auth-token --generate"
    assert show == "scontrol show hostnames node[1-2]"
    assert step == (
        "srun --nodes=2 --ntasks=2 --cpus-per-task=32 "
        "ray symmetric-run --address node1:6379 --min-nodes 2 --num-cpus 32 -- "
        'bash -c python -u scripts/sweep.py "${@:3}" & echo $! > "$1"; code=0; wait $! || code=$?; echo $code > "$2"; '
        f"exit $code sweep {short}.pid {short}.ended {sweep}"
    )
    assert python == f"python -u scripts/sweep.py {sweep}"
    assert clean == f"srun --nodes=2 --ntasks=2 rm -rf {short} {short}.pid {short}.ended"


def test_the_environment_of_ray(start, tmp_path):
    job = start(SCRATCH="/scratch/me")
    job.ended()
    environment = dict(line.partition("=")[::2] for line in (tmp_path / "log.env").read_text().splitlines())
    assert (
        environment.items()
        >= {
            "RAY_AUTH_MODE": "token",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAYFL_OUTPUT": "/scratch/me/runs",
            "RAY_TMPDIR": f"/tmp/r{job.number}",
        }.items()
    )
    # a session's sockets lie about 60 characters below it, and a path has at most 107
    assert len(environment["RAY_TMPDIR"]) < 40
    assert environment["PATH"].startswith(f"{tmp_path}/.venv/bin:")
    # nobody reads the token in the job's log
    assert "a-token" not in job.said


def test_a_sweep_that_is_there_goes_on(start, tmp_path):
    run = tmp_path / "out" / "first" / "run.json"
    run.parent.mkdir(parents=True)
    run.write_text("{}")
    _, lines = start("first.yaml", RAYFL_OUTPUT=str(tmp_path / "out")).ended()
    assert (
        f"python -u scripts/sweep.py first.yaml --name first --output {tmp_path}/out --address auto --resume" in lines
    )


def test_without_a_config_nothing_starts(start):
    job = start("")
    assert job.ended() == (1, [])
    assert "CONFIG is missing. Allowed: sbatch clusters/slurm.sh CONFIG [OPTIONS of rayfl sweep]" in job.said


@pytest.mark.parametrize("option", ["--name", "--output=/elsewhere", "--address", "--cluster"])
def test_an_option_that_the_script_sets_is_refused(start, option):
    job = start("first.yaml", "--rounds", "3", option, "mine")
    assert job.ended() == (2, [])
    assert f"slurm.sh: {option.partition('=')[0]} is set by this script. Allowed: RAYFL_OUTPUT" in job.said


@pytest.mark.parametrize("code", ["0", "1", "2", "130", "143"])
def test_a_job_that_ended_by_itself_does_not_come_back(start, code):
    job = start(code=code)
    assert job.ended()[0] == int(code)
    assert not job.came_back


@pytest.mark.parametrize(("on_term", "comes_back"), [("143", True), ("130", True), ("0", False), ("1", False)])
def test_a_job_whose_time_ends_comes_back_if_its_sweep_was_stopped(start, on_term, comes_back):
    job = start(code="stay", on_term=on_term).warn()
    assert job.ended()[0] == int(on_term)
    assert job.came_back == comes_back


def test_the_job_comes_back_before_its_other_nodes_have_ended(start, tmp_path):
    (tmp_path / "log.last").touch()
    job = start(code="stay").warn()
    assert job.process.wait(60) == 143
    assert f"scontrol requeue {job.number}" in job.log.read_text().splitlines()


def test_a_step_that_ends_without_a_sweep_is_a_failure(start, tmp_path):
    stand_in(tmp_path, "exit 0")
    job = start()
    assert job.ended()[0] == 1
    assert not job.came_back


def test_a_warning_before_the_sweep_is_up_ends_the_step(start, tmp_path):
    # the step of a Ray that does not start: it has written no process id
    stand_in(tmp_path, "trap 'exit 1' TERM\ntouch \"$LOG.up\"; while true; do sleep 0.05; done")
    job = start().warn()
    assert job.ended()[0] == 143
    assert job.came_back


def test_slurm_warns_this_script_alone_and_not_by_the_signal_of_scancel():
    assert OPTIONS["signal"] == "B:USR1@120"
    assert "requeue" in OPTIONS
    assert OPTIONS["ntasks-per-node"] == "1" and "exclusive" in OPTIONS
    # the log of the first part stays
    assert OPTIONS["open-mode"] == "append"


def test_the_warning_leaves_a_step_the_time_that_it_may_take():
    from rayfl.engine.termination import GRACE_SECONDS

    assert int(OPTIONS["signal"].partition("@")[2]) > 2 * GRACE_SECONDS


def test_ray_has_every_option():
    from ray.scripts.scripts import start
    from ray.scripts.symmetric_run import symmetric_run

    known = {option for command in (symmetric_run, start) for parameter in command.params for option in parameter.opts}
    _, _, line = SCRIPT.read_text().partition("ray symmetric-run ")
    given = [word for word in line.partition(" -- ")[0].split() if word.startswith("--")]
    assert given == ["--address", "--min-nodes", "--num-cpus"]
    assert known.issuperset(given)
