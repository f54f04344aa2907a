"""NeFL: submodels cut in width and depth, which keep their norms and step sizes for themselves.

Paper: Kang, Cha, Shin, Lee, Kang, "NeFL: Nested Model Scaling for Federated Learning with System Heterogeneous
Clients", IEEE Transactions on Mobile Computing 2025, https://arxiv.org/abs/2308.07761.

Symbols: K the width of an axis in the widest network, r_k the channel ratio of submodel k, F_j the residual branch of
block j, s_j its step size, M_k the participants of a round that trained submodel k, c the consistent parameters
(convolutions, linear layers, embeddings), ic_k the inconsistent ones of submodel k (its batch norms and its s_j).

    S_k            positions 0 .. ceil(r_k K) - 1 of every axis, of the blocks that submodel k has; an omitted block
                   leaves its skip, with its projection
    block j        x <- skip(x) + s_j F_j(x), before the ReLU of a post-activation block (section IV-A)
    y_k            SGD from (S_k c, ic_k) on cross-entropy; s_j and the norms are trained with the rest (Algorithm 1)
    c    <-  sum over k of sum over M_k of S_k^T y_k / sum_k |M_k| S_k^T 1, elsewhere unchanged: NeFedAvg
    ic_k <-  mean over M_k, unchanged if nobody trained submodel k (Algorithm 2)

W cuts widths only, D depths only, WD both; all start from s_j = 1. DO is D with `skipping_steps`: s_j starts at
1 + the number of omitted blocks right after block j, because a solver of differential equations would step over
them. N/L is `learn_steps: false`. The paper calls W (N/L) FjORD.

    >>> from rayfl.methods.depth.nefl import initial_steps
    >>> initial_steps((("1.0", "1.1"), ("2.0", "2.1"), ("3.0", "3.1")), without=("1.1", "2.0", "2.1"))
    {'1.0': 4, '3.0': 1, '3.1': 1}

A submodel's batch norms have running statistics, as torch keeps them: `evaluation.statistics` has no effect.

Departures:
1. Coordinates that nobody trained in a round keep their values. The authors' code sets blocks to zero that no
   participant has; in 18 % of their rounds nobody trains the largest submodel.
2. The printed pseudocode adds a client to its own band of channels only, and cuts at the parameter ratio in place of
   its root; here as in the text, its example and the code.
3. The projection of an omitted block is trained by the submodel and counts as held; the code counts it with the
   block (`projections: with_block`).
4. Running statistics count no batches: their momentum is constant.
5. A transformer's block has a step size for the attention and one for the MLP, which start equal under
   `skipping_steps`.
6. `submodels: auto` is ours; the paper chooses by hand (`submodels: published`).
7. Momentum dies with the round; the code for ViT and Wide ResNet carries each client's over.
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
"""The tensors of a norm before training."""


class NeFL(Dense):
    contract: ClassVar = Contract(plain={"learn_steps": False}, fedavg={"learn_steps": False})

    name: Literal["nefl"] = "nefl"
    scaler: Literal[False] = False
    """No Scaler: the norms' running statistics would be those of divided activations."""
    submodels: Submodels = "auto"
    """The network of every capacity: cut to what it costs by `clients.metric`; those of the paper, in the order of the
    capacities; or a list of {capacity, width, blocks}."""
    variant: Variant = "W"
    """What is cut: width, depth or both. A list of `submodels` says it itself."""
    learn_steps: bool = True
    """Whether the step sizes are trained."""
    skipping_steps: bool = False
    """Whether a step size starts with those of the omitted blocks after its own; at 1 otherwise."""
    layer_norms: Literal["shared", "own"] = "shared"
    """LayerNorm and GroupNorm: consistent as in the paper, or of every submodel as in its code."""
    norms_init: Literal["sliced", "fresh"] = "sliced"
    """How a submodel's own norms start. sliced: as the model's, a prefix, with its running statistics if it is
    pre-trained. fresh: weight 1, bias 0, mean 0, variance 1, as in the authors' last code."""
    projections: Literal["held", "with_block"] = "held"
    """Whether the projection of an omitted block counts in the average."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return nested(task, self.submodels, (self.variant,), steps=self.learn_steps or self.skipping_steps)

    @property
    def nets(self) -> list[Net]:
        """Its networks, each once, largest capacity first."""
        return list(dict.fromkeys(self.task.nets.values()))

    def own(self, net: Net) -> str:
        """ "submodel 1" is the smallest."""
        return f"submodel {len(self.nets) - self.nets.index(net)}"

    def init(self) -> State:
        params = self.task.initial()
        whole = params | self.task.server.statistics()
        groups = {self.own(net): own for net in self.nets if (own := self._inconsistent(whole, net))}
        inconsistent = {name for own in groups.values() for name in own}
        return {"params": {name: t for name, t in params.items() if name not in inconsistent}} | groups

    def _inconsistent(self, whole: Params, net: Net) -> Params:
        """The inconsistent parameters of a submodel at first, with the statistics of its norms; `whole`: the server's
        parameters and statistics."""
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
            update = self.trained(payload, visit)
        finally:
            # the module is shared
            steps.requires_grad_(True)
        if self.projections == "with_block":
            omitted = tuple(f"{block}.projection." for block in visit.net.without)
            params = update.sums["params"]
            update.sums["params"] = {name: t for name, t in params.items() if not name.startswith(omitted)}
        return update


def initial_steps(blocks: Iterable[Iterable[str]], without: Collection[str]) -> dict[str, int]:
    """Kept block -> 1 + the number of omitted blocks right after it, across stages."""
    steps: dict[str, int] = {}
    for block in itertools.chain(*blocks):
        if block not in without:
            steps[block] = 1
        elif steps:
            steps[next(reversed(steps))] += 1
    return steps
