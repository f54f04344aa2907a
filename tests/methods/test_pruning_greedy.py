"""Pruning-greedy: a frozen mask."""

import pytest
import torch
from helpers import assert_same, bound, client_data, spread, updated

from rayfl.methods import METHODS, Client

Greedy, FIARSE = METHODS["pruning_greedy"], METHODS["fiarse"]


def test_two_steps_by_hand():
    """SGD on the whole network whose gradients outside the mask, and whose parameters there, are set to 0; with
    momentum and weight decay, which would move them."""
    training = dict(lr=0.2, momentum=0.9, weight_decay=0.1, epochs=2, batch_size=4)
    method = bound(Greedy(), 1.0, 0.4, hidden=(6,), **training)
    state, data = method.init(), client_data(0, 1, 2, 3)
    mask = method.select(state, Client(0, 0.4, 0))
    module = method.task.server.build()
    module.load_state_dict(spread(mask, mask.take(state["params"]), state["params"]))
    held = mask.cover(state["params"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)
    [(x, y)] = data.in_order(4)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(x), y).backward()
        for name, w in module.named_parameters():
            w.grad.mul_(held[name])
        optimizer.step()
    sent = spread(mask, updated(method, state, 0.4, data).sums["params"], state["params"])
    for name, w in module.named_parameters():
        torch.testing.assert_close(sent[name], w.detach())


@pytest.mark.parametrize("threshold", ["model", "layer"])
def test_one_step_is_fiarse_without_the_bracket(threshold):
    """To the bit: nothing has fallen below the threshold before the first step."""
    data = client_data(0, 1, 2, 3)
    answers = []
    for method in (Greedy(threshold=threshold), FIARSE(threshold=threshold, biased_term=False)):
        method = bound(method, 1.0, 0.4, hidden=(6,), lr=0.5, epochs=1)
        answers.append(updated(method, method.init(), 0.4, data).sums)
    assert_same(*answers)


def test_elements_may_cross_the_threshold_and_stay():
    """Where FIARSE would drop them: its answer differs from the second step on."""
    data = client_data(0, 1, 2, 3)
    answers = []
    for method in (Greedy(), FIARSE(biased_term=False)):
        method = bound(method, 1.0, 0.4, hidden=(6,), lr=0.5, epochs=6)
        state = method.init()
        answers.append(updated(method, state, 0.4, data).sums["params"])
    theta = method.thresholds(state["params"], 0.4)
    assert any((t.abs() < theta[name]).any() for name, t in answers[0].items())
    assert any(not torch.equal(t, answers[1][name]) for name, t in answers[0].items())
