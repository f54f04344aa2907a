"""The parameters of a module and their gradients as one vector each, because steps on many small tensors are slower.

Vectors are cached per module, because clients train in it one after another (`net.cached_module`).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rayfl.core.tensors import Params, as_vector, split_as

Optimizer = torch.optim.Optimizer

_PARAMETERS: WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = WeakKeyDictionary()
_MODULES: WeakKeyDictionary[nn.Module, dict[str, nn.Module]] = WeakKeyDictionary()
_PLACES: WeakKeyDictionary[nn.Module, dict[str, list[tuple[dict[str, Any], str]]]] = WeakKeyDictionary()
_JOINED: WeakKeyDictionary[nn.Module, "Joined"] = WeakKeyDictionary()


def parameters_of(module: nn.Module) -> Mapping[str, nn.Parameter]:
    """Return the parameters of a module by name, in its order. Cached: the module must not get others later."""
    found = _PARAMETERS.get(module)
    if found is None:
        found = _PARAMETERS[module] = dict(module.named_parameters())
    return found


def modules_of(module: nn.Module) -> Mapping[str, nn.Module]:
    """Return the module and all inside it by path, in its order. Cached, as `parameters_of`."""
    found = _MODULES.get(module)
    if found is None:
        # not the module itself, which would never be freed
        found = _MODULES[module] = {path: m for path, m in module.named_modules() if m is not module}
    return {"": module} | found


def buffers_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a module by name. Unlike its modules, they can be replaced."""
    for path, layer in modules_of(module).items():
        for name, buffer in layer._buffers.items():
            if buffer is not None:
                yield f"{path}.{name}".removeprefix("."), buffer


def call(module: nn.Module, params: Params, x: torch.Tensor) -> Any:
    """Return module(x) with `params` in place of its parameters of these names, also where layers share them. As
    `torch.func.functional_call`, which searches the module for them in every call."""
    places = _PLACES.get(module)
    if places is None:
        names = {id(p): name for name, p in parameters_of(module).items()}
        places = _PLACES[module] = {name: [] for name in names.values()}
        for layer in module.modules():
            for leaf, parameter in layer._parameters.items():
                if parameter is not None:
                    places[names[id(parameter)]].append((layer._parameters, leaf))
    before = [(own, leaf, own[leaf]) for name in params for own, leaf in places[name]]
    try:
        for name, t in params.items():
            for own, leaf in places[name]:
                own[leaf] = t
        return module(x)
    finally:
        for own, leaf, parameter in before:
            own[leaf] = parameter


@torch.no_grad()
def descend(parameters: Iterable[nn.Parameter], lr: float) -> None:
    """Make a step of plain SGD; matches torch's fused SGD on a CPU bit for bit."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.add_(parameter.grad, alpha=-lr)


def joined(module: nn.Module) -> "Joined":
    """Return the joined parameters of a module, with their gradients, after the first backward pass of a client."""
    parameters = {name: p for name, p in parameters_of(module).items() if p.requires_grad}
    found = _JOINED.get(module)
    if found is None or not found.fits(parameters):
        found = _JOINED[module] = Joined(parameters)
    found.take_gradients()
    return found


class Joined:
    """Parameters with a gradient, as one vector. Parameters without stay separate, and optimizers ignore them."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self.inside = {name: p for name, p in parameters.items() if p.grad is not None}
        self.alone = {name: p for name, p in parameters.items() if p.grad is None}
        self.vector = nn.Parameter(as_vector(list(self.inside.values())))
        self.gradient = torch.zeros_like(self.vector.data)
        self.vector.grad = self.gradient
        self.gradients = split_as(self.gradient, list(self.inside.values()))
        self.places = [p.data_ptr() for p in self.inside.values()]
        self.parameters = [self.vector, *self.alone.values()]
        self._optimizers: dict[Hashable, Optimizer] = {}

    def fits(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Return whether these parameters match: same addresses, and gradients for the same ones."""
        reached = [name for name, p in parameters.items() if p.grad is not None]
        return self.holds() and reached == list(self.inside) and len(parameters) == len(self.inside) + len(self.alone)

    def holds(self) -> bool:
        """Return whether the parameters are still at their addresses in the vector."""
        return self.places == [p.data_ptr() for p in self.inside.values()]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Copy new gradients into the vector; later backward passes accumulate in it."""
        if self.inside:
            torch.cat([cast(torch.Tensor, p.grad).reshape(-1) for p in self.inside.values()], out=self.gradient)
        self.attach()

    def attach(self) -> None:
        """Set the gradients of the parameters to views of the vector."""
        for parameter, gradient in zip(self.inside.values(), self.gradients, strict=True):
            parameter.grad = gradient

    def zero_grad(self) -> None:
        self.gradient.zero_()
        for parameter in self.alone.values():
            parameter.grad = None

    @torch.no_grad()
    def clip(self, most: float) -> None:
        """Scale the gradients to a norm of at most `most`; matches torch's `clip_grad_norm_` bit for bit."""
        if any(parameter.grad is not None for parameter in self.alone.values()):
            nn.utils.clip_grad_norm_(self.parameters, most)
            return
        norm = torch.linalg.vector_norm(self.gradient)
        self.gradient.mul_((most / (norm + 1e-6)).clamp_(max=1.0))

    def optimizer(self, kind: Hashable, make: Callable[[list[nn.Parameter]], Optimizer]) -> Optimizer:
        """Return the cached optimizer of this kind, with its state reset to 0."""
        if kind not in self._optimizers:
            self._optimizers[kind] = make(self.parameters)
        for state in self._optimizers[kind].state.values():
            for t in state.values():
                t.zero_()
        return self._optimizers[kind]

    def set_momentum(self, optimizer: Optimizer, given: Params) -> None:
        """Set the momentum of SGD by parameter name; 0 for missing names."""
        if not given:
            return
        # in place, because a recorded step can refer to the buffer
        buffer = optimizer.state[self.vector].setdefault("momentum_buffer", torch.zeros_like(self.gradient))
        for name, part in self._named(buffer).items():
            if name in given:
                part.copy_(given[name])
        for name in self.alone.keys() & given.keys():
            place = self.alone[name].device
            optimizer.state[self.alone[name]]["momentum_buffer"] = given[name].to(place, copy=True)

    def momentum(self, optimizer: Optimizer) -> Params:
        """Return a copy of the momentum of SGD by parameter name, for parameters with momentum."""
        found = {n: optimizer.state[p]["momentum_buffer"].clone() for n, p in self.alone.items() if optimizer.state[p]}
        state = optimizer.state[self.vector]
        return found | self._named(state["momentum_buffer"].clone()) if state else found

    def _named(self, vector: torch.Tensor) -> Params:
        return dict(zip(self.inside, split_as(vector, list(self.inside.values())), strict=True))
