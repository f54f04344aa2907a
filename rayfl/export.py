"""A submodel out of a run's checkpoint, for the world outside: plain torch runs it without rayfl.

Of a masked network (SpaFL, FedPM, FIARSE) the filters and neurons that are not there are left out (`rayfl.shrink`).
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from rayfl import costs, norms
from rayfl.checkpoints import complete
from rayfl.config import ConfigError
from rayfl.experiment import parse_experiment
from rayfl.methods import Deployment
from rayfl.models import load
from rayfl.population import label
from rayfl.seeds import torch_generator
from rayfl.shrink import filters, shrunk
from rayfl.tensors import Params
from rayfl.tracking.records import Run
from rayfl.training import Answer, answered

WHY_ZEROS_STAY = (
    "a bias or norm makes them a constant that is not 0, or a residual sum, an attention head or a class needs them"
)


class _Answering(nn.Module):
    """A network's one answer [B, C], whether it has early exits or not."""

    def __init__(self, net: nn.Module, answer: Answer):
        super().__init__()
        self.net = net
        self.answer: Answer = answer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return answered(self.net(x), self.answer)


def export_submodel(
    folder: Path, capacity: float, to: Path, client: int | None, say: Callable[[str], None]
) -> nn.Module:
    """Writes into `to` what a device of this capacity runs, and returns it, in evaluation mode.

    model.safetensors   parameters and norm statistics, by the names of the network's state
    model.pt2           the same as a program: `torch.export.load(...).module()(x)`, x [B, C, H, W] float32
    config.json         capacity, network, parameters, and how pixels become x: (pixels / scale - mean) / std;
                        of a masked network also how many of the parameters are not 0 (`nonzero`), and of how many
                        `filters` of the masked layers how many were `removed` and how many are `zeros` that stay
    """
    run = Run.open(folder)
    if not complete(folder / "checkpoints"):
        raise ConfigError(f"{folder}: has no checkpoint; allowed: the folder of a run, below trials/ in a sweep's")
    experiment = parse_experiment(run.config, str(folder / "config.json"))
    levels = experiment.clients.all_capacities
    if capacity not in levels:
        raise ConfigError(f"--capacity: given {capacity:g}; allowed: {', '.join(map(label, levels))}")
    if client is not None and not 0 <= client < experiment.clients.count:
        raise ConfigError(f"--client: given {client}; allowed: 0 to {experiment.clients.count - 1}")
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"--to {to}: is not empty; give a new folder")
    with tempfile.TemporaryDirectory() as scratch:
        simulation = experiment.simulation(experiment.data.load(), Path(scratch))
        round, said = simulation.restore(folder / "checkpoints")
        for text in said:
            say(text)
        if experiment.method.is_personal and client not in simulation.carries.files:
            say(_nobodys(experiment.method.name, client))
        deployed, statistics = simulation.deployment(capacity, client)
    net, of_mask = _network(deployed, statistics), {}
    if deployed.masked:
        deployed, net, of_mask = _without_zeros(deployed, statistics, net, say)
    example = torch.zeros(2, *deployed.model.input)
    program = torch.export.export(
        _Answering(net, deployed.answer), (example,), dynamic_shapes=({0: torch.export.Dim.AUTO},)
    )
    to.mkdir(parents=True, exist_ok=True)
    tensors = dict(net.named_parameters()) | dict(net.named_buffers())
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, to / "model.safetensors")
    torch.export.save(program, to / "model.pt2")
    preprocessing = experiment.data.preprocess
    config = {
        "capacity": capacity,
        "client": client,
        "round": round,
        "method": experiment.method.name,
        "model": deployed.model.model_dump(mode="json"),
        "net": asdict(deployed.net),
        "answer": deployed.answer,
        "parameters": costs.parameters(deployed.model, deployed.net),
        **of_mask,
        "pixels": {key: getattr(preprocessing, key) for key in ("scale", "mean", "std", "size")},
    }
    (to / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return net


def _nobodys(method: str, client: int | None) -> str:
    """Why this network of a personal method is not what it seems."""
    who = "no --client" if client is None else f"--client {client}: has not taken part yet"
    return f"{who}: with method {method} every client has a network of its own, and this one nobody has trained"


def _network(deployed: Deployment, statistics: Params) -> nn.Module:
    """As a device runs it."""
    net = deployed.model.build(deployed.net)
    load(net, deployed.params)
    norms.load(net, statistics)
    return net.eval()


def _without_zeros(
    deployed: Deployment, statistics: Params, net: nn.Module, say: Callable[[str], None]
) -> tuple[Deployment, nn.Module, dict]:
    """A masked deployment as a smaller network, if that answers as `net` does, and what config.json has of it."""
    small, left = shrunk(deployed, statistics)
    smaller = _network(small, left)
    x = torch.randn(8, *deployed.model.input, generator=torch_generator(0, "export"))
    with torch.no_grad():
        expected, given = (answered(network(x), deployed.answer) for network in (net, smaller))
    if not torch.allclose(given, expected, rtol=0, atol=1e-4 * float(expected.abs().max())):
        say(f"all filters stay: without the pruned ones model {deployed.model.name} answers otherwise")
        small, smaller = deployed, net
    (count, _), (stay, zeros) = filters(deployed), filters(small)
    before, after = (costs.parameters(d.model, d.net) for d in (deployed, small))
    nonzero = sum(int(t.count_nonzero()) for t in small.params.values())
    say(f"{before:,} -> {after:,} parameters, {nonzero:,} of them not 0; {count - stay:,} of {count:,} filters removed")
    if zeros and small is not deployed:
        say(f"{zeros:,} pruned filters stay: {WHY_ZEROS_STAY}")
    return small, smaller, {"nonzero": nonzero, "filters": count, "removed": count - stay, "zeros": zeros}
