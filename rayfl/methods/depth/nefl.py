"""NeFL: submodels cut in width and depth, with their own norms and step sizes.

Paper: Kang, Cha, Shin, Lee, Kang, "NeFL: Nested Model Scaling for Federated Learning with System Heterogeneous
Clients", IEEE Transactions on Mobile Computing 2025, https://arxiv.org/abs/2308.07761.

Symbols: $K$ the width of an axis in the widest network, $r_k$ the channel ratio of submodel $k$, $F_j$ the residual
branch of block $j$, $s_j$ its step size, $M_k$ the participants of a round that trained submodel $k$, $c$ the
consistent parameters (convolutions, linear layers, embeddings), $ic_k$ the inconsistent ones of submodel $k$ (its batch
norms and its $s_j$).

    $S_k$         positions $0 ... ceil(r_k K) - 1$ of every axis, in the blocks of submodel $k$; the skip of an omitted
                block stays, with its projection
    block $j$     $x <- skip(x) + s_j F_j(x)$, before the ReLU of a post-activation block (section IV-A)
    $c_i, ic_i$   for $i in M_k$: SGD from $(S_k c, ic_k)$ on cross-entropy; $s_j$ and the norms are trained with the
                rest (Algorithm 1)
    $c$           $<- (sum_k sum_(i in M_k) S_k^T c_i)/(sum_k |M_k| S_k^T 1)$, elsewhere unchanged: NeFedAvg
    $ic_k$        $<- 1/|M_k| sum_(i in M_k) ic_i$, unchanged if $M_k$ is empty (Algorithm 2)

Cost per round: the client's submodel with its norms, statistics and step sizes down and up, its training, one sum on
the server.

W cuts only widths, D only depths, WD both; all start from $s_j = 1$. DO is D with `skipping_steps`: $s_j$ starts at 1 +
the number of omitted blocks right after block $j$, like a larger step of a differential equation solver. N/L is
`learn_steps: false`. The paper calls W (N/L) FjORD.

    >>> from rayfl.methods.depth.nefl import initial_steps
    >>> initial_steps((("1.0", "1.1"), ("2.0", "2.1"), ("3.0", "3.1")), without=("1.1", "2.0", "2.1"))
    {'1.0': 4, '3.0': 1, '3.1': 1}

A submodel's batch norms have running statistics, as in torch: `evaluation.statistics` is ignored.

Departures:
1. Coordinates without a holder in a round are unchanged. The authors' code sets blocks that no participant has to
   zero; in 18 % of their rounds no client trains the largest submodel.
2. The printed pseudocode adds a client only to its own band of channels, and cuts at the parameter ratio instead of its
   root; here as in the text, its example and the code.
3. The submodel trains the projection of an omitted block, and counts as its holder; the code counts the projection with
   the block (`projections: with_block`).
4. The momentum of running statistics is constant: batches are not counted.
5. A transformer block has one step size for the attention and one for the MLP, which start equal under
   `skipping_steps`.
6. `submodels: auto` is ours; the paper chooses by hand (`submodels: published`).
7. Optimizer momentum is reset in every round; the code for ViT and Wide ResNet keeps each client's.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import ClassVar, Literal

import torch
from torch import nn

from rayfl.core.fold import State, Update
from rayfl.core.net import Net, cached_module
from rayfl.core.norms import StaticBatchNorm
from rayfl.core.submodel import prefix
from rayfl.core.tensors import Params
from rayfl.methods.base import Payload, Task, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.methods.sizes import Submodels, Variant, nested
from rayfl.models.layers import Step

FRESH = {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1}
"""Initial values of the tensors of a norm."""


class NeFL(Dense):
    contract: ClassVar = Contract(plain={"learn_steps": False}, fedavg={"learn_steps": False})

    name: Literal["nefl"] = "nefl"
    scaler: Literal[False] = False
    """Not supported: the Scaler divides activations, and norms keep running statistics of them."""
    submodels: Submodels = "auto"
    """Submodels of all capacities. auto: cut to their cost by `clients.metric`. published: those of the paper, in the
    order of the capacities. Or a list of {capacity, width, blocks}."""
    variant: Variant = "W"
    """Cut of the submodels: width, depth or both. Ignored for a list of `submodels`."""
    learn_steps: bool = True
    """Train the step sizes."""
    skipping_steps: bool = False
    """Start step sizes at 1 + the number of omitted blocks after their own. Default: start at 1."""
    layer_norms: Literal["shared", "own"] = "shared"
    """LayerNorm and GroupNorm: shared as in the paper, or one per submodel as in its code."""
    norms_init: Literal["sliced", "fresh"] = "sliced"
    """Initial values of a submodel's norms. sliced: a prefix of the model's, including running statistics if it is
    pre-trained. fresh: weight 1, bias 0, mean 0, variance 1, as in the authors' latest code."""
    projections: Literal["held", "with_block"] = "held"
    """Projection of an omitted block: averaged, or left out of the average like its block."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return nested(task, self.submodels, (self.variant,), steps=self.learn_steps or self.skipping_steps)

    @property
    def nets(self) -> list[Net]:
        """Distinct networks, largest capacity first."""
        return list(dict.fromkeys(self.task.nets.values()))

    def own(self, net: Net) -> str:
        """Return the group of a submodel; "submodel 1" is the smallest."""
        return f"submodel {len(self.nets) - self.nets.index(net)}"

    def init(self) -> State:
        params = self.task.initial()
        whole = params | self.task.server.statistics()
        groups = {self.own(net): own for net in self.nets if (own := self._inconsistent(whole, net))}
        inconsistent = {name for own in groups.values() for name in own}
        return {"params": {name: t for name, t in params.items() if name not in inconsistent}} | groups

    def _inconsistent(self, whole: Params, net: Net) -> Params:
        """Return the initial inconsistent parameters of a submodel, with the statistics of its norms. `whole`: the
        server's parameters and statistics."""
        cut = prefix(self.task.server, net).take(whole)
        steps = initial_steps(net.model.blocks, net.without if self.skipping_steps else ())
        norms = (StaticBatchNorm, nn.LayerNorm, nn.GroupNorm) if self.layer_norms == "own" else StaticBatchNorm
        own: Params = {}
        for path, module in net.blank().named_modules():
            if isinstance(module, Step):
                [step] = [step for block, step in steps.items() if path.startswith(f"{block}.")]
                own[f"{path}.scale"] = torch.tensor(float(step))
            elif isinstance(module, norms):
                for kind, value in FRESH.items():
                    if (name := f"{path}.{kind}") in cut:
                        start = cut[name]
                        own[name] = start.clone() if self.norms_init == "sliced" else torch.full_like(start, value)
        return own

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        module = cached_module(visit.net, visit.data.device)
        steps = nn.ModuleList(m for m in module.modules() if isinstance(m, Step))
        steps.requires_grad_(self.learn_steps)
        try:
            return self.trained(payload, visit)
        finally:
            # the cached module is shared
            steps.requires_grad_(True)

    def withheld(self, net: Net) -> frozenset[str]:
        omitted = tuple(f"{block}.projection." for block in net.without)
        names = net.full_layout.dims if self.projections == "with_block" else ()
        return frozenset(name for name in names if name.startswith(omitted))


def initial_steps(blocks: Iterable[Iterable[str]], without: Collection[str]) -> dict[str, int]:
    """Return kept block -> 1 + the number of omitted blocks right after it, across stages."""
    steps: dict[str, int] = {}
    for block in itertools.chain(*blocks):
        if block not in without:
            steps[block] = 1
        elif steps:
            steps[next(reversed(steps))] += 1
    return steps
