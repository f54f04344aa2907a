"""What a user gets told. The whole message counts: where, what was given, what is allowed, what to do."""

import pytest
from helpers import Pruned, tiny
from pydantic import Field
from torch import nn

from rayfl.axes import Axis, linear
from rayfl.config import (
    Config,
    ConfigError,
    differences,
    load_yaml,
    nearest,
    parse,
    parse_setting,
    set_path,
)
from rayfl.experiment import describe_experiment, load_experiment, parse_experiment
from rayfl.methods import METHODS
from rayfl.models import MODELS, Model
from rayfl.training import Training

METHODS_SO_FAR = f"known: {', '.join(sorted(METHODS))}"
TRAINING = f"known: {', '.join(sorted(Training.model_fields))}"


def message(call, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as error:
        call(*args, **kwargs)
    return str(error.value)


# experiments

MISTAKES = {
    "unknown section": (
        {"trainin": {}},
        "test: unknown key 'trainin'; did you mean 'training'? known: clients, data, evaluation, method, "
        "model, partition, rounds, run, seed, training, updates",
    ),
    "unknown key": (
        {"training": {"lrr": 0.1}},
        f"test: training.lrr: unknown key 'lrr'; did you mean 'lr'? {TRAINING}",
    ),
    "key that is no text": (
        {"training": {1: 2}},
        f"test: training.1: unknown key 1; {TRAINING}",
    ),
    "no section": (
        {"training": 5},
        f"test: training: given 5; allowed: a mapping with the keys {TRAINING.removeprefix('known: ')}",
    ),
    "wrong type": (
        {"training": {"lr": "fast"}},
        "test: training.lr: given 'fast'; allowed: a valid number, unable to parse string as a number",
    ),
    "wrong type at the top": (
        {"rounds": "many"},
        "test: rounds: given 'many'; allowed: a valid integer, unable to parse string as an integer",
    ),
    "wrong type in a list": (
        {"training": {"milestones": [1, "b"]}},
        "test: training.milestones.1: given 'b'; allowed: a valid integer, unable to parse string as an integer",
    ),
    "one of two types": (
        {"run": {"chunk": 0}},
        "test: run.chunk: given 0; allowed: greater than or equal to 1, or 'auto'",
    ),
    "neither of two types": (
        {"method": {"name": "nefl", "submodels": 3}},
        "test: method.submodels: given 3; allowed: 'auto' or 'published', or a list",
    ),
    "unknown key in a list of sections": (
        {"method": {"name": "nefl", "submodels": [{"capacity": 1, "widht": 1}]}},
        "test: method.submodels.0.widht: unknown key 'widht'; did you mean 'width'? known: blocks, capacity, width",
    ),
    "missing in a list of sections": (
        {"method": {"name": "nefl", "submodels": [{"width": 1}]}},
        "test: method.submodels.0.capacity: missing; it has no default",
    ),
    "a rate of 0 for the rest of the run": (
        {"training": {"cosine_rounds": 3}, "rounds": 5},
        "test: training.cosine_rounds: given 3; allowed: 0, or at least the run's 5 rounds, for the rate is 0 behind "
        "them",
    ),
    "no early exits": (
        {"method": "depthfl", "clients": {"capacities": [1, 0.5]}},
        "test: model: given digits_cnn, which has no early exits; allowed: one for every of the 2 capacities but the "
        "last, by model.exits of a ResNet, or a model such as depthfl_resnet18",
    ),
    "out of range": (
        {"training": {"lr": -1, "momentum": 1}},
        "test: training.lr: given -1; allowed: greater than 0\ntest: training.momentum: given 1; allowed: less than 1",
    ),
    "none of the choices": (
        {"model": {"name": "digits_cnn", "norm": "batch"}},
        "test: model.norm: given 'batch'; allowed: 'static_bn', 'group', 'instance', 'layer' or 'none'",
    ),
    "rate over 1": (
        {"clients": {"capacities": [1.5]}},
        "test: clients.capacities: given [1.5]; allowed: a share in (0, 1]; 1.5 is not",
    ),
    "cohort over count": (
        {"clients": {"count": 6, "cohort": 7, "capacities": [1]}},
        "test: clients: given {'count': 6, 'cohort': 7, 'capacities': [1]}; allowed: a cohort of at most "
        "count = 6 clients; cohort is 7",
    ),
    "unknown method": (
        {"method": {"name": "hetrofl"}},
        f"test: method.name: no method is called 'hetrofl'; did you mean 'heterofl'? {METHODS_SO_FAR}",
    ),
    "unknown model": (
        {"model": "digit_cnn"},
        "test: model.name: no model is called 'digit_cnn'; did you mean 'digits_cnn'? known: "
        + ", ".join(sorted(MODELS)),
    ),
    "unknown data": (
        {"data": "mnits"},
        "test: data.name: no data set is called 'mnits'; did you mean 'mnist'? known: cifar10, cifar100, "
        "digits, fashion_mnist, mnist, svhn, synthetic",
    ),
    "unknown partition": (
        {"partition": {"name": "dirichlett"}},
        "test: partition.name: no partition is called 'dirichlett'; did you mean 'dirichlet'? known: "
        "dirichlet, iid, quantity, shards, users",
    ),
    "no name": (
        {"method": {"scaler": True}},
        f"test: method: given {{'scaler': True}}; allowed: a mapping with a name; {METHODS_SO_FAR}",
    ),
    "what rayfl fills in": (
        {"method": {"name": "fedavg", "task": 1}},
        "test: method.task: unknown key 'task'; did you mean 'mask'? known: label_rows, mask, name, scaler, "
        "size, weight",
    ),
    "no channel is left": (
        {"clients": {"capacities": [1, 1e-5], "metric": "params"}},
        "test: capacity 1e-05 by params: given model digits_cnn, whose narrowest network "
        "already is 0.000921; take capacities from 0.000921 to 1",
    ),
    "group norm does not divide": (
        {
            "model": {"name": "digits_cnn", "norm": "group"},
            "clients": {"capacities": [1, 0.1]},
            "method": "heterofl",
        },
        "test: norm 'group' needs channels that divide by 4, but axis 'conv2' has 7 at this width; take "
        "larger capacities or another norm",
    ),
    "image too small": (
        {"model": "lenet5_caffe", "data": {"name": "synthetic", "shape": [1, 4, 4]}},
        "test: model lenet5_caffe: given images of 4x4 pixels, of which its convolutions and pooling leave "
        "nothing; allowed: at least 16x16; take another model or data set",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_an_experiment(mistake):
    sections, expected = MISTAKES[mistake]
    assert message(parse_experiment, {"model": "digits_cnn"} | sections, "test") == expected


def test_a_model_must_be_chosen():
    known = ", ".join(sorted(MODELS))
    assert message(parse_experiment, {}, "test") == f"test: model: missing; known: {known}"


class Undeclared(Model):
    name: str = "undeclared"

    def build(self, net):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, self.classes))


class HardCoded(Model):
    name: str = "hard_coded"

    def build(self, net):
        a = Axis("hidden", 8)
        return nn.Sequential(nn.Flatten(), linear(Axis.fixed("x", 64), a), linear(a, self.labels))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            Undeclared,
            "test: Sequential: the parameter '1.weight' [10, 64] of a Linear declares no axes; build it with "
            "rayfl.axes (conv, linear, norm, ...) or set `module.axes = {parameter: (Axis, ...)}`",
        ),
        (
            HardCoded,
            "test: 1.weight: the axis 'hidden' has 8 positions at width 1.0 and 8 at 0.5; take its size from "
            "`net.axis(name, full)`",
        ),
    ],
)
def test_a_model_that_does_not_say_its_axes(model, expected, monkeypatch):
    monkeypatch.setitem(MODELS, "new", model)
    assert message(parse_experiment, {"model": {"name": "new"}}, "test") == expected


def test_a_data_folder_that_does_not_exist(tmp_path):
    root = str(tmp_path / "nowhere")
    experiment = parse_experiment({"model": "mcmahan_cnn", "data": {"name": "mnist", "root": root}}, "test")
    assert message(experiment.data.load) == (
        f"data.root: given {root!r}; allowed: an existing folder. Make it, or leave both data.root and "
        "RAYFL_DATA unset to use ./data"
    )


def test_more_clients_than_data():
    experiment = tiny(clients={"count": 200})
    assert message(experiment.federate, experiment.data.load()) == (
        "clients.count: given 200; allowed: at most 72, for 72 training samples and at least 1 a client; "
        "lower it or take more data"
    )


# what an experiment says


def test_names_may_stand_alone_and_sections_have_defaults():
    experiment = parse_experiment({"model": "digits_cnn"}, "test")
    assert (experiment.data.name, experiment.partition.name, experiment.method.name) == (
        "digits",
        "iid",
        "fedavg",
    )
    assert parse_experiment(experiment.plain(), "again") == experiment


def test_input_and_classes_come_from_the_data_unless_given():
    data = {"name": "synthetic", "shape": [2, 9, 9], "classes": 3}
    model = parse_experiment({"model": "digits_cnn", "data": data}, "test").model
    assert (model.input, model.classes) == ((2, 9, 9), 3)
    given = {"name": "digits_cnn", "classes": 5}
    assert parse_experiment({"model": given, "data": data}, "test").model.classes == 5


def test_what_a_result_depends_on():
    """Neither the machine nor where the data lie, nor how many rounds come yet."""
    result = tiny().result_config()
    same = tiny(rounds=9, run={"actors": 3, "cpus": 2, "executor": "ray"}).result_config()
    assert differences(result, same) == []
    other = tiny(run={"chunk": 2}, training={"lr": 0.3}).result_config()
    assert differences(result, other) == ["run.chunk: 1 -> 2", "training.lr: 0.05 -> 0.3"]
    assert tiny(clients={"count": 70, "cohort": 65}, run={"chunk": "auto"}).result_config()["run"] == {
        "threads": 1,
        "chunk": 3,
    }


# YAML


def written(tmp_path, text):
    file = tmp_path / "exp.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("-2.5E+4", -25000.0), (".5e1", 5.0), ("1e3", 1000.0), ("3", 3), ("a1-e9", "a1-e9")],
)
def test_numbers(text, value, tmp_path):
    found = load_yaml(written(tmp_path, f"lr: {text}\nmany: [{text}, {text}]"))
    assert found == {"lr": value, "many": [value, value]}
    assert type(found["lr"]) is type(value)


def test_a_key_that_stands_twice(tmp_path):
    file = written(tmp_path, "model: a\ntraining:\n  lr: 1\n  lr: 2\n")
    assert message(load_yaml, file) == (
        f"{file}: not valid YAML: the key 'lr' stands twice\n"
        f'  in "<byte string>", line 3, column 3:\n      lr: 1\n      ^'
    )


def test_files_that_cannot_be_used(tmp_path):
    missing = tmp_path / "missing.yaml"
    assert message(load_yaml, missing) == f"{missing}: cannot be read: No such file or directory"
    assert message(load_yaml, tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    file = written(tmp_path, "- a\n- b\n")
    assert message(load_yaml, file) == f"{file}: given list; allowed: a mapping of sections"
    file = written(tmp_path, "")
    assert message(load_yaml, file) == f"{file}: given NoneType; allowed: a mapping of sections"
    file = written(tmp_path, "a: [1\n")
    assert message(load_yaml, file).startswith(f"{file}: not valid YAML: while parsing a flow sequence")
    file.write_bytes(b"a: \xff\n")
    assert message(load_yaml, file).startswith(f"{file}: not valid YAML: unacceptable character")


def test_settings_are_laid_over_a_file(tmp_path):
    file = written(tmp_path, "model: digits_cnn\ntraining: {lr: 0.5, momentum: 0.9}\n")
    experiment = load_experiment(file, ["training.lr=1e-2", "clients.capacities=[1, 0.5]", "rounds=3"])
    assert (experiment.training.lr, experiment.training.momentum, experiment.rounds) == (0.01, 0.9, 3)
    assert experiment.clients.capacities == (1, 0.5)
    assert message(load_experiment, file, ["training.lrr=1"]).startswith(
        f"{file}: training.lrr: unknown key 'lrr'; did you mean 'lr'?"
    )


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("training.lr=1e-2", ("training.lr", 0.01)),
        ("method=heterofl", ("method", "heterofl")),
        ("training.milestones=[1, 2]", ("training.milestones", [1, 2])),
        ("training.clip=null", ("training.clip", None)),
        ("data.root=a=b", ("data.root", "a=b")),
    ],
)
def test_settings(text, setting):
    assert parse_setting(text) == setting


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training.lr", "--set 'training.lr': allowed: path=value, e.g. training.lr=0.05"),
        ("=3", "--set '=3': allowed: path=value, e.g. training.lr=0.05"),
        ("a=[1", "--set 'a=[1': the value is not valid YAML"),
    ],
)
def test_bad_settings(text, expected):
    assert message(parse_setting, text) == expected


def test_a_path_is_set_in_a_copy():
    given = {"training": {"lr": 1}, "rounds": 3, "run": None}
    assert set_path(given, "training.momentum", 2)["training"] == {"lr": 1, "momentum": 2}
    assert set_path(given, "run.actors", 2)["run"] == {"actors": 2}
    assert set_path(given, "new.deep", 2)["new"] == {"deep": 2}
    assert given == {"training": {"lr": 1}, "rounds": 3, "run": None}
    assert message(set_path, given, "rounds.x", 2) == "rounds.x: rounds is 3, not a section"


def test_a_path_reaches_into_a_list():
    given = {"method": {"submodels": [{"width": 1}, {"width": 0.5}], "norms": []}}
    assert set_path(given, "method.submodels.1.width", 0.4)["method"]["submodels"] == [{"width": 1}, {"width": 0.4}]
    assert set_path(given, "method.submodels.0", 3)["method"]["submodels"] == [3, {"width": 0.5}]
    assert given["method"]["submodels"] == [{"width": 1}, {"width": 0.5}]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("submodels.2.width", "submodels is a list, given its entry '2'; allowed: 0 to 1"),
        ("submodels.width", "submodels is a list, given its entry 'width'; allowed: 0 to 1"),
        ("submodels.-1", "submodels is a list, given its entry '-1'; allowed: 0 to 1"),
        ("submodels.0.width.x", "submodels.0.width is 1, not a section"),
        ("norms.0", "norms is a list, given its entry '0'; allowed: nothing, for it is empty"),
        ("sizes.0.width", "sizes is not given, so it has no entry 0; write its list first"),
        ("variant.0", "variant is 'W', not a section"),
    ],
)
def test_a_place_that_a_list_does_not_have(path, expected):
    given = {"submodels": [{"width": 1}, {"width": 0.5}], "norms": [], "variant": "W"}
    assert message(set_path, given, path, 2) == f"{path}: {expected}"


SUBMODELS = [{"capacity": 1}, {"capacity": 0.3, "width": 0.75, "blocks": "11 10 00 10"}]


def resnet(**sections):
    given = {"rounds": 1, "model": {"name": "resnet18", "channels": 4}, "clients": {"capacities": [1, 0.3]}}
    return parse_experiment(given | sections, "test")


def test_what_a_network_keeps_and_costs():
    experiment = resnet(method={"name": "nefl", "submodels": SUBMODELS})
    full, part = describe_experiment(experiment, "macs")
    assert (full["width"], full["blocks"], part["width"], part["blocks"]) == (1, "8/8", 0.75, "11 10 00 10")
    assert list(full)[:3] == ["capacity", "width", "blocks"]
    costs = experiment.costs()
    assert list(costs) == ["parameters_1", "macs_1", "parameters_0.3", "macs_0.3"]
    assert [costs["parameters_0.3"], costs["macs_0.3"]] == [part["parameters"], part["flops"]]
    [digits, _] = describe_experiment(tiny(clients={"capacities": [1, 0.5]}), "macs")
    assert list(digits)[:3] == ["capacity", "width", "parameters"]


def test_a_masked_network_costs_what_is_there(monkeypatch):
    """Of 10 rows of 9 weights, at 64 pixels, and 39 of 80 a third is left, or 3 and 13; all of it travels."""
    monkeypatch.setitem(METHODS, "pruned", Pruned)
    full, part = describe_experiment(tiny(method="pruned", clients={"capacities": [0.3, 0.1]}), "macs")
    gone = 7 * 9 + 26 * 80
    assert part["parameters"] == full["parameters"] - gone
    assert part["flops"] == full["flops"] - 7 * 9 * 64 - 26 * 80
    assert part["space_mb"] == 4 * part["parameters"] / 2**20
    assert part["width"] == full["width"] == 0.3
    assert {record[way] for record in (full, part) for way in ("bytes_down", "bytes_up")} == {4 * full["parameters"]}


def test_blocks_behind_the_last_exit_are_left_out():
    model = {"name": "resnet18", "channels": 4, "exits": ["stage1.1"]}
    full, part = describe_experiment(resnet(model=model, method="depthfl"), "macs")
    assert (full["exits"], full["blocks"]) == (2, "8/8")
    assert (part["exits"], part["blocks"]) == (1, "11 00 00 00")


# the parts


def test_differences():
    old = {"a": 1, "b": {"c": 2, "d": [1, 2]}, "gone": {"x": 1}}
    new = {"a": 1, "b": {"c": 3, "d": [1, 2]}, "new": 4}
    assert differences(old, new) == ["b.c: 2 -> 3", "gone: {'x': 1} -> None", "new: None -> 4"]


def test_the_nearest_name():
    assert nearest("fedavgg", ["heterofl", "fedavg"]) == "did you mean 'fedavg'? known: fedavg, heterofl"
    assert nearest("zzz", ["heterofl", "fedavg"]) == "known: fedavg, heterofl"


class Inner(Config):
    depth: int = 1


class Outer(Config):
    size: int
    """Required."""
    inner: Inner = Inner()
    hidden: int = Field(0, exclude=True)


def test_what_is_missing():
    assert message(parse, Outer, {}, "f.yaml: outer") == "f.yaml: outer.size: missing; it has no default"


def test_sections_in_sections():
    given = {"size": 1, "inner": {"depht": 2}}
    assert message(parse, Outer, given, "f.yaml: outer") == (
        "f.yaml: outer.inner.depht: unknown key 'depht'; did you mean 'depth'? known: depth"
    )


def test_a_configuration_is_frozen_and_documented():
    outer = parse(Outer, {"size": 3}, "f.yaml: outer")
    with pytest.raises(ValueError, match="frozen"):
        outer.size = 4  # pyright: ignore
    assert Outer.model_fields["size"].description == "Required."
