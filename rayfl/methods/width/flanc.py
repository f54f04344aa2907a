"""FLANC: layers are composed of a basis that all widths share, and coefficients of each width.

Paper: Mei, Guo, Zhou, Patel, "Resource-Adaptive Federated Learning with All-In-One Neural Composition", NeurIPS 2022,
https://openreview.net/forum?id=wfel7CjOYk. Read: the abstract, and the authors' code
(https://github.com/HarukiYqM/All-In-One-Neural-Composition: `trainer_FL.py`, `model/agent_federation.py`,
`model/resnet18_flanc.py`, `model/cnn_flanc.py`), which the equations follow.

Symbols: $p$ a width, $I$ and $O$ the inputs and outputs of a layer at width 1, $k$ its kernel, $s$ = round($I$
`inputs`) and $n$ = round($O$ `basis`), at least 1, $v$ $[n, s, k, k]$ the layer's basis, $V$ the same as $[n, s k k]$,
$u_p$ its coefficients at width $p$, $g = ceil(p I/s)$ groups of inputs, $w_p$ all parameters of width $p$ outside
bases: coefficients, first layer, classifier, norms.

    $layer(x)$    $= u_p [v * x_1, ..., v * x_g]$: every group of $s$ inputs is convolved with the same $n$ filters, and
                a 1x1 convolution combines the $g n$ results to $p O$ outputs (`DecomBlock`)
    $L$           $= CE + l sum mean((V V^T - 1)^2)$, the sum over layers, the mean over $n n$ elements, $l$ =
                `orthogonality` (`orth_loss`)
    $y_k$         SGD from $(v, w_p)$ on $L$
    $v$           $<-$ the mean of $y_k$ over all clients of the round
    $w_p$         $<-$ the mean of $y_k$ over the clients of width $p$ (`sync`); without any, unchanged

Cost per round: $v$ and $w_p$ down and up, the client's training, one sum on the server. Every client trains all of $v$,
whatever its width.

Departures:
1. The code composes the convolutions of ResNet18's blocks and of one CNN. Here all convolutions of a kernel above 1 and
   all linear layers are, if their inputs and outputs can be cut; a linear layer is a convolution of one pixel.
2. If s does not divide the inputs of a width, the last group is padded with zeros; the code needs widths where it does.
3. Each basis starts orthogonal; the code draws the two of a block together.
4. In the code a client has another random width in every round (`clients.assignment: dynamic`), drawn again until every
   width occurs.
5. Capacities count the uncomposed network: with `params` or `flops`, its widths.
6. Norms are static: statistics are collected before an evaluation.
7. `train_loss` is the cross-entropy, without the orthogonality term. The code prints both, and their sum.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from rayfl.config import ConfigError
from rayfl.core.axes import Axis, conv, conv1d, declare, linear
from rayfl.core.fold import State, Update
from rayfl.core.net import Net, params_of
from rayfl.core.seeds import stream, torch_scope
from rayfl.core.tensors import Params
from rayfl.methods.base import Payload, Task, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.models.layers import sequential
from rayfl.models.mix import Wrapper


class FLANC(Dense):
    contract: ClassVar = Contract(fedavg=None)

    name: Literal["flanc"] = "flanc"
    scaler: Literal[False] = False
    """Not supported: the coefficients of a width are its own."""
    label_rows: Literal["all"] = "all"
    """Not supported: clients of different widths share no classifier."""
    basis: float = Field(default=0.25, gt=0, le=1)
    """Filters n of a basis, as a fraction of the layer's outputs at width 1."""
    inputs: float = Field(default=0.125, gt=0, le=1)
    """Inputs s of a filter, as a fraction of the layer's inputs at width 1."""
    orthogonality: float = Field(default=10.0, ge=0)
    """Weight l of the orthogonality of the bases."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        model = Composed(of=task.model, basis=self.basis, inputs=self.inputs)
        if not model.composed:
            raise ConfigError(
                f"model: {task.model.name} has no layer that method flanc can compose. Allowed: models with torch's "
                "convolutions or linear layers whose inputs and outputs can be cut"
            )
        return {c: replace(net, model=model) for c, net in task.nets.items()}

    def own(self, net: Net) -> str:
        return f"width {net.width:g}"

    def init(self) -> State:
        params = self.task.initial()
        state: State = {"params": {name: t for name, t in params.items() if is_basis(name)}}
        for net in dict.fromkeys(self.task.nets.values()):
            with torch_scope(stream(self.task.seed, "init", self.own(net))):
                initial = params if net == self.task.server else net.initial()
            state[self.own(net)] = {name: t for name, t in initial.items() if not is_basis(name)}
        return state

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        return self.trained(payload, visit, adjust=self.straighten if self.orthogonality else None)

    @torch.no_grad()
    def straighten(self, module: nn.Module) -> None:
        """Add the gradient of l mean((V V^T - 1)^2), 4 l / n^2 (V V^T - 1) V, to that of every basis."""
        for name, v in module.named_parameters():
            if is_basis(name):
                rows, n = v.flatten(1), len(v)
                gap = rows @ rows.T - torch.eye(n, dtype=v.dtype, device=v.device)
                cast(torch.Tensor, v.grad).add_((gap @ rows).view_as(v), alpha=4 * self.orthogonality / n**2)


Layer = nn.Conv1d | nn.Conv2d | nn.Linear


def _is_composable(layer: nn.Conv1d | nn.Conv2d) -> bool:
    """Return whether `Basis` computes this convolution, and a kernel of more than one position is saved."""
    return max(layer.kernel_size) > 1 and max(layer.dilation) == 1 and layer.padding_mode == "zeros"


def is_basis(name: str) -> bool:
    return name.endswith(".basis.weight")


class Composed(Wrapper):
    """Networks of another model whose layers are composed: the layer at a path such as "conv2" becomes "conv2.basis",
    of one shape at all widths, and "conv2.coefficients", with the layer's bias."""

    basis: float
    """Filters of a basis, as a fraction of the outputs at width 1."""
    inputs: float
    """Inputs of a filter, as a fraction of the inputs at width 1."""

    @property
    def composed(self) -> list[str]:
        """Paths of the composed layers."""
        whole = Net(self.of)
        module, dims = whole.blank(), whole.layout.dims
        found = []
        for path in whole.layers:
            layer = module.get_submodule(path)
            kind = type(layer) is nn.Linear or (isinstance(layer, nn.Conv1d | nn.Conv2d) and _is_composable(layer))
            axes = dims.get(f"{path}.weight", (None, None))[:2]
            if kind and all(axis is not None and not axis.is_fixed for axis in axes):
                found.append(path)
        return found

    def build(self, net: Net) -> nn.Module:
        within, shapes = self._within(net), Net(self.of).layout.shapes
        module = within.build()
        for path in self.composed:
            if f"{path}.weight" not in within.layout.shapes:
                continue  # in an omitted block
            old = cast("Layer", module.get_submodule(path))
            full_out, full_in, *kernel = shapes[f"{path}.weight"]
            out = cast(Axis, within.layout.dims[f"{path}.weight"][0])
            n, s = max(1, round(full_out * self.basis)), max(1, round(full_in * self.inputs))
            basis = Basis(n, s, kernel, old)
            results = Axis.fixed(f"{path}.results", n * basis.groups)
            bias = old.bias is not None
            pointwise = {nn.Conv1d: conv1d, nn.Conv2d: conv}.get(type(old))
            layer = pointwise(results, out, 1, bias=bias) if pointwise else linear(results, out, bias=bias)
            nn.init.normal_(layer.weight, std=math.sqrt(2 / out.length))
            module.set_submodule(path, sequential(basis=basis, coefficients=layer))
        return module

    def initial(self, net: Net) -> Params:
        """Return the other model's parameters outside composed layers."""
        new = params_of(net.build())
        return new | {name: t for name, t in super().initial(net).items() if name in new}


class Basis(nn.Module):
    """n filters of s inputs, applied to every group of s inputs in turn: [B, C, H, W] -> [B, g n, H', W'],
    [B, C, T] -> [B, g n, T'], or [..., C] -> [..., g n], g = ceil(C / s)."""

    def __init__(self, n: int, s: int, kernel: list[int], layer: "Layer"):
        """`layer`: the layer that is composed, with its inputs, stride and padding; `kernel`: [] of a linear layer."""
        super().__init__()
        channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        self.groups, self.missing = -(-channels // s), -channels % s
        self.steps: Any = None if isinstance(layer, nn.Linear) else (layer.stride, layer.padding)
        self.weight = nn.Parameter(torch.empty(n, s, *kernel))
        nn.init.orthogonal_(self.weight)
        declare(self, weight=(Axis.fixed("filters", n), Axis.fixed("filter", s), *[None] * len(kernel)))

    def multiply_adds(self, y: torch.Tensor) -> int:
        """Return the multiply-adds of an output."""
        return y.numel() * self.weight[0].numel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.steps is None:
            return (F.pad(x, (0, self.missing)).unflatten(-1, (self.groups, -1)) @ self.weight.T).flatten(-2)
        space, (stride, padding) = self.weight.dim() - 2, self.steps
        weight = self.weight.repeat(self.groups, *[1] * (1 + space))
        padded = F.pad(x, (*[0, 0] * space, 0, self.missing)) if self.missing else x
        convolution = F.conv1d if space == 1 else F.conv2d
        return convolution(padded, weight, None, stride, padding, groups=self.groups)
