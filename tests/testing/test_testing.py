"""`rayfl.testing` finds what breaks a promise, and a user's package has it by one import."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers import OfPoints
from torch import nn

from rayfl.core.net import Net
from rayfl.core.seeds import torch_generator
from rayfl.core.submodel import Slice, random_subset
from rayfl.data.partition.iid import IID
from rayfl.data.scores import Accuracy
from rayfl.data.synthetic import Synthetic
from rayfl.methods.dense import Dense
from rayfl.testing import DataContract, DenseContract, ModelContract, PartitionContract, ScoreContract

PACKAGE = """
from rayfl import Dense

class Halved(Dense):
    '''FedAvg, half a step of it.'''

    factor: float = 0.5

    def step(self, state, round, fold):
        return {"params": {name: t.lerp(state["params"][name], self.factor) for name, t in fold.mean("params").items()}}
"""
TESTS = """
from rayfl.testing import DenseContract, MethodContract, ModelContract, ScoreContract

class TestMine(DenseContract):
    method = {"name": "my_package.halved:Halved", "factor": 0.0}
    models = ["digits_cnn"]

class TestHalf(MethodContract):
    method = "my_package.halved:Halved"
    models = [{"name": "digits_cnn", "input": [1, 8, 8], "classes": 4}]
"""


def test_a_package_inherits_the_suite_by_one_import(tmp_path):
    """A method that is the mean passes; one that goes half way does not."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_package" / "halved.py").write_text(PACKAGE)
    (tmp_path / "test_mine.py").write_text(TESTS)
    some = ["-k", "holders or pickle or file"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *some, str(tmp_path)]
    found = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    [failed] = [line for line in found.stdout.splitlines() if line.startswith("FAILED")]
    assert failed.startswith("FAILED test_mine.py::TestHalf::test_the_mean_is_over_holders[model0]"), found.stdout
    assert "1 failed, 5 passed" in found.stdout


# methods


class Impure(Dense):
    """Trains what it is sent in place."""

    def local_update(self, payload, visit):
        update = self.trained(payload, visit)
        for t in payload["params"].values():
            t.add_(1)
        return update


class Unsaid(Slice):
    """A selection whose key says too little."""

    @property
    def key(self):
        return self.net


class OneKey(Dense):
    """Selects at random, and all selections have one key."""

    def select(self, state, client):
        generator = torch_generator(0, "test:subset", client.round)
        drawn = random_subset(self.task.server, self.net_at(client.capacity), generator)
        return Unsaid(drawn.whole, drawn.net, drawn.positions)


class Forgetful(Dense):
    """Remembers something outside of the state."""

    rounds: ClassVar[list[int]] = []

    def step(self, state, round, fold):
        self.rounds.append(round)
        return {"params": {name: t + len(self.rounds) for name, t in fold.mean("params").items()}}


class Careless(Dense):
    """Changes the state before."""

    def step(self, state, round, fold):
        for name, t in fold.mean("params").items():
            state["params"][name].copy_(t)
        return state


class Wasteful(Dense):
    """Sends the whole network."""

    def extract(self, state, selection):
        return super().extract(state, selection) | {"whole": state["params"]}

    def local_update(self, payload, visit):
        return self.trained({"params": payload["params"]}, visit)


class Misjudged(Dense):
    judged_on: ClassVar = "client_validation"


def fails(contract: type, test: str, tmp_path: Path, *arguments: Any, **said: Any) -> None:
    """The test of the contract fails."""
    made = type("Contract", (contract,), said)()
    asked = [tmp_path] if "tmp_path" in getattr(contract, test).__annotations__ else []
    with pytest.raises((AssertionError, ValueError)):
        getattr(made, test)(*arguments, *asked)


@pytest.mark.parametrize(
    ("method", "test", "arguments"),
    [
        (Impure, "test_verbs_are_pure_and_travel_by_pickle", ()),
        (OneKey, "test_equal_keys_are_equal_selections", ()),
        (Forgetful, "test_a_resumed_run_is_the_straight_run", ()),
        (Forgetful, "test_the_mean_is_over_holders", ("digits_cnn",)),
        (Careless, "test_verbs_are_pure_and_travel_by_pickle", ()),
        (Wasteful, "test_a_round_counts_the_costs_of_narrow_networks", ("digits_cnn",)),
        (Misjudged, "test_a_round_changes_what_its_clients_hold", ("digits_cnn",)),
    ],
)
def test_a_method_that_breaks_a_promise(method, test, arguments, tmp_path):
    fails(DenseContract, test, tmp_path, *arguments, method=method())


# models, data sets, partitions and scores


class Wide(OfPoints):
    """No layer becomes narrow."""

    def build(self, net):
        return super().build(Net(self))


class Undeclared(OfPoints):
    def build(self, net):
        return nn.Sequential(*super().build(net), nn.Linear(2, 2))


class Restless(OfPoints):
    """Draws in evaluation."""

    def build(self, net):
        return nn.Sequential(*super().build(net), _Noise())


class _Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand(1)


class Elsewhere(OfPoints):
    """Its made-up samples are others than the data's."""

    def example(self, batch, device):
        return torch.zeros(batch, 1, 3, device=device)


@pytest.mark.parametrize(
    ("model", "test"),
    [
        (Wide, "test_a_narrow_network_is_narrow"),
        (Undeclared, "test_every_parameter_has_its_axes"),
        (Restless, "test_it_starts_from_the_seed"),
        (Elsewhere, "test_it_answers_with_logits_of_every_class"),
    ],
)
def test_a_model_that_breaks_a_promise(model, test, tmp_path):
    fails(ModelContract, test, tmp_path, model=model(), data={"name": "helpers:Points"})


class Changing(Synthetic):
    def load(self):
        arrays = super().load()
        np.random.default_rng().shuffle(arrays.train["y"])
        return arrays


class Overstated(Synthetic):
    @property
    def offers(self):
        return dict(super().offers) | {"classes": 11}


@pytest.mark.parametrize(
    ("data", "test"),
    [(Changing, "test_its_arrays_are_checked_and_always_the_same"), (Overstated, "test_batches_are_what_it_offers")],
)
def test_a_data_set_that_breaks_a_promise(data, test, tmp_path):
    fails(DataContract, test, tmp_path, data=data())


class Global(IID):
    """Asks the global generator."""

    def owners(self, labels, clients, generator):
        return super().owners(labels, clients, np.random.default_rng(np.random.randint(1 << 30)))


class Selfish(IID):
    def owners(self, labels, clients, generator):
        return tuple(owner * 0 for owner in super().owners(labels, clients, generator))


@pytest.mark.parametrize(
    ("partition", "test"),
    [(Global, "test_it_follows_from_the_seed"), (Selfish, "test_nobody_shares_a_sample_and_nobody_has_none")],
)
def test_a_partition_that_breaks_a_promise(partition, test, tmp_path):
    fails(PartitionContract, test, tmp_path, partition=partition())


class MeanOfBatches(Accuracy):
    """Every batch counts alike, however large it is."""

    def counts(self, logits, y):
        correct, count = super().counts(logits, y).double()
        return torch.stack([correct / count, torch.ones((), dtype=torch.float64)])


class Backwards(Accuracy):
    better: ClassVar = "min"


@pytest.mark.parametrize(
    ("score", "test"),
    [(MeanOfBatches, "test_it_adds_over_batches"), (Backwards, "test_right_answers_are_not_worse_than_wrong_ones")],
)
def test_a_score_that_breaks_a_promise(score, test, tmp_path):
    fails(ScoreContract, test, tmp_path, score=score())
