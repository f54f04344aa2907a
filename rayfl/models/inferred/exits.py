"""Early exits of any network: linear classifiers on the mean features of modules that the user names.

A network with exits returns the logits of every exit and of its head. One that ends at an exit stops there, and has no
parameters of what it does not reach.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayfl.models.inferred.blocks import Calls, modules_named
from rayfl.models.inferred.trace import Misnamed, channels_of, traced


class Exit(nn.Module):
    """Features [B, ..., channels, ...] with the channels at dimension `dim`, after a mean over the others -> logits
    [B, classes]."""

    def __init__(self, dim: int, channels: int, classes: int):
        super().__init__()
        self.dim = dim
        self.head = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        others = [d for d in range(1, x.dim()) if d != self.dim]
        return self.head(x.mean(others) if others else x)


def features_at(module: nn.Module, x: torch.Tensor, paths: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return path -> (dimension of the channels, their number) of the outputs of modules, for a network on the meta
    device. Raise Misnamed if paths are not modules in the order in which they run, each with a tensor."""
    modules_named(module, "exits", paths)
    with Calls(module) as calls:
        trace, _ = traced(module, x)
    order = [path for path in calls.made if path in paths]
    if order != [*paths]:
        allowed = f"modules that return a tensor, once each and in their order: {', '.join(order)}"
        raise Misnamed("exits", f"{', '.join(paths)} is not valid. Allowed: {allowed}")
    found = {}
    for path in paths:
        made = calls.made[path]
        dim = channels_of(made, trace.of(made))
        found[path] = dim, made.shape[dim]
    return found


def add_exits(module: nn.Module, features: Mapping[str, tuple[int, int]], classes: int) -> None:
    """Give a network early exits, "exit1", ..., in place. `features`: of `features_at`."""
    for number, (dim, channels) in enumerate(features.values(), start=1):
        module.add_module(f"exit{number}", Exit(dim, channels, classes))
    module.exit_paths, module.ends = tuple(features), False  # pyright: ignore[reportArgumentType]
    module.forward = MethodType(_answers, module)


class _Ended(Exception):
    pass


def _answers(module: nn.Module, x: torch.Tensor | None = None, **given: Any) -> tuple[torch.Tensor, ...]:
    """Return the logits of all exits that the network has and, unless it ends there, of its head."""
    paths: Any = module.exit_paths
    present = [number for number in range(1, len(paths) + 1) if hasattr(module, f"exit{number}")]
    answers, handles = [], []

    def hook(number: int) -> Any:
        def answer(_: nn.Module, __: Any, made: torch.Tensor) -> None:
            answers.append(module.get_submodule(f"exit{number}")(made))
            if module.ends and number == present[-1]:
                raise _Ended

        return answer

    # torch.export keeps a stack of the running modules, which an exception does not unwind
    tracing = get_proxy_mode()
    running = {} if tracing is None else tracing.tracer.module_stack
    depth = len(running)
    for number in present:
        handles.append(module.get_submodule(paths[number - 1]).register_forward_hook(hook(number)))
    try:
        answers.append(type(module).forward(module, *([] if x is None else [x]), **given))
    except _Ended:
        while len(running) > depth:
            running.popitem()
    finally:
        for handle in handles:
            handle.remove()
    return tuple(answers)


def end_at(module: nn.Module, number: int) -> None:
    """Let a network with exits end at one, in place."""
    paths: Any = module.exit_paths
    module.ends = True  # pyright: ignore[reportArgumentType]
    for later in range(number + 1, len(paths) + 1):
        delattr(module, f"exit{later}")


class _Used(TorchDispatchMode):
    """Ids of the tensors that operations read."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ids |= {id(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def unused(module: nn.Module, x: torch.Tensor) -> tuple[str, ...]:
    """Return the paths of the largest modules, and the names of further parameters, that a network on the meta device
    does not use."""
    with torch.no_grad(), _Used() as used:
        module(x)
    idle = {name for name, p in module.named_parameters(remove_duplicate=False) if id(p) not in used.ids}
    names, found = [name for name, _ in module.named_parameters(remove_duplicate=False)], []
    for path in [*(path for path, _ in module.named_modules() if path), *names]:
        own = {name for name in names if name == path or name.startswith(f"{path}.")}
        if own and own <= idle and not path.startswith(tuple(f"{other}." for other in found)):
            found.append(path)
    return tuple(found)


def remove(module: nn.Module, paths: Collection[str]) -> None:
    """Remove modules and parameters that are `unused`, in place."""
    for path in paths:
        parent, _, name = path.rpartition(".")
        owner = module.get_submodule(parent)
        if name in owner._parameters:
            owner._parameters[name] = None
        else:
            owner._modules[name] = nn.Identity()
