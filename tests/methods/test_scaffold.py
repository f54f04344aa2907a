"""SCAFFOLD against manual computations."""

from dataclasses import replace

import pytest
import torch
from helpers import assert_same, bound, client_data, folded, run, simulate, tiny, updated, visit

from rayfl import costs
from rayfl.core.seeds import torch_generator
from rayfl.data.samples import ClientData
from rayfl.methods import METHODS, Client, Method

Scaffold = METHODS["scaffold"]


def noise(shapes: dict, address: str) -> dict[str, torch.Tensor]:
    generator = torch_generator(0, "test:noise", address)
    return {name: torch.randn(shape, generator=generator) / 10 for name, shape in shapes.items()}


def with_variates(method):
    """Return a state and a client state within a run, with random c and c_k."""
    state = method.init()
    shapes = {name: t.shape for name, t in state["params"].items()}
    return state | {"variate": noise(shapes, "c")}, {"variate": noise(shapes, "c_k")}


def answer(method, state, client_state, data, capacity=1.0):
    """Return the update of client 3."""
    return updated(method, state, capacity, data, id=3, client_state=client_state)


def stepped(method, state, update):
    """Return the state after a round of client 3 alone."""
    return method.step(state, 0, folded(state, (method.select(state, Client(3, 1.0, 0)), update)))


def gradient(method, params, data):
    """Return the gradient of the mean loss over all the data."""
    module = method.task.server.build()
    module.load_state_dict(params)
    [(x, y)] = data.in_order(len(data))
    torch.nn.functional.cross_entropy(module(x), y).backward()
    return {name: p.grad for name, p in module.named_parameters()}


def rounds(method, state, count, *clients):
    """Return the state and the client states after `count` rounds of clients 0, 1, ..."""
    client_states = {}
    for round in range(count):
        answers = []
        for id, (capacity, data) in enumerate(clients):
            work = visit(method, state, capacity, data, id=id, round=round, seed=id, client_state=client_states.get(id))
            update = method.local_update(method.extract(state, work.selection), work)
            client_states |= update.client_states
            answers.append((work.selection, update))
        state = method.step(state, round, folded(state, *answers))
    return state, client_states


# the box, line by line


@pytest.mark.parametrize("size", ["largest", "own"])
@pytest.mark.parametrize("option", ["I", "II"])
def test_the_first_round_is_fedavg(option, size, tmp_path):
    """All variates are zero: equal bit for bit."""
    states = []
    for method in ({"name": "scaffold", "option": option}, {"name": "fedavg", "weight": "uniform"}):
        training = {"momentum": 0.9, "weight_decay": 0.1, "clip": 1.0}
        spec = tiny(method=method | {"size": size}, training=training, evaluation={"every": 9})
        simulation = simulate(spec, tmp_path / method["name"])
        run(simulation, 1)
        states.append(simulation.state["params"])
    assert_same(*states)


@pytest.mark.parametrize("option", ["I", "II"])
def test_a_step_by_hand(option):
    """One client of 10, one batch: y = x - lr (g + c - c_k), with either option c_k+ = g, and c takes a tenth."""
    method = bound(Scaffold(option=option), 1.0, lr=0.5)
    state, client_state = with_variates(method)
    data = client_data(0, 1, 2, 3)
    update = answer(method, state, client_state, data)
    new = stepped(method, state, update)
    g = gradient(method, state["params"], data)
    for name, x in state["params"].items():
        c, c_k = state["variate"][name], client_state["variate"][name]
        torch.testing.assert_close(new["params"][name], x - 0.5 * (g[name] + c - c_k))
        torch.testing.assert_close(update.client_states[3]["variate"][name], g[name])
        torch.testing.assert_close(new["variate"][name], c + (g[name] - c_k) / 10)


def test_option_two_is_the_papers_difference():
    """With plain SGD: c_k - c + (x - y) / (K lr), here with 3 epochs of 3 batches."""
    method = bound(Scaffold(), 1.0, lr=0.3, epochs=3, batch_size=2)
    state, client_state = with_variates(method)
    update = answer(method, state, client_state, client_data(0, 1, 2, 3, 1))
    assert update.metrics["steps"] == 9
    for name, x in state["params"].items():
        c, c_k, y = state["variate"][name], client_state["variate"][name], update.sums["params"][name]
        torch.testing.assert_close(update.client_states[3]["variate"][name], c_k - c + (x - y) / (9 * 0.3))


@pytest.mark.parametrize("extra", [{"momentum": 0.9}, {"weight_decay": 0.5}, {"clip": 0.01}], ids=str)
def test_option_two_is_the_mean_gradient_of_the_data(extra):
    """Two steps, the second at the y of the first; the paper's difference also contains momentum, decay or clipping."""
    data = client_data(0, 1, 2, 3)
    one, two = (bound(Scaffold(), 1.0, lr=0.3, epochs=epochs, **extra) for epochs in (1, 2))
    state, client_state = with_variates(one)
    update, y = answer(two, state, client_state, data), answer(one, state, client_state, data).sums["params"]
    first, second = (gradient(one, params, data) for params in (state["params"], y))
    for name, x in state["params"].items():
        c, c_k, end = state["variate"][name], client_state["variate"][name], update.sums["params"][name]
        kept = update.client_states[3]["variate"][name]
        torch.testing.assert_close(kept, (first[name] + second[name]) / 2)
        assert not torch.allclose(kept, c_k - c + (x - end) / (2 * 0.3), rtol=0.01)


def test_option_one_is_the_gradient_at_what_was_received():
    """Over all data, also with unequal batches; the FLOPs of the extra pass are counted."""
    method = bound(Scaffold(option="I"), 1.0, lr=0.3, epochs=3, batch_size=2)
    state, client_state = with_variates(method)
    data = client_data(0, 1, 2, 3, 1)
    update = answer(method, state, client_state, data)
    for name, g in gradient(method, state["params"], data).items():
        torch.testing.assert_close(update.client_states[3]["variate"][name], g)
    assert update.metrics["train_samples"] == 15
    assert update.metrics["train_flops"] == costs.training_flops(method.task.server, 20)


def test_a_client_without_steps_keeps_its_variate():
    for option in ("I", "II"):
        method = bound(Scaffold(option=option), 1.0, epochs=0)
        state, client_state = with_variates(method)
        update = answer(method, state, client_state, client_data(0, 1))
        assert not update.client_states
        assert_same(stepped(method, state, update), state)


# a run


@pytest.mark.parametrize(("option", "weight"), [("I", "uniform"), ("II", "uniform"), ("II", "samples")])
def test_the_servers_variate_is_the_mean_of_the_clients(option, weight, tmp_path):
    """In every round, for any cohort, capacities and weights; clients that never took part have zero."""
    method = {"name": "scaffold", "size": "own", "option": option, "weight": weight}
    spec = tiny(method=method, evaluation={"every": 9}, rounds=4)
    simulation = simulate(spec, tmp_path)
    for _ in range(3):
        run(simulation, 1)
        kept = [simulation.client_states.get(id)["variate"] for id in simulation.client_states.files]
        assert 0 < len(kept) <= 6
        for name, c in simulation.state["variate"].items():
            torch.testing.assert_close(c, torch.stack([c_k[name] for c_k in kept]).sum(0) / 6)


def test_traffic_is_twice_that_of_fedavg(tmp_path):
    lines = [
        run(simulate(tiny(method={"name": name, "size": "own"}, rounds=1), tmp_path / name))[0]
        for name in ("fedavg", "scaffold")
    ]
    for metric in ("bytes_down", "bytes_up"):
        assert lines[1][metric] == 2 * lines[0][metric]
    assert lines[1]["train_flops"] == lines[0]["train_flops"]


def test_coordinates_without_holders_have_no_variate():
    """Exactly zero for the second half of 8 nodes while all clients are small, for server and clients."""
    method = bound(Scaffold(size="own"), 1.0, 0.5, hidden=(8,), lr=0.3, momentum=0.9, weight_decay=0.1)
    state = method.init()
    small, large = (0.5, client_data(0, 1, 2)), (1.0, client_data(3, 3))
    new, client_states = rounds(method, state, 3, small, small)
    for variate in (new["variate"], client_states[0]["variate"], client_states[1]["variate"]):
        assert not variate["hidden0.bias"][4:].any() and not variate["head.weight"][:, 4:].any()
        assert variate["hidden0.bias"][:4].any() and variate["head.weight"][:, :4].all()
    assert torch.equal(new["params"]["head.weight"][:, 4:], state["params"]["head.weight"][:, 4:])
    new, client_states = rounds(method, state, 3, small, large)
    assert not client_states[0]["variate"]["head.weight"][:, 4:].any()
    c, c_k = new["variate"]["head.weight"][:, 4:], client_states[1]["variate"]["head.weight"][:, 4:]
    assert c.any()
    torch.testing.assert_close(c, c_k / 10)


def test_a_client_that_shrinks_keeps_the_rest_of_its_variate():
    method = bound(Scaffold(size="own"), 1.0, 0.5, hidden=(8,))
    state, client_state = with_variates(method)
    before = client_state["variate"]["head.weight"].clone()
    update = answer(method, state, client_state, client_data(0, 1, 2), capacity=0.5)
    after = update.client_states[3]["variate"]["head.weight"]
    assert torch.equal(after[:, 4:], before[:, 4:])
    assert (after[:, :4] != before[:, :4]).all()
    assert torch.equal(client_state["variate"]["head.weight"], before)


def test_the_variate_does_not_make_a_clients_model_personal():
    method = bound(Scaffold(), 1.0)
    state, client_state = with_variates(method)
    own, everybodys = method.deploy(state, 1, 1.0, client_state), method.deploy(state, 1, 1.0)
    assert own.key == everybodys.key
    assert_same(own.params, everybodys.params)


# what it is for


@pytest.mark.parametrize("option", ["I", "II"])
def test_opposed_clients_do_not_drift(option, monkeypatch):
    """(b - 1)^2 / 2 and 4 (b + 1)^2 / 2, 10 steps a round: the best b is -0.6. FedAvg converges to the
    mean of the clients' results instead."""
    curvature, target = torch.tensor([1.0, 4.0]), torch.tensor([1.0, -1.0])

    def loss(self, visit):
        return lambda logits, y: (curvature[y, None] * (logits - target[y, None]) ** 2 / 2).sum(1).mean()

    monkeypatch.setattr(Method, "loss", loss)
    # black images: nothing but the biases of the classifier is trained
    like = client_data(0)
    clients = [
        (1.0, ClientData({"x": torch.zeros(1, 1, 1, 2).byte(), "y": torch.tensor([k])}, like.prepare, like.goal))
        for k in (0, 1)
    ]
    found = {}
    for method in (Scaffold(option=option), METHODS["fedavg"]()):
        method = bound(method, 1.0, hidden=(), lr=0.1, steps=10)
        method = method.bind(replace(method.task, clients=2))
        state, _ = rounds(method, method.init(), 40, *clients)
        found[method.name] = state["params"]["head.bias"]
    torch.testing.assert_close(found["scaffold"], torch.full((4,), -0.6), atol=1e-5, rtol=0)
    # a client keeps a = 0.9^10 and b = 0.6^10 of its distance: b* = ((1 - a) - (1 - b)) / ((1 - a) + (1 - b))
    a, b = 0.9**10, 0.6**10
    torch.testing.assert_close(found["fedavg"], torch.full((4,), (b - a) / (2 - a - b)), atol=1e-5, rtol=0)
