"""FLOPs of the passes through networks in a block of code.

The call of a layer counts 2 FLOPs per multiply-add. If its output has a gradient, as many are added for the gradient of
its inputs, and as many for that of its weights if they are trained, whether or not a backward pass follows. A training
step therefore counts three passes (`costs.training_flops`), a forward pass without gradients or of frozen parameters
one. Layers are those of `core.operations`, in any network: rayfl's, a copy of one, or a user's own. Not counted:
functions of tensors (`torch.nn.functional.linear`), torch's recurrent layers, and calls inside `torch.func.vmap` or
`torch.compile`.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from rayfl import costs
from rayfl.core import operations
from rayfl.core.net import Net

_here = threading.local()
R = TypeVar("R")


class Passes:
    """Context manager that counts the passes of its block in this thread."""

    def __init__(self):
        self.flops = 0.0
        self._thread = threading.get_ident()
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> Self:
        self._outer = current()
        _here.passes = self
        self._listen()
        return self

    def __exit__(self, *_: Any) -> None:
        self._pause()
        _here.passes = self._outer

    def _listen(self) -> None:
        # with_kwargs would leave an entry in torch's tables for every handle
        self._handle = register_module_forward_hook(self._add)

    def _pause(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def _add(self, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        # hooks of all modules are those of all threads
        if threading.get_ident() != self._thread or not operations.is_counted(module):
            return
        first = output[0] if isinstance(output, tuple) else output
        if first.is_meta:  # a network is described, not run
            return
        passes = 1
        if first.requires_grad:
            passes = 2 + any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        # only transposed convolutions need their input, which a call by keyword hides
        x = inputs[0] if inputs else output
        self.flops += 2.0 * operations.multiply_adds(module, x, output) * passes

    @contextmanager
    def known(self, net: Net) -> Iterator[dict[str, float]]:
        """Count the training of a rayfl network by its samples, `train_samples` of the yielded metrics: its layers are
        the same in every step, and recorded steps call none."""
        metrics: dict[str, float] = {}
        self._pause()
        try:
            yield metrics
        finally:
            self._listen()
        self.trained(net, metrics)

    def trained(self, net: Net, metrics: Mapping[str, float]) -> None:
        """Count a training of a rayfl network, by `train_samples` of its metrics."""
        self.flops += costs.training_flops(net, int(metrics["train_samples"]))

    def around(self, function: Callable[..., R]) -> Callable[..., R]:
        """Return a function that is counted within `known`."""

        def counted(*args: Any) -> R:
            self._listen()
            try:
                return function(*args)
            finally:
                self._pause()

        return counted


@contextmanager
def apart() -> Iterator[None]:
    """Count nothing in this thread inside the block, where other visits run."""
    passes = current()
    if passes is None:
        yield
        return
    passes._pause()
    _here.passes = None
    try:
        yield
    finally:
        _here.passes = passes
        passes._listen()


def current() -> Passes | None:
    """Return what counts the passes of this thread, if anything does."""
    return getattr(_here, "passes", None)
