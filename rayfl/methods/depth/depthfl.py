"""DepthFL: clients train networks of different depths, with mutual distillation between their exits.

Paper: Kim, Yu, Kim, Moon, "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR 2023,
https://openreview.net/forum?id=pf8RIZTMU58; with FedDyn: Acar et al., "Federated Learning Based on Dynamic
Regularization", ICLR 2021, https://arxiv.org/abs/2111.04263.

Symbols: $n$ the exits of a client's network, $z_i$ the logits of its $i$-th, $p_i$ their softmax, $x_t$ the global
parameters in round $t$, $R$ = `ramp_rounds`, $N$ the number of clients, $A$ the clients of the round that have a
tensor, $g_k$ client $k$'s FedDyn gradient and $h$ the server's, both initially zero.

    $S_n$         the network up to the $n$-th exit with exits $1 ... n$, at full width
    $lambda_t$    $= exp(-5 (1 - (min(t, R))/R)^2)$
    $L_k(y)$      $= sum_i CE(z_i, labels) + lambda_t/(n - 1) sum_i sum_(j != i) KL(p_j || p_i)$, $p_j$ held constant
    $y_k$         SGD from $S_n x_t$ on $L_k(y) - g_k^T y + alpha/2 |y - S_n x_t|^2$
    $g_k$         $<- g_k - alpha (y_k - S_n x_t)$
    $m$           $= 1/|A| sum_(k in A) y_k$
    $h$           $<- h - alpha |A|/N (m - x_t)$
    $x_(t + 1)$   $= m - h/alpha$ where $|A| > 0$, elsewhere unchanged

Cost per round: the client's network down and up; its training, one backward pass for all exits; a sum and the step of
$h$ on the server.

$h$ is the mean of all clients' $g_k$, where missing tensors count as zero. Norms keep running statistics, as in torch,
which are averaged like the parameters, without $h$: `evaluation.statistics` is ignored. The output of the global model
is the mean over the logits of all its exits.

    >>> from rayfl.methods import METHODS
    >>> [round(METHODS["depthfl"]().ramp(t), 3) for t in (0, 150, 300, 999)]
    [0.007, 0.287, 1.0, 1.0]

Departures:
1. N is the population, as in FedDyn and in the authors' Flower baseline, even for tensors that only large clients
   have: there h is smaller than the mean over the clients that can train them.
2. The divergence is exact; the baseline adds 1e-7 to the target's probabilities.
3. `alpha: 0` is plain averaging, without g_k and h; with `distill: false` it is "DepthFL (FedAvg)".
4. `exits_trained: last` is InclusiveFL (Liu et al., KDD 2022, https://arxiv.org/abs/2202.08036) without its momentum
   distillation and without own last blocks, which `inclusivefl` has: a client's earlier exits are neither trained nor
   sent, but they run, and `train_flops` counts them. The baseline averages them as they were received.
5. Absent classes are masked in the cross-entropies only; `training.clip` bounds the gradient including FedDyn's terms.
   `train_loss` is L_k, the sum over the client's exits.
6. A client that makes no steps does not change its g_k.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import nn

from rayfl.clients import Population
from rayfl.core.fold import ClientState, Fold, State, Update
from rayfl.core.net import Net
from rayfl.core.tensors import Params
from rayfl.methods.base import Deployment, Payload, Task, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.methods.sizes import Exits, by_exits, fixed_capacities
from rayfl.training.settings import Logits, Loss, every_exit, over_exits


class DepthFL(Dense):
    contract: ClassVar = Contract(wants="exits", plain={"alpha": 0}, fedavg={"alpha": 0, "distill": False})

    name: Literal["depthfl"] = "depthfl"
    scaler: Literal[False] = False
    """Not supported: the Scaler divides activations, and norms keep running statistics of them."""
    exits: Exits = ()
    """Last exit of every capacity, smallest capacity first, counted from 1. Default: 1, 2, ... if there are as many
    capacities as exits; the last exit for a single capacity."""
    distill: bool = True
    """Mutual distillation between the exits of a client's network."""
    ramp_rounds: int = Field(default=300, ge=0)
    """With `distill`: number of rounds until lambda_t is 1."""
    alpha: float = Field(default=0.1, ge=0)
    """Strength of FedDyn's regularisation. 0: plain averaging."""
    exits_trained: Literal["all", "last"] = "all"
    """Trained exits of a client's network, which also give a device's output: all exits (their mean), or only the last
    (InclusiveFL)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.distill and self.ramp_rounds != 300:
            raise ValueError("ramp_rounds only with distill: true")
        if self.distill and self.exits_trained == "last":
            raise ValueError("exits_trained: last only with distill: false, because no other exit is trained")
        if self.alpha and (self.weight, self.label_rows) != ("uniform", "all"):
            raise ValueError(
                "weight: uniform with label_rows: all, or alpha: 0, because FedDyn weights clients equally"
            )
        return self

    @property
    def synchronous(self) -> str:
        return "FedDyn's h counts all clients of a round. Hint: method.alpha: 0" if self.alpha else ""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return by_exits(task, self.exits)

    def check(self, rounds: int, clients: Population) -> None:
        if self.alpha:
            # a client's g_k fits one network
            fixed_capacities(self.name, self.task.nets, clients, "method.alpha: 0")

    def init(self) -> State:
        params = self.task.initial()
        h = {"h": {name: torch.zeros_like(t) for name, t in params.items()}} if self.alpha else {}
        return {"params": params, "statistics": self.task.server.statistics()} | h

    @property
    def needs_exact_updates(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "with alpha a client keeps g_k as it computed it" if self.alpha else ""

    @property
    def needs_classes(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "its exits compare class probabilities" if self.distill else ""

    def loss(self, visit: Visit) -> Loss:
        plain, ramp, goal = super().loss(visit), self.ramp(visit.round), visit.data.goal

        def of_all_exits(logits: Logits, y: torch.Tensor) -> torch.Tensor:
            exits = every_exit(logits)
            if self.exits_trained == "last":
                return plain(exits[-1], y)
            labels = over_exits(plain)(exits, y)
            if not self.distill or len(exits) == 1:
                return labels
            counted = torch.stack([goal.rows(z, y)[0] for z in exits])
            return labels + ramp / (len(exits) - 1) * _divergences(counted)

        return of_all_exits

    def ramp(self, round: int) -> float:
        """Return lambda_t."""
        left = max(self.ramp_rounds - round, 0) / (self.ramp_rounds or 1)
        return math.exp(-5 * left**2)

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        kept = self.withheld(visit.net)
        x: Params = {name: t for name, t in payload["params"].items() if name not in kept}
        g = (
            cast(Params, visit.client_state["g"])
            if visit.client_state
            else {name: torch.zeros_like(t) for name, t in x.items()}
        )
        update = self.trained(payload, visit, adjust=self._pull(x, g, visit.data.device) if self.alpha else None)
        if self.alpha and update.metrics["steps"]:
            y = update.sums["params"]
            update.client_states[visit.client.id] = {
                "g": {name: g[name] - self.alpha * (y[name] - x[name]) for name in x}
            }
        return update

    def withheld(self, net: Net) -> frozenset[str]:
        """With `exits_trained: last`, the parameters and statistics of earlier exits, which a network with one exit
        fewer has and one without early exits has not."""
        if self.exits_trained == "all" or net.exits < 2:
            return frozenset()
        before, trunk = (frozenset(replace(net, exits=exits).full_layout.dims) for exits in (net.exits - 1, 0))
        return before - trunk

    def _pull(self, x: Params, g: Params, device: torch.device) -> Callable[[nn.Module], None]:
        """Return a function that adds FedDyn's alpha (y - x_t) - g_k to the gradients."""
        fixed = {name: (x[name].to(device), g[name].to(device)) for name in x}

        def pull(module: nn.Module) -> None:
            for name, y in module.named_parameters():
                if name in fixed and y.grad is not None:
                    start, gradient = fixed[name]
                    y.grad.add_(y.detach() - start, alpha=self.alpha).sub_(gradient)

        return pull

    def step(self, state: State, round: int, fold: Fold) -> State:
        if not self.alpha:
            return super().step(state, round, fold)
        m = fold.mean_so_far("params")
        new = super().step(state, round, fold)
        x, h, after = state["params"], dict(state["h"]), dict(new["params"])
        for name, holders in fold.weights("params").items():
            h[name] = h[name] - self.alpha * holders / self.task.clients * (m[name] - x[name])
            after[name] = after[name] - h[name] / self.alpha
        return new | {"params": after, "h": h}

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        answer = "mean" if self.exits_trained == "all" else "last"
        return replace(super().deploy(state, round, capacity, client_state), answer=answer)


def _divergences(logits: torch.Tensor) -> torch.Tensor:
    """Return the sum over all pairs of exits of KL(p_j || p_i), p_j held constant, averaged over rows. logits: [E, n,
    C]. Pairs of an exit with itself add 0."""
    students = F.log_softmax(logits, 2)
    teachers = students.detach().unsqueeze(1)
    return F.kl_div(students.unsqueeze(0), teachers, reduction="sum", log_target=True) / logits.shape[1]
