"""A training step as one CUDA graph in place of hundreds of kernel launches. Not tested on a GPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch

WARMUP = 3
"""Eager runs before the recording, required by torch because libraries select their kernels in them."""


class Recorded:
    """A function without arguments on tensors with fixed addresses. It first runs eagerly on a separate stream, then is
    recorded, then replayed. It must not read values of tensors."""

    def __init__(self, body: Callable[[], None], device: torch.device):
        self.body, self.device = body, device
        self.stream = torch.cuda.Stream(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.runs = 0

    def __call__(self) -> None:
        if self.runs < WARMUP:
            self.runs += 1
            self._run()
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # other threads of an actor can use the device at the same time
            with torch.cuda.graph(self.graph, pool=_pool(self.device), capture_error_mode="thread_local"):
                self.body()
        self.graph.replay()

    def _run(self) -> None:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            self.body()
        current.wait_stream(self.stream)


@functools.cache
def _pool(device: torch.device) -> Any:
    """Return the memory pool of all recordings; they can share it because they never run concurrently."""
    with torch.cuda.device(device):
        return torch.cuda.graph_pool_handle()
