"""ServerActor: holds the state of one run, selects, extracts, and folds the answers of its client actors.

Its process starts the client actors before it imports torch (`rayfl.engine.actors`).
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rayfl.engine.actors import Crew

if TYPE_CHECKING:
    import numpy as np

    from rayfl.engine.pool import RayPool
    from rayfl.engine.worker import Recipe
    from rayfl.experiment import Experiment
    from rayfl.metrics import Line
    from rayfl.tensors import Packed


@ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"io": 1})  # pyright: ignore
class ServerActor:
    """A `Simulation` in a process of its own, with its verbs. `status()` answers while a step runs."""

    def __init__(self, crew: Crew):
        self.crew = replace(crew, packages=ray.put(crew.packages))
        self.actors = [self.crew.start(bundle) for bundle in crew.bundles]
        self.pool: RayPool | None = None

        import torch

        from rayfl.engine.memory import keep_freed_memory
        from rayfl.engine.plugins import install

        torch.set_num_threads(1)
        keep_freed_memory()
        install(crew.packages)

    def load(self, experiment: "Experiment", refs: list[ray.ObjectRef], folder: str) -> None:
        """Takes up a run, in the same client actors as the last one. `refs` holds the data set's arrays, `folder` is
        for what clients keep."""
        from rayfl import frozen
        from rayfl.engine.memory import give_back_freed_memory
        from rayfl.engine.pool import RayPool
        from rayfl.engine.simulation import Simulation
        from rayfl.tensors import pack

        def executor(recipe: "Recipe") -> RayPool:
            models = dict.fromkeys(net.model for net in recipe.method.task.nets.values())
            parts = [refs[0], ray.put(recipe), ray.put(pack(frozen.all_of(models)))]
            if self.pool is None:
                self.pool = RayPool(parts, self.crew, self.actors)
            else:
                self.pool.load(parts)
            return self.pool

        self.simulation = Simulation(experiment, ray.get(refs[0]), Path(folder), executor)
        # a partition of many clients takes far more memory than what is left of it
        give_back_freed_memory()

    def step(self, *seconds: float) -> "list[Line]":
        return self.simulation.step(*seconds)

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

    def client_scores(self) -> "np.ndarray":
        return self.simulation.client_scores

    def deployment(self, capacity: float, client: int | None) -> "Packed":
        from rayfl.tensors import pack

        return pack(self.simulation.deployment(capacity, client))

    def save(self, folder: str) -> None:
        self.simulation.save(Path(folder))

    def restore(self, folder: str) -> tuple[int, list[str]]:
        return self.simulation.restore(Path(folder))

    def close(self) -> None:
        """Stops the client actors."""
        if self.pool is not None:
            self.pool.close()
