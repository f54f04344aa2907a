"""FjORD: every local step trains the first channels of every layer, as many as are drawn for it.

Paper: Horvath et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered
Dropout", NeurIPS 2021, https://arxiv.org/abs/2102.13451 (Algorithm 1).

Symbols: K the width of an axis in the widest network, P the widths of the population, p_max a client's own,
x the global parameters, z_p the logits of the subnetwork of width p, n_k a client's number of samples.

    S_p            positions 0 .. ceil(p K) - 1 of every axis; classes and image channels whole (section 3.1)
    y_k            SGD from S_pmax x; each step draws p uniformly from {s in P: s <= p_max} and takes the
                   gradient of CE(z_p, y) (sections 3.2, 4), or with `distill` (Eq. 1) of
                   CE(z_pmax, y) + (1 - alpha) CE(z_p, y) + alpha KL(softmax(z_pmax / T) || softmax(z_p / T)),
                   the first distribution being held constant
    x  <-  sum_k n_k S_pmax^T y_k / sum_k n_k S_pmax^T 1, elsewhere unchanged: Eq. 2, block by block between
                   the widths, in one formula

A client has trained, and counts for, all widths up to its own, also those that it never drew. The norms' running
statistics of a width are averaged over these clients with n_k, too.

    >>> from rayfl.methods import METHODS
    >>> METHODS["fjord"]().draws(widths=3, steps=8, seed=0)
    [1, 2, 0, 1, 0, 2, 2, 1]

Departures:
1. A step is of all parameters that a client has, and the gradient is zero outside the drawn width: weight decay and
   momentum act there too, as in the authors' Flower baseline; the paper updates the subnetwork's weights.
2. Eq. 1 names the student first in its KL; the target is the teacher, as in the baseline, whose cross-entropy with
   the teacher's softmax has the same gradient. No factor T^2 makes up for the temperature.
3. Where p = p_max is drawn, the teacher's logits are the student's: no second pass, no distillation gradient, and
   one update of the running statistics; the baseline runs the pass again.
4. `train_loss` is CE(z_p, y), of the widths as they were drawn, also while distilling.
5. Clients get the p_max network and the statistics up to p_max; the baseline ships everything to everyone. Its
   loaders start from the same seed in every round; here every round has batches of its own.
6. Capacities of equal width are one element of P. The paper's U_k are k equal capacities of the population.
7. A width that nobody in the population can train, of a wider server, keeps mean 0 and variance 1: there,
   `norms: static` is the choice.
8. `sample: round` is not the paper's: it is how SpaFL's comparison ran FjORD. A client draws p once a round, uniformly;
   it is sent, trains, sends back and counts for the parameters and statistics of that width alone.
"""

import functools
from dataclasses import dataclass
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.func import functional_call

from rayfl import costs
from rayfl.axes import Net, on_meta
from rayfl.methods.base import Client, Payload, State, Update
from rayfl.methods.width import GroupedMethod
from rayfl.models.base import Model, has_static_norms, layout, resident
from rayfl.norms import static_norms, tracked
from rayfl.seeds import numpy_generator
from rayfl.submodel import Selection, Slice, prefix
from rayfl.tensors import Params
from rayfl.training import ClientData, Loss, divergence, weighted


class FjORD(GroupedMethod):
    name: Literal["fjord"] = "fjord"
    weight: Literal["samples", "uniform"] = "samples"
    sample: Literal["step", "round"] = "step"
    """When a client draws a width: at every local step, or once a round (as in SpaFL's comparison): then the network
    of that width is all that it is sent, trains and sends."""
    norms: Literal["per_width", "per_width_affine", "static"] = "per_width"
    """Static batch norms. per_width: every width has running statistics, as torch keeps them, and a prefix of the
    shared weight and bias. per_width_affine: weight and bias of its own too (as in NeFL's comparison); those in
    `params` are never trained. static: statistics are collected before an evaluation, as for HeteroFL; with the
    others nothing is, and `evaluation.statistics` has no effect."""
    distill: bool = False
    """A client's widest network teaches the drawn one: one more pass of it a step."""
    alpha: float = Field(default=1.0, ge=0, le=1)
    """With `distill`: how much of what the drawn width learns is the teacher's; the rest is the labels'."""
    temperature: float = Field(default=1.0, gt=0)
    """With `distill`: T, which divides the logits in the divergence."""

    @model_validator(mode="after")
    def _a_teacher(self) -> Self:
        if self.distill and self.sample == "round":
            raise ValueError("distill: true with sample: step only, for the teacher is a client's widest network")
        if not self.distill and (self.alpha, self.temperature) != (1, 1):
            raise ValueError("alpha and temperature with distill: true only")
        return self

    def init(self, seed: int) -> State:
        state, nets = super().init(seed), self._nets(self.task.server)
        return state | {self.group(net): own for net in nets if (own := self._own(state["params"], net))}

    def select(self, state: State, round: int, client: Client, seed: int) -> Selection:
        if self.sample == "step":
            return self.window(state, round, client.capacity)
        nets = self._nets(self.net_at(client.capacity))
        drawn = int(numpy_generator(seed, "width", round, client.id).integers(len(nets)))
        return _cut(self.task.model, self.task.server, nets[drawn])

    def extract(self, state: State, selection: Selection) -> Payload:
        groups = {name: state[name] for net in self._trained(selection.net) if (name := self.group(net)) in state}
        own = groups.get(self.group(selection.net), {})
        params = selection.take(state["params"])
        return {"params": {name: t for name, t in params.items() if name not in own}} | groups

    def local_update(
        self, payload: Payload, selection: Selection, client: Client, data: ClientData, round: int, seed: int
    ) -> Update:
        model, params = self.task.model, payload["params"]
        whole = self.network(params | payload.get(self.group(selection.net), {}), selection.net, data)
        widths = {net: self._width(payload, selection.net, net, data) for net in self._trained(selection.net)}
        drawn = self.draws(len(widths), self.task.training.batches_of(len(data)), seed)
        ordered = _Ordered(whole, list(widths.values()), drawn, self.distill)
        metrics = self.train(ordered, data, round, seed, adjust=_zeros)
        metrics["train_flops"] = sum(costs.training_flops(model, net, width.samples) for net, width in widths.items())
        update = self.answer(whole, selection, data, metrics)
        update.sums["params"] = {name: t for name, t in update.sums["params"].items() if name in params}
        own = {self.group(net): width.own for net, width in widths.items() if width.own}
        update.sums |= {group: weighted(tensors, update.weight) for group, tensors in own.items()}
        return update

    def draws(self, widths: int, steps: int, seed: int) -> list[int]:
        """Which of a client's widths, counted from the largest, each of its steps trains."""
        return numpy_generator(seed, "width").integers(widths, size=steps).tolist()

    def loss(self, data: ClientData, round: int) -> Loss:
        """With `distill` it takes the teacher's and the student's logits [2, B, C], or [1, B, C] where they are the
        same. Absent classes are masked in the cross-entropies alone."""
        plain = super().loss(data, round)
        if not self.distill:
            return plain

        def distilling(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            teacher, student = logits[0], logits[-1]
            labels = plain(student, y)
            objective = plain(teacher, y) + (1 - self.alpha) * labels
            if len(logits) == 2:
                objective = objective + self.alpha * divergence(teacher.detach(), student, self.temperature)
            # the number of the student's cross-entropy, with the gradient of the objective
            return labels.detach() + (objective - objective.detach())

        return distilling

    @property
    def tracks(self) -> bool:
        return self.norms != "static"

    def group(self, net: Net) -> str:
        return f"width {net.width:g}"

    def _nets(self, largest: Net) -> list[Net]:
        """The networks of P up to this one, largest first."""
        nets = dict.fromkeys(map(self.net_at, self.task.nets))
        return [net for net in nets if net.width <= largest.width]

    def _trained(self, held: Net) -> list[Net]:
        """The networks among which the steps of a client draw that holds this one, largest first."""
        return self._nets(held) if self.sample == "step" else [held]

    def _own(self, params: Params, net: Net) -> Params:
        """What a width has for itself at first: its norms' statistics, perhaps their parameters."""
        if self.norms == "static" or not has_static_norms(self.task.model, net):
            return {}
        network = on_meta(self.task.model.build, net)
        if self.norms == "per_width":
            return self.task.model.statistics(net)
        taken = _cut(self.task.model, self.task.server, net).take(params)
        names = [f"{path}.{name}" for path in static_norms(network) for name in ("weight", "bias")]
        return self.task.model.statistics(net) | {name: taken[name].clone() for name in names}

    def _width(self, payload: Payload, whole: Net, net: Net, data: ClientData) -> "_Width":
        model = self.task.model
        own = {name: t.to(data.device, copy=True) for name, t in payload.get(self.group(net), {}).items()}
        affine = {name: nn.Parameter(t) for name, t in own.items() if name in self.task.layout(net).shapes}
        return _Width(resident(model, net, data.device).train(), _cut(model, whole, net), own, affine)


@dataclass
class _Width:
    """A width of one client's network, in training."""

    net: nn.Module
    """Where it runs: lent, so that its own parameters mean nothing."""
    cut: Slice
    """Which parameters of the client's network it takes."""
    own: Params
    """What it has for itself, in training."""
    affine: dict[str, nn.Parameter]
    """Those of `own` that are parameters: they share its memory."""
    samples: int = 0
    """How many it has processed."""

    def __call__(self, params: Params, x: torch.Tensor) -> torch.Tensor:
        self.samples += len(x)
        with tracked(self.net, self.own):
            return functional_call(self.net, self.cut.take(params) | self.affine, (x,))


class _Ordered(nn.Module):
    """A client's network, which runs in the width that was drawn for the step; the largest first if it teaches."""

    def __init__(self, whole: nn.Module, widths: list[_Width], drawn: list[int], distill: bool):
        super().__init__()
        self.whole = whole
        self.affine = nn.ParameterList(p for width in widths for p in width.affine.values())
        self.widths, self.drawn, self.distill = widths, iter(drawn), distill

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        params: Params = dict(self.whole.named_parameters())
        drawn = next(self.drawn)
        if not self.distill:
            return self.widths[drawn](params, x)
        return torch.stack([self.widths[i](params, x) for i in sorted({0, drawn})])


def _zeros(net: nn.Module) -> None:
    """A gradient for what a step did not use (norms of other widths): torch's fused SGD fails where only some
    parameters have momentum."""
    for parameter in net.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@functools.lru_cache(maxsize=256)
def _cut(model: Model, whole: Net, part: Net) -> Slice:
    return prefix(layout(model, whole), layout(model, part), part)
