"""FedDF: the server's networks learn what the clients' networks say together of public data.

Paper: Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020,
https://arxiv.org/abs/2006.07242 (Algorithms 1 and 3; code: epfml/federated-learning-public-code).

Symbols: p an architecture ("prototype"), S_p the clients of the round that run it, S all of the round, f(.; w) logits,
U the public samples, without labels.

    a client   y_k  =  SGD on its own data from w_p
    a start    w_p  <-  sum_{S_p} n_k y_k / sum_{S_p} n_k, running statistics too, for every p of the round
    targets    z(x)  =  mean_S f(x; y_k), of all architectures
    a student  w_p  <-  Adam from w_p on  KL(softmax(z(x) / T) || softmax(f(x; w_p) / T)),  x in batches of U;
               the best on validation data of every 100th step is kept, and it stops after so many without a better one

An architecture that nobody ran in a round keeps its network. Networks go down and up, and nothing else: the server asks
the ensemble. Its forward passes are the server's operations, and are done where clients were trained, one network after
another, so that the ensemble is never in memory.

    >>> from rayfl.methods import METHODS
    >>> METHODS["feddf"]().distillation.steps
    10000

Departures:
1. Targets are found once a round, on U as it stands; the code asks the teachers anew for every batch, which is the same
   without augmentation.
2. The code's `avg_losses`, its removal of bad teachers (`drop_worst`) and its weights by validation accuracy are not
   here. Its README runs `avg_logits`, which is the default, without the other two.
3. The code averages starts uniformly (`weight: uniform`), the paper by data (`samples`, the default).
4. The code waits 2,000 steps, its README 1,000 (the default).
5. With `updates.transforms` teachers are the networks as they were trained, students start from what was sent.
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
    contract: ClassVar = Contract(wants="networks")

    name: Literal["feddf"] = "feddf"
    weight: Literal["samples", "uniform"] = "samples"
    """A client's weight in the mean that students start from: its number of training samples, or 1."""
    distillation: Distillation = Distillation(
        steps=10_000, batch_size=64, optimizer="adam", lr=1e-3, cosine=True, clip=5.0, patience=1_000
    )
    """How a student is trained."""
    targets: Literal["logits", "probabilities"] = "logits"
    """What is averaged over the teachers."""
    temperature: float = Field(default=1.0, gt=0)
    """T, of targets and students."""
    start: Literal["mean", "previous"] = "mean"
    """Where students start: at the mean of the clients' networks, or where they were."""

    def check(self, rounds: int, clients: Population) -> None:
        check_public(self)

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        [given] = payload.values()
        trained, metrics = self.trained(given, visit)
        update = self.answer(trained, visit, metrics)
        logits, flops = self.known(trained, visit)
        said = logits if self.targets == "logits" else logits.div(self.temperature).softmax(1)
        update.derived[TEACHERS] = {"sum": said, "count": torch.ones(())}
        update.metrics["server_flops"] = flops
        return update

    def step(self, state: State, round: int, fold: Fold) -> State:
        means = {group: fold.mean(group) for group in state}
        if not (said := fold.sum(TEACHERS)):
            return means
        mean = said["sum"] / said["count"]
        # a probability that is 0 in float32 has no logit, and a target of minus infinity no divergence
        logits = mean if self.targets == "logits" else mean.clamp_min(TINY).log() * self.temperature
        starts = means if self.start == "mean" else state
        return self.taught(means | starts, [group for group in state if fold.sum(group)], {"targets": logits})

    def loss_of_student(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return divergence(targets, logits, self.temperature)
