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

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import Field, SerializeAsAny, ValidationError, field_validator

from rayfl.clients import Population
from rayfl.config import (
    Config,
    ConfigError,
    Kind,
    explain,
    kinds_of,
    load_yaml,
    nearest,
    parse,
    parse_setting,
    set_path,
)
from rayfl.core.net import Net, check_axes
from rayfl.core.server_optimizers import Server
from rayfl.data import DATASETS_KIND, PARTITIONS_KIND
from rayfl.data.base import Arrays, DataSet
from rayfl.data.federation import Federation, federate
from rayfl.data.partition.base import Partition
from rayfl.data.scores import SCORES_KIND, Score
from rayfl.evaluation import Evaluation
from rayfl.listeners import LISTENERS_KIND, EarlyStopping, Listener
from rayfl.methods import METHODS_KIND
from rayfl.methods.base import Affordable, Client, Method, Task
from rayfl.metrics import label, named
from rayfl.models import MODELS_KIND
from rayfl.models.base import Model
from rayfl.system import System
from rayfl.training.privacy import ALLOWED, Privacy
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
    """Execution backend. ray: server and client actors. serial: one process. Results are equal bit for bit."""
    actors: Annotated[int, Field(ge=1, le=10**5)] | Literal["auto"] = "auto"
    """Number of client actors. auto: as many as fit on the machine, or into the resources of the trial, spread over all
    GPUs."""
    cpus: float = Field(default=1.0, ge=0.01)
    """CPUs per client actor."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs per client actor: a fraction or a whole number. 0.25: four client actors per GPU."""
    server_cpus: float = Field(default=0.0, ge=0)
    """CPUs reserved for the server actor. It mostly works while clients wait, so 0 is suitable for small machines."""
    threads: int = Field(default=1, ge=1, le=1024)
    """Torch threads per client actor. The number changes the last bits of results."""
    chunk: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Maximum number of clients per job. auto: computed from the work per client and the number of actors."""
    checkpoint_seconds: float = Field(default=30.0, ge=0)
    """Seconds between checkpoints; the last round is always saved. 0: one after every round and every server task."""
    checkpoint: Literal["last", "best"] = "last"
    """Checkpoints to keep. last: the newest ones. best: also that of the best evaluated round (`rayfl export --best`).
    The round is chosen on validation data (validation_*, or local_validation_* for personalised methods), otherwise on
    test data."""
    patience: int = Field(default=0, ge=0)
    """Early stopping: number of evaluations without an improvement of the metric of `checkpoint: best`. 0: all rounds
    are run."""

    @field_validator("gpus")
    @classmethod
    def _as_in_ray(cls, gpus: float) -> float:
        if gpus and not (0.0001 <= gpus <= 1 or gpus.is_integer()):
            raise ValueError("0, 0.0001 to 1, or a whole number")
        return gpus


class Found(NamedTuple):
    """Properties of a metric that are known before a run."""

    better: Literal["max", "min"]
    """Direction of improvement."""
    split: str
    """Split of the metric: one of `metrics.SPLITS`, or "train"."""


class Experiment(Config):
    """The configuration of one federated run."""

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
            _check(self)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    def plain(self) -> dict[str, Any]:
        """Return the configuration as plain values, with all defaults."""
        return self.model_dump(mode="json")

    def result_config(self) -> dict[str, Any]:
        """Return the values that determine results bit for bit, and must match a checkpoint; `rounds` can change."""
        plain = self.plain()
        plain["run"] = {"threads": self.run.threads}
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

    def bound(self) -> Method:
        """Return the method, bound to this experiment."""
        return self.method.bind(self.task)

    @property
    def notes(self) -> list[str]:
        """Warnings about a valid experiment, reported before its first round."""
        method = self.bound()
        own, trained = self.task.nets, method.task.nets
        least, most = min(own), max(own)
        if own[least] == own[most] or trained[least] != own[most]:
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
        """Return the listeners of the run, including early stopping for `run.patience`, and `more`. Raise a ConfigError
        if one does not fit the run."""
        patience = [EarlyStopping(patience=self.run.patience)] if self.run.patience else []
        if not (found := [*self.listeners, *patience, *more]):
            return ()
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
        trained = [label(capacity) for capacity, weight in self.clients.levels if weight]
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
            for i, score in enumerate(self.scores):
                of_exits = exits if i == 0 and split in ("test", "validation") else []
                for end in ["mean", "worst", *some, *of_exits]:
                    found[named(score.label, end, split)] = Found(score.better, split)
        return found

    def facts(self) -> dict[str, Any]:
        """Return facts for the folder of the run, so that results can be read without its code."""
        return {
            "judge": named(self.scores[0].label, "mean", self._judged_on),
            "capacities": self.clients.all_capacities,
            "trained": sorted((c for c, weight in self.clients.levels if weight), reverse=True),
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
        raise ConfigError(f"{where}: unknown key 'where'. {nearest('where', Experiment.model_fields)}")
    return Experiment(where=where, **given)


def unchecked(given: Mapping[str, Any], where: str) -> Experiment:
    """Return an experiment without checks across sections."""
    return Experiment.model_construct(**_sections(given, where))


def _sections(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return every section as an object; the model takes its input and classes from the data."""
    given = DEFAULTS | dict(given)
    for section in given:
        if section not in Experiment.model_fields:
            raise ConfigError(f"{where}: unknown key {section!r}. {nearest(section, Experiment.model_fields)}")
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
    sections["model"] = sections["model"].fitted(data.name, data.offers, f"{where}: model")
    return sections


def _check(experiment: Experiment) -> None:
    """Raise a ConfigError for problems that can be found without data: wrong axes of the model, capacities without a
    network, options of the method that do not match the other sections."""
    training, evaluation = experiment.training, experiment.evaluation
    try:
        _check_model(experiment.model)
        method, goal = experiment.bound(), experiment.data.goal
        if goal.targets != "class" and method.needs_classes:
            raise ValueError(
                f"method: {method.name} needs one class per sample, because {method.needs_classes}. The targets of "
                f"data set {experiment.data.name} are {goal.targets}. Allowed: a data set of classes, or another "
                "method such as heterofl"
            )
        method.check(experiment.rounds, experiment.clients)
        if experiment.system is not None:
            _check_system(experiment.system, method, experiment.clients)
        if experiment.privacy is not None:
            _check_privacy(experiment, experiment.privacy, method)
        if experiment.updates.secure_aggregation is not None:
            _check_secure(experiment, method)
        if 0 < training.cosine_rounds < experiment.rounds:
            raise ValueError(
                f"training.cosine_rounds: {training.cosine_rounds} is not valid. Allowed: 0, or at least the "
                f"{experiment.rounds} rounds of the run, because the learning rate is 0 after them"
            )
        if evaluation.local == "server" and method.judged_on == "clients":
            raise ValueError(
                f"evaluation.local: 'server' is not supported by method {method.name}, which does not train a whole "
                "server network. Allowed: 'deployed'"
            )
        for score in experiment.scores:
            if score.part not in goal.parts:
                raise ValueError(
                    f"evaluation.scores: data set {experiment.data.name} has no {score.part!r} for {score.name}. "
                    f"Allowed: scores of {', '.join(map(repr, goal.parts))}"
                )
            if score.of_targets != goal.targets:
                same = [name for name, cls in SCORES_KIND.known().items() if cls.of_targets == goal.targets]
                raise ValueError(
                    f"evaluation.scores: {score.name} scores targets of kind {score.of_targets}, and those of data set "
                    f"{experiment.data.name} are {goal.targets}. Allowed: {', '.join(same)}"
                )
        for net in method.task.nets.values():
            # a forward pass without data
            assert net.layout and net.macs
        experiment.all_listeners()
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_system(system: System, method: Method, clients: Population) -> None:
    """Raise a ValueError if the system, the method and the population do not fit together."""
    system.check(clients.count, clients.cohort)
    if clients.participation != "fixed":
        raise ValueError("clients.participation: poisson is not supported with system. Allowed: fixed")
    if system.mixes_versions and method.synchronous:
        raise ValueError(
            f"system.mode: method {method.name} needs updates of the current model, because {method.synchronous}. "
            "Allowed: sync without late_rounds"
        )
    if system.capacities != "given" and clients.assignment != "fixed":
        raise ValueError(f"system.capacities: {system.capacities} only with clients.assignment: fixed")


def _check_privacy(experiment: Experiment, privacy: Privacy, method: Method) -> None:
    """Raise a ConfigError if the reported epsilon would not hold for the server's parameters."""
    privacy.check(experiment.clients)
    data = experiment.data
    transforms = [transform.name for transform in experiment.updates.transforms]
    collected = experiment.evaluation.statistics != "batch" and any(net.norms for net in method.task.nets.values())
    problems = _unequal(method) | {
        "a system chooses clients by their time, not at random. Allowed: no system": experiment.system is not None,
        "updates.transforms: the residual of error_feedback carries what was clipped into later rounds. Allowed: "
        "transforms without memory": "error_feedback" in transforms,
        "updates.policy: stop tells that one client diverged. Allowed: refuse": experiment.updates.policy == "stop",
        "evaluation.statistics: statistics of batch norms are collected from the clients' data without clipping. "
        "Allowed: batch, or a model without batch norms (model.norm)": collected,
        "data: missing numbers are replaced, or numbers scaled, by values computed from the clients' data without "
        "noise. Allowed: data.scaling: none with data.missing: refuse": data.prepare.learns,
        "data: numbers as targets are scaled by values computed from the clients' data without noise. Allowed: targets "
        "that are classes or labels": data.goal.learns,
    }
    for problem, is_so in problems.items():
        if is_so:
            raise ConfigError(f"privacy: {problem}")


def _unequal(method: Method) -> dict[str, Any]:
    """Return problem -> whether the method has it, of a server that adds changes of parameters with weight 1."""
    return {
        f"method {method.name} is not supported, because {method.synchronous}. {ALLOWED}": method.synchronous,
        "method.weight: samples gives clients unequal parts of the sum. Allowed: uniform": method.weight != "uniform",
    }


def _check_secure(experiment: Experiment, method: Method) -> None:
    """Raise a ConfigError if the server needs more than sums of changes, or a change has no fixed size."""
    coded = [t.name for t in experiment.updates.transforms if t.stage in ("error_feedback", "selection", "code")]
    system = experiment.system
    problems = _unequal(method) | {
        f"{', '.join(coded)} would save nothing, because a masked integer has one size. Allowed: transforms without "
        "compression, such as clip": coded,
        "system.mode: groups have one version of the model. Allowed: sync without late_rounds": system is not None
        and system.mixes_versions,
    }
    for problem, is_so in problems.items():
        if is_so:
            raise ConfigError(f"updates.secure_aggregation: {problem}")


@lru_cache(maxsize=256)
def _check_model(model: Model) -> None:
    """Check the axes of all members of the model, with all exits and step sizes."""
    for member in model.members:
        check_axes(Net(member, exits=member.exit_count if member.exit_count > 1 else 0, steps=True))


def load_experiment(path: str | Path, settings: list[str] | None = None) -> Experiment:
    """Return the experiment of a YAML file, with `path=value` settings applied."""
    given = load_yaml(path)
    if isinstance(given.get("experiment"), Mapping):
        raise ConfigError(f"{path}: the file is a sweep. Allowed: a run. Hint: `rayfl run --row ROW` runs one row")
    return with_settings(lambda some: read_experiment(overlaid(given, some), str(path)), settings, str(path))


def with_settings(load: Callable[[list[str] | None], T], settings: list[str] | None, where: str) -> T:
    """Return `load(settings)`. If it fails only with the settings, raise the ConfigError with them as its place."""
    try:
        return load(settings)
    except ConfigError as error:
        if not settings:
            raise
        load(None)
        problem = str(error).removeprefix(f"{where}: ")
        blamed = [text for text in settings if text.partition("=")[0] in problem] or settings
        place = "" if problem.startswith("--set") else f"--set {' '.join(blamed)}: "
        renamed = [text.replace(".name=", "=", 1) for text in settings if text.partition("=")[0].endswith(".name")]
        hint = f". Hint: --set {renamed[0]} replaces the whole section" if renamed and "unknown key" in problem else ""
        raise ConfigError(f"{place}{problem}{hint}") from None


def overlaid(given: dict[str, Any], settings: list[str] | None) -> dict[str, Any]:
    """Return the content of a file with `path=value` settings applied."""
    for text in settings or []:
        given = lay_over(given, *parse_setting(text))
    return given


def lay_over(given: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return `set_path` of an experiment, after replacing a bare name by `{name: ...}`."""
    section = path.partition(".")[0]
    if section in NAMED and section != path and isinstance(name := given.get(section), str):
        given = given | {section: {"name": name}}
    return set_path(given, path, value)
