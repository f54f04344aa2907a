"""LoRA-FAIR: the server averages factors, and corrects B towards the mean of the products.

Paper: Bian, Wang, Zhang, Xu, "LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and Initialization Refinement",
ICCV 2025, https://arxiv.org/abs/2411.14961.

Symbols: as in `base`; $lambda$ the strength of the correction's regulariser, $I$ the identity.

    $A_k, B_k$    steps from $A$, $B$
    $A$           $<- sum_k w_k A_k$
    $bar B$       $= sum_k w_k B_k$
    $D$           with `by: cosine` argmin of $1 - cos(P, (bar B + D) A) + lambda norm(D)$, by gradient descent from 0;
                with `by: ridge` argmin of
                $norm(P/s - (bar B + D) A)^2 + lambda norm(D)^2 = (P/s - bar B A) A^T (A A^T + lambda I)^-1$
    $B$           $<- bar B + D$

Cost per round: $r (d + o)$ numbers per layer down and up, the client's training, sums and the correction per layer on
the server.

The correction removes only the part of the error within the row space of $A$.

Departures:
1. `by: ridge` is an extension. Unlike the cosine, least squares depend on the length.
2. The paper descends at rate 0.01 and does not state the number of steps (`steps`). The norm has no gradient at D = 0,
   the start, so the steps are proximal: they shrink D, and keep it 0 if the cosine is 1.
3. The paper has one rank. With several ranks, factors and the products in P are averaged over the holders of a
   component.
4. `server:` optimizers step on the factors before the correction.
"""

from typing import ClassVar, Literal

from pydantic import Field

from rayfl.core import factors as lowrank
from rayfl.core.fold import Fold, State
from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import LowRank


class LoRAFAIR(LowRank):
    contract: ClassVar = Contract(wants="adapters", fedavg=None)
    products_sent: ClassVar = "segments"

    one_scale: ClassVar = True

    name: Literal["lora_fair"] = "lora_fair"
    by: Literal["cosine", "ridge"] = "cosine"
    """Objective of the correction. cosine: 1 - cosine, by gradient descent. ridge: squared distance, in closed form."""
    strength: float = Field(default=0.01, gt=0)
    """lambda, the weight of the regulariser."""
    lr: float = Field(default=0.01, gt=0)
    """Learning rate of the server's descent (`by: cosine`)."""
    steps: int = Field(default=100, ge=1)
    """Steps of the server's descent (`by: cosine`)."""

    def step(self, state: State, round: int, fold: Fold) -> State:
        params = dict(fold.mean("params"))
        for path, mean in self.mean_products(fold).items():
            b, a = params[f"{path}.lora.B"], params[f"{path}.lora.A"]
            given = mean.left / self.scale(path), mean.right, b, a
            if self.by == "ridge":
                change = lowrank.ridge(*given, self.strength)
            else:
                change = lowrank.by_cosine(*given, self.strength, self.lr, self.steps)
            params[f"{path}.lora.B"] = b + change.to(b.dtype)
        return {"params": params}
