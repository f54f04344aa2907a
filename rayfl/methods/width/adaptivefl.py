"""AdaptiveFL: a pool of networks that cut channels from a layer on; clients train what is drawn from it and fits.

Paper: Jia, Hu, Chen, Yang, Xie, Liu, Chen, "AdaptiveFL: Adaptive Heterogeneous Federated Learning for
Resource-Constrained AIoT Systems", DAC 2024, https://arxiv.org/abs/2311.13166. Read: the abstract, and the authors'
code (https://github.com/mastlab-T3S/AdaptiveFL: `Training_AdaptiveFL.py`, `HeteroClients.py`, `Fed.py`, `vgg.py`),
which the equations follow.

Symbols: $K$ the width of an axis in the server's network of $L$ layers, $r$ the width of a capacity, $I$ the first cut
layer, $n_k$ a client's number of samples, $x$ the global parameters.

    $N(r, I)$     all positions of the first $I$ axes, and positions $0 ... ceil(r K) - 1$ of the others (`make_layers`)
    pool        $N(r, I)$ for every capacity below the server's and every $I$ in `starts`, by $r$, then by $I$; then the
                server's network (`get_model_list`: 2 x 3 + 1 networks)
    $d_k$         uniform draw from the pool, for every client and round (`ration_users`)
    $S_k$         $d_k$ if it fits, otherwise the largest network of the pool that fits (`HeteroClients.train`)
    $y_k$         SGD from $S_k x$ on cross-entropy
    $x$           $<- (sum_k n_k S_k^T y_k)/(sum_k n_k S_k^T 1)$, elsewhere unchanged (`Aggregation_AdaptiveFL`)

Cost per round: $S_k x$ down and $y_k$ up, the client's training, one sum on the server.

Networks of a capacity fit its clients and all larger ones.

Departures:
1. The paper chooses the client for each d_k by reinforcement learning, because its server does not know what clients
   have available. Here the server knows capacities, so that nothing is left to learn, and cohorts are chosen by the
   run, without a look at d_k. `pool` is the code's setting `random`, `largest` its `greedy`; `fitting` draws from the
   networks that fit, as its `available`, but with equal frequencies for a client, not in the population.
2. A client receives S_k, not the network d_k that it then prunes, for the same reason: bytes down are lower.
3. Availability that changes is `clients.assignment: dynamic`, with as many capacities as needed; the code draws it
   from normal distributions.
4. A capacity's width is the largest at which its network with the largest I fits (by `clients.metric`), but at most the
   server's; the code lists widths, 0.4 and 0.66. Layers are counted by axes, in the order of the parameters, and one
   for the classifier: layers that are added have one axis. A VGG16 has 16, and I = 4, 6 and 8, as in the code.
5. Sizes are ceil(r K); the code has floor.
6. Hugging Face's networks have one width for all layers, so that `starts` must be [0].
7. Norms are static: statistics are collected before an evaluation. The code's use the test batch's.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rayfl import costs
from rayfl.config import ConfigError
from rayfl.core.fold import State
from rayfl.core.net import Net
from rayfl.core.seeds import numpy_generator
from rayfl.core.submodel import Selection, prefix
from rayfl.methods.base import Client, Task
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense


class AdaptiveFL(Dense):
    contract: ClassVar = Contract(plain={"dispatch": "largest"})

    name: Literal["adaptivefl"] = "adaptivefl"
    scaler: Literal[False] = False
    """Not supported: the first layers of a network are not cut."""
    weight: Literal["samples", "uniform"] = "samples"
    starts: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(default=(0.25, 0.375, 0.5), min_length=1)
    """First cut layers I, as fractions of the L layers: I = floor(start * L). Every capacity has a network for each."""
    dispatch: Literal["pool", "fitting", "largest"] = "pool"
    """Network of a client in a round. pool: drawn from the pool, or the largest that fits if it is larger. fitting:
    drawn from those that fit. largest: the largest that fits."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        server = task.nets[task.server_capacity]
        first = Net(task.model, sizes=_whole(server, max(self.starts)))
        try:
            _ = replace(first, width=0.5).layout
        except ValueError:
            raise ConfigError(
                f"method.starts: {list(self.starts)} is not valid, because all layers of model {task.model.name} have "
                "one width. Allowed: [0], or another model"
            ) from None
        nets = {c: replace(first, width=costs.width_for(first, c, task.metric)) for c in task.nets}
        return {c: net if c < task.server_capacity and net.width < server.width else server for c, net in nets.items()}

    def pool(self, capacity: float) -> list[Net]:
        """Return the distinct networks of the pool that fit a capacity, smallest first."""
        server, starts, found = self.task.server, sorted(self.starts), []
        for c in sorted(self.task.nets):
            if c <= capacity:
                net = self.task.nets[c]
                own = [net] if net == server else [replace(net, sizes=_whole(server, start)) for start in starts]
                found += own
        return list(dict.fromkeys(found))

    def select(self, state: State, client: Client) -> Selection:
        fitting = self.pool(client.capacity)
        drawn = len(fitting) - 1
        if self.dispatch != "largest":
            some = self.pool(self.task.server_capacity) if self.dispatch == "pool" else fitting
            generator = numpy_generator(self.task.seed, "width", client.round, client.id)
            drawn = min(int(generator.integers(len(some))), drawn)
        return prefix(self.task.server, fitting[drawn])


def _whole(server: Net, start: float) -> tuple[tuple[str, int], ...]:
    """Return the axes of the first layers, floor(start * L), with their sizes in the server's network."""
    axes = list(server.layout.axes.values())
    return tuple((axis.name, axis.size) for axis in axes[: math.floor(start * (len(axes) + 1) + 1e-9)])
