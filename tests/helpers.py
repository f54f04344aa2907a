"""Helpers of several test files, besides `rayfl.testing.tiny`: methods and a model for tests, and their rounds."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from rayfl.config import ConfigError
from rayfl.core.axes import CLASSES, Axis, linear
from rayfl.core.fold import Fold, Update
from rayfl.core.net import Net, load
from rayfl.core.seeds import numpy_generator, torch_generator
from rayfl.core.submodel import prefix, random_subset
from rayfl.data import DATASETS_KIND, Arrays, Column, DataSet, Prepare
from rayfl.data.goal import Classes
from rayfl.data.images import Images
from rayfl.data.samples import ClientData
from rayfl.experiment import Experiment
from rayfl.methods.base import Client, Deployment, Method, Task, Visit
from rayfl.methods.dense import Dense
from rayfl.methods.lowrank import LOWRANK
from rayfl.methods.sizes import fixed_capacities, same
from rayfl.models import MODELS
from rayfl.models.base import ImageModel, Model
from rayfl.testing.tiny import TINY as TINY
from rayfl.testing.tiny import Shuffled as Shuffled
from rayfl.testing.tiny import assert_same as assert_same
from rayfl.testing.tiny import drawn_like as drawn_like
from rayfl.testing.tiny import folded as folded
from rayfl.testing.tiny import made_up_for, model_of
from rayfl.testing.tiny import run as run
from rayfl.testing.tiny import sent as sent
from rayfl.testing.tiny import simulate as simulate
from rayfl.testing.tiny import spread as spread
from rayfl.testing.tiny import tiny as tiny
from rayfl.training.settings import Training

ADAPTED = model_of("lora")
RESNET = {"name": "resnet18", "channels": 16}
NESTED = {
    "depthfl": {"model": RESNET | {"exits": ["stage1.0", "stage2.0"], "exit": "depthfl"}},
    "scalefl": {"model": RESNET | {"exits": ["stage1.0", "stage2.0"]}},
    **{
        method: {"model": RESNET, "clients": {"metric": "params"}}
        for method in ("depthfl_nefl", "scalefl_nefl", "inclusivefl", "fedra", "fedepth")
    },
    **{method: {"model": ADAPTED, "data": made_up_for(ADAPTED)} for method in LOWRANK},
}
"""Tiny experiments of methods that want early exits, residual blocks or adapters."""

COMPLETE = {name: cls for name, cls in MODELS.items() if not any(f.is_required() for f in cls.model_fields.values())}
"""Models without options that a user must give."""


class Perceptron(ImageModel):
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


class Doubled(Prepare):
    def whole(self, samples):
        return samples | {"x": samples["x"] * 2}

    def batch(self, samples, generator):
        return samples["x"], samples["y"]


class Points(DataSet):
    """Rows of three numbers."""

    samples: int = 12
    broken: bool = False
    made: ClassVar = np.arange(36.0).reshape(12, 3)

    def load(self) -> Arrays:
        x, y = self.made[: self.samples], np.arange(self.samples, dtype=np.int32) % 2
        return Arrays({"x": x, "y": y}, {"x": x[:, :2] if self.broken else x, "y": y})

    @property
    def columns(self) -> Mapping[str, Column]:
        return {"x": Column((3,)), "y": Column((), below=2)}

    @property
    def prepare(self):
        return Doubled()

    @property
    def goal(self):
        return Classes(2)

    @property
    def offers(self):
        return {"classes": 2}


class Photos(torch.utils.data.Dataset):
    """A torch Dataset of a user: PIL images of 4 classes, augmented by draws of torch, numpy and Python."""

    def __init__(self, samples: int = 60, augmented: bool = True, seed: int = 0):
        from torchvision.transforms import v2

        self.pixels = numpy_generator(seed, "test:photos").integers(256, size=(samples, 8, 8, 3), dtype=np.uint8)
        self.transform = v2.Compose([*([v2.RandAugment(), noisy] if augmented else []), v2.ToImage()])

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.pixels[index])), index % 4

    def writer(self, index):
        return f"writer {index % 5}"


def noisy(image):
    return Image.fromarray(np.asarray(image) ^ np.uint8(np.random.randint(16) + random.randrange(16)))


class OfPoints(Model):
    """Two linear layers for rows of three numbers."""

    classes: int = 2

    def build(self, net):
        hidden = net.axis("hidden", 8)
        first, head = linear(Axis.fixed("numbers", 3), hidden), linear(hidden, Axis.fixed(CLASSES, self.classes))
        return nn.Sequential(first, nn.ReLU(), head)

    def example(self, batch, device):
        return torch.zeros(batch, 3, device=device)


def message(call, *arguments, **options) -> str:
    """Why this is refused."""
    with pytest.raises(ConfigError) as error:
        call(*arguments, **options)
    return str(error.value)


def read_data(**given) -> Any:
    """A data set as from a file."""
    return DATASETS_KIND.read(given, "exp.yaml: data")


def bound(method: Method, *capacities: float, hidden=(2,), **training) -> Method:
    """The method on a Perceptron."""
    model = Perceptron(hidden=hidden)
    nets = {c: Net(model, c) for c in sorted(capacities, reverse=True)}
    return method.bind(Task(model, Training(**training), nets, max(capacities), clients=10))


def client_data(*labels: int, shape=(1, 1, 2), classes=4) -> ClientData:
    """Random pixels, for a Perceptron unless a shape is given."""
    pixels = torch.randint(256, (len(labels), *shape), generator=torch_generator(0, "test:pixels")).byte()
    return ClientData({"x": pixels, "y": torch.tensor(labels)}, Images(), Classes(classes))


def images(*labels: int) -> ClientData:
    """Random 8x8 pixels."""
    return client_data(*labels, shape=(1, 8, 8))


def visit(
    method: Method, state: dict, capacity: float, data: ClientData, *, id=0, round=0, seed=0, client_state=None
) -> Visit:
    """A client's work in a round."""
    client = Client(id, capacity, round)
    return Visit(client, method.select(state, client), data, client_state, seed)


def updated(method: Method, state: dict, capacity: float, data: ClientData, **work) -> Update:
    """Return the update of a client of this capacity; `work` as for `visit`."""
    work = visit(method, state, capacity, data, **work)
    return method.local_update(method.extract(state, work.selection), work)


def one_round(method: Method, state: dict, *clients: tuple[float, ClientData], round: int = 0) -> dict:
    """The state after a round of clients 0, 1, ... with these capacities and data, whose seeds are their ids."""
    fold = Fold(state)
    for id, (capacity, data) in enumerate(clients):
        work = visit(method, state, capacity, data, id=id, round=round, seed=id)
        fold.add(work.selection, method.local_update(method.extract(state, work.selection), work))
    return method.step(state, round, fold)


class PersonalHead(Dense):
    """FedPer (Arivazhagan et al., arXiv 1912.00818): clients average all layers below the classifier, and
    everyone keeps its own. A new client starts from the server's, which is never trained. The capacities
    are fixed, because a head is as wide as its network."""

    judged_on: ClassVar = "clients"

    def check(self, rounds, clients):
        fixed_capacities(self.name, self.task.nets, clients, "clients of one capacity")

    def local_update(self, payload, visit):
        own = (visit.client_state or {}).get("own", {})
        update = self.trained({"params": payload["params"] | own}, visit)
        head = {name: update.sums["params"].pop(name) for name in visit.net.layout.classifier}
        update.client_states[visit.client.id] = {"own": head}
        return update


class Pruned(Dense):
    """FedAvg, and a device runs a part of its network: in conv1 and hidden the rows that its capacity, as a share of
    the largest, leaves, rounded down. A client who has trained has lost as many rows of conv1 as its id says, and of
    hidden three times as many."""

    name: Literal["pruned"] = "pruned"
    keeps: bool = True

    def sizes(self, task):
        return same(task, "largest")

    def local_update(self, payload, visit):
        update = self.trained(payload, visit)
        lost = torch.tensor([1, 3]) * visit.client.id
        update.client_states[visit.client.id] = {"own" if self.keeps else "lost": {"lost": lost}}
        return update

    def deploy(self, state, round, capacity, client_state=None):
        whole = prefix(self.task.server, self.net_at(capacity))
        masked, params = ("conv1.weight", "hidden.weight"), whole.take(state["params"])
        for i, name in enumerate(masked):
            rows = len(params[name])
            left = (
                int(rows * capacity / max(self.task.nets))
                if client_state is None
                else rows - int(client_state["own"]["lost"][i])
            )
            params[name] = params[name] * (torch.arange(rows) < left).view(-1, *[1] * (params[name].dim() - 1))
        return Deployment(capacity, whole.net, params, masked=masked, is_start=self.keeps)


class Troubled(Dense):
    """One client's work goes wrong, on purpose."""

    name: Literal["troubled"] = "troubled"
    client: int
    trouble: Literal["raise", "nan", "inf", "explode"]

    def local_update(self, payload, visit):
        update = self.trained(payload, visit)
        update.client_states[visit.client.id] = {"seen": {"round": torch.tensor(visit.round)}}
        if visit.client.id == self.client:
            if self.trouble == "raise":
                raise ArithmeticError("on purpose")
            factor = {"nan": float("nan"), "inf": float("inf"), "explode": 1e6}[self.trouble]
            next(iter(update.sums["params"].values())).mul_(factor)
        return update


def saved_inside(experiment: Experiment, folder: Path) -> int:
    """How often the second round of a run was saved in its middle, as "checkpoint 1" and so on."""
    simulation, saved = simulate(experiment, folder / "saved"), 0
    while not simulation.done:
        simulation.advance()
        if simulation.partial_round and simulation.round == 1:
            saved += 1
            simulation.save(folder / f"checkpoint {saved}")
    return saved


def assert_cut_is_whole_with_zeros(whole: Net, x: torch.Tensor, width: float = 0.4) -> None:
    """Assert that a network cut to random positions of its axes is the whole one with zeros elsewhere."""
    generator = torch_generator(0, "test:cut")
    narrow = replace(whole, width=width)
    selection = random_subset(whole, narrow, generator)
    drawn = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in whole.layout.shapes.items()}
    part, answers = selection.take(drawn), []
    for net, params in ((narrow, part), (whole, selection.spread(part))):
        built = net.build().eval()
        load(built, params)
        with torch.no_grad():
            answers.append(built(x))
    torch.testing.assert_close(*answers, rtol=0, atol=1e-10)
