"""What the methods share whose clients train dense networks: narrower, shallower, or whole.

The defaults are HeteroFL's without Scaler and masks: a client holds the first channels of every layer, trains them, and
the server averages over holders. A method says what differs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal, cast

import torch
from torch import nn

from rayfl.core.fold import ClientState, State, Update
from rayfl.core.net import Net, cached_module, load, params_of
from rayfl.core.norms import tracked
from rayfl.core.submodel import Selection, Slice, prefix
from rayfl.core.tensors import Params, copied
from rayfl.methods.base import Client, Deployment, Method, Payload, Visit
from rayfl.training.settings import Training


class Dense(Method):
    sent: ClassVar[tuple[str, ...]] = ("params", "statistics")
    """The groups of the state that are cut as a client's network is, sent, and averaged over holders."""

    scaler: bool = False
    """Divide activations by (client width / server width) during training (HeteroFL section 3.3)."""
    label_rows: Literal["all", "present"] = "all"
    """Classifier rows that a client contributes: all, or those of its own classes (HeteroFL's code)."""

    # which coordinates

    def submodel(self, state: State, round: int, capacity: float) -> Slice:
        """What a device of this capacity runs outside training: the first positions of every axis (HeteroFL
        Algorithm 1)."""
        return self.prefix(capacity)

    def select(self, state: State, client: Client) -> Selection:
        return self.submodel(state, client.round, client.capacity)

    def own(self, net: Net) -> str:
        """The group of the state with this network's own tensors, which are sent and averaged whole: its norms'
        statistics, and parameters in place of those in "params"; "": it has none."""
        return ""

    def extract(self, state: State, selection: Selection) -> Payload:
        own = state.get(self.own(selection.net), {})
        cut = {group: selection.take(state[group]) for group in self.sent if group in state}
        cut["params"] = {name: t for name, t in cut["params"].items() if name not in own}
        return cut | ({self.own(selection.net): own} if own else {})

    # how it trains

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
        """Steps on the client's loss from what it was sent, and the answer: the tensors of the payload, trained and
        weighted, group by group. `training` and `adjust` as for `fit`."""
        names, device = visit.net.layout.shapes, visit.data.device
        given: Params = {name: t for group in payload.values() for name, t in group.items()}
        statistics = {name: t.to(device, copy=True) for name, t in given.items() if name not in names}
        module = self.module(visit, given)
        with tracked(module, statistics):
            metrics = self.fit(module, visit, training=training, adjust=adjust)
        return self.answer(params_of(module) | statistics, payload, visit, metrics)

    def module(self, visit: Visit, params: Params) -> nn.Module:
        """The client's network with `params`, on the device of its data. It is shared: used until the answer."""
        module = cached_module(visit.net, visit.data.device)
        load(module, params)
        return module

    def answer(self, trained: Params, payload: Payload, visit: Visit, metrics: dict[str, float]) -> Update:
        """Of the trained tensors those that came in the payload's groups, weighted."""
        weight = self.weight_of(visit.data)
        sums = {g: copied({name: trained[name] for name in t}, weight) for g, t in payload.items()}
        whole = {g: sums.pop(g) for g in payload if g not in self.sent}
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
        """Which rows of a tensor with a row a class, [rows] bool, a client with the label set `present` [C] contributes
        if `label_rows` asks for its own. Those behind the last class, as of a mask's token, are everybody's."""
        return torch.cat([present, present.new_ones(rows - len(present))])

    # what a device runs

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        """A network's own tensors stand in place of the shared ones; so do those that a client keeps as its "own"."""
        selection = self.submodel(state, round, capacity)
        own = state.get(self.own(selection.net), {}) | cast(Params, (client_state or {}).get("own", {}))
        cut = selection.take(state["params"] | state.get("statistics", {})) | own
        names = selection.net.layout.shapes
        params = {name: cut[name] for name in names}
        statistics = {name: t for name, t in cut.items() if name not in names}
        return Deployment(selection.key, selection.net, params, statistics or None)

    # tools

    def prefix(self, capacity: float) -> Slice:
        """The first positions of every axis, as many as a capacity has."""
        return prefix(self.task.server, self.net_at(capacity))

    def net_at(self, capacity: float) -> Net:
        """The client's network of a capacity, with its Scaler."""
        net = self.task.nets[capacity]
        return replace(net, scale=net.width / self.task.server.width) if self.scaler else net
