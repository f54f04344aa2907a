"""Client actors: processes that host many virtual clients each, pinned to their shares of CPUs and GPUs.

A process imports torch, which takes seconds, only when the actor is made. So the server can start all of them before it
does the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from rayfl.core.tensors import Packed
    from rayfl.engine.jobs import Verb


@ray.remote(max_restarts=0, max_task_retries=0)
class ClientActor:
    """A `Host` in a process of its own. It is never restarted: the supervisor re-queues what it was doing."""

    def __init__(self, threads: int, packages: bytes = b""):
        """`packages`: the user's own (`plugins.packed`), which jobs are made of."""
        from rayfl.engine.on_ray.host import Host
        from rayfl.engine.plugins import install

        install(packages)
        self.host = Host(threads, bool(ray.get_gpu_ids()))

    def load(self, refs: list[ray.ObjectRef]) -> "Place":
        """Takes up a run: `refs` to the data set's arrays, to the worker's `Recipe`, and to what networks have that
        nobody trains. They travel in a list, so that they stay references. Answers where the actor is."""
        self.host.load(*ray.get(refs))
        return Place(ray.get_runtime_context().get_node_id(), tuple(map(str, ray.get_gpu_ids())))

    def run(self, verb: "Verb", shared: "Packed", job: "Packed") -> "Packed":
        return self.host.run(verb, shared, job)

    @ray.method(num_returns=2)
    def train(self, shared: "Packed", job: "Packed") -> "tuple[Packed, Packed]":
        return self.host.train(shared, job)

    def add(self, sizes: Sequence[int], *parts: "Packed") -> "Packed":
        return self.host.add(sizes, *parts)


@dataclass(frozen=True)
class Place:
    """Where an actor is."""

    node: str = ""
    """Ray's id of its node; "" until it is known."""
    gpus: tuple[str, ...] = ()
    """The ids, on that node, of the GPUs that it has its share of."""


@dataclass(frozen=True)
class Crew:
    """The client actors of a run: where they are, and what each takes."""

    group: PlacementGroup
    bundles: Sequence[int]
    """The placement group's bundle of every actor."""
    cpus: float
    gpus: float
    threads: int
    packages: Any = b""
    """The user's own (`plugins.packed`), or a reference to them."""

    def start(self, bundle: int) -> Any:
        """The handle of a new actor."""
        place = PlacementGroupSchedulingStrategy(self.group, bundle)
        options = {"num_cpus": self.cpus, "num_gpus": self.gpus, "scheduling_strategy": place}
        return ClientActor.options(**options).remote(self.threads, self.packages)  # pyright: ignore
