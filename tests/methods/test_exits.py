"""DepthFL and ScaleFL: depths by capacity, and the contract of methods on networks with exits."""

import pickle
from collections.abc import Mapping
from typing import Literal

import pytest
import torch
from helpers import Perceptron, Shuffled, assert_same, client_data, run, simulate, tiny
from torch import nn

from rayfl.config import ConfigError, parse
from rayfl.core.axes import Axis, linear, norm
from rayfl.core.net import Net
from rayfl.core.seeds import stream
from rayfl.core.submodel import Mask
from rayfl.data.samples import ClientData
from rayfl.engine.files import checksum
from rayfl.engine.worker import Worker
from rayfl.methods import METHODS, Client, Method, Task, Visit
from rayfl.models import MODELS
from rayfl.models.base import ImageModel
from rayfl.training.settings import Training


class ExitPerceptron(ImageModel):
    """Layers hidden1, hidden2, ..., each followed by an exit of one layer: exit1, exit2, ..., and a final `head`."""

    name: Literal["exit_perceptron"] = "exit_perceptron"
    input: tuple[int, int, int] = (1, 1, 2)
    classes: int = 4
    hidden: tuple[int, ...] = (4, 4, 4)
    norm: Literal["none", "static_bn"] = "none"

    @property
    def exit_count(self) -> int:
        return len(self.hidden)

    def build(self, net):
        channels, height, width = self.input
        return Layers(self, net, Axis.fixed("pixels", channels * height * width))


class Layers(nn.Module):
    def __init__(self, model: ExitPerceptron, net: Net, cin: Axis):
        super().__init__()
        self.hidden, self.exits = [], net.exits
        for i, size in enumerate(model.hidden[: net.exits or None], start=1):
            cout = net.axis(f"hidden{i}", size)
            self.add_module(f"hidden{i}", linear(cin, cout))
            self.add_module(f"norm{i}", norm(model.norm, cout))
            self.hidden.append((f"hidden{i}", f"norm{i}", "head" if i == model.exit_count else f"exit{i}"))
            if i == model.exit_count or net.exits:
                self.add_module(self.hidden[-1][2], linear(cout, model.labels))
            cin = cout

    def forward(self, x):
        x, answers = x.flatten(1), []
        for hidden, norming, exit in self.hidden:
            x = torch.relu(self.get_submodule(norming)(self.get_submodule(hidden)(x)))
            if self.exits or exit == "head":
                answers.append(self.get_submodule(exit)(x))
        return tuple(answers) if self.exits else answers[0]


def staged(method: Method, *capacities: float, model: ImageModel | None = None, metric="width", clients=10, **training):
    """Return the method bound to an ExitPerceptron."""
    model = model or ExitPerceptron()
    nets = {c: Net(model, c) for c in sorted(capacities, reverse=True)}
    return method.bind(Task(model, Training(**training), nets, max(capacities), clients, metric))


def names(method: Method, capacity: float) -> set[str]:
    return set(method.task.nets[capacity].layout.dims)


def at(round: int, data: ClientData | None = None) -> Visit:
    """Return a visit with the inputs of a loss: the round and the client's data."""
    return Visit(Client(0, 1.0, round), Mask(Net(Perceptron()), "all", {}), data or client_data(0), None, 0)


@pytest.fixture(params=["depthfl", "scalefl"])
def method_name(request):
    return request.param


# depths


def test_default_exits(method_name):
    method = staged(METHODS[method_name](), 1.0, 0.5, 0.25)
    assert {c: net.exits for c, net in method.task.nets.items()} == {1.0: 3, 0.5: 2, 0.25: 1}
    assert list(method.task.nets) == [1.0, 0.5, 0.25]
    assert method.task.server == method.task.nets[1.0]


@pytest.mark.parametrize(
    ("capacities", "exits", "expected"),
    [
        ((1.0,), (), [3]),
        ((1.0,), (2,), [2]),
        ((1.0, 0.5), (1, 3), [1, 3]),
        ((1.0, 0.5, 0.3, 0.2), (1, 1, 2, 2), [1, 1, 2, 2]),
    ],
)
def test_listed_exits(method_name, capacities, exits, expected):
    nets = staged(METHODS[method_name](exits=exits), *capacities).task.nets
    assert [nets[c].exits for c in sorted(nets)] == expected


def test_the_head_is_the_only_exit_of_other_models(method_name):
    for capacities, exits in (((1.0,), ()), ((1.0, 0.5), (1, 1))):
        method = staged(METHODS[method_name](exits=exits), *capacities, model=Perceptron())
        assert {net.exits for net in method.task.nets.values()} == {0}


@pytest.mark.parametrize(
    ("capacities", "exits", "given"),
    [((1.0, 0.5), (), "none"), ((1.0, 0.5), (1, 2, 3), "[1, 2, 3]"), ((1.0, 0.5), (1, 4), "[1, 4]")],
)
def test_exits_that_do_not_match_the_model(method_name, capacities, exits, given):
    with pytest.raises(ConfigError) as error:
        staged(METHODS[method_name](exits=exits), *capacities)
    assert str(error.value) == (
        f"method.exits: {given} is not valid. Allowed: 2 exits from 1 to 3, the last exit of every capacity of "
        "model exit_perceptron, smallest capacity first"
    )


def test_a_model_needs_an_exit_for_every_capacity(method_name):
    with pytest.raises(ConfigError) as error:
        staged(METHODS[method_name](), 1.0, 0.5, model=Perceptron())
    assert str(error.value) == (
        "model: perceptron has no early exits. Allowed: a model with 2 exits, one per capacity. Hint: set model.exits "
        "of a ResNet, or use a model such as depthfl_resnet18"
    )


@pytest.mark.parametrize(
    ("exits", "message"),
    [
        ([2, 1], "exits: [2, 1] is not valid. Allowed: ascending exits, because larger capacities include the "),
        ([0, 1], "exits.0: 0 is not valid. Allowed: more than 0"),
    ],
)
def test_exits_ascend(method_name, exits, message):
    with pytest.raises(ConfigError) as error:
        parse(METHODS[method_name], {"name": method_name, "exits": exits}, "test: method")
    assert str(error.value).startswith(f"test: method.{message}")


@pytest.mark.parametrize(
    "model", [ExitPerceptron(), MODELS["depthfl_resnet18"](channels=4, input=(1, 8, 8), init="torch")]
)
def test_a_level_has_the_layers_and_heads_up_to_its_exit(method_name, model):
    capacities = [(i + 1) / model.exit_count for i in range(model.exit_count)]
    method = staged(METHODS[method_name](), *capacities, model=model)
    heads = [f"exit{i}." for i in range(1, model.exit_count)] + ["head."]
    for level, capacity in enumerate(capacities, start=1):
        held = names(method, capacity)
        assert held < names(method, capacities[level]) if level < len(capacities) else held == names(method, 1.0)
        assert [any(name.startswith(head) for name in held) for head in heads] == [i < level for i in range(len(heads))]


# contract


OPTIONS: Mapping[str, list[dict]] = {
    "depthfl": [{}, {"alpha": 0, "weight": "samples"}, {"distill": False, "exits_trained": "last"}],
    "scalefl": [{"gamma": 0.5, "distill_from": 1}, {"widths": [0.5, 0.7, 1]}],
}


@pytest.fixture(params=[(name, i) for name, options in OPTIONS.items() for i in range(len(options))], ids=str)
def spec(request, monkeypatch):
    """Return experiments of three depths, with momentum and weight decay."""
    monkeypatch.setitem(MODELS, "exit_perceptron", ExitPerceptron)
    name, i = request.param
    return tiny(
        rounds=3,
        method={"name": name} | OPTIONS[name][i],
        model={"name": "exit_perceptron", "hidden": [8, 7, 6], "norm": "static_bn"},
        clients={"capacities": [1.0, 0.5, 0.3], "assignment": "fixed", "count": 3, "cohort": 2},
        partition="iid",
        training={"momentum": 0.5, "weight_decay": 0.01},
        evaluation={"every": 2, "clients": False},
    )


def test_a_resumed_run_equals_the_uninterrupted_run(spec, tmp_path):
    straight = simulate(spec, tmp_path / "straight")
    lines = run(straight)
    first = simulate(spec, tmp_path / "first")
    run(first, 2)
    first.save(tmp_path / "checkpoints")
    second = simulate(spec, tmp_path / "second")
    assert second.restore(tmp_path / "checkpoints") == (2, [])
    assert run(second) == lines[2:]
    assert_same(second.state, straight.state)
    assert second.client_states.files.keys() == straight.client_states.files.keys()
    for client in straight.client_states.files:
        assert_same(second.client_states.get(client), straight.client_states.get(client))
    assert {f"accuracy_exit{i}" for i in (1, 2, 3)} < lines[-1].keys() - {"accuracy_exit4"}
    assert all(line["refused"] == 0 for line in lines)


def test_results_do_not_depend_on_the_order_of_work(spec, tmp_path):
    serial = simulate(spec, tmp_path / "serial")
    arrays = spec.data.arrays()
    shuffled = simulate(spec, tmp_path / "shuffled", lambda recipe: Shuffled(Worker(recipe, arrays)))
    assert run(serial) == run(shuffled)
    assert_same(shuffled.state, serial.state)


def test_functions_are_pure_and_picklable(spec, tmp_path):
    simulation = simulate(spec, tmp_path)
    run(simulation, 2)
    method, state, round = simulation.method, simulation.state, simulation.round
    id = simulation.clients.sample(simulation.seed, 0)[0]
    client = Client(id, simulation.clients.capacity(id, simulation.seed, round), round)
    client_state = simulation.client_states.get(id)
    assert (client_state is not None) == (method.name == "depthfl" and method.alpha > 0)
    selection = method.select(state, client)
    payload = method.extract(state, selection)
    everything = {"payload": payload, "state": state, "carry": client_state or {}}
    before = checksum(everything)
    work = Visit(
        client, selection, client_data(0, 1, 2, 3, shape=method.task.model.input), client_state, stream(0, "local")
    )
    first = method.local_update(payload, work)
    copy, copied = pickle.loads(pickle.dumps((method, work)))
    assert (copy, copied.selection.key) == (method, selection.key)
    second = copy.local_update(payload, copied)
    assert_same(second.sums, first.sums)
    assert second.client_states.keys() == first.client_states.keys()
    assert_same(second.client_states.get(id, {}), first.client_states.get(id, {}))
    assert second.metrics == first.metrics
    method.deploy(state, round, client.capacity, client_state)
    simulation.run_round()
    assert checksum(everything) == before


def test_clients_without_steps_change_nothing(spec, tmp_path):
    simulation = simulate(spec.with_(training=Training(epochs=0)), tmp_path)
    before = simulation.state
    simulation.run_round()
    torch.testing.assert_close(simulation.state, before, rtol=1e-6, atol=1e-7)
    assert not simulation.client_states.files
