"""FedKD: every client's network and a small common one teach each other; updates of the common one are compressed.

Paper: Wu et al., "Communication-efficient federated learning via knowledge distillation", Nature Communications 13,
2022, https://arxiv.org/abs/2108.13323 (its text was not read). The algorithm is that of the authors' code,
wuch15/FedKD, `run.py` and `model_bert.py`, for language models, and of TsingZ0/HtFLlib, `clientkd.py` and
`serverkd.py`, for images.

Symbols: $z$, $h$ $[D]$ the logits and features of client $k$'s own network ("mentor"); $u$, $v$ $[D]$ those of the
common network ("mentee") $g$, $D$ the same for all networks; $W_k$ $[D, D]$ of the client;
$KL(a, b) = KL(softmax(a) || softmax(b))$; $R$ = `energy_rounds`; $(e_0, e_1)$ = `energy`; $[.]_e$ the largest singular
directions of every matrix with at least the share $e$ of its squared values.

    $S$           $= CE(z, y) + CE(u, y)$
    a client    own network, $g_k$, $W_k <-$ SGD from own, $g$, $W_k$ on
                $S + (KL(u, z) + KL(z, u) + 2 mean_D (h - W_k v)^2)/S$
    $d_k$         $= [g_k - g]_e$, sent
    $d$           $= [mean_k d_k]_e$ over the round's clients, sent
    $g$           $<- g + d$
    $e$           $= e_0 + min(1, (r + 1)/R) (e_1 - e_0)$ in round $r = 0, 1, ...$

Cost per round: $d$ down and $d_k$ up, as singular directions; the client's training of two networks; one sum and one
decomposition per matrix on the server.

The client's own network is evaluated on the client's own split. A matrix $[m, n]$ of rank $q$ travels as
$q (m + n + 1)$ numbers, or as it is, without truncation, if that is not more. Kernels [m, i, a, b] are matrices [m, i a
b]. Vectors and running statistics of norms travel as they are. A client that did not take part in the previous round
receives the whole common network.

Departures:
1. HtFLlib compresses parameters; the authors' code and the equations here compress updates.
2. Both codes keep rank 0, so that they send zeros, if all singular values but the last have less than the share e.
   Here the rank is the smallest with at least the share e. HtFLlib decomposes the a x b kernel of every pair of
   channels, with one rank for all, and its energy starts at e_0 in the first round. There R is the run's
   number of rounds; here it is a setting, because a run may be resumed with more rounds.
3. The authors' code matches the features and attention of several layers, without W_k. Here, as in HtFLlib, it is the
   classifier's input, with W_k, in both networks' losses.
4. Nothing is detached in either code, nor in S (`detach: false`). `detach: true` treats the other network's outputs,
   and S in the denominator, as constant.
5. In both codes the KL is divided by the number of classes too (`reduction: mean`).
6. The authors' code does not train embeddings, and HtFLlib's mentee has its own learning rate and gradients clipped to
   10. Here all is trained by `training`.
7. With `updates.transforms` the bytes up are those of the whole common network.
8. Those of `kept.py`.
"""

from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from rayfl import costs
from rayfl.clients import Population
from rayfl.core.fold import Fold, State, Update
from rayfl.core.net import Net
from rayfl.core.tensors import Params, below, copied, nbytes, prefixed
from rayfl.methods.base import Payload, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.kept import check_features
from rayfl.methods.distillation.pairs import COMMON, Featured, Mutual, Pair
from rayfl.models.features import feature_size
from rayfl.training.settings import Loss

NUMBERS = "numbers"
"""Group of the state: "down" [], the numbers of the newest compressed update."""
SEEN = "seen"
"""Group of the client state: "round" [] of the client's last visit."""


Share = Annotated[float, Field(gt=0, le=1)]


class Guided(Featured):
    """Returns u, z [B, C] each, and W v, h [B, D] each."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        u, z, v, h = self.both(x)
        return u, z, self.project(v), h


class GuidedPair(Pair):
    def build(self, net: Net) -> nn.Module:
        return self.featured(net, feature_size(self.common_net), feature_size(self.own_net(net)), False, Guided)


class FedKD(Mutual):
    contract: ClassVar = Contract(wants="features")
    pair: ClassVar = GuidedPair

    name: Literal["fedkd"] = "fedkd"
    mask: Literal["none", "zero"] = "none"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Logits of classes that a client lacks during training: unchanged, or 0. With -inf, the loss of a client with one
    class is 0, and FedKD divides by it."""
    detach: bool = False
    """Treat the other network's outputs, and S in the denominator, as constant."""
    energy: tuple[Share, Share] = (0.95, 0.98)
    """e_0 and e_1, the share of the squared singular values that is sent, before the first round and after R rounds."""
    energy_rounds: int = Field(default=100, ge=1)
    """R, rounds in which the energy changes. In HtFLlib, all rounds of the run."""

    def check(self, rounds: int, clients: Population) -> None:
        super().check(rounds, clients)
        check_features(self.name, {capacity: self.own_net(net) for capacity, net in self.task.nets.items()})

    def energy_at(self, round: int) -> float:
        first, last = self.energy
        return first + min(1.0, (round + 1) / self.energy_rounds) * (last - first)

    def pair_loss(self, visit: Visit) -> Loss:
        loss = self.loss(visit)

        def mutual(outputs: tuple[torch.Tensor, ...], y: torch.Tensor) -> torch.Tensor:
            u, z, v, h = outputs
            labels = loss(z, y) + loss(u, y)
            scale = labels.detach() if self.detach else labels
            to_v, to_h = (v.detach(), h.detach()) if self.detach else (v, h)
            apart = F.mse_loss(h, to_v) + F.mse_loss(v, to_h)
            return labels + (self.divergence(u, z) + self.divergence(z, u) + apart) / scale

        return mutual

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        state, before = visit.client_state, payload[COMMON]
        given = self.own(state, visit.client.capacity) | prefixed(COMMON, before)
        trained, metrics = self.trained(given, visit, loss=self.pair_loss(visit))
        after, numbers = truncated(copied(below(COMMON, trained)), before, self.energy_at(visit.round))
        metrics["bytes_up"] = costs.BYTES * numbers
        current = state is not None and NUMBERS in payload and int(state[SEEN]["round"]) == visit.round - 1  # pyright: ignore
        metrics["bytes_down"] = costs.BYTES * int(payload[NUMBERS]["down"]) if current else nbytes(before)
        own = {name: t for name, t in trained.items() if not name.startswith(f"{COMMON}.")}
        sums = {COMMON: copied(after, self.weight_of(visit.data))}
        return self.kept(own, sums, visit, metrics, **{SEEN: {"round": torch.tensor(visit.round)}})

    def step(self, state: State, round: int, fold: Fold) -> State:
        if not fold.sum(COMMON):
            return state
        common, numbers = truncated(fold.mean(COMMON), state[COMMON], self.energy_at(round))
        return {COMMON: common, NUMBERS: {"down": torch.tensor(numbers)}}


def truncated(new: Params, old: Params, energy: float) -> tuple[Params, int]:
    """Return old + [new - old]_e, and the numbers that it takes to send the difference."""
    found, numbers = {}, 0
    for name, t in new.items():
        found[name], count = _truncated(t, old[name], energy) if t.dim() > 1 and len(t) > 1 else (t, t.numel())
        numbers += count
    return found, numbers


def _truncated(new: torch.Tensor, old: torch.Tensor, energy: float) -> tuple[torch.Tensor, int]:
    difference = (new - old).flatten(1)
    u, s, v = torch.linalg.svd(difference, full_matrices=False)
    shares = s.square().cumsum(0)
    rank = int((shares < energy * shares[-1]).sum()) + 1 if shares[-1] > 0 else 0
    count = min(rank, len(s)) * (sum(difference.shape) + 1)
    if count >= new.numel():
        return new, new.numel()
    return old + ((u[:, :rank] * s[:rank]) @ v[:rank]).view_as(old), count
