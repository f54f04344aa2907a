"""Export of a submodel that plain torch runs without rayfl.

Filters and neurons that a mask removes (SpaFL, FedPM, FIARSE) are left out (`rayfl.exporting.dead_channels`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from rayfl.core import norms
from rayfl.core.net import Answer, Net, load
from rayfl.core.permissions import as_new
from rayfl.core.seeds import torch_generator, torch_scope
from rayfl.exporting.dead_channels import filters, shrunk
from rayfl.methods.base import Deployment
from rayfl.training.settings import answered

WHY_ZEROS_STAY = (
    "a bias or norm makes them a constant that is not 0, or a residual sum, an attention head or a class needs them"
)


class _Answering(nn.Module):
    """A network with several outputs, such as early exits, and the one [B, C] that is evaluated."""

    def __init__(self, module: nn.Module, answer: Answer):
        super().__init__()
        self.module = module
        self.answer: Answer = answer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return answered(self.module(x), self.answer)


def as_module(deployed: Deployment) -> nn.Module:
    """Return a deployment as a module in evaluation mode: x [B, ...] -> logits [B, C]. Norms without statistics
    normalise by the batch."""
    return _answering(_network(deployed), deployed)


def export_submodel(
    deployed: Deployment, to: Path, about: Mapping[str, Any], notify: Callable[[str], None], files: Sequence[Path] = ()
) -> nn.Module:
    """Write a deployment with its norms' statistics into a new folder; return it `as_module`.

    model.safetensors   parameters and norm statistics, by the names of the network's state
    model.pt2           the same as a program: `torch.export.load(...).module()(x)`, x [B, ...] as the model's `example`
    config.json         `about` (plain JSON), model, network, exits that answer, number of parameters; for a masked
                        network also the parameters that are not 0 (`nonzero`) and the number of `filters` in masked
                        layers, with how many were `removed` and how many remain as `zeros`
    and files for other libraries (`Model.write`), which keep the zeros of a masked network

    `notify` receives notes on a masked network. `files`: attached by the data set (`DataSet.attached`).
    """
    of_mask, given = {}, deployed
    if deployed.masked:
        deployed, of_mask = _without_zeros(deployed, notify)
    network = _network(deployed)
    module = _answering(network, deployed)
    example = deployed.net.model.example(2, "cpu")
    varying = dict.fromkeys(deployed.net.model.varying, torch.export.Dim.DYNAMIC)
    program = torch.export.export(module, (example,), dynamic_shapes=(varying,))
    to.mkdir(parents=True, exist_ok=True)
    tensors = dict(network.named_parameters()) | dict(network.named_buffers())
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, to / "model.safetensors")
    as_new(to / "model.safetensors")
    torch.export.save(program, to / "model.pt2")
    config = {
        **about,
        "model": deployed.net.model.model_dump(mode="json"),
        "net": {f.name: getattr(deployed.net, f.name) for f in fields(Net) if f.name != "model"},
        "answer": deployed.answer,
        "parameters": deployed.net.parameters,
        **of_mask,
    }
    (to / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    given.net.model.write(given.net, given.params, given.answer, files, to)
    return module


def _network(deployed: Deployment) -> nn.Module:
    # initial values are not used, and the user's generator is left as it is
    with torch_scope(0):
        module = deployed.net.build()
    load(module, deployed.params)
    norms.load(module, deployed.statistics or {})
    return module.eval()


def _answering(network: nn.Module, deployed: Deployment) -> nn.Module:
    with torch.no_grad():
        output = network(deployed.net.model.example(2, "cpu"))
    return network if isinstance(output, torch.Tensor) else _Answering(network, deployed.answer).eval()


def _without_zeros(deployed: Deployment, notify: Callable[[str], None]) -> tuple[Deployment, dict[str, int]]:
    """Return a masked deployment as a smaller network, if its outputs match, and its entries in config.json."""
    small, statistics = shrunk(deployed, deployed.statistics or {})
    small = replace(small, statistics=statistics)
    x = deployed.net.model.example(8, "cpu")
    if x.is_floating_point():
        x = torch.randn(x.shape, generator=torch_generator(0, "export"))
    with torch.no_grad():
        expected, given = (as_module(d)(x) for d in (deployed, small))
    if not torch.allclose(given, expected, rtol=0, atol=1e-4 * float(expected.abs().max())):
        notify(f"no filters removed: without the pruned ones, model {deployed.net.model.name} gives other outputs")
        small = deployed
    (count, _), (stay, zeros) = filters(deployed), filters(small)
    nonzero = sum(int(t.count_nonzero()) for t in small.params.values())
    before, after = deployed.net.parameters, small.net.parameters
    notify(
        f"{before:,} -> {after:,} parameters, {nonzero:,} of them nonzero; {count - stay:,} of {count:,} filters "
        "removed"
    )
    if zeros and small is not deployed:
        notify(f"{zeros:,} pruned filters stay: {WHY_ZEROS_STAY}")
    return small, {"nonzero": nonzero, "filters": count, "removed": count - stay, "zeros": zeros}
