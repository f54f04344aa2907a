"""FedBN: all layers are averaged but the norms, which stay on their client.

Paper: Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR
2021, https://arxiv.org/abs/2102.07623. Of its text, the abstract could be read; the algorithm is that of the code
(med-air/FedBN, federated/fed_digits.py, `communication`).

Symbols: $w$ the parameters outside norms, $b_k$ client $k$'s scales and shifts of its batch norms, $A$ the cohort.

    $(w_k, b_k)$   SGD from $(w, b_k)$ on client $k$'s data, all layers together
    $w$            $<- 1/|A| sum_(k in A) w_k$

Cost per round: $w$ down and up, the start of $b_k$ down once per client; the client's training; one sum on the server.

Departures:
1. Clients have no running statistics in training. Those of a client's network are collected on its own training data
   before an evaluation (`evaluation.statistics`), so they are the client's own, as in the paper.
2. The paper has batch norms. Here scales and shifts of other norms stay on the client too. Without norms it is FedAvg.
3. The code selects norms by the letters "bn" in the name of a tensor, here by the type of the layer.
4. The network of the server has the b that all clients start from, which is never trained. The paper has none.
5. `size: own` is ours: norms of a narrow network stay on its client, and w is a holder mean over submodels. A client's
   norms fit one network, so its capacity is fixed.
"""

import functools
from typing import ClassVar, Literal

from rayfl.core.net import Net
from rayfl.methods.contract import Contract
from rayfl.methods.personal.base import Partial, below


class FedBN(Partial):
    contract: ClassVar = Contract(fedavg=None, counted="norms", traffic=lambda whole, norms: (whole, whole - norms))

    name: Literal["fedbn"] = "fedbn"

    def kept(self, net: Net) -> tuple[str, ...]:
        return norms_of(net)


@functools.lru_cache(maxsize=512)
def norms_of(net: Net) -> tuple[str, ...]:
    """Return the names of the parameters of all norms: of modules without children whose class is called a norm,
    because models of other libraries have classes of their own (LlamaRMSNorm)."""
    modules = net.blank().named_modules()
    return below(net, [path for path, m in modules if "Norm" in type(m).__name__ and not list(m.children())])
