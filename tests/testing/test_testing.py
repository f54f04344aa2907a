"""`rayfl.testing` finds what breaks a promise, and a user's package has it by one import."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers import OfPoints, PersonalHead, Points, run, simulate, tiny
from torch import nn

from rayfl.config import ConfigError
from rayfl.config.failures import PluginFailed
from rayfl.core.axes import conv, linear
from rayfl.core.fold import Update
from rayfl.core.net import Net, params_of
from rayfl.core.seeds import torch_generator
from rayfl.core.submodel import Slice, random_subset
from rayfl.core.tensors import copied
from rayfl.data.partition.iid import IID
from rayfl.data.scores import Accuracy
from rayfl.data.synthetic import Synthetic
from rayfl.engine.checked import MethodFailed
from rayfl.listeners import Listener, tell, tell_past
from rayfl.methods.contract import Contract
from rayfl.methods.dense import Dense
from rayfl.models.base import ImageModel
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


@pytest.mark.slow
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


class Normalised(Dense):
    """Clients send a group of their own, as in FedNova."""

    sums: bool = False

    def local_update(self, payload, visit):
        update = self.trained(payload, visit)
        (update.sums if self.sums else update.whole)["tau"] = {"tau": torch.tensor(2.0 * update.weight)}
        return update

    def step(self, state, round, fold):
        steps = fold.mean("tau")["tau"] / 2
        return {"params": {name: t * steps for name, t in fold.mean("params").items()}}


class Misjudged(Dense):
    judged_on: ClassVar = "client_validation"


class Unweighted(Dense):
    """Forgets to multiply by the weight."""

    def local_update(self, payload, visit):
        module = self.module(visit, payload["params"])
        metrics = self.fit(module, visit)
        return Update({"params": copied(params_of(module))}, self.weight_of(visit.data), metrics=metrics)


class Undeployed(PersonalHead):
    """Keeps its head where nothing finds it again."""

    def local_update(self, payload, visit):
        kept = visit.client_state and {"own": visit.client_state["head"]}
        update = super().local_update(payload, replace(visit, client_state=kept))
        update.client_states[visit.client.id] = {"head": update.client_states[visit.client.id]["own"]}
        return update


def fails(
    contract: type, test: str, tmp_path: Path, wrong: dict, right: dict, said: str | None, *arguments: Any
) -> None:
    """The test of the contract fails for one class, for the reason that is said, and not for another one."""
    asked = [tmp_path / "right", tmp_path / "wrong"] if "tmp_path" in getattr(contract, test).__annotations__ else []
    getattr(type("Contract", (contract,), right)(), test)(*arguments, *asked[:1])
    with pytest.raises((AssertionError, ConfigError), match=said):
        getattr(type("Contract", (contract,), wrong)(), test)(*arguments, *asked[1:])


ON_DIGITS = ("digits_cnn",)


@pytest.mark.parametrize(
    ("method", "right", "test", "arguments", "said"),
    [
        (Impure, Dense, "test_verbs_are_pure_and_travel_by_pickle", (), "a local update changes its inputs"),
        (OneKey, Dense, "test_equal_keys_are_equal_selections", (), "two selections have the key"),
        (Forgetful, Dense, "test_a_resumed_run_is_the_straight_run", (), None),
        (Forgetful, Dense, "test_the_mean_is_over_holders", ON_DIGITS, "not close"),
        (Unweighted, Dense, "test_clients_that_train_nothing_change_nothing", (), "not close"),
        (Careless, Dense, "test_verbs_are_pure_and_travel_by_pickle", (), "a step changes the previous state"),
        (Normalised, Dense, "test_the_mean_is_over_holders", ON_DIGITS, "it needs 'tau'. A method's `contract` decl"),
        (Wasteful, Dense, "test_a_round_counts_the_costs_of_narrow_networks", ON_DIGITS, "not of the client's network"),
        (Misjudged, Dense, "test_a_round_changes_what_its_clients_hold", ON_DIGITS, "judged_on is 'client_validation'"),
        (Undeployed, PersonalHead, "test_a_round_changes_what_its_clients_hold", ON_DIGITS, "has no group 'own'"),
    ],
)
def test_a_method_that_breaks_a_promise(method, right, test, arguments, said, tmp_path):
    fails(DenseContract, test, tmp_path, {"method": method()}, {"method": right()}, said, *arguments)


def test_a_group_of_its_own_is_sent_whole(tmp_path):
    with pytest.raises(MethodFailed, match="sums: tau/tau is not a tensor of the network, .* Hint: `whole`"):
        run(simulate(tiny(method=Normalised(sums=True)), tmp_path))


def test_a_suite_says_which_methods_are_its_own():
    with pytest.raises(TypeError, match="fedmd trains different networks. Use NetworksContract"):
        type("Contract", (MethodContract,), {"method": "fedmd"})().pytest_generate_tests(None)


def test_a_test_class_states_the_contract():
    """In place of the method's own."""
    made = type("Contract", (NetworksContract,), {"method": "fedmd", "contract": Contract(short={"exchange": False})})
    assert made().given().exchange is False


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
        return x + torch.rand_like(x)


class Elsewhere(OfPoints):
    """Its made-up samples are others than the data's."""

    def example(self, batch, device):
        return torch.zeros(batch, 1, 3, device=device)


@pytest.mark.parametrize("data", [{"name": "helpers:Points"}, "helpers:Points", Points()])
@pytest.mark.parametrize(
    ("model", "test", "said"),
    [
        (Wide, "test_a_narrow_network_is_narrow", "hidden"),
        (Undeclared, "test_every_parameter_has_its_axes", "no axes"),
        (Restless, "test_it_starts_from_the_seed", "evaluation is random"),
        (Elsewhere, "test_it_answers_with_logits_of_every_class", "Allowed: torch.float32 of shape"),
    ],
)
def test_a_model_that_breaks_a_promise(model, test, said, data, tmp_path):
    wrong, right = ({"model": made, "data": data} for made in (model(), OfPoints()))
    fails(ModelContract, test, tmp_path, wrong, right, said)


class Summed(ImageModel):
    """A residual sum of two axes, which have to be one."""

    channels: int = 8
    names: tuple[str, str] = ("a", "b")

    def build(self, net):
        first, second = (net.axis(name, self.channels) for name in self.names)
        return _Sum(conv(self.image, first, 3, padding=1), conv(first, second, 3, padding=1), second, self.labels)


class _Sum(nn.Module):
    def __init__(self, one, two, axis, labels):
        super().__init__()
        self.one, self.two, self.head = one, two, linear(axis, labels)

    def forward(self, x):
        x = torch.relu(self.one(x))
        return self.head((x + self.two(x)).mean((2, 3)))


class Flat(ImageModel):
    """Flattens channels after positions, or before them, as it declares."""

    channels: int = 8
    channels_last: bool = False

    def build(self, net):
        channels = net.axis("a", self.channels)
        order = [_Last()] if self.channels_last else []
        head = linear(channels.repeat(self.input[1] * self.input[2]), self.labels)
        return nn.Sequential(conv(self.image, channels, 3, padding=1), nn.ReLU(), *order, nn.Flatten(), head)


class _Last(nn.Module):
    def forward(self, x):
        return x.permute(0, 2, 3, 1)


@pytest.mark.parametrize(
    ("wrong", "right"), [(Summed(), Summed(names=("a", "a"))), (Flat(channels_last=True), Flat())], ids=["sum", "flat"]
)
def test_a_model_whose_axes_are_wrong(wrong, right, tmp_path):
    """All sizes are right; only the cut network's function shows it."""
    test = "test_a_cut_network_is_the_whole_one_with_zeros_elsewhere"
    fails(ModelContract, test, tmp_path, {"model": wrong}, {"model": right}, "not close")


def test_sections_of_ones_own():
    """Of another class they keep the options of the tiny experiment that it has."""
    given = {"method": "fedavg", "models": [{"name": "digits_cnn"}], "sections": {"data": "digits"}}
    digits = type("Contract", (DenseContract,), given)()
    skewed = {"partition": {"name": "dirichlet", "alpha": 0.3}}
    assert digits.experiment().data.name == "digits" and digits.experiment().partition.name == "shards"
    dirichlet = type("Contract", (DenseContract,), {"method": "fedavg", "sections": skewed})()
    assert dirichlet.experiment().partition.alpha == 0.3 and dirichlet.experiment().data.name == "synthetic"


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
    ("data", "test", "said"),
    [
        (Changing, "test_its_arrays_are_checked_and_always_the_same", "y: loading again returns other values"),
        (Overstated, "test_batches_are_what_it_offers", None),
    ],
)
def test_a_data_set_that_breaks_a_promise(data, test, said, tmp_path):
    fails(DataContract, test, tmp_path, {"data": data()}, {"data": Synthetic()}, said)


class Global(IID):
    """Asks the global generator."""

    def owners(self, labels, clients, generator):
        return super().owners(labels, clients, np.random.default_rng(np.random.randint(1 << 30)))


class Selfish(IID):
    def owners(self, labels, clients, generator):
        return tuple(owner * 0 for owner in super().owners(labels, clients, generator))


@pytest.mark.parametrize(
    ("partition", "test", "said"),
    [
        (Global, "test_it_follows_from_the_seed", "tensors differ|names differ"),
        (Selfish, "test_nobody_shares_a_sample_and_nobody_has_none", "without training data"),
    ],
)
def test_a_partition_that_breaks_a_promise(partition, test, said, tmp_path):
    fails(PartitionContract, test, tmp_path, {"partition": partition()}, {"partition": IID()}, said)


class MeanOfBatches(Accuracy):
    """Every batch counts alike, however large it is."""

    def counts(self, logits, y):
        correct, count = super().counts(logits, y).double()
        return torch.stack([correct / count, torch.ones((), dtype=torch.float64)])


class Backwards(Accuracy):
    better: ClassVar = "min"


@pytest.mark.parametrize(
    ("score", "test", "said"),
    [
        (MeanOfBatches, "test_it_adds_over_batches", "not close"),
        (Backwards, "test_right_answers_are_not_worse_than_wrong_ones", None),
    ],
)
def test_a_score_that_breaks_a_promise(score, test, said, tmp_path):
    fails(ScoreContract, test, tmp_path, {"score": score()}, {"score": Accuracy()}, said)


# listeners


class Cheating(Listener):
    """Changes what it is told."""

    def on_round(self, line):
        line["train_loss"] = 0.0
        return False

    def on_past(self, lines):
        for line in lines:
            line.clear()
        return False


class Homeless(Listener):
    """Needs a folder."""

    def on_start(self, config, folder, round):
        (folder / "curve.csv").write_text("")


def test_a_listener_cannot_change_a_record():
    line = {"round": 1, "train_loss": 1.0}
    tell([Cheating()], [line])
    tell_past([Cheating()], [line])
    assert line == {"round": 1, "train_loss": 1.0}


def test_a_listener_that_breaks_a_promise():
    with pytest.raises(PluginFailed, match="test_testing:Homeless, on_start: TypeError: .*NoneType"):
        type("Contract", (ListenerContract,), {"listener": Homeless()})().test_a_run_without_a_folder_may_have_it()
