"""Clients of a round, by selection, and their division into jobs."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rayfl.core.fold import aligned
from rayfl.core.net import Net
from rayfl.core.submodel import Selection
from rayfl.methods.base import Client
from rayfl.training import stacked
from rayfl.training.settings import Training

JOBS = 3
"""Jobs per worker and round, if there are enough clients: workers then finish at about the same time."""
JOB_MACS = 5e7
"""Smallest job worth a message, in multiply-adds of forward passes: about 20 ms of training on one core."""
STEP_MACS = 1e7
"""What a step takes beside its own multiply-adds, in multiply-adds: the calls of its operations, measured with a small
CNN. Clients that train side by side share it."""
BRANCH = 8
"""Jobs that a node sums before the sum crosses the network."""

Cohort = dict[tuple[int, Hashable], tuple[Selection, list[Client]]]
"""(version of the model, selection key) -> the selection and its clients, ids ascending. Stale clients, if they are
compared: (version, (selection key, client))."""


@dataclass(frozen=True)
class Chunk:
    """Clients of one selection that form one job."""

    key: tuple[int, Hashable]
    """Key in the cohort."""
    clients: list[Client]
    cost: float
    """Multiply-adds of forward passes, and `STEP_MACS` of steps."""
    branch: Hashable
    """Branch of the job."""
    together: int
    """Consecutive clients that train side by side."""


@dataclass(frozen=True)
class Division:
    """Division of a cohort into jobs."""

    training: Training
    sizes: np.ndarray
    """Samples of every client."""
    workers: int
    most: int | Literal["auto"]
    """Clients per job (`run.chunk`)."""
    together: Callable[[Net], int]
    """Number of clients with a network that train side by side."""

    def chunks(self, cohort: Cohort) -> list[Chunk]:
        """Return the clients of every job: aligned parts of a selection's pairwise sum, so that its bits do not depend
        on their sizes. Large networks come first, in the order of submission, so that no answer waits."""
        chunks, visits = [], sum(len(clients) for _, clients in cohort.values())
        for key, (selection, clients) in sorted(cohort.items(), key=lambda item: -item[1][0].net.macs):
            group = self.together(selection.net) if len(clients) >= stacked.LEAST else 1
            # jobs are whole groups, so that groups do not depend on the workers
            parts = list(aligned(len(clients), max(group, self._most(selection.net, clients, group, visits))))
            branch = BRANCH * (parts[0].stop - parts[0].start)
            for part in parts:
                cost = self._cost(selection.net, clients[part], group)
                chunks.append(Chunk(key, clients[part], cost, (key, part.start // branch), group))
        return chunks

    def _most(self, net: Net, clients: list[Client], group: int, cohort: int) -> int:
        """Return the clients per job: enough jobs to keep all workers busy, but none smaller than `JOB_MACS`."""
        if self.most != "auto":
            return self.most
        cost = self._cost(net, clients, group) / len(clients)
        worthwhile = min(JOB_MACS / (cost or 1.0), cohort / self.workers)
        return max(1, cohort // (JOBS * self.workers), math.ceil(worthwhile))

    def _cost(self, net: Net, clients: list[Client], group: int) -> float:
        """Return what the clients' round takes, in multiply-adds of forward passes."""
        sizes = self.sizes[[client.id for client in clients]]
        samples, steps = (int(count(sizes).sum()) for count in (self.training.samples_of, self.training.batches_of))
        return samples * net.macs + steps * STEP_MACS / group
