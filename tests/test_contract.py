"""Every method, model, partition, score and listener of ours keeps the contract of `rayfl.testing`, which a user's own
inherits too. A new one adds no line here."""

import itertools
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
from helpers import COMPLETE, Photos

from rayfl.core.net import Net
from rayfl.data import PARTITIONS, SCORES
from rayfl.data.datasets import Datasets
from rayfl.data.memory import InMemory
from rayfl.data.scores import OfNetwork
from rayfl.experiment import read_experiment
from rayfl.methods import METHODS
from rayfl.methods.base import Method
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.models import MODELS
from rayfl.models.lora import Lora
from rayfl.testing import (
    DataContract,
    DenseContract,
    ListenerContract,
    MethodContract,
    ModelContract,
    NetworksContract,
    PartitionContract,
    ScoreContract,
)
from rayfl.testing.networks import DATA, FITTING
from rayfl.testing.tiny import made_up_for, model_of

KINDS = ("digits_cnn", "resnet18", "vit_b_16", "heterofl_transformer")
"""A model of each kind: layers in sequence, residual blocks, attention, text."""
SELECTING = ("heterofl", "fiarse")
"""Methods that select on each model: the first positions, and single weights."""
IN_TURN = ("fedrolex", "feddropout", "lg_fedavg")
"""Methods of the other kinds of selection, of which one selects on each model: a window, random positions, some
layers."""
TWINS = {
    "resnet34": "resnet18",
    **dict.fromkeys(("resnet8", "resnet20", "resnet32", "resnet110"), "resnet56"),
    "preact_resnet18_heterofl": "preact_resnet18",
}
"""Models that are the network of another one where a stage has one block."""
ONE = {name: model for name, model in MODELS.items() if name not in ("mix", "causal_lm")}
"""Models of one network, which methods cut. Several: see test_mix.py; those of a folder: see test_causal.py."""
UNFIT = {"resnet55_gkt", "wide_resnet101_2", "roberta", "bert", "distilbert", "gpt2", "llama", "module"}
"""Models with layers outside of one block per stage that cost more than the smallest capacity, or without blocks."""
SELECTS = frozenset({"init", "select", "submodel", "nets", "own", "kept", "pool"})
TRAINS = SELECTS | {"extract", "local_update", "train", "loss", "work", "trains", "deploy"}
VERBS: Mapping[str, Collection[str]] = {
    "test_selections_are_adjoint": SELECTS,
    "test_a_narrow_network_has_the_positions_of_its_axes": SELECTS,
    "test_the_mean_is_over_holders": SELECTS | {"step", "part", "answer"},
    "test_a_round_counts_the_costs_of_narrow_networks": TRAINS,
    "test_sliced_training_is_masked_full_width_training": TRAINS,
    "test_at_full_capacity_it_is_fedavg": TRAINS,
}
"""Test -> the functions of a method that it calls."""


def fitting(method: type[Method]) -> list[str]:
    """Return the models on which a method can run, the first of `KINDS` first."""
    wants = {
        "": lambda model: True,
        "exits": lambda model: model.smallest.get("exits"),
        "blocks": lambda model: model.own_name() not in UNFIT and model_of(model.own_name()).blocks,
        "adapters": lambda model: issubclass(model, Lora),
    }
    models = [name for name, model in ONE.items() if wants[method.contract.wants](model) and name not in TWINS]
    return sorted(models, key=lambda name: KINDS.index(name) if name in KINDS else len(KINDS))


def written(method: type[Method]) -> set[str]:
    """Return the names of the functions of a method that no method before it in `METHODS` has, too."""
    before = itertools.takewhile(lambda other: other is not method, METHODS.values())
    seen = {cls for other in before for cls in other.__mro__}
    return {name for cls in method.__mro__ if cls not in seen for name in vars(cls)}


class Covering(MethodContract):
    """Not the product of all methods and models. Each method trains a model of each kind. What a method inherits is
    tested where it is written. Three methods select on each model, one of them trains it."""

    def models_of(self, check: str) -> list[Any]:
        method, verbs = METHODS[self.method], VERBS.get(check)
        first, *others = fitting(method)
        if verbs and (self.method == "heterofl" or (self.method in SELECTING and "train" not in verbs)):
            return [first, *others]
        if verbs and self.method in IN_TURN and "train" not in verbs:
            return [first, *others[IN_TURN.index(self.method) :: len(IN_TURN)]]
        kinds = [name for name in others if name in KINDS or method.contract.wants == "exits"]
        slow = kinds if verbs is None or verbs & written(method) else []
        return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


def contract(bases: tuple[type, ...], of: type, **said: Any) -> None:
    """The contract of one of our classes, as a user's package has it."""
    name = f"Test{of.__name__}"
    assert name not in globals()
    globals()[name] = type(name, bases, said)


for _name, _method in METHODS.items():
    if _method.contract.wants in ("networks", "features", "extractors"):
        contract((NetworksContract,), _method, method=_name)
        continue
    _base = DenseContract if issubclass(_method, Dense) else MethodContract
    contract((Covering, _base), _method, method=_name, models=fitting(_method)[:1])
for _name, _model in ONE.items():
    contract((ModelContract,), _model, model=_name)
for _name, _rule in PARTITIONS.items():
    contract((PartitionContract,), _rule, partition=_name)
for _name, _score in SCORES.items():
    # scores of networks: see test_language.py
    if not issubclass(_score, OfNetwork):
        contract((ScoreContract,), _score, score=_name)


class TestPersonalHead(DenseContract):
    """A user's."""

    method = "helpers:PersonalHead"
    contract = Contract(fedavg=None, traffic=lambda whole, head: (whole, whole - head))


class TestDigits(DataContract):
    data = "digits"
    model = "digits_cnn"


class TestBreastCancer(DataContract):
    data = "breast_cancer"
    model = "mlp"


class TestDiabetes(DataContract):
    """Numbers as targets."""

    data = "diabetes"
    model = "mlp"


class TestSeries(DataContract):
    """Several labels at once, and missing values."""

    data = InMemory(
        np.where(np.arange(300 * 3 * 8) % 7 == 0, np.nan, np.arange(300 * 3 * 8) % 11).reshape(300, 3, 8),
        np.arange(600).reshape(300, 2) % 3 == 0,
        target="labels",
        missing="mean",
    )
    model = "lstm"


class TestNetworkOfNumbers(ModelContract):
    """Targets other than classes."""

    model: ClassVar = {"name": "mlp"}
    data = "diabetes"


class TestNetworkOfLabels(ModelContract):
    model: ClassVar = {"name": "lstm"}
    data = TestSeries.data


class TestSynthetic(DataContract):
    data: ClassVar = {"name": "synthetic", "shape": [3, 8, 8], "samples": 60, "test_samples": 20, "size": 12}


class TestInMemory(DataContract):
    data = InMemory(
        np.arange(40 * 2 * 5 * 5, dtype=np.uint8).reshape(40, 2, 5, 5), np.arange(40) % 4, crop=1, flip=True
    )


class TestDatasets(DataContract):
    data: ClassVar = {
        "name": "datasets",
        "train": {"of": "torchvision.datasets:FakeData", "options": {"size": 60, "image_size": [3, 8, 8]}},
    }


class TestAugmentedDatasets(DataContract):
    data = Datasets(Photos(), Photos(20, augmented=False))


class TestPoints(DataContract):
    """A user's, which are no images."""

    data = "helpers:Points"
    model = "helpers:OfPoints"


class TestEarlyStopping(ListenerContract):
    listener: ClassVar = {"name": "early_stopping", "metric": "train_loss", "mode": "min", "patience": 1}


class TestTensorBoard(ListenerContract):
    listener = "tensorboard"


@pytest.fixture(autouse=True)
def one_width(request, monkeypatch):
    """FjORD's clients train their largest width at every step, where a test asks what a step costs and does."""
    if any(word in request.node.name for word in ("costs", "sliced")):
        monkeypatch.setattr(METHODS["fjord"], "draws", lambda self, widths, steps, seed: [0] * steps)


def test_twins_are_one_network():
    for name, other in TWINS.items():
        one, two = (Net(model_of(family), 0.3).layout for family in (name, other))
        assert one.shapes == two.shapes


def test_every_method_and_model_has_sound_defaults():
    """As they are published."""
    for name, method in METHODS.items():
        if (networks := FITTING.get(method.contract.wants)) is not None:
            clients = {"capacities": [0.3, 0.2, 0.1], **method.contract.clients}
            data = {"name": "synthetic", **DATA, "public": NetworksContract.public}
            read_experiment({"model": networks[-1], "data": data, "clients": clients, "method": name}, "test")
            continue
        model = model_of("lora" if method.contract.wants == "adapters" else "digits_cnn")
        data = {"name": "synthetic"} | made_up_for(model)
        read_experiment({"model": model, "data": data, "method": name}, "test")
    for name, cls in COMPLETE.items():
        images, model = {"name": "synthetic", "shape": [1, 32, 32]}, cls()
        data = images if model.takes == "input" else {"name": "synthetic"} | made_up_for(model)
        read_experiment({"model": name, "data": data}, "test")
