"""FedProto: clients keep their networks and share the mean features of every class.

Paper: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022,
https://arxiv.org/abs/2105.00243 (Algorithm 1; code: yuetan031/FedProto). No public data are needed, and the server
has no network.

Symbols: $h_k(x)$ $[D]$ the features of client $k$'s network, which its classifier reads; $D$ the same for all networks;
$n_(k j)$ client $k$'s training samples of class $j$; $C_j$ $[D]$ the global prototype of class $j$, if any client has
had the class; $lambda$ `attraction`.

    $w_k$         $<-$ SGD on $CE + lambda mean_D (h_k(x) - C_y)^2$, no second term without $C_y$
    $c_(k j)$     the mean of $h_k(x)$ over all its training samples of class $j$, after training; sent with $n_(k j)$
    $C_j$         $<- (sum_k n_(k j) c_(k j))/(sum_k n_(k j))$ over the round's clients with class $j$
                (`weight: samples`);
                $<-$ the mean of $c_(k j)$ over them (`weight: uniform`)
    device      argmax of its own classifier, or of $-|h_k(x) - C_j|^2$ (`predict`)

Cost per round: $D$ numbers per known class down, $D + 1$ per class of the client up, no parameters; the client's
training and one more pass; one sum on the server.

A class without clients in a round keeps its prototype. The nearest prototype equals the linear classifier
$2 C_j h - |C_j|^2$, with which a client's network is then deployed. Clients are evaluated on their own splits.

Networks of a mixture get features of one size by {name: mix, features: 64, networks: ...}.

Departures:
1. Eq. 6 divides the sum, whose weights n_kj / N_j add up to 1, by the number of clients with the class once more. This
   would shrink prototypes, and neither the code nor rayfl does it. The code's mean is `weight: uniform`.
2. The code's c_kj is the mean of the features over all training steps, with changing weights and dropout. Here it is
   that of the trained network, in evaluation mode, on samples that are not augmented.
3. The paper sums distances over classes, between a batch's prototypes and the global ones. Here, as in the code, it is
   the mean squared error over all features and samples of a batch; a sample without a global prototype counts as 0.
4. The code's features are those before the last dropout. Here they are the classifier's inputs.
5. The paper predicts by the nearest prototype. The code prints both that and the classifier's accuracy, as running
   means over clients, among the classes of the client's task only (`evaluation.label_mask: neg_inf`).
6. In the code all clients take part in every round. Here a client outside the cohort keeps its network, and a class may
   keep the prototype of an earlier round.
7. A client that never took part is evaluated with the initial classifier of its own network. HtFLlib evaluates all
   clients by prototypes.
"""

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field

from rayfl import costs
from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.fold import ClientState, Fold, State, Update
from rayfl.core.net import Net, cached_module
from rayfl.core.tensors import Params
from rayfl.methods.base import Deployment, Payload, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.kept import Keeping, check_features, class_means, mean_over_clients, stacked
from rayfl.metrics import label
from rayfl.models.features import classifier_path, tapped

PROTOTYPES = "prototypes"
"""Group of the state and the payload: class -> C_j [D]."""
FEATURES = "features"
"""Group of an update: class -> weighted prototype [D]. The weights [] are in "counts"."""
COUNTS = "counts"
NEVER = -1e30
"""The logit of a class without a prototype."""


class FedProto(Keeping):
    needs_classes: ClassVar = "prototypes are means over the samples of a class"
    contract: ClassVar = Contract(wants="features")

    name: Literal["fedproto"] = "fedproto"
    weight: Literal["samples", "uniform"] = "samples"
    """Weight of a client in the mean of a class: its training samples of the class, or 1."""
    attraction: float = Field(default=1.0, ge=0)
    """lambda, the weight in the loss of a sample's distance to the prototype of its class."""
    predict: Literal["classifier", "prototypes"] = "classifier"
    """Prediction of devices: by their own classifier, or by the nearest global prototype."""

    def check(self, rounds: int, clients: Population) -> None:
        super().check(rounds, clients)
        check_features(self.name, self.task.nets)
        for capacity, net in self.task.nets.items():
            if self.predict == "prototypes" and f"{classifier_path(net)}.bias" not in net.layout.shapes:
                raise ConfigError(
                    "method.predict: prototypes need a classifier with bias, and that of capacity "
                    f"{label(capacity)} has none. Allowed: classifier"
                )

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        net, data = visit.net, visit.data
        network = self.own(visit.client_state, visit.client.capacity)
        module = cached_module(net, data.device)
        with tapped(module, classifier_path(net)) as tap:
            loss, known = self.loss(visit), _stacked(payload.get(PROTOTYPES, {}), net, data.device)

            def attracted(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return loss(logits, y) + self.attraction * distance(tap.features, y, *known)

            network, metrics = self.trained(network, visit, loss=attracted if payload else loss)
        means, counts = class_means(network, net, data)
        weights = {j: n if self.weight == "samples" else torch.ones(()) for j, n in counts.items()}
        metrics["train_flops"] = costs.training_flops(net, int(metrics["train_samples"]))
        metrics["train_flops"] += costs.forward_flops(net, len(data))
        whole = {FEATURES: {j: mean * weights[j] for j, mean in means.items()}, COUNTS: weights}
        return self.kept(network, whole, visit, metrics)

    def step(self, state: State, round: int, fold: Fold) -> State:
        sums, counts = fold.sum(FEATURES), fold.sum(COUNTS)
        if not sums:
            return state
        return {PROTOTYPES: mean_over_clients(state.get(PROTOTYPES, {}), sums, counts)}

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        deployed = super().deploy(state, round, capacity, client_state)
        if self.predict == "classifier" or client_state is None or PROTOTYPES not in state:
            return deployed
        prototypes, known = _stacked(state[PROTOTYPES], deployed.net, torch.device("cpu"))
        path = classifier_path(deployed.net)
        bias = torch.where(known, -prototypes.square().sum(1), NEVER)
        return replace(deployed, params=deployed.params | {f"{path}.weight": 2 * prototypes, f"{path}.bias": bias})


def distance(features: torch.Tensor, y: torch.Tensor, prototypes: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error [] between features [B, D] and the prototypes [C, D] of their classes y [B], with 0
    for samples of classes that are not `known` ([C] bool)."""
    return ((features - prototypes[y]) * known[y][:, None]).square().mean()


def _stacked(prototypes: Params, net: Net, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prototypes [C, D] of all classes, 0 if missing, and the classes that have one [C] bool."""
    classes, size = net.layout.shapes[f"{classifier_path(net)}.weight"]
    return stacked(prototypes, classes, size, device)
