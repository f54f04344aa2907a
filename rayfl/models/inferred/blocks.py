"""Residual blocks of any network: found in a forward pass, left out, and with step sizes.

A block is a module that adds its input to a result of it, and whose output has the shape and the axes of its input, so
that the network runs without it. Without a block, its input is passed on; what it computes after the addition, such as
a ReLU, is left out too. The step size s of NeFL interpolates: x + s (block(x) - x), which is x + s F(x) for blocks that
end with the addition.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rayfl.config import nearest
from rayfl.models.inferred.trace import Misnamed, Trace
from rayfl.models.layers import Step

ADDITIONS = (torch.ops.aten.add, torch.ops.aten.add_)


def modules_named(module: nn.Module, field: str, paths: Iterable[str]) -> list[str]:
    """Return the paths in a field of the model. Raise Misnamed if one is no module of the network."""
    known, paths = [path for path, _ in module.named_modules() if path], [*paths]
    for path in paths:
        if path not in known:
            raise Misnamed(field, f"{path!r} is not valid. Allowed: modules of the network. {nearest(path, known)}")
    return paths


class Calls(TorchDispatchMode):
    """First input and output of every module in a forward pass, and the modules that add their input to a result."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.stack = module, list[str]()
        self.given: dict[str, torch.Tensor] = {}
        self.made: dict[str, torch.Tensor] = {}
        self.adding: set[str] = set()
        self.repeated: set[str] = set()

    def __enter__(self) -> Self:
        self.handles = [
            handle
            for path, part in self.module.named_modules()
            for handle in (
                part.register_forward_pre_hook(lambda _, given, path=path: self._enter(path, given)),
                part.register_forward_hook(lambda _, __, made, path=path: self._leave(path, made)),
            )
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self.handles:
            handle.remove()

    def _enter(self, path: str, given: Sequence[Any]) -> None:
        self.stack.append(path)
        if path in self.given:
            self.repeated.add(path)
        if given and isinstance(given[0], torch.Tensor):
            self.given[path] = given[0]

    def _leave(self, path: str, made: Any) -> None:
        self.stack.pop()
        if isinstance(made, torch.Tensor):
            self.made[path] = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in args[:2] if isinstance(t, torch.Tensor)]
        if func.overloadpacket in ADDITIONS and len(tensors) == 2 and tensors[0].shape == tensors[1].shape:
            self.adding.update(path for path in self.stack if any(t is self.given.get(path) for t in tensors))
        return out

    def fix(self, trace: Trace) -> None:
        """Take the axes of a trace of the same pass."""
        self.trace, self.labels = trace, trace.components()

    def found(self) -> list[str]:
        """Return the paths of the residual blocks, in their order; of modules inside each other the innermost."""
        shared = _shared(self.module)
        paths = [
            path
            for path, part in self.module.named_modules()
            if path in self.adding and self._keeps(path) and not shared & {id(p) for p in part.parameters()}
        ]
        return [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]

    def named(self, paths: Iterable[str]) -> list[str]:
        """Return the paths of the blocks that the user names, in the order of the network. Raise Misnamed if the
        network cannot run without one."""
        paths = modules_named(self.module, "skippable", paths)
        for path in paths:
            if not self._keeps(path):
                raise Misnamed(
                    "skippable",
                    f"{path!r} is not valid. Allowed: modules that run once, have parameters, and return a tensor of "
                    "the shape and axes of their first argument",
                )
        return [path for path, _ in self.module.named_modules() if path in paths]

    def _keeps(self, path: str) -> bool:
        """Return whether a module runs once, has parameters, and returns what has the shape and axes of its input."""
        given, made = self.given.get(path), self.made.get(path)
        if given is None or made is None or path in self.repeated or given.shape != made.shape:
            return False
        has = any(True for _ in self.module.get_submodule(path).parameters())
        return has and self._axes(given) == self._axes(made)

    def stages(self, paths: Iterable[str]) -> tuple[tuple[str, ...], ...]:
        """Return neighbouring blocks of equal shape and axes as one stage."""
        stages = groupby(paths, lambda path: (self.made[path].shape, self._axes(self.made[path])))
        return tuple(tuple(stage) for _, stage in stages)

    def _axes(self, t: torch.Tensor) -> list[Any]:
        """Return the sets of a tensor's positions, with their shapes."""
        sets = [(tuple(layer.shape), self.labels[layer.numpy()]) for layer in self.trace.of(t)]
        return sorted((shape, found.tobytes()) for shape, found in sets if np.any(found))


def _shared(module: nn.Module) -> set[int]:
    """Return the ids of parameters with several names."""
    names = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    return {one for one, count in names.items() if count > 1}


def leave_out(module: nn.Module, paths: Collection[str]) -> None:
    """Empty blocks in place, so that they pass their input on. Other attributes stay, which some networks read."""
    for path in paths:
        block = module.get_submodule(path)
        for own in (block._parameters, block._buffers, block._modules):
            own.clear()
        block.forward = _passed


def _passed(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x


def add_steps(module: nn.Module, paths: Iterable[str]) -> None:
    """Give blocks step sizes, "step", in place."""
    for path in paths:
        block = module.get_submodule(path)
        block.add_module("step", Step())
        block.register_forward_hook(_stepped)


def _stepped(block: nn.Module, given: Sequence[torch.Tensor], made: torch.Tensor) -> torch.Tensor:
    # exactly `made` at step size 1
    return torch.lerp(given[0], made, block.get_parameter("step.scale"))
