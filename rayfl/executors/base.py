"""What runs jobs. `Serial` is the specification; every other executor is asserted equal to it, to the bit."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = tuple[Any, Any]
"""Nested tensors, which travel as flat buffers, and small plain things."""

Verb = Literal["train", "collect", "evaluate"]


@dataclass(frozen=True)
class Job:
    """One call of a worker's verb."""

    key: Hashable
    """What it shares with other jobs: they get the same message from `shared(key)`."""
    cost: float
    """Expected work, in any unit: the most expensive goes out first."""
    message: Callable[[], Message] = field(repr=False)
    """The job's own message, made when the job goes out."""
    about: str = ""
    """For people, when it fails."""


class Executor(ABC):
    @abstractmethod
    def map(self, verb: Verb, jobs: Sequence[Job], shared: Callable[[Hashable], Message]) -> Iterator[Message]:
        """The answers, in the order of `jobs`, whatever order they were worked out in. A failure is raised
        where its answer would have come. `shared` is called once a key."""

    def close(self) -> None:  # noqa: B027
        """Gives back what the executor holds."""
