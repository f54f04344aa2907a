"""What a run with a `privacy:` section needs from its method: the public denominators, and groups that are clipped."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.fold import State
from rayfl.core.net import Net
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


def public_cover(
    verbs: Checked, clients: Population, state: State, round: int, capacities: Callable[[np.ndarray, int], np.ndarray]
) -> Params:
    """Return the denominators c_j of `rayfl.training.privacy`: parameter -> expected number of clients of a cohort that
    send each coordinate, over all clients. `capacities`: clients' capacities in a round. Selections that depend on
    capacity and round only are found once per capacity."""
    # whole numbers, exact in float32
    counts = {name: torch.zeros_like(t) for name, t in state["params"].items()}
    names: dict[Net, list[str]] = {}

    def count(selection: Selection, number: int) -> None:
        net = selection.net
        if net not in names:
            sent = verbs.extract(state, selection)["params"]
            names[net] = sorted(sent.keys() - verbs.method.withheld(net))
        for name in names[net]:
            selection.mark(name, number, counts[name])

    all_capacities = capacities(np.arange(clients.count), round)
    for capacity in dict.fromkeys(all_capacities.tolist()):
        first, *others = np.flatnonzero(all_capacities == capacity).tolist()
        client = Noting(first, capacity, round)
        selection = verbs.select(state, client)
        count(selection, 1 if client.was_identified else 1 + len(others))
        for id in others if client.was_identified else ():
            count(verbs.select(state, Client(id, capacity, round)), 1)
    return {name: t.mul_(clients.cohort / clients.count) for name, t in counts.items()}


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
