"""Where a run finds room: bundles, one machine, and several raylets of which one dies."""

import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import pytest
import ray
import yaml
from helpers import TINY, run, simulate, tiny
from processes import PATIENCE, alive, descendants, named, until
from ray._private.utils import validate_socket_filepath

from rayfl.config import ConfigError
from rayfl.engine.devices import ONLY_DECLARED
from rayfl.engine.locks import TEMPORARY
from rayfl.engine.on_ray import cluster as module
from rayfl.engine.on_ray import host, resources
from rayfl.engine.on_ray.cluster import cluster, running
from rayfl.engine.on_ray.host import Host
from rayfl.engine.on_ray.resources import bundles, room, spread
from rayfl.results.folder import RunFolder, runs
from rayfl.tuning.load import load_sweep


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ((3, 1, 0), [{"CPU": 1}] * 3),
        ((1, 0.5, 0.25), [{"CPU": 0.5, "GPU": 0.25}]),
        ((5, 1, 0.4), [{"CPU": 1, "GPU": 0.5}] * 5),
        ((1, 1, 0.7), [{"CPU": 1, "GPU": 1}]),
        ((2, 4, 1), [{"CPU": 4, "GPU": 1}] * 2),
        ((1, 4, 2), [{"CPU": 4, "GPU": 2}]),
    ],
)
def test_every_actor_has_a_bundle_with_an_equal_part_of_a_gpu(asked, found):
    """A trial of one actor leaves the rest of its GPU to others."""
    assert bundles(*asked) == found


@pytest.mark.parametrize(
    ("nodes", "asked", "fit"),
    [
        ([(16, 3)], (1, 0.4), 6),
        ([(16, 3)], (1, 0.3), 9),
        ([(16, 3)], (1, 0.7), 3),
        ([(16, 3)], (1, 2), 1),
        ([(16, 3)], (6, 0.25), 2),
        ([(4, 0)] * 3, (3, 0), 3),
        ([(16, 0), (2, 2)], (1, 0.25), 2),
        ([(4, 0), (4, 0)], (2, 0, 3), 2),
        ([(4, 0), (4, 0)], (2, 0, 6), 1),
        ([(4, 0), (4, 0)], (2, 0, 99), 0),
    ],
)
def test_an_actor_fits_on_one_node_and_a_fraction_on_one_gpu(monkeypatch, nodes, asked, fit):
    monkeypatch.setattr(resources, "_nodes", lambda: [{"CPU": cpus, "GPU": gpus} for cpus, gpus in nodes])
    assert room(*asked) == fit


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ((4, 1, 0.25), 1),
        ((5, 1, 0.25), 0.5),
        ((9, 1, 0.25), 1 / 3),
        ((13, 1, 0.25), 0.25),
        ((2, 1, 2), 2),
        ((2, 1, 0), 0),
    ],
)
def test_few_actors_leave_no_gpu_idle(monkeypatch, asked, part):
    monkeypatch.setattr(resources, "_nodes", lambda: [{"CPU": 16, "GPU": 4}])
    assert spread(*asked) == part


def test_actors_are_spread_only_if_all_of_them_still_fit(monkeypatch):
    monkeypatch.setattr(resources, "_nodes", lambda: [{"CPU": 16, "GPU": 1}, {"CPU": 2, "GPU": 4}])
    assert (room(1, 0.25), spread(6, 1, 0.25), spread(4, 1, 0.25), spread(7, 1, 0.25)) == (6, 0.25, 0.5, 0.25)


@pytest.mark.parametrize(("actors", "part"), [("auto", 0.5), (4, 0.25)])
def test_a_run_with_a_given_number_of_actors_takes_no_more_of_the_gpus_than_asked(monkeypatch, actors, part):
    monkeypatch.setattr(resources, "_nodes", lambda: [{"CPU": 16, "GPU": 2}])
    spec = tiny(run={"executor": "ray", "gpus": 0.25, "actors": actors})
    found = module._clients(spec, None)
    assert [(one["CPU"], one["GPU"]) for one in found] == [(1, part)] * 4


GPUS = """
import ray
from ray.util.placement_group import placement_group
from rayfl.engine.on_ray.resources import bundles, require_room, room
ray.init(address="local", num_cpus=16, num_gpus=3, include_dashboard=False, log_to_driver=False)
for gpus in (0.4, 0.3, 0.25):
    require_room(room(1, gpus), 1, gpus, None)
    group = placement_group(bundles(room(1, gpus), 1, gpus))
    assert group.wait(60), gpus
    ray.util.remove_placement_group(group)
"""


@pytest.mark.ray
@pytest.mark.slow
def test_ray_places_as_many_actors_as_fit(start):
    code, printed = start(program=(sys.executable, "-c", GPUS)).finish()
    assert code == 0, printed


def test_a_file_that_a_process_has_closed_meanwhile_hides_no_other(tmp_path, monkeypatch):
    """An agent opens and closes files all the time."""
    (tmp_path / "fd").mkdir()
    for number in range(3):
        (tmp_path / "fd" / str(number)).symlink_to(tmp_path / "session" / "log")
    readlink, closed = os.readlink, []

    def read(file):
        if not closed:
            closed.append(file)
            raise FileNotFoundError(file)
        return readlink(file)

    monkeypatch.setattr(os, "readlink", read)
    assert module._has_open(tmp_path, tmp_path / "session") and closed
    assert not module._has_open(tmp_path, tmp_path / "sess")


SESSION = """
import time
from rayfl.engine.on_ray.cluster import cluster
with cluster("local"):
    print("started", flush=True)
    time.sleep(600)
"""


@pytest.mark.ray
@pytest.mark.slow
def test_what_a_killed_driver_left_goes_with_the_next_start(start, monkeypatch):
    """The session's folder, and Ray's agents, which would look a minute long for what they served. What ends by itself
    leaves no process."""
    # short, because it is part of sockets' names
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as place:
        monkeypatch.setenv("RAY_TMPDIR", place)

        def sessions():
            return {path.parent for path in Path(place).glob(f"ray/session_*/{TEMPORARY}") if "latest" not in str(path)}

        killed = start(program=(sys.executable, "-c", SESSION))
        until(sessions, killed)
        [left] = sessions()
        started = killed.kill()
        killed.finish()
        agents = named(started, "Agent")
        assert left.exists() and alive(agents)
        again = start(program=(sys.executable, "-c", SESSION))
        until(lambda: sessions() - {left}, again)
        until(lambda: not left.exists(), again)
        assert again.process.stdout is not None and again.process.stdout.readline() == "started\n"
        assert not alive(started)
        started = descendants(again.process.pid)
        assert named(started, "Agent")
        again.interrupt()
        assert "KeyboardInterrupt" in again.finish()[1]
        assert not alive(started)


def starting(monkeypatch, failures):
    """Ray's node times out so many times, with its processes running: what was called."""
    calls = []

    class Node:
        def __init__(self):
            raise Exception("The current node timed out during startup. This could happen because")

        def kill_all_processes(self, **_):
            calls.append("killed")

    def init(**_):
        calls.append("started")
        if calls.count("started") <= failures:
            Node()
        return calls

    monkeypatch.setattr(module, "Node", Node)
    monkeypatch.setattr(ray, "init", init)
    return calls


def test_a_ray_that_does_not_start_in_time_is_started_again(monkeypatch):
    calls = starting(monkeypatch, 2)
    assert module._started() is calls
    assert calls == ["started", "killed", "started", "killed", "started"]


def test_a_ray_that_never_starts_in_time_says_what_to_do(monkeypatch):
    calls = starting(monkeypatch, 9)
    with pytest.raises(RuntimeError) as error:
        module._started()
    said = "in 3 attempts (The current node timed out during startup): the machine is too busy. Hint: try again later;"
    assert said in str(error.value) and "--set run.executor=serial" in str(error.value)
    assert calls == ["started", "killed"] * 3


def test_sockets_of_ray_lie_where_it_accepts_their_paths(monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    for given, folder in {"/scratch": "/scratch/ray", "/größe": "/tmp/ray", "/scratch/" + "x" * 40: "/tmp/ray"}.items():
        monkeypatch.setenv("TMPDIR", given)
        assert module._sessions() == folder
        session = f"{folder}/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
        assert validate_socket_filepath(session) is None and session.isascii()


def test_what_ray_says_of_a_dead_node_is_a_line_beside_the_results(capsys):
    died = "The node with address: 10.0.0.3 has been marked dead because of it. This can happen when a \t"
    log = "Raylet is terminated. Termination is unexpected. Its logs:\n    - bytes in use: 370910\n"
    for text in (died + "(1) raylet crashes\n", log):
        module._print_message({"lines": [text], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "Ray reports: The node with address: 10.0.0.3 has been marked dead because of it",
        "Ray reports: Raylet is terminated",
    ]


def test_a_gpu_that_pytorch_cannot_use_is_refused(monkeypatch):
    """By the actor that gets it; it would train on the CPU."""
    monkeypatch.setattr(host, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(host.torch.cuda, "is_available", lambda: False)
    threads, task = host.torch.get_num_threads(), (tiny().data.arrays(), None)
    with pytest.raises(ConfigError) as error:
        Host(threads, has_gpu=True).load(*task)
    said = str(error.value)
    assert said.startswith(f"run.gpus: Ray gave a client actor on {socket.gethostname()} a GPU, but PyTorch ")
    assert " finds no CUDA device there. Allowed: 0, or GPUs that PyTorch can use. Hint: " in said
    monkeypatch.setattr(host, "Worker", lambda recipe, arrays, device: device)
    for has_gpu, declared in ((False, "0"), (True, "1")):
        monkeypatch.setenv(ONLY_DECLARED, declared)
        actor = Host(threads, has_gpu)
        actor.load(*task)
        assert actor.device == actor.worker == "cpu"


@pytest.mark.ray
def test_a_run_on_ray_is_the_serial_one_until_its_server_dies(ray_cluster, tmp_path):
    """Actors by default are those that leave room for the server."""
    spec = tiny(method="heterofl", clients={"cohort": 6}, run={"executor": "ray", "server_cpus": 3}, rounds=3)
    said = (
        "the run's server actor died. Run the same command with --resume to continue from the last checkpoint\n"
        "Ray reports: The actor "
    )
    lines, scores = [], None
    with pytest.raises(RuntimeError, match=said), running(spec, spec.data.arrays(), tmp_path / "ray", None) as remote:
        assert reserved() == [{0: {"CPU": 1.0}}, {0: {"CPU": 3.0}}]
        while step := remote.step():
            lines += [{k: v for k, v in line.items() if k != "seconds"} for line in step]
        scores = remote.client_scores
        ray.kill(remote.server)
        remote.step()
    nothing_is_left()
    serial = simulate(spec, tmp_path / "serial")
    assert lines == run(serial)
    assert scores is not None and scores.tolist() == serial.client_scores.tolist()


@pytest.mark.ray
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"actors": 99}, "99 client actors of 1 CPUs and 0 GPUs do not fit: this machine has room for 4"),
        ({"gpus": 0.5}, "1 client actor of 1 CPUs and 0.5 GPUs do not fit: this machine has room for 0"),
        ({"cpus": 64}, "1 client actor of 64 CPUs and 0 GPUs do not fit: this machine has room for 0"),
        (
            {"actors": 2, "server_cpus": 3},
            "2 client actors of 1 CPUs and 0 GPUs and a server of 3 CPUs do not fit: this machine has room for 1",
        ),
    ],
)
def test_actors_that_do_not_fit(ray_cluster, tmp_path, asked, said):
    assert refused(tmp_path, **asked) == f"run: {said} (4 CPUs, 0 GPUs). Hint: lower run.actors, run.cpus or run.gpus"


@pytest.mark.ray
def test_a_server_that_does_not_fit(ray_cluster, tmp_path):
    assert refused(tmp_path, server_cpus=99) == (
        "run.server_cpus: 99 is not valid. Allowed: at most 4, the CPUs of this node"
    )


def refused(tmp_path, **asked):
    spec = tiny(run={"executor": "ray", **asked})
    with pytest.raises(ConfigError) as error, running(spec, spec.data.arrays(), tmp_path, None):
        pass
    nothing_is_left()
    return str(error.value)


def reserved():
    """The CPUs of the bundles of all groups."""
    groups = [group["bundles"] for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
    return sorted(({i: {"CPU": one["CPU"]} for i, one in group.items()} for group in groups), key=str)


@pytest.fixture
def raylets():
    """A head of two CPUs, and a node of one."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        nodes.add_node(num_cpus=1)
        nodes.wait_for_nodes(PATIENCE)
        yield nodes
    finally:
        nodes.shutdown()


@pytest.mark.ray
@pytest.mark.slow
def test_clients_leave_this_nodes_cpus_to_the_server(raylets, tmp_path):
    """Ray would pack both clients on the head, where the server has to be."""
    spec = tiny(rounds=1, run={"executor": "ray", "server_cpus": 1})
    with cluster(raylets.address):
        here = ray.get_runtime_context().get_node_id()
        with running(spec, spec.data.arrays(), tmp_path, raylets.address) as simulation:
            assert simulation.step() is not None
            groups = [g for g in ray.util.placement_group_table().values() if g["state"] == "CREATED"]
            places = [sorted(node == here for node in group["bundles_to_node_id"].values()) for group in groups]
    assert sorted(places) == [[False, True], [True]]


def nothing_is_left():
    until(lambda: all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values()))
    until(lambda: ray.available_resources().get("CPU") == 4)


ROUNDS = 60


@pytest.mark.ray
@pytest.mark.slow
def test_a_sweep_over_several_raylets_outlives_one(start, tmp_path):
    """The head has room for the driver only; one of the two others is killed while its trial runs."""
    from ray.cluster_utils import Cluster

    config, folder = tmp_path / "small.yaml", tmp_path / "runs" / "small"
    experiment = TINY | {
        "rounds": ROUNDS,
        "evaluation": {"every": 10},
        "run": {"chunk": 1, "actors": 1, "checkpoint_seconds": 0},
    }
    rows = {name: {"method": name} for name in ("heterofl", "fedrolex")}
    config.write_text(yaml.safe_dump({"experiment": experiment, "rows": rows}))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
        cluster.wait_for_nodes(PATIENCE)
        program = (sys.executable, "scripts/sweep.py")
        arguments = (config, "--output", tmp_path / "runs", "--address", cluster.address)
        sweep = start(*arguments, program=program)

        def all_are_at_work():
            found = [r for r in runs(folder) if r.kind == "run"] if folder.exists() else []
            return len(found) == 2 and all(len(r.rounds()) >= 10 for r in found)

        until(all_are_at_work, sweep)
        os.kill(nodes[0].all_processes["raylet"][0].process.pid, signal.SIGKILL)
        code, printed = sweep.finish()
        assert code == 0, printed
    finally:
        cluster.shutdown()
    for record in (r for r in runs(folder) if r.kind == "run"):
        assert record.status == "finished"
        serial = simulate(load_sweep(config).experiment(record.label, {}, 0), tmp_path / record.id)
        assert [{k: v for k, v in line.items() if k != "seconds"} for line in record.rounds()] == run(serial)
    assert RunFolder.open(folder).status == "finished"
