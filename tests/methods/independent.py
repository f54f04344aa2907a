"""Federated rounds without rayfl: networks with torch's batch norms, and manual loops. Only random draws are rayfl's:
initial tensors, cohorts and the order of samples."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayfl.core.net import Net
from rayfl.core.norms import static_norms
from rayfl.core.seeds import stream, torch_generator
from rayfl.core.tensors import Params
from rayfl.data.samples import Batch, ClientData
from rayfl.engine.simulation import Simulation
from rayfl.experiment import Experiment
from rayfl.testing.methods import rows_of
from rayfl.testing.tiny import tiny

DATA = {"name": "synthetic", "shape": [1, 8, 8], "samples": 120, "test_samples": 24, "classes": 4}
MIX = {"name": "mix", "networks": {"0.3": {"name": "resnet8", "channels": 4}, "0.2": "digits_cnn"}}
PUBLIC = {"share": 0.3}

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def experiment(method: Any, **sections: Any) -> Experiment:
    given = {"data": DATA, "model": MIX, "method": method, "clients": {"capacities": [0.3, 0.2]}}
    return tiny(**given | sections)


@dataclass
class Visited:
    """A client in a round: what rayfl drew."""

    id: int
    net: Net
    data: ClientData
    seed: int


def visited(simulation: Simulation, round: int) -> list[Visited]:
    clients, seed = simulation.clients, simulation.seed
    nets = simulation.method.task.nets
    return [
        Visited(id, nets[clients.capacity(id, seed, round)], rows_of(simulation, id), stream(seed, "local", round, id))
        for id in clients.sample(seed, round)
    ]


def public_of(simulation: Simulation) -> ClientData:
    return simulation.executor.worker.public  # pyright: ignore


def network(net: Net, given: Params) -> nn.Module:
    """In torch's own layers, norms and running statistics too."""
    module = net.build()
    for path, norm in static_norms(module).items():
        module.set_submodule(path, nn.BatchNorm2d(norm.weight.numel(), norm.eps))
    wrong = module.load_state_dict(given, strict=False)
    assert not wrong.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in wrong.missing_keys)
    return module


def tensors(module: nn.Module) -> Params:
    return {n: t.detach().clone() for n, t in module.state_dict().items() if not n.endswith("num_batches_tracked")}


def descend(module: nn.Module, batches: Iterable[Batch], loss: Loss, lr: float) -> None:
    """Plain SGD."""
    module.train()
    for x, y in batches:
        module.zero_grad()
        loss(module(x), y).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= lr * parameter.grad  # pyright: ignore


def batches(data: ClientData, seed: int, steps: int, batch_size: int) -> Iterable[Batch]:
    """As a client takes them."""
    return data.batches(steps, batch_size, torch_generator(seed, "batches"))


def epochs(data: ClientData, seed: int, epochs: int, batch_size: int) -> Iterable[Batch]:
    """As a student takes them."""
    [(x, y)] = data.plain(len(data))
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch_generator(seed, "student", epoch))
        for rows in order.split(batch_size):
            yield x[rows], y[rows]


@torch.no_grad()
def logits(module: nn.Module, data: ClientData) -> torch.Tensor:
    [(x, _)] = data.plain(len(data))
    return module.eval()(x)


def assert_close(actual: Params, expected: Params, exact: bool = False) -> None:
    """`exact`: up to the rounding errors of float64."""
    rtol, atol = (1e-9, 1e-11) if exact else (1e-4, 2e-5)
    assert actual.keys() == expected.keys()
    for name, t in expected.items():
        assert not exact or t.dtype == torch.float64
        torch.testing.assert_close(actual[name], t, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
