"""The floor of an evaluation has the forward passes of its jobs, and nothing else is timed."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from rayfl.config import load_yaml
from rayfl.core.net import Net
from rayfl.engine.simulation import Simulation
from rayfl.experiment import read_experiment

SCRIPTS = Path.cwd() / "scripts"
STUDY = load_yaml(SCRIPTS.parent / "tune_configs/quickstart.yaml")
ROWS = {name: row["method"] for name, row in STUDY["rows"].items()}


@pytest.fixture
def bench(script):
    return script("bench_evaluation")


def started(method, folder, **evaluation):
    experiment = read_experiment(STUDY["experiment"] | {"method": method, "evaluation": evaluation}, "test")
    arrays = experiment.data.arrays()
    return Simulation(experiment, arrays, folder), arrays


def jobs_of(simulation):
    """Run an evaluation. Return verb -> samples of its jobs, and verb -> their multiply-adds."""
    data, samples, macs = simulation.data, Counter(), Counter()
    shards = {"clients": data.test, "client_validation": data.local_validation}
    run = simulation.executor.map

    def recorded(verb, jobs, shared):
        for job in jobs:
            message = job.make()
            if verb == "collect":
                samples[verb] += len(message.rows)
            elif message.split in shards:
                samples[verb] += int(shards[message.split].sizes[message.items].sum())
            else:
                samples[verb] += sum(span.stop - span.start for span in message.items)
            macs[verb] += job.cost
        return run(verb, jobs, shared)

    simulation.executor.map = recorded
    simulation.evaluate()
    return samples, macs


@pytest.mark.parametrize("local_holdout", [0.0, 0.2])
@pytest.mark.parametrize("method", ROWS.values(), ids=ROWS)
def test_the_floor_has_the_samples_of_the_jobs(bench, tmp_path, method, local_holdout):
    """Each network runs the splits of its own clients only."""
    simulation, arrays = started(method, tmp_path, local_holdout=local_holdout)
    passes = bench.passes_of(simulation, arrays)
    samples, macs = jobs_of(simulation)
    assert {verb: sum(n for _, n in some) for verb, some in passes.items() if some} == +samples
    assert {verb: sum(n * net.macs for net, n in some) for verb, some in passes.items() if some} == +macs


def test_batches_are_full_and_none_is_empty(bench, tmp_path):
    assert bench.batches_of(1001, 500) == [500, 500, 1]
    assert bench.batches_of(0, 500) == []
    simulation, arrays = started(ROWS["fedavg-smallest"], tmp_path)
    samples = sum(n for _, n in bench.passes_of(simulation, arrays)["evaluate"])
    for batch_size, batches in ((samples, 1), (samples - 1, 2)):
        simulation, arrays = started(ROWS["fedavg-smallest"], tmp_path, batch_size=batch_size)
        assert len(bench.passes_of(simulation, arrays)["evaluate"]) == batches


def test_networks_and_images_are_made_before_the_timing(bench, tmp_path, monkeypatch):
    simulation, arrays = started(ROWS["heterofl"], tmp_path)
    passes = [one for some in bench.passes_of(simulation, arrays).values() for one in some]
    ran = []
    build = Net.build

    def built(net):
        module = build(net)
        module.register_forward_pre_hook(lambda _, given: ran.append((net, len(given[0]))))
        return module

    monkeypatch.setattr(Net, "build", built)
    work = bench.forward_passes(simulation, arrays)
    assert ran == []
    for owner, name in ((Net, "build"), (torch, "randn"), (type(simulation.verbs), "deploy")):
        monkeypatch.setattr(owner, name, None)
    work()
    assert ran == passes


def test_ratios_are_those_of_the_measured_rounds(bench, tmp_path, monkeypatch):
    seconds = iter([100.0, 10.0, 5.0, 1.0] * 2)

    def timed(work):
        work()
        return next(seconds)

    monkeypatch.setattr(bench, "cpu_seconds_of", timed)
    found = bench.measure(ROWS["fedavg-smallest"], STUDY["experiment"] | {"rounds": 3}, tmp_path)
    assert found.pop("checkpoint, elapsed, ms") > 0
    assert found == pytest.approx(
        {
            "round, ms": 100_000,
            "evaluation, ms": 10_000,
            "floor, ms": 5000,
            "checkpoint, ms": 1000,
            "evaluation, over its floor": 2,
            "evaluations, share of the rounds": 0.02,
            "their floor, share of the rounds": 0.01,
            "a checkpoint, share of the rounds": 1 / 300,
        }
    )
