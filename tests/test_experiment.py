"""Experiments and their whole error messages."""

import pickle
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from helpers import OfPoints, Points, Pruned, message, simulate, tiny
from torch import nn

import rayfl
from rayfl.config import ConfigError, differences
from rayfl.core.axes import CLASSES, Axis, conv, declare, linear
from rayfl.data import DATASETS, InMemory
from rayfl.experiment import Experiment, load_experiment, read_experiment
from rayfl.methods import METHODS
from rayfl.methods.width.heterofl import HeteroFL
from rayfl.models import MODELS
from rayfl.models.base import ImageModel, Model
from rayfl.models.cnn import DigitsCNN
from rayfl.reference.describe import describe
from rayfl.training.settings import Training

METHODS_SO_FAR = f"Allowed: one of {len(METHODS)} names. Hint: `rayfl list --like TEXT` shows them"
MODELS_SO_FAR = f"one of {len(MODELS)} names. Hint: `rayfl list --like TEXT` shows them"
TRAINING = f"Allowed: {', '.join(sorted(Training.model_fields))}"


def written(tmp_path, text):
    file = tmp_path / "exp.yaml"
    file.write_text(text)
    return file


# experiments

MISTAKES = {
    "unknown section": (
        {"trainin": {}},
        "test: unknown key 'trainin'. Did you mean 'training'? Allowed: clients, data, evaluation, listeners, method, "
        "model, partition, privacy, rounds, run, seed, server, system, training, updates",
    ),
    "unknown key": (
        {"training": {"lrr": 0.1}},
        f"test: training.lrr: unknown key 'lrr'. Did you mean 'lr'? {TRAINING}",
    ),
    "key that is no text": ({"training": {1: 2}}, f"test: training.1: unknown key 1. {TRAINING}"),
    "no section": (
        {"training": 5},
        f"test: training: 5 is not valid. Allowed: a mapping with the keys {TRAINING.removeprefix('Allowed: ')}",
    ),
    "wrong type": ({"training": {"lr": "fast"}}, "test: training.lr: 'fast' is not valid. Allowed: a number"),
    "wrong type at the top": ({"rounds": "many"}, "test: rounds: 'many' is not valid. Allowed: a whole number"),
    "wrong type in a list": (
        {"training": {"milestones": [1, "b"]}},
        "test: training.milestones.1: 'b' is not valid. Allowed: a whole number",
    ),
    "one of two types": ({"run": {"chunk": 0}}, "test: run.chunk: 0 is not valid. Allowed: at least 1, or auto"),
    "neither of two types": (
        {"method": {"name": "nefl", "submodels": 3}},
        "test: method.submodels: 3 is not valid. Allowed: one of auto, published, or a list",
    ),
    "unknown key in a list of sections": (
        {"method": {"name": "nefl", "submodels": [{"capacity": 1, "widht": 1}]}},
        "test: method.submodels.0.widht: unknown key 'widht'. Did you mean 'width'? Allowed: blocks, capacity, width",
    ),
    "missing in a list of sections": (
        {"method": {"name": "nefl", "submodels": [{"width": 1}]}},
        "test: method.submodels.0.capacity: a value is required",
    ),
    "a rate of 0 for the rest of the run": (
        {"training": {"cosine_rounds": 3}, "rounds": 5},
        "test: training.cosine_rounds: 3 is not valid. Allowed: 0, or at least the 5 rounds of the run, "
        "because the learning rate is 0 after them",
    ),
    "no early exits": (
        {"method": "depthfl", "clients": {"capacities": [1, 0.5]}},
        "test: model: digits_cnn has no early exits. Allowed: a model with 2 exits, one per capacity. Hint: set "
        "model.exits of a ResNet, or use a model such as depthfl_resnet18",
    ),
    "out of range": (
        {"training": {"lr": -1, "momentum": 1}},
        "test: training.lr: -1 is not valid. Allowed: more than 0\n"
        "test: training.momentum: 1 is not valid. Allowed: less than 1",
    ),
    "none of the choices": (
        {"model": {"name": "digits_cnn", "norm": "batch"}},
        "test: model.norm: 'batch' is not valid. Allowed: one of static_bn, group, instance, layer, none",
    ),
    "rate over 1": (
        {"clients": {"capacities": [1.5]}},
        "test: clients.capacities: [1.5] is not valid. Allowed: fractions in (0, 1]; 1.5 is not",
    ),
    "cohort over count": (
        {"clients": {"count": 6, "cohort": 7, "capacities": [1]}},
        "test: clients: {'count': 6, 'cohort': 7, 'capacities': [1]} is not valid. Allowed: a cohort of at most "
        "count = 6 clients; cohort is 7",
    ),
    "unknown method": (
        {"method": {"name": "hetrofl"}},
        f"test: method.name: no method is called 'hetrofl'. Did you mean 'heterofl'? {METHODS_SO_FAR}",
    ),
    "unknown model": (
        {"model": "digit_cnn"},
        f"test: model.name: no model is called 'digit_cnn'. Did you mean 'digits_cnn'? Allowed: {MODELS_SO_FAR}",
    ),
    "unknown data": (
        {"data": "mnits"},
        "test: data.name: no data set is called 'mnits'. Did you mean 'mnist'? Allowed: " + ", ".join(sorted(DATASETS)),
    ),
    "unknown partition": (
        {"partition": {"name": "dirichlett"}},
        "test: partition.name: no partition is called 'dirichlett'. Did you mean 'dirichlet'? Allowed: "
        "dirichlet, iid, quantity, shards, users",
    ),
    "no name": (
        {"method": {"scaler": True}},
        "test: method: {'scaler': True} is not valid. " + METHODS_SO_FAR.replace(" ", " a mapping with a `name`: ", 1),
    ),
    "what rayfl fills in": (
        {"method": {"name": "fedavg", "task": 1}},
        "test: method.task: unknown key 'task'. Did you mean 'mask'? Allowed: label_rows, mask, name, scaler, "
        "size, weight",
    ),
    "no channel is left": (
        {"clients": {"capacities": [1, 1e-5], "metric": "params"}, "method": {"name": "heterofl"}},
        "test: capacity 1e-05 by params: the narrowest network of model digits_cnn exceeds it. Allowed: 0.000921 to 1",
    ),
    "group norm does not divide": (
        {"model": {"name": "digits_cnn", "norm": "group"}, "clients": {"capacities": [1, 0.1]}, "method": "heterofl"},
        "test: norm 'group' needs a multiple of 4 channels, but axis 'conv2' has 7 at this width. Hint: use "
        "larger capacities or another norm",
    ),
    "image too small": (
        {"model": "lenet5_caffe", "data": {"name": "synthetic", "shape": [1, 4, 4]}},
        "test: model lenet5_caffe: images of 4x4 pixels are too small for its convolutions and pooling. Allowed: at "
        "least 16x16; take another model or data set",
    ),
    "another image than the data's": (
        {"model": {"name": "digits_cnn", "input": [3, 32, 32]}, "data": "digits"},
        "test: model.input: (3, 32, 32) is not valid. Allowed: (1, 8, 8), as data set digits has, or no value",
    ),
    "other classes than the data's": (
        {"model": {"name": "digits_cnn", "classes": 5}, "data": "digits"},
        "test: model.classes: 5 is not valid. Allowed: 10, as data set digits has, or no value",
    ),
    "a batch beyond all bounds": (
        {"training": {"batch_size": 10**19}},
        "test: training.batch_size: 10000000000000000000 is not valid. Allowed: at most 1000000",
    ),
    "a milestone before the first round": (
        {"training": {"milestones": [-1]}},
        "test: training.milestones.0: -1 is not valid. Allowed: at least 0",
    ),
    "true is no number": ({"training": {"lr": True}}, "test: training.lr: True is not valid. Allowed: a number"),
    "more threads than any machine has": (
        {"run": {"threads": 10**9}},
        "test: run.threads: 1000000000 is not valid. Allowed: at most 1024",
    ),
    "one and a half GPUs": (
        {"run": {"gpus": 1.5}},
        "test: run.gpus: 1.5 is not valid. Allowed: auto, 0, 0.0001 to 1, or a whole number",
    ),
    "a sliver of a GPU": (
        {"run": {"gpus": 1e-5}},
        "test: run.gpus: 1e-05 is not valid. Allowed: auto, 0, 0.0001 to 1, or a whole number",
    ),
    "a sliver of a CPU": ({"run": {"cpus": 1e-9}}, "test: run.cpus: 1e-09 is not valid. Allowed: at least 0.01"),
    "a listener that nobody knows": (
        {"listeners": ["early_stop"]},
        "test: listeners.0: name: no listener is called 'early_stop'. Did you mean 'early_stopping'? "
        "Allowed: early_stopping, tensorboard, wandb",
    ),
    "early stopping by a metric that the run has not": (
        {"data": "diabetes", "model": "mlp", "listeners": [{"name": "early_stopping", "metric": "mse_men"}]},
        "test: listeners.0.metric: no metric is called 'mse_men'. Did you mean 'mse_mean'? Allowed: ",
    ),
    "a score that nobody knows": (
        {"evaluation": {"scores": ["f1"]}},
        "test: evaluation: scores.0: name: no score is called 'f1'. Allowed: accuracy, "
        "choices, confusion, exact_match, generated, label_accuracy, label_f1, loss, macro_f1, mae, matthews, mse, "
        "perplexity, perplexity_heterofl, r2, top_k",
    ),
    "a score twice": (
        {"evaluation": {"scores": ["macro_f1", "macro_f1"]}},
        "test: evaluation.scores: two scores have the name 'macro_f1' in metrics. Allowed: names once, and other than "
        "the data set's own accuracy, loss",
    ),
    "capacities with one name": (
        {"clients": {"capacities": [1, 0.5, 0.50000001]}},
        "test: clients.capacities: [1, 0.5, 0.50000001] is not valid. Allowed: each capacity once, to 6 digits; use "
        "weights for the numbers of clients",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_an_experiment(mistake):
    sections, expected = MISTAKES[mistake]
    found = message(read_experiment, {"model": "digits_cnn"} | sections, "test")
    assert found.startswith(expected) if expected.endswith("Allowed: ") else found == expected


def test_a_model_must_be_chosen():
    known = ", ".join(sorted(MODELS))
    assert message(read_experiment, {}, "test") == f"test: model: a value is required. Allowed: {known}"


class Undeclared(ImageModel):
    def build(self, net):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, self.classes))


class HardCoded(ImageModel):
    def build(self, net):
        a = Axis("hidden", 8)
        return nn.Sequential(nn.Flatten(), linear(Axis.fixed("x", 64), a), linear(a, self.labels))


class Unflattened(ImageModel):
    """Its classifier reads 8 of 8 x 8 x 8 features."""

    def build(self, net):
        a = net.axis("a", 8)
        return nn.Sequential(conv(self.image, a, 3, padding=1), nn.Flatten(), linear(a, self.labels))


class SevenClasses(ImageModel):
    def build(self, net):
        return nn.Sequential(nn.Flatten(), linear(Axis.fixed("x", 64), Axis.fixed("y", 7)))


class Columns(ImageModel):
    def build(self, net):
        flat = [nn.Flatten(), linear(Axis.fixed("x", 64), self.labels)]
        return nn.Sequential(*flat, nn.Unflatten(1, (1, -1)))


class Doubles(ImageModel):
    def build(self, net):
        return nn.Sequential(nn.Flatten(), linear(Axis.fixed("x", 64), self.labels), Double())


class Double(nn.Module):
    def forward(self, x):
        return x.double()


class Free(ImageModel):
    """The axis of its classes has another name."""

    def build(self, net):
        return nn.Sequential(nn.Flatten(), linear(Axis.fixed("x", 64), Axis.fixed("out", self.classes)))


class Functional(ImageModel):
    """Its weight is of no layer."""

    def build(self, net):
        return nn.Sequential(nn.Flatten(), Product(self.labels))


class Product(nn.Module):
    def __init__(self, labels):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(labels.length, 64))
        declare(self, w=(labels, None))

    def forward(self, x):
        return nn.functional.linear(x, self.w)


class Reading(ImageModel):
    def build(self, net):
        rates = [rate.item() for rate in torch.linspace(0, 1, 2)]
        return nn.Sequential(nn.Dropout(rates[0]), nn.Flatten(), linear(Axis.fixed("x", 64), self.labels))


class Tracked(ImageModel):
    """Its norm keeps running statistics."""

    def build(self, net):
        a = net.axis("a", 8)
        norm = declare(nn.BatchNorm2d(a.length), weight=(a,), bias=(a,))
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(conv(self.image, a, 3, padding=1), norm, pool, linear(a, self.labels))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            Tracked,
            "test: model: test_experiment:Tracked: 1 (BatchNorm2d) keeps running statistics. Allowed: "
            "rayfl.norm('static_bn', channels), or track_running_stats=False",
        ),
        (
            Unflattened,
            "test: model: test_experiment:Unflattened fails at width 1 on a sample of shape [1, 8, 8] (RuntimeError: a "
            "and b must have same reduction dim, but got [1, 512] X [8, 10]). Allowed: a network that runs at every "
            "width",
        ),
        (
            SevenClasses,
            "test: model: test_experiment:SevenClasses returns 7 numbers at capacity 1. Allowed: 10, one per class "
            "(`self.labels`)",
        ),
        (
            Columns,
            "test: model: test_experiment:Columns returns torch.float32 of shape [1, 1, 10] for one sample. Allowed: "
            "torch.float32 of shape [1, 10]",
        ),
        (
            Doubles,
            "test: model: test_experiment:Doubles returns torch.float64 of shape [1, 10] for one sample. Allowed: "
            "torch.float32 of shape [1, 10]",
        ),
        (
            Free,
            "test: model: no parameter of test_experiment:Free has the axis of the classes. Allowed: `self.labels` as "
            "the axis of the last layer",
        ),
        (
            Functional,
            "test: model: test_experiment:Functional has no layer whose operations are counted. Allowed: layers of "
            "torch, or modules with `multiply_adds(output)` (PLUGINS.md)",
        ),
        (
            Reading,
            "test: model: test_experiment:Reading reads values of tensors in `build` (Tensor.item() cannot be called "
            "on meta tensors). Allowed: a `build` that only makes tensors, because networks are also built on torch's "
            "meta device",
        ),
        (
            Undeclared,
            "test: Sequential: the parameter '1.weight' [10, 64] of a Linear has no axes. Hint: create the layer with "
            "rayfl.conv, rayfl.linear, rayfl.norm, ..., or call `declare(module, parameter=(Axis, ...))`",
        ),
        (
            HardCoded,
            "test: 1.weight: the axis 'hidden' has 8 positions at width 1.0 and 8 at 0.5. Hint: use the size of "
            "`net.axis(name, full)`",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_or_run(model, expected):
    assert message(Experiment, where="test", model=model()) == expected
    name = f"{model.__module__}:{model.__name__}"
    assert message(read_experiment, {"model": name}, "test") == expected


def test_a_data_folder_that_does_not_exist(tmp_path):
    root = str(tmp_path / "nowhere")
    experiment = read_experiment({"model": "mcmahan_cnn", "data": {"name": "mnist", "root": root}}, "test")
    assert message(experiment.data.load) == (
        f"data.root: the folder {root!r} does not exist. Allowed: an existing folder. Hint: create it, or leave "
        "data.root and RAYFL_DATA unset to use ./data"
    )


def test_more_clients_than_data():
    experiment = tiny(clients={"count": 200})
    assert message(experiment.federate, experiment.data.load()) == (
        "clients.count: 200 is not valid. Allowed: at most 72, for 72 training samples "
        "left by evaluation.holdout and data.public, at least 1 per client"
    )


# what an experiment says


def test_names_may_stand_alone_and_sections_have_defaults():
    experiment = read_experiment({"model": "digits_cnn"}, "test")
    assert (experiment.data.name, experiment.partition.name, experiment.method.name) == ("digits", "iid", "fedavg")
    assert read_experiment(experiment.plain(), "again") == experiment


def test_input_and_classes_come_from_the_data_unless_given():
    data = {"name": "synthetic", "shape": [2, 9, 9], "classes": 3}
    model = read_experiment({"model": "digits_cnn", "data": data}, "test").model
    assert (model.input, model.classes) == ((2, 9, 9), 3)
    given = {"name": "digits_cnn", "classes": 3}
    assert read_experiment({"model": given, "data": data}, "test").model == model


def test_sections_are_objects_mappings_or_names():
    """Errors do not depend on how the experiment was created."""
    experiment = Experiment(
        model=DigitsCNN(norm="none"), method=HeteroFL(), training=Training(lr=0.1), clients={"capacities": [1, 0.5]}
    )
    given = {"model": {"name": "digits_cnn", "norm": "none"}, "method": "heterofl", "training": {"lr": 0.1}}
    assert experiment == read_experiment(given | {"clients": {"capacities": [1, 0.5]}}, "file")
    assert experiment.model.input == (1, 8, 8)
    assert message(Experiment, model="digits_cnn", trainin={}).startswith("Experiment: unknown key 'trainin'. Did you")
    assert message(Experiment, model=HeteroFL()) == (
        f"Experiment: model: {HeteroFL()!r} is not valid. Allowed: a mapping with a `name`: {MODELS_SO_FAR}"
    )
    assert message(experiment.with_, rounds=0) == "Experiment: rounds: 0 is not valid. Allowed: at least 1"
    assert experiment.with_(rounds=3) == read_experiment(experiment.plain() | {"rounds": 3}, "again")


def test_what_is_sent_to_other_processes_has_no_samples():
    x, y = np.zeros((400, 1, 8, 8), np.uint8), np.arange(400) % 4
    experiment = Experiment(model="digits_cnn", data=rayfl.InMemory(x, y))
    assert len(pickle.dumps(experiment)) > x.nbytes
    sent = pickle.loads(pickle.dumps(experiment.described()))
    assert len(pickle.dumps(sent)) < 5000
    assert (sent.plain(), sent.result_config()) == (experiment.plain(), experiment.result_config())
    assert sent.with_(rounds=3).model == experiment.model
    given, found = (e.federate(experiment.data.arrays()) for e in (experiment, sent))
    assert np.array_equal(given.train.idx, found.train.idx) and given.prepare == found.prepare
    assert message(sent.data.arrays) == "data: a description of arrays has no samples. Allowed: the data set itself"


def test_what_a_result_depends_on():
    """Independent of the machine, the location of the data, the size of jobs and the number of rounds."""
    result = tiny().result_config()
    same = tiny(rounds=9, run={"actors": 3, "cpus": 2, "executor": "ray"}).result_config()
    assert differences(result, same) == []
    other = tiny(run={"chunk": 2, "threads": 3}, training={"lr": 0.3}).result_config()
    assert differences(result, other) == ["run.threads: 1 -> 3", "training.lr: 0.05 -> 0.3"]


def test_settings_are_laid_over_a_file(tmp_path):
    file = written(tmp_path, "model: digits_cnn\ntraining: {lr: 0.5, momentum: 0.9}\n")
    experiment = load_experiment(file, ["training.lr=1e-2", "clients.capacities=[1, 0.5]", "rounds=3"])
    assert (experiment.training.lr, experiment.training.momentum, experiment.rounds) == (0.01, 0.9, 3)
    assert experiment.clients.capacities == (1, 0.5)
    assert message(load_experiment, file, ["training.lrr=1"]).startswith(
        "--set training.lrr=1: training.lrr: unknown key 'lrr'. Did you mean 'lr'?"
    )
    other = written(tmp_path, "model: digits_cnn\npartition: {name: dirichlet, alpha: 0.3}\n")
    assert message(load_experiment, other, ["partition.name=iid"]).endswith(
        "partition.alpha: unknown key 'alpha'. Allowed: name. Hint: --set partition=iid replaces the whole section"
    )
    assert load_experiment(other, ["partition=iid"]).partition.name == "iid"
    incomplete = written(tmp_path, "rounds: 3\n")
    assert load_experiment(incomplete, ["model=digits_cnn", "partition.name=iid"]).partition.name == "iid"
    said = message(load_experiment, incomplete, ["model=digits_cnn", "training.lr=-1"])
    assert said.startswith("--set training.lr=-1: "), "the file lacks only what a setting supplies"
    assert message(load_experiment, incomplete, ["rounds=4"]).partition(". ")[0].endswith("model: a value is required")


SUBMODELS = [{"capacity": 1}, {"capacity": 0.3, "width": 0.75, "blocks": "11 10 00 10"}]


def resnet(**sections):
    given = {"rounds": 1, "model": {"name": "resnet18", "channels": 4}, "clients": {"capacities": [1, 0.3]}}
    return read_experiment(given | sections, "test")


def test_what_a_network_keeps_and_costs():
    experiment = resnet(method={"name": "nefl", "submodels": SUBMODELS})
    full, part = describe(experiment, "macs")
    assert (full["width"], full["blocks"], part["width"], part["blocks"]) == (1, "8/8", 0.75, "11 10 00 10")
    assert list(full)[:3] == ["capacity", "width", "blocks"]
    costs = experiment.costs()
    assert list(costs) == ["1", "0.3"]
    assert costs["0.3"] == {"parameters": part["parameters"], "macs": part["flops"]}
    [digits, _] = describe(tiny(clients={"capacities": [1, 0.5]}), "macs")
    assert list(digits)[:3] == ["capacity", "width", "parameters"]


def test_a_masked_network_costs_what_is_there():
    """A third of 10 rows of 9 weights at 64 pixels, and of 39 of 80, remains, i.e. 3 and 13; all of it is sent."""
    full, part = describe(tiny(method=Pruned(), clients={"capacities": [0.3, 0.1]}), "macs")
    gone = 7 * 9 + 26 * 80
    assert part["parameters"] == full["parameters"] - gone
    assert part["flops"] == full["flops"] - 7 * 9 * 64 - 26 * 80
    assert part["space_mb"] == 4 * part["parameters"] / 2**20
    assert part["width"] == full["width"] == 0.3
    assert {record[way] for record in (full, part) for way in ("bytes_down", "bytes_up")} == {4 * full["parameters"]}


def test_blocks_behind_the_last_exit_are_left_out():
    model = {"name": "resnet18", "channels": 4, "exits": ["stage1.1"]}
    full, part = describe(resnet(model=model, method="depthfl"), "macs")
    assert (full["exits"], full["blocks"]) == (2, "8/8")
    assert (part["exits"], part["blocks"]) == (1, "11 00 00 00")


class Moving(ImageModel):
    """A buffer counts the batches."""

    def build(self, net):
        return nn.Sequential(nn.Flatten(), Counting(), linear(Axis.fixed("x", 64), self.labels))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.count += 1
        return x + self.count


def test_a_buffer_that_training_changes_is_refused(tmp_path):
    """The next client of the process would go on from it."""
    assert message(simulate(tiny(model=Moving()), tmp_path).run_round) == (
        "model: test_experiment:Moving: the buffer 1.count changes in training, and its value would go from client to "
        "client. Allowed: parameters, and buffers that stay as they are"
    )


class Recurrent(ImageModel):
    """Its operations are not counted, and it has no Scaler."""

    def build(self, net):
        hidden = net.axis("hidden", 8)
        gru = nn.GRU(8, hidden.length, batch_first=True)
        names = [name for name, _ in gru.named_parameters()]
        gates = replace(hidden, groups=3)
        declare(gru, **{n: (gates, hidden if "hh" in n else None)[: 1 + ("weight" in n)] for n in names})
        return nn.Sequential(nn.Flatten(1, 2), gru, Last(), linear(hidden, self.labels))


class Last(nn.Module):
    def forward(self, x):
        return x[0][:, -1]


def test_what_a_users_model_lacks_is_noted():
    notes = tiny(model=Recurrent(), method="heterofl").notes
    assert notes == [
        "model: the operations of 1 (GRU) are not counted, and methods that mask layers leave it whole. Hint: a "
        "subclass with `multiply_adds(output)`",
        "method.scaler: test_experiment:Recurrent has no Scaler. Hint: rayfl.scaler(net.scale) after the layers, or "
        "method.scaler: false",
    ]
    assert tiny(model="digits_cnn", method="heterofl").notes == []


class OneNumber(Model):
    """Numbers without their own dimension."""

    takes: ClassVar = "variables"
    variables: int = 3
    classes: int = 1

    def example(self, batch, device):
        return torch.zeros(batch, self.variables, device=device)

    def build(self, net):
        return nn.Sequential(linear(Axis.fixed("x", self.variables), Axis.fixed("y", 1)), nn.Flatten(0))


def test_outputs_of_tables_are_checked_too():
    x, y = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32), np.arange(40.0)
    data = InMemory(x, y, target="numbers")
    with pytest.raises(ConfigError, match=r"OneNumber returns torch.float32 of shape \[1\] for one sample. Allowed: "):
        Experiment(data=data, model=OneNumber(), partition="iid", clients={"count": 2, "cohort": 2}, rounds=1)


# networks that are equal


class Uncut(OfPoints):
    """Has no axis to cut."""

    name: Literal["uncut"] = "uncut"

    def build(self, net):
        layer = torch.nn.Linear(3, self.classes)
        classes = Axis.fixed(CLASSES, self.classes)
        return torch.nn.Sequential(declare(layer, weight=(classes, None), bias=(classes,)))


def uncut(method, **clients):
    clients = {"count": 3, "cohort": 3, "capacities": [1, 0.5, 0.25]} | clients
    return tiny(method=method, model=Uncut(), data=Points(), partition="iid", clients=clients)


@pytest.mark.parametrize("method", ["heterofl", "fjord", "standalone", "fedproto", {"name": "fedavg", "size": "own"}])
def test_methods_that_cut_need_something_to_cut(method):
    name = method if isinstance(method, str) else method["name"]
    with pytest.raises(
        ConfigError,
        match="test: model: uncut has nothing to cut, so the networks of capacities 1, 0.5, 0.25 are equal. Allowed "
        f"with method {name}: a model whose layers have axes to cut, or ",
    ):
        uncut(method)
    assert uncut(method, capacities=[1]).notes == []


def test_base_networks_are_narrower_than_the_model():
    match = "test: model: uncut has nothing to cut, so each of the 8 base networks of method splitmix is the whole one"
    with pytest.raises(ConfigError, match=match):
        uncut("splitmix")
    with pytest.raises(ConfigError, match=match):
        uncut("splitmix", capacities=[1])


@pytest.mark.parametrize("method", ["fedavg", "fiarse"])
def test_a_note_names_the_model_that_has_nothing_to_cut(method):
    assert uncut(method).notes == [
        "clients.capacities: 1, 0.5, 0.25 have equal networks of model uncut, which has nothing to cut"
    ]
    with pytest.raises(ConfigError, match="uncut has nothing to cut, so it has no network of capacity 0.5 by params"):
        _ = uncut(method, metric="params").notes


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "fiarse"])
def test_capacities_with_equal_networks_are_noted(method):
    found = tiny(method=method, clients={"capacities": [1, 0.999, 0.5]}).notes
    assert "clients.capacities: 1, 0.999 have equal networks of model digits_cnn" in found
    assert not [
        note for note in tiny(method=method, clients={"capacities": [1, 0.5]}).notes if "equal networks" in note
    ]


def test_an_experiment_is_valid_in_each_default_type(request):
    """Its networks are known from the first one."""
    tiny()
    request.getfixturevalue("float64")
    tiny()
