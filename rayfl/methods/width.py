"""What the width-heterogeneous methods share: everything but which coordinates a client holds."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar, Literal, Self, cast

from pydantic import model_validator
from torch import nn

from rayfl.axes import Net
from rayfl.methods.base import Client, Deployment, Payload, State, Task, Update
from rayfl.methods.local import LocalMethod
from rayfl.models.base import params_of
from rayfl.norms import tracked
from rayfl.submodel import Mask, NestedMean, Selection, Slice, prefix
from rayfl.tensors import Params
from rayfl.training import ClientData, weighted


class WidthMethod(LocalMethod):
    """Train a narrow dense network, average over holders. A subclass defines `window`, and `select` if clients train
    something else."""

    scaler: bool = False
    """Divide activations by (client width / server width) during training (HeteroFL section 3.3)."""
    label_rows: Literal["all", "present"] = "all"
    """Classifier rows that a client contributes: all, or those of its own classes (HeteroFL's code)."""

    @abstractmethod
    def window(self, state: State, round: int, capacity: float) -> Selection:
        """What a device of this capacity runs outside training."""

    def select(self, state: State, round: int, client: Client, seed: int) -> Selection:
        return self.window(state, round, client.capacity)

    def extract(self, state: State, selection: Selection) -> Payload:
        return {"params": selection.take(state["params"])}

    def local_update(
        self, payload: Payload, selection: Selection, client: Client, data: ClientData, round: int, seed: int
    ) -> Update:
        net = self.network(payload["params"], selection.net, data)
        metrics = self.train(net, data, round, seed)
        return self.answer(net, selection, data, metrics)

    def answer(self, net: nn.Module, selection: Selection, data: ClientData, metrics: dict[str, float]) -> Update:
        """The trained network, weighted, as what the server gets."""
        weight = self.weight_of(data)
        update = Update({"params": weighted(params_of(net), weight)}, weight, metrics=metrics)
        if self.label_rows == "present":
            self._keep_present_rows(update, selection.net, data.present.float().cpu())
        return update

    def _keep_present_rows(self, update: Update, net: Net, present) -> None:
        """A client holds the rows of the `classes` axis that are in its label set (HeteroFL's code)."""
        layout = self.task.layout(net)
        for name, dims in layout.dims.items():
            if dims and dims[0] is not None and dims[0].name == "classes":
                rows = present.view(-1, *[1] * (len(dims) - 1))
                update.sums["params"][name].mul_(rows)
                update.held[name] = rows * update.weight

    def deploy(self, state: State, round: int, capacity: float, client: Client | None = None) -> Deployment:
        selection = self.window(state, round, capacity)
        params = selection.take(state["params"])
        return Deployment(selection.key, self.task.model, selection.net, params)

    def prefix(self, capacity: float) -> Slice:
        """The first positions of every axis, as many as a capacity has."""
        net, task = self.net_at(capacity), self.task
        return prefix(task.layout(task.server), task.layout(net), net)

    def net_at(self, capacity: float) -> Net:
        """The client network of a capacity, with its Scaler."""
        net = self.task.nets[capacity]
        return replace(net, scale=net.width / self.task.server.width) if self.scaler else net


class PrefixMethod(WidthMethod):
    """Every client holds the first positions of every axis, in every round (HeteroFL Algorithm 1)."""

    def window(self, state: State, round: int, capacity: float) -> Slice:
        return self.prefix(capacity)


EVERYTHING = Mask(Net(), "everything", {})
"""A client has all of a group's tensors that it names."""


class GroupedMethod(PrefixMethod):
    """Beside the parameters that all share, the state has groups of tensors that a network has for itself: running
    statistics of its norms (those of the shared norms too), and parameters that are not in `params` or replace them."""

    @abstractmethod
    def group(self, net: Net) -> str:
        """The group of this network."""

    def own(self, state: State, net: Net) -> Params:
        """What the network's group has for its layers."""
        layers = {_layer(name) for name in self.task.layout(net).shapes}
        group = state.get(self.group(net), {})
        return self.place(net).take({name: t for name, t in group.items() if _layer(name) in layers})

    def extract(self, state: State, selection: Selection) -> Payload:
        own = self.own(state, selection.net)
        return super().extract(state, selection) | ({self.group(selection.net): own} if own else {})

    @property
    def tracks(self) -> bool:
        """Whether norms keep running statistics; `evaluation.statistics` has no effect then."""
        return True

    @model_validator(mode="after")
    def _unscaled(self) -> Self:
        if self.scaler and self.tracks:
            raise ValueError("scaler: false where norms keep running statistics, for those would be of what is divided")
        return self

    def local_update(
        self, payload: Payload, selection: Selection, client: Client, data: ClientData, round: int, seed: int
    ) -> Update:
        return self.trained(payload, selection, data, round, seed)

    def trained(
        self,
        payload: Payload,
        selection: Selection,
        data: ClientData,
        round: int,
        seed: int,
        adjust: Callable[[nn.Module], None] | None = None,
    ) -> Update:
        """A plain local update, with the group's tensors in their place; `adjust` as for `train`."""
        group, names = self.group(selection.net), self.task.layout(selection.net).shapes
        own = payload.get(group, {})
        net = self.network(payload["params"] | own, selection.net, data)
        statistics = {name: t.to(data.device, copy=True) for name, t in own.items() if name not in names}
        with tracked(net, statistics):
            metrics = self.train(net, data, round, seed, adjust=adjust)
        update = self.answer(net, selection, data, metrics)
        params = update.sums["params"]
        sent = {name: params.pop(name) for name in own if name in params} | weighted(statistics, update.weight)
        if sent:
            update.sums[group] = sent
        return update

    def place(self, net: Net) -> Selection:
        """Where in its group a network's tensors are."""
        return EVERYTHING

    def aggregate(self, state: State, round: int, updates: Iterator[tuple[Selection, Update]]) -> State:
        means = {group: NestedMean(tensors) for group, tensors in state.items()}
        for selection, update in updates:
            for group, sums in update.sums.items():
                if group == "params":
                    means[group].add(selection, sums, update.weight, update.held)
                else:
                    means[group].add(self.place(selection.net), sums, update.weight)
        return {group: mean.mean() for group, mean in means.items()}

    def deploy(self, state: State, round: int, capacity: float, client: Client | None = None) -> Deployment:
        deployed = super().deploy(state, round, capacity)
        own = self.own(state, deployed.net)
        names = self.task.layout(deployed.net).shapes
        params = {name: own[name] if name in own else deployed.params[name] for name in names}
        statistics = {name: t for name, t in own.items() if name not in names}
        return replace(deployed, params=params, statistics=statistics or None)


def _layer(name: str) -> str:
    """The path of the layer that a parameter or a statistic belongs to."""
    return name.rpartition(".")[0]


class SizedMethod(PrefixMethod):
    """What was published for clients that all train the same network; in a heterogeneous population there
    are three ways to take that."""

    size: Literal["largest", "smallest", "own"] = "largest"
    """largest, smallest: clients and server have one network, of the largest capacity (a server's own too) or of the
    smallest. own: the server has the largest, every client the first channels that it can carry: the holder mean."""

    def bind(self, task: Task) -> Self:
        if self.size == "own":
            return super().bind(task)
        net = (max if self.size == "largest" else min)(task.nets.values(), key=lambda net: net.width)
        return super().bind(task.everywhere(net))


class PersonalMethod(SizedMethod):
    """Some layers, or all, stay with the client: its carry holds them, by parameter name."""

    is_personal: ClassVar[bool] = True

    @property
    def keeps_capacities(self) -> str:
        """Where networks differ: a client's own layers fit one."""
        return "method.size: smallest or largest" if len(set(self.task.nets.values())) > 1 else ""

    def deploy(self, state: State, round: int, capacity: float, client: Client | None = None) -> Deployment:
        deployed = super().deploy(state, round, capacity)
        if client is None or client.carry is None:
            return deployed
        return replace(deployed, key=(deployed.key, client.id), params=deployed.params | cast(Params, client.carry))
