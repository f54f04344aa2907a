"""What a method says of itself to its contract suite (`rayfl.testing`), and to nobody else: the core never reads it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Traffic = Callable[[int, int], tuple[int, int]]


def once(whole: int, head: int) -> tuple[int, int]:
    """Down and up, the client's network once."""
    return whole, whole


@dataclass(frozen=True)
class Contract:
    """A method's `contract`. The defaults are those of a method that averages its clients' networks."""

    wants: Literal["", "exits", "blocks", "adapters", "networks", "features", "extractors"] = ""
    """What a model must have: early exits, residual blocks, or low-rank adapters. Methods of unequal networks have a
    suite of their own; networks: capacities may stand for any; features: for any whose classifiers read equally many
    features; extractors: for any with equal extractors."""
    short: Mapping[str, Any] = field(default_factory=dict)
    """Options with which a round of it is short."""
    clients: Mapping[str, Any] = field(default_factory=dict)
    """What the `clients:` section must say."""
    mean: str = "params"
    """The group of the state that is a mean over clients."""
    answers: str = "params"
    """What answers call the group that it is the mean of."""
    over: Literal["holders", "all", "products"] = "holders"
    """What that is a mean over: the holders of a coordinate; all clients, who count as 0 where they do not hold it; or
    products of factors, which the server may then turn as it likes."""
    exact: bool = True
    """Whether a client that trains nothing sends what it was sent; false where an answer is drawn."""
    plain: Mapping[str, Any] = field(default_factory=dict)
    """Options with which `step` takes the mean and does nothing else, and a client gets one network and no more."""
    fedavg: Mapping[str, Any] | None = field(default_factory=dict)
    """Options that make it FedAvg, to the bit, where all clients have the largest capacity; None: there are none."""
    fedavg_rounds: int = 2
    """Rounds for which it then is FedAvg."""
    traffic: Traffic = once
    """Numbers that a client is sent and sends in its first round, from those of its network and of its classifier:
    `lambda whole, head: (whole, whole - head)`. Statistics of norms come on top."""
