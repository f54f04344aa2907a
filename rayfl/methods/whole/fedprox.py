"""FedProx: FedAvg with a proximal term, and with partial work of stragglers.

Paper: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020,
https://arxiv.org/abs/1812.06127 (Algorithm 2).

Symbols: $F_k$ client $k$'s loss, $n_k$ its number of samples, $x$ the parameters it received, $E$ the epochs per round.

    $h_k(w)$      $= F_k(w) + mu/2 |w - x|^2$
    $y_k$         SGD from $x$ on $h_k$, every gradient $+ mu (w - x)$, for $E$ epochs; a straggler: $1 ... E$ epochs,
                uniformly drawn
    $x$           $<- (sum_k n_k y_k)/(sum_k n_k)$

Cost per round: the network down and up, the client's training, one sum on the server.

Departures:
1. Cohorts are uniform and the mean is weighted by samples, as in the authors' code. Algorithm 2 draws client k with
   probability n_k / n and weights all clients equally.
2. A straggler draws 1 ... E epochs, as in the paper; the code draws 1 ... E - 1.
3. Each client of a round is a straggler with probability `stragglers`, independently; the code uses an exact share.
4. With `training.steps`, a straggler draws 1 ... steps steps.
5. Submodels (`size: own`) are not in the paper: x is then the client's part of the global parameters.
6. `training.clip` bounds the gradient of h_k, including the proximal term.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.fold import Update
from rayfl.core.net import Net
from rayfl.core.seeds import numpy_generator
from rayfl.methods.base import Payload, Task, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense, pull
from rayfl.methods.sizes import Size, same
from rayfl.training.settings import Training


class FedProx(Dense):
    contract: ClassVar = Contract(fedavg={"mu": 0})

    name: Literal["fedprox"] = "fedprox"
    weight: Literal["samples", "uniform"] = "samples"
    size: Size = "largest"
    """Network: that of the largest or of the smallest capacity for all, or that of each client's own capacity."""
    mu: float = Field(default=0.01, ge=0)
    """Strength of the proximal term. The paper uses the best of 0.001, 0.01, 0.1 and 1."""
    stragglers: float = Field(default=0.0, ge=0, le=1)
    """Probability that a client of a round does partial work (paper: 0, 0.5 and 0.9)."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return same(task, self.size)

    def check(self, rounds: int, clients: Population) -> None:
        training = self.task.training
        if self.stragglers and (training.steps or training.epochs) == 1:
            raise ConfigError(
                f"method.stragglers: {self.stragglers:g} is not valid. Allowed: 0, because a round has only one epoch "
                "or step. Hint: increase training.epochs or training.steps"
            )

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        received = {name: t.to(visit.data.device) for name, t in payload["params"].items()}
        return self.trained(payload, visit, training=self.work(visit.seed), adjust=pull(received, self.mu))

    def work(self, seed: int) -> Training:
        """Return the task's training, or a straggler's part of it. `seed`: the client's seed in this round."""
        training = self.task.training
        field = "epochs" if training.steps is None else "steps"
        whole = getattr(training, field)
        draw = numpy_generator(seed, "straggler")
        if draw.random() >= self.stragglers or whole == 0:
            return training
        return training.model_copy(update={field: int(draw.integers(1, whole, endpoint=True))})
