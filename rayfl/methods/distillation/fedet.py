"""Fed-ET: clients train small networks, and the server's large network learns from them on public data.

Paper: Cho et al., "Heterogeneous Ensemble Knowledge Transfer for Training Large Models in Federated Learning",
IJCAI 2022, https://arxiv.org/abs/2204.12703 (Algorithm 1; no code by the authors).

Symbols: $i$ an architecture, $w_i$ its network, $S_i$ the clients of the round that run it, $S$ all of the round, $n_k$
the weight of a client, $w_0$ the server's network, $u(w)$ the representation layer of $w$, $s_k(x)$ $[C]$ a client's
logits, $z(x)$ the server's, $V_k(x)$ the variance of $s_k(x)$ over classes, $P$ the public samples, without labels.

    $y_k$         for $k in S_i$: SGD on its own data from $w_i$
    start       $u(w_0) <- (sum_(k in S) n_k u(y_k))/(sum_(k in S) n_k)$
    consensus   $s(x) = (sum_(k in S) V_k(x) s_k(x))/(sum_(k in S) V_k(x))$, $y(x) = argmax_c s(x)$
    diversity   $t(x) = (sum_(k in D) V_k(x) s_k(x))/(sum_(k in D) V_k(x))$, $D(x)$ the clients with
                $argmax_c s_k(x) != y(x)$
    server      $w_0 <-$ SGD from $w_0$ on $CE(z(x), y(x)) + lambda KL(softmax(t(x)) || softmax(z(x)))$, $x$ in batches
                of $P$
    back        $w_i <- (sum_(k in S_i) n_k y_k)/(sum_(k in S_i) n_k)$, running statistics too; $u(w_i) <- u(w_0)$

Cost per round: the client's network down and up; its training; on the server a pass of all clients' networks over $P$,
and the training of $w_0$.

The largest capacity's network is the server's; with weight 0 in `clients.weights` no client has it, and it is never
sent. $u$ is the classifier. It must have one shape in all networks, as with `features` of model mix. An architecture
without clients in a round keeps its network, except $u$.

If all clients agree on a sample, $D$ is empty and the second term is 0. If no client predicts $y$, $D$ is $S$ and $t$
is $s$. If all logits are constant, clients have equal weights.

Departures:
1. The paper draws clients in proportion to their data and averages them uniformly. Here they are drawn uniformly and
   averaged uniformly, or by their data (`weight: samples`).
2. Clients may have the server's capacity. Then the server's network is also their architecture's: it is sent to them,
   and w_0 starts from the mean of their networks.
3. The steps, batches and rates of the server's training are those of the FedProphet authors' implementation.
4. With `updates.transforms` logits are of the networks before the transforms; with a server optimizer u of w_0 still
   starts from the mean itself.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.fold import Fold, State, Update
from rayfl.core.net import Net
from rayfl.methods.base import Payload, ServerTaskResult, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.base import STUDENT, Distilling, check_public
from rayfl.metrics import label
from rayfl.models.features import classifier_of, classifier_path, with_classifier
from rayfl.training.distillation import Distillation

LOGITS = "logits"


class FedET(Distilling):
    needs_classes: ClassVar = "its ensemble votes for classes"
    contract: ClassVar = Contract(wants="features")

    name: Literal["fedet"] = "fedet"
    distillation: Distillation = Distillation(steps=128, batch_size=64, momentum=0.9, lr=5e-3)
    """Training of the server's network."""
    diversity: float = Field(default=0.05, ge=0)
    """lambda, the weight of the clients that disagree with the consensus."""

    def check(self, rounds: int, clients: Population) -> None:
        check_public(self)
        shapes = {c: _shapes(net) for c, net in self.task.nets.items()}
        if len({tuple(shape.items()) for shape in shapes.values()}) > 1:
            given = "; ".join(f"capacity {label(c)}: {_text(shape)}" for c, shape in shapes.items())
            raise ConfigError(
                f"model: the classifiers have different shapes ({given}). Allowed with method {self.name}: one shape. "
                "Hint: set model.features of model mix"
            )

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        [given] = payload.values()
        trained, metrics = self.trained(given, visit)
        update = self.answer(trained, visit, metrics)
        logits, flops = self.known(trained, visit)
        update.derived[LOGITS] = {str(visit.client.id): logits}
        update.metrics["server_flops"] = flops
        return update

    def step(self, state: State, round: int, fold: Fold) -> State:
        received = [classifier_of(sums, net) for group, net in self.groups.items() if (sums := fold.sum(group))]
        if not received:
            return state
        # before the means use up the sums
        shared = {name: torch.stack([u[name] for u in received]).sum(0) / fold.weight for name in received[0]}
        new = {group: fold.mean(group) for group in state}
        server, answers = self.group(self.task.server_capacity), fold.sum(LOGITS)
        new[server] = with_classifier(new[server], self.task.server, shared)
        logits = torch.stack([answers[id] for id in sorted(answers, key=int)])
        return self.taught(new, [server], {"targets": targets(logits)})

    def loss_of_student(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        log_q, (labels, diverse) = F.log_softmax(logits, 1), targets.unbind(1)
        entropy = torch.xlogy(diverse, diverse).sum(1)
        return (-(labels * log_q).sum(1) + self.diversity * (entropy - (diverse * log_q).sum(1))).mean()

    def absorb(self, state: State, round: int, refined: Mapping[str, ServerTaskResult]) -> State:
        new = super().absorb(state, round, refined)
        server = self.group(self.task.server_capacity)
        if f"{STUDENT}{server}" in new:
            return new
        shared = classifier_of(new[server], self.task.server)
        return new | {group: with_classifier(new[group], net, shared) for group, net in self.groups.items()}


def _shapes(net: Net) -> dict[str, tuple[int, ...]]:
    path = classifier_path(net)
    return {name.removeprefix(f"{path}."): net.layout.shapes[name] for name in net.layout.classifier}


def _text(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


# targets


def confidence(logits: torch.Tensor, among: torch.Tensor | None = None) -> torch.Tensor:
    """Return a_k(x) [K, N] of logits [K, N, C], the shares of the variance over classes among the clients in `among`
    [K, N] bool (default: all). 0 for other clients."""
    counted = torch.ones(logits.shape[:2], dtype=torch.bool) if among is None else among
    variance = logits.var(2, correction=0)
    # constant logits count only if all counted clients have constant logits
    some = (variance * counted).sum(0) > 0
    weight = torch.where(some, variance, 1.0) * counted
    return weight / weight.sum(0).clamp_min(torch.finfo(weight.dtype).tiny)


def consensus(logits: torch.Tensor) -> torch.Tensor:
    """Return s(x) [N, C] of logits [K, N, C]."""
    return (confidence(logits)[:, :, None] * logits).sum(0)


def dissent(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return t(x) [N, C] of logits [K, N, C] and labels y(x) [N], 0 if D is empty, and D [K, N] bool."""
    among = logits.argmax(2) != labels
    return (confidence(logits, among)[:, :, None] * logits).sum(0), among


def targets(logits: torch.Tensor) -> torch.Tensor:
    """Return the targets [N, 2, C] of logits [K, N, C]: y(x) one-hot, and softmax(t(x)), 0 if D is empty."""
    labels = consensus(logits).argmax(1)
    diverse, among = dissent(logits, labels)
    probabilities = torch.where(among.any(0)[:, None], diverse.softmax(1), 0.0)
    return torch.stack([F.one_hot(labels, logits.shape[2]).to(logits.dtype), probabilities], 1)
