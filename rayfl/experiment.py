"""An experiment: what a YAML file says, checked, and the simulation that it describes.

seed, rounds                                            what is run
data, partition, clients, model, training, method       the learning problem, and the method
evaluation, updates                                     what is measured, and what is refused
run                                                     where and on what: changes nothing but the speed,
                                                        but for `chunk` and `threads`
"""

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, SerializeAsAny

from rayfl import costs
from rayfl.axes import Net, check_axes
from rayfl.config import Config, ConfigError, choose, load_yaml, nearest, parse, parse_setting, set_path
from rayfl.data import DATASETS, Arrays, DataSet
from rayfl.data.federation import Federation, federate
from rayfl.data.partition import PARTITIONS, Partition
from rayfl.executors.base import Executor
from rayfl.executors.serial import Serial
from rayfl.methods import METHODS, Client, Method, Task, Update
from rayfl.methods.base import Affordable, Payload, State
from rayfl.models import MODELS, Model
from rayfl.models.base import layout
from rayfl.population import Population, label
from rayfl.simulation import Evaluation, Simulation, Updates
from rayfl.submodel import Coverage
from rayfl.tensors import nbytes
from rayfl.training import ClientData, Training
from rayfl.worker import Limits, Worker

MakeExecutor = Callable[[Method, Federation, Limits], Executor]


class Run(Config):
    """The `run:` section: on what it runs."""

    executor: Literal["ray", "serial"] = "ray"
    """ray: a server actor and client actors. serial: one process, in order; the same bits."""
    actors: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Client actors; auto: as many as the machine, or the trial's share of it, has room for."""
    cpus: float = Field(default=1.0, gt=0)
    """CPUs of a client actor."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs of a client actor: 0.25 puts four on a GPU."""
    server_cpus: float = Field(default=0.0, ge=0)
    """CPUs that are kept for the server actor. It works while clients wait, so 0 is right on small machines."""
    threads: int = Field(default=1, ge=1)
    """Torch threads of a client actor. Part of the result, to the bit."""
    chunk: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Clients a job. Part of the result, to the bit; auto: a 32nd of the cohort."""
    checkpoint_seconds: float = Field(default=30.0, ge=0)
    """Seconds between checkpoints; there is one at the end too."""


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
    run: Run = Run()

    def plain(self) -> dict[str, Any]:
        """As YAML would say it, with every default."""
        return self.model_dump(mode="json")

    def result_config(self) -> dict[str, Any]:
        """What the result depends on, to the bit: a checkpoint is of this. Rounds may be added later."""
        plain = self.plain()
        plain["run"] = {"threads": self.run.threads, "chunk": self.chunk}
        plain["data"].pop("root", None)
        del plain["rounds"]
        return plain

    @staticmethod
    def today(saved: dict[str, Any]) -> dict[str, Any]:
        """A `result_config` that an earlier version wrote, with the defaults of options that it did not know."""
        try:
            return read_experiment(saved, "saved").result_config()
        except ConfigError:
            return saved

    @property
    def chunk(self) -> int:
        return -(-self.clients.cohort // 32) if self.run.chunk == "auto" else self.run.chunk

    @property
    def task(self) -> Task:
        population = self.clients
        nets = Affordable(self.model, population.metric, tuple(population.all_capacities))
        return Task(self.model, self.training, nets, max(nets), population.count, population.metric, self.seed)

    def bound_method(self) -> Method:
        return self.method.bind(self.task)

    def check(self, where: str) -> None:
        """What can be known without the data: the model declares its axes and exists at every capacity."""
        try:
            _check_model(self.model)
            method = self.bound_method()
            method.check(self.rounds)
            if 0 < self.training.cosine_rounds < self.rounds:
                raise ValueError(
                    f"training.cosine_rounds: given {self.training.cosine_rounds}; allowed: 0, or at least the run's "
                    f"{self.rounds} rounds, for the rate is 0 behind them"
                )
            if method.is_personal and self.evaluation.local == "server":
                raise ValueError(
                    f"evaluation.local: given 'server'; allowed: 'deployed' with method {method.name}, whose server "
                    "has no network that was trained as a whole"
                )
            if (otherwise := method.keeps_capacities) and self.clients.assignment != "fixed":
                raise ValueError(
                    f"clients.assignment: given {self.clients.assignment!r}; allowed: 'fixed', for with method "
                    f"{method.name} every client keeps what fits one network; or {otherwise}"
                )
            task = method.task
            for net in task.nets.values():
                task.layout(net)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None

    def federate(self, arrays: Arrays) -> Federation:
        """Which rows are whose."""
        return federate(self.data, arrays, self.partition, self.clients.count, self.evaluation.holdout, self.seed)

    def simulation(self, arrays: Arrays, folder: Path, make_executor: MakeExecutor | None = None) -> Simulation:
        """The run itself; in this process unless an executor is given. `folder` holds clients' carries."""
        method, federation = self.bound_method(), self.federate(arrays)
        limits = Limits(self.updates.growth)
        make_executor = make_executor or self._serial
        return Simulation(
            method,
            self.clients,
            federation,
            make_executor(method, federation, limits),
            seed=self.seed,
            rounds=self.rounds,
            evaluation=self.evaluation,
            updates=self.updates,
            chunk=self.chunk,
            folder=folder,
            config=self.result_config(),
            today=self.today,
        )

    def _serial(self, method: Method, federation: Federation, limits: Limits) -> Executor:
        return Serial(Worker(method, federation, self.seed, limits), self.run.threads)

    def metrics(self) -> list[str]:
        """The numbers that an evaluation of this run gives, which a search can go by."""
        kinds = ["accuracy", *(["validation_accuracy"] if self.evaluation.holdout else [])]
        ends = ["mean", "worst", *map(label, self.clients.all_capacities)]
        net = self.bound_method().task.server
        ends += [f"exit{i}" for i in range(1, net.exits + 1)]
        names = ["train_loss", *(f"{kind}_{end}" for kind in kinds for end in [*ends, "server"])]
        if self.evaluation.clients:
            held = [label(capacity) for capacity, weight in self.clients.levels if weight]
            names += [f"local_accuracy_{end}" for end in ["mean", "worst", "samples", *held]]
        return names

    def costs(self) -> dict[str, int]:
        """Parameters, and multiply-adds of one sample's forward pass, of the network of every capacity."""
        found = {}
        for capacity, net in self.bound_method().task.nets.items():
            found[f"parameters_{label(capacity)}"] = costs.parameters(self.model, net)
            found[f"macs_{label(capacity)}"] = costs.flops(self.model, net, "macs")
        return found

    def tags(self) -> dict[str, str]:
        """What a run is found by."""
        return {
            "method": self.method.name,
            "model": self.model.name,
            "data": self.data.name,
            "seed": str(self.seed),
            "commit": git_commit(),
        }


NAMED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "data": (DATASETS, "data set"),
    "partition": (PARTITIONS, "partition"),
    "model": (MODELS, "model"),
    "method": (METHODS, "method"),
}
"""Sections whose `name` chooses the class."""

DEFAULTS = {"data": {"name": "digits"}, "partition": {"name": "iid"}, "method": {"name": "fedavg"}}


def parse_experiment(given: Mapping[str, Any], where: str) -> Experiment:
    """A checked experiment from what a YAML file held. `where`: the file, for errors."""
    experiment = read_experiment(given, where)
    experiment.check(where)
    return experiment


def read_experiment(given: Mapping[str, Any], where: str) -> Experiment:
    """The sections of an experiment, of which each is right by itself; whether its networks exist is not looked at."""
    given = DEFAULTS | dict(given)
    for section in given:
        if section not in Experiment.model_fields:
            raise ConfigError(f"{where}: unknown key {section!r}; {nearest(section, Experiment.model_fields)}")
    if "model" not in given:
        raise ConfigError(f"{where}: model: missing; known: {', '.join(sorted(MODELS))}")
    sections: dict[str, Any] = {}
    for section, value in given.items():
        place = f"{where}: {section}"
        if section in NAMED:
            sections[section] = parse_named(section, value, place)
        elif isinstance(kind := Experiment.model_fields[section].annotation, type) and issubclass(kind, Config):
            sections[section] = parse(kind, value, place)
        else:
            sections[section] = value
    data, model = sections["data"], sections["model"]
    asked = given["model"] if isinstance(given["model"], Mapping) else {}
    fits = {"input": data.seen, "classes": data.classes}
    sections["model"] = model.model_copy(update={k: v for k, v in fits.items() if k not in asked})
    return parse(Experiment, sections, where)


def parse_named(section: str, value: Any, place: str) -> Any:
    """A section whose `name` chooses the class. A bare name stands for `{name: ...}`."""
    registry, what = NAMED[section]
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping) or "name" not in value:
        raise ConfigError(f"{place}: given {value!r}; allowed: a mapping with a name; {nearest('', registry)}")
    return parse(choose(registry, value["name"], f"{place}.name", what), value, place)


def load_experiment(path: str | Path, settings: list[str] | None = None) -> Experiment:
    """The experiment of a YAML file, with `path=value` settings laid over it."""
    given = experiment_section(path)
    for text in settings or []:
        given = lay_over(given, *parse_setting(text))
    return parse_experiment(given, str(path))


def lay_over(given: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`set_path` in an experiment, where a bare name stands for `{name: ...}`."""
    section = path.partition(".")[0]
    if section in NAMED and section != path and isinstance(name := given.get(section), str):
        given = given | {section: {"name": name}}
    return set_path(given, path, value)


def describe_experiment(
    experiment: Experiment, convention: costs.Convention, coverage: int = 0
) -> list[dict[str, Any]]:
    """What every capacity is and costs: the width of its network and, where the model has any, the residual blocks and
    the early exits that it keeps; `costs.describe`, with the bytes that the method really sends: those of one client's
    last round on two made-up samples. Of a masked network only what is there counts. With `coverage` the share of the
    server's parameters that a client of this capacity ever holds in so many rounds."""
    one_step = experiment.training.model_copy(update={"steps": 1})
    experiment = experiment.model_copy(update={"model": experiment.model.blank, "training": one_step})
    method, model = experiment.bound_method(), experiment.model
    state = method.init(experiment.seed)
    nets = method.task.nets
    records = [
        {"capacity": record.pop("capacity"), **_anatomy(model, net), **record}
        for record, net in zip(costs.describe(model, nets, convention), nets.values(), strict=True)
    ]
    for record in records:
        client = Client(0, record["capacity"])
        payload, update = _worked(experiment, method, state, client)
        if update.carries:
            # not its first round: it has what it keeps
            payload, update = _worked(experiment, method, state, replace(client, carry=update.carries[client.id]))
        record["bytes_down"] = update.metrics.get("bytes_down", nbytes(payload))
        record["bytes_up"] = update.metrics.get("bytes_up", nbytes(update.sums))
        deployed = method.deploy(state, 0, record["capacity"])
        if deployed.masked:
            there = deployed.held
            share = there.macs / costs.flops(deployed.model, deployed.net)
            record |= {"parameters": there.parameters, "flops": round(share * record["flops"])}
            record["space_mb"] = costs.space_mb(there.parameters)
        if coverage:
            held = Coverage(method.task.layout(method.task.server).shapes)
            for t in range(coverage):
                held.add(method.select(state, t, client, experiment.seed))
            record["coverage"] = held.share()
    return records


def _anatomy(model: Model, net: Net) -> dict[str, Any]:
    """What a network keeps of its model. Blocks are "8/8", or a bit each and a group a stage: "11 00 11 10"."""
    found: dict[str, Any] = {"width": net.width}
    if model.blocks:
        there = layout(model, net).dims
        held = {
            b: b not in net.without and any(name.startswith(f"{b}.") for name in there) for b in chain(*model.blocks)
        }
        bits = " ".join("".join("01"[held[block]] for block in stage) for stage in model.blocks)
        found["blocks"] = f"{len(held)}/{len(held)}" if all(held.values()) else bits
    if model.exit_count > 1:
        found["exits"] = net.exits
    return found


def _worked(experiment: Experiment, method: Method, state: State, client: Client) -> tuple[Payload, Update]:
    """What a client is sent in the last round, and answers."""
    model, round, seed = experiment.model, experiment.rounds - 1, experiment.seed
    data = ClientData(torch.zeros(2, *model.input, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), model.classes)
    selection = method.select(state, round, client, seed)
    payload = method.extract(state, selection)
    return payload, method.local_update(payload, selection, client, data, round, seed)


def experiment_section(path: str | Path) -> dict[str, Any]:
    """What a run's file holds, or a sweep's file below `experiment`."""
    given = load_yaml(path)
    return dict(given["experiment"]) if isinstance(given.get("experiment"), Mapping) else given


def native(model: Any) -> dict[str, Any]:
    """A model as it was published, at HeteroFL's five capacities, as a file would hold it."""
    shape = choose(MODELS, model, "--model", "model").model_fields["input"].default
    clients = {"count": 1000, "capacities": [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]}
    return {"model": {"name": model, "input": list(shape)}, "clients": clients}


@lru_cache(maxsize=256)
def _check_model(model: Model) -> None:
    """With all that a network may have."""
    exits = model.exit_count if model.exit_count > 1 else 0
    check_axes(lambda net: model.build(replace(net, exits=exits, steps=True)))


def git_commit() -> str:
    """The commit of the working folder, "-dirty" if it has changes, "none" outside a repository."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return described.stdout.strip() or "none"
