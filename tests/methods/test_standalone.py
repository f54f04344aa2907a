"""Standalone: every client trains alone."""

from dataclasses import replace

import pytest
import torch
from helpers import assert_same, bound, client_data, run, simulate, tiny, updated

from rayfl.config import ConfigError, parse
from rayfl.core.net import params_of
from rayfl.core.seeds import torch_generator
from rayfl.methods import METHODS

Standalone = METHODS["standalone"]


@pytest.mark.parametrize(("size", "nodes"), [("own", 2), ("largest", 4), ("smallest", 1)])
def test_rounds_are_sgd_by_hand(size, nodes):
    """Three rounds of a client of capacity 0.5, from the first channels of the initial network."""
    method = bound(Standalone(size=size), 1.0, 0.5, 0.25, hidden=(4,), lr=0.5, batch_size=2, milestones=(2,))
    method = method.bind(replace(method.task, seed=7))
    state, data, client_state = method.init(), client_data(0, 1, 2, 3), None
    module = method.net_at(0.5).build()
    initial = method.deploy(state, 0, 0.5).params
    assert initial["hidden0.bias"].tolist() == state["params"]["hidden0.bias"].tolist()[:nodes]
    module.load_state_dict(initial)
    for round, lr in enumerate([0.5, 0.5, 0.05]):
        optimizer = torch.optim.SGD(module.parameters(), lr)
        for x, y in data.batches(2, 2, torch_generator(round, "batches")):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
        client_state = updated(
            method, state, 0.5, data, id=3, round=round, seed=round, client_state=client_state
        ).client_states[3]
        torch.testing.assert_close(client_state, {"own": params_of(module)})
    own, everybodys = method.deploy(state, 3, 0.5, client_state), method.deploy(state, 3, 0.5)
    assert_same(own.params, client_state["own"])
    assert_same(everybodys.params, initial)
    assert (own.is_start, everybodys.is_start) == (False, True)


def test_nothing_is_sent_and_the_state_never_changes(tmp_path):
    simulation = simulate(tiny(rounds=3, method="standalone"), tmp_path)
    initial = simulation.method.init()
    lines = run(simulation)
    assert [(line["bytes_down"], line["bytes_up"]) for line in lines] == [(0, 0)] * 3
    assert all(line["train_flops"] > 0 and line["clients"] == 4 and line["refused"] == 0 for line in lines)
    assert_same(simulation.state, initial)
    assert set(simulation.client_states.files) == {id for r in range(3) for id in simulation.clients.sample(0, r)}


def test_clients_are_independent(tmp_path):
    """A client's network is equal bit for bit for any size of the cohort."""
    kept = []
    for cohort in (1, 6):
        spec = tiny(rounds=1, method="standalone", clients={"cohort": cohort})
        simulation = simulate(spec, tmp_path / str(cohort))
        run(simulation)
        kept.append({id: simulation.client_states.get(id) for id in simulation.client_states.files})
    [alone] = kept[0]
    assert_same(kept[1][alone], kept[0][alone])


@pytest.mark.parametrize("method", ["standalone", {"name": "lg_fedavg", "size": "own"}])
def test_capacities_must_be_fixed(method):
    """A client's own layers fit the network of one width."""
    name = method if isinstance(method, str) else method["name"]
    with pytest.raises(ConfigError) as error:
        tiny(method=method, clients={"assignment": "dynamic"})
    assert str(error.value) == (
        f"test: clients.assignment: 'dynamic' is not valid. Allowed: 'fixed', because the client state of method "
        f"{name} fits one network only; or method.size: smallest or largest"
    )
    tiny(method={"name": name, "size": "smallest"}, clients={"assignment": "dynamic"})
    tiny(method=method)


@pytest.mark.parametrize(
    ("field", "given", "only"), [("weight", "samples", "uniform"), ("label_rows", "present", "all")]
)
def test_settings_of_the_mean_are_not_allowed(field, given, only):
    with pytest.raises(ConfigError) as error:
        parse(Standalone, {field: given}, "test: method")
    assert str(error.value) == f"test: method.{field}: {given!r} is not valid. Allowed: {only}"
    assert getattr(parse(Standalone, {field: only}, "test: method"), field) == only


def test_a_diverging_network_is_not_stored(tmp_path):
    """Although nothing is sent: from its second round on, it is compared with the previous client state."""
    one = {"count": 1, "cohort": 1, "capacities": [0.3]}
    spec = tiny(method="standalone", clients=one, partition={"labels": 4}, updates={"growth": 1e-3}, rounds=3)
    simulation = simulate(spec, tmp_path)
    lines = run(simulation, 1)
    kept = simulation.client_states.get(0)
    lines += run(simulation)
    assert [line["refused"] for line in lines] == [0, 1, 1] and "norm " in lines[1]["refusals"]
    assert_same(simulation.client_states.get(0), kept)
