"""Standalone: every client trains its own network on its own data, without communication.

The lower baseline of personalised federated learning, as in Liang et al., https://arxiv.org/abs/2001.01523 (the row
"local"), from which HeteroFL's tables take it.

Symbols: $x_k$ client $k$'s network.

    $x_k$         starts as the first channels of one network, drawn from the seed
    $x_k$         $<-$ SGD from $x_k$ on client $k$'s data

Cost per round: nothing down or up, the client's training, nothing on the server.

Departures:
1. A client trains only in the rounds in which it is sampled, so that all methods have the same budget.
2. `size: own`, the default, gives every client the network of its capacity; the authors use one network for all. A
   client's network has one size, so its capacity is fixed.
3. There is no global network: the server deploys the clients' initial network. The authors average the parameters of
   all clients' networks, which is at chance level (10.03 % on CIFAR-10).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, cast

from rayfl.clients import Population
from rayfl.core.fold import ClientState, State, Update
from rayfl.core.net import Net, params_of
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params, copied
from rayfl.methods.base import Client, Deployment, Payload, Task, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.methods.sizes import Size, fixed_capacities, same


class Standalone(Dense):
    judged_on: ClassVar = "clients"
    contract: ClassVar = Contract(fedavg=None, traffic=lambda whole, head: (0, 0))

    name: Literal["standalone"] = "standalone"
    weight: Literal["uniform"] = "uniform"
    """Not used: nothing is averaged."""
    label_rows: Literal["all"] = "all"
    """Not used: nothing is averaged."""
    size: Size = "own"
    """own: every client has the network of its capacity. largest, smallest: one network for all."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return same(task, self.size)

    def check(self, rounds: int, clients: Population) -> None:
        fixed_capacities(self.name, self.task.nets, clients, "method.size: smallest or largest")

    def select(self, state: State, client: Client) -> Selection:
        """Return an empty selection for the network of the client's capacity."""
        return replace(self.prefix(client.capacity), names=())

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        own = cast(Params, visit.client_state["own"]) if visit.client_state else self._start(visit.client.capacity)
        module = self.module(visit, own)
        metrics = self.fit(module, visit)
        return Update({}, 1.0, metrics=metrics, client_states={visit.client.id: {"own": copied(params_of(module))}})

    def _start(self, capacity: float) -> Params:
        """Return a client's initial parameters, drawn on the worker from the run's seed."""
        return self.prefix(capacity).take(self.task.initial())

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        return replace(super().deploy(state, round, capacity, client_state), is_start=client_state is None)
