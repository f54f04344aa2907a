"""Ray equals serial, to the bit, for any number of actors and after any fault that the supervisor survives."""

import dataclasses
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from crews import crew_of, everyone_has_loaded, on_ray, resized, result
from faults import Faulty
from helpers import NESTED, PersonalHead, Photos, run, simulate, tiny
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayTaskError

from rayfl.config import ConfigError, RunFailed
from rayfl.data.datasets import Datasets
from rayfl.engine import cohort
from rayfl.engine.checked import Diverged
from rayfl.engine.files import NotWritten, checksum
from rayfl.engine.jobs import Job
from rayfl.engine.on_ray import cluster as cluster_module
from rayfl.engine.on_ray import pool as executor
from rayfl.engine.on_ray.pool import JobFailed
from rayfl.engine.on_ray.server import ServerActor
from rayfl.engine.on_ray.status import About

pytestmark = pytest.mark.ray
BUFFERED = {"mode": {"name": "buffered", "concurrency": 5, "buffer": 2}}
"""The `system:` section of an asynchronous run on phones."""
SILENT = 4.0
"""Seconds that a job may take where one hangs: the pool looks every five, and no other job takes as long."""


def faulty(tmp_path, fault, times=1, **sections):
    """Client 4 fails; all six take part, one a job."""
    method = Faulty(client=4, fault=fault, times=times, marker=str(tmp_path / "marker"))
    return tiny(method=method, clients={"cohort": 6}, **sections)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the result of `faulty` runs without faults, in this process."""
    experiment = tiny(method=PersonalHead(), clients={"cohort": 6})
    return result(simulate(experiment, tmp_path_factory.mktemp("serial")))


def pids(tmp_path):
    return (tmp_path / "marker").read_text().split()


def test_an_actor_that_is_ready_first_leaves_jobs_to_the_others(pool):
    jobs = [Job(None, 1.0, dict) for _ in range(4)]
    batch = executor._Batch(pool, "refine", jobs, dict)
    slots = [executor._Slot(bundle, actor=object()) for bundle in range(2)]
    batch.pool = SimpleNamespace(slots=slots)

    def given():
        found = []
        while (next := batch._next()) is not None:
            index, slot = next
            batch.queue.remove(index)
            slot.running.append(index)
            found.append((index, slot.bundle))
        return found

    slots[0].ready = True
    assert given() == [(0, 0)]
    slots[1].ready = True
    assert given() == [(1, 1), (2, 0), (3, 1)]


def test_a_node_dies_while_its_actors_are_idle(actors, group, tmp_path):
    """Two of three actors: a job finds one dead, and is not sent to the other."""
    experiment = tiny(method="fedavg", clients={"cohort": 1})
    serial = result(simulate(experiment, tmp_path / "serial"))
    pool = resized(actors, group, 3)
    simulation = on_ray(pool, experiment, tmp_path / "ray")
    batch = executor._Batch(pool, "train", [], dict)
    for slot in pool.slots:
        batch._admit(slot)
    for slot in pool.slots[:2]:
        slot.place = dataclasses.replace(slot.place, node="gone")
        ray.kill(slot.actor)
    assert result(simulation) == serial
    assert 1 <= pool.deaths <= 2


def test_samples_of_datasets_have_the_same_draws_on_actors(pool, tmp_path):
    """FakeData by its name, and a Dataset of a user's own with RandAugment, as objects."""
    fake = {"size": 30, "image_size": [3, 8, 8], "num_classes": 2}
    named = {"name": "datasets", "train": {"of": "torchvision.datasets:FakeData", "options": fake}, "flip": True}
    sections = {"model": "liang_mlp", "partition": "iid", "clients": {"count": 3, "cohort": 3}, "method": "heterofl"}
    for data in (named, Datasets(Photos(), Photos(10))):
        experiment = tiny(data=data, **sections)
        serial = result(simulate(experiment, tmp_path / "serial"))
        assert result(on_ray(pool, experiment, tmp_path / "ray")) == serial


def test_an_actor_that_is_silent_while_doubted_is_replaced(pool, monkeypatch):
    batch = executor._Batch(pool, "refine", [Job(None, 1.0, dict)], dict)
    slots = [executor._Slot(0, object(), ready=True, doubted=doubted, beat=object()) for doubted in (True, False)]
    lost = []
    batch.pool = SimpleNamespace(slots=slots, idle_since=0.0)
    monkeypatch.setattr(batch, "_lose", lambda slot, error: lost.append((slot, str(error))))
    monkeypatch.setattr(executor.time, "monotonic", lambda: 31.0)
    assert batch._next() == (0, slots[1])
    batch._check_deadlines()
    assert lost == [(slots[0], "no sign of life within 30 s")]


def test_an_actor_dies_in_an_asynchronous_run(pool, tmp_path):
    expected = result(simulate(tiny(method=PersonalHead(), rounds=5, system=BUFFERED), tmp_path / "serial"))
    assert max(line["staleness"] for line in expected[0]) > 0
    faulty = Faulty(client=4, fault="die", times=1, marker=str(tmp_path / "marker"))
    # the work of a visit is measured in this process, when the schedule is first asked
    (tmp_path / "marker").write_text("0")
    simulation = on_ray(pool, tiny(method=faulty, rounds=5, system=BUFFERED), tmp_path)
    assert simulation.schedule
    (tmp_path / "marker").unlink()
    assert result(simulation) == expected
    assert pool.deaths == 1


def test_an_actor_dies_in_the_middle_of_a_round(pool, tmp_path, undisturbed):
    """Its job is sent again with the carry of the round before, and a checkpoint then has what everyone keeps."""
    simulation = on_ray(pool, faulty(tmp_path, "die"), tmp_path)
    (tmp_path / "marker").write_text("0")
    first = run(simulation, 1)
    assert pool.deaths == 0 and set(simulation.client_states.files) == set(range(6))
    (tmp_path / "marker").unlink()
    lines, *bits = result(simulation)
    assert (first + lines, *bits) == undisturbed
    assert (pool.deaths, len(pids(tmp_path))) == (1, 1)
    assert len(list((tmp_path / "client_states").iterdir())) == 6
    simulation.save(tmp_path / "saved")
    again = simulate(faulty(tmp_path, "die"), tmp_path / "again")
    assert again.restore(tmp_path / "saved") == (2, [])
    assert result(again) == ([], *bits)
    # the replacement is admitted once it has loaded the run
    everyone_has_loaded(pool)
    simulation.run_round()
    assert all(slot.ready for slot in pool.slots)
    alive = [str(ray.get(slot.actor.__ray_call__.remote(lambda actor: os.getpid()))) for slot in pool.slots]
    assert len(set(alive) - set(pids(tmp_path))) == 2


def test_of_many_networks_only_those_in_flight_are_there(pool, tmp_path, monkeypatch):
    """A carry is loaded when its job goes out, and what a key shares is given up with its last answer."""
    experiment = tiny(method=PersonalHead(), clients={"count": 24, "cohort": 24}, run={"together": 1})
    simulation = on_ray(pool, experiment, tmp_path)
    flying = executor.IN_FLIGHT * len(pool.slots)
    receive, get = executor._Batch._receive, simulation.client_states.get
    loads: list[int] = []
    answered, ahead, there = [], [], []

    def noted_receive(batch, ref):
        receive(batch, ref)
        answered.append(ref)
        there.append(len(batch.shared))

    def noted_get(client):
        loads.append(client)
        ahead.append(len(loads) - len(answered))
        return get(client)

    monkeypatch.setattr(executor._Batch, "_receive", noted_receive)
    monkeypatch.setattr(simulation.client_states, "get", noted_get)
    simulation.run_round()
    assert sorted(loads) == sorted(simulation.client_states.files) == list(range(24))
    assert max(ahead) == flying
    for notes in (loads, answered, ahead, there):
        notes.clear()
    simulation.evaluate()
    own = [id for id in range(24) if simulation.data.test.sizes[id]]
    assert len(own) > 10 and set(loads) == set(own)
    assert max(there) <= flying


def test_a_client_that_kills_every_actor_ends_the_run(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(executor, "ATTEMPTS", 2)
    simulation = on_ray(pool, faulty(tmp_path, "die", times=9), tmp_path)
    size = int(simulation.data.train.sizes[4])
    with pytest.raises(JobFailed) as failed:
        simulation.run_round()
    first, *more = str(failed.value).splitlines()
    assert re.fullmatch(
        r"a client actor died; its log is /.*\.err on node [0-9a-f]{8} "
        rf"\(in all 2 attempts at: train, clients \[4\] with \[{size}\] samples, round 1, local_update of method .*\)",
        first,
    )
    assert any(line.startswith("Ray reports: ActorDiedError: ") for line in more)
    # an actor may take the answer of the job before with it, and that job then counts as the one that failed
    assert 2 <= len(set(pids(tmp_path))) <= 4


def test_an_exception_in_a_client_ends_the_run_after_a_try_on_another_actor(pool, tmp_path):
    simulation = on_ray(pool, faulty(tmp_path, "raise", times=9), tmp_path)
    with pytest.raises(JobFailed) as failed:
        simulation.run_round()
    size = int(simulation.data.train.sizes[4])
    said = str(failed.value)
    assert said.splitlines()[0] == (
        f"method faulty, local_update, client 4: ArithmeticError: on purpose (round 1, capacity 0.1, {size} samples) "
        f"(in all 2 attempts at: train, clients [4] with [{size}] samples, round 1, local_update of method faulty)"
    )
    assert "Traceback" in said and "in _fail" in said and "ArithmeticError: on purpose" in said
    assert len(set(pids(tmp_path))) == 2
    assert pool.deaths == 0


@pytest.mark.parametrize("cause", [AssertionError(), KeyError("colour")])
def test_an_exception_that_is_no_methods_keeps_its_type_and_its_traceback(pool, cause):
    """As of a user's score."""
    batch = executor._Batch(pool, "evaluate", [Job(None, 1.0, dict, "evaluation on test")], dict)
    text = f'Traceback (most recent call last):\n  File "score.py", line 7, in counts\n{type(cause).__name__}'
    error = RayTaskError("run", text, cause).as_instanceof_cause()
    with pytest.raises(JobFailed) as failed:
        batch._retry(0, executor.raised(error), attempts=1)
    first, *more = str(failed.value).splitlines()
    said = {"AssertionError": "AssertionError", "KeyError": "KeyError: 'colour'"}[type(cause).__name__]
    assert first == f"{said} (in all 1 attempts at: evaluate, evaluation on test)"
    assert more[1:] == ['  File "score.py", line 7, in counts', type(cause).__name__] and "\x1b" not in more[0]


def test_errors_of_the_server_actor(monkeypatch):
    """Those of rayfl are raised as they are, with the rounds before; others have their type and traceback."""

    def answer(cause):
        error = RayTaskError("step", "Traceback: in on_round", cause).as_instanceof_cause()
        monkeypatch.setattr(cluster_module.ray, "wait", lambda refs, timeout: (refs, []))
        monkeypatch.setattr(cluster_module.ray, "get", lambda ref: (_ for _ in ()).throw(error))
        with pytest.raises((RunFailed, ConfigError)) as raised:
            cluster_module.get(None)
        return raised.value

    diverged = Diverged("round 3: not finite")
    diverged.lines = [{"round": 1}, {"round": 2}]
    for cause in (diverged, ConfigError("run.gpus: no CUDA"), NotWritten("/x: cannot be written")):
        assert answer(cause) is cause
    said = str(answer(KeyError("colour"))).splitlines()
    assert said[0] == "KeyError: 'colour'" and "in on_round" in said[1]


def test_a_configuration_that_an_actor_refuses_ends_the_run_at_once(pool, monkeypatch):
    """Such as a GPU that PyTorch cannot use: a new actor would refuse it too."""
    batch = executor._Batch(pool, "evaluate", [], dict)
    error = RayTaskError("load", "Traceback", ConfigError("run.gpus: no CUDA")).as_instanceof_cause()
    slot = SimpleNamespace(loading=ray.put(error), ready=False)
    monkeypatch.setattr(executor.ray, "get", lambda ref: (_ for _ in ()).throw(error))
    with pytest.raises(ConfigError, match=r"^run\.gpus: no CUDA$"):
        batch._admit(slot)


def test_an_exception_in_a_worker_is_said_with_its_traceback(pool, tmp_path):
    on_ray(pool, tiny(method="fedavg"), tmp_path)
    with pytest.raises(JobFailed) as failed:
        list(pool.map("evaluate", [Job(None, 1.0, dict, "nothing")], lambda key: {}))
    first, *more = str(failed.value).splitlines()
    assert first.startswith("AttributeError: ")
    assert first.endswith(" (in all 2 attempts at: evaluate, nothing)")
    # newer versions of Python add a suggestion to the traceback
    assert any("in evaluate" in line for line in more) and more[-1].startswith(first.partition(" (in all")[0])


def test_what_a_user_did_wrong_is_said_as_it_is(pool, tmp_path):
    """Without a try on another actor, and without a traceback."""
    simulation = on_ray(pool, faulty(tmp_path, "refuse", times=9), tmp_path)
    with pytest.raises(ConfigError) as refused:
        simulation.run_round()
    assert str(refused.value) == "method.client: a client is not valid. Allowed: nobody"
    assert len(pids(tmp_path)) == 1


def test_an_exception_that_does_not_come_again_changes_nothing(pool, tmp_path, undisturbed):
    assert result(on_ray(pool, faulty(tmp_path, "raise"), tmp_path)) == undisturbed


def test_a_job_that_hangs_is_given_to_another(pool, tmp_path, undisturbed):
    pool.deadline = SILENT
    assert result(on_ray(pool, faulty(tmp_path, "hang"), tmp_path)) == undisturbed
    assert pool.deaths >= 1 and len(pids(tmp_path)) == 1


def test_a_process_that_stops_in_its_first_job_is_replaced(actors, group, tmp_path, monkeypatch):
    """Long before the limit of a first job: its process gives no sign of life. The job's clients train side by side."""
    pool = resized(actors, group, 1)
    monkeypatch.setattr(executor, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(executor, "BEAT_SECONDS", 0.5)
    monkeypatch.setattr(executor, "SILENT_SECONDS", 2.0)
    clients = {"count": 8, "capacities": [0.3], "cohort": 8}
    stops, well, alone = (
        tiny(method=method, clients=clients, run={"chunk": 8, "together": together})
        for method, together in ((faulty(tmp_path, "stop").method, 8), (PersonalHead(), 8), (PersonalHead(), 1))
    )
    answer = result(on_ray(pool, stops, tmp_path / "stops"))
    assert answer == result(simulate(well, tmp_path / "serial"))
    assert answer != result(simulate(alone, tmp_path / "alone"))
    assert (pool.deaths, len(pids(tmp_path))) == (1, 1)


def test_how_long_a_job_may_take(pool):
    pool.load([ray.put(None), ray.put(None)])
    assert pool.limit("train", 1.0) == pool.deadline == 60
    assert pool.limit("train", 1e12) == 10_000
    pool._answered("train", 100.0, 30.0)
    pool._answered("train", 50.0, 20.0)
    assert pool.limit("train", 1.0) == pool.limit("train", 100.0) == 300
    assert pool.limit("train", 400.0) == 1200
    assert pool.limit("evaluate", 1.0) == pool.deadline
    pool._answered("evaluate", 1.0, 0.5)
    assert pool.limit("evaluate", 1.0) == pool.deadline


@pytest.mark.parametrize("error", [OutOfMemoryError("no memory"), ObjectLostError("0" * 56, None, "")])
def test_what_ray_loses_runs_again(pool, tmp_path, undisturbed, monkeypatch, error):
    get, wait = ray.get, ray.wait
    simulation = on_ray(pool, faulty(tmp_path, "die", times=0), tmp_path)
    flying = []

    def lose_one(ref):
        if ref in flying[:1]:
            flying[:] = [None]
            raise error
        return get(ref)

    def watched(refs, **options):
        flying.extend(ref for ref in refs if ref not in [slot.loading for slot in pool.slots])
        return wait(refs, **options)

    monkeypatch.setattr(executor.ray, "get", lose_one)
    monkeypatch.setattr(executor.ray, "wait", watched)
    # the actor is well: it takes up its own place again
    monkeypatch.setattr(executor.ray, "kill", lambda actor: None)
    monkeypatch.setattr(pool, "_start", pool._load)
    assert result(simulation) == undisturbed
    assert (flying[0], pool.deaths) == (None, 1)


def test_actors_that_never_start_end_the_run(pool, tmp_path, monkeypatch):
    simulation = on_ray(pool, tiny(method="fedavg"), tmp_path)
    monkeypatch.setattr(executor.ray, "kill", lambda actor: None)
    monkeypatch.setattr(pool, "_start", pool._load)
    pool.load([ray.put("no arrays"), ray.put("no recipe")])
    with pytest.raises(JobFailed) as failed:
        simulation.run_round()
    # newer versions of Python add a suggestion
    assert str(failed.value).startswith(
        "a client actor failed to start 3 times. The last error: AttributeError: 'str' object has no attribute 'method'"
    )


def test_what_is_shared_is_never_written(pool, tmp_path, monkeypatch):
    """The data set, the run's recipe, and every payload of a round are afterwards what they were."""
    put, refs, before = ray.put, [], []

    def noted(value):
        ref = put(value)
        refs.append(ref)
        before.append(bits(ray.get(ref)))
        return ref

    monkeypatch.setattr(ray, "put", noted)
    simulation = on_ray(pool, tiny(method="heterofl"), tmp_path)
    run(simulation)
    assert [bits(ray.get(ref)) for ref in refs] == before
    assert len(refs) > 5


def bits(value):
    """The bytes of every array in a message or a data set."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, tuple | list):
        return [bits(part) for part in value]
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items()}
    return bits(vars(value)) if hasattr(value, "__dict__") else None


def test_ray_equals_serial(actors, group, tmp_path):
    """For several actors and one: the metrics, the state and what clients keep. That every method has the same bits
    with messages in flat buffers is part of the contract; here is one of each kind of message. Distillation has a file
    of its own."""
    runs = {
        name: tiny(method=method, clients={"cohort": 6})
        for name, method in {"fedavg": "fedavg", "fedrolex": "fedrolex", "personal": PersonalHead()}.items()
    }
    runs["buffered"] = tiny(method="fedrolex", rounds=4, system=BUFFERED | {"sampler": "oort"})
    chain = [{"name": "error_feedback"}, {"name": "topk", "share": 0.1}, {"name": "int8"}]
    runs["compressed"] = tiny(method="fedrolex", rounds=3, updates={"transforms": chain})
    privacy = {"clip": 0.5, "noise": 0.8, "delta": 0.1, "quantile": 0.5, "deviation": 0.5}
    drawn = {"cohort": 4, "participation": "poisson"}
    model = {"name": "digits_cnn", "norm": "none"}
    runs["private"] = tiny(method="heterofl", rounds=3, model=model, clients=drawn, privacy=privacy)
    for name in ("fjord", "fiarse", "spafl", "scaffold", "nefl", "depthfl", "flora"):
        runs[name] = tiny(**NESTED.get(name, {}) | {"method": name, "run": {"chunk": 2}})
    serial = {key: result(simulate(spec, tmp_path / key)) for key, spec in runs.items()}
    for count in (3, 1):
        pool = resized(actors, group, count)
        for key in runs if count == 3 else ["personal", "buffered"]:
            assert result(on_ray(pool, runs[key], tmp_path / f"{key}-{count}")) == serial[key], (key, count)


def test_ray_equals_serial_on_a_table(pool, tmp_path):
    """With numbers as targets, whose constants every process has from the clients' training rows."""
    experiment = tiny(data="diabetes", model="mlp", partition="dirichlet", clients={"cohort": 6})
    serial = simulate(experiment, tmp_path / "serial")
    expected = result(serial)
    assert "mse_mean" in expected[0][-1] and serial.data.goal.mean[0] > 100
    assert result(on_ray(pool, experiment, tmp_path / "ray")) == expected


@pytest.fixture
def far(pool, monkeypatch):
    """Actors that seem to be on another node than their server, which then sees the sum of a branch alone."""
    monkeypatch.setattr(pool, "here", "elsewhere")
    monkeypatch.setattr(cohort, "BRANCH", 2)
    sums, add_up = [], executor._Batch._add_up

    def noted(batch, parts):
        sums.append(list(parts.sizes))
        add_up(batch, parts)

    monkeypatch.setattr(executor._Batch, "_add_up", noted)
    return sums


@pytest.mark.parametrize("chunk", [1, 2])
def test_nodes_add_up_their_branches_to_the_same_bits(pool, far, chunk, tmp_path):
    experiment = tiny(method=PersonalHead(), clients={"count": 7, "cohort": 7}, partition="iid", run={"chunk": chunk})
    serial = result(simulate(experiment, tmp_path / "serial"))
    simulation = on_ray(pool, experiment, tmp_path / "spread")
    assert result(simulation) == serial
    expected = [[1, 1], [1, 1], [1, 1], [1]] if chunk == 1 else [[2, 1], [2], [2]]
    assert sorted(far[-len(expected) :], reverse=True) == expected


@pytest.mark.parametrize("fault", ["die", "raise"])
def test_a_branch_survives_the_faults_of_its_clients(pool, far, fault, tmp_path, undisturbed):
    assert result(on_ray(pool, faulty(tmp_path, fault), tmp_path)) == undisturbed
    assert far and len(pids(tmp_path)) == 1


@pytest.mark.parametrize("fault", ["die", "raise"])
def test_a_branch_whose_parts_are_lost_is_worked_out_again(pool, far, fault, tmp_path, monkeypatch):
    """The actor that adds up dies, or finds a part gone."""
    experiment = tiny(method=PersonalHead(), clients={"cohort": 6})
    serial = result(simulate(experiment, tmp_path / "serial"))
    simulation, add_up, faults = on_ray(pool, experiment, tmp_path / "spread"), executor._Batch._add_up, []

    def failing(batch, parts):
        if not faults:
            faults.append(parts.branch)
            wrong = ray.put("no update")
            if fault == "die":
                slot = batch.pool.slots[0]
                slot.actor.__ray_call__.remote(lambda actor: os._exit(1))
            else:
                parts = dataclasses.replace(parts, parts=[wrong, *parts.parts[1:]])
        add_up(batch, parts)

    monkeypatch.setattr(executor._Batch, "_add_up", failing)
    assert result(simulation) == serial
    assert len(faults) == 1 and pool.deaths == (fault == "die")


def test_the_server_actor_says_where_it_is_while_it_works(group, actors, tmp_path):
    """And the next run in its processes has the bits of a run in fresh ones."""
    resized(actors, group, 0)
    server = ServerActor.remote(crew_of(group, [0]))
    spec = faulty(tmp_path, "wait")
    arrays = ray.put(spec.data.arrays())
    assert ray.get(server.status.remote()) is None
    ray.get(server.load.remote(spec, [arrays], str(tmp_path / "first"), About("fedavg", "first")))
    step = server.step.remote()
    status = ray.get(server.status.remote())
    assert (status.about.label, status.round, status.rounds, status.deaths) == ("fedavg", 0, spec.rounds, 0)
    assert (status.pace, status.left) == (None, None)
    assert ray.wait([step], timeout=0)[0] == []
    (tmp_path / "marker").touch()
    ray.get(step)

    spec = tiny(method="fedrolex", rounds=3)
    ray.get(server.load.remote(spec, [arrays], str(tmp_path / "second"), About("fedrolex", "second")))
    lines = []
    while step := ray.get(server.step.remote()):
        lines += step
    status = ray.get(server.status.remote())
    assert (status.round, status.left, len(status.places), status.starting) == (3, 0.0, 1, 0)
    assert status.pace == pytest.approx(sum(line["seconds"] for line in lines) / 3)
    ray.get(server.save.remote(str(tmp_path / "saved")))
    ray.get(server.close.remote())
    simulation = simulate(spec, tmp_path / "serial")
    assert [{k: v for k, v in line.items() if k != "seconds"} for line in lines] == run(simulation)
    again = simulate(spec, tmp_path / "again")
    assert again.restore(tmp_path / "saved") == (3, [])
    assert checksum(again.state) == checksum(simulation.state)
