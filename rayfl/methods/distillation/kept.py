"""Shared parts of the methods whose clients keep their networks, and that need no public data.

Departures of all of them from TsingZ0/HtFLlib, the code of most: there all clients take part in every round, samples
come in a fixed order without the last incomplete batch, and the best round on test data is reported. Here a client
outside the cohort keeps its network, batches are those of `training`, and validation data select hyper-parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from rayfl.clients import Population
from rayfl.config import Config, ConfigError
from rayfl.core import norms
from rayfl.core.fold import ClientState, Fold, State, Update
from rayfl.core.net import Net, cached_module, load, params_of
from rayfl.core.seeds import torch_generator
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params, copied
from rayfl.data.samples import ClientData
from rayfl.methods.base import Deployment, Payload, ServerTask, ServerTaskResult, Visit
from rayfl.methods.distillation.base import Unequal
from rayfl.methods.sizes import fixed_capacities
from rayfl.metrics import label
from rayfl.models.features import classifier_of, classifier_path, feature_size, tapped, with_classifier
from rayfl.training.distillation import AT_ONCE
from rayfl.training.settings import Loss


class Keeping(Unequal):
    """Base class of methods whose clients keep their networks. The server has none of them; its state is sent to all
    clients."""

    judged_on: ClassVar = "clients"

    def check(self, rounds: int, clients: Population) -> None:
        fixed_capacities(self.name, self.task.nets, clients, "one network for all capacities")
        for net in self.task.nets.values():
            classifier_path(self.own_net(net))  # raises an error for outputs per token or several exits

    def own_net(self, net: Net) -> Net:
        """Return the network that a client with this network deploys."""
        return net

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


HEAD = "head"
"""Group of the state and the payload: the global classifier, "weight" [C, D] and "bias" [C] if it has one."""


class GlobalHead(Keeping):
    """Base class of methods whose clients replace their classifier by a global one at the start of a round and when
    they are deployed. It starts as the classifier of the server's network."""

    def check(self, rounds: int, clients: Population) -> None:
        super().check(rounds, clients)
        check_classifiers(self.name, self.task.nets)

    def init(self) -> State:
        return {HEAD: classifier_of(self.task.initial(), self.task.server)}

    def start(self, payload: Payload, visit: Visit) -> Params:
        """Return the client's network, or the initial one of its capacity, with the received classifier."""
        return with_classifier(self.own(visit.client_state, visit.client.capacity), visit.net, payload[HEAD])

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        """Return the client's network, or the initial one of this capacity, with the global classifier."""
        deployed = super().deploy(state, round, capacity, client_state)
        head: Params = state[HEAD]
        return replace(deployed, params=with_classifier(deployed.params, deployed.net, head))


def check_features(method: str, nets: Mapping[float, Net]) -> None:
    """Raise a ConfigError if the classifiers of the networks read different numbers of features."""
    sizes = {capacity: feature_size(net) for capacity, net in nets.items()}
    if len(set(sizes.values())) > 1:
        given = ", ".join(f"{size} of capacity {label(capacity)}" for capacity, size in sizes.items())
        raise ConfigError(
            f"model: the classifiers read different numbers of features: {given}. Allowed with method "
            f"{method}: one number. Hint: set model.features of model mix"
        )


def check_classifiers(method: str, nets: Mapping[float, Net]) -> None:
    """Raise a ConfigError if the classifiers of the networks have different parameters."""
    check_features(method, nets)
    counts = {capacity: len(net.layout.classifier) for capacity, net in nets.items()}
    if len(set(counts.values())) > 1:
        given = ", ".join(f"{count} in that of capacity {label(capacity)}" for capacity, count in counts.items())
        raise ConfigError(
            f"model: some classifiers have no bias: {given} parameters. Allowed with method {method}: all or none. "
            "Hint: set model.features of model mix"
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
    norms.load(module, network)
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


# a small network that the server trains on what clients sent

FEATURES = "features"
"""Group of an update: "CLIENT CLASS" -> mean features [D] of the client's samples of this class."""
RECEIVED = "received"
"""Group of the state while the server trains: its training data."""


class Teaching(Unequal):
    """Base class of methods whose server trains in one server task, after a `step` with the group `RECEIVED`."""

    def plan(self, state: State, round: int) -> Sequence[ServerTask]:
        return [ServerTask("server", self.task.server, 1, state)] if RECEIVED in state else []

    def absorb(self, state: State, round: int, refined: Mapping[str, ServerTaskResult]) -> State:
        new = {**state, **refined["server"].groups}
        return {group: t for group, t in new.items() if group != RECEIVED}


class ServerTraining(Config):
    """Training of the server by SGD on the class means of a round."""

    epochs: int = Field(default=1, ge=1)
    """Passes over the class means per round."""
    batch_size: int = Field(default=10, ge=1)
    """Class means per step."""
    lr: float = Field(default=0.01, gt=0)
    """Learning rate."""

    def fit(self, module: nn.Module, received: Params, loss: Loss, seed: int, device: torch.device) -> Params:
        """Train a module in place and return its parameters. `loss`: (features [B, D], y [B]) -> mean loss."""
        module.to(device).train()
        features, y = received["features"].to(device), received["labels"].to(device)
        optimizer = torch.optim.SGD(module.parameters(), self.lr)
        for epoch in range(self.epochs):
            order = torch.randperm(len(y), generator=torch_generator(seed, "student", epoch))
            for rows in order.to(device).split(self.batch_size):
                optimizer.zero_grad()
                loss(features[rows], y[rows]).backward()
                optimizer.step()
        return copied(params_of(module))


class Taught(Teaching):
    """Base class of methods whose server trains on the class means of the round's clients: `RECEIVED` has "features"
    [n, D] and "labels" [n]."""

    server: ServerTraining = ServerTraining()
    """Training of the server."""

    def sent(self, means: Params, visit: Visit) -> dict[str, Params]:
        """Return the group of an update with a client's class means."""
        return {FEATURES: {f"{visit.client.id} {j}": mean for j, mean in means.items()}}

    def step(self, state: State, round: int, fold: Fold) -> State:
        found = {tuple(map(int, key.split())): t for key, t in fold.sum(FEATURES).items()}
        if not found:
            return state
        order = sorted(found)
        features, labels = torch.stack([found[key] for key in order]), torch.tensor([j for _, j in order])
        return {**state, RECEIVED: {"features": features, "labels": labels}}
