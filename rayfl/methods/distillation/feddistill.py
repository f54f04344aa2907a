"""FedDistill, also FD: clients keep their networks and share the mean outputs of every class.

Paper: Jeong et al., "Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation under
Non-IID Private Data", NeurIPS 2018 workshop, https://arxiv.org/abs/1811.11479 (only its abstract was read; no code by
the authors). The algorithm is that of TsingZ0/HtFLlib, `clientfd.py` and `serverfd.py`.

Symbols: $f_k(x)$ $[C]$ the logits of client $k$'s network; $p_k(x) = softmax(f_k(x))$; $q_(k j)$ $[C]$ the mean of
$p_k(x)$ over the samples of class $j$ in all steps of a round, $n_(k j)$ their number; $G_j$ $[C]$ the global mean, if
any client has had the class; $lambda$ `distill`; $CE(f, G) = -sum_c G_c log softmax(f)_c$, the mean over the batch.

    $w_k$         $<-$ SGD on $CE(f_k(x), y) + lambda CE(f_k(x), G_y)$, no second term without $G_y$
    $q_(k j)$     the mean of $p_k(x)$ in these steps, before each step; sent with $n_(k j)$
    $G_j$         $<-$ the mean of $q_(k j)$ over the round's clients with class $j$ (`weight: uniform`);
                $<- (sum_k n_(k j) q_(k j))/(sum_k n_(k j))$ (`weight: samples`)

Cost per round: $C$ numbers per known class down, $C + 1$ per class of the client up, no parameters; the client's
training; one sum on the server.

A class without clients in a round keeps its $G_j$. Clients are evaluated on their own splits.

Departures:
1. The code averages logits, and uses their mean in place of probabilities in CE, although they are not a distribution:
   `outputs: logits`. The default averages probabilities.
2. A sample whose class has no G_j counts as 0. The code uses the network's own output in its place: of probabilities
   this has no gradient, of logits it has one.
3. FD is usually described with a G_j without the client's own outputs. Here, as in the code, these are included.
4. In the code a class that no client sends has no G_j in the next round.
5. Those of `kept.py`.
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from rayfl.core.fold import Fold, State, Update
from rayfl.methods.base import Payload, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.kept import Keeping, by_class, mean_over_clients, means_by_class, stacked

OUTPUTS = "outputs"
"""Group of the state, of payloads and of updates: class -> [C]. Its weights [] in updates are in "counts"."""
COUNTS = "counts"


class FedDistill(Keeping):
    needs_classes: ClassVar = "clients send mean outputs per class"
    contract: ClassVar = Contract(wants="networks")

    name: Literal["feddistill"] = "feddistill"
    weight: Literal["samples", "uniform"] = "uniform"
    """Weight of a client in the mean of a class: its trained samples of the class, or 1."""
    distill: float = Field(default=1.0, ge=0)
    """lambda, the weight of the global outputs in the loss."""
    outputs: Literal["probabilities", "logits"] = "probabilities"
    """Outputs that are averaged and used as targets."""

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        data, classes = visit.data, len(visit.data.present)
        known = stacked(payload.get(OUTPUTS, {}), classes, classes, data.device)
        loss, seen = self.loss(visit), torch.zeros(classes, classes + 1, device=data.device)

        def distilled(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                output = logits.softmax(1) if self.outputs == "probabilities" else logits
                seen.add_(by_class(F.pad(output, (0, 1), value=1.0), y, classes))
            value = loss(logits, y)
            return value + self.distill * soft_entropy(logits, y, *known) if payload else value

        network, metrics = self.trained(self.own(visit.client_state, visit.client.capacity), visit, loss=distilled)
        means, counts = means_by_class(seen[:, :-1], seen[:, -1])
        weights = {j: n if self.weight == "samples" else torch.ones(()) for j, n in counts.items()}
        whole = {OUTPUTS: {j: mean * weights[j] for j, mean in means.items()}, COUNTS: weights}
        update = self.kept(network, whole, visit, metrics)
        update.as_is = frozenset({OUTPUTS, COUNTS})
        return update

    def step(self, state: State, round: int, fold: Fold) -> State:
        if not (sums := fold.sum(OUTPUTS)):
            return state
        return {OUTPUTS: mean_over_clients(state.get(OUTPUTS, {}), sums, fold.sum(COUNTS))}


def soft_entropy(logits: torch.Tensor, y: torch.Tensor, targets: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy [] between logits [B, C] and the targets [C, C] of their classes y [B], with 0 for
    samples of classes that are not `known` ([C] bool)."""
    return -(targets[y] * F.log_softmax(logits, 1) * known[y][:, None]).sum(1).mean()
