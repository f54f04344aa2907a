"""HeteroFL: every client trains the first channels of every layer.

Paper: Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", ICLR 2021, https://arxiv.org/abs/2010.01264.

Symbols: K the width of an axis in the widest network, r a client's capacity, x the global parameters.

    S_k            positions 0 .. ceil(r_k K) - 1 of every axis; classes and image channels whole (Alg. 1)
    y_k            SGD from S_k x, with the Scaler x / (r_k / r_server) while training (section 3.3),
                   static batch norm (3.2), and logits of absent classes set to 0 in the loss (section 4)
    x  <-  sum_k S_k^T y_k / sum_k S_k^T 1, uniform weights, elsewhere unchanged (Eqs. 1-3); a client's
                   classifier rows count only for the classes that it has

    >>> from rayfl.methods import METHODS
    >>> METHODS["heterofl"]().scaler
    True

Departures:
1. The network built at a width decides its sizes, ceil(r K); attention heads are cut inside each head.
2. `label_rows: present` is what the authors' code does also when `mask: none`; here it is an option of its own.
3. `mask: neg_inf` and `none` are ours and the paper's ablation; the paper says that absent classes get
   probability zero, the code sets their logit to zero. The default follows the code, which has the numbers.
"""

from typing import Literal

from rayfl.methods.width import PrefixMethod
from rayfl.training import Fill


class HeteroFL(PrefixMethod):
    name: Literal["heterofl"] = "heterofl"
    scaler: bool = True
    mask: Fill = "zero"
    label_rows: Literal["all", "present"] = "present"
