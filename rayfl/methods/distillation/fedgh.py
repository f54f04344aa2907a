"""FedGH: clients keep their networks; the server trains their common classifier on the mean features of every class.

Paper: Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM MM 2023,
https://arxiv.org/abs/2303.13137 (only its abstract was read). The algorithm is that of TsingZ0/HtFLlib, `clientgh.py`
and `servergh.py`.

Symbols: $h_k(x)$ $[D]$ the features of client $k$'s network, $D$ the same for all networks; $v$ the global classifier
(features $[D]$ to logits $[C]$, the last linear layer); $c_(k j)$ $[D]$ the mean features of client $k$'s samples of
class $j$.

    $(h_k, v_k)$   $<-$ SGD from $(h_k, v)$ on $CE(v_k(h_k(x)), y)$
    $c_(k j)$      the mean of $h_k(x)$ over its training samples of class $j$, after training; sent with the label $j$
    $v$            $<-$ SGD from $v$ on $CE(v(c_(k j)), j)$ over all pairs of the round (`server`); sent

Cost per round: $v$ down, $D + 1$ numbers per class of the client up; the client's training and one more pass over its
data; on the server the training of $v$.

A device runs $v(h_k(x))$ with its own $h_k$ and the newest $v$; it is evaluated on the client's own split. $v_k$ is not
kept.

Networks of a mixture get features of one size by {name: mix, features: 64, networks: ...}.

Departures:
1. v starts as the classifier of the server's network; in the code as client 0's.
2. c_kj is of all samples; in the code without the last incomplete batch.
3. Those of `kept.py`.
"""

from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import nn

from rayfl import costs
from rayfl.core.fold import Update
from rayfl.methods.base import Payload, ServerTask, ServerTaskContext, ServerTaskResult, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.kept import HEAD, RECEIVED, GlobalHead, Taught, class_means


class FedGH(Taught, GlobalHead):
    needs_classes: ClassVar = "prototypes are means over the samples of a class"
    contract: ClassVar = Contract(wants="features")

    name: Literal["fedgh"] = "fedgh"
    weight: Literal["uniform"] = "uniform"
    """Not used: nothing is averaged."""

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        net, data = visit.net, visit.data
        network, metrics = self.trained(self.start(payload, visit), visit)
        means, _ = class_means(network, net, data)
        metrics["train_flops"] = costs.training_flops(net, int(metrics["train_samples"]))
        metrics["train_flops"] += costs.forward_flops(net, len(data))
        # with every label
        metrics["bytes_up"] = sum(costs.BYTES * (mean.numel() + 1) for mean in means.values())
        return self.kept(network, self.sent(means, visit), visit, metrics)

    def refine(self, server_task: ServerTask, context: ServerTaskContext) -> ServerTaskResult:
        received, head = server_task.payload[RECEIVED], server_task.payload[HEAD]
        classes, size = head["weight"].shape
        linear = nn.Linear(size, classes, "bias" in head)
        linear.load_state_dict(head)
        loss = lambda x, y: F.cross_entropy(linear(x), y)  # noqa: E731
        found = self.server.fit(linear, received, loss, context.seed, context.validation.device)
        flops = 6.0 * size * classes * len(received["labels"]) * self.server.epochs
        return ServerTaskResult({HEAD: found}, {"server_flops": flops})
