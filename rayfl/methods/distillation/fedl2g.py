"""FedL2G: the server learns one guiding vector per class, so that following it helps the clients' own loss.

Paper: Zhang et al., "Adaptive Guidance for Local Training in Heterogeneous Federated Learning", 2024,
https://arxiv.org/abs/2410.06490 (its text was not read). The algorithm is that of TsingZ0/HtFLlib by the same authors,
`clientl2g_logit.py`, `clientl2g_feat.py` and `serverl2g_logit.py`.

Symbols: $w_k$ client $k$'s network; $o(x, w)$ its logits $[C]$ or its features $[D]$ (`guided`); $V_j$ the guiding
vector of class $j$, of the same size; $Q_k$ `quiz_batches` batches of client $k$'s data, $S_k$ the other samples; $eta$
the learning rate, $eta_V$ `server_lr`.

    $w_k$         $<-$ SGD on $L(w, V) = CE + mean((o(x, w) - V_y)^2)$ over $S_k$, not in `warmup_rounds`
    $w'$          $= w_k - eta grad_w L$, the mean over `study_batches` batches of $S_k$
    $g_k$         $= grad_V CE$ at $w'$ on $Q_k$: through the step, of second order; rows that are not 0, sent
    $g_j$         the mean of $g_(k j)$ over the round's clients that sent it, otherwise 0
    $V$           $<- V - eta_V g min(1, 100/|g|)$, sent

Cost per round: $V$ down, one vector and a count per class up; the client's training and a step of second order; one sum
on the server.

$w'$ is not kept. $Q_k$ is drawn once per client, and never trained on. Clients are evaluated on their own splits. $V$
starts with independent normal elements.

Departures:
1. Q_k is drawn, and has at most half of the client's samples. In the code it is the first ones, and a client with
   fewer samples than Q_k fails. Samples that are sorted by class would have no first classes to train on.
2. Incomplete batches are used; the code drops them, and divides by the number of batches that it asks for. Here a
   client with fewer than `study_batches` batches uses samples again.
3. The step to w' is of plain SGD, whatever `training.optimizer` is, at the round's rate without warm-up and cosine.
4. The code clips a client's gradients at norm 100. Here `training.clip` does.
5. Those of `kept.py`.
6. FLOPs of the step to w' are counted as those of two training steps.
7. The code's default is 50 warm-up rounds, which count as rounds of the run, as they do here, but are not evaluated.
   Here the default is 0.
"""

from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch.nn.attention import SDPBackend, sdpa_kernel

from rayfl import costs
from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.fold import Fold, State, Update
from rayfl.core.joined import call
from rayfl.core.net import cached_module
from rayfl.core.seeds import stream, torch_generator, torch_scope
from rayfl.core.tensors import Params
from rayfl.data.samples import ClientData
from rayfl.methods.base import Payload, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.kept import Keeping, check_features
from rayfl.models.features import Tap, classifier_path, feature_size, tapped
from rayfl.training.settings import Loss

GUIDE = "guide"
"""Group of the state and the payload: "vectors" [C, K], V."""
GRADIENTS = "gradients"
"""Group of an update: class -> row of g_k [K]. The number of clients [] is in "counts"."""
COUNTS = "counts"
CLIP = 100.0


class FedL2G(Keeping):
    needs_classes: ClassVar = "every class has a guiding vector"
    contract: ClassVar = Contract(wants="networks")

    name: Literal["fedl2g"] = "fedl2g"
    weight: Literal["uniform"] = "uniform"
    """Not used: gradients have equal weights."""
    guided: Literal["logits", "features"] = "logits"
    """Outputs that the vectors guide."""
    server_lr: float = Field(default=0.01, gt=0)
    """Learning rate of V."""
    study_batches: int = Field(default=1, ge=1)
    """Batches of the step to w'."""
    quiz_batches: int = Field(default=1, ge=1)
    """Batches of Q_k."""
    warmup_rounds: int = Field(default=0, ge=0)
    """First rounds, in which only V is trained."""

    def check(self, rounds: int, clients: Population) -> None:
        super().check(rounds, clients)
        if self.warmup_rounds >= rounds:
            raise ConfigError(
                f"method.warmup_rounds: {self.warmup_rounds} is not valid. Allowed: fewer than the run's {rounds} "
                "rounds"
            )
        if self.guided == "features":
            check_features(self.name, self.task.nets)

    def init(self) -> State:
        net = self.task.server
        classes = net.layout.shapes[net.layout.classifier[0]][0]
        with torch_scope(stream(self.task.seed, "init", GUIDE)):
            return {GUIDE: {"vectors": torch.randn(classes, classes if self.guided == "logits" else feature_size(net))}}

    def guided_loss(self, visit: Visit, vectors: torch.Tensor, tap: Tap) -> Loss:
        """Return L: (logits, y) -> mean over the batch, of the call that `tap` has recorded."""
        loss = self.loss(visit)

        def guided(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return loss(logits, y) + F.mse_loss(logits if self.guided == "logits" else tap.features, vectors[y])

        return guided

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        net, data, training = visit.net, visit.data, self.task.training
        count = min(self.quiz_batches * training.batch_size, len(data) // 2)
        drawn = torch.randperm(len(data), generator=torch_generator(self.task.seed, "subset", visit.client.id))
        rows = drawn.to(data.device)
        quiz, study = data.picked(rows[:count]), data.picked(rows[count:])
        vectors = payload[GUIDE]["vectors"].to(data.device)
        # in a warm-up round, no epochs
        rest = training.for_epochs(0) if visit.round < self.warmup_rounds else None
        network = self.own(visit.client_state, visit.client.capacity)
        with tapped(cached_module(net, data.device), classifier_path(net)) as tap:
            loss = self.guided_loss(visit, vectors, tap)
            network, metrics = self.trained(network, replace(visit, data=study), loss=loss, training=rest)
            found = self.gradient(network, study, quiz, vectors, visit, tap)
        studied = min(self.study_batches * training.batch_size, len(study))
        metrics["train_flops"] = costs.training_flops(net, int(metrics["train_samples"]) + 2 * studied + len(quiz))
        gradients = {str(j): row.cpu().clone() for j, row in enumerate(found) if bool(row.any())}
        whole = {GRADIENTS: gradients, COUNTS: {j: torch.ones(()) for j in gradients}}
        return self.kept(network, whole, visit, metrics)

    def gradient(
        self, network: Params, study: ClientData, quiz: ClientData, vectors: torch.Tensor, visit: Visit, tap: Tap
    ) -> torch.Tensor:
        """Return g_k [C, K] at a trained network, 0 without a quiz."""
        if not len(quiz):
            return torch.zeros_like(vectors)
        net, training, own = visit.net, self.task.training, self.loss(visit)
        module, guide = cached_module(net, study.device).train(), vectors.clone().requires_grad_()
        loss, lr = self.guided_loss(visit, guide, tap), training.lr_at(visit.round)
        w = {name: network[name].clone().requires_grad_() for name in net.layout.shapes}
        generator = torch_generator(visit.seed, "batches", "study")
        batches = list(study.batches(self.study_batches, training.batch_size, generator))
        # other kernels of attention have no second derivative
        with sdpa_kernel(SDPBackend.MATH), torch_scope(stream(visit.seed, "dropout", "study"), study.device):
            value = torch.stack([loss(call(module, w, x), y) for x, y in batches]).mean()
            slopes = torch.autograd.grad(value, list(w.values()), create_graph=True)
            after = {name: t - lr * slope for (name, t), slope in zip(w.items(), slopes, strict=True)}
            values = [own(call(module, after, x), y) for x, y in quiz.plain(training.batch_size)]
            [found] = torch.autograd.grad(torch.stack(values).mean(), [guide])
        return found

    def step(self, state: State, round: int, fold: Fold) -> State:
        sums, counts, vectors = fold.sum(GRADIENTS), fold.sum(COUNTS), state[GUIDE]["vectors"]
        gradient = torch.zeros_like(vectors)
        for j, row in sums.items():
            # update transforms can add noise to counts
            if counts[j] > 0:
                gradient[int(j)] = row / counts[j]
        gradient *= CLIP / gradient.norm().clamp_min(CLIP)
        return {GUIDE: {"vectors": vectors - self.server_lr * gradient}}
