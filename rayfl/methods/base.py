"""What every published way of doing model-heterogeneous federated learning has to say (DESIGN section 4).

Which part does a client train (`select`, `extract`), how (`local_update`), how are the parts put together
(`aggregate`), and what does a device run in the end (`deploy`). The verbs are pure: state comes in and goes
out, nothing is stored on `self`, every random draw takes its address from `seed`.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, cast

from pydantic import ConfigDict, Field, SkipValidation

from rayfl import costs
from rayfl.axes import Layout, Net
from rayfl.config import Config
from rayfl.models.base import Model, layout
from rayfl.submodel import Selection
from rayfl.tensors import Params, Tensors
from rayfl.training import Answer, ClientData, Training

State = dict
"""Tensors and nested dicts of tensors: checkpointed as it is."""

Payload = dict
"""What travels down to a client, nested dicts of tensors: counted in bytes. Read only on the worker."""


@dataclass(frozen=True, eq=False)
class Affordable(Mapping[float, Net]):
    """Capacity -> the widest network that it buys, which is found when it is asked for."""

    model: Model
    metric: costs.Metric
    capacities: tuple[float, ...]

    def __getitem__(self, capacity: float) -> Net:
        return Net(costs.width_for(self.model, capacity, self.metric))

    def __contains__(self, capacity: object) -> bool:
        return capacity in self.capacities

    def __iter__(self) -> Iterator[float]:
        return iter(self.capacities)

    def __len__(self) -> int:
        return len(self.capacities)


@dataclass(frozen=True)
class Task:
    """What a method is applied to; the same for all methods of a comparison."""

    model: Model
    training: Training
    nets: Mapping[float, Net]
    """Capacity -> the network that a device of this capacity runs, largest first."""
    server_capacity: float
    """Capacity of the global model; the largest unless the server is wider than every client."""
    clients: int
    """Number of clients in the population."""
    metric: costs.Metric = "width"
    """What a capacity is a share of."""
    seed: int = 0
    """The run's seed: for draws that no verb is given a seed for."""

    @property
    def server(self) -> Net:
        return self.nets[self.server_capacity]

    def layout(self, net: Net) -> Layout:
        return layout(self.model, net)

    def everywhere(self, net: Net) -> Self:
        """The same task, where devices of all capacities run one network."""
        return replace(self, nets=dict.fromkeys(self.nets, net))


@dataclass(frozen=True)
class Client:
    """One client in one round."""

    id: int
    capacity: float
    carry: Tensors | None = None
    """What the client kept from its last round, or None; read only."""


@dataclass
class Update:
    """What clients of one selection send back. Everything adds: workers fold before they answer."""

    sums: dict[str, Params]
    """Group ("params", ...) -> name -> sum of weight_k * value_k, in submodel coordinates. What it does not
    name was not held. Read only in `aggregate`."""
    weight: float
    """Sum of the clients' weights."""
    held: Params = field(default_factory=dict)
    """Where clients hold different rows: name -> sum of their weights, broadcastable to the submodel's tensor."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Sums over clients: train_samples, train_loss (over samples), and whatever a method counts. bytes_down,
    bytes_up and train_flops replace what the worker counts by the tensors' sizes and the network's MACs."""
    carries: dict[int, Tensors] = field(default_factory=dict)
    """Client id -> what it keeps for its next round."""

    def add(self, other: "Update") -> None:
        """Folds another update of the same selection into this one, in place."""
        for group, params in other.sums.items():
            mine = self.sums.setdefault(group, {})
            for name, t in params.items():
                mine[name] = mine[name].add_(t) if name in mine else t
        for name, t in other.held.items():
            self.held[name] = self.held[name] + t if name in self.held else t
        self.weight += other.weight
        add_metrics(self.metrics, other.metrics)
        self.carries |= other.carries


def add_metrics(totals: dict[str, float], metrics: Mapping[str, float]) -> None:
    """Adds to `totals`, in place."""
    for name, value in metrics.items():
        totals[name] = totals.get(name, 0) + value


@dataclass(frozen=True)
class Deployment:
    """A network and its parameters, as a device runs it: `model.build(net)` with `params` loaded."""

    key: Hashable
    """Equal keys mean equal deployments of one state: what need not be evaluated twice."""
    model: Model
    net: Net
    params: Params
    statistics: Params | None = None
    """The norms' own statistics, by the names of `norms.finish`; collected before an evaluation unless given."""
    answer: Answer = "last"
    """Which of a network's early exits count, if it has some: the last, or the mean of all their logits."""
    masked: tuple[str, ...] = ()
    """Parameters of which only what is not 0 is there: what it costs is counted from that."""

    @property
    def held(self) -> costs.Held:
        """How much of the network is there."""
        return costs.held(self.model, self.net, self.params, self.masked)


class Method(Config, ABC):
    """Frozen hyper-parameters, documented each, and five pure verbs.

    A subclass adds `name: Literal["..."] = "..."` and its fields. `task` is bound by `bind` before any
    verb is called. Rounds count from 0.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    is_personal: ClassVar[bool] = False
    """Whether a client's carry is part of what it deploys, so that it is evaluated on its own."""

    name: str
    task: SkipValidation[Task] = Field(default=cast(Task, None), exclude=True, repr=False)

    def bind(self, task: Task) -> Self:
        """The same method, applied to a task."""
        return self.model_copy(update={"task": task})

    def check(self, rounds: int) -> None:
        """Raises a ValueError if runs of so many rounds make no sense."""

    @property
    def keeps_capacities(self) -> str:
        """If every client must have the same capacity in all rounds, which setting would change that; else nothing."""
        return ""

    @abstractmethod
    def init(self, seed: int) -> State:
        """The server's state before round 0."""

    @abstractmethod
    def select(self, state: State, round: int, client: Client, seed: int) -> Selection:
        """The coordinates that this client holds in this round. Cheap; equal keys mean equal selections."""

    @abstractmethod
    def extract(self, state: State, selection: Selection) -> Payload:
        """What a client of this selection is sent. May be views of the state."""

    @abstractmethod
    def local_update(
        self, payload: Payload, selection: Selection, client: Client, data: ClientData, round: int, seed: int
    ) -> Update:
        """One client's work, on a worker. `seed` is the client's own in this round."""

    @abstractmethod
    def aggregate(self, state: State, round: int, updates: Iterator[tuple[Selection, Update]]) -> State:
        """The next state, from partial sums in a fixed order. Does not change `state`."""

    @abstractmethod
    def deploy(self, state: State, round: int, capacity: float, client: Client | None = None) -> Deployment:
        """What a device of this capacity runs after `round` rounds; a given client's own, if it carries."""
