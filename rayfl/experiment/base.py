"""The configuration of one federated run.

seed, rounds                                            random seed and length
data, partition, clients, model, training, method       learning problem and method
evaluation, updates, server                             evaluation, checks of updates, server optimizer
system                                                  simulated devices and time
privacy                                                 differential privacy of clients
run                                                     resources and stopping; only `threads` and `patience` change
                                                        results

`Experiment(model="digits_cnn", method={"name": "heterofl"})` or `Experiment(model=MyModel(), data=InMemory(x, y))`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import Field, SerializeAsAny, ValidationError, field_validator

from rayfl.clients import Population
from rayfl.config import Config, ConfigError, Kind, explain, kinds_of, parse, shown, unknown
from rayfl.core.net import Net
from rayfl.core.operations import uncounted
from rayfl.core.server_optimizers import Server
from rayfl.data import DATASETS_KIND, PARTITIONS_KIND
from rayfl.data.base import Arrays, DataSet
from rayfl.data.federation import Federation, federate
from rayfl.data.partition.base import Partition
from rayfl.data.scores import Score, scores_of
from rayfl.evaluation import Evaluation
from rayfl.experiment import agreement
from rayfl.listeners import LISTENERS_KIND, EarlyStopping, Listener
from rayfl.listeners.time_limit import TimeLimit
from rayfl.methods import METHODS_KIND
from rayfl.methods.base import Affordable, Client, Method, Task
from rayfl.metrics import label, named
from rayfl.models import MODELS_KIND
from rayfl.models.base import Model
from rayfl.models.layers import Scaler
from rayfl.system import System
from rayfl.training import stacked
from rayfl.training.privacy import Privacy
from rayfl.training.settings import Training
from rayfl.training.updates import Updates

T = TypeVar("T")

NAMED: Mapping[str, Kind] = {
    "data": DATASETS_KIND,
    "partition": PARTITIONS_KIND,
    "model": MODELS_KIND,
    "method": METHODS_KIND,
}
"""Sections whose class is chosen by `name`."""

DEFAULTS = {"data": "digits", "partition": "iid", "method": "fedavg"}


class Resources(Config):
    """The `run:` section: resources, early stopping and checkpoints."""

    executor: Literal["ray", "serial"] = "ray"
    """Execution backend. ray: server and client actors. serial: one process. Results are equal bit for bit; on
    GPUs, except for operations for which PyTorch has no deterministic kernel and warns. CPUs and GPUs differ."""
    actors: Annotated[int, Field(ge=1, le=10**5)] | Literal["auto"] = "auto"
    """Number of client actors. auto: as many as fit on the machine, or into the resources of the trial, spread over all
    GPUs."""
    cpus: float = Field(default=1.0, ge=0.01)
    """CPUs per client actor."""
    gpus: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """GPUs per client actor: a fraction or a whole number. 0.25: four client actors per GPU. auto: one where Ray and
    PyTorch find GPUs, or equal parts of them for a given number of `actors`; otherwise 0. A serial run uses one GPU."""
    server_cpus: float = Field(default=0.0, ge=0)
    """CPUs reserved for the server actor. It mostly works while clients wait, so 0 is suitable for small machines."""
    memory: Annotated[float, Field(gt=0, le=10**6)] | Literal["auto"] = "auto"
    """GB that Ray reserves per client actor, so that a node gets no more actors than its memory allows. auto: an
    estimate, which limits actors: auto, and is reserved where all actors have room for it (`rayfl describe` shows
    it)."""
    threads: int = Field(default=1, ge=1, le=1024)
    """Torch threads per client actor. The number changes the last bits of results."""
    chunk: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Maximum number of clients per job; those that train side by side are in one job. auto: computed from the work per
    client and the number of actors."""
    together: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """Number of clients of one submodel that train side by side, as one computation, where their steps are alike. auto:
    by the work of a step, because narrow networks gain and wide ones do not. 1: one client after another. The number
    changes the last bits of results."""
    checkpoint_seconds: float = Field(default=30.0, ge=0)
    """Seconds between checkpoints; the last round is always saved. 0: one after every round and every server task."""
    checkpoint: Literal["last", "best"] = "last"
    """Checkpoints to keep. last: the newest ones. best: also that of the best evaluated round (`rayfl export --best`).
    The round is chosen on validation data (validation_*, or local_validation_* for personalised methods), otherwise on
    test data."""
    client_scores: Literal["last", "all"] = "last"
    """Scores of clients on their own test data that are kept. last: the first score at the last evaluation. all: every
    score at every evaluation, with capacity and samples (`Result.clients`, and a plot)."""
    patience: int = Field(default=0, ge=0)
    """Early stopping: number of evaluations without an improvement of the metric of `checkpoint: best`. 0: all rounds
    are run."""

    @field_validator("gpus")
    @classmethod
    def _as_in_ray(cls, gpus: float | Literal["auto"]) -> float | Literal["auto"]:
        if gpus != "auto" and gpus and not (0.0001 <= gpus <= 1 or gpus.is_integer()):
            raise ValueError("auto, 0, 0.0001 to 1, or a whole number")
        return gpus


class Found(NamedTuple):
    """Properties of a metric that are known before a run."""

    better: Literal["max", "min"]
    """Direction of improvement."""
    split: str
    """Split of the metric: one of `metrics.SPLITS`, or "train"."""


class Experiment(Config):
    """The configuration of one federated run.

    >>> experiment = Experiment(model="digits_cnn", method={"name": "fedprox", "mu": 0.1}, rounds=5)
    >>> experiment.rounds, experiment.method.mu, experiment.data.name
    (5, 0.1, 'digits')
    """

    seed: int = Field(default=0, ge=0)
    """Random seed of the run."""
    rounds: int = Field(default=20, ge=1)
    """Number of communication rounds."""
    data: SerializeAsAny[DataSet]
    partition: SerializeAsAny[Partition]
    clients: Population = Population()
    model: SerializeAsAny[Model]
    training: Training = Training()
    method: SerializeAsAny[Method]
    evaluation: Evaluation = Evaluation()
    updates: Updates = Updates()
    server: Server = Server()
    system: SerializeAsAny[System] | None = Field(default=None, exclude_if=lambda system: system is None)
    """Simulated devices and time. Default: rounds have no simulated time."""
    privacy: Privacy | None = Field(default=None, exclude_if=lambda privacy: privacy is None)
    """Central differential privacy of clients. Default: none."""
    run: Resources = Resources()
    listeners: tuple[Any, ...] = ()
    """Listeners that receive the events of the run, by name or as "package.module:Class" (`rayfl.listeners`)."""

    @field_validator("listeners")
    @classmethod
    def _read(cls, given: tuple[Any, ...]) -> tuple[Listener, ...]:
        return tuple(LISTENERS_KIND.read(listener, f"listeners.{i}") for i, listener in enumerate(given))

    def __init__(self, *, where: str = "Experiment", **sections: Any):
        """Sections are objects, mappings as in a file, or names. A ConfigError begins with `where`."""
        given = _sections(sections, where)
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ConfigError(explain(type(self), given, where, error)) from None
        try:
            agreement.check(self)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    def plain(self) -> dict[str, Any]:
        """Return the configuration as plain values, with all defaults."""
        return self.model_dump(mode="json")

    def result_config(self) -> dict[str, Any]:
        """Return the values that determine results bit for bit, and must match a checkpoint; `rounds` can change."""
        plain = self.plain()
        plain["run"] = {"threads": self.run.threads, "together": self.run.together}
        for name in ("rounds", "listeners"):
            del plain[name]
        plain["data"] = self.data.in_result()
        return plain

    def with_(self, **sections: Any) -> Self:
        """Return a copy with other sections, checked again."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | sections)

    def described(self) -> Self:
        """Return a copy without samples, for other processes (`DataSet.described`)."""
        return self.model_copy(update={"data": self.data.described()})

    @property
    def jobs(self) -> int:
        """Maximum number of jobs per round."""
        return -(-self.clients.cohort // (1 if self.run.chunk == "auto" else self.run.chunk))

    @property
    def task(self) -> Task:
        """The task for `Method.bind`, with a network per capacity."""
        population = self.clients
        nets = Affordable(self.model, population.metric, tuple(population.all_capacities))
        return Task(
            self.model, self.training, nets, max(nets), population.count, population.metric, self.seed, self.data.public
        )

    def together(self, net: Net) -> int:
        """Return the number of clients with this network that train side by side, at most (`run.together`)."""
        return stacked.most(net, self.training) if self.run.together == "auto" else self.run.together

    def bound(self) -> Method:
        """Return the method, bound to this experiment."""
        return self.method.bind(self.task)

    @property
    def notes(self) -> list[str]:
        """Warnings about a valid experiment, reported before its first round."""
        by_device = self.system is not None and self.system.gives_capacities
        of_capacities = [] if by_device else self.clients.capacity_notes
        return [
            *self.clients.notes,
            *of_capacities,
            *self._equal_capacities,
            *self._ignored_capacities,
            *self._ignored_layers,
        ]

    @property
    def _equal_capacities(self) -> list[str]:
        """A note on capacities whose networks are equal, by which no method can tell them apart."""
        own, trained = self.task.nets, self.bound().task.nets
        groups = agreement.equal_capacities(trained if len(set(trained.values())) > 1 else own)
        reason = "" if own[max(own)].layout.axes else ", which has nothing to cut"
        return [
            f"clients.capacities: {', '.join(map(label, group))} have equal networks of model {self.model.name}{reason}"
            for group in groups
        ]

    @property
    def _ignored_capacities(self) -> list[str]:
        method = self.bound()
        own, trained = self.task.nets, method.task.nets
        least, most = min(own), max(own)
        if own[least].layout.shapes == own[most].layout.shapes or trained[least] != own[most]:
            return []
        state = method.init()
        narrow, wide = (method.select(state, Client(0, capacity, 0)) for capacity in (least, most))
        if narrow.key != wide.key:
            return []
        return [
            f"method {self.method.name} ignores capacities: clients of capacity {least:g} train the network of "
            f"capacity {most:g} too. Hint: method.size: smallest or own, or another method such as heterofl"
        ]

    @property
    def _ignored_layers(self) -> list[str]:
        """Notes on a model of another package."""
        if type(self.model).__module__.partition(".")[0] == "rayfl":
            return []
        method, found = self.bound(), []
        net = method.select(method.init(), Client(0, min(method.task.nets), 0)).net
        blank = net.blank()
        if paths := uncounted(blank):
            found.append(
                f"model: the operations of {paths[0]} are not counted, and methods that mask layers leave it whole. "
                "Hint: a subclass with `multiply_adds(output)`"
            )
        if net.scale != 1 and not any(isinstance(part, Scaler) for part in blank.modules()):
            found.append(
                f"method.scaler: {self.model.name} has no Scaler. Hint: rayfl.scaler(net.scale) after the layers, or "
                "method.scaler: false"
            )
        return found

    @property
    def scores(self) -> tuple[Score, ...]:
        """Scores of an evaluation: those of the data set and those of `evaluation.scores`."""
        own = self.data.goal.scores
        return own + tuple(score for score in self.evaluation.scores if score not in own)

    @property
    def chosen_by(self) -> str:
        """Name of the metric that chooses the best round: on validation data, otherwise on test data. Its direction is
        that of the first of the `scores`."""
        of_clients, evaluation = self._judged_on == "clients", self.evaluation
        held_out = evaluation.local_holdout if of_clients else evaluation.holdout
        validation = "client_validation" if of_clients else "validation"
        return named(self.scores[0].label, "mean", validation if held_out else self._judged_on)

    @property
    def _judged_on(self) -> str:
        return self.method.judged_on if self.evaluation.clients else "test"

    def all_listeners(self, more: Sequence[Listener] = ()) -> tuple[Listener, ...]:
        """Return the listeners of the run, including those for `run.patience` and `system.until_s`, and `more`. Raise a
        ConfigError if one does not fit the run."""
        patience = [EarlyStopping(patience=self.run.patience)] if self.run.patience else []
        until = self.system.until_s if self.system else None
        limit = [] if until is None else [TimeLimit(seconds=until, rounds=self.rounds)]
        if not (found := [*self.listeners, *patience, *limit, *more]):
            return ()
        for i, one in enumerate(found):
            if not isinstance(one, Listener):
                raise ConfigError(f"listeners.{i}: {shown(one)} is not valid. Allowed: an object of rayfl.Listener")
        better = {name: metric.better for name, metric in self.metrics().items()}
        return tuple(one.fitted(better, self.chosen_by, f"listeners.{i}") for i, one in enumerate(found))

    def federate(self, arrays: Arrays) -> Federation:
        """Return the assignment of samples to clients and splits."""
        evaluation = self.evaluation
        return federate(
            self.data,
            arrays,
            self.partition,
            self.clients.count,
            evaluation.holdout,
            self.seed,
            evaluation.local_holdout,
        )

    def metrics(self) -> "dict[str, Found]":
        """Return the metrics of an evaluation of this run, by name; a search can optimise any of them."""
        server, evaluation = self.bound().task.server, self.evaluation
        capacities = [label(capacity) for capacity in self.clients.all_capacities]
        trained = [label(capacity) for capacity in self.clients.own_capacities]
        exits = [f"exit{i}" for i in range(1, server.exits + 1)]
        ends = {"test": [*capacities, "server"]}
        if evaluation.holdout:
            ends["validation"] = ends["test"]
        if evaluation.clients:
            ends["clients"] = [*trained, "samples"]
        if evaluation.clients and evaluation.local_holdout:
            ends["client_validation"] = ends["clients"]
        found = {"train_loss": Found("min", "train")}
        for split, some in ends.items():
            for i, score in enumerate(scores_of(split, self.scores)):
                of_exits = exits if i == 0 and split in ("test", "validation") else []
                for end in ["mean", "worst", *some, *of_exits]:
                    found[named(score.label, end, split)] = Found(score.better, split)
        return found

    def facts(self) -> dict[str, Any]:
        """Return facts for the folder of the run, so that results can be read without its code."""
        return {
            "judge": named(self.scores[0].label, "mean", self._judged_on),
            "capacities": self.clients.all_capacities,
            "trained": self.clients.own_capacities,
            "scores": {score.label: score.better for score in self.scores},
            "clients": self.clients.count,
            "rounds": self.rounds,
        } | ({"targets": self.system.time_to} if self.system and self.system.time_to else {})

    def costs(self) -> dict[str, dict[str, int]]:
        """Return capacity -> parameters and multiply-adds (forward pass of one sample) of its dense network."""
        nets = self.bound().task.nets
        return {label(capacity): {"parameters": net.parameters, "macs": net.macs} for capacity, net in nets.items()}

    def tags(self) -> dict[str, str]:
        """Return the tags of the run for trackers."""
        return {"method": self.method.name, "model": self.model.name, "data": self.data.name, "seed": str(self.seed)}


def read_experiment(given: Mapping[str, Any], where: str) -> Experiment:
    """Return an experiment from the content of a file. `where`: the file, for errors."""
    if "where" in given:
        raise ConfigError(unknown(where, "where", Experiment))
    if wrong := [key for key in given if not isinstance(key, str)]:
        raise ConfigError(f"{where}: the key {shown(wrong[0])} is not valid. Allowed: names of sections")
    return Experiment(where=where, **given)


def unchecked(given: Mapping[str, Any], where: str) -> Experiment:
    """Return an experiment without checks across sections."""
    return Experiment.model_construct(**_sections(given, where))


def _sections(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return every section as an object; the model takes its input and classes from the data."""
    given = DEFAULTS | dict(given)
    for section in given:
        if section not in Experiment.model_fields:
            raise ConfigError(unknown(where, section, Experiment))
    if "model" not in given:
        raise ConfigError(f"{where}: model: a value is required. Allowed: {', '.join(sorted(MODELS_KIND.known()))}")
    sections: dict[str, Any] = {}
    for section, value in given.items():
        place, kinds = f"{where}: {section}", list(kinds_of(Experiment.model_fields[section].annotation))
        config = next((kind for kind in kinds if issubclass(kind, Config)), None)
        if section in NAMED:
            sections[section] = NAMED[section].read(value, place)
        elif config is not None and not isinstance(value, tuple(kinds)):
            sections[section] = parse(config, value, place)
        else:
            sections[section] = value
    data = sections["data"]
    try:
        offers = data.offers
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    sections["model"] = sections["model"].fitted(data.name, offers, f"{where}: model")
    return sections
