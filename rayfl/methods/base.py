"""What every published way of doing model-heterogeneous federated learning has to say.

In the order of a paper's box: which network does a capacity stand for (`sizes`), which part of the global model does a
client hold (`select`, `extract`), how does it train (`loss`, `local_update`), how are the parts put together (`step`),
and what does a device run in the end (`deploy`). The verbs are pure: state comes in and goes out, nothing is stored on
`self`, every random draw takes its address from a seed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, Self, cast

import torch
from pydantic import ConfigDict, Field, GetPydanticSchema
from pydantic_core import core_schema
from torch import nn

from rayfl import costs
from rayfl.clients import Population
from rayfl.config import ConfigError, Named
from rayfl.core.fold import ClientState, Fold, State, Update
from rayfl.core.net import Answer, Net, cached_module
from rayfl.core.seeds import stream, torch_generator, torch_scope
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params
from rayfl.data.base import Public
from rayfl.data.samples import ClientData
from rayfl.methods.contract import Contract
from rayfl.models.base import Model
from rayfl.training.settings import Fill, Loss, Training, kernels
from rayfl.training.steps import Objective, fit

Payload = dict
"""What travels down to a client: group -> name -> tensor, counted in bytes. Read only on the worker."""


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
    """The run's seed: every draw of the server is addressed from it."""
    public: Public | None = None
    """What is said of the samples that the server has, and no client."""

    @property
    def server(self) -> Net:
        """The network of the global model."""
        return self.nets[self.server_capacity]

    def initial(self) -> Params:
        """What the server's network starts from: the same wherever it is asked for."""
        with torch_scope(stream(self.seed, "init")):
            return self.server.initial()


@dataclass(frozen=True)
class Client:
    """A client in a round, as the server knows it."""

    id: int
    capacity: float
    round: int
    """Counted from 0."""
    label_set: Callable[[], torch.Tensor] | None = field(default=None, compare=False, repr=False)
    """What finds out which classes it has. It does not travel: a worker has the data itself."""

    @property
    def present(self) -> torch.Tensor | None:
        """Which classes it has, [classes] bool; None where nobody knows."""
        return self.label_set and self.label_set()

    def __reduce__(self):
        return Client, (self.id, self.capacity, self.round)


@dataclass(frozen=True)
class Visit:
    """One client's work in one round, on a worker."""

    client: Client
    selection: Selection
    data: ClientData
    client_state: ClientState | None
    """What the client kept from its last round, or None; read only."""
    seed: int
    """The client's own in this round: every draw of its work is addressed from it."""
    public: ClientData | None = None
    """The public samples, where the run has some. Their labels are 0 unless they may be used."""

    @property
    def net(self) -> Net:
        """The network that the client runs."""
        return self.selection.net

    @property
    def round(self) -> int:
        return self.client.round


@dataclass(frozen=True)
class ServerTask:
    """Work of the server in a round, behind its local updates: a worker does it, with the accelerator that it has."""

    name: str
    """What it is called in its round: every draw of it is addressed by that."""
    net: Net
    """The network that works."""
    samples: int
    """Samples that it trains on at most, or passes forward three times as many: what it is expected to cost."""
    payload: Payload
    """What it works on."""
    client: int | None = None
    """Whose data and carry it wants."""


@dataclass(frozen=True)
class ServerTaskContext:
    """What a worker does a lesson with."""

    round: int
    seed: int
    """The round's own: a lesson that goes on from another one draws what that would have drawn."""
    public: ClientData | None
    """As for a visit."""
    validation: ClientData
    """What the server holds out of the training set; perhaps nothing."""
    data: ClientData | None = None
    """Of the lesson's client."""
    client_state: ClientState | None = None
    """What that client keeps."""


@dataclass(frozen=True)
class ServerTaskResult:
    """What a lesson gives."""

    groups: dict[str, Params]
    metrics: dict[str, float] = field(default_factory=dict)
    """Added to the round's, as `server_flops`."""


@dataclass(frozen=True)
class Deployment:
    """A network and its parameters, as a device runs it: `net.build()` with `params` loaded."""

    key: Hashable
    """Equal keys mean equal deployments of one state: what need not be evaluated twice."""
    net: Net
    params: Params
    statistics: Params | None = None
    """The norms' own statistics, by the names of `norms.finish`; collected before an evaluation unless given."""
    answer: Answer = "last"
    """Which of a network's early exits count: the last, or the mean of all their logits."""
    masked: tuple[str, ...] = ()
    """Parameters that count by their elements that are not 0: only these are on the device."""
    is_start: bool = False
    """It is what clients start from, and nobody's result: it is not judged on the global test set."""

    @property
    def has_statistics(self) -> bool:
        """Whether nothing has to be collected before it is evaluated."""
        return self.statistics is not None or not self.net.norms

    @property
    def present(self) -> costs.Present:
        """Parameters and multiply-adds of what is on the device."""
        return costs.present(self.net, self.params, self.masked)


class Method(Named, ABC):
    """Frozen hyper-parameters, documented each, and pure verbs.

    A subclass adds its fields, and overrides what differs from the defaults. `task` is bound by `bind` before any verb
    is called. Rounds count from 0.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    judged_on: ClassVar[Literal["test", "clients"]] = "test"
    """The split whose mean score a run is judged by: clients' own where every client has a network of its own."""
    mixes: ClassVar[bool] = False
    """Whether its capacities may stand for networks of several models."""
    contract: ClassVar[Contract] = Contract()
    """What `rayfl.testing` is told of it."""

    mask: Fill = "none"
    """Logits of classes that a client does not have, in its loss (HeteroFL section 4): left alone, 0, -inf."""
    weight: Literal["samples", "uniform"] = "uniform"
    """A client's weight in the mean: its number of training samples, or 1."""
    # bound and never parsed, so that pydantic need not know what a Task is made of
    task: Annotated[Task, GetPydanticSchema(lambda *_: core_schema.any_schema())] = Field(
        default=cast(Task, None), exclude=True, repr=False
    )

    def bind(self, task: Task) -> Self:
        """The same method, applied to a task, with the networks that it gives its capacities."""
        nets = self.sizes(task)
        if not self.mixes and len(task.model.members) > 1:
            self._check_one_model(task.model, nets)
        return self.model_copy(update={"task": replace(task, nets=nets)})

    def _check_one_model(self, model: Model, nets: Mapping[float, Net]) -> None:
        """A ConfigError if these networks are of several models."""
        if len({member for net in nets.values() for member in net.model.members}) == 1:
            return
        size = ", or method.size: largest or smallest" if "size" in type(self).model_fields else ""
        raise ConfigError(
            f"model: given {model.name}; allowed: one model, because method {self.name} trains parts of one "
            f"network{size}; or a method for several networks, as feddf"
        )

    # questions

    def sizes(self, task: Task) -> Mapping[float, Net]:
        """Capacity -> the network of a device, in the order of `task.nets`. A ConfigError if there is none."""
        return task.nets

    def check(self, rounds: int, clients: Population) -> None:
        """Raises a ValueError if such a run of the bound method makes no sense."""

    def init(self) -> State:
        """The server's state before round 0. A client may ask for it too: it draws from the run's seed alone."""
        return {"params": self.task.initial()}

    @abstractmethod
    def select(self, state: State, client: Client) -> Selection:
        """The coordinates that this client holds in this round. Cheap; equal keys mean equal selections."""

    @abstractmethod
    def extract(self, state: State, selection: Selection) -> Payload:
        """What a client of this selection is sent. May be views of the state."""

    def loss(self, visit: Visit) -> Loss:
        """A client's loss: the task's own, with the logits of classes that the client does not have masked."""
        data = visit.data
        return Objective(data.goal, self.mask, None if self.mask == "none" else data.present)

    @abstractmethod
    def local_update(self, payload: Payload, visit: Visit) -> Update:
        """One client's work, on a worker."""

    def step(self, state: State, round: int, fold: Fold) -> State:
        """The next state, from what the round's answers add up to. Does not change `state`."""
        return {group: fold.mean(group) for group in state}

    def plan(self, state: State, round: int) -> Sequence[ServerTask]:
        """What workers do for the server next, all at the same time; nothing, before the first local update of a round
        and when it is over. What is under way is in the state, so that a run can go on from the middle of a round."""
        return ()

    def refine(self, server_task: ServerTask, context: ServerTaskContext) -> ServerTaskResult:
        """A lesson, on a worker."""
        raise NotImplementedError(f"method {self.name} plans lessons and does not say how they are done")

    def absorb(self, state: State, round: int, refined: Mapping[str, ServerTaskResult]) -> State:
        """The next state, from what all planned lessons gave, by name. Does not change `state`."""
        return state

    @abstractmethod
    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        """What a device of this capacity runs after `round` rounds; with a carry, the client's who keeps that."""

    # tools

    def fit(
        self,
        module: nn.Module,
        visit: Visit,
        *,
        loss: Loss | None = None,
        training: Training | None = None,
        adjust: Callable[[nn.Module], None] | None = None,
        project: Callable[[nn.Module], None] | None = None,
        momentum: Params | None = None,
    ) -> dict[str, float]:
        """Steps on the client's loss, in place; the metrics of `steps.fit`, which says what the last three are.

        `loss` in place of the client's; `training` in place of the task's, but at the task's learning rates.
        """
        training, data = training or self.task.training, visit.data
        rate = self.task.training.rate(visit.round, len(data))
        # a module of the client's own would be recorded for it alone
        static = data.device.type == "cuda" and module is cached_module(visit.net, data.device)
        ours = kernels(training, visit.net.macs, data.device)
        with ours, torch_scope(stream(visit.seed, "dropout"), data.device):
            steps, generator = training.batches_of(len(data)), torch_generator(visit.seed, "batches")
            batches = data.batches(steps, training.batch_size, generator)
            loss = loss or self.loss(visit)
            return fit(module, batches, loss, training, rate, adjust, project, momentum, static)

    def weight_of(self, data: ClientData) -> float:
        """The client's weight."""
        return float(len(data)) if self.weight == "samples" else 1.0


@dataclass(frozen=True, eq=False)
class Affordable(Mapping[float, Net]):
    """Capacity -> the network that the model has for it, or the widest that it buys, found when it is asked for."""

    model: Model
    metric: costs.Metric
    capacities: tuple[float, ...]

    def __getitem__(self, capacity: float) -> Net:
        if net := self.model.chosen(capacity):
            return net
        return Net(self.model, costs.width_for(Net(self.model), capacity, self.metric))

    def __contains__(self, capacity: object) -> bool:
        return capacity in self.capacities

    def __iter__(self) -> Iterator[float]:
        return iter(self.capacities)

    def __len__(self) -> int:
        return len(self.capacities)
