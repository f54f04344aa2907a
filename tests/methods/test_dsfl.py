"""DS-FL: targets by hand, two rounds against plain torch, traffic, and skipped targets."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from independent import (
    DATA,
    PUBLIC,
    assert_close,
    batches,
    descend,
    epochs,
    experiment,
    logits,
    network,
    public_of,
    tensors,
    visited,
)

from rayfl.config import ConfigError
from rayfl.core.seeds import stream, torch_generator
from rayfl.core.tensors import Params
from rayfl.methods.distillation.dsfl import DSFL
from rayfl.testing.tiny import assert_same, folded, run, simulate
from rayfl.training import distillation
from rayfl.training.settings import Training

SHARED = DATA | {"public": PUBLIC}
TEACHES = {"epochs": 3, "batch_size": 8, "lr": 0.1}


def dsfl(**options: Any) -> dict[str, Any]:
    return {"name": "dsfl", "open": 20, "distill_epochs": 2, "distillation": TEACHES} | options


def asked(**sections: Any) -> Any:
    return experiment(**{"method": dsfl(), "data": SHARED} | sections)


# targets


def test_the_targets_of_two_clients() -> None:
    """(.6, .3, .1) and (.2, .5, .3): mean (.4, .4, .2), and e^4, e^4, e^2 over their sum."""
    mean = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3]], dtype=torch.float64).mean(0, keepdim=True)
    era, sa = DSFL(), DSFL(aggregation="mean")
    expected = torch.tensor([[0.468311, 0.468311, 0.063379]], dtype=torch.float64)
    torch.testing.assert_close(era.targets(mean), expected, rtol=0, atol=5e-7)
    torch.testing.assert_close(sa.targets(mean), torch.tensor([[0.4, 0.4, 0.2]], dtype=torch.float64))
    flat = DSFL(temperature=1e9).targets(mean)
    torch.testing.assert_close(flat, torch.full((1, 3), 1 / 3, dtype=torch.float64))


def test_the_student_s_gradient() -> None:
    """d CE(t, softmax z) / dz = (softmax z - t) / B, for targets that sum to 1."""
    method = DSFL()
    z = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    t = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(1)
    method.loss_of_student(z, t).backward()
    torch.testing.assert_close(z.grad, (z.detach().softmax(1) - t) / 5)
    assert torch.autograd.gradcheck(lambda z: method.loss_of_student(z, t), z)


# two rounds


@pytest.mark.parametrize("aggregation", ["era", "mean"])
def test_two_rounds_are_plain_torch_s(tmp_path: Path, aggregation: str) -> None:
    simulation = simulate(asked(method=dsfl(aggregation=aggregation)), tmp_path)
    method, public, seed = simulation.method, public_of(simulation), simulation.seed
    start = {net: method.initial(c) for c, net in method.task.nets.items()}  # pyright: ignore
    own: dict[int, Params] = {}
    server, targets = network(method.task.server, start[method.task.server]), None
    for round in range(2):
        rows, before = (
            torch.randperm(len(public), generator=torch_generator(seed, "open", r))[:20]
            for r in (round, max(round - 1, 0))
        )
        total = torch.zeros(20, 4)
        for client in visited(simulation, round):
            module = network(client.net, own.get(client.id, start[client.net]))
            if targets is not None:
                taught = public.picked(before).labeled(targets)
                order = batches(taught, stream(client.seed, "open"), 2 * 4, 5)
                descend(module, order, lambda z, t: -(t * F.log_softmax(z, 1)).sum(1).mean(), 0.05)
            descend(module, batches(client.data, client.seed, 2, 5), F.cross_entropy, 0.05)
            own[client.id] = tensors(module)
            total += logits(module, public.picked(rows)).softmax(1)
        mean = total / 4
        targets = mean if aggregation == "mean" else (10 * mean).exp() / (10 * mean).exp().sum(1, keepdim=True)
        order = epochs(public.picked(rows).labeled(targets), stream(seed, "refine", round), 3, 8)
        descend(server, order, lambda z, t: -(t * F.log_softmax(z, 1)).sum(1).mean(), 0.1)
    run(simulation)
    torch.testing.assert_close(simulation.state["open"]["targets"], targets, rtol=1e-4, atol=1e-5)
    assert_close(simulation.state["net 0.3"], tensors(server))
    assert simulation.client_states.owners == own.keys()
    for id, kept in own.items():
        assert_close(simulation.client_states.get(id)["own"], kept)  # pyright: ignore


def test_traffic_and_costs(tmp_path: Path) -> None:
    """Up |o| C numbers; down as many, and the rows of two open sets; every pass over public samples is counted."""
    simulation = simulate(asked(), tmp_path)
    first, second = run(simulation)
    assert [line["bytes_up"] for line in (first, second)] == [4 * 20 * 4 * 4] * 2
    assert [line["bytes_down"] for line in (first, second)] == [4 * 20 * 4, 4 * (20 * 4 * 4 + 2 * 20 * 4)]
    # 36 images of 8x8 bytes, for every client once
    new = {c.id for c in visited(simulation, 1)} - {c.id for c in visited(simulation, 0)}
    assert 0 < len(new) < 4
    assert [line["bytes_public"] for line in (first, second)] == [4 * 36 * 64, len(new) * 36 * 64]
    for line, round in ((first, 0), (second, 1)):
        clients = visited(simulation, round)
        trained = [2 * 20 * round + Training(batch_size=5, steps=2).samples_of(len(c.data)) for c in clients]
        assert line["train_flops"] == sum(
            6 * c.net.macs * n + 2 * c.net.macs * 20 for c, n in zip(clients, trained, strict=True)
        )
        assert line["server_steps"] == 3 * 3
        assert line["server_flops"] == 6 * simulation.method.task.server.macs * 20 * 3
        assert line["steps"] == 2 * 4


def test_the_server_s_network_is_judged_on_the_test_set_and_clients_on_their_own(tmp_path: Path) -> None:
    simulation = simulate(asked(), tmp_path)
    line = run(simulation)[-1]
    assert simulation.experiment.facts()["judge"] == "accuracy_mean"
    assert line["accuracy_mean"] == line["accuracy_server"] == line["accuracy_0.3"]
    assert "accuracy_0.2" not in line
    assert {"local_accuracy_0.3", "local_accuracy_0.2"} <= line.keys()


def test_a_client_that_was_never_selected(tmp_path: Path) -> None:
    """Of the server's capacity: the server's network. Of a smaller one: its initial network."""
    simulation = simulate(asked(rounds=1), tmp_path)
    run(simulation)
    method, state = simulation.method, simulation.state
    absent = next(id for id in range(6) if id not in simulation.client_states.owners)
    others = [simulation.deployment(capacity, absent) for capacity in (0.3, 0.2)]
    server, start = [deployed.params | (deployed.statistics or {}) for deployed in others]
    assert_same(dict(sorted(server.items())), dict(sorted(state["net 0.3"].items())))
    assert_same(dict(sorted(start.items())), dict(sorted(method.initial(0.2).items())))  # pyright: ignore
    assert [deployed.is_start for deployed in others] == [False, True]


def test_open_samples_are_not_augmented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their targets are of the samples as they stand. A client's own are."""
    seen, trained = [], DSFL.trained
    monkeypatch.setattr(DSFL, "trained", lambda *given, **how: seen.append(given[2]) or trained(*given, **how))
    run(simulate(asked(), tmp_path))
    assert [work.data.is_augmented for work in seen] == [True] * 4 + [False, True] * 4


def test_a_round_without_answers_leaves_the_targets(tmp_path: Path) -> None:
    simulation = simulate(asked(), tmp_path)
    run(simulation)
    state = simulation.state
    assert simulation.method.step(state, 2, folded(state)) is state


def test_all_public_samples_are_open_where_there_are_few(tmp_path: Path) -> None:
    simulation = simulate(asked(method=dsfl(open=10**6), rounds=1), tmp_path)
    run(simulation)
    assert len(simulation.state["open"]["targets"]) == len(public_of(simulation))


# the same bits


@pytest.mark.slow
def test_a_run_goes_on_from_the_middle_of_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "TASK_STEPS", 4)
    straight = simulate(asked(), tmp_path / "straight")
    lines = run(straight)
    first, saved = simulate(asked(), tmp_path / "first"), 0
    while not first.done:
        first.advance()
        if first.partial_round and first.round == 1:
            saved += 1
            first.save(tmp_path / f"checkpoint {saved}")
    assert saved == 3
    for i in range(1, saved + 1):
        again = simulate(asked(), tmp_path / f"again {i}")
        assert again.restore(tmp_path / f"checkpoint {i}") == (1, [])
        assert run(again) == lines[1:]
        assert_same(again.state, straight.state)


# bad input


def test_requirements() -> None:
    with pytest.raises(ConfigError, match="data.public: method .* needs public data"):
        experiment(dsfl())
    with pytest.raises(ConfigError, match="clients.assignment: .*'dynamic'"):
        asked(clients={"capacities": [0.3, 0.2], "assignment": "dynamic"})
    for bad in ({"open": 0}, {"temperature": 0}, {"aggregation": "median"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            asked(method=dsfl(**bad))
