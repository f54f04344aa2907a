"""SHeteroFL: the loss of all widths by hand, identities with HeteroFL, and two rounds against plain torch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, bound, client_data, run, simulate, tiny, updated, visit
from independent import batches, experiment, network, visited

from rayfl import costs
from rayfl.core.tensors import nbytes
from rayfl.methods import METHODS

SHeteroFL = METHODS["sheterofl"]


def logits_of(params, hidden, x):
    """Return the logits of a Perceptron with the first `hidden` of its neurons."""
    h = F.linear(x.flatten(1), params["hidden0.weight"][:hidden], params["hidden0.bias"][:hidden])
    return F.linear(h, params["head.weight"][:, :hidden], params["head.bias"])


@pytest.mark.parametrize(("capacity", "widths"), [(1.0, (4, 2, 1)), (0.5, (2, 1)), (0.25, (1,))])
def test_a_step_is_on_the_sum_over_widths(capacity, widths):
    """A network of 2 pixels, 4 neurons and 4 classes, at widths 1, 1/2 and 1/4."""
    method = bound(SHeteroFL(), 1.0, 0.5, 0.25, hidden=(4,), lr=0.5)
    state, data = method.init(), client_data(0, 1, 2, 3)
    update = updated(method, state, capacity, data)
    params = {name: t.clone().requires_grad_() for name, t in state["params"].items()}
    [(x, y)] = data.in_order(4)
    loss = sum(F.cross_entropy(logits_of(params, n, x), y) for n in widths)
    loss.backward()
    own = method.prefix(capacity)
    expected = own.take({name: p.detach() - 0.5 * p.grad for name, p in params.items()})
    torch.testing.assert_close({name: t / 4 for name, t in update.sums["params"].items()}, expected)
    assert update.metrics["train_loss"] == pytest.approx(4 * loss.item())
    assert update.weight == 4


def test_costs():
    """A pass per width; the network of the client's width is sent down and up, of 4 bytes a number."""
    method = bound(SHeteroFL(), 1.0, 0.5, 0.25, hidden=(4,), steps=3, batch_size=2)
    state, data = method.init(), client_data(0, 1, 2, 3)
    update = updated(method, state, 0.5, data)
    nets = [method.net_at(c) for c in (0.5, 0.25)]
    assert update.metrics["train_flops"] == sum(costs.training_flops(net, 6) for net in nets)
    size = 4 * (2 * 2 + 2 + 2 * 4 + 4)
    assert nbytes(method.extract(state, visit(method, state, 0.5, data).selection)) == size
    assert nbytes(update.sums) == size


def rounds(tmp_path, method, **sections):
    simulation = simulate(tiny(method=method, rounds=2, **sections), tmp_path / method["name"])
    run(simulation)
    return simulation.state


def test_of_one_width_it_is_heterofl(tmp_path):
    """Equal bit for bit, on a network with norms and the Scaler."""
    plain = {"weight": "samples", "mask": "none", "label_rows": "all"}
    heterofl = {"name": "heterofl"} | plain
    assert_same(rounds(tmp_path, {"name": "sheterofl", "slimmable": False} | plain), rounds(tmp_path, heterofl))


def test_of_one_capacity_it_is_heterofl(tmp_path):
    """Equal bit for bit."""
    plain, clients = {"weight": "samples", "mask": "none", "label_rows": "all"}, {"capacities": [0.5]}
    one, other = ({"name": name} | plain for name in ("sheterofl", "heterofl"))
    assert_same(rounds(tmp_path, one, clients=clients), rounds(tmp_path, other, clients=clients))


@pytest.mark.parametrize("scaler", [True, False])
def test_two_rounds_are_plain_torch_s(scaler, tmp_path, float64):
    """A network of three widths with batch norms: the gradients of each width's own network, whose Scaler divides by
    its width, are added on its prefix."""
    sections = {
        "model": "digits_cnn",
        "clients": {"capacities": [1.0, 0.5, 0.25]},
        "evaluation": {"every": 9, "statistics": "batch"},
        "rounds": 3,
    }
    simulation = simulate(experiment({"name": "sheterofl", "scaler": scaler}, **sections), tmp_path)
    params, nets = simulation.state["params"], simulation.method.task.nets
    trained = set()
    for round in range(2):
        totals, covers = ({name: torch.zeros_like(t) for name, t in params.items()} for _ in range(2))
        for client in visited(simulation, round):
            trained.add(client.net.width)
            own = {name: t.clone() for name, t in corner(params, client.net).items()}
            for x, y in batches(client.data, client.seed, 2, 5):
                step = {name: torch.zeros_like(t) for name, t in own.items()}
                for net in (net for net in nets.values() if net.width <= client.net.width):
                    scaled = replace(net, scale=net.width) if scaler else net
                    module = network(scaled, corner(own, net) | net.statistics()).train()
                    F.cross_entropy(module(x), y).backward()
                    for name, p in module.named_parameters():
                        step[name][index(p)] += p.grad
                for name, t in step.items():
                    own[name] -= 0.05 * t
            for name, t in own.items():
                totals[name][index(t)] += len(client.data) * t
                covers[name][index(t)] += len(client.data)
        params = {name: torch.where(covers[name] > 0, t / covers[name], params[name]) for name, t in totals.items()}
        simulation.train()
        simulation.round += 1
    assert len(trained) > 1
    found = simulation.state["params"]
    assert found.keys() == params.keys() and found["head.weight"].dtype == torch.float64
    for name, t in params.items():
        torch.testing.assert_close(found[name], t, rtol=1e-9, atol=1e-11)


def index(t):
    return tuple(slice(size) for size in t.shape)


def corner(params, net):
    """Return the first positions of every dimension."""
    return {name: params[name][tuple(slice(n) for n in shape)] for name, shape in net.layout.shapes.items()}
