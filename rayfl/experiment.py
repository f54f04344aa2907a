"""An experiment: one federated run, checked, whoever makes it.

seed, rounds                                            what is run
data, partition, clients, model, training, method       the learning problem, and the method
evaluation, updates, server                             what is measured, what is refused, how the server steps
run                                                     where and on what, and when it ends: changes nothing but the
                                                        speed, but for `threads` and `patience`

A file, a search and a notebook make the same object: `Experiment(model="digits_cnn", method={"name": "heterofl"})`, or
`Experiment(model=MyModel(), data=rayfl.InMemory(x, y))`. Whatever is wrong is a ConfigError at once.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, SerializeAsAny, ValidationError, field_validator

from rayfl.clients import Population
from rayfl.config import Config, ConfigError, Kind, explain, load_yaml, nearest, parse, parse_setting, set_path
from rayfl.core.net import Net, check_axes
from rayfl.core.server_optimizers import Server
from rayfl.data import DATASETS_KIND, PARTITIONS_KIND
from rayfl.data.base import Arrays, DataSet
from rayfl.data.federation import Federation, federate
from rayfl.data.goal import Score
from rayfl.data.partition.base import Partition
from rayfl.evaluation import Evaluation
from rayfl.listeners import LISTENERS_KIND, EarlyStopping, Listener
from rayfl.methods import METHODS_KIND
from rayfl.methods.base import Affordable, Method, Task
from rayfl.metrics import label, named
from rayfl.models import MODELS_KIND
from rayfl.models.base import Model
from rayfl.training.settings import Training
from rayfl.training.updates import Updates

NAMED: Mapping[str, Kind] = {
    "data": DATASETS_KIND,
    "partition": PARTITIONS_KIND,
    "model": MODELS_KIND,
    "method": METHODS_KIND,
}
"""Sections whose `name` chooses the class."""

DEFAULTS = {"data": "digits", "partition": "iid", "method": "fedavg"}


class Resources(Config):
    """The `run:` section: on what it runs, when it ends before its last round, and what it keeps."""

    executor: Literal["ray", "serial"] = "ray"
    """ray: a server actor and client actors. serial: one process, in order; the same bits."""
    actors: Annotated[int, Field(ge=1, le=10**5)] | Literal["auto"] = "auto"
    """Client actors; auto: as many as the machine, or the trial's share of it, has room for."""
    cpus: float = Field(default=1.0, ge=0.01)
    """CPUs of a client actor."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs of a client actor: 0.25 puts four on a GPU."""
    server_cpus: float = Field(default=0.0, ge=0)
    """CPUs that are kept for the server actor. It works while clients wait, so 0 is right on small machines."""
    threads: int = Field(default=1, ge=1, le=1024)
    """Torch threads of a client actor. Part of the result, to the bit."""
    chunk: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Clients a job at most; auto: by the work of a client, and by the number of actors."""
    checkpoint_seconds: float = Field(default=30.0, ge=0)
    """Seconds between checkpoints; there is one at the end too. 0: one behind every round, and within a round behind
    every lesson of the server."""
    checkpoint: Literal["last", "best"] = "last"
    """best: beside the newest checkpoints, that of the best evaluated round, for `rayfl export --best`. The round is
    chosen on held-out data (validation_*, or local_validation_* where clients' own test splits judge), else by what
    judges."""
    patience: int = Field(default=0, ge=0)
    """Ends a run after so many evaluations without a better value of what `checkpoint: best` goes by. 0: it runs all
    its rounds."""


class Found(NamedTuple):
    """What is known of a metric before a run."""

    better: Literal["max", "min"]
    """Which end of it is the good one."""
    split: str
    """One of `metrics.SPLITS`, or "train"."""


class Experiment(Config):
    """One federated run."""

    seed: int = Field(default=0, ge=0)
    """The run's seed: every random draw is addressed from it."""
    rounds: int = Field(default=20, ge=1)
    """Communication rounds."""
    data: SerializeAsAny[DataSet]
    partition: SerializeAsAny[Partition]
    clients: Population = Population()
    model: SerializeAsAny[Model]
    training: Training = Training()
    method: SerializeAsAny[Method]
    evaluation: Evaluation = Evaluation()
    updates: Updates = Updates()
    server: Server = Server()
    run: Resources = Resources()
    listeners: tuple[Any, ...] = ()
    """What is told of the run, by name or as "package.module:Class" (`rayfl.listeners`)."""

    @field_validator("listeners")
    @classmethod
    def _read(cls, given: tuple[Any, ...]) -> tuple[Listener, ...]:
        return tuple(LISTENERS_KIND.read(listener, f"listeners.{i}") for i, listener in enumerate(given))

    def __init__(self, *, where: str = "Experiment", **sections: Any):
        """Sections are objects, mappings as in a file, or names. Raises a ConfigError that begins with `where`."""
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
        """As YAML would say it, with every default."""
        return self.model_dump(mode="json")

    def result_config(self) -> dict[str, Any]:
        """What the result depends on, to the bit: a checkpoint is of this. Rounds may be added later."""
        plain = self.plain()
        plain["run"] = {"threads": self.run.threads}
        for name in ("rounds", "listeners"):
            del plain[name]
        plain["data"] = self.data.in_result()
        return plain

    def with_(self, **sections: Any) -> Self:
        """The same experiment with other sections, checked anew."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | sections)

    def described(self) -> Self:
        """The same experiment for other processes: without samples (`DataSet.described`)."""
        return self.model_copy(update={"data": self.data.described()})

    @property
    def jobs(self) -> int:
        """Into how many a round can be cut."""
        return -(-self.clients.cohort // (1 if self.run.chunk == "auto" else self.run.chunk))

    @property
    def task(self) -> Task:
        """What a method is bound to; of equal tasks by capacity each method makes its own networks."""
        population = self.clients
        nets = Affordable(self.model, population.metric, tuple(population.all_capacities))
        return Task(
            self.model,
            self.training,
            nets,
            max(nets),
            population.count,
            population.metric,
            self.seed,
            self.data.public,
        )

    def bound(self) -> Method:
        """The method, applied to this experiment."""
        return self.method.bind(self.task)

    @property
    def scores(self) -> tuple[Score, ...]:
        """What an evaluation counts: the data set's own scores, and those that `evaluation.scores` adds."""
        own = self.data.goal.scores
        return own + tuple(score for score in self.evaluation.scores if score not in own)

    @property
    def chosen_by(self) -> str:
        """The metric that chooses among a run's rounds: on what is held out of the data that judge, else what judges
        itself. Which end of it is best says the first of the `scores`."""
        of_clients, evaluation = self._judged_on == "clients", self.evaluation
        held_out = evaluation.local_holdout if of_clients else evaluation.holdout
        validation = "client_validation" if of_clients else "validation"
        return named(self.scores[0].label, "mean", validation if held_out else self._judged_on)

    @property
    def _judged_on(self) -> str:
        return self.method.judged_on if self.evaluation.clients else "test"

    def all_listeners(self) -> tuple[Listener, ...]:
        """All that is told of a run: its listeners, and what ends it if `run.patience` is up."""
        if not self.run.patience:
            return self.listeners
        mode = self.scores[0].better
        return *self.listeners, EarlyStopping(metric=self.chosen_by, patience=self.run.patience, mode=mode)

    def federate(self, arrays: Arrays) -> Federation:
        """Which rows are whose."""
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
        """The numbers that an evaluation of this run gives, which a search can go by."""
        server, evaluation = self.bound().task.server, self.evaluation
        capacities = [label(capacity) for capacity in self.clients.all_capacities]
        held = [label(capacity) for capacity, weight in self.clients.levels if weight]
        exits = [f"exit{i}" for i in range(1, server.exits + 1)]
        ends = {"test": [*capacities, "server"]}
        if evaluation.holdout:
            ends["validation"] = ends["test"]
        if evaluation.clients:
            ends["clients"] = [*held, "samples"]
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
        """What a run's folder states of it, so that nobody has to ask the code that made it."""
        return {
            "judge": named(self.scores[0].label, "mean", self._judged_on),
            "capacities": self.clients.all_capacities,
            "trained": sorted((c for c, weight in self.clients.levels if weight), reverse=True),
            "scores": {score.label: score.better for score in self.scores},
            "clients": self.clients.count,
            "rounds": self.rounds,
        }

    def costs(self) -> dict[str, dict[str, int]]:
        """Capacity -> parameters, and multiply-adds of one sample's forward pass, of its network as it is built."""
        nets = self.bound().task.nets
        return {label(capacity): {"parameters": net.parameters, "macs": net.macs} for capacity, net in nets.items()}

    def tags(self) -> dict[str, str]:
        """What a run is found by."""
        return {
            "method": self.method.name,
            "model": self.model.name,
            "data": self.data.name,
            "seed": str(self.seed),
        }


def read_experiment(given: Mapping[str, Any], where: str) -> Experiment:
    """A checked experiment from what a file held. `where`: the file, for errors."""
    if "where" in given:
        raise ConfigError(f"{where}: unknown key 'where'; {nearest('where', Experiment.model_fields)}")
    return Experiment(where=where, **given)


def unchecked(given: Mapping[str, Any], where: str) -> Experiment:
    """An experiment whose sections are right by themselves; whether its networks exist is not looked at."""
    return Experiment.model_construct(**_sections(given, where))


def _sections(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Every section as an object of its class; the model takes what it needs from the data."""
    given = DEFAULTS | dict(given)
    for section in given:
        if section not in Experiment.model_fields:
            raise ConfigError(f"{where}: unknown key {section!r}; {nearest(section, Experiment.model_fields)}")
    if "model" not in given:
        raise ConfigError(f"{where}: model: missing; known: {', '.join(sorted(MODELS_KIND.known()))}")
    sections: dict[str, Any] = {}
    for section, value in given.items():
        place, kind = f"{where}: {section}", Experiment.model_fields[section].annotation
        if section in NAMED:
            sections[section] = NAMED[section].read(value, place)
        elif isinstance(kind, type) and issubclass(kind, Config) and not isinstance(value, kind):
            sections[section] = parse(kind, value, place)
        else:
            sections[section] = value
    data = sections["data"]
    sections["model"] = sections["model"].fitted(data.name, data.offers, f"{where}: model")
    return sections


def _check(experiment: Experiment) -> None:
    """What can be known without the data: the model declares its axes and exists at every capacity, and the method
    makes sense with the other sections."""
    training, evaluation = experiment.training, experiment.evaluation
    try:
        _check_model(experiment.model)
        method = experiment.bound()
        method.check(experiment.rounds, experiment.clients)
        if 0 < training.cosine_rounds < experiment.rounds:
            raise ValueError(
                f"training.cosine_rounds: given {training.cosine_rounds}; allowed: 0, or at least the run's "
                f"{experiment.rounds} rounds, because the rate is 0 behind them"
            )
        if evaluation.local == "server" and method.judged_on == "clients":
            raise ValueError(
                f"evaluation.local: given 'server'; allowed: 'deployed' with method {method.name}, whose server "
                "has no network that was trained as a whole"
            )
        goal = experiment.data.goal
        for score in experiment.scores:
            if score.part not in goal.parts:
                raise ValueError(
                    f"evaluation.scores: given {score.name} of {score.part!r}; allowed: of "
                    f"{', '.join(map(repr, goal.parts))}, as data set {experiment.data.name} has them"
                )
        for net in method.task.nets.values():
            assert net.layout
    except ValueError as error:
        raise ConfigError(str(error)) from None


@lru_cache(maxsize=256)
def _check_model(model: Model) -> None:
    """With all that a network may have; of several models every one."""
    for member in model.members:
        check_axes(Net(member, exits=member.exit_count if member.exit_count > 1 else 0, steps=True))


def load_experiment(path: str | Path, settings: list[str] | None = None) -> Experiment:
    """The experiment of a YAML file, with `path=value` settings laid over it."""
    given = load_yaml(path)
    if isinstance(given.get("experiment"), Mapping):
        raise ConfigError(f"{path}: given a sweep; allowed: a run. `rayfl run --row ROW` runs one of its rows")
    return read_experiment(overlaid(given, settings), str(path))


def overlaid(given: dict[str, Any], settings: list[str] | None) -> dict[str, Any]:
    """What a file holds, with `path=value` settings laid over it."""
    for text in settings or []:
        given = lay_over(given, *parse_setting(text))
    return given


def lay_over(given: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`set_path` in an experiment, where a bare name stands for `{name: ...}`."""
    section = path.partition(".")[0]
    if section in NAMED and section != path and isinstance(name := given.get(section), str):
        given = given | {section: {"name": name}}
    return set_path(given, path, value)
