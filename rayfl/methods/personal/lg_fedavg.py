"""LG-FedAvg: some layers are averaged, the others stay on their client.

Paper: Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
NeurIPS 2019 workshop on federated learning, https://arxiv.org/abs/2001.01523 (Algorithm 1; code: pliang279/LG-FedAvg).

Symbols: theta_g the shared layers, theta_k client k's own layers.

    theta_k, theta_g   start from a network trained by FedAvg (`warmup` rounds), equal for all clients
    a client           (theta_k, y_k)  =  SGD on its own data from (theta_k, theta_g), all layers together
    theta_g            <-  sum_k y_k / sum_k 1 over the cohort, used by all clients

The authors' splits, as `shared`:

    model      | shared                  | parameters sent
    liang_mlp  | hidden2, hidden3, head  | 99,978 of 633,226 (MNIST)
    liang_cnn  | conv1, conv2            | 2,872 of 64,102 (CIFAR-10)

Departures:
1. The authors start from a FedAvg checkpoint (of 400 to 1,800 rounds, the best on the test set). Here the FedAvg
   rounds are the first rounds of the run, with its training settings, and clients start from their last network.
2. `shared` is a list of layers. In the code it is the tail of a list of weights, whose order shares the last layers
   for MNIST (as in the paper's figure) and the first layers for CIFAR-10.
3. The authors select every client's best network on the test set, and report the mean of these networks and their
   ensemble as global results. Here a client uses its last network; the global network is theta_g with the layers that
   every client started from.
4. `size: own` is ours: theta_g is a holder mean over submodels. A client's own layers fit one network, so its capacity
   is fixed.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, cast

from pydantic import Field

from rayfl.clients import Population
from rayfl.config import ConfigError, nearest
from rayfl.core.fold import State, Update
from rayfl.core.net import Net, params_of
from rayfl.core.submodel import Selection, prefix
from rayfl.core.tensors import Params, copied, nbytes
from rayfl.methods.base import Client, Payload, Task, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.methods.sizes import Size, fixed_capacities, same


class LGFedAvg(Dense):
    judged_on: ClassVar = "clients"
    contract: ClassVar = Contract(fedavg={"warmup": 2}, traffic=lambda whole, head: (whole, head))

    name: Literal["lg_fedavg"] = "lg_fedavg"
    size: Size = "largest"
    """largest, smallest: one network for all. own: every client has the network of its fixed capacity."""
    shared: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Averaged layers, by path: a layer ("conv1") or all layers below it ("stage1"). Default: the classifier, as in the
    paper's figure (local representations, one global head)."""
    warmup: int = Field(default=0, ge=0)
    """Number of initial rounds in which all layers are averaged (FedAvg)."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return same(task, self.size)

    def check(self, rounds: int, clients: Population) -> None:
        names = self.task.server.layout.dims
        for path in self.shared or ():
            if not any(_is_below(name, path) for name in names):
                layers = dict.fromkeys(name.rpartition(".")[0] for name in names)
                raise ConfigError(f"method.shared: unknown layer {path!r}. {nearest(path, layers)}")
        if self.warmup >= rounds:
            raise ConfigError(
                f"method.warmup: {self.warmup} is not valid. Allowed: fewer than the run's {rounds} rounds"
            )
        fixed_capacities(self.name, self.task.nets, clients, "method.size: smallest or largest")

    def select(self, state: State, client: Client) -> Selection:
        everything = self.submodel(state, client.round, client.capacity)
        if client.round < self.warmup:
            return everything
        return replace(everything, names=self._shared(everything.net))

    def _shared(self, net: Net) -> tuple[str, ...]:
        """Return the names of the averaged parameters."""
        if self.shared is None:
            return net.layout.classifier
        return tuple(name for name in net.layout.dims if any(_is_below(name, path) for path in self.shared))

    def extract(self, state: State, selection: Selection) -> Payload:
        """Return the shared layers, and as `start` the others, for clients without layers of their own."""
        params = selection.take(state["params"])
        everything = prefix(self.task.server, selection.net).take(state["params"])
        return {"params": params, "start": {name: t for name, t in everything.items() if name not in params}}

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        shared, own = payload["params"], cast(Params, (visit.client_state or {}).get("own", {}))
        module = self.module(visit, shared | payload["start"] | own)
        metrics = self.fit(module, visit)
        metrics["bytes_down"] = nbytes(shared if own else payload)
        trained = params_of(module)
        update = self.answer(trained, {"params": shared}, visit, metrics)
        if new := {name: t for name, t in trained.items() if name not in shared}:
            update.client_states[visit.client.id] = {"own": copied(new)}
        return update


def _is_below(name: str, path: str) -> bool:
    """Return whether a parameter belongs to the layer at a path or to one inside it."""
    return name == path or name.startswith(f"{path}.")
