"""FedSVD: clients train B alone, and the server refactors B A in every round so that A has orthonormal rows.

Paper: Lee, Ko, Lee, Lee, Hwang, "FedSVD: Adaptive Orthogonalization for Private Federated Learning with LoRA", NeurIPS
2025, https://arxiv.org/abs/2505.12805.

Symbols: as in `base`.

    $B_k$         steps from $B$, with $A$ frozen
    $bar B$       $= sum_k w_k B_k$
    $U S V^T$     the singular value decomposition of $bar B A$
    $B$           $<- U S$
    $A$           $<- V^T$: the function is unchanged, and the next round trains other directions

Cost per round: $r (d + o)$ numbers per layer down, $r o$ up; the client's training; one decomposition per layer on the
server.

Departures:
1. The paper has one rank. With several ranks, column j of B is averaged over its holders, and a client of rank r gets
   the best approximation of rank r.
2. If B A has fewer than R directions, as at the start with B = 0, the other rows of A are unchanged.
3. Noise of differential privacy is not included; see `updates.transforms`.
4. `server:` optimizers step on B. Their moments stay in the basis of the A that they come from, and are of little use
   in the next one.
"""

from typing import ClassVar, Literal

from rayfl.core import factors as lowrank
from rayfl.core.fold import Fold, State
from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import LowRank, Part


class FedSVD(LowRank):
    contract: ClassVar = Contract(wants="adapters", over="products", fedavg=None)

    name: Literal["fedsvd"] = "fedsvd"

    def trains(self, round: int) -> tuple[Part, ...]:
        return ("B",)

    def changed(self, round: int) -> tuple[Part, ...]:
        return ("A", "B")

    def step(self, state: State, round: int, fold: Fold) -> State:
        params = dict(fold.mean("params"))
        for path in self.layers:
            a, b = f"{path}.lora.A", f"{path}.lora.B"
            params[b], params[a] = lowrank.refactored(lowrank.svd(params[b], params[a]), params[a], 1.0)
        return {"params": params}
