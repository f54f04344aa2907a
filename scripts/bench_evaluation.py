"""Cost of an evaluation and of a checkpoint, compared with the rounds of the quickstart's experiment.

    python scripts/bench_evaluation.py            # every row of the quickstart, in this process on one thread

The floor of an evaluation is the forward passes that it needs and nothing else: for the network of every capacity all
held-out samples in full batches and, if its norms lack statistics, all training samples in batches of one client, by
which statistics are defined, as random images. An
evaluation and a checkpoint follow every round; the quickstart evaluates every 5 rounds, and a run writes a checkpoint
every 30 seconds and at its end.
"""

# first, because Ray and torch read its settings when they are imported
from bench_round import seconds_of, show  # isort: skip

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rayfl.config.sections import load_yaml
from rayfl.data import Arrays
from rayfl.engine.memory import keep_freed_memory
from rayfl.engine.simulation import Simulation
from rayfl.experiment import read_experiment

QUICKSTART = Path(__file__).parents[1] / "tune_configs" / "quickstart.yaml"


def forward_passes(simulation: Simulation, arrays: Arrays) -> None:
    """Run the forward passes of one evaluation."""
    data, capacities = simulation.data, simulation.clients.all_capacities
    batch_size = simulation.experiment.evaluation.batch_size
    held_out = arrays.test_samples + len(data.validation) + int(sum(data.test.sizes)) + len(data.local_validation.idx)
    deployed = [simulation.verbs.deploy(simulation.state, simulation.round, capacity) for capacity in capacities]
    with torch.no_grad():
        for one in {one.key: one for one in deployed}.values():
            module = one.net.build().eval()
            full = [batch_size] * (held_out // batch_size) + [held_out % batch_size]
            for samples in full + ([] if one.has_statistics else data.train.sizes.tolist()):
                module(torch.randn(samples, *arrays.train["x"].shape[1:]))


def measure(method: Any, study: dict[str, Any], folder: Path) -> dict[str, float]:
    every, rounds = study["evaluation"]["every"], study["rounds"]
    experiment = read_experiment(study | {"method": method, "evaluation": {"every": 10**6}}, "bench_evaluation")
    arrays = experiment.data.arrays()
    simulation = Simulation(experiment, arrays, folder)
    work = {
        "round": simulation.run_round,
        "evaluation": simulation.evaluate,
        "floor": lambda: forward_passes(simulation, arrays),
        "checkpoint": lambda: simulation.save(folder / "checkpoints"),
    }
    turns = [{name: seconds_of(part) for name, part in work.items()} for _ in range(rounds - 1)]
    found = {name: median(turn[name] for turn in turns) for name in work}
    return {f"{name}, ms": 1000 * seconds for name, seconds in found.items()} | {
        "evaluation, over its floor": found["evaluation"] / found["floor"],
        "evaluations, share of the rounds": found["evaluation"] / (every * found["round"]),
        "their floor, share of the rounds": found["floor"] / (every * found["round"]),
        "a checkpoint, share of the rounds": found["checkpoint"] / (rounds * found["round"]),
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
