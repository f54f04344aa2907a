"""ClientActor: one process that hosts many virtual clients, pinned to its share of CPUs and GPUs."""

import ray
import torch

from rayfl.engine.jobs import Verb
from rayfl.engine.plugins import install
from rayfl.engine.worker import Worker
from rayfl.tensors import Packed, pack, unpack


@ray.remote(max_restarts=0, max_task_retries=0)
class ClientActor:
    """Runs jobs one after another. It is never restarted: the supervisor re-queues what it was doing."""

    def __init__(self, threads: int, packages: bytes = b""):
        """`packages`: the user's own (`plugins.packed`), which jobs are made of."""
        install(packages)
        self.threads = threads
        self.device = "cuda" if ray.get_gpu_ids() and torch.cuda.is_available() else "cpu"

    def load(self, refs: list[ray.ObjectRef]) -> None:
        """Takes up a run: `refs` to the data set's arrays, and to the worker's `Recipe`. They travel in a list, so that
        they stay references."""
        arrays, recipe = ray.get(refs)
        self.worker = Worker(recipe, arrays, self.device)

    def run(self, verb: Verb, shared: Packed, job: Packed) -> Packed:
        torch.set_num_threads(self.threads)
        return pack(getattr(self.worker, verb)(unpack(shared), unpack(job)))
