"""A command as a job of a cluster: what is sent, which job it is, the tunnel, the copy; all of it on a real head."""

import json
import os
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import sweeps
import yaml
from helpers import TINY, message, run, simulate, tiny
from processes import PATIENCE, alive, descendants, until
from ray.job_submission import JobStatus

from rayfl.cli import elsewhere
from rayfl.clusters import archive, jobs, tunnel
from rayfl.clusters.jobs import Jobs, Work
from rayfl.config import ConfigError
from rayfl.engine.plugins import packed
from rayfl.results.folder import RunFolder, runs
from rayfl.tuning.load import load_sweep

PLAIN = {"rounds": 3}


def work(config=Path("small.yaml"), **given) -> Work:
    return Work(**({"command": "sweep", "config": config, "options": [], "name": "small", "plain": PLAIN} | given))


# what is sent


def test_a_job_is_named_by_what_runs():
    same = work(options=["--no-models"], resume=True, shows=["--quiet"])
    assert work().id == same.id and work().id.startswith("rayfl-small-")
    others = [work(plain={"rounds": 4}), work(packages=b"other"), work(name="a b/c"), work(command="run")]
    assert len({other.id for other in [work(), *others]}) == 5
    assert others[2].id.startswith("rayfl-a-b-c-")


def shell(line: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess:
    """A job's command in a shell whose `python` prints what it is given."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | environment
    return subprocess.run(line, shell=True, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def test_the_clusters_shell_gives_the_command_its_words(tmp_path):
    options = ["--set=search.seeds=[0, 1]", "--set=data.root=it's $HOME", "--rows=a,b"]
    given = work(config=Path("/far/my sweep.yaml"), options=options, name="my name", shows=["--json"])
    done = shell(given.entrypoint(True), tmp_path, RAYFL_OUTPUT=f"{tmp_path}/the output")
    words = ["-m", "rayfl", "sweep", "my sweep.yaml", *options, "--json", "--name=my name"]
    assert json.loads(done.stdout) == [*words, f"--output={tmp_path}/the output"]


def test_a_folder_that_was_begun_is_resumed(tmp_path):
    partial_round = tmp_path / "out" / "my name"
    partial_round.mkdir(parents=True)
    (partial_round / "run.json").touch()
    given = work(name="my name")
    assert "--resume" in shell(given.entrypoint(True), tmp_path, RAYFL_OUTPUT=f"{tmp_path}/out").stdout
    assert "--resume" not in shell(given.entrypoint(False), tmp_path, RAYFL_OUTPUT=f"{tmp_path}/out").stdout
    asked = work(name="new", resume=True).entrypoint(True)
    assert shell(asked, tmp_path, RAYFL_OUTPUT=f"{tmp_path}/out").stdout.count("--resume") == 1


def test_a_cluster_without_a_folder_for_runs_says_so(tmp_path):
    done = shell(work().entrypoint(False), tmp_path)
    assert done.returncode and not done.stdout
    assert "RAYFL_OUTPUT: is not set on this cluster; set it to a folder that all of its nodes see" in done.stderr


def test_the_file_and_the_packages_are_sent_and_nothing_else(tmp_path):
    config = sweeps.write(tmp_path)
    given = work(config, packages=packed(tiny(method="helpers:PersonalHead")))
    (sent := tmp_path / "sent").mkdir()
    given.write(sent)
    assert (sent / "small.yaml").read_text() == config.read_text()
    assert (sent / "helpers.py").exists()
    (alone := tmp_path / "alone").mkdir()
    work(config).write(alone)
    assert [path.name for path in alone.iterdir()] == ["small.yaml"]


def test_folders_of_this_machine_are_named(tmp_path):
    plain = {"experiment": {"data": {"root": str(tmp_path), "name": "mnist"}}, "rows": [{"root": "/no/such/place"}]}
    [said] = work(plain=plain).left_behind()
    assert said.startswith(f"experiment.data.root: {tmp_path} is not sent to the cluster")


# which job it is


class Client:
    """Ray's client, of a cluster that has some jobs: numbers -> (status, exit code)."""

    def __init__(self, given: Work, known):
        self.submitted = []
        named = [SimpleNamespace(submission_id=f"{given.id}-{n}", status=s, driver_exit_code=c) for n, s, c in known]
        others = [
            SimpleNamespace(submission_id=i, status="RUNNING", driver_exit_code=None) for i in (None, "raysubmit")
        ]
        self.known = [*named, *others]

    def list_jobs(self):
        return self.known

    def submit_job(self, **given):
        self.submitted.append(given | {"sent": sorted(os.listdir(given["runtime_env"]["working_dir"]))})


def partial_round(monkeypatch, tmp_path, *known):
    """Return the submission, the job, and whether it is new."""
    given = work(sweeps.write(tmp_path))
    client = Client(given, known)
    monkeypatch.setattr(Jobs, "_connected", lambda self: client)
    id, is_new = Jobs("clusters/aws.yaml", "http://127.0.0.1:1").begin(given)
    return client.submitted, id.removeprefix(f"{given.id}-"), is_new


@pytest.mark.parametrize("status", ["PENDING", "RUNNING", "SUCCEEDED"])
def test_the_same_command_attaches(monkeypatch, tmp_path, status):
    assert partial_round(monkeypatch, tmp_path, (1, "FAILED", 1), (2, status, None)) == ([], "2", False)


def test_a_first_job_is_new(monkeypatch, tmp_path):
    [sent], id, is_new = partial_round(monkeypatch, tmp_path)
    assert (id, is_new) == ("1", True)
    assert sent["sent"] == ["small.yaml"] and "--resume" not in sent["entrypoint"]
    assert sent["runtime_env"]["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "30"}


@pytest.mark.parametrize(
    ("known", "number", "resumes"),
    [
        ([(1, "FAILED", 1)], "2", True),
        ([(9, "STOPPED", None), (10, "FAILED", 1)], "11", True),
        ([(1, "FAILED", 2)], "2", False),
        ([(1, "FAILED", 1), (2, "FAILED", 2)], "3", True),
    ],
)
def test_what_failed_or_was_stopped_is_gone_on_with(monkeypatch, tmp_path, known, number, resumes):
    [sent], id, is_new = partial_round(monkeypatch, tmp_path, *known)
    assert (id, is_new) == (number, True)
    assert ("echo --resume" in sent["entrypoint"]) is resumes


class Following:
    """Ray's client, of a job that prints these pieces of text and ends so; a piece may be an error."""

    def __init__(self, pieces, status="SUCCEEDED", message=None):
        self.pieces, self.job = pieces, SimpleNamespace(status=JobStatus(status), message=message)

    async def tail_job_logs(self, id):
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def get_job_info(self, id):
        return self.job


def followed(monkeypatch, *pieces, **ends):
    """The lines that are shown."""
    monkeypatch.setattr(Jobs, "_connected", lambda self: Following(pieces, **ends))
    shown = []
    Jobs("aws.yaml", "http://127.0.0.1:1").follow("rayfl-small-1", shown.append)
    return shown


HEADER = "INFO Runtime env is setting up.\nRunning entrypoint for job rayfl-small-1: python -m rayfl\n"


def test_what_a_job_prints_is_shown_in_lines(monkeypatch):
    assert followed(monkeypatch, HEADER + "one\ntw", "o\n\nthr", "ee") == ["one", "two", "", "three"]


@pytest.mark.parametrize(
    ("status", "message", "said"),
    [
        (
            "FAILED",
            "It failed with exit code 1, last available logs (truncated):\nx",
            "failed: It failed with exit code 1",
        ),
        ("STOPPED", "Job was intentionally stopped.", "stopped: Job was intentionally stopped"),
    ],
)
def test_a_job_that_did_not_end_well_is_an_error(monkeypatch, status, message, said):
    with pytest.raises(RuntimeError) as error:
        followed(monkeypatch, HEADER, status=status, message=message)
    assert str(error.value) == f"the job rayfl-small-1 {said}. Run the same command to resume it"


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([HEADER, RuntimeError("WebSocket closed")], "WebSocket closed"),
        ([HEADER], "rayfl-small-1 is still running after 0 seconds"),
    ],
)
def test_a_lost_connection_stops_nothing(monkeypatch, pieces, why):
    monkeypatch.setattr(jobs, "END_SECONDS", 0)
    with pytest.raises(RuntimeError) as error:
        followed(monkeypatch, *pieces, status="RUNNING")
    assert str(error.value) == (
        f"the connection to aws.yaml was lost ({why}). rayfl-small-1 keeps running; run the same command to attach "
        "again"
    )


@pytest.mark.parametrize(
    ("cluster", "command"),
    [
        ("http://127.0.0.1:8265", "ray job stop --address http://127.0.0.1:8265 rayfl-small-1"),
        ("my aws.yaml", "ray exec 'my aws.yaml' 'ray job stop rayfl-small-1'"),
    ],
)
def test_how_to_stop(monkeypatch, cluster, command):
    monkeypatch.setattr(Jobs, "_connected", lambda self: None)
    assert Jobs(cluster, "http://127.0.0.1:8265").how_to_stop("rayfl-small-1") == command


def test_events_alone_go_to_stdout(capsys):
    for line in ['{"event": "phase"}', "a warning"]:
        elsewhere._show_event(line)
    assert capsys.readouterr() == ('{"event": "phase"}\n', "a warning\n")


# the command line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--address", "auto"], "--cluster, --address: both are set. Allowed: one of them"),
        (
            ["--tracking-uri", "http://me:word@there"],
            "--cluster, --tracking-uri: both are set. Allowed: --cluster, with MLFLOW_TRACKING",
        ),
        (["--set", "training.lr=-1"], "training.lr: -1 is not valid"),
        ([], "--cluster: 'nowhere.yaml' is not valid. Allowed: a file of Ray's cluster launcher"),
    ],
)
@pytest.mark.parametrize("command", ["sweep", "run"])
def test_what_is_wrong_is_said_here(monkeypatch, capsys, tmp_path, command, options, said):
    from rayfl import cli

    config = sweeps.write(tmp_path)
    row = ["--row", "heterofl"] if command == "run" else []
    given = [command, config, *row, "--cluster", "nowhere.yaml", "--output", tmp_path / "runs", *options]
    monkeypatch.setattr(sys, "argv", ["rayfl", *map(str, given)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()


def test_nobody_answers():
    port = tunnel._free_port()
    said = message(Jobs, "http://127.0.0.1", f"http://127.0.0.1:{port}")
    assert said.startswith("--cluster http://127.0.0.1: no Ray Jobs API answers (Failed to connect to Ray at")


def test_a_ray_of_the_environment_is_not_gone_to(monkeypatch):
    """Ray's client prefers RAY_ADDRESS to what it is asked for."""
    monkeypatch.setenv("RAY_ADDRESS", "http://elsewhere:1")
    port = tunnel._free_port()
    assert f"127.0.0.1:{port}" in message(Jobs, "mine", f"http://127.0.0.1:{port}")
    assert os.environ["RAY_ADDRESS"] == "http://elsewhere:1"


# the tunnel


def ray_that(monkeypatch, tmp_path, body: str) -> Path:
    """In place of `ray dashboard FILE --port PORT`: a program with this body. A cluster's file."""
    program = tmp_path / "ray.py"
    program.write_text(f"import os, sys, subprocess, time\nport = int(sys.argv[4])\n{body}")
    monkeypatch.setattr(tunnel, "RAY", (sys.executable, str(program)))
    (file := tmp_path / "cluster.yaml").write_text("provider: {type: local}\n")
    return file


SERVES = """
print("started", flush=True)
ssh = subprocess.Popen([sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"])
open({file!r}, "w").write(f"{{os.getpid()}} {{ssh.pid}}")
time.sleep(600)
"""


@pytest.mark.parametrize("trouble", [None, KeyboardInterrupt])
def test_a_tunnel_ends_with_all_that_it_started(monkeypatch, tmp_path, trouble):
    file = ray_that(monkeypatch, tmp_path, SERVES.format(file=str(tmp_path / "pids")))
    try:
        with tunnel.opened(str(file)) as url:
            pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
            assert len(alive(pids)) == 2
            socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))).close()
            if trouble:
                raise trouble
    except KeyboardInterrupt:
        assert trouble
    until(lambda: not alive(pids))


HOLDS = """
import sys, time
from rayfl.clusters import tunnel
tunnel.RAY = (sys.executable, {program!r})
with tunnel.opened({file!r}):
    print("open", flush=True)
    time.sleep(600)
"""


def test_a_tunnel_ends_with_a_process_that_is_killed(monkeypatch, tmp_path, start):
    file = ray_that(monkeypatch, tmp_path, SERVES.format(file=str(tmp_path / "pids")))
    holder = start(program=(sys.executable, "-c", HOLDS.format(program=str(tmp_path / "ray.py"), file=str(file))))
    assert holder.process.stdout is not None and holder.process.stdout.readline() == "open\n"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(alive(pids)) == 2
    holder.kill()
    holder.finish()
    until(lambda: not alive(pids))


def test_a_tunnel_that_ends_is_quoted(monkeypatch, tmp_path):
    body = "for i in range(9):\n    print('line', i)\nsys.exit('Head node of cluster (rayfl) not found!')"
    file = ray_that(monkeypatch, tmp_path, body)
    with pytest.raises(ConfigError) as error, tunnel.opened(str(file)):
        pass
    assert str(error.value) == (
        f"--cluster {file}: no tunnel: `ray dashboard {file}` ended, its last lines:\n"
        "  line 5\n  line 6\n  line 7\n  line 8\n  Head node of cluster (rayfl) not found!\n"
        f"Hint: if the cluster is not running, start it by `ray up {file}`"
    )


def test_a_tunnel_that_never_answers_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(tunnel, "TUNNEL_SECONDS", 0.1)
    file = ray_that(monkeypatch, tmp_path, "time.sleep(600)")
    with pytest.raises(ConfigError, match="did not answer in 0.1 seconds, without output"):
        with tunnel.opened(str(file)):
            pass


def test_somebodys_own_tunnel_is_taken_as_it_is():
    with tunnel.opened("http://127.0.0.1:8265/") as url:
        assert url == "http://127.0.0.1:8265"


# the copy


def a_run(path: Path) -> RunFolder:
    facts = {"judge": "accuracy_mean", "capacities": [1.0], "trained": [1.0], "clients": 2, "rounds": 3}
    facts |= {"scores": {"accuracy": "max"}}
    made = RunFolder.create(path, "small", {}, {}, facts)
    large = ("tune/big", "trials/a/checkpoints/round-1/state", "trials/a/client_states/0.safetensors")
    for name in ("results.csv", "plots/a.png", "trials/a/run.json", *large):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
    return made


def test_a_copy_has_all_but_what_is_large(tmp_path):
    a_run(tmp_path / "there")
    printed = f"of Ray\n{archive.line_of(archive.packed(tmp_path / 'there'))}\n"
    found = archive.found(printed)
    assert found
    archive.unpack(found, tmp_path / "here", "job-1")
    copied = {str(p.relative_to(tmp_path / "here")) for p in (tmp_path / "here").rglob("*") if p.is_file()}
    assert copied == {"copied.json", "config.json", "run.json", "results.csv", "plots/a.png", "trials/a/run.json"}
    assert json.loads((tmp_path / "here" / "copied.json").read_text()) == {"job": "job-1"}


def test_a_copy_is_made_again_and_another_run_takes_its_place(tmp_path):
    here = tmp_path / "here"
    a_run(tmp_path / "one"), a_run(tmp_path / "two")
    one, two = (archive.packed(tmp_path / name) for name in ("one", "two"))
    archive.unpack(one, here, "job-1")
    (here / "report.html").touch()
    archive.require_copy(here)
    archive.unpack(one, here, "job-1")
    assert (here / "report.html").exists()
    archive.unpack(two, here, "job-2")
    assert not (here / "report.html").exists()


def test_copies_neither_follow_links_nor_write_through_them(tmp_path):
    (outside := tmp_path / "outside").mkdir()
    (outside / "secret").write_text("secret")
    a_run(tmp_path / "there")
    (tmp_path / "there" / "results.md").symlink_to(outside / "secret")
    found = archive.packed(tmp_path / "there")
    assert b"results.md" not in found
    for link, target in (("plots", outside), ("results.csv", outside / "secret")):
        (here := tmp_path / f"{link}-here").mkdir()
        (here / link).symlink_to(target)
        said = message(archive.unpack, found, here, "job-1")
        assert said == f"{here / link}: the copy would be written through this link. Hint: remove it"
        assert list(here.iterdir()) == [here / link]
    assert [file.name for file in outside.iterdir()] == ["secret"] and (outside / "secret").read_text() == "secret"


def test_a_run_of_this_machine_is_not_written_over(tmp_path):
    a_run(tmp_path / "small")
    assert message(archive.require_copy, tmp_path / "small").startswith(
        f"{tmp_path / 'small'}: the folder has a run of this"
    )


class Copying(Client):
    """Ray's client, of a cluster where a job prints this."""

    def __init__(self, printed):
        self.printed, self.submitted, self.deleted = printed, [], []

    def submit_job(self, **given):
        self.submitted.append(given)
        return "raysubmit-1"

    def get_job_info(self, id):
        return SimpleNamespace(status=JobStatus.SUCCEEDED)

    def get_job_logs(self, id):
        return self.printed

    def delete_job(self, id):
        self.deleted.append(id)


def fetched(monkeypatch, tmp_path, printed) -> Copying:
    client = Copying(printed)
    monkeypatch.setattr(Jobs, "_connected", lambda self: client)
    Jobs("aws.yaml", "http://127.0.0.1:1").fetch(work(name="my name"), "job-1", tmp_path / "here")
    return client


def test_a_copy_is_what_a_job_of_its_own_prints(monkeypatch, tmp_path):
    a_run(tmp_path / "there")
    client = fetched(monkeypatch, tmp_path, archive.line_of(archive.packed(tmp_path / "there")))
    assert RunFolder.exists(tmp_path / "here") and client.deleted == ["raysubmit-1"]
    done = shell(client.submitted[0]["entrypoint"], tmp_path, RAYFL_OUTPUT="/the output")
    assert json.loads(done.stdout) == ["-m", "rayfl.clusters.archive", "/the output/my name"]


def test_where_results_are_that_cannot_be_copied(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError) as error:
        fetched(monkeypatch, tmp_path, "Traceback\nOSError: no space left\n")
    assert str(error.value) == (
        "job-1 is done, but its results could not be copied (OSError: no space left). They are in my name below the "
        "cluster's RAYFL_OUTPUT; run the same command to copy them"
    )
    assert not (tmp_path / "here").exists()


def test_half_an_archive_is_none(tmp_path):
    a_run(tmp_path / "there")
    line = archive.line_of(archive.packed(tmp_path / "there"))
    assert archive.found(line[:-8]) is None and archive.found("nothing") is None


# a real head

OWN = """
from rayfl.methods.dense import Dense


class Own(Dense):
    def local_update(self, payload, visit):
        return self.trained(payload, visit)
"""
SSH = """#!{python}
# what Ray asks of ssh for a tunnel, on this machine: -L PORT:localhost:8265
import socket, sys, threading

def pump(one, other):
    while data := one.recv(65536):
        other.sendall(data)
    other.shutdown(socket.SHUT_WR)

port = int(sys.argv[sys.argv.index("-L") + 1].split(":")[0])
with socket.create_server(("127.0.0.1", port)) as server:
    while True:
        one, _ = server.accept()
        other = socket.create_connection(("127.0.0.1", {port}))
        for pair in ((one, other), (other, one)):
            threading.Thread(target=pump, args=pair, daemon=True).start()
"""
TOKEN = secrets.token_hex(32)


@pytest.fixture(scope="module")
def head():
    """A head with its dashboard and a token: its address for drivers, and that of its Jobs API."""
    free = [str(tunnel._free_port()) for _ in range(8)]
    ports = ("port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port", "metrics-export-port")
    ports += ("object-manager-port", "node-manager-port", "runtime-env-agent-port")
    options = [word for name, port in zip(ports, free, strict=True) for word in (f"--{name}", port)]
    # short, because it is part of sockets' names
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as place:
        known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
        environment = known | {
            "PATH": f"{Path(sys.executable).parent}:{known['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAYFL_OUTPUT": f"{place}/runs",
            "OMP_NUM_THREADS": "1",
        }
        command = [*tunnel.RAY, "start", "--head", "--block", "--num-cpus=2", "--include-dashboard=true", *options]
        log = open(f"{place}/log", "w")
        process = subprocess.Popen(
            [*command, "--temp-dir", f"{place}/ray", "--min-worker-port=0", "--max-worker-port=0"],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=place,
        )
        try:
            until(lambda: process.poll() is not None or tunnel._answers(int(free[1])))
            assert process.poll() is None, Path(f"{place}/log").read_text()
            yield SimpleNamespace(address=f"127.0.0.1:{free[0]}", url=f"http://127.0.0.1:{free[1]}", port=int(free[1]))
        finally:
            started = descendants(process.pid)
            process.terminate()
            process.wait(PATIENCE)
            for pid in alive(started):
                os.kill(pid, 9)
            log.close()


@pytest.fixture
def laptop(head, monkeypatch, tmp_path):
    """The environment of commands: the token, a package of one's own, a file of the launcher, and a fake ssh."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "ssh").write_text(SSH.format(python=sys.executable, port=head.port))
    (tmp_path / "ssh").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    file, state = tmp_path / "cluster.yaml", tmp_path / "ray" / "cluster-mine.state"
    provider = {"type": "local", "head_ip": "127.0.0.1", "worker_ips": []}
    file.write_text(yaml.safe_dump({"cluster_name": "mine", "provider": provider, "auth": {"ssh_user": "me"}}))
    # what `ray up` leaves of a head that runs
    state.parent.mkdir()
    tags = {"ray-node-type": "head", "ray-node-status": "up-to-date"}
    state.write_text(json.dumps({"127.0.0.1": {"tags": tags, "state": "running"}}))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.ray
@pytest.mark.slow
def test_a_sweep_goes_there_is_left_and_comes_back(start, head, laptop, monkeypatch):
    """Submitted through the launcher's tunnel, left with Ctrl-C, found by the same command, and once more when done."""
    experiment = {"rounds": 6, "method": "mine.own:Own", "run": {"actors": 1}}
    config = sweeps.write(laptop, rows={"own": {}}, experiment=experiment)
    output = laptop / "runs"
    arguments = ("--cluster", laptop / "cluster.yaml", config, "--output", output, "--no-models")
    program = (sys.executable, "scripts/sweep.py")
    first = start(*arguments, program=program)
    assert first.process.stdout is not None
    line = first.process.stdout.readline()
    assert line.startswith("submitted rayfl-small-"), line + first.finish()[1]
    id = line.split()[1].rstrip(";")
    first.interrupt()
    code, printed = first.finish()
    assert code == 130
    assert (
        f"detached from {id}, which keeps running. Run the same command to attach again to stop it: ray exec "
        in printed.replace("\n", " ")
    )
    assert not output.exists()

    second = start(*arguments, program=program)
    code, printed = second.finish()
    assert code == 0, printed
    assert printed.startswith(f"attached to {id};") and "1 methods, 1 trials of 6 rounds" in printed
    assert f"results copied without checkpoints to {output / 'small'}" in printed
    there, [trial] = RunFolder.open(output / "small"), [r for r in runs(output / "small") if r.kind == "run"]
    assert there.status == trial.status == "finished"
    assert (output / "small" / "results.md").exists() and (output / "small" / "plots").is_dir()
    assert not (output / "small" / "tune").exists()

    monkeypatch.syspath_prepend(laptop)
    serial = simulate(load_sweep(config).experiment("own", {}, 0), laptop / "serial")
    assert [{k: v for k, v in line.items() if k != "seconds"} for line in trial.rounds()] == run(serial)

    # another way to the same cluster, where it is done
    third = start("sweep", "--cluster", head.url, config, "--output", laptop / "again", "--no-models")
    code, printed = third.finish()
    assert code == 0 and printed.startswith(f"attached to {id};"), printed
    assert RunFolder.open(laptop / "again" / "small").id == there.id


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_that_fails_there_fails_here(start, head, laptop):
    """It asks for more than that machine has; the second attempt is a new job, with nothing to go on with."""
    config = laptop / "large.yaml"
    config.write_text(yaml.safe_dump(TINY | {"method": "heterofl", "run": {"executor": "ray", "server_cpus": 999}}))
    for number in (1, 2):
        code, printed = start("run", config, "--cluster", head.url, "--output", laptop / "runs").finish()
        said = " ".join(printed.split())
        assert code == 1 and said.startswith("submitted rayfl-large-") and f"-{number}; Ctrl-C" in said, printed
        assert (
            "error: run.server_cpus: 999 is not valid. Allowed: at most 2" in said and "failed with exit code 2" in said
        )
    assert not (laptop / "runs").exists()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"RAY_AUTH_TOKEN": "wrong" * 8},
            "the cluster refuses this token. Hint: set RAY_AUTH_MODE=token, and put the cluster's token",
        ),
        ({"RAY_AUTH_MODE": "disabled"}, "the cluster requires a token. Hint: set RAY_AUTH_MODE=token, and put the"),
    ],
)
def test_another_token_is_refused_in_a_sentence(start, head, laptop, monkeypatch, environment, said):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = sweeps.write(laptop)
    code, printed = start("sweep", config, "--cluster", head.url, "--output", laptop / "runs").finish()
    assert code == 2 and printed.replace("\n", " ").startswith(f"error: --cluster {head.url}: {said}"), printed


@pytest.mark.ray
@pytest.mark.slow
def test_a_driver_without_the_token_is_told_so(start, head, laptop, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", str(laptop))
    config = sweeps.write(laptop)
    code, printed = start("sweep", config, "--address", head.address, "--output", laptop / "runs").finish()
    assert code == 2 and f"error: --address {head.address}: RAY_AUTH_MODE is set, but no token is found" in printed
