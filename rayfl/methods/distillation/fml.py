"""FML: every client trains its own network and a copy of one common network, which learn from each other.

Paper: Shen et al., "Federated Mutual Learning", https://arxiv.org/abs/2006.16765 (only its abstract was read; no code
by the authors was found). The algorithm is that of TsingZ0/HtFLlib, `clientfml.py` and `serverfml.py`.

Symbols: $f_k$ client $k$'s own network, $g$ the common network ("meme"), $z$ and $u$ $[C]$ their logits of $x$;
$KL(a, b) = KL(softmax(a) || softmax(b))$, the mean over a batch; $a$ = `alpha`, $b$ = `beta`.

    $f_k$         $<-$ SGD on $a CE(z, y) + (1 - a) KL(u, z)$
    $g_k$         $<-$ SGD on $b CE(u, y) + (1 - b) KL(z, u)$, in the same steps; $u$ and $z$ are those before the step
    $g$           $<-$ the mean of $g_k$ over the round's clients

Cost per round: the common network down and up; the training of both networks; one sum on the server.

$f_k$ stays on its client and is evaluated on the client's own split. With $a = b = 1$ it is trained alone, and $g$ by
FedAvg.

Departures:
1. The code's KL is divided by the number of classes too (`reduction: mean`), and its gradients reach both networks
   (`detach: false`). Neither is in the equations.
2. The code clips the gradient of each network to norm 10. Here `training.clip` clips that of both together.
3. The code averages only parameters; here running statistics of norms, if a network has them, are averaged too.
4. Those of `kept.py`.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field

from rayfl.methods.base import Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.pairs import Mutual
from rayfl.training.settings import Loss


class FML(Mutual):
    contract: ClassVar = Contract(wants="networks")

    name: Literal["fml"] = "fml"
    alpha: float = Field(default=0.5, ge=0, le=1)
    """a, the weight of the labels in the loss of a client's own network."""
    beta: float = Field(default=0.5, ge=0, le=1)
    """b, the weight of the labels in the loss of the common network."""

    def pair_loss(self, visit: Visit) -> Loss:
        loss = self.loss(visit)

        def mutual(logits: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
            common, own = logits
            of_own = self.alpha * loss(own, y) + (1 - self.alpha) * self.divergence(common, own)
            return of_own + self.beta * loss(common, y) + (1 - self.beta) * self.divergence(own, common)

        return mutual
