"""Operation counts of a forward pass, by hooks on leaf modules.

Published counts differ by convention, so every count names its convention:

    macs               multiply-adds of convolutions and linear layers
    flops2             2 per multiply-add, 1 per bias addition, 4 per input element of a norm (centre, divide, scale,
                       shift) or 2 of an RMSNorm (divide, scale), 1 per element of an activation, 1 per input element
                       of pooling
    heterofl_official  HeteroFL's summary tool: the multiply-adds, 1 per output of a convolution with a bias, 2 per
                       input element of a norm; then each module's count is multiplied by the number of its parameter
                       tensors, an artefact of the tool's loop

Residual additions, the Scaler (an identity in evaluation), reshapes and operations outside of leaf modules, such as the
products and the softmax of attention or the tanh in RoBERTa's head, are not counted. Torch's multi-head attention
counts as its linear layers, on as many keys and values as queries.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from rayfl.core.compiler import without_compiler
from rayfl.core.norms import StaticBatchNorm

Convention = Literal["heterofl_official", "macs", "flops2"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)
UNCOUNTED = (nn.RNNBase, nn.RNNCellBase, nn.Bilinear)
"""Layers of torch that are not counted, unless a subclass has `multiply_adds`."""
NORMS = (StaticBatchNorm, nn.GroupNorm, nn.LayerNorm)
ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh)
SAME_SHAPE = frozenset({torch.batch_norm, torch.relu, F.relu, torch.tanh, torch.sigmoid, F.gelu, F.silu})
"""Functions whose output has the shape of their first input. Further tensors have a value per channel."""
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is one of `LAYERS`, or a linear layer of another library with `is_linear`."""
    return isinstance(module, LAYERS) or getattr(module, "is_linear", False)


def is_counted(module: nn.Module) -> bool:
    """Return whether a module has multiply-adds."""
    return is_layer(module) or isinstance(module, nn.MultiheadAttention) or hasattr(module, "multiply_adds")


def is_recomputed(module: nn.Module) -> bool:
    """Return whether a module is a block of transformers with gradient checkpointing."""
    kinds = (kind.__name__ for kind in type(module).__mro__)
    return bool(getattr(module, "gradient_checkpointing", False)) and "GradientCheckpointingLayer" in kinds


def uncounted(network: nn.Module) -> list[str]:
    """Return the paths of modules whose operations are not counted, and whose weights are in no layer."""
    return [
        f"{path} ({type(part).__name__})"
        for path, part in network.named_modules()
        if isinstance(part, UNCOUNTED) and not hasattr(part, "multiply_adds")
    ]


class Counts(NamedTuple):
    """Counts of a forward pass."""

    totals: dict[str, int]
    """Convention -> operations."""
    layers: dict[str, int]
    """Path of a layer (`is_layer`) -> multiply-adds."""
    activations: int
    """Elements that a backward pass reads: the outputs of all leaf modules, or of blocks with gradient checkpointing
    their inputs, and the outputs inside the largest one."""
    output: Any


def count(module: nn.Module, x: torch.Tensor) -> Counts:
    """Return the counts of the forward pass of `x`. On the meta device, nothing is computed."""
    totals, layers = dict.fromkeys(CONVENTIONS, 0), {}
    blocks = [path for path, part in module.named_modules() if is_recomputed(part)]
    outputs = dict.fromkeys(blocks, 0) | {"": 0}

    def hook(path: str):
        def add(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            # calls by keyword hide their input
            x = inputs[0] if inputs else output
            for convention, operations in _COUNT.items():
                totals[convention] += operations(module, x, output)
            within = next((block for block in blocks if path.startswith(f"{block}.")), "")
            outputs[within] += output.numel() if isinstance(output, torch.Tensor) else 0
            if is_counted(module):
                layers[path] = layers.get(path, 0) + multiply_adds(module, x, output)

        return add

    handles = [
        part.register_forward_hook(hook(path))
        for path, part in module.named_modules()
        if is_counted(part) or not any(True for _ in part.children())
    ]
    inputs: list[int] = []
    handles += [
        module.get_submodule(path).register_forward_pre_hook(lambda _, x: inputs.extend(t.numel() for t in x[:1]))
        for path in blocks
    ]
    with torch.no_grad(), without_compiler, _Shapes():
        answer = module.eval()(x)
    for handle in handles:
        handle.remove()
    kept = outputs.pop("") + sum(inputs) + max(outputs.values(), default=0)
    return Counts(totals, layers, kept, answer)


class _Shapes(TorchFunctionMode):
    """On the meta device, functions of `SAME_SHAPE` return their input: torch finds the shape of their output by code
    in Python that takes longer than all else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SAME_SHAPE and args and args[0].is_meta:
            x, *others = args
            if all(t.numel() == x.shape[1] for t in others if isinstance(t, torch.Tensor)):
                return x
        return func(*args, **(kwargs or {}))


def multiply_adds(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    """Return the multiply-adds of a module's call with input x [B, ...] and output y [B, ...]."""
    if isinstance(module, CONVOLUTIONS):
        return module.weight.numel() * y[:, 0].numel()
    if isinstance(module, TRANSPOSED):
        return module.weight.numel() * x[:, 0].numel()
    if isinstance(module, nn.MultiheadAttention):
        return sum(p.numel() for p in module.parameters() if p.dim() == 2) * (y[0].numel() // module.embed_dim)
    if is_layer(module):
        return cast(torch.Tensor, module.weight).numel() * (y.numel() // y.shape[-1])
    # layers of other libraries define their own count
    own = getattr(module, "multiply_adds", None)
    return 0 if own is None else own(y)


def _heterofl_official(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    once = multiply_adds(module, x, y)
    if isinstance(module, CONVOLUTIONS + TRANSPOSED) and module.bias is not None:
        once += y.numel()
    if isinstance(module, NORMS) or _is_rms_norm(module):
        once += 2 * x.numel()
    return once * len(list(module.parameters(recurse=False)))


def _flops2(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    if macs := multiply_adds(module, x, y):
        return 2 * macs + (y.numel() if getattr(module, "bias", None) is not None else 0)
    if isinstance(module, NORMS):
        return 4 * x.numel()
    if _is_rms_norm(module):
        return 2 * x.numel()
    return x.numel() if isinstance(module, ACTIVATIONS + POOLS) or _is_of_transformers(module) else 0


def _is_rms_norm(module: nn.Module) -> bool:
    # every family of transformers has a class of its own
    return type(module).__name__.endswith("RMSNorm")


def _is_of_transformers(module: nn.Module) -> bool:
    """Return whether a module is an activation of transformers, which is not imported here."""
    return type(module).__module__ == "transformers.activations"


_COUNT: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], int]] = {
    "heterofl_official": _heterofl_official,
    "macs": multiply_adds,
    "flops2": _flops2,
}
CONVENTIONS = tuple(_COUNT)
