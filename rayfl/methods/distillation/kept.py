"""Shared parts of the methods whose clients keep their networks, and that need no public data."""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core import norms
from rayfl.core.fold import ClientState, State, Update
from rayfl.core.net import Net, cached_module, load
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params, copied
from rayfl.data.samples import ClientData
from rayfl.methods.base import Payload, Visit
from rayfl.methods.distillation.base import Unequal
from rayfl.methods.sizes import fixed_capacities
from rayfl.metrics import label
from rayfl.models.features import classifier_path, feature_size, tapped
from rayfl.training.distillation import AT_ONCE


class Keeping(Unequal):
    """Base class of methods whose clients keep their networks. The server has none of them; its state is sent to all
    clients."""

    judged_on: ClassVar = "clients"

    def check(self, rounds: int, clients: Population) -> None:
        fixed_capacities(self.name, self.task.nets, clients, "one network for all capacities")

    def init(self) -> State:
        return {}

    def extract(self, state: State, selection: Selection) -> Payload:
        return state

    def kept(
        self, network: Params, whole: dict[str, Params], visit: Visit, metrics: dict[str, float], **groups: Params
    ) -> Update:
        """Return a client's update: `whole` is sent; the network, and further groups, are the next client state."""
        client_state: ClientState = {"own": copied(network)} | {name: copied(t) for name, t in groups.items()}
        weight = self.weight_of(visit.data)
        return Update({}, weight, whole=whole, metrics=metrics, client_states={visit.client.id: client_state})


def check_features(method: str, nets: Mapping[float, Net]) -> None:
    """Raise a ConfigError if the classifiers of the networks read different numbers of features."""
    sizes = {capacity: feature_size(net) for capacity, net in nets.items()}
    if len(set(sizes.values())) > 1:
        given = ", ".join(f"{size} of capacity {label(capacity)}" for capacity, size in sizes.items())
        raise ConfigError(
            f"model: the classifiers read different numbers of features: {given}. Allowed with method "
            f"{method}: one number. Hint: set model.features of model mix"
        )


def by_class(rows: torch.Tensor, y: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the sums [classes, K] of rows [B, K] with labels y [B], by a matrix product, because sums by index are not
    deterministic on a GPU."""
    return F.one_hot(y, classes).to(rows.dtype).T @ rows


def means_by_class(sums: torch.Tensor, counts: torch.Tensor) -> tuple[Params, Params]:
    """Return the means [K] and the counts [] of every class with samples, from sums [C, K] and counts [C]."""
    present = counts.nonzero().flatten().tolist()
    means = (sums / counts.clamp(min=1)[:, None]).cpu()
    return {str(j): means[j].clone() for j in present}, {str(j): counts[j].to("cpu", copy=True) for j in present}


@torch.no_grad()
def class_means(network: Params, net: Net, data: ClientData) -> tuple[Params, Params]:
    """Return the mean features [D] and the number of samples [] of every class in the data, in evaluation mode."""
    module = cached_module(net, data.device)
    load(module, network)
    norms.load(module, {name: t for name, t in network.items() if name not in net.layout.shapes})
    module.eval()
    classes = len(data.present)
    sums = torch.zeros(classes, feature_size(net), device=data.device)
    counts = torch.zeros(classes, device=data.device)
    with tapped(module, classifier_path(net)) as tap:
        for x, y in data.plain(AT_ONCE):
            module(x)
            sums += by_class(tap.features, y, classes)
            counts += F.one_hot(y, classes).to(counts.dtype).sum(0)
    return means_by_class(sums, counts)


def mean_over_clients(known: Params, sums: Params, counts: Params) -> Params:
    """Return class -> mean: sums divided by counts, otherwise the value before the round."""
    # update transforms can add noise to counts
    new = {**known, **{j: sums[j] / n for j, n in counts.items() if n > 0}}
    return {j: new[j] for j in sorted(new, key=int)}


def stacked(rows: Params, classes: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows [classes, size] of all classes, 0 if missing, and the classes that have one [classes] bool."""
    found, known = torch.zeros(classes, size), torch.zeros(classes, dtype=torch.bool)
    for j, row in rows.items():
        found[int(j)], known[int(j)] = row, True
    return found.to(device), known.to(device)
