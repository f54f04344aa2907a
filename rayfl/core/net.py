"""Networks as values: a `Net` defines how to build a network, its shapes and its costs.

A `Net` contains its model family, so that clients can have different architectures.
"""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rayfl.config import ask
from rayfl.core import norms, operations
from rayfl.core.axes import Axis, Layout, axes_of, layout_of, segments, size_at
from rayfl.core.convolutions import safe
from rayfl.core.joined import modules_of, parameters_of
from rayfl.core.operations import Convention
from rayfl.core.seeds import torch_scope
from rayfl.core.tensors import Params, as_vector, end_to_end

Answer = Literal["last", "mean"]
"""Prediction of a network with early exits: logits of the last exit, or the mean of all exits' logits."""


class Family(Protocol):
    """The interface of a model family; implemented and documented by `rayfl.models.Model`."""

    @property
    def name(self) -> str: ...
    @property
    def members(self) -> Sequence["Family"]: ...
    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]: ...
    @property
    def exit_count(self) -> int: ...
    @property
    def frozen_key(self) -> Hashable: ...
    @property
    def varying(self) -> tuple[int, ...]: ...

    def build(self, net: "Net") -> nn.Module: ...
    def example(self, batch: int, device: torch.device | str) -> torch.Tensor: ...
    def initial(self, net: "Net") -> Params: ...
    def statistics(self, net: "Net") -> Params: ...
    def frozen(self) -> Params: ...
    def parts(self, net: "Net") -> Mapping[str, Any]: ...
    def write(self, net: "Net", params: Params, answer: Answer, files: Sequence[Path], to: Path) -> None: ...
    def model_dump(self, *, mode: str) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Net:
    """One network of a family, with everything that a device needs to build it. Equal values are equal networks.
    Sizes always come from a network built at its width, because rounding twice differs from rounding once.

    >>> from rayfl.models import MODELS
    >>> [Net(MODELS["digits_cnn"](input=(1, 8, 8)), width).parameters for width in (1, 0.25)]
    [53194, 3706]
    """

    model: Family
    """Model family."""
    width: float = 1.0
    """Fraction of every cuttable axis, in (0, 1]: an axis of K positions has ceil(width * K), or floor."""
    without: tuple[str, ...] = ()
    """Module paths of omitted blocks."""
    exits: int = 0
    """Number of early exits from the first on; the network ends at the last one. 0: no early exits, only a head."""
    steps: bool = False
    """True if each residual branch is multiplied by its own step size, a parameter (NeFL)."""
    scale: float = 1.0
    """Divisor of HeteroFL's Scaler in training (section 3.3): client width / server width."""
    rounding: Literal["up", "down"] = "up"
    """Rounding of width * K; ScaleFL rounds down."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Axis -> its number of positions per group, independent of the width, after a removal of channels."""

    def axis(self, name: str, full: int, groups: int = 1) -> Axis:
        """Return this network's axis `name`, which has `full` positions per group in the widest network."""
        size = dict(self.sizes).get(name)
        if size is None:
            size = size_at(self.width, full, self.rounding)
        elif not 1 <= size <= full:
            raise ValueError(f"Net.sizes: {size} is not valid for the axis {name!r}. Allowed: 1 to {full}")
        return Axis(name, size, groups)

    def build(self) -> nn.Module:
        """Return the network, initialised with torch's global generator (`seeds.torch_scope`)."""
        where = f"model: {self.model.name}, build at width {self.width:g}"
        # of axes, and of the meta device
        return safe(ask(where, partial(self.model.build, self), passed=(ValueError, RuntimeError)))

    def blank(self) -> nn.Module:
        """Return the network on the meta device, without memory."""
        with torch.device("meta"):
            try:
                return self.build()
            except RuntimeError as error:
                if "meta tensors" not in str(error):
                    raise
                raise ValueError(
                    f"model: {self.model.name} reads values of tensors in `build` ({error}). Allowed: a `build` that "
                    "only makes tensors, because networks are also built on torch's meta device"
                ) from error

    def initial(self) -> Params:
        """Return the initial parameters; random ones are drawn from torch's global generator."""
        return self.model.initial(self)

    def statistics(self) -> Params:
        """Return the initial running statistics of static norms, by the names of `norms.fresh`."""
        return self.model.statistics(self)

    @property
    def layout(self) -> Layout:
        """Axes and shapes of the parameters."""
        return _layout(self)

    @property
    def full_layout(self) -> Layout:
        """Axes and shapes of the parameters and of the static norms' running statistics."""
        return _full_layout(self)

    @property
    def layers(self) -> Mapping[str, tuple[str, ...]]:
        """Path of a trained convolution or linear layer -> names of its parameters, in the order of the network."""
        return _own(self, operations.is_layer)

    @property
    def embeddings(self) -> Mapping[str, tuple[str, ...]]:
        """Path of an embedding -> name of its weight, in the order of the network."""
        return _own(self, _is_embedding)

    @property
    def norms(self) -> tuple[str, ...]:
        """Paths of static norms; a network with static norms needs statistics before evaluation."""
        return _norms(self)

    @property
    def parameters(self) -> int:
        """Number of parameters, without step sizes of residual branches, as in NeFL's tables."""
        return sum(math.prod(shape) for shape in self.layout.shapes.values() if shape)

    @property
    def macs(self) -> int:
        """Multiply-adds of the forward pass of one sample."""
        return self.operations("macs")

    @property
    def layer_macs(self) -> Mapping[str, int]:
        """Path of a convolution or linear layer -> multiply-adds of the forward pass of one sample."""
        return _operations(self).layers

    @property
    def owners(self) -> Mapping[str, str]:
        """Path of a layer with multiply-adds -> path of the module by whose name its weight is a parameter: the layer
        itself, unless it is tied to an earlier module."""
        return _owners(self)

    @property
    def activations(self) -> int:
        """Elements of the outputs of layers for one sample, which a backward pass reads."""
        return _operations(self).activations

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the tensors that are not parameters, such as a frozen base."""
        return sum(t.numel() * t.element_size() for t in _blank(self).buffers())

    @property
    def output(self) -> torch.Tensor:
        """What the network, or its last exit, returns for one sample, on the meta device."""
        output = _operations(self).output
        return output if isinstance(output, torch.Tensor) else output[-1]

    def operations(self, convention: Convention) -> int:
        """Return the operations of the forward pass of one sample, by a convention of `rayfl.core.operations`."""
        return _operations(self).totals[convention]


@functools.lru_cache(maxsize=16)
def _blank(net: Net) -> nn.Module:
    """Return a blank network that the functions below share, and do not change."""
    return net.blank()


@functools.lru_cache(maxsize=512)
def _layout(net: Net) -> Layout:
    return layout_of(_blank(net))


@functools.lru_cache(maxsize=512)
def _full_layout(net: Net) -> Layout:
    found, statistics = net.layout, norms.fresh(_blank(net))
    # a frozen base has whole norms, whose weights are no parameters
    dims = {name: found.dims.get(f"{name.rpartition('.')[0]}.weight", (None,)) for name in statistics}
    return Layout({**found.dims, **dims}, {**found.shapes, **{name: tuple(t.shape) for name, t in statistics.items()}})


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)


@functools.lru_cache(maxsize=1024)
def _own(net: Net, wanted: Callable[[nn.Module], bool]) -> dict[str, tuple[str, ...]]:
    """Return path -> parameters of the `wanted` modules with parameters that are not shared with an earlier module."""
    layers, shapes = {p: m for p, m in _blank(net).named_modules() if wanted(m)}, net.layout.shapes
    names = {path: tuple(f"{path}.{name}" for name, _ in layer.named_parameters()) for path, layer in layers.items()}
    return {path: some for path, some in names.items() if some and shapes.keys() >= {*some}}


@functools.lru_cache(maxsize=1024)
def _owners(net: Net) -> dict[str, str]:
    module = _blank(net)
    paths = {id(parameter): name.rpartition(".")[0] for name, parameter in module.named_parameters()}
    weights = {path: getattr(module.get_submodule(path), "weight", None) for path in net.layer_macs}
    return {path: paths.get(id(weight), path) for path, weight in weights.items()}


@functools.lru_cache(maxsize=512)
def _norms(net: Net) -> tuple[str, ...]:
    return tuple(norms.static_norms(_blank(net)))


@functools.lru_cache(maxsize=4096)
def _operations(net: Net) -> operations.Counts:
    x = net.model.example(1, "meta")
    try:
        return operations.count(_blank(net), x)
    except ValueError:
        raise
    except Exception as error:
        reason = ": ".join([type(error).__name__, *str(error).rstrip(".").splitlines()[:1]])
        raise ValueError(
            f"model: {net.model.name} fails at width {net.width:g} on a sample of shape {list(x.shape)[1:]} "
            f"({reason}). Allowed: a network that runs at every width"
        ) from error


@functools.lru_cache(maxsize=16)
def cached_module(net: Net, device: torch.device) -> nn.Module:
    """Return the module of this network that clients of this process share, one after another. Its parameters and
    statistics are undefined: always `load` before use."""
    # initial values are not used, and the user's generator is left as it is
    with torch_scope(0):
        module = net.build().to(device)
    as_vector(list(module.parameters()))
    stands_for(module, net)
    return module


def in_training(module: nn.Module) -> nn.Module:
    """Return the module in training mode. `module.train()` of one that is in it takes longer."""
    return module if all(layer.training for layer in modules_of(module).values()) else module.train()


def as_built(module: nn.Module) -> nn.Module:
    """Return the cached module in training mode and without statistics, as in a new process. Otherwise a method that
    does not set them would see those of the process's last job, such as an evaluation."""
    norms.load(in_training(module), {})
    return module


_nets: WeakKeyDictionary[nn.Module, Net] = WeakKeyDictionary()


def stands_for(module: nn.Module, net: Net) -> None:
    """Let a module that clients of this process share count as their network."""
    _nets[module] = net


def net_of(module: nn.Module) -> Net | None:
    """Return the network of a `cached_module`, or what a module `stands_for`; None for other modules."""
    return _nets.get(module)


@torch.no_grad()
def load(module: nn.Module, params: Params) -> None:
    """Copy parameters into the module's own storage (payloads are shared memory), at once if both are contiguous."""
    parameters = parameters_of(module)
    places, given = list(parameters.values()), [params[name] for name in parameters]
    target, source = (end_to_end(t) if t else None for t in (places, given))
    if target is not None and source is not None:
        target.copy_(source)
    else:
        for place, t in zip(places, given, strict=True):
            place.copy_(t)


def params_of(module: nn.Module) -> Params:
    """Return the detached parameters of the module, which share its memory."""
    return {name: parameter.detach() for name, parameter in parameters_of(module).items()}


def check_axes(net: Net, narrow: float = 0.5) -> None:
    """Check that `net` has the same parameters on the same axes at another width, that only cuttable axes change
    their size, and that each of these has one size. A ValueError names the parameter. No memory is allocated."""
    wide, thin = axes_of(net.blank()), axes_of(replace(net, width=narrow).blank())
    if wide.keys() != thin.keys():
        raise ValueError(f"parameters differ between widths: {sorted(wide.keys() ^ thin.keys())}")
    first: dict[str, tuple[str, int]] = {}
    for name, dims in wide.items():
        parts = [[[axis for _, axis in segments(dim)] for dim in both] for both in (dims, thin[name])]
        if [len(part) for part in parts[0]] != [len(part) for part in parts[1]]:
            raise ValueError(f"{name}: a dimension is an axis at one width only")
        for a, b in zip(chain(*parts[0]), chain(*parts[1]), strict=True):
            other, size = first.setdefault(a.name, (name, a.size))
            if size != a.size and not a.is_fixed:
                raise ValueError(
                    f"{name}: the axis {a.name!r} has {a.size} positions, but {size} in {other}. Hint: another name"
                )
            if a.is_fixed and a != b:
                raise ValueError(f"{name}: the size of the fixed axis {a.name!r} changes from {a.size} to {b.size}")
            if replace(a, size=0) != replace(b, size=0):
                raise ValueError(f"{name}: the axis {a.name!r} has another name, groups or copies at another width")
            # the size of an axis can become 0, e.g. of a rank
            if not a.is_fixed and b.size not in (0, size_at(narrow / net.width, a.size, net.rounding)):
                raise ValueError(
                    f"{name}: the axis {a.name!r} has {a.size} positions at width {net.width} and "
                    f"{b.size} at {narrow}. Hint: use the size of `net.axis(name, full)`"
                )
