"""Processes that were killed because memory ran out: who held how much, and what to lower."""

import os
from types import SimpleNamespace

import pytest
from helpers import tiny
from ray.exceptions import OutOfMemoryError

from rayfl.config import ConfigError, RunFailed
from rayfl.engine.on_ray import cluster, memory, resources
from rayfl.tuning import recorder as recording
from rayfl.tuning.recorder import Recorder

OF_RAY = """1 worker(s) were killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.2, ID: 5f) was 15.21GB used / 16.00GB limit (0.95)
OOM kill reason: the usage is above the threshold
Object store memory usage: [0]
Ray killed 1 worker(s) based on the killing policy
Considered workers: [
(task, pid=12, actual memory used=8.47GB, worker ID=01)
]
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
12\t8.47\tray::ClientActor.train
13\t3.10\tray::ClientActor
11\t1.20\tray::ServerActor.step
9\t0.90\t/usr/bin/browser --type=tab
10\t0.61\tpython3 /venv/bin/rayfl sweep big
14\t0.08\tray::IDLE
Refer to the documentation on how to address the out of memory issue"""
SENTENCE = (
    "Ray killed processes of a node, which used 15.21 of 16.00 GB, because memory ran out: client actor 8.5 GB "
    "(process 12), client actor 3.1 GB (process 13), server actor 1.2 GB (process 11), command 0.61 GB (process 10). "
    "Hint: lower run.actors, training.batch_size or evaluation.batch_size, or raise run.memory, so that fewer client "
    "actors share a node"
)


def test_what_ray_says_is_a_sentence():
    assert memory.by_ray(OF_RAY) == SENTENCE
    assert memory.by_ray("the actor died because its node died") is None
    # another program held more than all of ours
    assert "server actor 1.2 GB (process 11), command 0.61 GB (process 10), /usr/bin/browser 20 GB (process 9). H" in (
        memory.by_ray(OF_RAY.replace("9\t0.90", "9\t20.1")) or ""
    )
    # of another version of Ray, what is known
    assert memory.by_ray("low on memory") == f"Ray killed processes of a node, because memory ran out. {memory.HINT}"


def test_a_server_that_ray_killed_and_the_messages_of_nodes(monkeypatch, capsys):
    monkeypatch.setattr(cluster.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(cluster.ray, "get", lambda ref: (_ for _ in ()).throw(OutOfMemoryError(OF_RAY)))
    monkeypatch.setattr(cluster, "require_ray", lambda: None)
    with pytest.raises(RunFailed) as error:
        cluster.get("ref")
    assert str(error.value) == f"{SENTENCE}. {cluster.GOES_ON}"
    cluster._print_message({"lines": OF_RAY.splitlines(), "pid": "raylet", "is_err": True}, ignore_prefix=False)
    assert capsys.readouterr().err.splitlines() == [f"Ray reports: {SENTENCE}"]


def test_what_the_system_kills_is_told_from_other_deaths(monkeypatch):
    system = {"kills": 7, 12: 8_400_000_000, 11: 1_000_000_000}
    monkeypatch.setattr(memory, "kills", lambda: system["kills"])
    monkeypatch.setattr(memory, "held", system.get)
    processes = {11: "ray::ServerActor", 12: "ray::ClientActor"}
    watch = memory.Watch()
    watch.look(processes)
    # its memory is known although it had died before the next look
    del system[12]
    watch._next = 0.0
    watch.look(processes)
    assert watch.by_system(12, processes) is None
    system["kills"] = 8
    assert watch.by_system(12, processes) == (
        "the operating system killed process 12 because memory ran out: client actor 8.4 GB (process 12), server actor "
        f"1 GB (process 11). {memory.HINT}"
    )
    assert watch.by_system(12, processes) is None


def test_memory_limits_and_is_reserved_for_client_actors(monkeypatch):
    nodes = [{"CPU": 16.0, "memory": 4e9}, {"CPU": 16.0, "memory": 2e9}]
    monkeypatch.setattr(resources, "_nodes", lambda: nodes)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)

    def clients(**run):
        return cluster._clients(
            tiny(clients={"count": 20, "cohort": 20}, run={"executor": "ray", "chunk": 1} | run), None
        )

    # an actor of 1.5 GB fits twice into the first node, once into the second
    assert resources.room(1, 0, 0, 1.5e9) == 3
    assert clients(memory=1.5) == [{"CPU": 1, "memory": 1.5e9}] * 3
    with pytest.raises(ConfigError, match=r"4 client actors of 1 CPUs, 0 GPUs and 1.5 GB do not fit: .* run.memory"):
        clients(memory=1.5, actors=4)
    # the estimate limits `actors: auto`, and refuses nothing
    estimate = round(resources.memory_of(tiny()))
    assert clients() == [{"CPU": 1, "memory": estimate}] * (int(4e9 / estimate) + int(2e9 / estimate))
    assert clients(actors=30) == [{"CPU": 1}] * 30
    nodes[:] = [{"CPU": 16.0, "memory": 1e8}]
    assert clients() == [{"CPU": 1}]


def test_the_estimate_is_that_of_the_largest_network_and_batch_of_clients_side_by_side():
    run = {"together": 8}
    small, large = (tiny(training={"batch_size": n, "optimizer": "adam"}, run=run) for n in (10, 100))
    net = max(large.bound().task.nets.values(), key=lambda net: net.parameters)
    assert small.training.moments == 2
    by_hand = 0.35e9 + 8 * 2 * 4 * (4 * net.parameters + 100 * net.activations)
    assert resources.memory_of(large) == pytest.approx(by_hand)
    assert resources.memory_of(large) - resources.memory_of(small) == pytest.approx(8 * 2 * 4 * 90 * net.activations)


def test_the_memory_of_a_process():
    assert 10**6 < (memory.held(os.getpid()) or 0) < 10**12
    assert memory.held(2**30) is None
    assert memory.kills() is None or (memory.kills() or 0) >= 0


def test_a_sweep_says_it_once(monkeypatch):
    causes = [OutOfMemoryError(OF_RAY), OutOfMemoryError(OF_RAY), ValueError("other")]
    monkeypatch.setattr(recording, "_cause", lambda trial: causes[trial.number])
    teller = Recorder.__new__(Recorder)
    teller.is_memory_said = False
    said = [teller._news(SimpleNamespace(number=i)) for i in range(3)]
    assert said == [SENTENCE, "it was killed because memory ran out again", "ValueError: other"]
