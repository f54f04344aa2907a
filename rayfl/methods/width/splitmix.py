"""SplitMix: narrow base networks side by side; clients train as many as they can hold, and devices use their mean.

Paper: Hong, Wang, Wang, Zhou, "Efficient Split-Mix Federated Learning for On-Demand and In-Situ Customization", ICLR
2022, https://arxiv.org/abs/2203.09747. Read: the abstract, and the authors' code
(https://github.com/illidanlab/SplitMix: `fed_splitmix.py`, `federated/`, `nets/slimmable_models.py`, `nets/models.py`),
which the equations follow.

Symbols: $K$ the number of base networks, each of width $1/K$, $x_1 ... x_K$ their parameters, $z_i$ their logits $[C]$,
$r_k$ a client's width, $n_k$ its number of samples.

    $A_k$         $floor(r_k K)$ base networks, at least one, drawn without replacement, anew for every client and round
                (`sample_bases`)
    $y_(k i)$     for $i in A_k$: SGD from $x_i$ on $CE(z_i, labels)$, all on the same batches (`train_slimmable`), with
                the Scaler, activations multiplied by $K$, while training
    $x_i$         $<- (sum_k n_k y_(k i))/(sum_k n_k)$ over the clients with $i in A_k$, otherwise unchanged
    device      of width $r$: it answers with the mean of $z_1 ... z_(floor(r K))$ (`EnsembleNet`)

Cost per round: the base networks of $A_k$ down and up, their training, one sum on the server. They have no connections,
so that all of them cost $1/K$ of the whole network.

The model is `Bases`: in training its networks return the logits of every base network, in evaluation their mean, so
that a device's network is one network.

Departures:
1. A capacity is a share of the base networks, by any `clients.metric`. Less than 1 / K gets one base network; the code
   refuses it.
2. The code draws a client's first base network from a permutation that all clients share, which balances them. Here all
   draws are independent, as in `fedra`.
3. The Scaler has the place of `scaler` in the other methods. The code divides the output of every layer but the
   classifier, before its norm too. As in the code, initial weights and biases of layers with a cut input are smaller by
   sqrt(1 / K).
4. With `--no_track_stat`, as in its README, the code evaluates with batch statistics (`evaluation.statistics: batch`),
   otherwise with running statistics; here `evaluation` decides. It masks absent
   classes, as `mask: zero`, only in its partition by classes, and those absent from the batch.
5. Base networks sorted by validation accuracy, adversarial training with two norms, and a temperature of the loss,
   all off by default in the code, are not supported.
6. `train_loss` is the sum over base networks; the code reports the mean.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.fold import State
from rayfl.core.net import Net
from rayfl.core.seeds import numpy_generator
from rayfl.core.submodel import Slice, prefix
from rayfl.core.tensors import Params
from rayfl.methods.base import Client, Task, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.methods.sizes import random_depth
from rayfl.models.mix import Wrapper
from rayfl.training.settings import Loss, over_exits


class SplitMix(Dense):
    contract: ClassVar = Contract(plain={"bases": 1}, fedavg=None)

    name: Literal["splitmix"] = "splitmix"
    scaler: bool = True
    weight: Literal["samples", "uniform"] = "samples"
    bases: int = Field(default=8, ge=1)
    """Number K of base networks."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        model = Bases(of=task.model, bases=self.bases)
        counts = {c: max(1, math.floor(c * self.bases + 1e-9)) for c in task.nets}
        scale = 1 / self.bases if self.scaler else 1.0
        return {c: Net(model, without=model.blocks[0][count:], scale=scale) for c, count in counts.items()}

    def check(self, rounds: int, clients: Population) -> None:
        if self.bases > 1 and not Net(self.task.model).layout.axes:
            raise ConfigError(
                f"model: {self.task.model.name} has nothing to cut, so each of the {self.bases} base networks of "
                f"method {self.name} is the whole one. Allowed: a model whose layers have axes to cut"
            )

    def net_at(self, capacity: float) -> Net:
        return self.task.nets[capacity]

    def select(self, state: State, client: Client) -> Slice:
        generator = numpy_generator(self.task.seed, "subset", client.round, client.id)
        return prefix(self.task.server, random_depth(self.net_at(client.capacity), self.task.server, generator))

    def loss(self, visit: Visit) -> Loss:
        return over_exits(super().loss(visit))


class Bases(Wrapper):
    """Networks of another model side by side, at "base1", "base2", ..., each `bases` times as narrow. `Net.without`
    omits some of them, as blocks."""

    bases: int
    """Number of base networks."""

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        return (tuple(f"base{i + 1}" for i in range(self.bases)),)

    @property
    def head_paths(self) -> tuple[str, ...]:
        return tuple(f"{base}.{path}" for base in self.blocks[0] for path in self.of.head_paths)

    def build(self, net: Net) -> nn.Module:
        return Mean({base: self._within(net).build() for base in self._present(net)})

    def initial(self, net: Net) -> Params:
        """Return the initial parameters of all base networks, drawn one after another."""
        within = self._within(net)
        layers = {name: names for names in within.layers.values() for name in names}

        def start(name: str, t: torch.Tensor) -> torch.Tensor:
            axis = next((axis for part in layers.get(name, ()) for axis in within.layout.dims[part][1:] if axis), None)
            return t if axis is None or axis.is_fixed else t * within.width**0.5

        return {f"{b}.{n}": start(n, t) for b in self._present(net) for n, t in within.initial().items()}

    def statistics(self, net: Net) -> Params:
        return {f"{b}.{n}": t for b in self._present(net) for n, t in self._within(net).statistics().items()}

    def parts(self, net: Net) -> Mapping[str, Any]:
        return {"bases": len(self._present(net))} | dict(super().parts(net))

    def _present(self, net: Net) -> list[str]:
        return [base for base in self.blocks[0] if base not in net.without]

    def _within(self, net: Net) -> Net:
        """Return one base network."""
        return replace(net, model=self.of, width=net.width / self.bases, without=())


class Mean(nn.Module):
    """Networks on one input: x [B, ...] -> their mean logits [B, ..., C]; in training the logits of each, a tuple."""

    def __init__(self, networks: Mapping[str, nn.Module]):
        super().__init__()
        for name, network in networks.items():
            self.add_module(name, network)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        logits = tuple(network(x) for network in self.children())
        return logits if self.training else torch.stack(logits).mean(0)
