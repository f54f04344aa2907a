"""Base class of methods whose clients train dense networks: narrower, shallower or whole.

The defaults are HeteroFL without Scaler and masks: a client trains the first channels of every layer, and the server
averages each coordinate over the clients that hold it.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import ClassVar, Literal, cast

import torch
from torch import nn

from rayfl.core.fold import ClientState, State, Update
from rayfl.core.joined import parameters_of
from rayfl.core.net import Net, cached_module, load, params_of
from rayfl.core.norms import tracked
from rayfl.core.submodel import Selection, Slice, prefix
from rayfl.core.tensors import Params, copied
from rayfl.methods.base import Client, Deployment, Method, Payload, Visit
from rayfl.training.settings import Training


class Dense(Method):
    """Base class of methods whose clients train dense networks: narrower, shallower or whole. The defaults are HeteroFL
    without Scaler and masks.

    >>> class RootWeighted(Dense):
    ...     def weight_of(self, data):
    ...         return len(data) ** 0.5
    >>> RootWeighted().weight_of(range(16))
    4.0
    """

    sent: ClassVar[tuple[str, ...]] = ("params", "statistics")
    """Groups of the state that are cut to the client's network, sent, and averaged over holders."""

    scaler: bool = False
    """Divide activations by (client width / server width) during training (HeteroFL section 3.3)."""
    label_rows: Literal["all", "present"] = "all"
    """Classifier rows that a client contributes: all, or only those of its classes (HeteroFL's code)."""

    @property
    def synchronous(self) -> str:
        return ""

    def submodel(self, state: State, round: int, capacity: float) -> Slice:
        """Return the submodel outside training: the first positions of every axis (HeteroFL Algorithm 1)."""
        return self.prefix(capacity)

    def select(self, state: State, client: Client) -> Selection:
        return self.submodel(state, client.round, client.capacity)

    def own(self, net: Net) -> str:
        """Return the group of the state with tensors of this network only (statistics of norms, parameters that replace
        those in "params"), which are sent and averaged whole; "" if there is none."""
        return ""

    def extract(self, state: State, selection: Selection) -> Payload:
        own = state.get(self.own(selection.net), {})
        cut = {group: selection.take(state[group]) for group in self.sent if group in state}
        cut["params"] = {name: t for name, t in cut["params"].items() if name not in own}
        return cut | ({self.own(selection.net): own} if own else {})

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        return self.trained(payload, visit)

    def trained(
        self,
        payload: Payload,
        visit: Visit,
        *,
        training: Training | None = None,
        adjust: Callable[[nn.Module], None] | None = None,
    ) -> Update:
        """Train from the payload on the client's loss and return the trained, weighted tensors by group. `training` and
        `adjust` as for `fit`."""
        names, device = visit.net.layout.shapes, visit.data.device
        received: Params = {name: t for group in payload.values() for name, t in group.items()}
        statistics = {name: t.to(device, copy=True) for name, t in received.items() if name not in names}
        module = self.module(visit, received)
        with tracked(module, statistics):
            metrics = self.fit(module, visit, training=training, adjust=adjust)
        return self.answer(params_of(module) | statistics, payload, visit, metrics)

    def module(self, visit: Visit, params: Params) -> nn.Module:
        """Return the client's network with `params` on the device of its data. It is cached: do not keep it."""
        module = cached_module(visit.net, visit.data.device)
        load(module, params)
        return module

    def answer(self, trained: Params, payload: Payload, visit: Visit, metrics: dict[str, float]) -> Update:
        """Return the update: the trained tensors of the payload's groups, weighted."""
        weight, kept = self.weight_of(visit.data), self.withheld(visit.net)

        def weighted(names: Iterable[str]) -> Params:
            return copied({name: trained[name] for name in names}, weight)

        sums = {g: weighted(n for n in t if n not in kept) for g, t in payload.items() if g in self.sent}
        whole = {g: weighted(t) for g, t in payload.items() if g not in self.sent}
        update = Update(sums, weight, whole, metrics=metrics)
        if self.label_rows == "present":
            present = visit.data.present.cpu()
            for name in visit.net.layout.classifier:
                if (t := sums["params"].get(name)) is not None:
                    rows = self.contributed(present, len(t)).float().view(-1, *[1] * (t.dim() - 1))
                    t.mul_(rows)
                    update.row_weights[name] = rows * weight
        return update

    def contributed(self, present: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the mask [rows] of classifier rows that a client with classes `present` [C] contributes under
        `label_rows: present`. All clients contribute rows after the last class, such as a mask token's."""
        return torch.cat([present, present.new_ones(rows - len(present))])

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        """Return the submodel, with shared tensors replaced by the network's own and by the client state's "own"."""
        selection = self.submodel(state, round, capacity)
        own = state.get(self.own(selection.net), {}) | cast(Params, (client_state or {}).get("own", {}))
        cut = selection.take(state["params"] | state.get("statistics", {})) | own
        return Deployment.of(selection.key, selection.net, cut)

    def prefix(self, capacity: float) -> Slice:
        """Return the first positions of every axis for the network of a capacity."""
        return prefix(self.task.server, self.net_at(capacity))

    def net_at(self, capacity: float) -> Net:
        """Return the network of a capacity, with the Scaler if it is set."""
        net = self.task.nets[capacity]
        return replace(net, scale=net.width / self.task.server.width) if self.scaler else net

    def nets_within(self, largest: Net) -> list[Net]:
        """Return the distinct networks of all capacities up to the width of this one, largest first."""
        nets = dict.fromkeys(map(self.net_at, self.task.nets))
        return [net for net in nets if net.width <= largest.width]


def pull(towards: Params, strength: float) -> Callable[[nn.Module], None]:
    """Return a hook for `fit` that adds strength * (parameter - towards) to gradients. `towards` is on their device."""

    def add(module: nn.Module) -> None:
        for name, parameter in parameters_of(module).items():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - towards[name], alpha=strength)

    return add
