"""What a client actor does: the worker of a process, and the messages that it gets and sends."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from rayfl.core import frozen
from rayfl.core.fold import PairwiseSum, add_updates
from rayfl.core.tensors import Packed, pack, unpack
from rayfl.data.base import Arrays
from rayfl.engine.jobs import Verb
from rayfl.engine.memory import keep_freed_memory
from rayfl.engine.worker import Recipe, Worker


class Host:
    """Runs jobs one after another, over the run that was loaded last."""

    def __init__(self, threads: int, has_gpu: bool):
        torch.set_num_threads(threads)
        keep_freed_memory()
        self.threads = threads
        self.device = "cuda" if has_gpu and torch.cuda.is_available() else "cpu"

    def load(self, arrays: Arrays, recipe: Recipe, tensors: Packed | None = None) -> None:
        """Takes up a run. `tensors`: what `frozen.keep` is given, where networks have parts that nobody trains."""
        if tensors is not None:
            frozen.keep(unpack(tensors))
        self.worker = Worker(recipe, arrays, self.device)

    def run(self, verb: Verb, shared: Packed, job: Packed) -> Packed:
        torch.set_num_threads(self.threads)
        return pack(getattr(self.worker, verb)(unpack(shared), unpack(job)))

    def train(self, shared: Packed, job: Packed) -> tuple[Packed, Packed]:
        """What `run` answers, and the update apart, which may stay on the node until it is added up."""
        torch.set_num_threads(self.threads)
        trained = self.worker.train(unpack(shared), unpack(job))
        return pack(replace(trained, update=None)), pack(trained.update)

    def add(self, sizes: Sequence[int], *parts: Packed) -> Packed:
        """The sum of neighbours' updates, which stand for so many clients each."""
        total = PairwiseSum(add_updates)
        for size, part in zip(sizes, parts, strict=True):
            total.add(unpack(part), size)
        return pack(total.total)
