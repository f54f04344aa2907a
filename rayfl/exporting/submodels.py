"""A submodel for the world outside: plain torch runs it without rayfl.

Of a masked network (SpaFL, FedPM, FIARSE) the filters and neurons that are not there are left out
(`rayfl.exporting.dead_channels`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from rayfl.config import ConfigError
from rayfl.core import norms
from rayfl.core.net import Answer, Net, load
from rayfl.core.seeds import torch_generator
from rayfl.exporting.dead_channels import filters, shrunk
from rayfl.methods.base import Deployment
from rayfl.training.settings import answered

WHY_ZEROS_STAY = (
    "a bias or norm makes them a constant that is not 0, or a residual sum, an attention head or a class needs them"
)


class _Answering(nn.Module):
    """A network's one answer [B, C], of its early exits' answers."""

    def __init__(self, module: nn.Module, answer: Answer):
        super().__init__()
        self.module = module
        self.answer: Answer = answer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return answered(self.module(x), self.answer)


def as_module(deployed: Deployment) -> nn.Module:
    """What a device runs: x [B, ...] -> logits [B, C], in evaluation mode. Norms without statistics normalise by the
    batch."""
    return _answering(_network(deployed), deployed)


def export_submodel(
    deployed: Deployment,
    to: Path,
    about: Mapping[str, Any],
    notify: Callable[[str], None],
    files: Sequence[Path] = (),
) -> nn.Module:
    """Writes a deployment, which has its norms' statistics, into a new folder; returns it `as_module`.

    model.safetensors   parameters and norm statistics, by the names of the network's state
    model.pt2           the same as a program: `torch.export.load(...).module()(x)`, x [B, ...] as the model's `example`
    config.json         `about` (plain JSON), model, network, which exits answer, number of parameters; of a masked
                        network also how many of them are not 0 (`nonzero`), and of how many `filters` of the masked
                        layers how many were `removed` and how many are `zeros` that stay
    and what the model has for other libraries (`Model.write`), of a masked network with its zeros

    `say` is told what became of a masked network, and of a network that is nobody's result. `files`: the data's
    (`DataSet.attached`).
    """
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"{to}: is not empty; give a new folder")
    if deployed.is_start:
        notify(
            "every client has a network of its own, and this one nobody has trained; give a client who has taken part"
        )
    of_mask, given = {}, deployed
    if deployed.masked:
        deployed, of_mask = _without_zeros(deployed, notify)
    network = _network(deployed)
    module = _answering(network, deployed)
    example = deployed.net.model.example(2, "cpu")
    varying = dict.fromkeys(deployed.net.model.varying, torch.export.Dim.AUTO)
    program = torch.export.export(module, (example,), dynamic_shapes=(varying,))
    to.mkdir(parents=True, exist_ok=True)
    tensors = dict(network.named_parameters()) | dict(network.named_buffers())
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, to / "model.safetensors")
    torch.export.save(program, to / "model.pt2")
    config = {
        **about,
        "model": deployed.net.model.model_dump(mode="json"),
        "net": {f.name: getattr(deployed.net, f.name) for f in fields(Net) if f.name != "model"},
        "answer": deployed.answer,
        "parameters": deployed.net.parameters,
        **of_mask,
    }
    (to / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    given.net.model.write(given.net, given.params, given.answer, files, to)
    return module


def _network(deployed: Deployment) -> nn.Module:
    module = deployed.net.build()
    load(module, deployed.params)
    norms.load(module, deployed.statistics or {})
    return module.eval()


def _answering(network: nn.Module, deployed: Deployment) -> nn.Module:
    return _Answering(network, deployed.answer).eval() if deployed.net.exits else network


def _without_zeros(deployed: Deployment, notify: Callable[[str], None]) -> tuple[Deployment, dict[str, int]]:
    """A masked deployment as a smaller network, if that answers as before, and what config.json has of it."""
    small, statistics = shrunk(deployed, deployed.statistics or {})
    small = replace(small, statistics=statistics)
    x = deployed.net.model.example(8, "cpu")
    if x.is_floating_point():
        x = torch.randn(x.shape, generator=torch_generator(0, "export"))
    with torch.no_grad():
        expected, given = (as_module(d)(x) for d in (deployed, small))
    if not torch.allclose(given, expected, rtol=0, atol=1e-4 * float(expected.abs().max())):
        notify(f"all filters stay: without the pruned ones model {deployed.net.model.name} answers otherwise")
        small = deployed
    (count, _), (stay, zeros) = filters(deployed), filters(small)
    nonzero = sum(int(t.count_nonzero()) for t in small.params.values())
    before, after = deployed.net.parameters, small.net.parameters
    notify(
        f"{before:,} -> {after:,} parameters, {nonzero:,} of them not 0; {count - stay:,} of {count:,} filters removed"
    )
    if zeros and small is not deployed:
        notify(f"{zeros:,} pruned filters stay: {WHY_ZEROS_STAY}")
    return small, {"nonzero": nonzero, "filters": count, "removed": count - stay, "zeros": zeros}
