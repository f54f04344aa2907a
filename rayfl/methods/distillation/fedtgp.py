"""FedTGP: FedProto with prototypes that the server trains to be apart from each other.

Paper: Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data
and Model Heterogeneity in Federated Learning", AAAI 2024, https://arxiv.org/abs/2401.03230 (only its abstract was
read). The algorithm is that of TsingZ0/HtFLlib by the same authors, `clienttgp.py` and `servertgp.py`.

Symbols: $h_k(x)$ $[D]$ the features of client $k$'s network; $c_(k j)$ $[D]$ the mean features of client $k$'s samples
of class $j$; $g_j$ $[D]$ the global prototype of class $j$; $e_j$ $[D]$ a trained embedding of class $j$; $A$, $B$
$[D, D]$ and $a$, $b$ $[D]$ trained; $m$ the margin; $lambda$ `attraction`.

    $w_k$             $<-$ SGD on $CE + lambda mean_D (h_k(x) - g_y)^2$, no second term in the first round
    $c_(k j)$         the mean of $h_k(x)$ over all its training samples of class $j$, after training; sent with $j$
    $c_j$             the mean of $c_(k j)$ over the round's clients with class $j$
    $m$               $= min(max_j min_(i != j) |c_i - c_j|, M)$, $M$ = `margin`
    $g_j$             $= A ReLU(B e_j + b) + a$
    $A, a, B, b, e$   $<-$ SGD (`server`) over all $c_(k j)$ on the cross-entropy of class $j$ with the logits
                    $-|c_(k j) - g_i|$ for $i != j$ and $-|c_(k j) - g_j| - m$; $g$ is sent
    device          $argmin_j |h_k(x) - g_j|^2$, or argmax of its own classifier (`predict`)

Cost per round: $C D$ numbers down, $D + 1$ per class of the client up, no parameters; the client's training and one
more pass; on the server the training of the prototypes.

Prototypes of classes without clients are sent too. `predict: prototypes` and the mixture of networks are as in
FedProto.

Departures:
1. |c - g| is the root of at least 1e-12. The code's root of |c|^2 - 2 c g + |g|^2 is NaN if rounding makes it negative.
2. The code trains the server at the clients' learning rate and batch size, 0.01 and 10 by default. Here these are
   options of their own, with these defaults.
3. The code computes c_kj with the network from before the round's training (it is saved after them). Here, as FedProto
   does, with the trained one.
4. If the round's clients have one class only, m is `margin`, as in the code.
5. A client that never took part is evaluated with the initial classifier of its own network. HtFLlib evaluates all
   clients by prototypes.
6. Those of `kept.py`.
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from rayfl import costs
from rayfl.core.fold import State, Update
from rayfl.core.net import params_of
from rayfl.core.seeds import stream, torch_scope
from rayfl.core.submodel import Selection
from rayfl.methods.base import Payload, ServerTask, ServerTaskContext, ServerTaskResult, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.fedproto import FEATURES, PROTOTYPES, FedProto
from rayfl.methods.distillation.kept import RECEIVED, ServerTraining, Taught
from rayfl.models.features import classifier_path

GENERATOR = "generator"
"""Group of the state: e, A, a, B and b."""


class Prototypes(nn.Module):
    """g [C, D], computed from embeddings."""

    def __init__(self, classes: int, size: int):
        super().__init__()
        self.embeddings = nn.Embedding(classes, size)
        self.hidden = nn.Linear(size, size)
        self.out = nn.Linear(size, size)

    def forward(self) -> torch.Tensor:
        return self.out(self.hidden(self.embeddings.weight).relu())


class FedTGP(Taught, FedProto):
    contract: ClassVar = Contract(wants="features", short={"server": {"epochs": 2}})

    name: Literal["fedtgp"] = "fedtgp"  # pyright: ignore[reportIncompatibleVariableOverride]
    weight: Literal["uniform"] = "uniform"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Not used: the server trains on every client's class means."""
    attraction: float = Field(default=10.0, ge=0)
    """lambda, the weight in the loss of a sample's distance to the prototype of its class."""
    predict: Literal["classifier", "prototypes"] = "prototypes"
    """Prediction of devices: by their own classifier, or by the nearest global prototype."""
    margin: float = Field(default=100.0, ge=0)
    """Largest margin m."""
    server: ServerTraining = ServerTraining(epochs=100)  # pyright: ignore[reportIncompatibleVariableOverride]
    """Training of the prototypes."""

    def init(self) -> State:
        shape = self.task.server.layout.shapes[f"{classifier_path(self.task.server)}.weight"]
        with torch_scope(stream(self.task.seed, "init", PROTOTYPES)):
            return {GENERATOR: params_of(Prototypes(*shape))}

    def extract(self, state: State, selection: Selection) -> Payload:
        return {PROTOTYPES: state[PROTOTYPES]} if PROTOTYPES in state else {}

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        update = super().local_update(payload, visit)
        means = update.whole[FEATURES]
        update.whole = self.sent(means, visit)
        # with every label
        update.metrics["bytes_up"] = sum(costs.BYTES * (mean.numel() + 1) for mean in means.values())
        return update

    def refine(self, server_task: ServerTask, context: ServerTaskContext) -> ServerTaskResult:
        received, generator = server_task.payload[RECEIVED], server_task.payload[GENERATOR]
        classes, size = generator["embeddings.weight"].shape
        module = Prototypes(classes, size)
        module.load_state_dict(generator)
        margin = min(spread(received["features"], received["labels"]), self.margin)
        loss = lambda c, y: contrast(c, y, module(), margin)  # noqa: E731
        found = self.server.fit(module, received, loss, context.seed, context.validation.device)
        with torch.no_grad():
            prototypes = {str(j): g.to("cpu", copy=True) for j, g in enumerate(module())}
        count = len(received["labels"])
        steps = -(-count // self.server.batch_size) * self.server.epochs
        flops = 6.0 * classes * size * (2 * size * steps + count * self.server.epochs)
        return ServerTaskResult({GENERATOR: found, PROTOTYPES: prototypes}, {"server_flops": flops})


def spread(features: torch.Tensor, y: torch.Tensor) -> float:
    """Return max_j min_{i != j} |c_i - c_j| of the class means c of features [n, D]; infinity for one class."""
    means = torch.stack([features[y == j].mean(0) for j in y.unique()])
    if len(means) == 1:
        return float("inf")
    apart = torch.cdist(means, means, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(float("inf"))
    return float(apart.min(1).values.max())


def contrast(c: torch.Tensor, y: torch.Tensor, prototypes: torch.Tensor, margin: float) -> torch.Tensor:
    """Return the mean loss [] of class means c [B, D] of classes y [B] with prototypes [C, D]."""
    squares = c.square().sum(1, keepdim=True) - 2 * c @ prototypes.T + prototypes.square().sum(1)
    apart = squares.clamp_min(1e-12).sqrt()
    return F.cross_entropy(-(apart + margin * F.one_hot(y, len(prototypes))), y)
