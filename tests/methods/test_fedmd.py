"""FedMD: the consensus by hand, two rounds against plain torch, traffic and costs."""

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
from rayfl.core.fold import Update
from rayfl.core.seeds import stream, torch_generator
from rayfl.core.tensors import Params
from rayfl.methods.base import Client
from rayfl.testing.tiny import assert_same, folded, run, simulate
from rayfl.training.distillation import Distillation
from rayfl.training.settings import Training

LABELED = DATA | {"public": PUBLIC | {"labeled": True}}
DIGEST = {"optimizer": "sgd", "epochs": 2, "batch_size": 8, "lr": 0.05}


def fedmd(**options: Any) -> dict[str, Any]:
    return {"name": "fedmd", "subset": 20, "warmup_epochs": 1, "private_warmup_epochs": 2, "digest": DIGEST} | options


def asked(**sections: Any) -> Any:
    return experiment(**{"method": fedmd(), "data": LABELED} | sections)


# by hand


@pytest.mark.parametrize(("weight", "expected"), [("uniform", [3.0, 1.0]), ("samples", [2.0, 2.0])])
def test_the_consensus_of_two_clients(weight: str, expected: list[float]) -> None:
    """Scores (1, 3) of 30 samples and (5, -1) of 10."""
    method = asked(method=fedmd(weight=weight)).bound()
    answers = []
    for scores, samples in (([1.0, 3.0], 30), ([5.0, -1.0], 10)):
        w = samples if weight == "samples" else 1.0
        update = Update({}, w, whole={"scores": {"sum": w * torch.tensor([scores])}})
        answers.append((method.select({}, Client(0, 0.3, 0)), update))
    state = method.step({}, 4, folded({}, *answers))
    assert_same(state, {"consensus": {"scores": torch.tensor([expected]), "round": torch.tensor(4)}})


def test_digesting_reduces_the_distance_to_the_consensus(tmp_path: Path) -> None:
    """As the authors do it: one epoch of Adam, on the mean absolute error."""
    simulation = simulate(asked(method=fedmd(digest={"optimizer": "adam", "epochs": 1, "lr": 1e-3})), tmp_path)
    method, public = simulation.method, public_of(simulation)
    [client, *_] = visited(simulation, 0)
    targets = torch.randn(len(public), 4, generator=torch.Generator().manual_seed(0))
    for net in method.task.nets.values():
        start = method.initial(next(c for c, n in method.task.nets.items() if n == net))  # pyright: ignore
        work = type("Work", (), {"net": net, "seed": client.seed})()
        came, flops = method.digested(start, public.labeled(targets), work)  # pyright: ignore
        before, after = ((logits(network(net, p), public) - targets).abs().mean() for p in (start, came))
        assert after < before
        assert flops == 6 * net.macs * len(public)


def test_the_code_s_settings() -> None:
    method = asked(method="fedmd").method
    assert method.subset == 5000
    assert method.digest == Distillation(epochs=1, batch_size=256, optimizer="adam", lr=1e-3)


# two rounds


def test_two_rounds_are_plain_torch_s(tmp_path: Path) -> None:
    """The second round has clients of the first, and one at least whose first it is."""
    simulation = simulate(asked(), tmp_path)
    method, public, seed = simulation.method, public_of(simulation), simulation.seed
    start = {net: method.initial(c) for c, net in method.task.nets.items()}  # pyright: ignore
    rows = [torch.randperm(len(public), generator=torch_generator(seed, "open", r))[:20] for r in range(2)]
    own: dict[int, Params] = {}
    consensus, firsts = None, []
    for round in range(2):
        total = torch.zeros(20, 4)
        for client in visited(simulation, round):
            firsts.append((round, client.id not in own))
            module = network(client.net, own.get(client.id, start[client.net]))
            if client.id not in own:
                steps = -(-len(public) // 5)
                order = batches(public, stream(client.seed, "local", "public"), steps, 5)
                descend(module, order, F.cross_entropy, 0.05)
                steps = 2 * -(-len(client.data) // 5)
                order = batches(client.data, stream(client.seed, "local", "private"), steps, 5)
                descend(module, order, F.cross_entropy, 0.05)
            if consensus is not None:
                order = epochs(public.picked(rows[0]).labeled(consensus), stream(client.seed, "open"), 2, 8)
                descend(module, order, lambda z, g: (z - g).abs().mean(), 0.05)
                descend(module, batches(client.data, client.seed, 2, 5), F.cross_entropy, 0.05)
            own[client.id] = tensors(module)
            total += logits(module, public.picked(rows[round]))
        consensus = total / 4
    assert {(1, True), (1, False)} <= set(firsts)
    run(simulation)
    torch.testing.assert_close(simulation.state["consensus"]["scores"], consensus, rtol=1e-4, atol=1e-4)
    assert simulation.client_states.owners == own.keys()
    for id, kept in own.items():
        assert_close(simulation.client_states.get(id)["own"], kept)  # pyright: ignore


def test_traffic_and_costs(tmp_path: Path) -> None:
    """Up |d| C numbers; down as many, and the rows of two subsets. The transfer is counted, steps are of own data."""
    simulation = simulate(asked(), tmp_path)
    lines, public, seen = run(simulation), len(public_of(simulation)), set()
    assert [line["bytes_up"] for line in lines] == [4 * 20 * 4 * 4] * 2
    assert [line["bytes_down"] for line in lines] == [4 * 20 * 4, 4 * (20 * 4 * 4 + 2 * 20 * 4)]
    new = {c.id for c in visited(simulation, 1)} - {c.id for c in visited(simulation, 0)}
    # images of 8x8 bytes with labels, for every client once
    assert 0 < len(new) < 4
    assert [line["bytes_public"] for line in lines] == [n * public * (64 + 4) for n in (4, len(new))]
    for round, line in enumerate(lines):
        flops = 0.0
        for client in visited(simulation, round):
            own, new = len(client.data), client.id not in seen
            seen.add(client.id)
            trained = (public + 2 * own) * new + round * (2 * 20 + Training(batch_size=5, steps=2).samples_of(own))
            flops += client.net.macs * (6 * trained + 2 * 20)
        assert line["train_flops"] == flops
        assert "server_flops" not in line
    assert lines[1]["steps"] == 4 * 2


def test_without_exchange_clients_transfer_and_revisit(tmp_path: Path) -> None:
    """As with an exchange whose digest makes no step, but nothing is sent."""
    digest = {"steps": 0}
    alone, idle = (
        simulate(asked(method=fedmd(**options)), tmp_path / name)
        for name, options in (("alone", {"exchange": False}), ("idle", {"digest": digest}))
    )
    lines, others = run(alone), run(idle)
    assert [(line["bytes_up"], line["bytes_down"]) for line in lines] == [(0, 0)] * 2
    assert [line["bytes_public"] for line in lines] == [line["bytes_public"] for line in others]
    assert alone.state == {} and idle.state
    assert alone.client_states.owners == idle.client_states.owners
    for id in alone.client_states.owners:
        mine, theirs = ((simulation.client_states.get(id) or {})["own"] for simulation in (alone, idle))
        assert_same(dict(sorted(mine.items())), dict(sorted(theirs.items())))


def test_a_client_s_own_split_judges(tmp_path: Path) -> None:
    simulation = simulate(asked(), tmp_path)
    line = run(simulation)[-1]
    assert simulation.experiment.facts()["judge"] == "local_accuracy_mean"
    assert "local_accuracy_mean" in line and "accuracy_mean" not in line


def test_a_round_without_answers_leaves_the_consensus(tmp_path: Path) -> None:
    simulation = simulate(asked(rounds=1), tmp_path)
    run(simulation)
    assert simulation.method.step(simulation.state, 1, folded(simulation.state)) is simulation.state


# bad input


def test_requirements() -> None:
    with pytest.raises(ConfigError, match="data.public: method .* needs public data"):
        asked(data=DATA | {"public": None})
    unlabeled = DATA | {"public": PUBLIC}
    with pytest.raises(
        ConfigError, match="data.public.labeled: method fedmd needs the labels of public data. Allowed: true"
    ):
        asked(data=unlabeled)
    asked(data=unlabeled, method=fedmd(warmup_epochs=0))
    with pytest.raises(ConfigError, match="clients.assignment: .*'dynamic'"):
        asked(clients={"capacities": [0.3, 0.2], "assignment": "dynamic"})
    for bad in ({"subset": 0}, {"private_warmup_epochs": 0}, {"warmup_epochs": -1}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            asked(method=fedmd(**bad))
