"""DS-FL: clients exchange predictions on open samples; the sharpened mean is the target of all networks.

Paper: Itahara et al., "Distillation-Based Semi-Supervised Federated Learning for Communication-Efficient Collaborative
Training with Non-IID Private Data", IEEE TMC 2021, https://arxiv.org/abs/2008.06180 (Algorithm 1; no code by the
authors; one of them co-authored kitsuyaazuma/SCARLET, which includes it as a baseline).

Symbols: $w_k$ client $k$'s personal network, $w_g$ the server's, $f(x, w)$ logits, $o_r$ the open set of round $r$, a
draw of the public samples, without labels, $p$ and $t$ rows of probabilities, $K$ the clients of the round, $C$
classes.

    a client    $w_k <-$ SGD on $CE(t(x), softmax(f(x, w_k)))$, $x in o_(r - 1)$ (`distill_epochs`, previous targets);
                $w_k <-$ SGD on its own data;
                $p_k(x) = softmax(f(x, w_k))$, $x in o_r$, sent
    $p(x)$        $= 1/K sum_k p_k(x)$
    $t(x)$        $= softmax((p(x))/T)$: ERA, entropy reduction, a softmax of probabilities, $T = 0.1$;
                $= p(x)$: SA, simple aggregation
    $w_g$         $<-$ SGD on $CE(t(x), softmax(f(x, w_g)))$, $x in o_r$ (`distillation`)

Cost per round: $t$ and the row numbers of $o_(r - 1)$ and $o_r$ down, $|o| C$ numbers up, no parameters; the client's
training, on the open set too; the server's training of $w_g$ on the open set.

$w_g$ has the server's capacity, by default the largest, and is evaluated on the test set; clients' networks on their
own splits. A client that was never selected is evaluated with the network that the server has for its capacity: $w_g$,
or for smaller capacities the initial network. Clients also need the public samples (`bytes_public`), which $o_r$ is
drawn from.

    >>> from rayfl.methods import METHODS
    >>> METHODS["dsfl"]().targets(torch.tensor([[0.4, 0.4, 0.2]]))
    tensor([[0.4683, 0.4683, 0.0634]])

Departures:
1. In the paper a client distils at the end of a round, when the targets are sent; here at the start of its next visit.
   The order of its work is the same, but a client skips the targets of rounds between its visits, except the latest
   ones, and only w_g learns from the last targets of a run.
2. A new client starts from its capacity's initial network, and distils the latest targets, if any, before its own
   steps.
3. Row numbers are not sent, because clients draw them from the run's seed. They are counted, 4 bytes each.
"""

from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from rayfl import costs
from rayfl.clients import Population
from rayfl.core.fold import Fold, State, Update
from rayfl.core.seeds import stream
from rayfl.core.submodel import Selection
from rayfl.core.tensors import copied, nbytes
from rayfl.methods.base import Payload, ServerTask, ServerTaskContext, ServerTaskResult, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.base import TARGETS, Distilling, check_public, opened, public_bytes, public_of
from rayfl.methods.sizes import fixed_capacities
from rayfl.training.distillation import Distillation

OPEN = "open"
PROBABILITIES = "probabilities"


class DSFL(Distilling):
    needs_classes: ClassVar = "clients send class probabilities"
    contract: ClassVar = Contract(wants="networks", short={"open": 10})

    name: Literal["dsfl"] = "dsfl"
    open: int = Field(default=1000, ge=1)
    """|o|, public samples drawn for each round; all if there are fewer."""
    aggregation: Literal["era", "mean"] = "era"
    """Targets. era: the sharpened mean. mean: the mean itself (the paper's SA)."""
    temperature: float = Field(default=0.1, gt=0)
    """T of ERA. At 1 and above, targets are flatter than the mean."""
    distill_epochs: int = Field(default=5, ge=0)
    """A client's epochs on the open set, with the batch size and rate of `training`."""
    distillation: Distillation = Distillation(epochs=5, batch_size=50, lr=0.1)
    """Training of the server's network on the open set."""

    def check(self, rounds: int, clients: Population) -> None:
        check_public(self)
        fixed_capacities(self.name, self.task.nets, clients, "one network for all capacities")

    @property
    def student(self) -> str:
        """Group of the server's only network."""
        return self.group(self.task.server_capacity)

    def init(self) -> State:
        return {self.student: self.initial(self.task.server_capacity)}

    def extract(self, state: State, selection: Selection) -> Payload:
        """Return the latest targets [n, C] and the round of their open set."""
        return {OPEN: state[OPEN]} if OPEN in state else {}

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        public, net, seed = public_of(visit), visit.net, self.task.seed
        network = self.own(visit.client_state, visit.client.capacity)
        distilled, sent = 0, 0
        if before := payload.get(OPEN):
            targets = before[TARGETS]
            data = public.picked(opened(public, self.open, seed, int(before["round"]))).labeled(targets).still
            training = self.task.training.for_epochs(self.distill_epochs)
            work = replace(visit, data=data, seed=stream(visit.seed, OPEN))
            network, metrics = self.trained(network, work, loss=self.loss_of_student, training=training)
            distilled, sent = int(metrics["train_samples"]), nbytes({TARGETS: targets}) + costs.BYTES * len(data)
        network, metrics = self.trained(network, visit)
        rows = opened(public, self.open, seed, visit.round)
        logits, flops = self.asked(network, net, public.picked(rows))
        metrics["train_flops"] = flops + costs.training_flops(net, distilled + int(metrics["train_samples"]))
        metrics |= {"bytes_down": sent + costs.BYTES * len(rows), "bytes_public": public_bytes(visit)}
        weight = self.weight_of(visit.data)
        return Update(
            {},
            weight,
            whole={PROBABILITIES: {"sum": logits.softmax(1) * weight}},
            metrics=metrics,
            client_states={visit.client.id: {"own": copied(network)}},
        )

    def targets(self, mean: torch.Tensor) -> torch.Tensor:
        """Return the targets [n, C] of mean probabilities [n, C]."""
        return (mean / self.temperature).softmax(1) if self.aggregation == "era" else mean

    def step(self, state: State, round: int, fold: Fold) -> State:
        if not (sums := fold.sum(PROBABILITIES)):
            return state
        targets = self.targets(sums["sum"] / fold.weights(PROBABILITIES)["sum"])
        new = {**state, OPEN: {TARGETS: targets, "round": torch.tensor(round)}}
        # names of a checkpoint must not share memory
        return self.taught(new, [self.student], {TARGETS: targets.clone()})

    def loss_of_student(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, targets)

    def refine(self, server_task: ServerTask, context: ServerTaskContext) -> ServerTaskResult:
        public = public_of(context)
        rows = opened(public, self.open, self.task.seed, context.round)
        return super().refine(server_task, replace(context, public=public.picked(rows)))
