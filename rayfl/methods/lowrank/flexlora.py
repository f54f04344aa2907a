"""FlexLoRA: the server decomposes the mean of the products, and clients get its first singular directions.

Paper: Bai, Chen, Qian, Yao, Li, "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
Resources", NeurIPS 2024, https://arxiv.org/abs/2402.11505 (code: alibaba/FederatedScope, branch FlexLoRA).

Symbols: as in `base`.

    $A_k, B_k$    steps from the first $r_k$ directions
    $U S V^T$     the singular value decomposition of $P = sum_k w_k s_k B_k A_k$
    $B$           $<- U[:, :R] S[:R]/s$
    $A$           $<- V[:, :R]^T$: a client of rank $r$ gets the best approximation of rank $r$

Cost per round: $r_k (d + o)$ numbers per layer down and up, the client's training, one decomposition per layer on the
server.

The rank collapses: clients of low rank count as 0 in the other directions, so that every round, even without training,
shrinks these directions by the weight share of the other clients (`raflora` avoids this).

Departures:
1. The published branch never changes a rank, because of an empty list of layers. This is the paper's method.
2. Signs of singular vectors are fixed, and the decomposition is exact, by QR of the stacked factors in float64. The
   decomposition of the dense product is reported to fail.
3. If P has fewer than R directions, as at the start with P = 0, the other rows of A are unchanged.
4. A trained head is averaged over all clients. `server:` optimizers step on the head alone.
"""

from typing import ClassVar, Literal

from rayfl.core import factors as lowrank
from rayfl.core.fold import Fold, State
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params
from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import LowRank, rank_of


class FlexLoRA(LowRank):
    contract: ClassVar = Contract(wants="adapters", over="products", fedavg=None)
    products_sent: ClassVar = "whole"
    factors_sent: ClassVar = False

    name: Literal["flexlora"] = "flexlora"

    def part(self, state: State, selection: Selection) -> Params:
        """Return the selected parameters, with B rescaled so that products keep their value at the network's s."""
        params = dict(selection.take(state["params"]))
        for path in self.layers:
            factor = self.scale(path) / self.scale(path, rank_of(selection.net, path))
            if factor != 1:
                params[f"{path}.lora.B"] = params[f"{path}.lora.B"] * factor
        return params

    def step(self, state: State, round: int, fold: Fold) -> State:
        """Replace the adapters by the best factors of the mean products: singular values on B, orthonormal A."""
        params = dict(fold.mean("params"))
        for path, product in self.mean_products(fold).items():
            a, b = f"{path}.lora.A", f"{path}.lora.B"
            directions = lowrank.svd(product.left, product.right)
            params[b], params[a] = lowrank.refactored(directions, params[a], self.scale(path))
        return {"params": params}
