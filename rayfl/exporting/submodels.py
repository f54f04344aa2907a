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

from rayfl.config import ConfigError
from rayfl.core import norms
from rayfl.core.net import Answer, Net, load
from rayfl.core.permissions import as_new
from rayfl.core.seeds import torch_generator, torch_scope
from rayfl.exporting.dead_channels import filters, shrunk
from rayfl.exporting.preparation import Preparation
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


def as_module(deployed: Deployment, preparation: Preparation | None = None) -> nn.Module:
    """Return a deployment as a module in evaluation mode: samples x [B, ...] as the data set stores them -> logits
    [B, C], or numbers in the units of the targets. Without a preparation, the bare network: it takes prepared samples,
    and answers in standardised numbers. Norms without statistics normalise by the batch."""
    network = _answering(_network(deployed), deployed)
    return network if preparation is None else preparation.around(network)


def export_submodel(
    deployed: Deployment,
    to: Path,
    about: Mapping[str, Any],
    notify: Callable[[str], None],
    files: Sequence[Path] = (),
    preparation: Preparation | None = None,
) -> nn.Module:
    """Write a deployment with its norms' statistics into a new folder; return it `as_module`.

    model.safetensors   parameters and norm statistics, by the names of the network's state
    model.pt2           the module as a program: `torch.export.load(...).module()(x)`, samples x [B, ...] of any number
    config.json         `about` (plain JSON), model, network, exits that answer, number of parameters, whether the
                        program takes samples as the data set stores them (`prepares`); for a masked
                        network also the parameters that are not 0 (`nonzero`) and the number of `filters` in masked
                        layers, with how many were `removed` and how many remain as `zeros`
    and files for other libraries (`Model.write`), which keep the zeros of a masked network

    `notify` receives notes on a masked network. `files`: attached by the data set (`DataSet.attached`).
    """
    of_mask, given = {}, deployed
    if deployed.masked:
        deployed, of_mask = _without_zeros(deployed, notify)
    network = _network(deployed)
    module, net = _answering(network, deployed), deployed.net
    example = net.model.example(2, "cpu")
    bare = module
    if preparation is not None:
        module, example = preparation.around(bare), preparation.example(net, 2)
    try:
        program = _program(module, example, net)
    except Exception as error:
        if module is bare:
            raise
        # an error of the network itself says so
        _program(bare, net.model.example(2, "cpu"), net)
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ConfigError(
            f"export: torch does not export the preparation of the samples ({reason}). Allowed: a data set whose "
            "Prepare has a method `module` that returns one that torch exports. Hint: raw exports the bare network"
        ) from error
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
        "prepares": preparation is not None,
        **of_mask,
    }
    (to / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    given.net.model.write(given.net, given.params, given.answer, files, to)
    return module


def _program(module: nn.Module, example: torch.Tensor, net: Net) -> torch.export.ExportedProgram:
    varying = dict.fromkeys(net.model.varying, torch.export.Dim.DYNAMIC)
    return torch.export.export(module, (example,), dynamic_shapes=(varying,))


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
