"""A training step as one CUDA graph in place of hundreds of kernel launches. Not tested on a GPU."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

WARMUP = 3
"""Eager runs before the recording, required by torch because libraries select their kernels in them."""


class Recorded:
    """A function without arguments on tensors with fixed addresses. It first runs eagerly on a separate stream, then is
    recorded, then replayed. It must not read values of tensors; if it cannot be recorded, it always runs eagerly."""

    def __init__(self, body: Callable[[], None], device: torch.device):
        self.body, self.device = body, device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.runs = 0
        self.is_eager = False
        """True once a recording has failed."""

    def __call__(self) -> None:
        if self.graph is None and self.runs >= WARMUP and not self.is_eager:
            self.graph = self._record()
        if self.graph is not None:
            self.graph.replay()
            return
        self.runs += 1
        self._run()

    def _record(self) -> "torch.cuda.CUDAGraph | None":
        """Return the recording; None if it fails, with a warning."""
        graph, stream = torch.cuda.CUDAGraph(), _stream(self.device)
        before = torch.cuda.current_stream(self.device)
        # other threads of an actor can use the device at the same time
        recording = torch.cuda.graph(graph, pool=_pool(self.device), stream=stream, capture_error_mode="thread_local")
        try:
            with recording:
                self.body()
        except Exception as error:
            self.is_eager = True
            # if the end fails, torch leaves its own stream as the current one, and pool and generator in a recording
            torch.cuda.set_stream(before)
            _pool.cache_clear()
            _renew_generator(self.device)
            reason = str(error).partition("\n")[0]
            warnings.warn(
                f"a training step cannot be recorded as a CUDA graph, and runs eagerly with equal results: {reason}",
                stacklevel=2,
            )
            return None
        return graph

    def _run(self) -> None:
        current, stream = torch.cuda.current_stream(self.device), _stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.body()
        current.wait_stream(stream)


@functools.cache
def _pool(device: torch.device) -> Any:
    """Return the memory pool of all recordings; they can share it because they never run concurrently."""
    with torch.cuda.device(device):
        return torch.cuda.graph_pool_handle()


@functools.cache
def _stream(device: torch.device) -> Any:
    """Return the stream of all warm-ups and recordings: each stream has its own cached memory and workspaces."""
    return torch.cuda.Stream(device)


def _renew_generator(device: torch.device) -> None:
    """Give the device's generator a new state with equal numbers, which no recording has marked."""
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
