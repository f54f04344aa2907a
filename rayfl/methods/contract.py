"""Properties of a method that its contract suite (`rayfl.testing`) checks. The core does not read them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Traffic = Callable[[int, int], tuple[int, int]]


def once(whole: int, head: int) -> tuple[int, int]:
    """Return the traffic of a method that sends the client's network once down and once up."""
    return whole, whole


@dataclass(frozen=True)
class Contract:
    """A method's `contract`. The defaults describe a method that averages its clients' networks."""

    wants: Literal["", "exits", "blocks", "adapters", "networks", "features", "extractors"] = ""
    """Required property of a model: early exits, residual blocks or low-rank adapters. For methods of different
    networks, which have their own suite: any networks (`networks`), networks whose classifiers read equally many
    features (`features`), or networks with equal extractors (`extractors`)."""
    short: Mapping[str, Any] = field(default_factory=dict)
    """Options that make a round short."""
    clients: Mapping[str, Any] = field(default_factory=dict)
    """Required settings of the `clients:` section."""
    mean: str = "params"
    """Group of the state that is a mean over clients."""
    answers: str = "params"
    """Group of the updates that is averaged into `mean`."""
    over: Literal["holders", "all", "products"] = "holders"
    """Denominator of the mean: clients that hold the coordinate, or all clients (missing values count as 0). products:
    the mean of products of factors, whose factorisation is free."""
    exact: bool = True
    """True if a client that does not train returns exactly what it received; False if updates are random."""
    plain: Mapping[str, Any] = field(default_factory=dict)
    """Options with which `step` only averages, and a client receives exactly one network."""
    averages: bool = True
    """False if `step` does more than average the group `answers` with all options, e.g. because it also reads other
    groups of the updates."""
    fedavg: Mapping[str, Any] | None = field(default_factory=dict)
    """Options that make the method equal FedAvg with uniform weights, bit for bit, if all clients have the largest
    capacity; None: none do."""
    fedavg_rounds: int = 2
    """Number of rounds for which it then equals FedAvg."""
    traffic: Traffic = once
    """Function of the sizes of a client's network and of its classifier that returns how many numbers the client
    receives and sends in its first round: `lambda whole, head: (whole, whole - head)`. Without statistics of norms."""
    counted: Literal["classifier", "norms"] = "classifier"
    """Part of the network whose size `traffic` receives, besides that of the whole network."""
