"""Payloads and modules as methods see them: in one layout and state, wherever a client trains."""

from typing import Literal

import pytest
import torch
from helpers import Shuffled, assert_same, run, simulate, tiny
from torch.func import functional_call

from rayfl.core.fold import Update
from rayfl.core.net import Net, as_built, cached_module
from rayfl.core.norms import load
from rayfl.core.tensors import ALIGNED, LARGE, laid_out
from rayfl.engine.worker import Worker
from rayfl.methods.width.heterofl import HeteroFL
from rayfl.models import MODELS


class Direct(HeteroFL):
    """Uses the payload's tensors and the module as they come."""

    name: Literal["direct"] = "direct"

    def local_update(self, payload, visit):
        module = cached_module(visit.net, visit.data.device)
        params = {name: t.clone().requires_grad_() for name, t in payload["params"].items()}
        [(x, y)] = visit.data.batches(1, 20, torch.Generator().manual_seed(0))
        with torch.no_grad():
            target = functional_call(module, payload["params"], (x,)).softmax(1)
        logits = functional_call(module, params, (x,))
        loss = torch.nn.functional.cross_entropy(logits, y) - (target * logits.log_softmax(1)).sum(1).mean()
        loss.backward()
        sums = {name: (p - 0.1 * p.grad).detach() for name, p in params.items()}
        return Update({"params": sums}, 1.0, metrics={"train_samples": len(y), "train_loss": loss.item()})


@pytest.mark.parametrize("model", ["digits_cnn", "liang_mlp"])
def test_a_payload_used_directly_gives_equal_bits_in_every_process(model, tmp_path):
    """An evaluation leaves the cached module in evaluation mode, with statistics."""
    experiment = tiny(method=Direct(), model={"name": model}, rounds=3, evaluation={"every": 1})
    arrays = experiment.data.arrays()
    alone = simulate(experiment, tmp_path / "alone")
    cached_module.cache_clear()
    other = simulate(experiment, tmp_path / "other", lambda recipe: Shuffled(Worker(recipe, arrays)))
    assert run(alone) == run(other)
    assert_same(alone.state, other.state)


def test_the_module_of_a_client_is_as_built():
    net = Net(MODELS["digits_cnn"](), 0.25)
    module = net.build().eval()
    load(module, net.statistics())
    assert all(part.training for part in as_built(module).modules())
    assert module.get_submodule("norm1").running_mean is None


def test_one_layout_for_views_of_a_state_and_of_a_message():
    whole = torch.arange(60.0).view(6, 10)
    buffer = torch.cat([torch.zeros(1), whole[:4, :3].reshape(-1)])
    large = torch.zeros(LARGE // 4 + 1)
    cut = {"a": {"w": whole[:4, :3], "n": torch.tensor(3), "big": large[1:]}, "empty": {}}
    sent = {"a": {"w": buffer[1:].view(4, 3), "n": torch.tensor([3, 3])[1], "big": large[1:].clone()}, "empty": {}}
    found = [laid_out(cut), laid_out(sent)]
    for one in found:
        assert_same(one, cut)
        assert one["empty"] == {}
        for t in one["a"].values():
            assert t.is_contiguous() and t.data_ptr() % ALIGNED == 0
    assert found[1]["a"]["big"].data_ptr() == sent["a"]["big"].data_ptr()
