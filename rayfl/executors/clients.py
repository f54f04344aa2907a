"""ClientActor: one process that hosts many virtual clients, pinned to its share of CPUs and GPUs."""

from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch

from rayfl.executors.base import Verb
from rayfl.tensors import Packed, pack, unpack
from rayfl.worker import Worker


@ray.remote(max_restarts=0, max_task_retries=0)
class ClientActor:
    """Runs jobs one after another. It is never restarted: the supervisor re-queues what it was doing."""

    def __init__(self, refs: list[ray.ObjectRef], threads: int):
        # refs travel in a list: an actor's plain arguments would be resolved into its creation task
        arrays, (method, federation, seed, limits) = ray.get(refs)
        self.threads = threads
        device = "cuda" if ray.get_gpu_ids() and torch.cuda.is_available() else "cpu"
        self.worker = Worker(method, replace(federation, arrays=arrays), seed, limits, device)

    def ping(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def run(self, verb: Verb, shared: tuple[Packed, Any], job: tuple[Packed, Any]) -> tuple[Packed, Any]:
        torch.set_num_threads(self.threads)
        answer, rest = getattr(self.worker, verb)(
            (unpack(shared[0]), shared[1]), (unpack(job[0]), job[1])
        )
        return pack(answer), rest


def without_arrays(federation):
    """The index lists of a federation; the arrays are in the object store once for all runs."""
    empty = np.empty(0, dtype=np.uint8)
    nothing = replace(federation.arrays, x=empty, y=empty, x_test=empty, y_test=empty, users=None)
    return replace(federation, arrays=nothing)
