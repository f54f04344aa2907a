"""Cost of an evaluation and of a checkpoint, compared with the rounds of the quickstart's experiment.

    python scripts/bench_evaluation.py            # every row of the quickstart, in this process on one thread

The floor of an evaluation is the forward passes that it needs and nothing else, on random images in plain PyTorch. Each
network passes over the server's splits, and over the splits of the clients that use it, in full batches. A network
whose norms lack statistics also passes over the training samples that they are collected from, in training batches, by
which statistics are defined. Networks and images are made before the timing.

An evaluation and a checkpoint follow every round; the quickstart evaluates every 5 rounds, and a run writes a
checkpoint every 30 seconds and at its end. Times are CPU times of this process, so that other work on the machine
matters less. They are medians over rounds; ratios are taken round by round. A checkpoint also waits for the disk; its
elapsed time includes this.
"""

# first, because Ray and torch read its settings when they are imported
from bench_round import show  # isort: skip

import argparse
import json
import tempfile
from collections.abc import Callable, Hashable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peers.timing import cpu_seconds_of, ratios, seconds_of

from rayfl.config import load_yaml
from rayfl.core.net import Net
from rayfl.data import Arrays
from rayfl.engine.jobs import Verb
from rayfl.engine.memory import keep_freed_memory
from rayfl.engine.simulation import Simulation
from rayfl.experiment import read_experiment

QUICKSTART = Path(__file__).parents[1] / "tune_configs" / "quickstart.yaml"


# the floor


def passes_of(simulation: Simulation, arrays: Arrays) -> dict[Verb, list[tuple[Net, int]]]:
    """Return the (network, samples) of every forward pass of the next evaluation, by the verb of its jobs."""
    data, evaluator, clients = simulation.data, simulation.evaluator, simulation._clients()
    state, capacities = simulation.method_state, simulation.clients.all_capacities
    deployed = {c: simulation.verbs.deploy(state, simulation.round, c) for c in capacities}
    subjects = {one.key: one for one in deployed.values()}
    on_server = arrays.test_samples + len(data.validation)
    totals: dict[Hashable, tuple[Net, int]] = {
        key: (one.net, 0 if one.is_start else on_server) for key, one in subjects.items()
    }
    for split, shards in (("clients", data.test), ("client_validation", data.local_validation)):
        personal = evaluator._personal([split], deployed, clients)
        for key, (net, ids) in evaluator._members(split, deployed, clients, personal).items():
            _, samples = totals.get(key, (net, 0))
            totals[key] = net, samples + int(shards.sizes[ids].sum())
    return {
        "collect": [
            (one.net, samples)
            for one in subjects.values()
            if not one.has_statistics
            for work in evaluator._collections(evaluator._asked(simulation.round))
            for samples in work.sizes
        ],
        "evaluate": [
            (net, samples)
            for net, total in totals.values()
            for samples in batches_of(total, simulation.experiment.evaluation.batch_size)
        ],
    }


def batches_of(samples: int, batch_size: int) -> list[int]:
    """Return the sizes of full batches and, if samples are left, of the last one."""
    return [min(batch_size, samples - start) for start in range(0, samples, batch_size)]


def forward_passes(simulation: Simulation, arrays: Arrays) -> Callable[[], None]:
    """Return a function that runs the forward passes of the next evaluation, with networks and images made here."""
    passes = [one for some in passes_of(simulation, arrays).values() for one in some]
    modules = {net: net.build().eval() for net in dict(passes)}
    inputs = [(modules[net], torch.randn(samples, *arrays.train["x"].shape[1:])) for net, samples in passes]

    @torch.no_grad()
    def work() -> None:
        for module, x in inputs:
            module(x)

    return work


# measuring


def measure(method: Any, study: dict[str, Any], folder: Path) -> dict[str, float]:
    every, rounds = study["evaluation"]["every"], study["rounds"]
    experiment = read_experiment(study | {"method": method, "evaluation": {"every": 10**6}}, "bench_evaluation")
    arrays = experiment.data.arrays()
    simulation = Simulation(experiment, arrays, folder)
    names = ("round", "evaluation", "floor", "checkpoint", "checkpoint, elapsed")
    found: dict[str, list[float]] = {name: [] for name in names}

    def checkpoint() -> None:
        found["checkpoint, elapsed"].append(seconds_of(lambda: simulation.save(folder / "checkpoints")))

    for _ in range(rounds - 1):
        found["round"].append(cpu_seconds_of(simulation.run_round))
        found["evaluation"].append(cpu_seconds_of(simulation.evaluate))
        found["floor"].append(cpu_seconds_of(forward_passes(simulation, arrays)))
        found["checkpoint"].append(cpu_seconds_of(checkpoint))

    def over(above: str, below: str) -> float:
        return median(ratios(found[above], found[below]))

    return {f"{name}, ms": 1000 * median(seconds) for name, seconds in found.items()} | {
        "evaluation, over its floor": over("evaluation", "floor"),
        "evaluations, share of the rounds": over("evaluation", "round") / every,
        "their floor, share of the rounds": over("floor", "round") / every,
        "a checkpoint, share of the rounds": over("checkpoint", "round") / rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    study = load_yaml(QUICKSTART)
    found = {}
    with tempfile.TemporaryDirectory(prefix="rayfl-") as folder:
        for name, row in study["rows"].items():
            found[name] = measure(row["method"], study["experiment"], Path(folder) / name)
    print(json.dumps(found, indent=2)) if options.json else show(found)


if __name__ == "__main__":
    main()
