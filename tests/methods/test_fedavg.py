"""FedAvg against manual computations."""

import pytest
import torch
from helpers import bound, client_data, one_round

from rayfl.methods import METHODS, Client

FedAvg = METHODS["fedavg"]


@pytest.mark.parametrize(("weight", "expected"), [("samples", 5.0), ("uniform", 4.0)])
def test_the_mean(weight, expected, clients_answer):
    """Clients with 2 and 6 samples return 2 and 6: (2 * 2 + 6 * 6) / 8."""
    method = bound(FedAvg(weight=weight), 1.0)
    clients_answer(2, 6)
    state = one_round(method, method.init(), (1.0, client_data(0, 1)), (1.0, client_data(*range(3), 0, 1, 2)))
    assert {v for t in state["params"].values() for v in t.flatten().tolist()} == {expected}


@pytest.mark.parametrize(("round", "lr"), [(1, 0.5), (2, 0.05)])
def test_a_step_by_hand(round, lr):
    """One client, one batch: x - lr * gradient; a tenth of lr after round 2."""
    method = bound(FedAvg(), 1.0, lr=0.5, milestones=(2,))
    state, data = method.init(), client_data(0, 1, 2, 3)
    module = method.task.server.build()
    module.load_state_dict(state["params"])
    [(x, y)] = data.in_order(4)
    torch.nn.functional.cross_entropy(module(x), y).backward()
    new = one_round(method, state, (1.0, data), round=round)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(new["params"][name], parameter.detach() - lr * parameter.grad)


@pytest.mark.parametrize(("size", "width"), [("largest", 0.5), ("smallest", 0.125)])
def test_all_capacities_deploy_one_network(size, width):
    method = bound(FedAvg(size=size), 0.5, 0.25, 0.125, hidden=(16,))
    state = method.init()
    assert state["params"]["hidden0.bias"].shape == (16 * width,)
    keys = {method.select(state, Client(0, c, r)).key for r in range(3) for c in (0.5, 0.25, 0.125)}
    assert len(keys) == 1
    deployed = {c: method.deploy(state, 1, c) for c in (0.5, 0.125)}
    assert deployed[0.5].key == deployed[0.125].key
    assert deployed[0.125].net.width == width and deployed[0.125].net.scale == 1
