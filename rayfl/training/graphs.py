"""A step as one CUDA graph: hundreds of launches become one. Nothing here was ever run on a GPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch

WARMUP = 3
"""Runs before the recording, as torch asks for: libraries choose their kernels in them."""


class Recorded:
    """A function of no arguments whose tensors stay where they are: run as it is at first, on a stream of its own, then
    recorded, and from then on replayed. It must not look at a tensor's values."""

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
            # other threads of an actor may use the device meanwhile
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
    """Memory that all recordings share: they are replayed one after another."""
    with torch.cuda.device(device):
        return torch.cuda.graph_pool_handle()
