"""Contract tests of models."""

import math
import pickle
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import SkipTest

import torch
from torch import nn

from rayfl.core.axes import size_at
from rayfl.core.net import Net, check_axes, load
from rayfl.core.norms import fresh
from rayfl.core.seeds import torch_generator, torch_scope
from rayfl.core.submodel import random_subset
from rayfl.core.tensors import Params
from rayfl.experiment import Experiment
from rayfl.metrics import named
from rayfl.models import MODELS_KIND
from rayfl.models.base import Model
from rayfl.testing.tiny import assert_same, data_for, model_of, run, simulate, split_for, tiny
from rayfl.training.settings import every_exit

NARROW = 0.3


class ModelContract:
    """A subclass sets `model`, and `data` if its samples are not images."""

    model: Any
    """Model, as in a `model:` section: a mapping, an object, or a bare name, the family's smallest network."""
    data: Any = None
    """Suitable samples, as in a `data:` section: a name, a mapping with options, or an object. Default: samples made up
    for the model."""

    def network(self) -> Model:
        """Return the model with the fields that the data set offers."""
        return self.experiment().model

    def experiment(self, **sections: Any) -> Experiment:
        model = model_of(self.model)
        data = data_for(model, *([self.data] if self.data else []))
        given = {"model": model, "data": data, "partition": split_for(model, data), "method": "heterofl"}
        return tiny(**given | sections)

    def nets(self) -> list[Net]:
        """Return networks of two widths, with all early exits and step sizes of the model."""
        model = self.network()
        net = Net(model, exits=model.exit_count if model.exit_count > 1 else 0, steps=True)
        return [net, replace(net, width=NARROW)]

    def test_it_is_read_from_a_file(self) -> None:
        model = self.network()
        assert type(model)(**model.model_dump(mode="json")) == model
        assert hash(pickle.loads(pickle.dumps(model))) == hash(model)
        assert issubclass(MODELS_KIND.find(model.name, "model"), Model)

    def test_every_parameter_has_its_axes(self) -> None:
        wide, narrow = self.nets()
        check_axes(wide, NARROW)
        for net in (wide, narrow):
            shapes = {name: tuple(p.shape) for name, p in net.build().named_parameters()}
            assert shapes == {name: tuple(shape) for name, shape in net.layout.shapes.items()}

    def test_a_narrow_network_is_narrow(self) -> None:
        """It has a share of every cuttable axis, and fewer parameters and multiply-adds."""
        wide, narrow = self.nets()
        assert wide.layout.axes, "it has no axis that can be cut"
        for name, axis in narrow.layout.axes.items():
            assert axis.size == size_at(NARROW, wide.layout.axes[name].size, "up"), name
        for small, large in ((narrow.parameters, wide.parameters), (narrow.macs, wide.macs)):
            assert 0 < small < large
        assert sum(wide.layer_macs.values()) <= wide.macs

    def test_it_answers_with_logits_of_every_class(self) -> None:
        """Or with a number for every target. Samples of the data set have the shape and type of `example`."""
        x, y, goal = self.batch()
        every, _, _ = self.batch(None)
        for net in self.nets():
            example = net.model.example(len(every), "cpu")
            assert (example.shape, example.dtype) == (every.shape, every.dtype), "`example` does not match the data"
            with torch_scope(0):
                given = net.build()(x)
            exits = every_exit(given)
            assert len(exits) == max(net.exits, 1) and isinstance(given, tuple) == (net.exits > 0)
            for logits in exits:
                assert logits.shape == ((*y.shape, goal.classes) if goal.targets == "class" else y.shape)
                assert logits.isfinite().all()
                assert goal.loss(logits, y).isfinite()

    def batch(self, count: int | None = 3) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Return `count` samples of the data set, or all, and their goal."""
        data = self.experiment().data
        train = data.arrays().train
        samples, prepare = {name: torch.from_numpy(array[:count]) for name, array in train.items()}, data.prepare
        prepare = prepare.fitted(train)
        return *prepare.batch(prepare.whole(samples), None), data.goal

    def test_it_starts_from_the_seed(self) -> None:
        """The global generator has no influence; an evaluation is a function of parameters and statistics."""
        net = self.nets()[1]
        drawn = []
        for noise in (1, 2):
            torch.manual_seed(noise)
            with torch_scope(7):
                drawn.append(net.initial())
        assert_same(drawn[0], drawn[1])
        assert drawn[0].keys() == net.layout.shapes.keys()
        assert net.statistics().keys() == fresh(net.blank()).keys()
        x, _, _ = self.batch()
        answers = []
        for seed in (1, 2):
            with torch_scope(seed), torch.no_grad():
                module = net.build().eval()
                load(module, drawn[0])
                answers.append(every_exit(module(x))[-1])
        assert torch.equal(*answers), "evaluation is random, or depends on tensors that are not parameters"

    def test_a_network_may_end_early(self) -> None:
        """It can end at every exit, and work without any one residual block."""
        model = self.network()
        for exits in range(1, model.exit_count + 1 if model.exit_count > 1 else 1):
            net = Net(model, exits=exits)
            assert len(every_exit(net.build()(model.example(2, "cpu")))) == exits
        whole = Net(model)
        for block in chain(*model.blocks):
            net = replace(whole, without=(block,))
            assert net.parameters < whole.parameters and net.layout.shapes.items() <= whole.layout.shapes.items()
            net.build()(model.example(2, "cpu"))

    def test_a_cut_network_is_the_whole_one_with_zeros_elsewhere(self) -> None:
        """For any positions of its axes: dimensions that are cut together share an axis, and others do not. Norms over
        channels and the Scaler are excluded, because they depend on the width."""
        whole = Net(normless(self.network()))
        cut, (x, _, _) = replace(whole, width=NARROW), self.batch()
        for seed in range(3):
            selection = random_subset(whole, cut, torch_generator(seed, "test:cut"))
            shapes, generator = whole.layout.shapes, torch_generator(seed, "test:parameters")
            part = selection.take({name: torch.randn(s, generator=generator) * 0.3 for name, s in shapes.items()})
            whole_params = {name: torch.zeros(shape) for name, shape in shapes.items()}
            selection.put(part, whole_params)
            with torch.no_grad():
                # in float32, processors round differently by up to a thousandth
                given = x.double() if x.is_floating_point() else x
                answers = [
                    every_exit(loaded(net, params).double()(given))[-1]
                    for net, params in ((cut, part), (whole, whole_params))
                ]
            torch.testing.assert_close(*answers, rtol=1e-6, atol=1e-8)

    def test_methods_train_it(self, tmp_path: Path) -> None:
        """Methods train narrow networks, and single weights of the whole one, and count costs."""
        few = {"clients": {"cohort": 2, "capacities": [NARROW, 0.1]}, "evaluation": {"clients": False}}
        for method in ("heterofl", "fiarse"):
            simulation = simulate(self.experiment(method=method, rounds=1, **few), tmp_path / method)
            before = dict(simulation.state["params"])
            [line] = run(simulation)
            assert line["refused"] == 0 and line["train_flops"] > 0 and line["bytes_up"] > 0
            assert all(math.isfinite(line[named(score.label, "mean")]) for score in simulation.experiment.scores)
            after = simulation.state["params"]
            assert all(t.isfinite().all() for t in after.values())
            assert any(not torch.equal(t, before[name]) for name, t in after.items())


def loaded(net: Net, params: Params) -> nn.Module:
    module = net.build().eval()
    load(module, params)
    return module


def normless(model: Model) -> Model:
    """Return the model without norms. Skip the test if norms over channels stay, because they depend on the width."""
    network = model.model_copy(update={"norm": "none"}) if "norm" in type(model).model_fields else model
    for module in Net(network).blank().modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm) or type(module).__name__.endswith("RMSNorm"):
            raise SkipTest("its norms depend on the width")
    return network
