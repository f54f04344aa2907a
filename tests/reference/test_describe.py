"""The bytes of `describe` against those of a run's round 3, and its notes."""

from collections import Counter

import pytest
import torch
from chats import causal
from golden_cases import CASES
from helpers import tiny

from rayfl import costs
from rayfl.core import operations
from rayfl.core.net import Net
from rayfl.data.tokens import Sequences
from rayfl.engine.simulation import Simulation
from rayfl.experiment import read_experiment
from rayfl.methods import METHODS
from rayfl.reference.describe import describe
from rayfl.results.cells import human_bytes

FIRST = {case["method"]["name"]: case for case in reversed(CASES.values())}
"""One small experiment per method."""
ESTIMATED = {"feddistill": 0.3, "fedkd": 0.2, "florist": 0.2, "fiarse": 1e-3, "pruning_greedy": 1e-3}
"""Relative error where bytes depend on trained values, or on the samples of all steps."""
ALTERNATING = ("fedsb", "flora", "rolora", "lora_a2", "lg_fedavg", "fedmd")
"""Methods that send something else in some rounds, or in the first ones only."""
FAMILIES = {cls.__module__.split(".")[2]: name for name, cls in METHODS.items()}
"""Family -> the last of its methods."""


def of_a_run(experiment, folder):
    """Return the numbers of round 3 and its clients by capacity."""
    simulation = Simulation(experiment, experiment.data.arrays(), folder)
    for _ in range(2):
        simulation.run_round()
    cohort = Counter(client.capacity for _, clients in simulation.cohort().values() for client in clients)
    return simulation.run_round(), cohort


@pytest.mark.parametrize("method", sorted({*ESTIMATED, *ALTERNATING, *FAMILIES.values()}))
def test_bytes_are_those_of_round_3(method, tmp_path):
    experiment = read_experiment(FIRST[method], "test")
    experiment = experiment.with_(evaluation={"every": 9}, rounds=9)
    line, cohort = of_a_run(experiment, tmp_path)
    records = {record["capacity"]: record for record in describe(experiment)}
    for name in ("bytes_down", "bytes_up"):
        found = sum(records[capacity][name] * count for capacity, count in cohort.items())
        # means are rounded to whole bytes
        expected = pytest.approx(line[name], rel=ESTIMATED.get(method, 0), abs=sum(cohort.values()) / 2)
        assert found == expected, name


@pytest.mark.parametrize("seed", range(6))
def test_a_round_without_clients_is_described(seed):
    """Of six clients, one in the mean."""
    clients = {"count": 6, "cohort": 1, "capacities": [0.3, 0.2, 0.1], "participation": "poisson"}
    records = describe(tiny(seed=seed, clients=clients))
    assert all(record["bytes_up"] == 4 * record["parameters"] for record in records)


def test_a_data_set_that_is_not_there_is_made_up(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    sections = {
        "data": {"name": "fashion_mnist", "public": {"share": 0.1, "labeled": True}},
        "partition": {"name": "shards", "labels": 2},
        "model": "digits_cnn",
        "method": "fedmd",
        "clients": {"count": 50, "cohort": 2, "capacities": [1, 0.5]},
    }
    notes = []
    records = describe(read_experiment(sections, "test"), notify=notes.append)
    up = 4 * 1000 * 10
    assert [(record["bytes_down"], record["bytes_up"]) for record in records] == [(up + 2 * 4 * 1000, up)] * 2
    [memory, *others] = sorted(notes, reverse=True)
    assert memory == "Memory of a client actor: about 0.37 GB, with batches of 20 samples (run.memory: auto)"
    assert others == [
        "Bytes: mean per client of round 3, 2 of 50 clients, estimated with one training step per client, on 10,000 "
        "made-up samples, because the data set is not available"
    ]


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bf16", 2)])
def test_the_memory_of_a_language_model_is_told_by_parts(tmp_path, dtype, size):
    base = {"name": "causal_lm", "weights": causal(tmp_path / "llama"), "dtype": dtype}
    sections = {
        "data": {"name": "synthetic_text", "task": "next_token", "tokens": 300, "length": 16},
        "model": {"name": "lora", "base": base, "rank": 2, "targets": "all-linear"},
        "training": {"batch_size": 8, "accumulate": 4, "optimizer": "adamw"},
    }
    notes = []
    clients = {"count": 3, "cohort": 2, "capacities": [1, 0.5]}
    experiment = tiny(method="fedit", clients=clients, partition={"name": "iid"}, **sections)
    describe(experiment, notify=notes.append)
    net = max(experiment.bound().task.nets.values(), key=lambda net: net.parameters)
    [note] = [note for note in notes if note.startswith("Of it, ")]
    memory = costs.training_memory(net, 2, 2)
    base_parameters = 304 * 32 * 2 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32) + 32
    # and the frequencies of positions, in float32
    assert 0 <= memory.frozen - base_parameters * size < 100
    assert memory.optimizer == 3 * memory.parameters == 3 * 4 * net.parameters
    assert memory.activations == 2 * 4 * net.activations
    for size in memory:
        assert human_bytes(size) in note
    [padding] = [note for note in notes if note.startswith("Padding: ")]
    assert padding.endswith(" of the tokens of batches of 8 (data.order: lengths)")
    # without checkpointing, those of both blocks
    kept = Net(experiment.model.model_copy(update={"base": net.model.base.model_copy(update={"checkpointing": True})}))
    inside = operations.count(Net(net.model).blank(), net.model.example(1, "meta")).activations
    assert inside == net.activations > kept.activations > inside / 3


def test_the_padding_of_batches_is_counted():
    x = torch.arange(4).repeat(4, 1)
    x[torch.arange(4) > torch.tensor([[0], [1], [2], [3]])] = -1
    # of 1, 2, 3 and 4 tokens
    assert Sequences("stored").padding(x, 2) == (2, 12)
    assert Sequences("stored").padding(x, 4) == (6, 16)
    assert Sequences("lengths").padding(x[[0, 3, 1, 2]], 2) == (2, 12)
