"""What a round of low-rank clients takes beside its training, and how often a frozen base crosses to a node.

    python scripts/bench_lora.py

A RoBERTa of 20 million parameters with random weights is frozen, and ten clients train adapters of ranks 2 to 16 on
made-up text, on two client actors that are on another node than the server (two raylets on this machine). The time
outside of training is that of the same rounds with clients who train nothing. The bytes are those that came into the
object store of the actors' node.
"""

import json
import statistics
from typing import Any

import ray
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster

import rayfl
from rayfl import frozen
from rayfl.tensors import nbytes

ROUNDS = 2
BASE = {"name": "roberta", "hidden": 384, "heads": 6, "layers": 8, "ffn": 1536, "positions": 66, "vocabulary": 16000}


def experiment(steps: int) -> rayfl.Experiment:
    given: dict[str, Any] = {
        "rounds": 1 + ROUNDS,
        "data": {"name": "synthetic_text", "samples": 4000, "length": 64, "tokens": 1000},
        "model": {"name": "lora", "base": BASE, "rank": 16, "targets": ["query", "value"]},
        "method": "rbla",
        "clients": {"count": 10, "cohort": 10, "capacities": [1, 0.5, 0.25, 0.125]},
        "training": {"batch_size": 8, "lr": 0.01, **({"steps": steps} if steps else {"epochs": 0})},
        "evaluation": {"every": 100, "clients": False, "holdout": 0},
        "run": {"actors": 2},
    }
    return rayfl.Experiment(**given)


def seconds_a_round(address: str | None, steps: int) -> float:
    """The median round after the first."""
    with rayfl.start(experiment(steps), address) as session:
        seconds = [line["seconds"] for line, _ in zip(session, range(1 + ROUNDS), strict=False)]
    return statistics.median(seconds[1:])


def main() -> None:
    model = experiment(1).model
    size = nbytes(frozen.tensors_of(model))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        node = cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes(60)
        ray.init(cluster.address, log_to_driver=False)
        trained = seconds_a_round(cluster.address, steps=3)
        came = node_stats(node.raylet_ip_address, node.node_manager_port).store_stats.cumulative_created_bytes
        idle = seconds_a_round(cluster.address, steps=0)
    finally:
        ray.shutdown()
        cluster.shutdown()
    found = {
        "parameters of the base": rayfl.Net(model.base).parameters,  # pyright: ignore[reportAttributeAccessIssue]
        "bytes of the base": size,
        "bytes into the actors' node": came,
        "the same, in bases": round(came / size, 3),
        "seconds a round": round(trained, 3),
        "outside of training": round(idle, 3),
        "share outside": round(idle / trained, 4),
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
