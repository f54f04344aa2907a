"""Errors of a user's own classes name the setting, the class and the verb."""

import signal
import sys

import pytest
import torch
from helpers import simulate, tiny
from torch import nn

import rayfl
from rayfl.config import PluginFailed
from rayfl.data.partition.base import Partition
from rayfl.data.scores import Score
from rayfl.engine.termination import deferred
from rayfl.listeners import Listener
from rayfl.models.base import ImageModel
from rayfl.training.transforms import Transform

HERE = __name__


class Halved(Score):
    def counts(self, logits, y):
        return torch.ones(1)

    def value(self, sums):
        return 1.0


class Change(Transform):
    stage = "change"

    def change(self, d, generator):
        raise KeyError("on purpose")


class Nobody(Partition):
    answer: object = None

    def owners(self, labels, clients, generator):
        return self.answer


class Ear(Listener):
    verb: str

    def _fail(self, verb):
        if verb == self.verb:
            raise KeyError("on purpose")

    def on_phase(self, phase):
        self._fail("on_phase")

    def on_start(self, config, folder, round):
        self._fail("on_start")

    def on_round(self, line):
        self._fail("on_round")

    def on_end(self, status):
        self._fail("on_end")


class Net(ImageModel):
    verb: str

    def build(self, net):
        if self.verb == "build":
            raise KeyError("on purpose")
        return Layers(self.verb, self.input[0] * self.input[1] * self.input[2], self.labels)


class Layers(nn.Module):
    def __init__(self, verb, inputs, labels):
        super().__init__()
        self.verb = verb
        self.head = rayfl.linear(rayfl.Axis.fixed("pixels", inputs), labels)

    def forward(self, x):
        if x.device.type != "meta" and self.training == (self.verb == "training"):
            raise KeyError("on purpose")
        return self.head(x.flatten(1))


def failure(**sections):
    with pytest.raises(PluginFailed) as error:
        rayfl.run(tiny(rounds=1, clients={"count": 2, "cohort": 2, "capacities": [1.0]}, **sections))
    first, *more = str(error.value).splitlines()
    assert more[0] == "Traceback (most recent call last):" and more[-1] == "KeyError: 'on purpose'"
    return first


@pytest.mark.parametrize("verb", ["on_phase", "on_start", "on_round", "on_end"])
def test_listeners(verb):
    assert failure(listeners=[Ear(verb=verb)]) == f"listeners: {HERE}:Ear, {verb}: KeyError: 'on purpose'"


def test_transforms():
    said = failure(updates={"transforms": [Change()]})
    assert said == f"updates.transforms: {HERE}:Change, change: KeyError: 'on purpose'"


def test_partitions():
    with pytest.raises(PluginFailed, match=f"^partition: {HERE}:Nobody, owners: TypeError: cannot unpack"):
        tiny(partition=Nobody()).federate(tiny().data.arrays())


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("build", "model: {}:Net, build at width 1: KeyError: 'on purpose'"),
        (
            "training",
            "model {}:Net, forward at width 1, in method fedavg, local_update, client 0: KeyError: 'on purpose'",
        ),
        ("evaluation", "model: {}:Net, forward: KeyError: 'on purpose'"),
    ],
)
def test_models(verb, said):
    assert failure(model=Net(verb=verb), method="fedavg").startswith(said.format(HERE))


def test_scores(tmp_path, monkeypatch):
    simulation = simulate(tiny(rounds=1, evaluation={"scores": [Halved()]}), tmp_path)
    for verb in ("counts", "value"):
        monkeypatch.setattr(Halved, verb, lambda *_: {}["on purpose"])
        with pytest.raises(PluginFailed, match=f"^evaluation.scores: {HERE}:Halved, {verb}.*: KeyError: 'on purpose'"):
            simulation.evaluate()
        monkeypatch.undo()


def test_sys_exit_is_an_error(tmp_path, monkeypatch):
    simulation = simulate(tiny(method="fedavg", rounds=1), tmp_path)
    monkeypatch.setattr(type(simulation.method), "local_update", lambda *_: sys.exit(3))
    with pytest.raises(PluginFailed, match="^method fedavg, local_update, client .: SystemExit: 3"):
        simulation.run_round()


def test_only_a_ctrl_c_interrupts(tmp_path, monkeypatch):
    """In a run, which defers a Ctrl-C, a KeyboardInterrupt of a client's code is an error of its own."""

    def interrupt(*_):
        raise KeyboardInterrupt("no key")

    simulation = simulate(tiny(method="fedavg", rounds=1), tmp_path)
    monkeypatch.setattr(type(simulation.method), "local_update", interrupt)
    with (
        deferred(),
        pytest.raises(PluginFailed, match="^method fedavg, local_update, client .: KeyboardInterrupt: no key"),
    ):
        simulation.run_round()
    # a process in the background has another handler
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            simulation.run_round()
    finally:
        signal.signal(signal.SIGINT, before)
