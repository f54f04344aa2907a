"""SHeteroFL: HeteroFL with slimmable training: every local step trains all widths up to the client's own.

Paper: Hong, Wang, Wang, Zhou, "Efficient Split-Mix Federated Learning for On-Demand and In-Situ Customization", ICLR
2022, https://arxiv.org/abs/2203.09747, whose baseline it is. Read: the abstract, and the authors' code
(https://github.com/illidanlab/SplitMix: `fed_hfl.py`, `federated/`, `nets/slimmable_ops.py`), which the equations
follow.

Symbols: $K$ the width of an axis in the widest network, $P$ the widths of the population, $r_k$ a client's width, $x$
the global parameters, $z_p$ the logits of the subnetwork of width $p$, $n_k$ a client's number of samples.

    $S_p$         positions $0 ... ceil(p K) - 1$ of every axis (`_compute_channels`); $S_k$ that of $r_k$
    $L_k(y)$      $= sum_(p in P, p <= r_k) CE(z_p, labels)$: one gradient step on all widths (`train_slimmable`), with
                the Scaler, activations divided by $p$, while training and batch norms by the batch, whose affine
                parameters are shared
    $y_k$         SGD from $S_k x$ on $L_k$
    $x$           $<- (sum_k n_k S_k^T y_k)/(sum_k n_k S_k^T 1)$, elsewhere unchanged (`SlimmableModelAccumulator`)

Cost per round: the network of the client's width down and up, one pass per width and step, one sum on the server.

Departures:
1. With `--no_track_stat`, as in its README, the code evaluates with batch statistics (`evaluation.statistics: batch`),
   otherwise with running statistics; here `evaluation` decides.
2. The Scaler divides by client width / server width, which is p if the server has width 1, and its place is that of
   `scaler` in the other methods. The code divides the output of every layer but the classifier, before its norm too.
3. The code masks absent classes only in its partition by classes, as `mask: zero`, but those absent from the batch
   instead of the client's; the default here is its other setting, without a mask.
4. `train_loss` is L_k, the sum over widths; the code reports the mean over widths.
5. Capacities of equal width are one element of P. `loss_temp`, which is off by default in the code, is not supported.
6. `slimmable: false` is the code's `slimmable_train: false`, HeteroFL without label-aware rows.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import nn

from rayfl import costs
from rayfl.core.fold import Update
from rayfl.core.joined import call, parameters_of
from rayfl.core.net import Net, cached_module, params_of
from rayfl.core.submodel import Slice, prefix
from rayfl.core.tensors import Params
from rayfl.methods.base import Payload, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.training.settings import Logits, Loss, over_exits


class SHeteroFL(Dense):
    contract: ClassVar = Contract(plain={"slimmable": False}, fedavg={"slimmable": False})

    name: Literal["sheterofl"] = "sheterofl"
    scaler: bool = True
    weight: Literal["samples", "uniform"] = "samples"
    slimmable: bool = True
    """Train all widths up to the client's own in every step. False: only its own."""

    def loss(self, visit: Visit) -> Loss:
        return over_exits(super().loss(visit))

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        nets = self.nets_within(visit.net) if self.slimmable else [visit.net]
        if len(nets) == 1:
            return self.trained(payload, visit)
        whole = self.module(visit, payload["params"])
        metrics = self.fit(_Slimmable(whole, {net: prefix(visit.net, net) for net in nets}, visit.data.device), visit)
        metrics["train_flops"] = sum(costs.training_flops(net, int(metrics["train_samples"])) for net in nets)
        return self.answer(params_of(whole), payload, visit, metrics)


class _Slimmable(nn.Module):
    """A client's network, which returns the logits of several widths, largest first."""

    def __init__(self, whole: nn.Module, cuts: Mapping[Net, Slice], device: torch.device):
        """`cuts`: parameters of `whole` that a width uses."""
        super().__init__()
        self.whole, self.cuts = whole, cuts
        self.narrow = {net: cached_module(net, device).train() for net in cuts}

    def forward(self, x: torch.Tensor) -> Logits:
        params: Params = dict(parameters_of(self.whole))
        return tuple(call(self.narrow[net], cut.take(params), x) for net, cut in self.cuts.items())
