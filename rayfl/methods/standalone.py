"""Standalone: every client trains its own network on its own data, and nothing ever travels.

The baseline from below of personalised federated learning, as in Liang et al., https://arxiv.org/abs/2001.01523
(the row "local"), from which HeteroFL's tables have theirs.

    x_k  =  SGD from x_k on client k's data;    x_k starts as the first channels of one network, drawn from the seed

    >>> from rayfl.methods import METHODS
    >>> METHODS["standalone"]().size
    'own'

Departures:
1. A client trains in the rounds in which it is drawn, like the clients of other methods, so that all have the same
   budget.
2. `size: own`, the default, gives every client the network of its capacity; the authors' clients all have one. A
   client's network has one size, so that then its capacity has to stay the same.
3. There is no global network: without a client, `deploy` gives the initial one, at chance. The authors average
   the parameters of all clients' networks, which is at chance too (10.03 % on CIFAR-10).
"""

from collections.abc import Iterator
from typing import Literal, cast

from rayfl.axes import Layout
from rayfl.methods.base import Client, Payload, State, Update
from rayfl.methods.width import PersonalMethod
from rayfl.models.base import params_of
from rayfl.submodel import Selection, prefix
from rayfl.tensors import Params
from rayfl.training import ClientData, weighted


class Standalone(PersonalMethod):
    name: Literal["standalone"] = "standalone"
    size: Literal["largest", "smallest", "own"] = "own"
    """own: every client has the network of its capacity. largest, smallest: all have the same."""

    def select(self, state: State, round: int, client: Client, seed: int) -> Selection:
        """Nothing of the server's, for the network of the client's capacity."""
        return prefix(self.task.layout(self.task.server), Layout({}, {}), self.net_at(client.capacity))

    def local_update(
        self, payload: Payload, selection: Selection, client: Client, data: ClientData, round: int, seed: int
    ) -> Update:
        kept = self._initial(client.capacity) if client.carry is None else cast(Params, client.carry)
        net = self.network(kept, selection.net, data)
        metrics = self.train(net, data, round, seed)
        return Update({"params": {}}, 1.0, metrics=metrics, carries={client.id: weighted(params_of(net), 1.0)})

    def aggregate(self, state: State, round: int, updates: Iterator[tuple[Selection, Update]]) -> State:
        for _ in updates:  # clients train as they are asked for their answers
            pass
        return state

    def _initial(self, capacity: float) -> Params:
        """What a client starts from. It draws it itself: the run's seed is all that it has to know."""
        state = self.init(self.task.seed)
        return self.window(state, 0, capacity).take(state["params"])
