"""ServerActor: owns the state of one run, selects and extracts submodels, and folds the answers of its client actors.

It starts the client actors before it imports torch (`rayfl.engine.on_ray.actors`).
"""

import os
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from rayfl.engine.on_ray.actors import Crew
from rayfl.engine.on_ray.status import About, Gauges, RunStatus

if TYPE_CHECKING:
    import numpy as np

    from rayfl.core.tensors import Packed
    from rayfl.engine.on_ray.pool import RayPool
    from rayfl.engine.worker import Recipe
    from rayfl.experiment import Experiment
    from rayfl.metrics import Line


PACE = 10
"""Number of last rounds whose mean duration predicts the time left."""


@ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"io": 1})  # pyright: ignore
class ServerActor:
    """A `Simulation` in its own process. `status()` answers while a step runs."""

    def __init__(self, crew: Crew):
        with suppress(OSError):  # another node may not have the folder
            os.chdir(crew.home)
        self.crew = replace(crew, packages=ray.put(crew.packages))
        self.actors = [self.crew.start(bundle) for bundle in crew.bundles]
        self.pool: RayPool | None = None
        self.about: About | None = None
        self.gauges = Gauges()

        import torch

        from rayfl.engine.memory import keep_freed_memory
        from rayfl.engine.plugins import install

        torch.set_num_threads(1)
        keep_freed_memory()
        install(crew.packages)

    def load(self, experiment: "Experiment", refs: list[ray.ObjectRef], folder: str, about: About) -> None:
        """Load a run, with the client actors of the last one. `refs`: the data set's arrays. `folder`: for client
        states. `about`: for `status`."""
        from rayfl.core import frozen
        from rayfl.core.tensors import pack, unpack
        from rayfl.engine.memory import give_back_freed_memory
        from rayfl.engine.on_ray.pool import RayPool
        from rayfl.engine.simulation import Simulation

        def executor(recipe: "Recipe") -> RayPool:
            tensors = frozen.all_of(recipe.method.task.nets.values())
            shared = ray.put(pack(tensors))
            del tensors
            # from here on, this process reads the node's copy too
            frozen.keep(unpack(ray.get(shared)))
            parts = [refs[0], ray.put(recipe), shared]
            if self.pool is None:
                self.pool = RayPool(parts, self.crew, self.actors)
            else:
                self.pool.load(parts)
            return self.pool

        self.simulation = Simulation(experiment, ray.get(refs[0]), Path(folder), executor)
        # partitioning many clients needs far more memory than its result
        give_back_freed_memory()
        self.about, self.pace = about, deque[float](maxlen=PACE)

    def step(self, *seconds: float) -> "list[Line] | None":
        lines = self.simulation.step(*seconds)
        self.pace.extend(line["seconds"] for line in lines or ())
        if (status := self._status()) is not None:
            self.gauges.show(status)
        return lines

    @ray.method(concurrency_group="io")
    def status(self) -> RunStatus | None:
        """Return the run's status; None before `load`."""
        return self._status()

    def _status(self) -> RunStatus | None:
        if self.about is None:
            return None
        pool, run = self.pool, self.simulation
        slots = pool.slots if pool else []
        return RunStatus(
            about=self.about,
            round=run.round,
            rounds=run.rounds,
            pace=sum(self.pace) / len(self.pace) if self.pace else None,
            places=[slot.place for slot in slots if slot.ready],
            gpus=self.crew.gpus,
            starting=sum(not slot.ready for slot in slots),
            deaths=pool.deaths if pool else 0,
        )

    def client_scores(self) -> "np.ndarray":
        return self.simulation.client_scores

    def client_table(self) -> "np.ndarray":
        return self.simulation.client_table

    def deployment(self, capacity: float, client: int | None) -> "Packed":
        from rayfl.core.tensors import pack

        return pack(self.simulation.deployment(capacity, client))

    def save(self, folder: str) -> None:
        self.simulation.save(Path(folder))

    def restore(self, folder: str) -> tuple[int, list[str]]:
        return self.simulation.restore(Path(folder))

    def close(self) -> None:
        """Stop the client actors."""
        if self.pool is not None:
            self.pool.close()
