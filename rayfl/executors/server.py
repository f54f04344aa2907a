"""ServerActor: holds the state of one run, selects, extracts, and folds the answers of its client actors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup

from rayfl.data.federation import Federation
from rayfl.executors.clients import recipe
from rayfl.executors.memory import keep_freed_memory
from rayfl.executors.ray import RayPool
from rayfl.methods.base import Method
from rayfl.simulation import Simulation
from rayfl.worker import Limits


@ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"io": 1})  # pyright: ignore
class ServerActor:
    """A `Simulation` in a process of its own, with its verbs. `status()` answers while a step runs."""

    def __init__(self, group: PlacementGroup, bundles: Sequence[int]):
        """Client actors start in these bundles of `group`."""
        torch.set_num_threads(1)
        keep_freed_memory()
        self.group, self.bundles = group, bundles
        self.pool: RayPool | None = None

    def load(self, experiment, refs: list[ray.ObjectRef], folder: str) -> None:
        """Takes up a run, in the client actors of the last one if there was one. `experiment` builds its
        simulation, `refs` holds the data set's arrays, `folder` is for what clients keep."""

        def executor(method: Method, federation: Federation, limits: Limits) -> RayPool:
            parts = [refs[0], recipe(method, federation, experiment.seed, limits)]
            if self.pool is not None:
                self.pool.load(parts)
                return self.pool
            run = experiment.run
            self.pool = RayPool(parts, self.group, self.bundles, cpus=run.cpus, gpus=run.gpus, threads=run.threads)
            return self.pool

        self.simulation: Simulation = experiment.simulation(ray.get(refs[0]), Path(folder), executor)

    def step(self) -> list[dict[str, Any]]:
        return self.simulation.step()

    @ray.method(concurrency_group="io")
    def status(self) -> dict[str, Any]:
        """Where the run is, at once."""
        ready = [slot.ready for slot in self.pool.slots] if self.pool else []
        return {
            "round": self.simulation.round,
            "actors": sum(ready),
            "starting": len(ready) - sum(ready),
            "deaths": self.pool.deaths if self.pool else 0,
        }

    def client_accuracy(self) -> dict[int, float]:
        return self.simulation.client_accuracy()

    def save(self, folder: str) -> None:
        self.simulation.save(Path(folder))

    def restore(self, folder: str) -> tuple[int, list[str]]:
        return self.simulation.restore(Path(folder))

    def close(self) -> None:
        """Stops the client actors."""
        if self.pool is not None:
            self.pool.close()
