"""ClientActor: one process that hosts many virtual clients, pinned to its share of CPUs and GPUs."""

from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch

from rayfl.data.federation import Federation
from rayfl.executors.base import Verb
from rayfl.methods.base import Method
from rayfl.tensors import Packed, pack, unpack
from rayfl.worker import Limits, Worker


@ray.remote(max_restarts=0, max_task_retries=0)
class ClientActor:
    """Runs jobs one after another. It is never restarted: the supervisor re-queues what it was doing."""

    def __init__(self, threads: int):
        self.threads = threads
        self.device = "cuda" if ray.get_gpu_ids() and torch.cuda.is_available() else "cpu"

    def load(self, refs: list[ray.ObjectRef]) -> None:
        """Takes up a run: `refs` to the arrays, and to what `recipe` made. They travel in a list, so that
        they stay references."""
        arrays, (method, federation, seed, limits) = ray.get(refs)
        self.worker = Worker(method, replace(federation, arrays=arrays), seed, limits, self.device)

    def run(self, verb: Verb, shared: tuple[Packed, Any], job: tuple[Packed, Any]) -> tuple[Packed, Any]:
        torch.set_num_threads(self.threads)
        answer, rest = getattr(self.worker, verb)((unpack(shared[0]), shared[1]), (unpack(job[0]), job[1]))
        return pack(answer), rest


def recipe(method: Method, federation: Federation, seed: int, limits: Limits) -> ray.ObjectRef:
    """What a client actor makes its worker of, in the object store, without the arrays: those are there
    once for all runs."""
    empty = np.empty(0, dtype=np.uint8)
    nothing = replace(federation.arrays, x=empty, y=empty, x_test=empty, y_test=empty, users=None)
    return ray.put((method, replace(federation, arrays=nothing), seed, limits))
