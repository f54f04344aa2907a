"""InclusiveFL: networks of the first blocks, each with its own last block and classifier, and momentum distillation.

Paper: Liu, Wu, Wu, Wang, Lyu, Chen, Xie, "No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices",
KDD 2022, https://arxiv.org/abs/2202.08036. Read: the abstract, and the authors' code
(https://github.com/Rachelxuan11/InclusiveFL: `run_fl.py`, `server.py`), which the equations follow.

Symbols: sizes $k = 1 ... K$ of the networks, smallest first, $b_k$ the last block of size $k$, $x$ the shared
parameters, $o_k$ those of size $k$ only: its block $b_k$ and its classifier. $n_i$ the samples of client $i$, $M_k$ the
clients of size $k$ in a round.

    $S_k$         the first blocks, at full width, and all layers outside blocks
    $y_i$         for $i in M_k$: SGD from $(S_k x, o_k)$ on cross-entropy
    $x$           $<- (sum_i n_i S_k^T y_i)/(sum_i n_i S_k^T 1)$ over all clients, $o_k$ apart (`HeteAgg_mom`);
                elsewhere unchanged
    $d_k$         mean over $M_k$, by $n_i$, of the change $y_i - (S_k x, o_k)$ in block $b_k$
    $m_k$         mean over $M_(k + 1)$, by $n_i$, and over the blocks $b_k ... b_(k + 1)$, of the change in such a
                block, of the last earlier round in which $M_(k + 1)$ was not empty (`grad_cache`, `layer_weight`); 0
                before
    $b_k$         $<- b_k + (1 - beta) d_k + beta m_k$ for $k < K$ (`load_grad_mem`); if $M_k$ is empty, unchanged
    others      $b_K$ and all classifiers: the mean of $y_i$ over $M_k$, by $n_i$

Cost per round: the client's network down and up, its training, one sum on the server. $d_k$ and $m_k$ follow from what
is sent.

Departures:
1. Changes y - x of local training stand for gradients. The code has clients that compute one gradient each, and an
   AdamW step per size of the server.
2. The code never distils: its condition `isinstance(..., int)` is true only before a first m_k exists, and m_k is
   overwritten by the last of the blocks instead of summed. Here m_k is the mean that `layer_weight` means.
3. Several stages (ResNets), which is ours: the blocks are NeFL's `auto`, b_k is the last block that size k has, and m_k
   averages over those blocks from b_k on that have a tensor of the same name and shape. A tensor without any is not
   distilled.
4. All sizes start from the same classifier.
5. `depthfl` with `exits_trained: last` shares the last block of a size, because its sizes are networks with exits.
6. Norms are static: statistics are collected before an evaluation. Transformers have none.
7. With `updates.transforms` m_k is the mean of the changes before the transforms, which clients do not send.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field

from rayfl.core.fold import Fold, State, Update
from rayfl.core.net import Net
from rayfl.core.submodel import prefix
from rayfl.core.tensors import Params
from rayfl.methods.base import Payload, Task, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.methods.sizes import nested


class InclusiveFL(Dense):
    contract: ClassVar = Contract(wants="blocks", clients={"metric": "params"})

    name: Literal["inclusivefl"] = "inclusivefl"
    scaler: Literal[False] = False
    """Not supported: all networks have full width."""
    weight: Literal["samples", "uniform"] = "samples"
    label_rows: Literal["all"] = "all"
    """Not supported: clients of different sizes share no classifier."""
    beta: float = Field(default=0.2, ge=0, le=1)
    """Weight of the larger networks' change in the last block of a smaller one. 0: no distillation."""

    @property
    def synchronous(self) -> str:
        return "changes are counted from the current version of the model. Hint: method.beta: 0" if self.beta else ""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return nested(task, "auto", ("D",))

    @property
    def nets(self) -> list[Net]:
        """Distinct networks, smallest first."""
        return list(dict.fromkeys(self.task.nets.values()))[::-1]

    def own(self, net: Net) -> str:
        return f"size {self.nets.index(net) + 1}"

    def init(self) -> State:
        params, nets = self.task.initial(), self.nets
        own, shared = {}, set()
        for net in nets:
            names = {*net.layout.classifier, *_block(net, _kept(net)[-1:])}
            cut = prefix(self.task.server, net).take(params)
            own[self.own(net)] = {name: t.clone() for name, t in cut.items() if name in names}
            shared |= cut.keys() - names
        momentum = {
            f"momentum {self.own(net)}": {name: torch.zeros_like(params[name]) for name in self._taught(net, larger)}
            for net, larger in zip(nets, nets[1:], strict=False)
            if self.beta
        }
        return {"params": {name: t for name, t in params.items() if name in shared}} | own | momentum

    def _taught(self, net: Net, larger: Net) -> dict[str, list[str]]:
        """Return parameter of b_k -> parameters of the next larger network whose changes it takes over."""
        taught = {}
        order = [path for stage in net.model.blocks for path in stage]
        for last in _kept(net)[-1:]:
            teachers = [path for path in _kept(larger) if order.index(path) >= order.index(last)]
            for name in _block(net, [last]):
                alike = [path + name.removeprefix(last) for path in teachers]
                shape, shapes = net.layout.shapes[name], larger.layout.shapes
                taught[name] = [other for other in alike if shapes.get(other) == shape]
        return {name: others for name, others in taught.items() if others}

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        update = self.trained(payload, visit)
        size = self.nets.index(visit.net)
        if self.beta and size:
            smaller = self.nets[size - 1]
            received: Params = {name: t for group in payload.values() for name, t in group.items()}
            answer: Params = {name: t for group in (update.sums | update.whole).values() for name, t in group.items()}
            update.derived[f"momentum {self.own(smaller)}"] = {
                name: torch.stack([answer[other] - update.weight * received[other] for other in others]).mean(0)
                for name, others in self._taught(smaller, visit.net).items()
            }
        return update

    def step(self, state: State, round: int, fold: Fold) -> State:
        new = {group: fold.mean(group) for group in state if not group.startswith("momentum ")}
        for group in state.keys() - new.keys():
            size = group.removeprefix("momentum ")
            if fold.weights(size):
                old, mean = state[size], new[size]
                new[size] = mean | {
                    name: old[name] + (1 - self.beta) * (mean[name] - old[name]) + self.beta * m
                    for name, m in state[group].items()
                }
        return new | {group: fold.mean_so_far(group) for group in state if group not in new}


def _kept(net: Net) -> list[str]:
    """Return the module paths of a network's blocks, in order."""
    return [path for stage in net.model.blocks for path in stage if path not in net.without]


def _block(net: Net, paths: list[str]) -> list[str]:
    """Return the parameters of these blocks."""
    return [name for name in net.layout.shapes if name.startswith(tuple(f"{path}." for path in paths))]
