"""FedMD: clients keep their networks and learn the mean class scores of all clients on labelled public data.

Paper: Li and Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS 2019 workshop on federated
learning, https://arxiv.org/abs/1910.03581 (Algorithm 1; code: diogenes0319/FedMD_clean).

Symbols: $D_0$ the public samples, with labels; $D_k$ client $k$'s own; $w_k$ its network; $f(x, w)$ class scores, that
is logits before any softmax; $d_r$ a random subset of $D_0$, drawn in every round; $K$ the clients of the round.

    transfer      $w_k <-$ training on $D_0$ (`warmup_epochs`), then on $D_k$ (`private_warmup_epochs`): first visit
    communicate   $f(x, w_k)$, $x in d_r$, sent
    aggregate     $g_r(x) = 1/K sum_k f(x, w_k)$
    distribute    $g_r$, sent
    digest        $w_k <-$ Adam on $mean |f(x, w_k) - g_r(x)|$, $x in d_r$ (`digest`)
    revisit       $w_k <-$ training on $D_k$

Cost per round: $g_(r - 1)$ and the row numbers of $d_(r - 1)$ and $d_r$ down, $|d| C$ numbers up, no parameters; the
client's training, on the public subset too; one mean on the server.

A visit in round $r$ is digest and revisit with $g_(r - 1)$, then communicate with $d_r$. The server has no network;
clients are evaluated on their own splits, those that were never selected with their initial network. Clients also need
the public samples (`bytes_public`).

The code's settings, with Adam (1e-3) throughout and `training.batch_size` 5:

    data             | rounds | d_r  | digest                | revisit (`training.epochs`)
    CIFAR-100        | 20     | 5000 | 1 epoch, batch of 256 | 4
    Federated EMNIST | 20     | 5000 | 1 epoch, batch of 256 | 2

Departures:
1. A round of the paper ends with digest and revisit; here they start a client's next visit. The order of its work is
   the same, so R rounds here are R - 1 of the paper's and the communication of one more. In the paper all clients take
   part; here a client skips the consensus of rounds between its visits, except the latest.
2. A new client after the first round transfers first, and then digests and revisits.
3. The code stops the transfer early by accuracy on its test sets: at most 20 epochs on D_0 in batches of 128, and 25 on
   D_k in batches of 32. Here it has exactly these epochs, with the batch size and optimizer of `training`.
4. In the code D_0 and D_k have different classes, and networks predict both. Here there is one set of classes, which
   may be larger than any client's.
5. The code's d_r is stratified by the class shares of D_0; here rows are drawn uniformly.
6. Row numbers are not sent, because clients draw them from the run's seed. They are counted, 4 bytes each.
"""

from dataclasses import replace
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field

from rayfl import costs
from rayfl.clients import Population
from rayfl.core.fold import ClientState, Fold, State, Update
from rayfl.core.seeds import stream
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params, copied, nbytes
from rayfl.data.samples import ClientData
from rayfl.methods.base import Payload, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.base import Unequal, check_public, opened, public_bytes, public_of
from rayfl.methods.sizes import fixed_capacities
from rayfl.training.distillation import Distillation, beginning, go_on, result

CONSENSUS = "consensus"
SCORES = "scores"


class FedMD(Unequal):
    judged_on: ClassVar = "clients"
    contract: ClassVar = Contract(
        wants="networks", short={"warmup_epochs": 1, "private_warmup_epochs": 1, "subset": 10}
    )

    name: Literal["fedmd"] = "fedmd"
    subset: int = Field(default=5000, ge=1)
    """|d|, public samples drawn for each round; all if there are fewer."""
    warmup_epochs: int = Field(default=20, ge=0)
    """A client's epochs on the labelled public samples before its first round. 0: no labels needed."""
    private_warmup_epochs: int = Field(default=25, ge=1)
    """A client's epochs on its own data after these."""
    exchange: bool = True
    """Communicate and digest. false: clients transfer and revisit alone, a baseline."""
    digest: Distillation = Distillation(epochs=1, batch_size=256, optimizer="adam", lr=1e-3)
    """Training of clients on the consensus."""

    def check(self, rounds: int, clients: Population) -> None:
        check_public(self, labeled=self.warmup_epochs > 0)
        fixed_capacities(self.name, self.task.nets, clients, "one network for all capacities")

    def init(self) -> State:
        return {}  # the server has no network

    def extract(self, state: State, selection: Selection) -> Payload:
        """Return the latest consensus [n, C] and the round of its subset."""
        return state

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        public, net, seed = public_of(visit), visit.net, self.task.seed
        own, before = (visit.client_state or {}).get("own"), payload.get(CONSENSUS)
        flops, sent, metrics = 0.0, 0, {}
        if own is None:
            network, metrics, flops = self.transferred(visit)
        else:
            network = cast(Params, own)
        if before:
            data = public.picked(opened(public, self.subset, seed, int(before["round"]))).labeled(before[SCORES])
            network, digested = self.digested(network, data, visit)
            flops, sent = flops + digested, nbytes({SCORES: before[SCORES]}) + costs.BYTES * len(data)
        if visit.round:
            network, metrics = self.trained(network, visit)
            flops += costs.training_flops(net, int(metrics["train_samples"]))
        weight, answers = self.weight_of(visit.data), {}
        if self.exchange:
            rows = opened(public, self.subset, seed, visit.round)
            logits, asked = self.asked(network, net, public.picked(rows))
            flops, sent, answers = flops + asked, sent + costs.BYTES * len(rows), {"sum": logits * weight}
        needed = public_bytes(visit, labels=self.warmup_epochs > 0) if self.exchange or self.warmup_epochs else 0
        metrics |= {"train_flops": flops, "bytes_down": sent, "bytes_public": needed}
        client_states: dict[int, ClientState] = {visit.client.id: {"own": copied(network)}}
        return Update({}, weight, whole={SCORES: answers}, metrics=metrics, client_states=client_states)

    def transferred(self, visit: Visit) -> tuple[Params, dict[str, float], float]:
        """Return a client's network before its first round, the metrics of training on its own data, and the FLOPs."""
        network, flops, metrics = self.initial(visit.client.capacity), 0.0, {}
        for name, data, epochs in (
            ("public", public_of(visit), self.warmup_epochs),
            ("private", visit.data, self.private_warmup_epochs),
        ):
            training = self.task.training.for_epochs(epochs)
            work = replace(visit, data=data, seed=stream(visit.seed, "local", name))
            network, metrics = self.trained(network, work, training=training)
            flops += costs.training_flops(visit.net, int(metrics["train_samples"]))
        return network, metrics, flops

    def digested(self, network: Params, data: ClientData, visit: Visit) -> tuple[Params, float]:
        """Return the network trained on the consensus, and the FLOPs."""
        steps, seed = self.digest.steps_of(len(data)), stream(visit.seed, "open")
        student, metrics = go_on(beginning(network), visit.net, data, F.l1_loss, self.digest, seed, most=steps)
        return result(student), metrics["server_flops"]

    def step(self, state: State, round: int, fold: Fold) -> State:
        if not (sums := fold.sum(SCORES)):
            return state
        consensus = sums["sum"] / fold.weights(SCORES)["sum"]
        return {CONSENSUS: {SCORES: consensus, "round": torch.tensor(round)}}
