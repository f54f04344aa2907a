"""What travels between the server and its workers, and what runs it. Everything here is data.

An executor maps a verb of a worker over jobs. `Serial` is the specification; every other executor is asserted equal to
it, to the bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from rayfl.core.fold import ClientState, Update
from rayfl.core.submodel import Selection
from rayfl.evaluation import Judged
from rayfl.methods.base import Client, Payload
from rayfl.training.settings import Fill

Verb = Literal["train", "refine", "collect", "evaluate"]
"""What a worker can do. Clients of one selection share a `Broadcast`; a refinement has a `ServerTask`; collections and
evaluations share a `Deployment`."""


@dataclass(frozen=True)
class Job:
    """One call of a worker's verb."""

    key: Hashable
    """What it shares with other jobs: they get the same message from `shared(key)`."""
    cost: float
    """Expected work, in multiply-adds of forward passes: the most expensive job goes out first."""
    make: Callable[[], Any] = field(repr=False)
    """The job's own message (`Train`, `Collect`, `Evaluate`), made when the job goes out."""
    about: str = ""
    """For people, when it fails."""
    branch: Hashable = None
    """Of training: jobs of one branch, which are neighbours, may be answered together (`Trained.size`)."""


class Executor(ABC):
    @abstractmethod
    def map(self, verb: Verb, jobs: Sequence[Job], shared: Callable[[Hashable], Any]) -> Iterator[Any]:
        """The answers, in the order of `jobs`, whatever order they were worked out in. A failure is raised
        where its answer would have come. `shared` is called once a key."""

    @property
    def workers(self) -> int:
        """How many jobs it works on at a time."""
        return 1


@dataclass(frozen=True)
class Broadcast:
    """What all clients of one selection are sent."""

    payload: Payload
    selection: Selection


@dataclass(frozen=True)
class Train:
    """Local updates of a chunk of clients with one selection."""

    clients: Sequence[Client]
    client_states: Mapping[int, ClientState]
    """Client -> what it kept, of those that kept something."""


@dataclass(frozen=True)
class Trained:
    """What the clients of a chunk answer."""

    update: Update | None
    """The sum of their updates, by `rayfl.core.fold.PairwiseSum`; None if all were refused."""
    size: int
    """How many clients `update` stands for: those of the chunk, or, with the last chunk of a branch, of the whole
    branch; 0: a later chunk's update stands for these too."""
    client_states: Mapping[int, ClientState]
    """Client -> what it keeps."""
    metrics: dict[str, float]
    """Sums over the chunk's clients."""
    refused: list[tuple[int, str]]
    """(client, reason) of updates that are not in `update`."""


@dataclass(frozen=True)
class Refine:
    """When a lesson is, and what its client keeps. The answer is a `ServerTaskResult`."""

    round: int
    client_state: ClientState | None = None


@dataclass(frozen=True)
class Collect:
    """Sums for the static norms of a network, over some clients' training data or over a span of the pooled data.

    The answer: norm -> [6, C] float64 (`norms.collect`).
    """

    batch_size: int
    clients: Sequence[int] = ()
    pooled: slice | None = None


@dataclass(frozen=True)
class Evaluate:
    """A network on pieces of splits."""

    split: str
    """One of `metrics.SPLITS`."""
    items: Sequence[Any]
    """Spans (slices) of a split that nobody owns; else clients."""
    batch_size: int
    fill: Fill = "none"
    """Logits of classes that a client does not have, on its own splits."""
    own: Collect | None = None
    """Given where the network is one client's own: where its norms' statistics come from, if it has none."""


@dataclass(frozen=True)
class Evaluated:
    """What a network got right on the n items of an `Evaluate`."""

    counts: torch.Tensor
    """Samples of each item, [n] int64."""
    sums: Mapping[str, torch.Tensor]
    """Score -> its sums of each item, [n, k]."""
    exits: tuple[torch.Tensor, ...] = ()
    """The first score's [n, k], of each early exit alone."""
    layers: Mapping[str, float] | None = None
    """Of a client's own masked network: the density of every masked layer."""

    @classmethod
    def of(cls, judged: Sequence[Judged], layers: Mapping[str, float] | None = None) -> "Evaluated":
        first = judged[0]
        return cls(
            torch.tensor([piece.count for piece in judged]),
            {name: torch.stack([piece.sums[name] for piece in judged]) for name in first.sums},
            tuple(torch.stack([piece.exits[i] for piece in judged]) for i in range(len(first.exits))),
            layers,
        )
