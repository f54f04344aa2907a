"""What the networks of an experiment are and cost, before anything is trained."""

from itertools import chain
from typing import Any

import torch

from rayfl import costs
from rayfl.config import ConfigError, set_path
from rayfl.core.fold import ClientState, State, Update
from rayfl.core.net import Net
from rayfl.core.operations import Convention
from rayfl.core.submodel import Coverage, Selection
from rayfl.core.tensors import nbytes
from rayfl.data.arrays import Column
from rayfl.data.base import DataSet
from rayfl.data.samples import ClientData
from rayfl.experiment import Experiment
from rayfl.methods.base import Client, Method, Payload, Visit
from rayfl.models import MODELS_KIND
from rayfl.models.base import ImageModel

PUBLIC = 1000
"""Public samples where nothing says how many there are."""


def describe(experiment: Experiment, convention: Convention = "macs", coverage: int = 0) -> list[dict[str, Any]]:
    """One record a capacity: the width of its network and, where the model has any, the residual blocks and the early
    exits that it keeps; parameters, operations of one sample by a convention, and MB of 2^20 bytes. Of adapters the
    rank too, and the frozen parameters, which a device stores and nobody trains or sends.

    The bytes are those that the method really sends, of one client's last round on two made-up samples, and as many
    public ones as `data.public` says, or `PUBLIC` where it says a share. Of a masked
    network only elements that are not 0 count. With `coverage`: the share of the server's parameters that a client of
    the capacity ever holds in that many rounds.
    """
    one_step = experiment.training.model_copy(update={"steps": 1})
    experiment = experiment.model_copy(update={"model": experiment.model.blank, "training": one_step})
    method = experiment.bound()
    state = method.init()
    return [_record(experiment, method, state, capacity, convention, coverage) for capacity in method.task.nets]


def _record(
    experiment: Experiment, method: Method, state: State, capacity: float, convention: Convention, coverage: int
) -> dict[str, Any]:
    net = method.task.nets[capacity]
    selection, payload, update = _worked(experiment, method, state, capacity, None)
    if client_state := update.client_states.get(0):
        # not the client's first round: it has what it keeps
        selection, payload, update = _worked(experiment, method, state, capacity, client_state)
    deployed = method.deploy(state, 0, capacity)
    parameters, share = net.parameters, 1.0
    if deployed.masked:
        present = deployed.present
        parameters, share = present.parameters, present.macs / deployed.net.macs
    record: dict[str, Any] = {"capacity": capacity} | anatomy(net)
    record |= {
        "parameters": parameters,
        "flops": round(share * net.operations(convention)),
        "bytes_down": update.metrics.get("bytes_down", nbytes(payload) + selection.nbytes),
        "bytes_up": update.metrics.get("bytes_up", nbytes(update.sums) + nbytes(update.whole)),
        "space_mb": costs.space_mb(parameters + record.get("frozen", 0)),
    }
    if coverage:
        held = Coverage(method.task.server.layout.shapes)
        for t in range(coverage):
            held.add(method.select(state, Client(0, capacity, t)))
        record["coverage"] = held.share()
    return record


def anatomy(net: Net) -> dict[str, Any]:
    """What a network keeps of its model. Blocks are "8/8", or a bit each and a group a stage: "11 00 11 10"."""
    model = net.model
    found: dict[str, Any] = {"width": net.width}
    if model.blocks:
        names = net.layout.dims
        held = {
            b: b not in net.without and any(name.startswith(f"{b}.") for name in names) for b in chain(*model.blocks)
        }
        bits = " ".join("".join("01"[held[block]] for block in stage) for stage in model.blocks)
        found["blocks"] = f"{len(held)}/{len(held)}" if all(held.values()) else bits
    if model.exit_count > 1:
        found["exits"] = net.exits
    return {**found, **model.parts(net)}


def _worked(
    experiment: Experiment, method: Method, state: State, capacity: float, client_state: ClientState | None
) -> tuple[Selection, Payload, Update]:
    """What a client is sent in the last round, and answers."""
    client = Client(0, capacity, experiment.rounds - 1)
    selection = method.select(state, client)
    payload = method.extract(state, selection)
    public = experiment.data.public
    theirs = None if public is None else _made_up(experiment.data, public.count or public.noise or PUBLIC)
    work = Visit(client, selection, _made_up(experiment.data, 2), client_state, experiment.seed, theirs)
    return selection, payload, method.local_update(payload, work)


def _made_up(data: DataSet, samples: int) -> ClientData:
    """So many samples of zeros."""
    found = {name: torch.zeros(samples, *column.shape, dtype=_stored(column)) for name, column in data.columns.items()}
    return ClientData(found, data.prepare, data.goal)


def _stored(column: Column) -> torch.dtype:
    return torch.uint8 if column.below is None else getattr(torch, column.stored)


def native(name: str, classes: int | None = None) -> dict[str, Any]:
    """A model of images as it was published, at HeteroFL's five capacities, as a file would hold it: its data are made
    up."""
    model = MODELS_KIND.find(name, "--model")
    if not issubclass(model, ImageModel):
        raise ConfigError(f"--model: given {name!r}; allowed: a model of images; describe a CONFIG with it instead")
    fields = model.model_fields
    data = {"name": "synthetic", "shape": fields["input"].default, "classes": classes or fields["classes"].default}
    clients = {"count": 1000, "capacities": [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]}
    return {"model": {"name": name}, "data": data, "clients": clients}


def changed(given: dict[str, Any], capacities: str | None, metric: str | None, method: str | None) -> dict[str, Any]:
    """What a file held, with what the command line says; unless one of them names a method it is HeteroFL."""
    if capacities:
        shares = capacities if capacities[:1].isalpha() else _shares(capacities)
        given = set_path(set_path(given, "clients.capacities", shares), "clients.weights", [])
    if metric:
        given = set_path(given, "clients.metric", metric)
    return given | {"method": method or given.get("method", "heterofl")}


def _shares(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--capacities: given {text!r}; allowed: shares such as 1,0.5 or letters such as a1-e1"
        ) from None
