"""Client actors: processes that host many virtual clients each, pinned to their shares of CPUs and GPUs.

A process imports torch, which takes seconds, when the actor is constructed. The server therefore starts all actors
before it imports torch itself.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from rayfl.core.tensors import Packed
    from rayfl.engine.jobs import Verb


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"io": 1})  # pyright: ignore
class ClientActor:
    """A `Host` in a process of its own. It is never restarted: the supervisor sends its jobs to others."""

    def __init__(self, threads: int, packages: bytes = b""):
        """`packages`: the user's own (`plugins.packed`), for classes that jobs contain."""
        from rayfl.engine.on_ray.host import Host
        from rayfl.engine.plugins import install

        install(packages)
        self.host = Host(threads, bool(ray.get_gpu_ids()))

    def load(self, refs: list[ray.ObjectRef]) -> "Place":
        """Load a run and return the actor's location. `refs`: to the data set's arrays, the worker's `Recipe`, and
        frozen tensors; a list, so that Ray passes them as references."""
        self.host.load(*ray.get(refs))
        gpus = tuple(map(str, ray.get_gpu_ids()))
        return Place(ray.get_runtime_context().get_node_id(), gpus, _log(), os.getpid())

    @ray.method(concurrency_group="io")
    def beat(self) -> None:
        """Return at once, from a thread of its own: a sign of life while a job runs."""

    def run(self, verb: "Verb", shared: "Packed", job: "Packed") -> "Packed":
        return self.host.run(verb, shared, job)

    @ray.method(num_returns=2)
    def train(self, shared: "Packed", job: "Packed") -> "tuple[Packed, Packed]":
        return self.host.train(shared, job)

    def add(self, sizes: Sequence[int], *parts: "Packed") -> "Packed":
        return self.host.add(sizes, *parts)


def _log() -> str:
    """Return the file that this process writes its errors to; "" if unknown."""
    with suppress(OSError):
        return os.readlink("/proc/self/fd/2")
    return ""


@dataclass(frozen=True)
class Place:
    """An actor's location."""

    node: str = ""
    """Ray's id of its node; "" until it is known."""
    gpus: tuple[str, ...] = ()
    """Ids on that node of the GPUs that it shares."""
    log: str = ""
    """Its log file on that node; "" if unknown."""
    process: int = 0
    """Id of its process on that node."""


@dataclass(frozen=True)
class Crew:
    """The client actors of a run: their placement and resources."""

    group: PlacementGroup
    bundles: Sequence[int]
    """Bundle of every actor in the placement group."""
    cpus: float
    gpus: float
    threads: int
    packages: Any = b""
    """The user's own packages (`plugins.packed`), or a reference to them."""
    home: str = ""
    """Working folder of the driver, to which relative paths refer."""

    def start(self, bundle: int) -> Any:
        """Start an actor and return its handle."""
        place = PlacementGroupSchedulingStrategy(self.group, bundle)
        options = {"num_cpus": self.cpus, "num_gpus": self.gpus, "scheduling_strategy": place}
        return ClientActor.options(**options).remote(self.threads, self.packages)  # pyright: ignore
