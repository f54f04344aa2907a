"""FedDF: the server's networks learn the mean predictions of the clients' networks on public data.

Paper: Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020,
https://arxiv.org/abs/2006.07242 (Algorithms 1 and 3; code: epfml/federated-learning-public-code).

Symbols: $p$ an architecture ("prototype"), $S_p$ the clients of the round that run it, $S$ all of the round, $n_k$ a
client's samples, $f(x, w)$ logits, $T$ `temperature`, $U$ the public samples, without labels.

    $y_k$         for $k in S_p$: SGD on its own data from $w_p$
    start       $w_p <- (sum_(k in S_p) n_k y_k)/(sum_(k in S_p) n_k)$, running statistics too, for every $p$ of the
                round
    $z(x)$        $= 1/|S| sum_(k in S) f(x, y_k)$, of all architectures
    student     $w_p <-$ Adam from $w_p$ on $KL(softmax((z(x))/T) || softmax(f(x, w_p)/T))$, $x$ in batches of $U$; keep
                the best of every 100th step on validation data (`keep_start`: and of the start); stop early after
                `patience` steps without a better one

Cost per round: networks down and up; the client's training; on the server a pass of all clients' networks over $U$, and
the training of one student per architecture.

An architecture without clients in a round keeps its network. With `distillation.steps: 0` there is no ensemble: the
method is the paper's baseline, FedAvg over the clients of each architecture. The ensemble's forward passes count as the
server's operations. They run where clients are trained, one network at a time, so that the ensemble is never in memory.

Departures:
1. Targets are computed once per round, on U without augmentation; the code computes them for every batch, which is
   equivalent without augmentation.
2. The code's `avg_losses`, its removal of bad teachers (`drop_worst`) and its weights by validation accuracy are not
   implemented. Its README runs `avg_logits`, the default here, without the other two.
3. The code averages starts uniformly (`weight: uniform`), the paper by data (`samples`, the default).
4. The code's patience is 2,000 steps, its README's 1,000 (the default). `keep_start` is the code's
   `return_best_model_on_val` (default false, there and here): a start that is better than all students is used. Here
   it is also used if the best student is as good, and patience counts from it.
5. With `updates.transforms` teachers are the networks before the transforms, and students start from the sent ones.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field

from rayfl.clients import Population
from rayfl.core.fold import Fold, State, Update
from rayfl.methods.base import Payload, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.base import Distilling, check_public
from rayfl.training.distillation import Distillation
from rayfl.training.settings import divergence

TEACHERS = "teachers"
TINY = torch.finfo(torch.float32).tiny


class FedDF(Distilling):
    needs_classes: ClassVar = "distillation compares class probabilities"
    contract: ClassVar = Contract(wants="networks")

    name: Literal["feddf"] = "feddf"
    weight: Literal["samples", "uniform"] = "samples"
    """Weight of a client in the mean that students start from: its number of training samples, or 1."""
    distillation: Distillation = Distillation(
        steps=10_000, batch_size=64, optimizer="adam", lr=1e-3, cosine=True, clip=5.0, patience=1_000
    )
    """Training of students."""
    targets: Literal["logits", "probabilities"] = "logits"
    """Teachers' outputs to average."""
    temperature: float = Field(default=1.0, gt=0)
    """T, the temperature of targets and students."""
    start: Literal["mean", "previous"] = "mean"
    """Start of students. mean: the mean of the clients' networks. previous: the previous student."""

    def check(self, rounds: int, clients: Population) -> None:
        check_public(self)

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        [given] = payload.values()
        trained, metrics = self.trained(given, visit)
        update = self.answer(trained, visit, metrics)
        if self.distillation.steps == 0:
            return update
        logits, flops = self.known(trained, visit)
        answers = logits if self.targets == "logits" else logits.div(self.temperature).softmax(1)
        update.derived[TEACHERS] = {"sum": answers, "count": torch.ones(())}
        update.metrics["server_flops"] = flops
        return update

    def step(self, state: State, round: int, fold: Fold) -> State:
        means = {group: fold.mean(group) for group in state}
        if not (sums := fold.sum(TEACHERS)):
            return means
        mean = sums["sum"] / sums["count"]
        # a probability of 0 has logit minus infinity, for which the divergence is not defined
        logits = mean if self.targets == "logits" else mean.clamp_min(TINY).log() * self.temperature
        starts = means if self.start == "mean" else state
        return self.taught(means | starts, [group for group in state if fold.sum(group)], {"targets": logits})

    def loss_of_student(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return divergence(targets, logits, self.temperature)
