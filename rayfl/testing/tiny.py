"""Tiny experiments and helpers of tests."""

import functools
import pickle
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rayfl.core.fold import Fold, Update
from rayfl.core.seeds import numpy_generator, torch_generator
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params, Tensors, leaves, pack, unpack
from rayfl.data import DATASETS_KIND
from rayfl.engine.jobs import Executor, Job, Verb
from rayfl.engine.simulation import MakeExecutor, Simulation
from rayfl.engine.worker import Worker
from rayfl.experiment import NAMED, Experiment, read_experiment
from rayfl.metrics import Line
from rayfl.models import MODELS_KIND
from rayfl.models.base import Model
from rayfl.models.lora import Lora

TINY: Mapping[str, Any] = {
    "rounds": 2,
    "data": {"name": "synthetic", "samples": 80, "test_samples": 24, "classes": 4},
    "partition": {"name": "shards", "labels": 2},
    "clients": {"count": 6, "cohort": 4, "capacities": [0.3, 0.2, 0.1]},
    "model": {"name": "digits_cnn"},
    "training": {"batch_size": 5, "steps": 2},
    "evaluation": {"batch_size": 7, "statistics_batch": 5},
    "run": {"executor": "serial", "chunk": 1},
}
"""Sections of a tiny experiment. Its capacities give 10, 7 or 4 of 32 channels, none of them divisors."""


def tiny(**sections: Any) -> Experiment:
    """Return a tiny experiment: TINY with these changes."""
    return read_experiment({**TINY, **{name: over_tiny(name, section) for name, section in sections.items()}}, "test")


def over_tiny(name: str, section: Any) -> Any:
    """Return a section with TINY's options below it, of which another class of rayfl's keeps those that it has."""
    below = TINY.get(name)
    if not isinstance(below, Mapping) or not isinstance(section, Mapping):
        return section
    if name in NAMED and section.get("name", below["name"]) != below["name"]:
        other = NAMED[name].ours.get(section["name"])
        below = {option: value for option, value in below.items() if other and option in other.model_fields}
    return {**below, **section}


def simulate(experiment: Experiment, folder: Path, make_executor: MakeExecutor | None = None) -> Simulation:
    # the number of threads changes the last bits of a result
    torch.set_num_threads(1)
    return Simulation(experiment, experiment.data.arrays(), folder, make_executor)


def run(simulation: Simulation, rounds: int | None = None) -> list[Line]:
    """Return the lines of the next `rounds` rounds, default: of all remaining, without their seconds."""
    lines: list[Line] = []
    while not simulation.done and (rounds is None or len(lines) < rounds):
        line = simulation.run_round()
        del line["seconds"]
        lines.append(line)
    return lines


def folded(state: dict, *answers: tuple[Selection, Update]) -> Fold:
    fold = Fold(state)
    for selection, update in answers:
        fold.add(selection, update)
    return fold


# models


class Branches(nn.Module):
    """A network of a user: a residual block, a depthwise convolution, a concatenation and batch norms."""

    def __init__(self, width: int = 8, num_classes: int = 4, channels: int = 1):
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.inner = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.BatchNorm2d(2 * width), nn.ReLU())
        self.depthwise = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width, bias=False)
        self.outer = nn.Conv2d(2 * width, width, 1)
        self.branch = nn.Conv2d(width, width - 1, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(2 * width - 1)
        self.head = nn.Linear((2 * width - 1) * 16, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.relu(x + self.outer(self.depthwise(self.inner(x))))
        x = torch.cat([F.max_pool2d(x, 2), self.branch(x)], 1)
        return self.head(F.relu(self.norm(x)).flatten(1))


def model_of(given: Any) -> Model:
    """Return the model of a section; for a name, the smallest network of the family."""
    return small(MODELS_KIND.find(given, "model")) if isinstance(given, str) else MODELS_KIND.read(given, "model")


@functools.cache
def small(cls: type[Model]) -> Model:
    """Return the family's smallest network: `smallest`, with one residual block per stage."""
    given = dict(cls.smallest)
    if depth := getattr(cls, "depth", ()):
        given["depth"] = (1,) * len(depth)
    attributes = {name: given.pop(name) for name in list(given) if name not in cls.model_fields}
    if attributes:
        name = f"Small{cls.__name__}"
        # pickle finds the class by this name
        globals()[name] = cls = type(name, (cls,), attributes | {"__module__": __name__})
    return cls(**given)


def made_up_for(model: Model) -> dict[str, Any]:
    """Return the `data:` section of made-up samples for a model; {} for kinds that rayfl does not know."""
    if isinstance(model, Lora):
        return made_up_for(model.base)
    if model.takes == "ids":
        length = {"length": getattr(model, "length")} if "length" in model.model_fields_set else {}  # noqa: B009
        return {"name": "synthetic_text", "task": _task(model)} | length
    shapes = {"input": lambda of: of.input, "series": lambda of: of.series, "variables": lambda of: (of.variables,)}
    if model.takes not in shapes:
        return {}
    # the number of classes comes from the data, if the model does not set it
    classes = {"classes": getattr(model, "classes")} if "classes" in model.model_fields_set else {}  # noqa: B009
    return {"shape": list(shapes[model.takes](model))} | classes


def data_for(model: Model, *sections: Any) -> Any:
    """Return a `data:` section: samples made up for the model, with changes. A section with a name, a bare name or an
    object replaces those before."""
    found: Any = made_up_for(model)
    for section in sections:
        found = {**found, **section} if isinstance(section, Mapping) and "name" not in section else section
        found = {"name": found} if isinstance(found, str) else found
    return found


def _task(model: Model) -> str:
    return getattr(model, "task")  # noqa: B009


def split_for(model: Model, data: Any = None) -> Any:
    """Return a `partition:` section for these data: streams of tokens, numbers and labels have no classes to split
    by."""
    read = DATASETS_KIND.read(over_tiny("data", data or made_up_for(model) or TINY["data"]), "data")
    is_of_classes = read.goal.targets == "class" and read.offers.get("task", "classes") == "classes"
    return TINY["partition"] if is_of_classes else "iid"


# tensors


def assert_same(actual: Tensors, expected: Tensors) -> None:
    """Assert that nested tensors are equal bit for bit; names are compared first."""
    a, b = dict(leaves(actual)), dict(leaves(expected))
    assert list(a) == list(b), f"names differ: {sorted(a.keys() ^ b.keys()) or 'their order'}"
    differs = [name for name in a if not torch.equal(a[name], b[name])]
    assert differs == [], f"tensors differ: {differs}"


def drawn_like(tensors: Params, purpose: str) -> Params:
    """Return random whole numbers in float64, whose sums and products are exact."""
    generator = torch_generator(0, f"test:{purpose}")
    return {
        name: torch.randint(-9, 10, t.shape, generator=generator, dtype=torch.float64) for name, t in tensors.items()
    }


def spread(selection: Selection, part: Params, like: Params) -> Params:
    """Return S^T part, in the shapes of `like`."""
    whole = {name: torch.zeros_like(like[name], dtype=t.dtype) for name, t in part.items()}
    selection.put(part, whole)
    return whole


def raised(call: Callable[[], object], kind: type[Exception]) -> str:
    """Return the message of the error that a call raises; "" if it raises none."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder."""
    return tempfile.TemporaryDirectory(prefix="rayfl-")


# an executor with random order


class Shuffled(Executor):
    """Executor that runs jobs in random order and sends every message through flat buffers, as Ray does."""

    def __init__(self, worker: Worker):
        self.worker = worker

    def map(self, verb: Verb, jobs: Sequence[Job], shared: Callable[[Hashable], Any]) -> Iterator[Any]:
        messages, answers = {}, {}
        for i in numpy_generator(0, "test:order").permutation(len(jobs)).tolist():
            job = jobs[i]
            if job.key not in messages:
                messages[job.key] = sent(shared(job.key))
            answers[i] = sent(getattr(self.worker, verb)(messages[job.key], sent(job.make())))
        for i in range(len(jobs)):
            yield answers[i]


def sent(message: Any) -> Any:
    """Return the message after sending."""
    return unpack(pickle.loads(pickle.dumps(pack(message))))
