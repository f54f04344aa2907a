"""NeFL: submodels cut in width and depth, which keep their norms and step sizes for themselves.

Paper: Kang, Cha, Shin, Lee, Kang, "NeFL: Nested Model Scaling for Federated Learning with System Heterogeneous
Clients", IEEE Transactions on Mobile Computing 2025, https://arxiv.org/abs/2308.07761.

Symbols: K the width of an axis in the widest network, r_k the channel ratio of submodel k, F_j the residual branch of
block j, s_j its step size, M_k the participants of a round that trained submodel k, c the consistent parameters
(convolutions, linear layers, embeddings), ic_k the inconsistent ones of submodel k (its batch norms and its s_j).

    S_k            positions 0 .. ceil(r_k K) - 1 of every axis, of the blocks that submodel k has; of a block that
                   it omits the skip is left, with its projection
    block j        x <- skip(x) + s_j F_j(x), before the ReLU of a post-activation block (section IV-A)
    y_k            SGD from (S_k c, ic_k) on cross-entropy; s_j and the norms are trained with the rest (Algorithm 1)
    c    <-  sum over k of sum over M_k of S_k^T y_k / sum_k |M_k| S_k^T 1, elsewhere unchanged: NeFedAvg
    ic_k <-  mean over M_k, unchanged if nobody trained submodel k (Algorithm 2)

W cuts widths only, D depths only, WD both; all with s_j = 1 at first. DO is D with `skipping_steps`: s_j starts at
1 + the number of blocks that are omitted right after block j, as a solver of differential equations would step over
them. N/L is `learn_steps: false`. W (N/L) is what the paper calls FjORD.

    >>> from rayfl.methods.nefl import initial_steps
    >>> initial_steps((("1.0", "1.1"), ("2.0", "2.1"), ("3.0", "3.1")), without=("1.1", "2.0", "2.1"))
    {'1.0': 4, '3.0': 1, '3.1': 1}

Departures:
1. Coordinates that nobody trained in a round keep their values. The authors' code sets blocks to zero that no
   participant has; that of the largest submodel alone has none in 18 % of their rounds.
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

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import nn

from rayfl.axes import Net, on_meta
from rayfl.methods.base import Payload, Update
from rayfl.methods.nested import NestedMethod, Variant
from rayfl.models.base import resident
from rayfl.models.layers import Step
from rayfl.norms import StaticBatchNorm
from rayfl.submodel import Selection, prefix
from rayfl.tensors import Params
from rayfl.training import ClientData

FRESH = {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1}
"""The tensors of a norm, before training."""


class NeFL(NestedMethod):
    name: Literal["nefl"] = "nefl"
    variant: Variant = "W"
    """What is cut: width, depth or both; a list of `submodels` says it itself."""
    learn_steps: bool = True
    """Whether the step sizes are trained."""
    skipping_steps: bool = False
    """Whether step sizes start with those of the omitted blocks after them; at 1 otherwise."""
    norms: Literal["own", "static"] = "own"
    """Batch norms. own: every submodel has weight, bias and running statistics, and `evaluation.statistics` has no
    effect. static: a prefix of shared weights and
    biases, with statistics that are collected before an evaluation, as for HeteroFL."""
    layer_norms: Literal["shared", "own"] = "shared"
    """LayerNorm and GroupNorm: consistent as in the paper, or of every submodel as in its code."""
    norms_init: Literal["sliced", "fresh"] = "sliced"
    """How norms of its own start. sliced: as the model's, a prefix, with its running statistics if it is pre-trained.
    fresh: weight 1, bias 0, mean 0, variance 1, as in the authors' last code."""
    projections: Literal["held", "with_block"] = "held"
    """Whether the projection of an omitted block counts in the average."""

    @model_validator(mode="after")
    def _norms_of_its_own(self) -> Self:
        if (self.norms, self.layer_norms, self.norms_init) == ("static", "shared", "fresh"):
            raise ValueError("norms_init: sliced where no norm is a submodel's own")
        return self

    @property
    def tracks(self) -> bool:
        return self.norms == "own"

    @property
    def variants(self) -> tuple[str, ...]:
        return (self.variant,)

    @property
    def has_steps(self) -> bool:
        return self.learn_steps or self.skipping_steps

    def group(self, net: Net) -> str:
        """ "submodel 1" is the smallest."""
        nets = self.nets
        return f"submodel {len(nets) - nets.index(net)}"

    def groups(self, params: Params, statistics: Params) -> dict[str, Params]:
        return {self.group(net): own for net in self.nets if (own := self._own(params | statistics, net))}

    def _own(self, whole: Params, net: Net) -> Params:
        """The inconsistent parameters of a submodel at first, and the statistics of its norms."""
        model, task = self.task.model, self.task
        cut = prefix(task.layout(task.server), task.layout(net), net)
        steps = initial_steps(model.blocks, net.without if self.skipping_steps else ())
        own: Params = {}
        for path, module in on_meta(model.build, net).named_modules():
            if isinstance(module, Step):
                [step] = [step for block, step in steps.items() if path.startswith(f"{block}.")]
                own[f"{path}.scale"] = torch.tensor(float(step))
            elif self._keeps(module):
                weight = f"{path}.weight"
                for kind, value in FRESH.items():
                    if (name := f"{path}.{kind}") in whole:
                        # a norm has its weight's axis in all its tensors
                        [tensor] = cut.take({weight: whole[name]}).values()
                        own[name] = tensor.clone() if self.norms_init == "sliced" else torch.full_like(tensor, value)
        return own

    def _keeps(self, module: nn.Module) -> bool:
        """Whether every submodel has this norm for itself."""
        if isinstance(module, StaticBatchNorm):
            return self.norms == "own"
        return isinstance(module, nn.LayerNorm | nn.GroupNorm) and self.layer_norms == "own"

    def trained(
        self,
        payload: Payload,
        selection: Selection,
        data: ClientData,
        round: int,
        seed: int,
        adjust: Callable[[nn.Module], None] | None = None,
    ) -> Update:
        net = resident(self.task.model, selection.net, data.device)
        fixed = [] if self.learn_steps else [m.scale for m in net.modules() if isinstance(m, Step)]
        with frozen(fixed):
            update = super().trained(payload, selection, data, round, seed, adjust)
        if self.projections == "with_block":
            omitted = tuple(f"{block}.projection." for block in selection.net.without)
            params = update.sums["params"]
            update.sums["params"] = {name: t for name, t in params.items() if not name.startswith(omitted)}
        return update


def initial_steps(blocks: Iterable[Iterable[str]], without: Collection[str]) -> dict[str, int]:
    """1 + the number of blocks that are left out right after a block, across stages, for every block that is kept."""
    steps: dict[str, int] = {}
    for block in itertools.chain(*blocks):
        if block not in without:
            steps[block] = 1
        elif steps:
            steps[next(reversed(steps))] += 1
    return steps


@contextlib.contextmanager
def frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, these are not trained: the network is shared."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
