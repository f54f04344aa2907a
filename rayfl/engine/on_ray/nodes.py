"""For scale studies: several Ray nodes on one machine, and the memory and CPU time of a run's processes. Linux only."""

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
"""Fraction of the machine's memory for all object stores together, Ray's default for one node."""
KILOBYTE = 1024


@contextmanager
def local_nodes(count: int, cpus: float) -> Iterator[None]:
    """Start Ray with `count` nodes on this machine, each with `cpus` CPUs. A single node has the machine's CPUs."""
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
    """Return whether this process is connected to a cluster."""
    return ray.is_initialized()


def alive() -> int:
    """Return the number of living nodes of the connected cluster."""
    return sum(node["Alive"] for node in ray.nodes())


# memory and CPU time


@dataclass(frozen=True)
class Usage:
    """Memory and CPU time of one process."""

    own: int
    """Bytes of private memory."""
    peak: int
    """Peak bytes in memory, including libraries and the object store."""
    cpu: float
    """CPU seconds."""


def usage() -> Usage:
    """Return the usage of this process."""
    lines = (line.split() for line in Path("/proc/self/status").read_text("utf-8", "replace").splitlines())
    held = {words[0]: int(words[1]) * KILOBYTE for words in lines if words[0] in ("RssAnon:", "VmHWM:")}
    return Usage(held["RssAnon:"], held["VmHWM:"], time.process_time())


def forget_peak() -> None:
    """Reset the peak of this process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def starting(run: Remote) -> int:
    """Return the number of client actors that have not loaded the run yet."""
    status: RunStatus = ray.get(run.server.status.remote())
    return status.starting


def usage_of(run: Remote) -> tuple[Usage, list[Usage]]:
    """Return the usage of a run's server and of each client actor."""
    return ray.get(run.server.__ray_call__.remote(_on_server))


def _on_server(server: Any) -> tuple[Usage, list[Usage]]:
    asked = [slot.actor.__ray_call__.remote(_on_actor) for slot in server.pool.slots if slot.ready]
    return usage(), ray.get(asked)


def _on_actor(actor: Any) -> Usage:
    return usage()


def store_bytes() -> int:
    """Return the bytes of objects in all object stores."""
    places = [(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes() if node["Alive"]]
    found = [node_stats(address, port, include_memory_info=False) for address, port in places]
    return sum(stats.store_stats.object_store_bytes_used for stats in found)


def memory() -> tuple[int, int]:
    """Return the bytes of memory of this machine: total, and available."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    found = {words[0]: int(words[1]) * KILOBYTE for words in lines}
    return found["MemTotal:"], found["MemAvailable:"]
