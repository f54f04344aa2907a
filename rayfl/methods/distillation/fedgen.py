"""FedGen: a generator of features, trained on the server against the clients' classifiers, extends the clients' data.

Paper: Zhu et al., "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021,
https://arxiv.org/abs/2105.10056 (its text was not read). The algorithm is that of the authors' code,
zhuangdizhu/FedGen, `serverpFedGen.py`, `userpFedGen.py` and `generator.py`, for equal networks, and of TsingZ0/HtFLlib,
`clientgen.py` and `servergen.py`, for different networks, of which only the classifier is shared.

Symbols: $h_k(x)$ $[D]$ the features of client $k$'s network, $D$ the same for all networks; $v_k$ its classifier
(features $[D]$ to logits $[C]$, the last linear layer) and $v$ the global one; $z = G(e, y)$ $[D]$ the generated
features of class $y$ from noise $e$ $[Z]$; $n_(k j)$ client $k$'s training samples of class $j$; $a$ = `generated`, $b$
= `diversity`; $B$ the size of a batch.

    $(h_k, v_k)$   $<-$ SGD from $(h_k, v)$ on $CE(v_k(h_k(x)), y) + a CE(v_k(G(e, y')), y')$
    $y'$           $~ (sum_k n_(k j))/(sum_(k, j) n_(k j))$, $B$ of them for every batch of $B$ samples
    $v$            $<-$ the mean of $v_k$ over the round's clients; sent, with $G$ and $sum_k n_(k j)$
    $G$            $<-$ Adam (`server`) on $CE(v(G(e, y')), y') + b exp(-mean_(i, j)(d_(i j) |z_i - z_j|_1/D))$, $y'$ as
                 above, of this round
    $d_(i j)$      $= |e_i - e_j|^2/Z$
    $G(e, y)$      linear(ReLU(batch norm(linear($[e,$ one-hot $y]$)))) with `hidden` features

Cost per round: $v$ down, then also $G$ with its running statistics and $C$ counts; $v_k$ and $C$ counts up; the
client's training; on the server that of $G$.

The mean of the clients' logits $v_k(z)$, with the same weights, is $v(z)$, so the server needs no single $v_k$. Clients
use $G$ in evaluation mode, from the second round on. A device runs $v(h_k(x))$ with its own $h_k$ and the newest $v$;
it is evaluated on the client's own split.

With $a = 0$ there is no generator and no count, and this is LG-FedAvg with a shared classifier, for different networks.

Departures:
1. The authors' code weights the losses CE(v_k(z), y') of the clients by their shares of class y', in place of the loss
   of the mean logits (HtFLlib).
2. The authors' code adds a divergence between a client's output of x and of generated features of its class, and lets
   the weights 10 of both terms decay by 0.98 per round. It stops using the generator after 20 local epochs of a round
   (`early_stop`). Here, as in HtFLlib, there is one term of constant weight, in all epochs.
3. Noise is normal (`noise: normal`). Both codes have a comment that says so, and draw it uniformly (`noise: uniform`).
4. HtFLlib never saves its trained generator: clients always use the initial one, in training mode and from the first
   round on. `server: {steps: 0}` is such a generator, in evaluation mode. HtFLlib has no second term (`diversity: 0`).
5. The authors' server draws y' uniformly from the classes of the round, and their clients from all classes of the data.
   HtFLlib draws in proportion to the counts of all clients, which are those of the round if all take part.
6. The authors' code keeps Adam's means between rounds and lets its rate decay by 0.98. Here, as in HtFLlib, Adam starts
   anew in every round. The defaults of `server` are the authors'; HtFLlib has 100 steps of 10, without decay, at a rate
   of 0.005 by default and of 0.1 in its script (`total.sh`).
7. Both codes weight v_k by samples (`weight: samples`).
8. Those of `kept.py`.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from rayfl import costs
from rayfl.config import Config
from rayfl.core.fold import Fold, State, Update
from rayfl.core.net import cached_module
from rayfl.core.seeds import stream, torch_scope
from rayfl.core.tensors import Params, copied
from rayfl.methods.base import Payload, ServerTask, ServerTaskContext, ServerTaskResult, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.kept import HEAD, RECEIVED, GlobalHead, Teaching
from rayfl.models.features import classifier_of, classifier_path

GENERATOR = "generator"
"""Group of the state and the payload: parameters and running statistics of G."""
LABELS = "labels"
"""Group of the state, payloads and updates: "counts" [C], the clients' training samples of every class."""
NOISE = {"normal": torch.randn, "uniform": torch.rand}


class Generator(nn.Module):
    """Features [B, D] from noise [B, Z] and labels [B]."""

    def __init__(self, noise: int, classes: int, hidden: int, size: int):
        super().__init__()
        self.classes = classes
        self.hidden = nn.Linear(noise + classes, hidden)
        self.norm = nn.BatchNorm1d(hidden, track_running_stats=True)
        self.out = nn.Linear(hidden, size)

    def forward(self, noise: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        given = torch.cat([noise, F.one_hot(y, self.classes).to(noise.dtype)], 1)
        return self.out(self.norm(self.hidden(given)).relu())

    def tensors(self) -> Params:
        """Return parameters and running statistics."""
        return {n: t for n, t in self.state_dict().items() if n != "norm.num_batches_tracked"}


class GeneratorTraining(Config):
    """Training of the generator by Adam."""

    steps: int = Field(default=50, ge=0)
    """Steps per round."""
    batch_size: int = Field(default=32, ge=2)
    """Generated features per step."""
    lr: float = Field(default=3e-4, gt=0)
    """Learning rate."""
    weight_decay: float = Field(default=0.01, ge=0)
    """L2 penalty on all parameters."""


class FedGen(Teaching, GlobalHead):
    needs_classes: ClassVar = "its generator makes features of a class"
    contract: ClassVar = Contract(wants="features", short={"server": {"steps": 2}, "hidden": 8})

    name: Literal["fedgen"] = "fedgen"
    generated: float = Field(default=1.0, ge=0)
    """a, the weight of generated features in a client's loss. 0: no generator."""
    diversity: float = Field(default=1.0, ge=0)
    """b, the weight of the second term in the generator's loss."""
    noise: Literal["normal", "uniform"] = "normal"
    """Distribution of e: standard normal, or uniform from 0 to 1."""
    noise_size: int = Field(default=32, ge=1)
    """Z, the numbers in e."""
    hidden: int = Field(default=512, ge=1)
    """Hidden features of the generator."""
    server: GeneratorTraining = GeneratorTraining()
    """Training of the generator."""

    def extract(self, state: State, selection: object) -> Payload:
        return state

    def generator(self, head: Params, given: Params | None, device: torch.device) -> Generator:
        """Return the generator with these tensors, otherwise the initial one, for a classifier."""
        with torch_scope(stream(self.task.seed, "init", GENERATOR)):
            module = Generator(self.noise_size, head["weight"].shape[0], self.hidden, head["weight"].shape[1])
        if given is not None:
            module.load_state_dict(given, strict=False)
        return module.to(device)

    def drawn(self, counts: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return noise [B, Z] and labels [B] in proportion to `counts` [C], from torch's global generator."""
        noise = NOISE[self.noise](samples, self.noise_size, device=counts.device)
        return noise, torch.multinomial(counts, samples, replacement=True)

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        net, data, head = visit.net, visit.data, cast(Params, payload[HEAD])
        loss, generator, counts = self.loss(visit), None, torch.empty(0)
        if GENERATOR in payload:
            generator = self.generator(head, payload[GENERATOR], data.device).eval()
            counts = payload[LABELS]["counts"].to(data.device)
        classifier = cached_module(net, data.device).get_submodule(classifier_path(net))

        def extended(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            assert generator is not None
            noise, labels = self.drawn(counts, len(y))
            with torch.no_grad():
                z = generator(noise, labels)
            return loss(logits, y) + self.generated * F.cross_entropy(classifier(z), labels)

        network, metrics = self.trained(self.start(payload, visit), visit, loss=extended if generator else loss)
        whole = {HEAD: copied(classifier_of(network, net), self.weight_of(data))}
        if self.generated:
            whole[LABELS] = {"counts": data.samples["y"].bincount(minlength=len(data.present)).to("cpu", torch.float)}
        if generator:
            metrics["train_flops"] = costs.training_flops(net, int(metrics["train_samples"]))
            metrics["train_flops"] += metrics["train_samples"] * self.flops(head, 2, 6)
        update = self.kept(network, whole, visit, metrics)
        update.as_is = frozenset({LABELS})
        return update

    def step(self, state: State, round: int, fold: Fold) -> State:
        new = {**state, HEAD: fold.mean(HEAD)}
        # update transforms can add noise to counts
        counts = {n: t.clamp(min=0) for n, t in fold.sum(LABELS).items()} if self.generated else {}
        return {**new, RECEIVED: counts} if counts and bool(counts["counts"].any()) else new

    def refine(self, server_task: ServerTask, context: ServerTaskContext) -> ServerTaskResult:
        given, device = server_task.payload, context.validation.device
        head = {name: t.to(device) for name, t in cast(Params, given[HEAD]).items()}
        counts = given[RECEIVED]["counts"].to(device)
        module, how = self.generator(head, given.get(GENERATOR), device).train(), self.server
        optimizer = torch.optim.Adam(module.parameters(), how.lr, weight_decay=how.weight_decay)
        with torch_scope(stream(context.seed, "student"), device):
            for _ in range(how.steps):
                noise, labels = self.drawn(counts, how.batch_size)
                z = module(noise, labels)
                optimizer.zero_grad()
                value = F.cross_entropy(F.linear(z, head["weight"], head.get("bias")), labels)
                (value + self.diversity * sameness(noise, z)).backward()
                optimizer.step()
        flops = float(how.steps * how.batch_size * self.flops(head, 6, 6))
        groups = {GENERATOR: copied(module.tensors()), LABELS: given[RECEIVED]}
        return ServerTaskResult(groups, {"server_flops": flops})

    def flops(self, head: Mapping[str, torch.Tensor], generator: int, classifier: int) -> int:
        """Return FLOPs per generated sample, from those per weight of the generator's matrices and of the head's."""
        classes, size = head["weight"].shape
        return generator * self.hidden * (self.noise_size + classes + size) + classifier * classes * size


def sameness(noise: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Return exp(-mean_ij(d_ij |z_i - z_j|_1 / D)) [] with d_ij = |e_i - e_j|^2 / Z, for noise e [B, Z] and features
    z [B, D]. It is 1 if all features are equal."""
    between = lambda t: t[:, None] - t[None]  # noqa: E731
    return torch.exp(-(between(noise).square().mean(2) * between(z).abs().mean(2)).mean())
