"""What several test files share: tiny experiments, an executor that makes trouble, methods made for tests."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import nn

from rayfl.axes import Axis, Net, linear
from rayfl.executors.base import Executor
from rayfl.experiment import Experiment, parse_experiment
from rayfl.methods import Client, Method, Task, Update
from rayfl.methods.width import PersonalMethod, SizedMethod
from rayfl.models import Model
from rayfl.seeds import numpy_generator, torch_generator
from rayfl.simulation import Simulation
from rayfl.submodel import Selection
from rayfl.tensors import Params, leaves, pack, unpack
from rayfl.training import ClientData, Training
from rayfl.worker import Worker

TINY = {
    "rounds": 2,
    "data": {"name": "synthetic", "samples": 80, "test_samples": 24, "classes": 4},
    "partition": {"name": "shards", "labels": 2},
    "clients": {"count": 6, "cohort": 4, "capacities": [0.3, 0.2, 0.1]},
    "model": {"name": "digits_cnn"},
    "training": {"batch_size": 5, "steps": 2},
    "evaluation": {"batch_size": 7},
    "run": {"executor": "serial", "chunk": 1},
}


RESNET = {"name": "resnet18", "channels": 16}
NESTED = {
    "depthfl": {"model": RESNET | {"exits": ["stage1.0", "stage2.0"], "exit": "depthfl"}},
    "scalefl": {"model": RESNET | {"exits": ["stage1.0", "stage2.0"]}},
    "depthfl_nefl": {"model": RESNET, "clients": {"metric": "params"}},
    "scalefl_nefl": {"model": RESNET, "clients": {"metric": "params"}},
}
"""Tiny experiments of methods that want early exits or residual blocks."""


def tiny(**sections) -> Experiment:
    """A tiny experiment; what a section says is laid over TINY's."""
    given = dict(TINY)
    for name, section in sections.items():
        below = given.get(name)
        given[name] = below | section if isinstance(below, dict) and isinstance(section, dict) else section
    return parse_experiment(given, "test")


def simulate(experiment: Experiment, folder: Path, make_executor=None) -> Simulation:
    return experiment.simulation(experiment.data.load(), folder, make_executor)


def run(simulation: Simulation, rounds: int | None = None) -> list[dict]:
    """The lines of the next `rounds` rounds, or of all that are left, without their seconds."""
    lines = []
    while not simulation.done and (rounds is None or len(lines) < rounds):
        line = simulation.run_round()
        del line["seconds"]
        lines.append(line)
    return lines


def assert_same(actual, expected) -> None:
    """Nested tensors are equal, to the bit. Names come first: they say most."""
    a, b = dict(leaves(actual)), dict(leaves(expected))
    assert list(a) == list(b)
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def drawn_like(tensors: dict[str, torch.Tensor], purpose: str) -> dict[str, torch.Tensor]:
    """Random whole numbers in float64: their sums and products are exact."""
    generator = torch_generator(0, purpose)
    return {
        name: torch.randint(-9, 10, t.shape, generator=generator, dtype=torch.float64) for name, t in tensors.items()
    }


def spread(selection: Selection, part: Params, like: Params) -> Params:
    """S^T part: in the shapes of `like`, 0 where nothing is held."""
    whole = {name: torch.zeros_like(like[name], dtype=t.dtype) for name, t in part.items()}
    selection.put(part, whole)
    return whole


class Perceptron(Model):
    """A few linear layers: hidden0, hidden1, ..., head."""

    name: Literal["perceptron"] = "perceptron"
    input: tuple[int, int, int] = (1, 1, 2)
    classes: int = 4
    hidden: tuple[int, ...] = (2,)

    def build(self, net):
        layers, cin = nn.Sequential(nn.Flatten()), Axis.fixed("pixels", 2)
        for i, size in enumerate(self.hidden):
            cout = net.axis(f"hidden{i}", size)
            layers.add_module(f"hidden{i}", linear(cin, cout))
            cin = cout
        layers.add_module("head", linear(cin, self.labels))
        return layers


def bound(method: Method, *capacities: float, hidden=(2,), **training) -> Method:
    """The method on a Perceptron."""
    nets = {c: Net(c) for c in sorted(capacities, reverse=True)}
    task = Task(Perceptron(hidden=hidden), Training(**training), nets, max(capacities), clients=10)
    return method.bind(task)


def client_data(*labels: int) -> ClientData:
    """Random pixels for a Perceptron."""
    pixels = torch.randint(256, (len(labels), 1, 1, 2), generator=torch_generator(0, "pixels")).byte()
    return ClientData(pixels, torch.tensor(labels), 4)


def images(*labels: int) -> ClientData:
    """Random 8x8 pixels."""
    pixels = torch.randint(256, (len(labels), 1, 8, 8), generator=torch_generator(0, "pixels")).byte()
    return ClientData(pixels, torch.tensor(labels), 4)


def updated(method: Method, state: dict, capacity: float, data: ClientData, seed: int = 0) -> Update:
    """What a client of this capacity answers in round 0."""
    client = Client(0, capacity)
    selection = method.select(state, 0, client, 0)
    return method.local_update(method.extract(state, selection), selection, client, data, 0, seed)


def one_round(method: Method, state: dict, *clients: tuple[float, ClientData], round: int = 0) -> dict:
    """The state after a round of clients 0, 1, ... with these capacities and data."""

    def updates():
        for id, (capacity, data) in enumerate(clients):
            client = Client(id, capacity)
            selection = method.select(state, round, client, 0)
            payload = method.extract(state, selection)
            yield selection, method.local_update(payload, selection, client, data, round, id)

    return method.aggregate(state, round, updates())


class Shuffled(Executor):
    """Works jobs out, and asks for what they share, in a random order; sends every message through flat buffers and
    pickle, as Ray does."""

    def __init__(self, worker: Worker, seed: int = 0):
        self.worker, self.seed = worker, seed

    def map(self, verb, jobs, shared):
        messages, answers = {}, {}
        for i in numpy_generator(self.seed, "order").permutation(len(jobs)).tolist():
            job = jobs[i]
            if job.key not in messages:
                messages[job.key] = _sent(shared(job.key))
            answers[i] = _sent(getattr(self.worker, verb)(messages[job.key], _sent(job.message())))
        for i in range(len(jobs)):
            yield answers[i]


def _sent(message):
    tensors, rest = message
    return unpack(pack(tensors)), pickle.loads(pickle.dumps(rest))


class PersonalHead(PersonalMethod):
    """FedPer (Arivazhagan et al., arXiv 1912.00818): clients average all layers below the classifier, and
    everyone keeps its own. A new client starts from the server's, which is never trained. The capacities
    are fixed, as a head is as wide as its network."""

    name: Literal["personal_head"] = "personal_head"
    size: Literal["own"] = "own"

    def local_update(self, payload, selection, client, data, round, seed):
        net = self.network(payload["params"] | (client.carry or {}), selection.net, data)
        update = self.answer(net, selection, data, self.train(net, data, round, seed))
        head = [n for n, d in self.task.layout(selection.net).dims.items() if d[0] == self.task.model.labels]
        update.carries[client.id] = {n: update.sums["params"].pop(n) for n in head}
        return update


class Pruned(SizedMethod):
    """FedAvg, of whose network a device runs a part: in conv1 and hidden the rows that its capacity, as a share of the
    largest, leaves, rounded down. A client who has trained has lost as many rows of conv1 as its id says, and of hidden
    three times as many."""

    name: Literal["pruned"] = "pruned"
    is_personal: ClassVar[bool] = True

    def local_update(self, payload, selection, client, data, round, seed):
        update = super().local_update(payload, selection, client, data, round, seed)
        update.carries[client.id] = {"lost": torch.tensor([1, 3]) * client.id}
        return update

    def deploy(self, state, round, capacity, client=None):
        deployed = super().deploy(state, round, capacity)
        masked, params = ("conv1.weight", "hidden.weight"), dict(deployed.params)
        for i, name in enumerate(masked):
            rows, own = len(params[name]), client is not None and client.carry is not None
            left = rows - int(client.carry["lost"][i]) if own else int(rows * capacity / max(self.task.nets))
            params[name] = params[name] * (torch.arange(rows) < left).view(-1, *[1] * (params[name].dim() - 1))
        return replace(deployed, key=(capacity, client and client.id), params=params, masked=masked)


class Troubled(PersonalHead):
    """One client's work goes wrong, on purpose."""

    name: Literal["troubled"] = "troubled"
    client: int
    trouble: Literal["raise", "nan", "inf", "explode"]

    def local_update(self, payload, selection, client, data, round, seed):
        update = super().local_update(payload, selection, client, data, round, seed)
        if client.id == self.client:
            if self.trouble == "raise":
                raise ArithmeticError("on purpose")
            factor = {"nan": float("nan"), "inf": float("inf"), "explode": 1e6}[self.trouble]
            next(iter(update.sums["params"].values())).mul_(factor)
        return update
