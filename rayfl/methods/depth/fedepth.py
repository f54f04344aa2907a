"""FeDepth: every client trains the whole network, one group of blocks after another, as large as its memory allows.

Paper: Zhang, Dai, Wang, Xing, Chen, Sun, "Memory-adaptive Depth-wise Heterogeneous Federated Learning",
https://arxiv.org/abs/2303.04887. Read: the abstract, and the authors' code (https://github.com/taokz/FeDepth:
`fed_depth.py`, `federated/learning*.py`, `models/preresnet_res_light*.py`), which the equations follow.

Symbols: $b_1 ... b_L$ the residual blocks, $c$ a client's capacity, $x$ the global parameters, $n_k$ its number of
samples, $S_k$ the blocks of its groups and all layers outside blocks, $KL(a, b) = KL(softmax(a) || softmax(b))$, $l$ =
`distill`.

    $G_1 ... G_m$   groups of successive blocks, as large as possible: the layers of a group and all after it, in the
                  network $N_j$, cost at most $c$ of the whole network; $G_1$ also has the layers before the blocks
    $N_j$           the network with the blocks of $G_1 ... G_j$; the skips of the omitted blocks connect $G_j$ with the
                  classifier (`link1`, `link2`)
    $y_k$           from $S_k x$, for $j = 1 ... m$: SGD on cross-entropy of $N_j$, on $G_j$ and all layers after it;
                  the layers before it are constant (`alter_flag`)
    partial       a block that costs more than $c$ alone is in no group, and the client leaves it out (`insufficient`);
                  if all do, it trains the network without blocks
    mutual        a client that trains the whole network at once also trains a network $z$ of its own, which never
                  leaves it: $y$ on $CE(y) + l KL(z, y)$, $z$ on $CE(z) + l KL(y, z)$, each with the other held constant
                  (`sufficient`)
    $x$             $<- (sum_k n_k S_k^T y_k)/(sum_k n_k S_k^T 1)$

Cost per round: the client's blocks and all layers outside blocks down and up; its training, one forward pass and part
of a backward pass per group and batch; one sum on the server. Devices run the whole network.

Departures:
1. Costs are those of `clients.metric`, params or flops; the paper measures memory, and its code lists the groups of
   one network by hand. Memory of activations follows FLOPs more than parameters.
2. The code connects G_j with the classifier by padding with zero channels, and by every second or fourth pixel. Here
   the skips of the omitted blocks do so, with their projections, which are trained too. A transformer needs neither.
3. In later groups the code of transformers trains the embedding too, which needs the backward pass of all blocks. Here
   only if the output layer is tied to it.
4. The code averages all blocks over all clients, also those that a client left out, with their old values. Its weights
   by memory (`resource_weight`), which are off by default, are not supported.
5. The code keeps the optimizer between groups. Here its state is reset, and all groups have the same batches.
6. In the code all rich clients of a process share one z, because loading it always fails. Here each has its own.
7. `steps`, `train_samples` and `train_loss` are those of the last group, as in the code; `train_flops` counts all: a
   forward pass of N_j, and a backward pass to the first layer of G_j. With `distill`, the loss is the sum for y and z,
   and `training.clip` bounds the gradient of both together.
8. Norms are static: statistics are collected before an evaluation.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import nn

from rayfl import costs
from rayfl.config import ConfigError
from rayfl.core.fold import ClientState, State, Update
from rayfl.core.joined import parameters_of
from rayfl.core.net import Net, load, params_of
from rayfl.core.seeds import stream, torch_scope
from rayfl.core.submodel import prefix
from rayfl.core.tensors import Params, copied
from rayfl.methods.base import Deployment, Payload, Task, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.methods.distillation.pairs import Both
from rayfl.metrics import label
from rayfl.training.settings import Loss, divergence
from rayfl.training.steps import at_rest


class FeDepth(Dense):
    contract: ClassVar = Contract(wants="blocks", clients={"metric": "params"}, plain={"sequential": False})

    name: Literal["fedepth"] = "fedepth"
    scaler: Literal[False] = False
    """Not supported: all networks have full width."""
    weight: Literal["samples", "uniform"] = "samples"
    sequential: bool = True
    """Train the groups one after another. False: all blocks of the client together, whatever this costs."""
    distill: float = Field(default=0.0, ge=0)
    """Weight l of mutual distillation, 1 in the code. 0: no second network."""

    @property
    def needs_classes(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "the networks of a client compare class probabilities" if self.distill else ""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        if task.metric == "width" and min(task.nets) < 1:
            raise ConfigError(
                "clients.metric: width is not valid. Allowed: params or flops, because groups are by cost"
            )
        server = task.nets[task.server_capacity]
        return {c: groups_of(server, c, task.metric)[-1].net for c in task.nets}

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        groups = groups_of(self.task.server, visit.client.capacity, self.task.metric)
        if self.distill and groups[0].net == self.task.server:
            return self._beside_a_peer(payload, visit)
        if not self.sequential or len(groups) == 1:
            return self.trained(payload, visit)
        trained: Params = dict(payload["params"])
        metrics, flops = {}, 0.0
        for group in groups:
            of_group = replace(visit, selection=prefix(visit.net, group.net))
            module = self.module(of_group, trained)
            with at_rest(p for name, p in parameters_of(module).items() if name not in group.trained):
                metrics = self.fit(module, of_group)
            trained |= copied(params_of(module))
            flops += costs.partial_flops(group.net, group.trained, int(metrics["train_samples"]))
        return self.answer(trained, payload, visit, metrics | {"train_flops": flops})

    def _beside_a_peer(self, payload: Payload, visit: Visit) -> Update:
        module, peer = self.module(visit, payload["params"]), self._peer(visit)
        metrics = self.fit(Both(peer, module), visit, loss=self.mutual(visit))
        metrics["train_flops"] = 2 * costs.training_flops(visit.net, int(metrics["train_samples"]))
        update = self.answer(params_of(module), payload, visit, metrics)
        update.client_states[visit.client.id] = {"peer": copied(params_of(peer))}
        return update

    def _peer(self, visit: Visit) -> nn.Module:
        """Return the client's own network z; before its first visit, newly drawn."""
        with torch_scope(stream(self.task.seed, "init", visit.client.id)):
            peer = visit.net.build().to(visit.data.device)
        if visit.client_state:
            load(peer, cast(Params, visit.client_state["peer"]))
        return peer

    def mutual(self, visit: Visit) -> Loss:
        """Return the loss of y and z: (their logits, [B, C] or [B, T, C] each, labels) -> the sum of both losses."""
        loss, goal = self.loss(visit), visit.data.goal

        def of_both(logits: tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
            y, z = logits
            a, b = (goal.rows(of, labels)[0] for of in logits)
            distilled = divergence(b.detach(), a, 1.0) + divergence(a.detach(), b, 1.0)
            return loss(y, labels) + loss(z, labels) + self.distill * distilled

        return of_both

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        """Return the whole network."""
        return super().deploy(state, round, self.task.server_capacity)


@dataclass(frozen=True)
class Group:
    """A group of blocks G_j."""

    net: Net
    """N_j."""
    trained: tuple[str, ...]
    """Parameters of the group and of all layers after it."""

    def cost(self, metric: costs.Metric) -> int:
        """Return the parameters, or the multiply-adds of one sample, of the trained layers."""
        if metric == "params":
            return sum(math.prod(self.net.layout.shapes[name]) for name in self.trained)
        paths = {name.rpartition(".")[0] for name in self.trained}
        return sum(n for path, n in self.net.layer_macs.items() if self.net.owners[path] in paths)


@functools.lru_cache(maxsize=256)
def groups_of(whole: Net, capacity: float, metric: costs.Metric) -> tuple[Group, ...]:
    """Return the groups of a client, in the order of training. Raise a ConfigError if there is none."""
    budget = capacity * costs.cost_of(metric)(Net(whole.model)) * (1 + 1e-9)
    everything = Group(whole, tuple(whole.layout.shapes))
    if everything.cost(metric) <= budget:
        return (everything,)
    groups: list[list[str]] = []
    for path in (path for stage in whole.model.blocks for path in stage):
        larger = [[*groups[:-1], [*groups[-1], path]]] if groups else []
        for tried in [*larger, [*groups, [path]]]:
            if _last(whole, tried).cost(metric) <= budget:
                groups = tried
                break
    found = [_last(whole, groups[: j + 1]) for j in range(len(groups))] or [_last(whole, [[]])]
    if found[0].cost(metric) > budget:
        raise ConfigError(
            f"clients.capacities: {label(capacity)} by {metric} is less than the cost of the layers of model "
            f"{whole.model.name} outside residual blocks. Allowed: larger capacities, of a model with residual blocks"
        )
    return tuple(found)


def _last(whole: Net, groups: list[list[str]]) -> Group:
    """Return the last of these groups."""
    present = {path for group in groups for path in group}
    net = replace(whole, without=tuple(p for stage in whole.model.blocks for p in stage if p not in present))
    names = tuple(net.layout.shapes)
    start = groups[-1][0] if len(groups) > 1 else ""
    first = next(i for i, name in enumerate(names) if not start or name.startswith(f"{start}."))
    layers = [*net.layer_macs]
    after = layers[next((i for i, path in enumerate(layers) if path.startswith(f"{start}.")), 0) :]
    tied = {f"{net.owners[path]}.weight" for path in after if net.owners[path] != path}
    return Group(net, tuple(name for i, name in enumerate(names) if i >= first or name in tied))
