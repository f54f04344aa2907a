"""ClientActor: one process that hosts many virtual clients, pinned to its share of CPUs and GPUs."""

from collections.abc import Sequence
from dataclasses import replace

import ray
import torch

from rayfl.engine.jobs import Verb
from rayfl.engine.memory import keep_freed_memory
from rayfl.engine.plugins import install
from rayfl.engine.worker import Worker
from rayfl.fold import Pairs, together
from rayfl.tensors import Packed, pack, unpack


@ray.remote(max_restarts=0, max_task_retries=0)
class ClientActor:
    """Runs jobs one after another. It is never restarted: the supervisor re-queues what it was doing."""

    def __init__(self, threads: int, packages: bytes = b""):
        """`packages`: the user's own (`plugins.packed`), which jobs are made of."""
        keep_freed_memory()
        install(packages)
        self.threads = threads
        self.device = "cuda" if ray.get_gpu_ids() and torch.cuda.is_available() else "cpu"

    def load(self, refs: list[ray.ObjectRef]) -> str:
        """Takes up a run: `refs` to the data set's arrays, and to the worker's `Recipe`. They travel in a list, so that
        they stay references. Answers the id of the actor's node."""
        arrays, recipe = ray.get(refs)
        self.worker = Worker(recipe, arrays, self.device)
        return ray.get_runtime_context().get_node_id()

    def run(self, verb: Verb, shared: Packed, job: Packed) -> Packed:
        torch.set_num_threads(self.threads)
        return pack(getattr(self.worker, verb)(unpack(shared), unpack(job)))

    @ray.method(num_returns=2)
    def train(self, shared: Packed, job: Packed) -> tuple[Packed, Packed]:
        """What `run` answers, and the update apart, which may stay on the node until it is added up."""
        torch.set_num_threads(self.threads)
        trained = self.worker.train(unpack(shared), unpack(job))
        return pack(replace(trained, update=None)), pack(trained.update)

    def add(self, sizes: Sequence[int], *parts: Packed) -> Packed:
        """The sum of neighbours' updates, which stand for so many clients each."""
        total = Pairs(together)
        for size, part in zip(sizes, parts, strict=True):
            total.add(unpack(part), size)
        return pack(total.total)
