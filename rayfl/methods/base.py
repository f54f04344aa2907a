"""Interface of a method of model-heterogeneous federated learning.

In the order of a paper's algorithm box: the network of each capacity (`sizes`), a client's part of the global model
(`select`, `extract`), local training (`loss`, `local_update`), aggregation (`step`) and deployment (`deploy`). These
functions are pure: state is an argument and a return value, nothing is stored on `self`, and every random draw uses a
stream derived from the seed.
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
from rayfl.data.samples import Batch, ClientData
from rayfl.methods.contract import Contract
from rayfl.models.base import Model
from rayfl.training.settings import Fill, Loss, Training, kernels
from rayfl.training.steps import Objective, fit
from rayfl.training.together import Ask, answer

Payload = dict
"""Tensors sent to a client: group -> name -> tensor. Their bytes are counted. Read-only on the worker."""


@dataclass(frozen=True)
class Task:
    """The task of a method, equal for all methods of a comparison.

    >>> from rayfl import Experiment
    >>> clients = {"count": 4, "capacities": [1, 0.25]}
    >>> task = Experiment(model="digits_cnn", method="heterofl", clients=clients).bound().task
    >>> task.clients, sorted(task.nets), task.server.width
    (4, [0.25, 1.0], 1.0)
    """

    model: Model
    training: Training
    nets: Mapping[float, Net]
    """Capacity -> network of a device of this capacity, largest first."""
    server_capacity: float
    """Capacity of the global model, the largest one. All clients may be smaller."""
    clients: int
    """Number of clients in the population."""
    metric: costs.Metric = "width"
    """Unit of capacities: width, parameters or FLOPs."""
    seed: int = 0
    """Seed of the run. All random streams of the server derive from it."""
    public: Public | None = None
    """Description of the public samples, which belong to no client."""

    @property
    def server(self) -> Net:
        """Network of the global model."""
        return self.nets[self.server_capacity]

    def initial(self) -> Params:
        """Return the initial parameters of the server's network. Equal on every process."""
        with torch_scope(stream(self.seed, "init")):
            return self.server.initial()


@dataclass(frozen=True)
class Client:
    """A client in a round, as seen by the server.

    >>> Client(id=3, capacity=0.25, round=0).present is None
    True
    """

    id: int
    capacity: float
    round: int
    """Counted from 0."""
    label_set: Callable[[], torch.Tensor] | None = field(default=None, compare=False, repr=False)
    """Function that returns `present`. Not sent to workers, which have the data."""

    @property
    def present(self) -> torch.Tensor | None:
        """Mask of the classes that the client has, [classes] bool; None if unknown."""
        return self.label_set and self.label_set()

    def __reduce__(self):
        return Client, (self.id, self.capacity, self.round)


@dataclass(frozen=True)
class Visit:
    """One client's work in one round, on a worker.

    >>> from rayfl.core.submodel import prefix
    >>> from rayfl.models import MODELS
    >>> net = Net(MODELS["digits_cnn"](input=(1, 8, 8)))
    >>> visit = Visit(Client(3, capacity=1.0, round=5), prefix(net, net), data=None, client_state=None, seed=0)
    >>> visit.round, visit.net == net
    (5, True)
    """

    client: Client
    selection: Selection
    data: ClientData
    client_state: ClientState | None
    """Client state from its last round, or None. Read-only."""
    seed: int
    """Seed of this client in this round. All random streams of its work derive from it."""
    public: ClientData | None = None
    """Public samples, if the run has any. Their labels are 0 unless `data.public.labeled` is set."""

    @property
    def net(self) -> Net:
        """Network that the client trains."""
        return self.selection.net

    @property
    def round(self) -> int:
        return self.client.round


@dataclass(frozen=True)
class ServerTask:
    """Work of the server after the local updates of a round, done by a worker on its device."""

    name: str
    """Name, unique in the round. The random streams of the task derive from it."""
    net: Net
    """Network that the task runs."""
    samples: int
    """Expected cost: maximum number of training samples. A forward pass counts a third."""
    payload: Payload
    """Input tensors."""
    clients: tuple[int, ...] = ()
    """Clients whose data and states the task reads."""


@dataclass(frozen=True)
class ServerTaskContext:
    """Inputs of a server task on a worker, besides its payload."""

    round: int
    seed: int
    """Seed of the round, so that a task that continues another one continues its random streams."""
    public: ClientData | None
    """Public samples, as in `Visit`."""
    validation: ClientData
    """Validation data of the server. May be empty."""
    data: Mapping[int, ClientData] = field(default_factory=dict)
    """Client -> its data, of the task's clients."""
    client_states: Mapping[int, ClientState] = field(default_factory=dict)
    """Client -> its state, of the task's clients that have one."""


@dataclass(frozen=True)
class ServerTaskResult:
    """Result of a server task."""

    groups: dict[str, Params]
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that are added to the round's, such as `server_flops`."""


@dataclass(frozen=True)
class Deployment:
    """A network and its parameters as deployed on a device: `net.build()` with `params` loaded.

    >>> from rayfl.models import MODELS
    >>> net = Net(MODELS["digits_cnn"](input=(1, 8, 8)), width=0.25)
    >>> deployed = Deployment.of("a quarter", net, net.initial())
    >>> deployed.has_statistics, deployed.present.parameters
    (False, 3706)
    """

    key: Hashable
    """Deployments of one state with equal keys are equal and are evaluated once."""
    net: Net
    params: Params
    statistics: Params | None = None
    """Running statistics of the norms, named as in `norms.finish`. Default: collected before an evaluation."""
    answer: Answer = "last"
    """Output of a network with early exits: the logits of the last exit, or the mean over all exits."""
    masked: tuple[str, ...] = ()
    """Masked parameters. Only their nonzero elements are stored on the device and counted."""
    is_start: bool = False
    """True if this is only the clients' initial network, which is not evaluated on the global test set."""

    @classmethod
    def of(cls, key: Hashable, net: Net, given: Params, is_start: bool = False) -> "Deployment":
        """Return the deployment of a network with these parameters and statistics."""
        params = {name: given[name] for name in net.layout.shapes}
        statistics = {name: t for name, t in given.items() if name not in params}
        return cls(key, net, params, statistics or None, is_start=is_start)

    @property
    def has_statistics(self) -> bool:
        """True if no statistics have to be collected before an evaluation."""
        return self.statistics is not None or not self.net.norms

    @property
    def present(self) -> costs.Present:
        """Number of parameters and multiply-adds on the device."""
        return costs.present(self.net, self.params, self.masked)


class Method(Named, ABC):
    """Base class of methods: frozen hyper-parameters (fields) and pure functions.

    A subclass adds fields and overrides the functions that differ from the defaults. `bind` sets `task` before any
    other function is called. Rounds count from 0.

    >>> from rayfl.methods import METHODS
    >>> method = METHODS["fedprox"](mu=0.1)
    >>> isinstance(method, Method), method.mu, method.judged_on
    (True, 0.1, 'test')
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    judged_on: ClassVar[Literal["test", "clients"]] = "test"
    """Split that a run is evaluated on: the test set, or the clients' own test data for personalised methods."""
    mixes: ClassVar[bool] = False
    """True if capacities may stand for networks of several models."""
    needs_classes: ClassVar[str] = ""
    """Reason why every sample must have one class; "" if targets can also be numbers or several labels. A property
    where it depends on options."""
    needs_exact_updates: ClassVar[str] = ""
    """Reason why the server must receive what clients computed, without `updates.transforms`; "" if it need not. A
    property where it depends on options."""
    contract: ClassVar[Contract] = Contract()
    """Properties that `rayfl.testing` checks."""

    mask: Fill = "none"
    """Logits of absent classes in a client's loss (HeteroFL section 4): unchanged, set to 0, or set to -inf."""
    weight: Literal["samples", "uniform"] = "uniform"
    """Weight of a client in the mean: its number of training samples, or 1."""
    # set by `bind`, never parsed: no pydantic schema
    task: Annotated[Task, GetPydanticSchema(lambda *_: core_schema.any_schema())] = Field(
        default=cast(Task, None), exclude=True, repr=False
    )

    def bind(self, task: Task) -> Self:
        """Return a copy of the method bound to a task, with its networks from `sizes`."""
        nets = self.sizes(task)
        if not self.mixes and len(task.model.members) > 1:
            self._check_one_model(task.model, nets)
        return self.model_copy(update={"task": replace(task, nets=nets)})

    def _check_one_model(self, model: Model, nets: Mapping[float, Net]) -> None:
        """Raise a ConfigError if the networks belong to several models."""
        if len({member for net in nets.values() for member in net.model.members}) == 1:
            return
        size = ", or method.size: largest or smallest" if "size" in type(self).model_fields else ""
        raise ConfigError(
            f"model: {model.name} is not valid. Allowed: one model, because method {self.name} trains parts of one "
            f"network{size}; or a method for different networks, such as feddf"
        )

    @property
    def synchronous(self) -> str:
        """Reason why updates trained from older versions of the model cannot be aggregated; "" if they can."""
        return "its updates are not parameters of the model"

    @property
    def sends_products(self) -> bool:
        """Whether clients send low-rank products, which neither transforms nor privacy support."""
        return False

    def sizes(self, task: Task) -> Mapping[float, Net]:
        """Return capacity -> network, in the order of `task.nets`. Raise a ConfigError if there is no such network."""
        return task.nets

    def check(self, rounds: int, clients: Population) -> None:
        """Raise a ValueError if the bound method does not support such a run."""

    def init(self) -> State:
        """Return the server's state before round 0. It depends on the run's seed only, so that workers can call it."""
        return {"params": self.task.initial()}

    @abstractmethod
    def select(self, state: State, client: Client) -> Selection:
        """Return the coordinates that a client trains in this round. Equal keys must mean equal selections."""

    @abstractmethod
    def extract(self, state: State, selection: Selection) -> Payload:
        """Return the tensors sent to clients of this selection. They may be views of the state."""

    def loss(self, visit: Visit) -> Loss:
        """Return a client's loss. Default: the loss of the data, with the logits of absent classes masked by `mask`."""
        data = visit.data
        return Objective(data.goal, self.mask, None if self.mask == "none" else data.present)

    @abstractmethod
    def local_update(self, payload: Payload, visit: Visit) -> Update:
        """Train one client on a worker and return its weighted sums, metrics and client state."""

    def withheld(self, net: Net) -> frozenset[str]:
        """Return the names of tensors that a client with this network is sent and does not return."""
        return frozenset()

    def step(self, state: State, round: int, fold: Fold) -> State:
        """Return the next state from the sums over the round's updates. Must not change `state`."""
        return {group: fold.mean(group) for group in state}

    def expected_flops(self, capacity: float) -> float | None:
        """Return the FLOPs per training sample of a client, if its steps draw their networks: the expectation, for
        simulated time. None: they are counted before the run."""
        return None

    def plan(self, state: State, round: int) -> Sequence[ServerTask]:
        """Return the next server tasks, which run in parallel; () before the first local update and at the end of a
        round. Progress within a round is part of the state, so that a run can resume from a partial round."""
        return ()

    def refine(self, server_task: ServerTask, context: ServerTaskContext) -> ServerTaskResult:
        """Run a server task on a worker."""
        raise NotImplementedError(f"method {self.name}: plan() returned server tasks, but refine() is not implemented")

    def absorb(self, state: State, round: int, refined: Mapping[str, ServerTaskResult]) -> State:
        """Return the next state from the results of all planned tasks, by name. Must not change `state`."""
        return state

    @abstractmethod
    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        """Return the network deployed at a capacity after `round` rounds; with `client_state`, the client's network."""

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
        """Train `module` in place on the client's loss and return metrics. See `steps.fit` for the last arguments.

        Defaults: `loss` of the client, `training` of the task. Learning rates are always the task's, those of a round
        spread over all steps.
        """
        training, data = training or self.task.training, visit.data
        loss, steps = loss or self.loss(visit), training.batches_of(len(data))
        rate = self.task.training.rate(visit.round, len(data), data.repeats * steps)

        def batches() -> Iterator[Batch]:
            return data.batches(steps, training.batch_size, torch_generator(visit.seed, "batches"))

        seed = stream(visit.seed, "dropout")
        if momentum is None and (sums := answer(Ask(module, batches, loss, training, rate, adjust, project, seed))):
            return sums
        # CUDA graphs pay off only for a cached module, which other clients use too
        static = data.device.type == "cuda" and module is cached_module(visit.net, data.device)
        ours = kernels(training, visit.net.macs, data.device)
        with ours, torch_scope(seed, data.device):
            return fit(module, batches(), loss, training, rate, adjust, project, momentum, static, goal=data.goal)

    def weight_of(self, data: ClientData) -> float:
        """Return the client's weight in the mean."""
        return float(len(data)) if self.weight == "samples" else 1.0


@dataclass(frozen=True, eq=False)
class Affordable(Mapping[float, Net]):
    """Lazy mapping capacity -> network: the model's choice, otherwise the widest within the capacity."""

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
