"""FjORD: every local step trains the first channels of every layer, at a randomly drawn width.

Paper: Horvath et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered
Dropout", NeurIPS 2021, https://arxiv.org/abs/2102.13451 (Algorithm 1).

Symbols: $K$ the width of an axis in the widest network, $P$ the widths of the population, $p_max$ a client's width, $x$
the global parameters, $z_p$ the logits of the subnetwork of width $p$, $y$ the labels, $n_k$ a client's number of
samples.

    $S_p$         positions $0 ... ceil(p K) - 1$ of every axis; classes and image channels whole (section 3.1)
    $L_p$         $= CE(z_p, y)$ (sections 3.2, 4), or with `distill` (Eq. 1), the first distribution held constant:
                $CE(z_(p_max), y) + (1 - alpha) CE(z_p, y) + alpha KL(softmax(z_(p_max)/T) || softmax(z_p/T))$
    $y_k$         SGD from $S_(p_max) x$; each step draws $p$ uniformly from ${s in P: s <= p_max}$ and descends on
                $L_p$
    $x$           $<- (sum_k n_k S_(p_max)^T y_k)/(sum_k n_k S_(p_max)^T 1)$, elsewhere unchanged: Eq. 2 in one formula

Cost per round: the client's widest network and the statistics of its widths down and up; one pass per step at the drawn
width, with `distill` a second one; one sum on the server.

A client counts as a holder of all widths up to its own, including those that it never drew. The norms' running
statistics of a width are also averaged over these clients, weighted by $n_k$.

Departures:
1. A step updates all parameters of a client, with zero gradients outside the drawn width: weight decay and momentum
   act there too, as in the authors' Flower baseline; the paper updates only the subnetwork's weights.
2. Eq. 1 has the student first in its KL; here the target is the teacher, as in the baseline, whose cross-entropy with
   the teacher's softmax has the same gradient. No factor T^2 compensates for the temperature.
3. If p = p_max is drawn, teacher and student are one: no second pass, no distillation gradient, and one update of the
   running statistics; the baseline repeats the pass.
4. `train_loss` is CE(z_p, y) at the drawn widths, also with distillation.
5. Clients receive the p_max network and the statistics up to p_max; the baseline sends everything to all clients. Its
   loaders restart from the same seed in every round; here batches differ between rounds.
6. Capacities of equal width are one element of P. The paper's U_k are k equal capacities of the population.
7. If the server is wider than every client, no client trains its width, whose statistics stay at mean 0 and variance 1:
   use `norms: static` there.
8. `sample: round` is not in the paper but in SpaFL's comparison with FjORD. A client draws p uniformly once per round,
   and receives, trains and sends only the parameters and statistics of that width.
"""

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import nn

from rayfl import costs
from rayfl.core.fold import State, Update
from rayfl.core.joined import call, parameters_of
from rayfl.core.net import Net, cached_module, params_of
from rayfl.core.norms import tracked
from rayfl.core.seeds import numpy_generator
from rayfl.core.submodel import Selection, Slice, prefix
from rayfl.core.tensors import Params, copied
from rayfl.methods.base import Client, Payload, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.training.settings import Logits, Loss, divergence, every_exit


class FjORD(Dense):
    contract: ClassVar = Contract(plain={"norms": "static"})

    name: Literal["fjord"] = "fjord"
    weight: Literal["samples", "uniform"] = "samples"
    sample: Literal["step", "round"] = "step"
    """Sampling of widths: at every local step, or once per round (as in SpaFL's comparison), in which case a client
    receives, trains and sends only the network of that width."""
    norms: Literal["per_width", "per_width_affine", "static"] = "per_width"
    """Batch norms. per_width: every width has its own running statistics, as in torch, and a prefix of the shared
    weight and bias. per_width_affine: also its own weight and bias (as in NeFL's comparison); those in `params` are
    never trained. static: statistics are collected before an evaluation, as in HeteroFL."""
    distill: bool = False
    """Self-distillation: a client's widest network teaches the drawn one, which needs a second pass per step."""
    alpha: float = Field(default=1.0, ge=0, le=1)
    """With `distill`: weight of the teacher in the loss of the drawn width; the labels have 1 - alpha."""
    temperature: float = Field(default=1.0, gt=0)
    """With `distill`: T, which divides the logits in the divergence."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.scaler and self.norms != "static":
            raise ValueError(
                "scaler: false with norms that keep running statistics, because the Scaler divides the activations"
            )
        if self.distill and self.sample == "round":
            raise ValueError("distill: true only with sample: step, because a client's widest network is the teacher")
        if not self.distill and (self.alpha, self.temperature) != (1, 1):
            raise ValueError("alpha and temperature only with distill: true")
        return self

    def init(self) -> State:
        params = self.task.initial()
        own = {self.own(net): self._start(net, params) for net in self.nets_within(self.task.server)}
        return {"params": params} | {group: tensors for group, tensors in own.items() if tensors}

    def own(self, net: Net) -> str:
        return f"width {net.width:g}"

    def select(self, state: State, client: Client) -> Selection:
        if self.sample == "step":
            return self.prefix(client.capacity)
        nets = self.nets_within(self.net_at(client.capacity))
        drawn = int(numpy_generator(self.task.seed, "width", client.round, client.id).integers(len(nets)))
        return prefix(self.task.server, nets[drawn])

    def extract(self, state: State, selection: Selection) -> Payload:
        groups = {name: state[name] for net in self._trained(selection.net) if (name := self.own(net)) in state}
        return super().extract(state, selection) | groups

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        device, nets = visit.data.device, self._trained(visit.net)
        whole = self.module(visit, payload["params"] | payload.get(self.own(visit.net), {}))
        sent = {net: payload.get(self.own(net), {}) for net in nets}
        own = {net: {name: t.to(device, copy=True) for name, t in tensors.items()} for net, tensors in sent.items()}
        drawn = self.draws(len(nets), self.task.training.batches_of(len(visit.data)), visit.seed)
        runs = [[nets[i] for i in sorted({0, i} if self.distill else {i})] for i in drawn]
        ordered = _Ordered(whole, {net: prefix(visit.net, net) for net in nets}, own, runs, device)
        metrics = self.fit(ordered, visit, adjust=_zeros)
        metrics["train_flops"] = sum(costs.training_flops(net, samples) for net, samples in ordered.samples.items())
        update = self.answer(params_of(whole), {"params": payload["params"]}, visit, metrics)
        update.whole = {self.own(net): copied(ordered.own(net), update.weight) for net, sent in own.items() if sent}
        return update

    def expected_flops(self, capacity: float) -> float | None:
        nets = self.nets_within(self.net_at(capacity))
        steps = [{nets[0], net} if self.distill else {net} for net in nets]
        return sum(costs.training_flops(net, 1) for step in steps for net in step) / len(steps)

    def draws(self, widths: int, steps: int, seed: int) -> list[int]:
        """Return the index of the width, 0 for the largest, that each step of a client trains."""
        return numpy_generator(seed, "width").integers(widths, size=steps).tolist()

    @property
    def needs_classes(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "its widths compare class probabilities" if self.distill else ""

    def loss(self, visit: Visit) -> Loss:
        """Return the client's loss. With `distill` it takes the logits [B, ..., C] of teacher and student, or of the
        one network that is both. Absent classes are masked in the cross-entropies only."""
        plain, rows = super().loss(visit), visit.data.goal.rows

        def distilling(logits: Logits, y: torch.Tensor) -> torch.Tensor:
            teacher, student = every_exit(logits)[0], every_exit(logits)[-1]
            labels = plain(student, y)
            objective = plain(teacher, y) + (1 - self.alpha) * labels
            if teacher is not student:
                (target, _), (output, _) = rows(teacher.detach(), y), rows(student, y)
                objective = objective + self.alpha * divergence(target, output, self.temperature)
            # value of the student's cross-entropy, gradient of the objective
            return labels.detach() + (objective - objective.detach())

        return distilling if self.distill else plain

    def _trained(self, net: Net) -> list[Net]:
        """Return the networks, largest first, that the steps of a client with this network choose from."""
        return self.nets_within(net) if self.sample == "step" else [net]

    def _start(self, net: Net, params: Params) -> Params:
        """Return the initial tensors of a width: statistics of its norms, and their parameters if per_width_affine."""
        if self.norms == "static":
            return {}
        cut, own = prefix(self.task.server, net).take(params), net.statistics()
        if self.norms == "per_width_affine":
            affine = (f"{path}.{part}" for path in net.norms for part in ("weight", "bias"))
            # those of a frozen base are no parameters
            own |= {name: cut[name].clone() for name in affine if name in cut}
        return own


class _Ordered(nn.Module):
    """A client's network, of which every step runs one or two widths."""

    def __init__(
        self,
        whole: nn.Module,
        cuts: Mapping[Net, Slice],
        own: Mapping[Net, Params],
        runs: Iterable[list[Net]],
        device: torch.device,
    ):
        """`cuts`: parameters of `whole` that a width uses; `own`: its initial own tensors; `runs`: widths per step."""
        super().__init__()
        self.whole, self.cuts, self.tensors, self.runs = whole, cuts, own, iter(runs)
        self.affine = {
            net: {name: nn.Parameter(t) for name, t in tensors.items() if name in net.layout.shapes}
            for net, tensors in own.items()
        }
        self.trained = nn.ParameterList(p for affine in self.affine.values() for p in affine.values())
        self.narrow = {net: cached_module(net, device).train() for net in cuts}
        self.samples = dict.fromkeys(cuts, 0)

    def own(self, net: Net) -> Params:
        """Return the current own tensors of a width."""
        return self.tensors[net] | {name: p.detach() for name, p in self.affine[net].items()}

    def forward(self, x: torch.Tensor) -> Logits:
        params: Params = dict(parameters_of(self.whole))
        logits = [self._logits(net, params, x) for net in next(self.runs)]
        return tuple(logits) if len(logits) > 1 else logits[0]

    def _logits(self, net: Net, params: Params, x: torch.Tensor) -> torch.Tensor:
        self.samples[net] += len(x)
        with tracked(self.narrow[net], self.tensors[net]):
            return call(self.narrow[net], self.cuts[net].take(params) | self.affine[net], x)


def _zeros(module: nn.Module) -> None:
    """Set missing gradients (norms of other widths) to 0: fused SGD fails if only some parameters have momentum."""
    for parameter in module.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
