"""ServerActor: holds the state of one run, selects, extracts, and folds the answers of its client actors."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup

from rayfl.executors.clients import without_arrays
from rayfl.executors.ray import RayPool
from rayfl.simulation import Simulation

STEP_SECONDS = 1.0


@ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"io": 1})
class ServerActor:
    """`step()` until it says done. `status()` answers while a step runs."""

    def __init__(
        self, experiment, refs: list[ray.ObjectRef], folder: str, group: PlacementGroup, bundles: Sequence[int]
    ):
        """`experiment` builds the simulation; `refs` holds the data set's arrays; clients start in `bundles`."""
        torch.set_num_threads(1)
        self.experiment = experiment

        def pool(method, federation, limits) -> RayPool:
            parts = ray.put((method, without_arrays(federation), experiment.seed, limits))
            run = experiment.run
            return RayPool(
                [refs[0], parts], group, bundles, cpus=run.cpus, gpus=run.gpus, threads=run.threads
            )

        self.simulation: Simulation = experiment.simulation(ray.get(refs[0]), Path(folder), pool)

    def step(self) -> list[dict[str, Any]]:
        """Rounds up to the next evaluation, or for about a second: their lines."""
        lines: list[dict[str, Any]] = []
        until = time.monotonic() + STEP_SECONDS
        while not self.simulation.done:
            lines.append(self.simulation.run_round())
            if "accuracy_mean" in lines[-1] or time.monotonic() > until:
                break
        return lines

    @ray.method(concurrency_group="io")
    def status(self) -> dict[str, Any]:
        """Where the run is, at once."""
        pool = self.simulation.executor
        ready = [slot.ready for slot in pool.slots]
        return {
            "round": self.simulation.round,
            "actors": sum(ready),
            "starting": len(ready) - sum(ready),
            "deaths": pool.deaths,
        }

    def client_accuracy(self) -> dict[int, float]:
        """Every client's accuracy on its own test split, at the last evaluation."""
        return self.simulation.client_accuracy

    def save(self, folder: str) -> int:
        """Writes a checkpoint below `folder` and returns its round."""
        self.simulation.save(Path(folder), self.experiment.result_config())
        return self.simulation.round

    def restore(self, folder: str) -> tuple[int, list[str]]:
        """Goes to the newest good checkpoint below `folder`: its round (0: none there), and what to say."""
        said: list[str] = []
        self.simulation.restore_latest(Path(folder), self.experiment.result_config(), said.append)
        return self.simulation.round, said

    def close(self) -> None:
        """Stops the client actors."""
        self.simulation.executor.close()
