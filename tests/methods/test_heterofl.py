"""HeteroFL against manual computations."""

import math

import pytest
import torch
from helpers import bound, client_data, one_round, visit

from rayfl.methods import METHODS, Client

HeteroFL = METHODS["heterofl"]


def test_a_round_of_two_capacities(clients_answer):
    """The large client returns 3 and has classes 0 and 1, the small one returns 1 and has 1 and 2."""
    method = bound(HeteroFL(), 1.0, 0.5)
    state = method.init()
    old = {name: t.tolist() for name, t in state["params"].items()}
    clients_answer(3, 1)
    new = one_round(method, state, (1.0, client_data(0, 1)), (0.5, client_data(1, 2, 2)))["params"]
    assert new["hidden0.weight"].tolist() == [[2, 2], [3, 3]]
    assert new["hidden0.bias"].tolist() == [2, 3]
    assert new["head.weight"].tolist() == [[3, 3], [2, 3], [1, old["head.weight"][2][1]], old["head.weight"][3]]
    assert new["head.bias"].tolist() == [3, 2, 1, old["head.bias"][3]]
    assert {name: t.tolist() for name, t in state["params"].items()} == old


def test_all_label_rows(clients_answer):
    method = bound(HeteroFL(label_rows="all"), 1.0, 0.5)
    clients_answer(3, 1)
    new = one_round(method, method.init(), (1.0, client_data(0, 1)), (0.5, client_data(1, 2)))["params"]
    assert new["head.weight"].tolist() == [[2, 3]] * 4


def test_classes_that_the_cohort_lacks_keep_their_rows():
    """Equal bit for bit, also with weight decay and momentum."""
    method = bound(HeteroFL(), 1.0, 0.5, lr=0.5, weight_decay=0.1, momentum=0.9, epochs=3, batch_size=1)
    state = method.init()
    new = one_round(method, state, (1.0, client_data(0, 1, 0)), (0.5, client_data(1, 1)))
    for name in ("head.weight", "head.bias"):
        assert torch.equal(new["params"][name][2:], state["params"][name][2:])
        assert (new["params"][name][:2] != state["params"][name][:2]).all()


@pytest.mark.parametrize(("mask", "moves"), [("zero", False), ("neg_inf", False), ("none", True)])
def test_absent_classes_get_no_gradient(mask, moves):
    method = bound(HeteroFL(mask=mask, label_rows="all"), 1.0, lr=0.5)
    state = method.init()
    new = one_round(method, state, (1.0, client_data(0, 2, 2)))
    assert torch.equal(new["params"]["head.bias"][[1, 3]], state["params"]["head.bias"][[1, 3]]) is not moves
    assert not torch.equal(new["params"]["head.bias"][[0, 2]], state["params"]["head.bias"][[0, 2]])


@pytest.mark.parametrize(("mask", "classes"), [("zero", 4), ("none", 4), ("neg_inf", 2)])
def test_the_first_loss(mask, classes):
    """Loss of an untrained network: ln 4 if absent classes count, ln 2 otherwise."""
    method = bound(HeteroFL(mask=mask), 1.0)
    work = visit(method, {}, 1.0, client_data(0, 2, 2, 0))
    payload = {"params": {n: torch.zeros(shape) for n, shape in work.net.layout.shapes.items()}}
    update = method.local_update(payload, work)
    assert update.metrics["train_loss"] / 4 == pytest.approx(math.log(classes))


def test_the_scaler_is_relative_to_the_server():
    method = bound(HeteroFL(), 0.5, 0.25, 0.0625, hidden=(16,))
    assert [method.net_at(c).scale for c in (0.5, 0.25, 0.0625)] == [1, 0.5, 0.125]
    without = bound(HeteroFL(scaler=False), 0.5, 0.25, hidden=(16,))
    assert without.net_at(0.25).scale == 1


def test_positions_are_fixed():
    method = bound(HeteroFL(), 1.0, 0.3, hidden=(10,))
    selections = [method.select({}, Client(id, 0.3, r)) for r in (0, 1, 9) for id in (0, 5)]
    assert len({s.key for s in selections}) == 1
    assert selections[0].positions["hidden0"].positions == (0, 1, 2)
    assert selections[0].net.layout.shapes["head.weight"] == (4, 3)


def test_a_server_wider_than_every_client_is_trained_in_part(clients_answer):
    method = bound(HeteroFL(), 1.0, 0.5, hidden=(4,))
    state = method.init()
    for round in range(4):
        clients_answer(9)
        new = one_round(method, state, (0.5, client_data(0, 1, 2, 3)), round=round)
        state, old = new, state["params"]
        assert (new["params"]["hidden0.bias"][:2] == 9).all()
        assert torch.equal(new["params"]["hidden0.bias"][2:], old["hidden0.bias"][2:])
        assert torch.equal(new["params"]["head.weight"][:, 2:], old["head.weight"][:, 2:])
