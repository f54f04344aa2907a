"""FedL2G: two rounds against plain torch in float64, the gradient by differences, and warm-up rounds."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from independent import MIX, assert_close, batches, experiment, network, tensors, visited
from torch import nn
from torch.func import functional_call

from rayfl.config import ConfigError
from rayfl.core.fold import Update
from rayfl.core.seeds import torch_generator
from rayfl.core.tensors import Params
from rayfl.methods.base import Client, Visit
from rayfl.models.features import classifier_path, tapped
from rayfl.testing.tiny import assert_same, folded, run, simulate

PROJECTED = MIX | {"features": 6}


def asked(**options: Any) -> Any:
    return experiment(method={"name": "fedl2g"} | options, model=PROJECTED)


class Guided:
    """L of a client's network, in torch's own layers; `options` as of the method."""

    def __init__(self, net: Any, module: nn.Module, features: bool):
        self.path, self.module, self.features = classifier_path(net), module, features

    def __call__(self, w: Params, v: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with tapped(self.module, self.path) as tap:
            logits = functional_call(self.module, w, (x,))
        output = tap.features if self.features else logits
        return F.cross_entropy(logits, y) + ((output - v[y]) ** 2).mean()

    def after(self, w: Params, v: torch.Tensor, study: list[Any], create: bool = True) -> Params:
        value = sum(self(w, v, x, y) for x, y in study) / len(study)
        slopes = torch.autograd.grad(value, list(w.values()), create_graph=create)  # pyright: ignore
        return {name: t - 0.05 * slope for (name, t), slope in zip(w.items(), slopes, strict=True)}

    def quiz(self, w: Params, quiz: list[Any]) -> torch.Tensor:
        return sum(F.cross_entropy(functional_call(self.module, w, (x,)), y) for x, y in quiz) / len(quiz)  # pyright: ignore


def parts(client: Any, quiz_batches: int) -> tuple[Any, list[Any]]:
    """Return S_k and the batches of Q_k."""
    count = min(5 * quiz_batches, len(client.data) // 2)
    rows = torch.randperm(len(client.data), generator=torch_generator(0, "subset", client.id))
    return client.data.picked(rows[count:]), list(client.data.picked(rows[:count]).plain(5))


def differentiated(guided: Guided, study: list[Any], quiz: list[Any], v: torch.Tensor) -> torch.Tensor:
    w = {name: t.detach().clone().requires_grad_() for name, t in guided.module.named_parameters()}
    v = v.clone().requires_grad_()
    [found] = torch.autograd.grad(guided.quiz(guided.after(w, v, study), quiz), [v])
    return found


@pytest.mark.parametrize("guided", ["logits", "features"])
def test_rounds_are_plain_torch_s(float64: None, tmp_path: Path, guided: str) -> None:
    options: dict[str, Any] = {"guided": guided, "study_batches": 2, "quiz_batches": 2, "server_lr": 3.0}
    simulation = simulate(asked(**options), tmp_path)
    method, v = simulation.method, simulation.state["guide"]["vectors"]
    own: dict[int, Params] = {}
    for round in range(2):
        rows: dict[int, list[torch.Tensor]] = {}
        for client in visited(simulation, round):
            capacity = simulation.clients.capacity(client.id, 0, round)
            module = network(client.net, own.get(client.id) or method.initial(capacity)).train()  # pyright: ignore
            loss, (study, quiz) = Guided(client.net, module, guided == "features"), parts(client, 2)
            for x, y in batches(study, client.seed, 2, 5):
                w: Params = {**dict(module.named_parameters())}
                slopes = torch.autograd.grad(loss(w, v, x, y), list(w.values()))
                with torch.no_grad():
                    for parameter, slope in zip(w.values(), slopes, strict=True):
                        parameter -= 0.05 * slope
            own[client.id] = tensors(module)
            chosen = list(study.batches(2, 5, torch_generator(client.seed, "batches", "study")))
            for j, row in enumerate(differentiated(loss, chosen, quiz, v)):
                if row.abs().sum() > 0:
                    rows.setdefault(j, []).append(row)
        gradient = torch.stack(
            [torch.stack(rows[j]).mean(0) if j in rows else torch.zeros_like(v[j]) for j in range(4)]
        )
        assert 0 < gradient.norm() < 100
        v = v - 3.0 * gradient
    run(simulation)
    assert_close(simulation.state["guide"], {"vectors": v}, exact=True)
    for id, kept in own.items():
        assert_close(simulation.client_states.get(id)["own"], kept, exact=True)  # pyright: ignore


def test_the_gradient_is_that_of_differences(float64: None, tmp_path: Path) -> None:
    """Of the quiz after the step, when one element of V moves."""
    simulation = simulate(asked(warmup_rounds=1, study_batches=1), tmp_path)
    v, method = simulation.state["guide"]["vectors"].clone(), simulation.method
    [(selection, [client, *_]), *_] = simulation.cohort().values()
    [seen] = [c for c in visited(simulation, 0) if c.id == client.id]
    payload = method.extract(simulation.state, selection)
    update = method.local_update(payload, Visit(client, selection, seen.data, None, seen.seed))
    module = network(seen.net, method.initial(client.capacity)).train()  # pyright: ignore
    loss, (study, quiz) = Guided(seen.net, module, False), parts(seen, 1)
    chosen = list(study.batches(1, 5, torch_generator(seen.seed, "batches", "study")))
    sent = update.whole["gradients"]
    assert set(sent) == {str(j) for j in chosen[0][1].tolist()}
    w = {name: t.detach().clone().requires_grad_() for name, t in module.named_parameters()}
    for j in sent:
        values = []
        for step in (1e-4, -1e-4):
            moved = v.clone()
            moved[int(j), 1] += step
            values.append(float(loss.quiz(loss.after(w, moved, chosen, create=False), quiz).detach()))
        assert float(sent[j][1]) == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-4, abs=1e-9)


def test_the_server_averages_the_rows_that_it_gets_and_clips() -> None:
    """Row 0: (2 + 4) / 2 = 3, row 2: 4. At norm 5 nothing is clipped, at norm 500 it is 100."""
    method = asked(server_lr=0.5).bound()
    state = {"guide": {"vectors": torch.zeros(4, 1)}}
    for scale, share in ((1.0, 1.0), (100.0, 0.2)):
        updates = []
        for rows in ({"0": 2.0}, {"0": 4.0, "2": 4.0}):
            sums = {j: torch.tensor([scale * g]) for j, g in rows.items()}
            update = Update({}, 1.0, whole={"gradients": sums, "counts": {j: torch.ones(()) for j in sums}})
            updates.append((method.select(state, Client(0, 0.3, 0)), update))
        new = method.step(state, 0, folded(state, *updates))["guide"]["vectors"].flatten() / scale
        torch.testing.assert_close(new, torch.tensor([-1.5, 0.0, -2.0, 0.0]) * share)


def test_a_warm_up_round_trains_the_vectors_alone(tmp_path: Path) -> None:
    simulation = simulate(asked(warmup_rounds=1), tmp_path)
    before = simulation.state["guide"]["vectors"].clone()
    run(simulation, 1)
    assert not torch.equal(simulation.state["guide"]["vectors"], before)
    for id in simulation.client_states.owners:
        start = simulation.method.initial(simulation.clients.capacity(id, 0, 0))  # pyright: ignore
        assert_same(simulation.client_states.get(id)["own"], start)  # pyright: ignore


def test_traffic(tmp_path: Path) -> None:
    """Down C K numbers, up K + 1 per class with a gradient: K is 4 or 6."""
    for guided, size in (("logits", 4), ("features", 6)):
        simulation = simulate(asked(guided=guided), tmp_path / guided)
        [line] = run(simulation, 1)
        studied = [
            len(set(next(iter(study.batches(1, 5, torch_generator(c.seed, "batches", "study"))))[1].tolist()))
            for c in visited(simulation, 0)
            for study, _ in [parts(c, 1)]
        ]
        assert line["bytes_down"] == 4 * 4 * size * len(studied)
        assert line["bytes_up"] == 4 * (size + 1) * sum(studied)


def test_requirements() -> None:
    with pytest.raises(ConfigError, match=r"16 of capacity 0.3, 128 of capacity 0.2.*Hint: set model.features"):
        experiment(method={"name": "fedl2g", "guided": "features"})
    experiment(method={"name": "fedl2g"})
    with pytest.raises(ConfigError, match="method.warmup_rounds: 2 is not valid.*run's 2 rounds"):
        asked(warmup_rounds=2)
    with pytest.raises(ConfigError, match="quiz_batches"):
        asked(quiz_batches=0)
