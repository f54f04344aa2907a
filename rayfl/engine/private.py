"""What a run with a `privacy:` section needs from its method: the public denominators, and groups that are clipped."""

from collections.abc import Callable, Hashable

import numpy as np
import torch

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.fold import State
from rayfl.core.tensors import Params
from rayfl.engine.checked import Checked
from rayfl.experiment import Experiment
from rayfl.methods.base import Client
from rayfl.training.privacy import ALLOWED


class PublicCover:
    """The denominators c_j of `rayfl.training.privacy`, computed anew only when the selections change."""

    def __init__(self, verbs: Checked, clients: Population):
        self.verbs, self.clients = verbs, clients
        self._last: tuple[dict[Hashable, int], Params] = {}, {}
        """Selection key -> number of clients, and the cover of these selections."""

    def of(self, state: State, round: int, capacities: Callable[[np.ndarray, int], np.ndarray]) -> Params:
        """Return parameter -> expected number of clients of a cohort that send each coordinate, over all clients.
        `capacities`: clients' capacities in a round."""
        ids, held = np.arange(self.clients.count), {}
        for id, capacity in zip(ids.tolist(), capacities(ids, round).tolist(), strict=True):
            selection = self.verbs.select(state, Client(id, capacity, round))
            held.setdefault(selection.key, [selection, 0])[1] += 1
        counts = {key: count for key, (_, count) in held.items()}
        if counts != self._last[0]:
            cover = {name: torch.zeros_like(t) for name, t in state["params"].items()}
            for selection, count in held.values():
                for name in self.verbs.extract(state, selection)["params"]:
                    selection.mark(name, count * self.clients.cohort / self.clients.count, cover[name])
            self._last = counts, cover
        return self._last[1]


def check_groups(experiment: Experiment) -> None:
    """Raise a ConfigError if clients send more groups of the state than the parameters, which are clipped."""
    verbs = Checked(experiment.bound())
    state = verbs.init()
    for capacity in experiment.clients.all_capacities:
        payload = verbs.extract(state, verbs.select(state, Client(0, capacity, 0)))
        if others := sorted(group for group in payload.keys() & state.keys() - {"params"} if payload[group]):
            raise ConfigError(
                f"privacy: clients of method {verbs.method.name} send {', '.join(others)}, which is not clipped. "
                f"{ALLOWED}"
            )
