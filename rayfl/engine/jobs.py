"""Messages between the server and its workers, and the interface of executors.

An executor maps a verb of a worker over jobs. `Serial` is the specification; tests compare every other executor with it
bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from rayfl.core.fold import ClientState, Update
from rayfl.core.submodel import Selection
from rayfl.data.scores import Texts
from rayfl.evaluation import Judged
from rayfl.methods.base import Client, Payload
from rayfl.training.secure import Protection
from rayfl.training.settings import Fill

Verb = Literal["train", "refine", "collect", "evaluate"]
"""Verbs of a worker. Shared message: training `Broadcast` (one selection), refinement `ServerTask`, collection and
evaluation `Deployment`, or of personal networks one per client."""


@dataclass(frozen=True)
class Job:
    """One call of a worker's verb."""

    key: Hashable
    """Key of the shared message, `shared(key)`."""
    cost: float
    """Expected multiply-adds of forward passes. The most expensive job is submitted first."""
    make: Callable[[], Any] = field(repr=False)
    """Makes the job's own message (`Train`, `Collect`, `Evaluate`) when it is submitted."""
    about: str = ""
    """Description for error messages."""
    branch: Hashable = None
    """Training only: consecutive jobs of one branch may be answered together (`Trained.size`)."""


class Executor(ABC):
    @abstractmethod
    def map(self, verb: Verb, jobs: Sequence[Job], shared: Callable[[Hashable], Any]) -> Iterator[Any]:
        """Yield the answers in the order of `jobs`. A failure is raised in place of its answer. `shared` is called once
        per key."""

    @property
    def workers(self) -> int:
        """Number of jobs in progress at the same time."""
        return 1


@dataclass(frozen=True)
class Broadcast:
    """Message to all clients of one selection."""

    payload: Payload
    selection: Selection
    protection: Protection = Protection()
    """Clipping or secure aggregation of the changes."""


@dataclass(frozen=True)
class Train:
    """Local updates of a chunk of clients with one selection."""

    clients: Sequence[Client]
    client_states: Mapping[int, ClientState]
    """Client -> its state, of clients that have one."""
    together: int = 1
    """Consecutive clients that train side by side."""


@dataclass(frozen=True)
class Trained:
    """Answer of a chunk of clients."""

    update: Update | None
    """The sum of their updates, by `rayfl.core.fold.PairwiseSum`; None if all were refused."""
    size: int
    """Number of clients in `update`: the chunk's or, with the last chunk of a branch, the whole branch's; 0 if a later
    chunk's update includes them."""
    client_states: Mapping[int, ClientState]
    """Client -> its new state."""
    metrics: dict[str, float]
    """Sums over the chunk's clients."""
    losses: Mapping[int, float]
    """Client -> mean training loss, of updates that were not refused."""
    refused: list[tuple[int, str]]
    """(client, reason) of updates left out of `update`."""


@dataclass(frozen=True)
class Refine:
    """Round of a server task, and the states of its clients. The answer is a `ServerTaskResult`."""

    round: int
    client_states: Mapping[int, ClientState] = field(default_factory=dict)
    """Client -> its state, of clients that have one."""


@dataclass(frozen=True)
class Collect:
    """Sums for the static norms of a network over batches of training samples.

    The answer is norm -> [6, C] float64 (`norms.collect`).
    """

    rows: np.ndarray
    """Rows of the training set [n] int32."""
    sizes: Sequence[int]
    """Sizes of the batches, consecutive parts of `rows`."""
    augmented: int | None = None
    """Seed address of the augmentation. None: not augmented."""


@dataclass(frozen=True)
class Evaluate:
    """Evaluation of a network on parts of a split, or of clients' personal networks on theirs."""

    split: str
    """One of `metrics.SPLITS`."""
    items: Sequence[Any]
    """Slices of a shared split, clients, or parts of a score's own samples."""
    batch_size: int
    """Samples per forward pass."""
    statistics_batch: int
    """Samples per forward pass of networks whose norms lack statistics."""
    fill: Fill = "none"
    """Logits of classes that a client lacks, on its own splits."""
    own: Sequence[Sequence[Collect]] | None = None
    """For personal networks of the clients `items`: the data that statistics are collected from, if they have none."""
    score: int | None = None
    """Number of the score whose own samples `items` are. Default: they are of the split."""


@dataclass(frozen=True)
class Evaluated:
    """Scores of a network on the n items of an `Evaluate`."""

    counts: torch.Tensor
    """Samples per item, [n] int64."""
    sums: Mapping[str, torch.Tensor]
    """Score -> sums per item, [n, k]."""
    exits: tuple[torch.Tensor, ...] = ()
    """Per early exit, the first score's sums [n, k]."""
    layers: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Client -> density of every masked layer of its personal masked network."""
    texts: Mapping[str, list[Texts]] = field(default_factory=dict)
    """Score -> texts of some samples of the first item."""

    @classmethod
    def of(cls, judged: Sequence[Judged], layers: Mapping[int, Mapping[str, float]]) -> "Evaluated":
        first = judged[0]
        return cls(
            torch.tensor([piece.count for piece in judged]),
            {name: torch.stack([piece.sums[name] for piece in judged]) for name in first.sums},
            tuple(torch.stack([piece.exits[i] for piece in judged]) for i in range(len(first.exits))),
            layers,
            first.texts,
        )
