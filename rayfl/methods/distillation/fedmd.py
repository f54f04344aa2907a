"""FedMD: clients keep their networks, and approach what all say together of labelled public data.

Paper: Li and Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS 2019 workshop on federated
learning, https://arxiv.org/abs/1910.03581 (Algorithm 1; code: diogenes0319/FedMD_clean).

Symbols: D_0 the public samples, with labels; D_k client k's own; w_k its network; f(.; w) class scores, that is logits
before any softmax; d_r a random subset of D_0, drawn anew for every round.

    transfer     w_k  <-  training on D_0 (`warmup_epochs`), then on D_k (`private_warmup_epochs`)    once, at first
    communicate  f(x; w_k),  x in d_r                                                                  sent
    aggregate    g_r(x)  =  mean_k f(x; w_k)
    distribute   g_r                                                                                   sent
    digest       w_k  <-  Adam on  mean |f(x; w_k) - g_r(x)|,  x in d_r                                `digest`
    revisit      w_k  <-  training on D_k

A visit in round r is digest and revisit, of g_{r-1}, then communicate, of d_r. Up go |d| C numbers, down g_{r-1} and
the rows of d_{r-1} and d_r. The server has no network, so clients' own splits judge.

The code's settings; its optimizer is Adam (1e-3) everywhere, its `training.batch_size` 5:

    data             | rounds | d_r  | digest                | revisit (`training.epochs`)
    CIFAR-100        | 20     | 5000 | 1 epoch, batch of 256 | 4
    Federated EMNIST | 20     | 5000 | 1 epoch, batch of 256 | 2

    >>> from rayfl.methods import METHODS
    >>> fedmd = METHODS["fedmd"]()
    >>> fedmd.subset, fedmd.digest.epochs, fedmd.digest.batch_size
    (5000, 1, 256)

Departures:
1. A round of the paper ends with digest and revisit; here they are the start of a client's next visit. The order of
   its work is the same, so R rounds here are R - 1 of the paper's and the communication of one more. A client that is
   not drawn misses what the rounds before its last one agreed on, as it does not in the paper, where all take part.
2. A client that is drawn for the first time behind the first round transfers first, and then digests and revisits.
3. The code stops the transfer early, by the accuracy on its test sets: at most 20 epochs on D_0, in batches of 128, and
   25 on D_k, in batches of 32. Here it has that many epochs, in batches and with the optimizer of `training`.
4. In the code D_0 and D_k have classes of their own, and networks answer both. Here there is one set of classes, which
   may be larger than any client's.
5. The code's d_r has as many samples of every class as their share of D_0 says; here rows are drawn alike.
6. Rows are not sent: whoever has the public samples draws them from the run's seed. They are counted, 4 bytes each.
"""

from dataclasses import replace
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field

from rayfl import costs
from rayfl.clients import Population
from rayfl.core.fold import Fold, State, Update
from rayfl.core.seeds import stream
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params, copied, nbytes
from rayfl.data.samples import ClientData
from rayfl.methods.base import Payload, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.base import Unequal, check_public, opened, public_of
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
    """|d|: public samples that are drawn anew for every round; all where there are fewer."""
    warmup_epochs: int = Field(default=20, ge=0)
    """A client's passes over the public samples and their labels, before its first round. 0: the labels are not
    wanted."""
    private_warmup_epochs: int = Field(default=25, ge=1)
    """Its passes over its own data after that."""
    digest: Distillation = Distillation(epochs=1, batch_size=256, optimizer="adam", lr=1e-3)
    """How a client approaches the consensus on the subset."""

    def check(self, rounds: int, clients: Population) -> None:
        check_public(self, labeled=self.warmup_epochs > 0)
        fixed_capacities(self.name, self.task.nets, clients, "one network for all capacities")

    def init(self) -> State:
        """Nothing: the server has no network."""
        return {}

    def extract(self, state: State, selection: Selection) -> Payload:
        """The latest consensus [n, C], and the round in whose subset it is."""
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
        if before or own is not None:
            network, metrics = self.trained(network, visit)
            flops += costs.training_flops(net, int(metrics["train_samples"]))
        rows = opened(public, self.subset, seed, visit.round)
        logits, asked = self.asked(network, net, public.picked(rows))
        metrics |= {"train_flops": flops + asked, "bytes_down": sent + costs.BYTES * len(rows)}
        weight = self.weight_of(visit.data)
        return Update(
            {},
            weight,
            whole={SCORES: {"sum": logits * weight}},
            metrics=metrics,
            client_states={visit.client.id: {"own": copied(network)}},
        )

    def transferred(self, visit: Visit) -> tuple[Params, dict[str, float], float]:
        """A client's network before its first round, the metrics of its training on own data, and the floating point
        operations of all."""
        network, flops, metrics = self.initial(visit.client.capacity), 0.0, {}
        for name, data, epochs in (
            ("public", public_of(visit), self.warmup_epochs),
            ("private", visit.data, self.private_warmup_epochs),
        ):
            training = self.task.training.model_copy(update={"epochs": epochs, "steps": None})
            work = replace(visit, data=data, seed=stream(visit.seed, "local", name))
            network, metrics = self.trained(network, work, training=training)
            flops += costs.training_flops(visit.net, int(metrics["train_samples"]))
        return network, metrics, flops

    def digested(self, network: Params, data: ClientData, visit: Visit) -> tuple[Params, float]:
        """A network that came nearer to the consensus, and the floating point operations of that."""
        steps, seed = self.digest.steps_of(len(data)), stream(visit.seed, "open")
        student, metrics = go_on(beginning(network), visit.net, data, F.l1_loss, self.digest, seed, most=steps)
        return result(student), metrics["server_flops"]

    def step(self, state: State, round: int, fold: Fold) -> State:
        if not (said := fold.sum(SCORES)):
            return state
        consensus = said["sum"] / fold.weights(SCORES)["sum"]
        return {CONSENSUS: {SCORES: consensus, "round": torch.tensor(round)}}
