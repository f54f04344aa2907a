"""Overhead of a round of low-rank clients, and transfers of a frozen base to a node.

    python scripts/bench_lora.py

Ten clients train adapters of ranks 2 to 16 on synthetic text. The base is a frozen RoBERTa of 20 million parameters
with random weights. Two client actors run on another node than the server (two raylets on this machine). The time
outside of training is measured in rounds without training. The bytes are those received by the object store of the
actors' node.
"""

import argparse
import json
import statistics
from typing import Any

import ray
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster

import rayfl
from rayfl.core import frozen
from rayfl.core.tensors import nbytes

ROUNDS = 3
BASE = {"name": "roberta", "hidden": 384, "heads": 6, "layers": 8, "ffn": 1536, "positions": 66}
BASE |= {"vocabulary": 16000, "pad": 1}


def experiment(steps: int) -> rayfl.Experiment:
    given: dict[str, Any] = {
        # never reached, because the last round is evaluated
        "rounds": 100,
        "data": {"name": "synthetic_text", "samples": 4000, "length": 64, "tokens": 1000},
        "model": {"name": "lora", "base": BASE, "rank": 16, "targets": ["query", "value"]},
        "method": "rbla",
        "clients": {"count": 10, "cohort": 10, "capacities": [1, 0.5, 0.25, 0.125]},
        "training": {"batch_size": 8, "lr": 0.01, **({"steps": steps} if steps else {"epochs": 0})},
        "evaluation": {"every": 100, "clients": False, "holdout": 0},
        "run": {"actors": 2},
    }
    return rayfl.Experiment(**given)


def rounds(address: str | None, node: str, steps: int) -> tuple[float, float]:
    """Return the median seconds of the rounds after the first, and the bytes received by a node before the first round:
    all until its end, less those of a later round."""
    seconds, came, before = [], [], came_to(node)
    with rayfl.start(experiment(steps), address=address) as session:
        # zip draws from the range first, so that the session runs no further round
        for _, line in zip(range(1 + ROUNDS), session, strict=False):
            seconds.append(line["seconds"])
            came.append(came_to(node) - before)
    a_round = (came[-1] - came[0]) / ROUNDS
    return statistics.median(seconds[1:]), came[0] - a_round


def came_to(node: str) -> int:
    """Return the total bytes put into or received by the object store of a node."""
    [found] = [entry for entry in ray.nodes() if entry["NodeID"] == node]
    return node_stats(found["NodeManagerAddress"], found["NodeManagerPort"]).store_stats.cumulative_created_bytes


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    model = experiment(1).model
    size = nbytes(frozen.tensors_of(model))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        node = cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes(60)
        ray.init(cluster.address, log_to_driver=False)
        trained, came = rounds(cluster.address, node.node_id, steps=3)
        idle, _ = rounds(cluster.address, node.node_id, steps=0)
    finally:
        ray.shutdown()
        cluster.shutdown()
    found = {
        "parameters of the base": rayfl.Net(model.base).parameters,  # pyright: ignore[reportAttributeAccessIssue]
        "bytes of the base": size,
        "bytes to the actors' node before the first round": round(came),
        "the same, over the bytes of the base": round(came / size, 3),
        "seconds per round": round(trained, 3),
        "seconds outside of training": round(idle, 3),
        "share outside of training": round(idle / trained, 4),
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
