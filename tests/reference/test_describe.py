"""The bytes of `describe` against those of a run's round 2."""

from collections import Counter

import pytest
from golden_cases import CASES
from helpers import tiny

from rayfl.engine.simulation import Simulation
from rayfl.experiment import read_experiment
from rayfl.methods import METHODS
from rayfl.reference.describe import describe

FIRST = {case["method"]["name"]: case for case in reversed(CASES.values())}
"""One small experiment per method."""
ESTIMATED = {"feddistill": 0.3, "fedkd": 0.2, "florist": 0.2, "fiarse": 1e-3, "pruning_greedy": 1e-3}
"""Relative error where bytes depend on trained values, or on the samples of all steps."""


def of_a_run(experiment, folder):
    """Return the numbers of round 3 and its clients by capacity."""
    simulation = Simulation(experiment, experiment.data.arrays(), folder)
    for _ in range(2):
        simulation.run_round()
    cohort = Counter(client.capacity for _, clients in simulation.cohort().values() for client in clients)
    return simulation.run_round(), cohort


@pytest.mark.parametrize("method", METHODS)
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
