"""What a run with a `privacy:` section needs from its method: the public denominators, and groups that are clipped."""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.fold import State
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params
from rayfl.engine.checked import Checked
from rayfl.experiment import Experiment
from rayfl.methods.base import Client
from rayfl.training.privacy import ALLOWED


class Noting(Client):
    """A client that notes whether more than its capacity and round is read."""

    was_identified = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("id", "label_set"):
            object.__setattr__(self, "was_identified", True)
        return super().__getattribute__(name)


class PublicCover:
    """The denominators c_j of `rayfl.training.privacy`, computed anew only when the selections change. Selections that
    depend on capacity and round only are found once per capacity."""

    def __init__(self, verbs: Checked, clients: Population):
        self.verbs, self.clients = verbs, clients
        self._last: tuple[dict[Hashable, int], Params] = {}, {}
        """Selection key -> number of clients, and the cover of these selections."""

    def of(self, state: State, round: int, capacities: Callable[[np.ndarray, int], np.ndarray]) -> Params:
        """Return parameter -> expected number of clients of a cohort that send each coordinate, over all clients.
        `capacities`: clients' capacities in a round."""
        found: dict[Hashable, Selection] = {}
        counts: Counter[Hashable] = Counter()
        all_capacities = capacities(np.arange(self.clients.count), round)
        for capacity in dict.fromkeys(all_capacities.tolist()):
            ids = np.flatnonzero(all_capacities == capacity).tolist()
            first = Noting(ids[0], capacity, round)
            selections = [self.verbs.select(state, first)]
            if first.was_identified:
                selections += [self.verbs.select(state, Client(id, capacity, round)) for id in ids[1:]]
            for selection in selections:
                found.setdefault(selection.key, selection)
                counts[selection.key] += 1 if first.was_identified else len(ids)
        if counts != self._last[0]:
            cover = {name: torch.zeros_like(t) for name, t in state["params"].items()}
            for key, selection in found.items():
                sent = self.verbs.extract(state, selection)["params"]
                for name in sent.keys() - self.verbs.method.withheld(selection.net):
                    selection.mark(name, counts[key] * self.clients.cohort / self.clients.count, cover[name])
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
