"""Content of a client actor: the worker of a process, with packed messages."""

import os
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from rayfl.config import ConfigError, RunFailed
from rayfl.core import frozen
from rayfl.core.fold import sum_of_updates
from rayfl.core.tensors import Packed, pack, unpack
from rayfl.data.base import Arrays
from rayfl.engine.devices import is_lost, only_declared
from rayfl.engine.jobs import Verb
from rayfl.engine.memory import keep_freed_memory
from rayfl.engine.worker import Recipe, Worker


class Host:
    """Runs jobs one after another, on the run loaded last."""

    def __init__(self, threads: int, has_gpu: bool):
        torch.set_num_threads(threads)
        keep_freed_memory()
        self.threads = threads
        self.device = "cuda" if has_gpu and not only_declared() else "cpu"

    def load(self, arrays: Arrays, recipe: Recipe, tensors: Packed | None = None) -> None:
        """Load a run. `tensors`: frozen parts of the networks, for `frozen.keep`. Raise ConfigError if PyTorch cannot
        use the GPU."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"run.gpus: Ray gave a client actor on {socket.gethostname()} a GPU, but PyTorch {torch.__version__} "
                "finds no CUDA device there. Allowed: 0, or GPUs that PyTorch can use. Hint: check the node's NVIDIA "
                "driver, and that its PyTorch is a build for CUDA"
            )
        if tensors is not None:
            frozen.keep(unpack(tensors))
        self.worker = Worker(recipe, arrays, self.device)

    def run(self, verb: Verb, shared: Packed, job: Packed) -> Packed:
        torch.set_num_threads(self.threads)
        with self._guarded():
            return pack(getattr(self.worker, verb)(unpack(shared), unpack(job)))

    def train(self, shared: Packed, job: Packed) -> tuple[Packed, Packed]:
        """Return the answer of `run` and, separately, the update, which can stay on the node until it is summed."""
        torch.set_num_threads(self.threads)
        with self._guarded():
            trained = self.worker.train(unpack(shared), unpack(job))
            return pack(replace(trained, update=None)), pack(trained.update)

    def add(self, sizes: Sequence[int], *parts: Packed) -> Packed:
        """Return the sum of consecutive updates, which stand for `sizes` clients each."""
        total = sum_of_updates()
        for size, part in zip(sizes, parts, strict=True):
            total.add(unpack(part), size)
        return pack(total.total)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Handle errors of a GPU: full memory is explained, and a process that has lost its GPU ends, because all its
        further jobs would fail. The job then runs in another process. For Ray, a KeyboardInterrupt would be a cancelled
        task."""
        try:
            yield
        except KeyboardInterrupt as error:
            raise RuntimeError("KeyboardInterrupt in a job") from error
        except Exception as error:
            if is_lost(self.worker.device):
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
                raise RunFailed(
                    f"run.gpus: the memory of the GPU of a client actor on {socket.gethostname()} is full. Hint: fewer "
                    "actors per GPU (run.gpus, run.actors), or a smaller training.batch_size or evaluation.batch_size"
                    f"\n{error}"
                ) from error
            raise
