"""FedProx against manual computations."""

from collections import Counter

import pytest
import torch
from helpers import assert_same, bound, client_data, one_round, run, simulate, tiny, updated

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.seeds import stream, torch_generator
from rayfl.methods import METHODS, Client

FedProx = METHODS["fedprox"]


@pytest.mark.parametrize("size", ["largest", "own"])
def test_without_the_proximal_term_it_is_fedavg(size, tmp_path):
    """Equal bit for bit, also with momentum, weight decay and clipping."""
    training = {"momentum": 0.9, "weight_decay": 0.1, "clip": 1.0}
    runs = []
    for method in ({"name": "fedavg"}, {"name": "fedprox", "mu": 0}):
        simulation = simulate(tiny(method=method | {"size": size}, training=training), tmp_path / method["name"])
        runs.append((run(simulation), simulation.state))
    (lines, state), (same_lines, same_state) = runs
    assert lines == same_lines
    assert_same(same_state, state)


@pytest.mark.parametrize("capacity", [1.0, 0.5])
def test_two_steps_by_hand(capacity):
    """The term is zero in the first step, and mu times the client's movement in the second, also for half the
    capacity."""
    method = bound(FedProx(mu=0.5, size="own"), 1.0, 0.5, lr=0.2, epochs=2, batch_size=4)
    state, data = method.init(), client_data(0, 1, 2, 3)
    selection = method.select(state, Client(0, capacity, 0))
    received = method.extract(state, selection)["params"]
    module = selection.net.build()
    module.load_state_dict(received)
    for x, y in data.batches(2, 4, torch_generator(0, "batches")):
        module.zero_grad()
        torch.nn.functional.cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for name, w in module.named_parameters():
                w -= 0.2 * (w.grad + 0.5 * (w - received[name]))
    update = updated(method, state, capacity, data)
    for name, w in module.named_parameters():
        torch.testing.assert_close(update.sums["params"][name] / 4, w.detach())


def test_a_strong_term_keeps_clients_near_the_received_parameters():
    """lr mu = 1: each step starts from the received parameters, so that 50 steps move by lr times one gradient."""
    state = bound(FedProx(), 1.0).init()

    def moved(mu):
        method = bound(FedProx(mu=mu), 1.0, lr=0.1, epochs=50)
        new = one_round(method, state, (1.0, client_data(0, 0, 1)))["params"]
        return sum(float((t - state["params"][name]).square().sum()) for name, t in new.items()) ** 0.5

    distances = [moved(mu) for mu in (0, 0.1, 1, 10)]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.1 < 1 < distances[0]


# partial work


@pytest.mark.parametrize("field", ["epochs", "steps"])
def test_stragglers_draw_their_epochs_or_steps(field):
    """Half of the clients work 1 ... 5 epochs or steps, uniform; a tenth of them 5 like all others."""
    method = bound(FedProx(stragglers=0.5), 1.0, **{field: 5})
    seeds = [stream(0, "local", round, id) for round in range(40) for id in range(50)]
    drawn = Counter(getattr(method.work(seed), field) for seed in seeds)
    assert sorted(drawn) == [1, 2, 3, 4, 5]
    for work, share in {1: 0.1, 2: 0.1, 3: 0.1, 4: 0.1, 5: 0.6}.items():
        assert drawn[work] / 2000 == pytest.approx(share, abs=0.03)
    assert [method.work(seed) for seed in seeds[:50]] == [method.work(seed) for seed in seeds[:50]]


@pytest.mark.parametrize(("stragglers", "works"), [(0.0, {5}), (1.0, {1, 2, 3, 4, 5})])
def test_no_or_all_clients_are_stragglers(stragglers, works):
    method = bound(FedProx(stragglers=stragglers), 1.0, epochs=5)
    assert {method.work(seed).epochs for seed in range(100)} == works


def test_a_straggler_trains_its_drawn_epochs():
    """5 samples in batches of 2 are 3 steps per epoch. The result equals FedAvg with that number of epochs."""
    method = bound(FedProx(mu=0, stragglers=1.0), 1.0, epochs=4, batch_size=2)
    state, data = method.init(), client_data(0, 1, 2, 3, 0)
    seed = next(seed for seed in range(100) if method.work(seed).epochs == 2)
    update = updated(method, state, 1.0, data, seed=seed)
    assert (update.metrics["steps"], update.metrics["train_samples"]) == (6, 10)
    fedavg = bound(METHODS["fedavg"](), 1.0, epochs=2, batch_size=2)
    assert_same(update.sums, updated(fedavg, state, 1.0, data, seed=seed).sums)


def test_zero_epochs_change_nothing():
    method = bound(FedProx(stragglers=1.0), 1.0, epochs=0)
    state = method.init()
    assert_same(one_round(method, state, (1.0, client_data(0, 1))), state)


@pytest.mark.parametrize("field", ["epochs", "steps"])
def test_stragglers_need_more_than_one_epoch_or_step(field):
    method = bound(FedProx(stragglers=0.5), 1.0, **{field: 1})
    with pytest.raises(ConfigError) as error:
        method.check(9, Population())
    assert str(error.value) == (
        "method.stragglers: 0.5 is not valid. Allowed: 0, because a round has only one epoch or step. "
        "Hint: increase training.epochs or training.steps"
    )
    bound(FedProx(), 1.0, **{field: 1}).check(9, Population())
    bound(FedProx(stragglers=0.5), 1.0, **{field: 2}).check(9, Population())
