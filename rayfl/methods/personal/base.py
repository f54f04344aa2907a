"""Base classes of personalised methods: `Personal` has the settings that all of them share, `Partial` is the base of
methods whose clients keep some tensors of their network.

Methods based on `Partial` differ in the names of the tensors that stay on the client (`kept`), and in how a client
trains (`train`). With phi the other tensors, which are averaged, and h_k the tensors of client k:

    a client    (phi_k, h_k)  =  train from (phi, h_k) on its own data;  h_k starts equal for all clients
    phi        <-  sum_k w_k phi_k / sum_k w_k over the cohort

phi travels down and up. The start of h_k travels down once per client, because clients do not know the server's seed.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import ClassVar, cast

from pydantic import Field
from torch import nn

from rayfl import costs
from rayfl.clients import Population
from rayfl.config import ConfigError, nearest
from rayfl.core.fold import State, Update
from rayfl.core.joined import parameters_of
from rayfl.core.net import Net, params_of
from rayfl.core.seeds import stream
from rayfl.core.submodel import Selection, Slice, prefix
from rayfl.core.tensors import Params, copied, nbytes
from rayfl.methods.base import Client, Payload, Task, Visit
from rayfl.methods.dense import Dense
from rayfl.methods.sizes import Size, fixed_capacities, same
from rayfl.training.steps import at_rest


class Personal(Dense):
    judged_on: ClassVar = "clients"
    size: Size = "largest"
    """largest, smallest: one network for all. own: every client has the network of its fixed capacity."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return same(task, self.size)

    def check(self, rounds: int, clients: Population) -> None:
        fixed_capacities(self.name, self.task.nets, clients, "method.size: smallest or largest")


class Partial(Personal):
    resumes: ClassVar = True
    """True if a client's training starts from its last tensors, False if it starts from those of the server."""

    @abstractmethod
    def kept(self, net: Net) -> tuple[str, ...]:
        """Return the names of the parameters that stay on the client."""

    def check(self, rounds: int, clients: Population) -> None:
        super().check(rounds, clients)
        net = self.task.server
        if not net.layout.shapes.keys() - {*self.kept(net)}:
            raise ConfigError(f"method: no layer of model {net.model.name} is left to average. Allowed: at least one")

    def select(self, state: State, client: Client) -> Slice:
        everything = self.submodel(state, client.round, client.capacity)
        kept = {*self.kept(everything.net)}
        return replace(everything, names=tuple(n for n in everything.net.layout.dims if n not in kept))

    def extract(self, state: State, selection: Selection) -> Payload:
        """Return the averaged tensors, and as `start` the others, for clients without tensors of their own."""
        params = selection.take(state["params"])
        everything = prefix(self.task.server, selection.net).take(state["params"])
        return {"params": params, "start": {name: t for name, t in everything.items() if name not in params}}

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        shared, own = payload["params"], cast(Params, (visit.client_state or {}).get("own", {}))
        module = self.module(visit, shared | payload["start"] | (own if self.resumes else {}))
        metrics = self.train(module, visit)
        metrics["bytes_down"] = nbytes(shared if own else payload)
        trained = params_of(module)
        update = self.answer(trained, {"params": shared}, visit, metrics)
        if new := {name: t for name, t in trained.items() if name not in shared}:
            update.client_states[visit.client.id] = {"own": copied(new)}
        return update

    def train(self, module: nn.Module, visit: Visit) -> dict[str, float]:
        """Train the client's network in place and return metrics. Default: all layers together."""
        return self.fit(module, visit)


class PersonalLayers(Partial):
    """Methods whose clients keep some layers, the classifier by default."""

    personal: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Layers that stay on the client, by path, with all layers below them ("stage4"). Default: the classifier, and in
    language models the embedding of tokens, whose rows are classes too."""

    def check(self, rounds: int, clients: Population) -> None:
        net = self.task.server
        check_paths("method.personal", self.personal or (), net)
        if not self.kept(net):
            raise ConfigError(
                f"model: {net.model.name} has no trained classifier, which method {self.name} keeps on clients. "
                "Allowed: a model that trains its classifier, or other layers as method.personal"
            )
        super().check(rounds, clients)

    def kept(self, net: Net) -> tuple[str, ...]:
        return net.layout.classifier if self.personal is None else below(net, self.personal)

    def tune(self, module: nn.Module, visit: Visit, names: Collection[str], epochs: int) -> float:
        """Train only these parameters, for `epochs` passes over the client's data, and return the FLOPs."""
        training = self.task.training.for_epochs(epochs)
        own = replace(visit, seed=stream(visit.seed, "personal"))
        with at_rest(parameter for name, parameter in parameters_of(module).items() if name not in names):
            metrics = self.fit(module, own, training=training)
        return costs.partial_flops(visit.net, names, int(metrics["train_samples"]))

    def train_shared(self, module: nn.Module, visit: Visit) -> dict[str, float]:
        """Train only the averaged parameters and return metrics, with `train_flops` as for the whole network."""
        kept = {*self.kept(visit.net)}
        with at_rest(parameter for name, parameter in parameters_of(module).items() if name in kept):
            metrics = self.fit(module, visit)
        return metrics | {"train_flops": costs.training_flops(visit.net, int(metrics["train_samples"]))}


def below(net: Net, paths: Collection[str]) -> tuple[str, ...]:
    """Return the parameters of the layers at these paths or inside them."""
    return tuple(n for n in net.layout.dims if any(n == path or n.startswith(f"{path}.") for path in paths))


def check_paths(place: str, paths: Iterable[str], net: Net) -> None:
    """Raise a ConfigError if there is no layer at one of the paths."""
    for path in paths:
        if not below(net, [path]):
            layers = dict.fromkeys(name.rpartition(".")[0] for name in net.layout.dims)
            raise ConfigError(f"{place}: unknown layer {path!r}. {nearest(path, layers)}")
