"""What every method promises, over all methods and models. A new method or model adds no line here.

A test that asks for `method_name` is of all methods, one that asks for `width_method` of those that train narrow dense
networks; with `model_name`, on every model that they fit.
"""

import math
import pickle
from collections import Counter

import pytest
import torch
from helpers import PersonalHead, Shuffled, Troubled, assert_same, drawn_like, run, simulate, tiny

from rayfl import costs
from rayfl.axes import Net
from rayfl.checkpoints import checksum
from rayfl.experiment import parse_experiment
from rayfl.methods import METHODS, Client, Update
from rayfl.methods.width import WidthMethod
from rayfl.models import MODELS, Model, layout
from rayfl.norms import fresh
from rayfl.population import Population
from rayfl.seeds import stream
from rayfl.simulation import RefusedUpdate
from rayfl.submodel import Slice
from rayfl.tensors import leaves
from rayfl.worker import ClientFailed, Worker

CLASSES = METHODS | {"personal_head": PersonalHead}
ALL_METHODS = list(CLASSES)
WIDTH_METHODS = [name for name, method in CLASSES.items() if issubclass(method, WidthMethod)]
CAPACITIES = (0.3, 0.2, 0.1)
"""Of 64 channels 20, 13 and 7: nothing divides."""
IMAGES = {"lenet5_caffe": [1, 16, 16], "liang_cnn": [1, 16, 16], "spafl_cnn": [1, 28, 28]}
"""The smallest that a model takes, where 8x8 pixels are too few."""
EXITS = {"exits": ["stage1.0", "stage2.0"]}
FIELDS = {
    "depthfl_resnet18": EXITS,
    "scalefl_resnet110": EXITS,
    "wide_resnet101_2": {"channels": 20},
    "vit_b_16": {"layers": 2, "heads": 2, "head_width": 20, "patch": 4},
}
"""Of models that are large, or whose exits stand behind blocks of a deeper one."""


def shallow(model: type[Model]) -> type[Model]:
    """The family with one block a stage: others are built in the same way."""
    depth = (1,) * len(model.depth)
    name = f"Shallow{model.__name__}"
    # under its name here it can be pickled
    globals()[name] = type(name, (model,), {"depth": depth, "__module__": __name__})
    return globals()[name]


SHALLOW = {name: shallow(model) for name, model in MODELS.items() if hasattr(model, "depth")}


def networks() -> list[str]:
    """The models, of several that are one network when they are shallow the first."""
    found = {}
    for name, model in (MODELS | SHALLOW).items():
        found.setdefault(str(layout(model(**FIELDS.get(name, {})), Net(0.3)).shapes), name)
    return list(found.values())


WITH_EXITS, WITH_BLOCKS = ["depthfl_resnet18", "scalefl_resnet110"], ["resnet18"]
RUNS_ON = {
    "depthfl": (WITH_EXITS, {}),
    "scalefl": (WITH_EXITS, {}),
    "depthfl_nefl": (WITH_BLOCKS, {"metric": "params"}),
    "scalefl_nefl": (WITH_BLOCKS, {"metric": "params"}),
}
"""The models, the smallest first, and the clients of methods that cannot run on all."""
ANYTHING = (networks(), {})


def pairs(methods):
    return [(method, model) for method in methods for model in RUNS_ON.get(method, ANYTHING)[0]]


AVERAGED = {"spafl": ("thresholds", "thresholds"), "fedpm": ("probabilities", "masks")}
"""Of methods that do not average the model's parameters: the group of the state that is a mean, and what answers call
the group that it is the mean of."""
DRAWN_ANSWERS = ["fedpm"]
"""What is sent is drawn from what was trained, and not that itself."""
SHARED_NORMS = {"norms": "static"}
PLAIN = {"fjord": SHARED_NORMS, "nefl": SHARED_NORMS | {"learn_steps": False}, "depthfl": SHARED_NORMS | {"alpha": 0}}
"""What makes a method's state the model's parameters, and nothing of a network's own."""


@pytest.fixture(autouse=True)
def for_tests(monkeypatch):
    """Methods that are made for tests, and residual networks that are not deep."""
    for method in (PersonalHead, Troubled):
        monkeypatch.setitem(METHODS, method.model_fields["name"].default, method)
    for name, model in SHALLOW.items():
        monkeypatch.setitem(MODELS, name, model)


@pytest.fixture
def one_width(monkeypatch):
    """FjORD's clients train their largest width at every step."""
    monkeypatch.setattr(METHODS["fjord"], "draws", lambda self, widths, steps, seed: [0] * steps)


def pytest_generate_tests(metafunc):
    """Every method, on every model that it fits."""
    given = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    for asked, methods in (("method_name", ALL_METHODS), ("width_method", WIDTH_METHODS)):
        if asked in metafunc.fixturenames and not any(asked in names for names in given):
            if "model_name" in metafunc.fixturenames:
                metafunc.parametrize((asked, "model_name"), pairs(methods))
            else:
                metafunc.parametrize(asked, methods)


def experiment(method, model=None, **sections):
    """A tiny experiment of a method, by name or section, on a model or on one that it fits."""
    name = method if isinstance(method, str) else method["name"]
    models, clients = RUNS_ON.get(name, ANYTHING)
    model = model or models[0]
    section = model if isinstance(model, dict) else {"name": model}
    section = FIELDS.get(section["name"], {}) | section
    data = {"shape": IMAGES.get(section["name"], [1, 8, 8])} | sections.pop("data", {})
    clients = clients | sections.pop("clients", {})
    return tiny(**{"method": method, "model": section, "data": data, "clients": clients} | sections)


def cohort_of(simulation):
    """(client, selection) of the next round's cohort."""
    population, seed, round = simulation.population, simulation.seed, simulation.round
    clients = [Client(id, population.capacity(id, seed, round)) for id in population.sample(seed, round)]
    return [(c, simulation.method.select(simulation.state, round, c, seed)) for c in clients]


def shared(method, state):
    """What the server holds that is a mean over clients."""
    return state[AVERAGED.get(method.name, ("params",))[0]]


# selections


def test_take_and_put_are_adjoint(method_name, model_name):
    """<S x, y> = <x, S^T y>, and S S^T = I, in whole numbers: exact."""
    method = experiment(method_name, model_name).bound_method()
    state = method.init(0)
    x = drawn_like(shared(method, state), "x")
    for round in (0, 1, 70):
        for capacity in CAPACITIES:
            selection = method.select(state, round, Client(0, capacity), 0)
            taken = selection.take(x)
            y = drawn_like(taken, "y")
            whole = {name: torch.zeros_like(t) for name, t in x.items()}
            selection.put(y, whole)
            inner = sum((taken[name] * y[name]).sum() for name in taken)
            assert inner == sum((x[name] * whole[name]).sum() for name in x)
            assert_same(selection.take(whole), y)


def test_cover_is_put_of_ones(method_name, model_name):
    method = experiment(method_name, model_name).bound_method()
    state = method.init(0)
    params = shared(method, state)
    for round in (0, 1, 70):
        selection = method.select(state, round, Client(0, 0.2), 0)
        ones = {name: torch.ones_like(t) for name, t in selection.take(params).items()}
        whole = {name: torch.zeros_like(t) for name, t in params.items()}
        selection.put(ones, whole)
        cover = selection.cover(params)
        assert_same(cover, whole)
        assert all(selection.covers(name) == bool(t.all()) for name, t in cover.items())


def held_by_hand(selection: Slice, name: str, shape) -> torch.Tensor:
    """What is held of a tensor, from the definition of its axes."""
    if name not in selection.part.dims:
        return torch.zeros(shape, dtype=torch.bool)
    held = torch.ones(shape, dtype=torch.bool)
    for d, axis in enumerate(selection.whole.dims[name]):
        if axis is None or axis.is_fixed:
            continue
        along = torch.zeros(axis.groups, axis.size, axis.copies, dtype=torch.bool)
        along[:, list(selection.positions[axis.name].positions)] = True
        held &= along.view([-1 if i == d else 1 for i in range(len(shape))])
    return held


def test_a_narrow_network_has_the_positions_of_its_axes(width_method, model_name):
    method = experiment(width_method, model_name).bound_method()
    state = method.init(0)
    for capacity in CAPACITIES:
        selection = method.select(state, 5, Client(0, capacity), 0)
        for name, t in selection.cover(state["params"]).items():
            assert torch.equal(t.bool(), held_by_hand(selection, name, t.shape))


def test_the_mean_is_over_holders(method_name, model_name):
    """Client k answers (k + 1) / 4 everywhere: the mean counts, coordinate by coordinate, who holds it."""
    spec = experiment({"name": method_name} | PLAIN.get(method_name, {}), model_name)
    method = spec.bound_method()
    state = method.init(0)
    _, group = AVERAGED.get(method_name, ("params", "params"))
    selections = [method.select(state, 5, Client(k, c), 0) for k, c in enumerate(CAPACITIES)]
    answers = [
        {name: torch.full(t.shape, (k + 1) / 4) for name, t in s.take(shared(method, state)).items()}
        for k, s in enumerate(selections)
    ]
    updates = [(s, Update({group: answer}, 1.0)) for s, answer in zip(selections, answers, strict=True)]
    new = shared(method, method.aggregate(state, 5, iter(updates)))
    covers = [s.cover(shared(method, state)) for s in selections]
    for name, old in shared(method, state).items():
        held = torch.stack([cover[name].bool() for cover in covers])
        values = torch.arange(1.0, 4).view(-1, *[1] * old.dim()) / 4
        expected = torch.where(held.any(0), (held * values).sum(0) / held.sum(0), old)
        torch.testing.assert_close(new[name], expected, rtol=0, atol=1e-6)
        assert torch.equal(new[name][~held.any(0)], old[~held.any(0)])


# a round


def traffic(method_name, size, head) -> tuple[int, int]:
    """Parameters that a client of this size is sent, and sends, in its first round."""
    special = {
        "personal_head": (size, size - head),
        "lg_fedavg": (size, head),
        "standalone": (0, 0),
        "scaffold": (2 * size, 2 * size),
    }
    return special.get(method_name, (size, size))


def test_a_round_changes_what_its_clients_hold(method_name, model_name, tmp_path):
    simulation = simulate(experiment({"name": method_name} | PLAIN.get(method_name, {}), model_name), tmp_path)
    cohort, before = cohort_of(simulation), shared(simulation.method, simulation.state)
    covers = [selection.cover(before) for _, selection in cohort]
    line = simulation.run_round()
    counted = [line[name] for name in ("round", "clients", "steps", "refused")]
    assert counted == [1, len(cohort), 2 * len(cohort), 0]
    after = shared(simulation.method, simulation.state)
    held = {name: sum(cover[name] for cover in covers) > 0 for name in before}
    trained = any(not torch.equal(after[name], t) for name, t in before.items())
    assert trained == any(h.any() for h in held.values())
    for name, t in before.items():
        assert after[name].isfinite().all()
        assert torch.equal(after[name][~held[name]], t[~held[name]])


def test_a_round_trains_narrow_networks_and_counts_their_costs(width_method, model_name, tmp_path, one_width):
    simulation = simulate(experiment({"name": width_method} | PLAIN.get(width_method, {}), model_name), tmp_path)
    method, model = simulation.method, simulation.method.task.model
    cohort, before = cohort_of(simulation), simulation.state
    expected = Counter(bytes_down=0, bytes_up=0)
    for client, selection in cohort:
        network = model.build(selection.net)
        shapes = {n: p.shape for n, p in network.named_parameters()}
        payload = method.extract(before, selection)
        statistics = {n: t.shape for n, t in payload.pop("statistics", {}).items()}
        assert statistics.keys() <= fresh(network).keys()
        assert {n: t.shape for group in payload.values() for n, t in group.items()}.items() <= shapes.items()
        assert {n: p.shape for n, p in payload["params"].items()} == {n: shapes[n] for n in selection.part.dims}
        size = sum(p.numel() for p in network.parameters())
        assert size == costs.parameters(model, selection.net)
        head = sum(p.numel() for n, p in network.named_parameters() if "head" in n)
        samples = min(10, len(simulation.data.train[client.id]))
        down, up = traffic(width_method, size, head)
        extra = sum(map(math.prod, statistics.values()))
        expected += Counter(
            bytes_down=4 * (down + extra),
            bytes_up=4 * (up + extra),
            train_flops=6 * samples * costs.flops(model, selection.net, "macs"),
        )
    line = simulation.run_round()
    assert {name: line[name] for name in expected} == dict(expected)


@pytest.mark.parametrize(
    ("width_method", "model_name"),
    # a transformer's norms cannot be left out, and an early exit adds to the loss of the wider one
    [(method, model) for method, model in pairs(WIDTH_METHODS) if model not in ("vit_b_16", *WITH_EXITS)],
)
def test_sliced_training_is_masked_full_width_training(width_method, model_name, tmp_path, one_width):
    """The narrow network trains as the server's with zeros outside of the selection: there all gradients vanish.
    Without Scaler and norm, which see the width. A residual branch of zeros is none."""
    model = {"name": model_name} | ({"norm": "none"} if "norm" in MODELS[model_name].model_fields else {})
    own_size = {"size": "own"} if "size" in METHODS[width_method].model_fields else {}
    options = {"name": width_method, "scaler": False} | own_size | PLAIN.get(width_method, {})
    spec = experiment(options, model, training={"lr": 0.01})
    simulation = simulate(spec, tmp_path)
    method, state = simulation.method, simulation.method.init(0)
    params = state["params"]
    data = simulation.executor.worker._rows("train", simulation.data.train[0])
    narrow, wide = (method.select(state, 3, Client(0, capacity), 0) for capacity in (0.2, 0.3))
    # what a client keeps is a part of the network that no selection holds
    cut = method.window({}, 3, 0.2) if method.is_personal else narrow
    own = {name: t for name, t in cut.take(params).items() if name not in narrow.part.dims} or None

    def embedded(tensors):
        names = tensors.keys() | (wide.part.dims.keys() - narrow.part.dims.keys() if own is None else set())
        whole = {name: torch.zeros_like(params[name]) for name in names}
        cut.put(tensors, whole)
        return whole

    payload = method.extract(state, narrow)
    groups = {name: group for name, group in payload.items() if group.keys() <= params.keys()}
    masked = {name: embedded(group) for name, group in groups.items()}
    sliced = method.local_update(payload, narrow, Client(0, 0.2, own), data, 3, 9)
    full = method.local_update(masked, wide, Client(0, 0.2, own and embedded(own)), data, 3, 9)
    kept = [update.carries[0] if method.is_personal else {} for update in (sliced, full)]
    answers = [update.sums["params"] | carry for update, carry in zip((sliced, full), kept, strict=True)]
    there, outside = {name: t.clone() for name, t in cut.take(answers[1]).items()}, answers[1]
    cut.put(there, outside, alpha=-1.0)
    for name, expected in answers[0].items():
        torch.testing.assert_close(there[name], expected, rtol=1e-4, atol=1e-6)
        assert not outside[name].any()


@pytest.mark.parametrize("method_name", sorted({*ALL_METHODS} - {*DRAWN_ANSWERS}))
def test_clients_that_train_nothing_change_nothing(method_name, tmp_path):
    """The mean of what was sent is what was sent."""
    spec = experiment(method_name, training={"steps": None, "epochs": 0}, clients={"cohort": 6})
    simulation = simulate(spec, tmp_path)
    before = {name: t.clone() for name, t in leaves(simulation.state)}
    simulation.run_round()
    for name, t in leaves(simulation.state):
        torch.testing.assert_close(t, before[name], rtol=1e-6, atol=1e-7)


def test_every_capacity_is_deployed_as_its_own_network(method_name, model_name, tmp_path):
    simulation = simulate(experiment(method_name, model_name, rounds=1), tmp_path)
    [line] = run(simulation)
    for capacity in CAPACITIES:
        deployed = simulation.method.deploy(simulation.state, 1, capacity)
        shapes = {name: p.shape for name, p in deployed.model.build(deployed.net).named_parameters()}
        assert {name: t.shape for name, t in deployed.params.items()} == shapes
        assert 0 <= line[f"accuracy_{capacity:g}"] <= 1
        assert (f"density_{capacity:g}" in line) == (bool(deployed.masked) and not simulation.method.is_personal)
    accuracies = [line[f"accuracy_{capacity:g}"] for capacity in CAPACITIES]
    assert line["accuracy_mean"] == pytest.approx(sum(accuracies) / 3)
    assert line["accuracy_worst"] == min(accuracies)


LIKE_FEDAVG = PLAIN | {
    "fedprox": {"mu": 0},
    "lg_fedavg": {"warmup": 2},
    "depthfl": PLAIN["depthfl"] | {"distill": False},
}
"""What makes a method FedAvg where all clients are able. SCAFFOLD is so in its first round; Standalone never, nor what
averages anything but parameters."""


@pytest.mark.parametrize("method_name", sorted({*METHODS} - {"standalone", *AVERAGED}))
@pytest.mark.parametrize("model_name", ["digits_cnn", "heterofl_cnn", "preact_resnet18"])
def test_at_full_capacity_every_method_is_fedavg(method_name, model_name, tmp_path):
    """To the bit, where losses and weights are the same."""
    same = {"mask": "none", "label_rows": "all", "weight": "uniform"}
    states = []
    for name in ("fedavg", method_name):
        fields = METHODS[name].model_fields
        method = {"name": name} | {k: v for k, v in same.items() if k in fields} | LIKE_FEDAVG.get(name, {})
        clients = {"capacities": [1.0], "count": 4, "cohort": 2}
        simulation = simulate(experiment(method, model_name, clients=clients, rounds=3), tmp_path / name)
        simulation._train()
        if method_name != "scaffold":
            simulation.round = 1
            simulation._train()
        states.append(simulation.state["params"])
    assert_same(*states)


# the same bits


def test_a_resumed_run_is_the_straight_run(method_name, tmp_path):
    """To the bit: state, what clients keep, and every line of metrics."""
    method = experiment(method_name).bound_method()
    assignment = "fixed" if method.keeps_capacities else "dynamic"
    spec = experiment(
        method_name, rounds=4, clients={"assignment": assignment}, evaluation={"every": 2, "batch_size": 7}
    )
    straight = simulate(spec, tmp_path / "straight")
    lines = run(straight)
    first = simulate(spec, tmp_path / "first")
    run(first, 3)
    first.save(tmp_path / "checkpoints")
    second = simulate(spec, tmp_path / "second")
    assert second.restore(tmp_path / "checkpoints") == (3, [])
    assert run(second) == lines[3:]
    assert_same(second.state, straight.state)
    assert second.carries.files.keys() == straight.carries.files.keys()
    for client in straight.carries.files:
        assert_same(second.carries.get(client), straight.carries.get(client))
    assert second.client_accuracy() == straight.client_accuracy()


@pytest.mark.parametrize("chunk", [1, 2])
def test_the_order_of_work_changes_no_bit(method_name, chunk, tmp_path):
    """Jobs in a random order, and every message through flat buffers and pickle, as on Ray."""
    spec = experiment(method_name, run={"chunk": chunk})
    serial = simulate(spec, tmp_path / "serial")
    shuffled = simulate(
        spec, tmp_path / "shuffled", lambda *made: Shuffled(Worker(made[0], made[1], spec.seed, made[2]))
    )
    assert run(serial) == run(shuffled)
    assert_same(shuffled.state, serial.state)


def test_verbs_are_pure_and_travel_by_pickle(method_name, tmp_path):
    """A local update changes neither what it was sent nor the state, and is a function of its inputs."""
    simulation = simulate(experiment(method_name), tmp_path)
    method, state = simulation.method, simulation.state
    client, selection = cohort_of(simulation)[0]
    data = simulation.executor.worker._rows("train", simulation.data.train[client.id])
    payload = method.extract(state, selection)
    before = checksum({"payload": payload, "state": state})
    first = method.local_update(payload, selection, client, data, 0, stream(0, "local"))
    assert checksum({"payload": payload, "state": state}) == before

    copy, copied = pickle.loads(pickle.dumps((method, selection)))
    assert (copy, copied.key) == (method, selection.key)
    second = copy.local_update(payload, copied, client, data, 0, stream(0, "local"))
    assert_same(second.sums, first.sums)
    assert (second.weight, second.metrics) == (first.weight, first.metrics)

    simulation.run_round()
    assert checksum({"payload": payload, "state": state}) == before


def test_equal_keys_are_equal_selections(method_name):
    method = experiment(method_name).bound_method()
    state, found = method.init(0), {}
    for round in range(40):
        for id, capacity in enumerate(CAPACITIES):
            selection = method.select(state, round, Client(id, capacity), 0)
            cover = checksum(selection.cover(shared(method, state)))
            assert found.setdefault(selection.key, cover) == cover


# what clients keep


def test_a_client_keeps_its_own_head(tmp_path):
    simulation = simulate(experiment("personal_head", rounds=3), tmp_path)
    initial = simulation.state["params"]
    run(simulation)
    assert torch.equal(simulation.state["params"]["head.weight"], initial["head.weight"])
    assert not torch.equal(simulation.state["params"]["conv1.weight"], initial["conv1.weight"])
    trained = {id for r in range(3) for id in simulation.population.sample(0, r)}
    assert set(simulation.carries.files) == trained
    id = min(trained)
    capacity = simulation.population.capacity(id, 0, 3)
    client = Client(id, capacity, simulation.carries.get(id))
    own = simulation.method.deploy(simulation.state, 3, capacity, client)
    everybodys = simulation.method.deploy(simulation.state, 3, capacity)
    assert own.key != everybodys.key
    assert torch.equal(own.params["head.weight"], client.carry["head.weight"])
    assert not torch.equal(own.params["head.weight"], everybodys.params["head.weight"])
    assert torch.equal(own.params["conv1.weight"], everybodys.params["conv1.weight"])


# trouble


def troubled(trouble, client=0, **sections):
    return experiment({"name": "troubled", "client": client, "trouble": trouble}, **sections)


def test_a_failing_client_is_named(tmp_path):
    simulation = simulate(troubled("raise", clients={"cohort": 6}), tmp_path)
    samples = len(simulation.data.train[0])
    with pytest.raises(ClientFailed) as error:
        simulation.run_round()
    message = str(error.value)
    assert message.startswith(
        f"client 0 (capacity 0.3, {samples} samples) failed in round 1:\nTraceback (most recent call last):"
    )
    assert message.rstrip().endswith("ArithmeticError: on purpose")


@pytest.mark.parametrize(("trouble", "reason"), [("nan", "not finite"), ("inf", "not finite"), ("explode", "norm ")])
@pytest.mark.parametrize("chunk", [1, 6])
def test_a_bad_update_is_refused_and_the_others_are_averaged(trouble, reason, chunk, tmp_path, monkeypatch):
    """As if the client had not been drawn."""
    spec = troubled(trouble, clients={"cohort": 6}, run={"chunk": chunk}, evaluation={"every": 5})
    with_it = simulate(spec, tmp_path / "with")
    line = with_it.run_round()
    assert line["refused"] == 1 and line["clients"] == 5
    assert line["refusals"].startswith(f"client 0: {reason}")
    assert set(with_it.carries.files) == {1, 2, 3, 4, 5}
    without = simulate(spec, tmp_path / "without")
    monkeypatch.setattr(Population, "sample", lambda self, seed, round: [1, 2, 3, 4, 5])
    line_without = without.run_round()
    assert_same(with_it.state, without.state)
    assert line["train_loss"] == line_without["train_loss"] and math.isfinite(line["train_loss"])


def test_a_round_that_refuses_everything_changes_nothing(tmp_path):
    one = {"count": 1, "cohort": 1, "capacities": [0.3]}
    spec = troubled("nan", clients=one, partition={"labels": 4})
    simulation = simulate(spec, tmp_path)
    before = checksum(simulation.state)
    line = simulation.run_round()
    assert checksum(simulation.state) == before
    assert line["refused"] == 1 and "clients" not in line


def test_a_bad_update_stops_the_run_if_asked(tmp_path):
    spec = troubled("nan", client=4, clients={"cohort": 6}, updates={"policy": "stop"})
    with pytest.raises(RefusedUpdate) as error:
        simulate(spec, tmp_path).run_round()
    assert str(error.value) == (
        "round 1: the update of client 4 is not finite; "
        "lower training.lr, or set updates.policy: refuse to go on without it"
    )


def test_every_method_and_model_has_sound_defaults(monkeypatch):
    monkeypatch.undo()  # as they are published
    for name in METHODS:
        parse_experiment({"model": "digits_cnn", "method": name}, "test")
    for name in MODELS:
        parse_experiment({"model": name, "data": {"name": "synthetic", "shape": [1, 32, 32]}}, "test")


def test_states_hold_nothing_but_tensors(method_name):
    state = experiment(method_name).bound_method().init(0)
    assert all(isinstance(t, torch.Tensor) for _, t in leaves(state))
    again = experiment(method_name).bound_method().init(0)
    assert_same(state, again)
