"""`run.gpus: auto`: where GPUs are used, in which parts, and what a run says about it."""

import pytest
import torch
from helpers import TINY, tiny
from pydantic import PrivateAttr

import rayfl
from rayfl.config import ConfigError
from rayfl.engine import devices
from rayfl.engine.on_ray import cluster, resources
from rayfl.experiment import Resources
from rayfl.listeners import Listener
from rayfl.tuning import scaling, stages
from rayfl.tuning.load import read_sweep

NONE, ONE, EIGHT = {"CPU": 16}, {"CPU": 16, "GPU": 1}, {"CPU": 16, "GPU": 8}


@pytest.fixture
def machine(monkeypatch):
    """A function that gives the nodes of a cluster, this machine first, and whether PyTorch can use its GPU."""

    def of(*nodes, usable=True):
        monkeypatch.setattr(resources, "_nodes", lambda: list(nodes))
        monkeypatch.setattr(resources, "usable", lambda: usable)

    return of


@pytest.mark.parametrize(
    ("nodes", "usable", "run", "clients", "place"),
    [
        ([NONE], False, {}, [{"CPU": 1}] * 4, "4 actors on CPUs; no GPU found"),
        ([ONE], False, {}, [{"CPU": 1}] * 4, "4 actors on CPUs; PyTorch cannot use the 1 GPU that Ray found"),
        ([ONE], True, {}, [{"CPU": 1, "GPU": 1}], "1 actor, one GPU each"),
        ([EIGHT], True, {}, [{"CPU": 1, "GPU": 1}] * 4, "4 actors, one GPU each"),
        ([ONE], True, {"actors": 2}, [{"CPU": 1, "GPU": 0.5}] * 2, "2 actors, 0.5 of a GPU each"),
        ([ONE], True, {"actors": 3}, [{"CPU": 1, "GPU": 1 / 3}] * 3, "3 actors, 0.333 of a GPU each"),
        ([EIGHT], True, {"actors": 2}, [{"CPU": 1, "GPU": 1}] * 2, "2 actors, one GPU each"),
        ([EIGHT], True, {"gpus": 0}, [{"CPU": 1}] * 4, "4 actors on CPUs; run.gpus is 0"),
        ([EIGHT], True, {"gpus": 2, "actors": 1}, [{"CPU": 1, "GPU": 2}], "1 actor, 2 GPUs each"),
        ([NONE, EIGHT], False, {}, [{"CPU": 1, "GPU": 1}] * 4, "4 actors, one GPU each"),
    ],
)
def test_auto_uses_the_gpus_that_ray_and_pytorch_find(machine, nodes, usable, run, clients, place):
    """Four jobs at most. The GPU of another node is checked there."""
    machine(*nodes, usable=usable)
    experiment = tiny(run={"executor": "ray", "chunk": 1, **run})
    found = cluster._clients(experiment, None)
    assert found == clients
    assert resources.described(found, experiment.run) == place


def test_more_actors_than_cpus_are_refused_whatever_the_gpus(machine):
    machine(EIGHT)
    with pytest.raises(ConfigError, match="99 client actors of 1 CPUs and 0.0101.* GPUs do not fit: .*room for 16"):
        cluster._clients(tiny(run={"executor": "ray", "actors": 99}), None)


@pytest.mark.parametrize(
    ("kinds", "gpus"),
    [
        ({"gpu": {"max_workers": 2, "resources": {"GPU": 1}}}, 1),
        ({"gpu": {"max_workers": 0, "resources": {"GPU": 1}}}, 0),
        ({"cpu": {"max_workers": 2, "resources": {"CPU": 4}}}, 0),
        ({"cpu": {"max_workers": 2}}, 0),
        (None, 0),
    ],
)
def test_a_cluster_may_start_nodes_with_gpus(machine, monkeypatch, tmp_path, kinds, gpus):
    """`ray up` leaves its file on the head, where drivers run."""
    machine({"CPU": 0})
    monkeypatch.setattr(resources.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(resources, "_is_head", lambda: False)
    monkeypatch.setattr(resources, "GROWING", str(tmp_path / "up.yaml"))
    assert resources.gpus_of(Resources()) == 0
    (tmp_path / "up.yaml").write_text(str({"available_node_types": kinds}).replace("None", "null"))
    assert resources.gpus_of(Resources()) == gpus
    monkeypatch.setattr(resources, "_is_head", lambda: True)
    assert resources.gpus_of(Resources()) == 0


@pytest.mark.parametrize(("nodes", "actors", "part"), [([ONE], 1, 1), ([EIGHT], 2, 1), ([NONE], 4, 0)])
def test_trials_of_a_sweep_get_one_gpu_per_actor(machine, nodes, actors, part):
    """Four trials on 16 CPUs, with four jobs each at most."""
    machine(*nodes)
    rows = {name: {"method": name} for name in ("fedavg", "heterofl")}
    plan = read_sweep({"experiment": TINY | {"run": {"chunk": 1}}, "rows": rows, "search": {"seeds": [0, 1]}})
    assert plan.trials == 4
    assert stages._clients(plan) == [{"CPU": 1} | ({"GPU": part} if part else {})] * actors


def test_nodes_of_one_machine_do_not_share_its_gpus(machine, monkeypatch):
    machine(ONE)
    monkeypatch.setattr(scaling, "_require_memory", lambda point: None)
    monkeypatch.setattr(scaling.ray_nodes, "connected", lambda: False)
    experiment = tiny(run={"executor": "ray"})
    with pytest.raises(ConfigError, match="nodes of one machine cannot share GPUs. Allowed: only with run.gpus: 0"):
        scaling._at(experiment, scaling.Point(6, 4, 2, 2), 16, None)


class Places(Listener):
    _found: list[str] = PrivateAttr(default_factory=list)

    def on_place(self, place: str) -> None:
        self._found.append(place)


@pytest.mark.parametrize(("gpus", "place"), [("auto", "no GPU found"), (0, "run.gpus is 0")])
def test_a_serial_run_says_where_it_computes(monkeypatch, gpus, place):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    listener = Places()
    result = rayfl.run(
        tiny(rounds=1, method="heterofl", run={"executor": "serial", "gpus": gpus}), listeners=[listener]
    )
    assert listener._found == [f"one process on the CPU; {place}"] and not result.notes


def test_a_serial_run_uses_a_gpu_or_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"run.gpus: 1 is not valid, because PyTorch .* finds no CUDA device here"):
        rayfl.run(tiny(run={"executor": "serial", "gpus": 1}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    for gpus in ("auto", 0.25, 1):
        assert devices.of_serial(gpus) == (torch.device("cuda"), "one process on one GPU (H200)")
    assert devices.of_serial(0)[0] == torch.device("cpu")
