"""FLOPs of passes through networks: by hand, and of a user's own method in rounds, budgets and on the clock."""

import copy
import threading
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from helpers import run, simulate, tiny
from torch import nn
from torch.func import functional_call
from torch.nn.modules import module as torch_module

from rayfl import costs
from rayfl.core import Update, copied, params_of
from rayfl.core.net import Net, cached_module, load
from rayfl.core.seeds import torch_generator
from rayfl.methods import Dense, Payload, Visit
from rayfl.models import MODELS
from rayfl.models.features import classifier_path, tapped
from rayfl.results.budgets import CLIENT_FLOPS, budgets
from rayfl.training.passes import Passes
from rayfl.training.settings import Training
from rayfl.training.steps import fit

NET = Net(MODELS["digits_cnn"].model_validate({"input": (1, 8, 8), "classes": 4}), 0.25)
X, Y = torch.zeros(5, 1, 8, 8), torch.zeros(5, dtype=torch.long)
FORWARD = costs.forward_flops(NET, 5)


def counted(call) -> float:
    with Passes() as passes:
        call()
    return passes.flops


@pytest.mark.parametrize(
    ("layer", "shape", "macs"),
    [
        (nn.Linear(3, 4), (2, 5, 3), 2 * 5 * 12),
        (nn.Conv1d(4, 6, 3, groups=2), (2, 4, 9), 2 * 36 * 7),
        (nn.Conv2d(1, 2, 3, stride=2), (3, 1, 5, 5), 3 * 18 * 4),
        (nn.ConvTranspose2d(1, 2, 2, stride=2), (3, 1, 4, 4), 3 * 8 * 16),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 1), nn.ReLU()), (7, 2, 2), 28),
    ],
)
def test_layers_by_hand(layer, shape, macs):
    """Two operations per multiply-add, and three passes with gradients."""
    x = torch.zeros(shape)
    assert counted(lambda: layer(x)) == 6 * macs
    with torch.no_grad():
        assert counted(lambda: layer(x)) == 2 * macs
    assert counted(lambda: layer.requires_grad_(False)(x)) == 2 * macs
    assert counted(lambda: layer(x.requires_grad_())) == 4 * macs
    if not isinstance(layer, nn.ConvTranspose2d):
        assert counted(lambda: layer(input=x)) == 4 * macs


def test_any_call_of_a_network_counts():
    module, ours = NET.build(), costs.training_flops(NET, 5)
    assert counted(lambda: module(X)) == ours
    assert counted(lambda: copy.deepcopy(module)(X)) == ours
    assert counted(lambda: NET.blank()(X.to("meta"))) == 0, "nothing is computed"
    assert counted(lambda: functional_call(module, dict(module.named_parameters()), (X,))) == ours
    assert counted(lambda: [module(X), module.eval()(X)]) == 2 * ours
    path = classifier_path(NET)
    assert counted(lambda: module.get_submodule(path)(torch.zeros(5, 32))) == 6 * NET.layer_macs[path] * 5


def test_a_block_counts_its_own_thread_and_leaves_no_hook():
    module = NET.build()

    def elsewhere() -> None:
        thread = threading.Thread(target=module, args=(X,))
        thread.start()
        thread.join()

    assert counted(elsewhere) == 0
    tables = [table for name, table in vars(torch_module).items() if name.startswith("_global") and "hooks" in name]
    before = list(map(len, tables))
    with Passes() as outer, pytest.raises(ZeroDivisionError), Passes():
        1 / 0  # noqa: B018
    module(X)
    assert outer.flops == 0 and list(map(len, tables)) == before


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("others", [0, 2])
def test_training_of_a_network_counts_its_samples_and_what_its_loss_calls(static, others):
    """The last batch is smaller, and a static step pads it."""
    module, other = cached_module(NET, torch.device("cpu")), NET.build()
    load(module, params_of(other))

    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(others):
                other(X[: len(y)])
        return F.cross_entropy(logits, y)

    batches = [(X, Y), (X[:2], Y[:2])]
    for trained in (module, NET.build()):
        flops = counted(lambda trained=trained: fit(trained, batches, loss, Training(), 0.1, static=static))
        assert flops == (3 + others) * FORWARD * 7 / 5


# a user's method


class Moon(Dense):
    """MOON (Li et al. 2021) as users write it: each step also asks the received and the previous network."""

    way: str = "closure"
    judged_on: ClassVar = "test"

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        module, path = self.module(visit, payload["params"]), classifier_path(visit.net)
        received, previous = copy.deepcopy(module), copy.deepcopy(module)
        if visit.client_state:
            load(previous, visit.client_state["last"])

        def features(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with tapped(network, path) as tap:
                network(x)
            return tap.features

        def contrast(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            if self.way == "frozen":
                near, far = (features(one.requires_grad_(False), x) for one in (received, previous))
            else:
                with torch.no_grad():
                    near, far = features(received, x), features(previous, x)
            apart = torch.stack([F.cosine_similarity(z, one) for one in (near, far)], 1)
            return F.cross_entropy(apart / 0.5, torch.zeros(len(x), dtype=torch.long))

        update = self.own_steps if self.way == "steps" else self.closure
        metrics = update(module, visit, features, contrast)
        update = self.answer(params_of(module), payload, visit, metrics)
        update.client_states[visit.client.id] = {"last": copied(params_of(module))}
        return update

    def closure(self, module, visit, features, contrast):
        seen, loss = [], self.loss(visit)
        handle = module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        with tapped(module, classifier_path(visit.net)) as tap:
            metrics = self.fit(module, visit, loss=lambda out, y: loss(out, y) + contrast(tap.features, seen.pop()))
        handle.remove()
        return metrics

    def own_steps(self, module, visit, features, contrast):
        training, steps, seen = self.task.training, 0, 0
        optimizer = torch.optim.SGD(module.parameters(), training.lr)
        count = training.batches_of(len(visit.data))
        for x, y in visit.data.batches(count, training.batch_size, torch_generator(visit.seed, "batches")):
            optimizer.zero_grad()
            with tapped(module, classifier_path(visit.net)) as tap:
                (F.cross_entropy(module(x), y) + contrast(tap.features, x)).backward()
            optimizer.step()
            steps, seen = steps + 1, seen + len(y)
        return {"train_loss": 0.0, "train_samples": seen, "steps": steps}


BOARD = {"devices": {"name": "classes", "classes": [{"name": "board", "gflops": 1e-3}]}}


def runs(method, folder):
    """Lines without simulated time, and with it, and the work of a visit at each capacity."""
    untimed = simulate(tiny(method=method, evaluation={"every": 2}), folder / "untimed")
    timed = simulate(tiny(method=method, evaluation={"every": 2}, system=BOARD), folder / "timed")
    return run(untimed), run(timed), timed.schedule.fleet.work


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory):
    return runs({"name": "fedavg", "size": "own"}, tmp_path_factory.mktemp("fedavg"))


@pytest.mark.parametrize("way", ["closure", "frozen", "steps"])
def test_three_forward_passes_and_one_backward_cost_five_thirds_of_fedavg(way, fedavg, tmp_path):
    (plain, fast, cheap), (ours, slow, dear) = fedavg, runs(Moon(way=way), tmp_path)
    for mine, yours in zip(ours, plain, strict=True):
        assert mine["train_flops"] == pytest.approx(5 / 3 * yours["train_flops"], rel=1e-12)
    limits = budgets([[plain], [ours]], CLIENT_FLOPS)
    assert limits[1] == pytest.approx(5 / 3 * limits[0], rel=1e-12)
    for capacity, work in dear.items():
        assert work.flops == pytest.approx(5 / 3 * cheap[capacity].flops, rel=1e-12)
        assert work.fixed_flops == 0
    assert slow[-1]["sim_time"] == pytest.approx(5 / 3 * fast[-1]["sim_time"], rel=1e-3)


class Stated(Moon):
    """A method's own statement replaces what is counted."""

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        update = super().local_update(payload, visit)
        update.metrics["train_flops"] = 12.0
        return update


def test_a_statement_replaces_what_is_counted(tmp_path):
    assert run(simulate(tiny(method=Stated()), tmp_path), 1)[0]["train_flops"] == 4 * 12
