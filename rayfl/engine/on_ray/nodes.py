"""Several Ray nodes on one machine, and what a run's processes hold: for scale studies. Linux only."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.internal_api import node_stats

from rayfl.engine.on_ray.cluster import Remote, cluster
from rayfl.engine.on_ray.status import RunStatus

STORE_SHARE = 0.3
"""Of the machine's memory: what all nodes' object stores may take, as Ray itself has it of one node's."""
KILOBYTE = 1024


@contextmanager
def local_nodes(count: int, cpus: float) -> Iterator[None]:
    """Ray in this process on so many nodes of this machine, each with so many CPUs; one node has what Ray counts."""
    if count == 1:
        with cluster("local"):
            yield
        return
    from ray.cluster_utils import Cluster

    store = int(STORE_SHARE * memory()[0] / count)
    nodes = Cluster()
    try:
        for _ in range(count):
            nodes.add_node(num_cpus=cpus, object_store_memory=store, include_dashboard=False)
        with cluster(nodes.address):
            yield
    finally:
        nodes.shutdown()


def connected() -> bool:
    """Whether this process is connected to a cluster."""
    return ray.is_initialized()


def alive() -> int:
    """The nodes of the cluster that this process is connected to."""
    return sum(node["Alive"] for node in ray.nodes())


# what is held


@dataclass(frozen=True)
class Usage:
    """What one process holds, and has worked."""

    own: int
    """Bytes in memory that are nobody else's."""
    peak: int
    """Bytes that it has had in memory at most, those of libraries and of the object store included."""
    cpu: float
    """Seconds of its CPUs."""


def usage() -> Usage:
    """Of this process."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    held = {words[0]: int(words[1]) * KILOBYTE for words in lines if words[0] in ("RssAnon:", "VmHWM:")}
    return Usage(held["RssAnon:"], held["VmHWM:"], time.process_time())


def forget_peak() -> None:
    """This process's peak counts from now on."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def starting(run: Remote) -> int:
    """A run's client actors that have not taken it up yet."""
    status: RunStatus = ray.get(run.server.status.remote())
    return status.starting


def usage_of(run: Remote) -> tuple[Usage, list[Usage]]:
    """Of a run's server, and of each of its client actors."""
    return ray.get(run.server.__ray_call__.remote(_on_server))


def _on_server(server: Any) -> tuple[Usage, list[Usage]]:
    asked = [slot.actor.__ray_call__.remote(_on_actor) for slot in server.pool.slots if slot.ready]
    return usage(), ray.get(asked)


def _on_actor(actor: Any) -> Usage:
    return usage()


def store_bytes() -> int:
    """Bytes of the objects in all nodes' object stores."""
    places = [(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes() if node["Alive"]]
    found = [node_stats(address, port, include_memory_info=False) for address, port in places]
    return sum(stats.store_stats.object_store_bytes_used for stats in found)


def memory() -> tuple[int, int]:
    """Bytes that this machine has, and those of them that are free or can be made free."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    found = {words[0]: int(words[1]) * KILOBYTE for words in lines}
    return found["MemTotal:"], found["MemAvailable:"]
