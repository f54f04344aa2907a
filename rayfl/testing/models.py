"""Contract tests of models."""

import pickle
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from rayfl.core.axes import size_at
from rayfl.core.net import Net, check_axes, load
from rayfl.core.norms import fresh
from rayfl.core.seeds import torch_scope
from rayfl.experiment import Experiment
from rayfl.models import MODELS_KIND
from rayfl.models.base import Model
from rayfl.testing.tiny import assert_same, made_up_for, model_of, run, simulate, split_for, tiny
from rayfl.training.settings import every_exit

NARROW = 0.3


class ModelContract:
    """A subclass sets `model`, and `data` if its samples are not images."""

    model: Any
    """Model, as in a `model:` section: a mapping, an object, or a bare name, the family's smallest network."""
    data: Mapping[str, Any] = {}  # noqa: RUF012
    """A `data:` section with suitable samples. Default: made-up images of the model's size."""

    def network(self) -> Model:
        """Return the model with the fields that the data set offers."""
        return self.experiment().model

    def experiment(self, **sections: Any) -> Experiment:
        model = model_of(self.model)
        given = {"model": model, "data": self.data or made_up_for(model), "partition": split_for(model)}
        return tiny(**given | {"method": "heterofl"} | sections)

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
        """Samples of the data set have the shape and type of `example`."""
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
                assert logits.shape == (*y.shape, goal.classes) and logits.isfinite().all()
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

    def test_methods_train_it(self, tmp_path: Path) -> None:
        """Methods train narrow networks, whole ones, and single weights, and count costs."""
        for method in ("heterofl", "fedavg", "fiarse"):
            simulation = simulate(self.experiment(method=method, rounds=1), tmp_path / method)
            before = dict(simulation.state["params"])
            [line] = run(simulation)
            assert line["refused"] == 0 and line["train_flops"] > 0 and line["bytes_up"] > 0
            assert 0 <= line["accuracy_mean"] <= 1 and line["loss_mean"] > 0
            after = simulation.state["params"]
            assert all(t.isfinite().all() for t in after.values())
            assert any(not torch.equal(t, before[name]) for name, t in after.items())
