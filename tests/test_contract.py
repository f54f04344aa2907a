"""Every method, model, partition, score and listener of ours keeps the contract of `rayfl.testing`, which a user's own
inherits too. A new one adds no line here."""

from typing import Any, ClassVar

import numpy as np
import pytest

from rayfl.core.net import Net
from rayfl.data import PARTITIONS, SCORES
from rayfl.data.memory import InMemory
from rayfl.experiment import read_experiment
from rayfl.methods import METHODS
from rayfl.methods.base import Method
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.models import MODELS
from rayfl.models.base import TokenModel
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

EVERY_METHOD = ("digits_cnn", "resnet18", "vit_b_16", "heterofl_transformer")
"""Layers after one another, residual blocks, attention, text: every method that can is tested on these, and on the
other models under the marker `slow`."""
EVERY_MODEL = ("heterofl", "fedrolex", "feddropout", "fiarse", "lg_fedavg")
"""A method of each kind of selection, which is tested on every model: the first positions, a window, random ones,
single weights, some layers. Of text there is one model among them."""
TWINS = {
    "resnet34": "resnet18",
    **dict.fromkeys(("resnet8", "resnet20", "resnet32", "resnet110"), "resnet56"),
    "preact_resnet18_heterofl": "preact_resnet18",
}
"""Models that are the network of another one where a stage has one block."""
ONE = {name: model for name, model in MODELS.items() if name != "mix"}
"""Models of one network, which methods cut. Several: see test_mix.py."""
WITHOUT_SMALL_BLOCKS = ("roberta", "bert", "distilbert", "gpt2", "llama")
UNFIT = {
    *(
        (name, model)
        for name in ("depthfl_nefl", "inclusivefl", "fedra", "fedepth")
        for model in ("wide_resnet101_2", "resnet8_gkt", "resnet55_gkt")
    ),
    ("scalefl_nefl", "resnet55_gkt"),
    *(
        (name, model)
        for name in ("depthfl_nefl", "scalefl_nefl", "inclusivefl", "fedra", "fedepth")
        for model in WITHOUT_SMALL_BLOCKS
    ),
    *(("flanc", model) for model in ("gpt2", "lora")),
    *(("adaptivefl", model) for model in ("roberta", "bert", "distilbert", "gpt2", "llama")),
    *((name, model) for name in ("spafl", "fedpm") for model in ("gpt2", "lora")),
}
"""Layers outside one block per stage cost more than the smallest capacity. All layers have one width. Layers are not
torch's. The rows of GPT-2's matrices, and of adapters, are no neurons."""


def fitting(method: type[Method]) -> list[str]:
    """The models on which a method can run."""
    wants = {
        "": lambda model: True,
        "exits": lambda model: model.smallest.get("exits"),
        "blocks": lambda model: model().blocks,
        "adapters": lambda model: issubclass(model, Lora),
    }
    models = {name: model for name, model in ONE.items() if wants[method.contract.wants](model)}
    return [name for name in models if name not in TWINS and (method.own_name(), name) not in UNFIT]


def contract(base: type, of: type, **said: Any) -> None:
    """The contract of one of our classes, as a user's package has it."""
    name = f"Test{of.__name__}"
    assert name not in globals()
    globals()[name] = type(name, (base,), said)


for _name, _method in METHODS.items():
    if _method.contract.wants in ("networks", "features", "extractors"):
        contract(NetworksContract, _method, method=_name)
        continue
    _models = fitting(_method)
    _many = _name in EVERY_MODEL or _method.contract.wants == "exits"
    _few = [m for m in _models if m in EVERY_METHOD or (_many and not issubclass(MODELS[m], TokenModel))]
    _base = DenseContract if issubclass(_method, Dense) else MethodContract
    contract(_base, _method, method=_name, models=_few, more_models=[m for m in _models if m not in _few])
for _name, _model in ONE.items():
    contract(ModelContract, _model, model=_name)
for _name, _rule in PARTITIONS.items():
    contract(PartitionContract, _rule, partition=_name)
for _name, _score in SCORES.items():
    contract(ScoreContract, _score, score=_name)


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
    for name in MODELS:
        images, model = {"name": "synthetic", "shape": [1, 32, 32]}, MODELS[name]()
        data = images if model.takes == "input" else {"name": "synthetic"} | made_up_for(model)
        read_experiment({"model": name, "data": data}, "test")
