"""Rounds of personalised methods in plain torch: networks with torch's batch norms, prefixes by shape, holder means.
Only random draws are rayfl's."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from independent import Visited, batches, experiment, network, visited
from torch import nn

from rayfl.core.net import Net
from rayfl.core.norms import fresh
from rayfl.core.tensors import Params
from rayfl.engine.simulation import Simulation
from rayfl.testing.tiny import simulate

LR, STEPS, BATCH = 0.05, 2, 5
"""Of `rayfl.testing.tiny.TINY`."""

Work = Callable[[Params, Any, Visited], tuple[Params, Any]]
"""(received, state of the client or None, client) -> (sent, new state of the client)."""


def two_rounds(
    folder: Path, method: dict[str, Any], work: Work, beta: float = 1.0, **sections: Any
) -> tuple[Simulation, Params, dict[int, Any]]:
    """Return a simulation after two rounds of four of six clients, and the server's parameters and the clients' states
    of the same rounds in plain torch. `beta`: the server moves by beta times the change of the mean."""
    sections = {"model": "digits_cnn", "training": {"lr": LR, "steps": STEPS, "batch_size": BATCH}} | sections
    simulation = simulate(experiment(method, **sections), folder)
    whole = {name: t.clone() for name, t in simulation.state["params"].items()}
    states: dict[int, Any] = {}
    for round in range(2):
        answers = []
        for client in visited(simulation, round):
            sent, states[client.id] = work(part(whole, client), states.get(client.id), client)
            answers.append((float(len(client.data)) if simulation.method.weight == "samples" else 1.0, sent))
        mean = holder_mean(whole, answers)
        whole = {name: (1 - beta) * t + beta * mean[name] for name, t in whole.items()}
        simulation.train()
        simulation.round += 1
    return simulation, whole, states


def part(whole: Params, client: Visited) -> Params:
    """Return the first positions of every axis."""
    shapes = {name: p.shape for name, p in client.net.blank().named_parameters()}
    return {name: whole[name][tuple(slice(n) for n in shape)].clone() for name, shape in shapes.items()}


def holder_mean(whole: Params, answers: Sequence[tuple[float, Params]]) -> Params:
    """Return the mean over the clients that sent a coordinate; others keep their value."""
    new = {}
    for name, old in whole.items():
        total, divisor = torch.zeros_like(old), torch.zeros_like(old)
        for weight, sent in answers:
            if name in sent:
                place = tuple(slice(n) for n in sent[name].shape)
                total[place] += weight * sent[name]
                divisor[place] += weight
        new[name] = torch.where(divisor > 0, total / divisor.clamp(min=1), old)
    return new


def built(net: Net, params: Params) -> nn.Module:
    """Return the network with these parameters and new running statistics, which nothing reads."""
    return network(net, params | fresh(net.build()))


def gradients(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Params:
    """Return the gradients of cross-entropy by all parameters."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(F.cross_entropy(module.train()(x), y), parameters), strict=True))


def sgd(given: Params, client: Visited, only: Collection[str] = (), seed: int | None = None, **of: Any) -> Params:
    """Return `given` after a client's steps of plain SGD on the parameters `only`, default: all. Default of `of`: the
    two steps of a round; `epochs`: passes. `pull`: (parameters, strength) of a proximal term."""
    params = {name: t.clone() for name, t in given.items()}
    steps = of["epochs"] * -(-len(client.data) // BATCH) if "epochs" in of else STEPS
    module = built(client.net, params)
    for x, y in batches(client.data, client.seed if seed is None else seed, steps, BATCH):
        found = gradients(module, x, y)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                g = found[name]
                if "pull" in of:
                    towards, strength = of["pull"]
                    g = g + strength * (parameter - towards[name])
                if not only or name in only:
                    parameter -= LR * g
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_equal_states(simulation: Simulation, whole: Params, states: dict[int, Any], group: str = "own") -> None:
    """Assert that server and clients have these tensors, up to rounding in float64."""
    close(simulation.state["params"], whole)
    assert simulation.client_states.files.keys() == states.keys()
    for id, own in states.items():
        close(simulation.client_states.get(id)[group], own)  # pyright: ignore


def close(actual: Any, expected: Params) -> None:
    assert actual.keys() == expected.keys()
    for name, t in expected.items():
        assert actual[name].dtype == torch.float64
        torch.testing.assert_close(actual[name], t, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
