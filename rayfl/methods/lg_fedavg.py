"""LG-FedAvg: some layers are averaged, the others stay with their client for ever.

Paper: Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
NeurIPS 2019 workshop on federated learning, https://arxiv.org/abs/2001.01523 (Algorithm 1; code: pliang279/LG-FedAvg).

Symbols: theta_g the shared layers, theta_k client k's own layers.

    theta_k, theta_g   start as a network that FedAvg trained (`warmup` rounds), the same for all clients
    a client           (theta_k, y_k)  =  SGD on its own data from (theta_k, theta_g), all layers together
    theta_g            <-  sum_k y_k / sum_k 1 over the cohort; everybody has it from then on

The authors' splits, as `shared`:

    model      | shared                  | parameters that travel
    liang_mlp  | hidden2, hidden3, head  | 99,978 of 633,226 (MNIST)
    liang_cnn  | conv1, conv2            | 2,872 of 64,102 (CIFAR-10)

    >>> from rayfl.methods import METHODS
    >>> METHODS["lg_fedavg"](shared=["conv1", "conv2"]).size
    'largest'

Departures:
1. The authors start from a checkpoint of FedAvg (of 400 to 1,800 rounds, the best on the test set); here its rounds
   are the first of the run, with the run's own training settings, and it is the last of them.
2. `shared` is a list of layers. In the code it is the last few of a list of weights, whose order makes the last
   layers the shared ones for MNIST (as the paper draws it) and the first ones for CIFAR-10.
3. The authors keep the network that is best on the test set for every client, and report the mean of these
   networks and their ensembles as the global one. Here a client runs its last one; `deploy` for nobody in
   particular gives theta_g with the layers that every client started from.
4. `size: own` is ours: theta_g is a holder mean over submodels of a capacity. A client's own layers fit one
   network, so that then its capacity has to stay the same.
"""

from typing import Literal, Self, cast

from pydantic import Field

from rayfl.axes import Dims, Layout
from rayfl.config import ConfigError, nearest
from rayfl.methods.base import Client, Payload, State, Task, Update
from rayfl.methods.width import PersonalMethod
from rayfl.models.base import params_of
from rayfl.submodel import Selection, prefix
from rayfl.tensors import Params, nbytes
from rayfl.training import ClientData, weighted


class LGFedAvg(PersonalMethod):
    name: Literal["lg_fedavg"] = "lg_fedavg"
    shared: tuple[str, ...] | None = Field(default=None, min_length=1)
    """The layers that are averaged, by path: a layer ("conv1") or all layers below it ("stage1"). Unless given
    the classifier, as the paper draws it: local representations, one global head."""
    warmup: int = Field(default=0, ge=0)
    """Rounds of FedAvg of all layers, before clients keep any."""

    def bind(self, task: Task) -> Self:
        names = task.layout(task.server).dims
        for path in self.shared or ():
            if not any(_is_below(name, path) for name in names):
                layers = dict.fromkeys(name.rpartition(".")[0] for name in names)
                raise ConfigError(f"method.shared: no layer is called {path!r}; {nearest(path, layers)}")
        return super().bind(task)

    def check(self, rounds: int) -> None:
        if self.warmup >= rounds:
            raise ValueError(f"method.warmup: given {self.warmup}; allowed: fewer than the run's {rounds} rounds")

    def select(self, state: State, round: int, client: Client, seed: int) -> Selection:
        everything = self.window(state, round, client.capacity)
        if round < self.warmup:
            return everything
        whole, part = everything.whole, everything.part
        names = [name for name, dims in part.dims.items() if self._is_shared(name, dims)]
        shared = Layout({name: part.dims[name] for name in names}, {name: part.shapes[name] for name in names})
        return prefix(whole, shared, everything.net)

    def _is_shared(self, name: str, dims: Dims) -> bool:
        if self.shared is None:
            return dims[0] == self.task.model.labels
        return any(_is_below(name, path) for path in self.shared)

    def extract(self, state: State, selection: Selection) -> Payload:
        """`start`: the other layers, for clients that have none of their own yet."""
        whole, part = self.task.layout(self.task.server), self.task.layout(selection.net)
        everything = prefix(whole, part, selection.net).take(state["params"])
        params = selection.take(state["params"])
        return {"params": params, "start": {name: t for name, t in everything.items() if name not in params}}

    def local_update(
        self, payload: Payload, selection: Selection, client: Client, data: ClientData, round: int, seed: int
    ) -> Update:
        shared, kept = payload["params"], cast(Params, client.carry or {})
        net = self.network(shared | payload.get("start", {}) | kept, selection.net, data)
        update = self.answer(net, selection, data, self.train(net, data, round, seed))
        update.metrics["bytes_down"] = nbytes(shared if kept else payload)
        own = {name: t for name, t in params_of(net).items() if name not in shared}
        if own:
            update.carries[client.id] = weighted(own, 1.0)
        for name in own:
            del update.sums["params"][name]
            update.held.pop(name, None)
        return update


def _is_below(name: str, path: str) -> bool:
    """Whether a parameter belongs to the layer at a path, or to one inside it."""
    return name == path or name.startswith(f"{path}.")
