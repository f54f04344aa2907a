"""HetLoRA: clients prune their ranks, and the mean is weighted by the norms of the products.

Paper: Cho, Liu, Xu, Fahrezi, Joshi, "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models",
EMNLP 2024, https://arxiv.org/abs/2401.06432.

Symbols: as in `base`; $g$ the pruning factor, $lambda$ the weight of the tail, $q = floor(g r_k)$ its first component,
$T(B, A) = sum norm(B[:, q:]) norm(A[q:])$ over layers.

    $A_k, B_k$    steps from the first $r_k$ rows of $A$ and columns of $B$ on loss $+ lambda T(B, A)$
    $r_k$         $<- max(r_min, q)$ if $T(B_k, A_k) < T(B, A)$ of the received factors, permanently
    $p_k$         $= norm(P_k)/(sum_i norm(P_i))$, over the cohort and all layers
    $A$           $<- sum_k p_k A_k$
    $B$           $<- sum_k p_k B_k$, missing components count as 0

Cost per round: $r_k (d + o)$ numbers per layer down and up, at the pruned rank; the client's training; one sum on the
server.

Departures:
1. No code is published. One norm over all layers, and g = 0.99, are as in two re-implementations.
2. The HetLoRA in FlexLoRA's published branch has a regulariser without gradient, no pruning and no weights. It is not
   reproduced here.
3. Only the client knows its pruned rank. It receives the components of its capacity, sets those above its rank to 0 and
   trains the rest. Traffic is counted at the pruned rank.
4. With `updates.transforms` traffic up is that of all components of the capacity.
5. Clients with zero products get equal weights. The head has the weights p_k too. Components without a holder in the
   cohort become 0, as in the formula.
6. With `model.rank_pattern` r_k is a client's largest rank: a layer of fewer components loses some once r_k is lower.
"""

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from rayfl.clients import Population
from rayfl.core import factors as lowrank
from rayfl.core.fold import Update
from rayfl.core.joined import parameters_of
from rayfl.core.tensors import Params, nbytes
from rayfl.methods.base import Payload, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import LowRank, part_of
from rayfl.methods.sizes import fixed_capacities


class HetLoRA(LowRank):
    contract: ClassVar = Contract(wants="adapters", over="all", fedavg=None)
    over: ClassVar = "all"

    name: Literal["hetlora"] = "hetlora"
    gamma: float = Field(default=0.99, gt=0, le=1)
    """g, the fraction of a rank that remains after pruning."""
    tail_weight: float = Field(default=1e-3, ge=0)
    """lambda, the weight of the tail in the loss."""
    rank_min: int = Field(default=1, ge=1)
    """r_min, the smallest rank after pruning."""
    by_norm: bool = True
    """Weight clients by the norms of their products. false: by `weight`."""

    def check(self, rounds: int, clients: Population) -> None:
        super().check(rounds, clients)
        fixed_capacities(self.name, self.task.nets, clients, "one capacity for all clients")

    def tail_of(self, rank: int) -> int:
        """Return the first component of the tail, floor(g r) with a tolerance for rounding errors."""
        return math.floor(self.gamma * rank + 1e-9)

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        rank = self._rank(payload["params"], visit)
        received, start = cut(payload["params"], rank), self.tail_of(rank)
        before = sum(tails(received, start).values())
        trained, metrics = self.train(received, visit, adjust=self._adjust(start) if self.tail_weight else None)
        left = rank
        if sum(tails(trained, start).values()) < before:
            left = min(rank, max(self.rank_min, start))
        trained = cut(trained, left)
        weight = self._norm(trained) if self.by_norm else None
        update = self.answer(trained, payload, visit, metrics, weight=weight)
        for name, of in (("bytes_down", rank), ("bytes_up", left)):
            update.metrics[name] = nbytes({n: kept(n, t, of) for n, t in payload["params"].items()})
        update.client_states[visit.client.id] = {"rank": {"rank": torch.tensor(left)}}
        return update

    def _rank(self, params: Params, visit: Visit) -> int:
        if visit.client_state is not None:
            return int(visit.client_state["rank"]["rank"])  # pyright: ignore[reportArgumentType]
        return max((len(t) for name, t in params.items() if part_of(name) == "A"), default=0)

    def _adjust(self, start: int):
        """Return a hook that adds the gradient of lambda T; by b it is (||a|| / ||b||) b, and 0 at b = 0."""

        def adjust(module: nn.Module) -> None:
            params = parameters_of(module)
            for name, b in params.items():
                if part_of(name) == "B" and b.grad is not None:
                    a = params[f"{name[:-1]}A"]
                    pull(b[:, start:], b.grad[:, start:], a[start:], self.tail_weight)
                    if a.grad is not None:
                        pull(a[start:], a.grad[start:], b[:, start:], self.tail_weight)

        return adjust

    def _norm(self, params: Params) -> float:
        """Return ||P_k||_F over all layers, or `TINY` if it is 0."""
        total = 0.0
        for name, b in params.items():
            if part_of(name) == "B":
                total += (
                    self.scale(name.removesuffix(".lora.B"), b.shape[1]) * lowrank.norm(b, params[f"{name[:-1]}A"])
                ) ** 2
        return math.sqrt(total) or TINY


TINY = 1e-12
"""Weight of a client with product 0, so that clients have equal weights if all products are 0."""


@torch.no_grad()
def pull(x: torch.Tensor, gradient: torch.Tensor, other: torch.Tensor, weight: float) -> None:
    """Add the gradient of weight ||x|| ||other|| by x to `gradient`, in place."""
    length = x.norm()
    gradient.add_(torch.where(length > 0, x / length, 0.0), alpha=weight * float(other.norm()))


def tails(params: Params, start: int) -> dict[str, float]:
    """Return ||B[:, start:]||_F ||A[start:]||_F of every layer."""
    return {
        name: float(b[:, start:].norm() * params[f"{name[:-1]}A"][start:].norm())
        for name, b in params.items()
        if part_of(name) == "B"
    }


def kept(name: str, t: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the first components of a factor, or another parameter whole."""
    part = part_of(name)
    return t[:rank] if part == "A" else t[:, :rank] if part == "B" else t


def cut(params: Params, rank: int) -> Params:
    """Return a copy with the components from `rank` on set to 0."""
    found = dict(params)
    for name, t in params.items():
        if part_of(name):
            found[name] = torch.zeros_like(t)
            kept(name, found[name], rank).copy_(kept(name, t, rank))
    return found
