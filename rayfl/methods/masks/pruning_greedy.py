"""Pruning-greedy: clients train the largest elements of the global parameters.

Paper: Zhou, Lan, Venkataramani, Ding, "Every Parameter Matters: Ensuring the Convergence of Federated Learning with
Dynamic Heterogeneous Models Reduction", NeurIPS 2023, https://arxiv.org/abs/2310.08670; as a baseline: Wu et al.,
"FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction", NeurIPS 2024,
https://arxiv.org/abs/2407.19389 (Tables 6, 7).

Symbols: $x$ the global parameters, $g_k$ a client's capacity, $d$ the number of maskable elements.

    $theta_k$     the $floor(g_k d)$-th largest $|x|$
    $S_k$         the elements with $|x| >= theta_k$, and everything that is not maskable
    $y_k$         SGD from $S_k x$, with 0 elsewhere
    $x$           $<- (sum_k S_k^T y_k)/(sum_k S_k^T 1)$, elsewhere unchanged

Cost per round: the elements of $S_k$ and their positions down, the elements up; the client's training, whose operations
are counted by density; one sum on the server.

The minimum coverage index, the number of clients that hold the least covered element, is the metric `full_clients`.

    >>> import torch
    >>> from rayfl.methods.masks.thresholds import threshold_for
    >>> threshold_for({"conv": torch.tensor([1.0, -4.0]), "head": torch.tensor([3.0, -2.0])}, share=1 / 2)
    3.0

Departures:
1. The authors' proof of concept prunes one layer of an MLP by quartiles of rank. Here a threshold is over the whole
   model, as in FIARSE's comparison, or per layer or shard.
2. Its clients step with unmasked gradients, and elements without a holder become 0. Here the paper's text is followed.
3. A client receives, trains and sends only its elements. It also receives their positions, per tensor in the shorter of
   two codes: a bit per element, or a byte per held one (`rayfl.core.bitcodes`).
4. With `clients.metric: flops`, S_k is the largest elements that cost g_k of the maskable layers' multiply-adds; with
   `width`, g_k is the share of parameters that the dense network of this width has.
"""

from typing import Literal

from rayfl.methods.masks.base import Masked


class PruningGreedy(Masked):
    name: Literal["pruning_greedy"] = "pruning_greedy"
