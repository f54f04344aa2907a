"""FedDistill: three rounds against plain torch in float64, identities and traffic by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from independent import MIX, assert_close, batches, experiment, network, tensors, visited

from rayfl.config import ConfigError
from rayfl.core.fold import Update
from rayfl.core.tensors import Params
from rayfl.methods.base import Client
from rayfl.methods.distillation.feddistill import soft_entropy
from rayfl.testing.tiny import assert_same, folded, run, simulate


def asked(**options: Any) -> Any:
    return experiment(method={"name": "feddistill"} | options, rounds=3)


def test_the_cross_entropy_with_known_targets() -> None:
    """-(0.25 log 0.5 + 0.75 log 0.5) / 2: the second sample's class is unknown."""
    targets = torch.tensor([[0.25, 0.75], [5.0, 5.0]])
    value = soft_entropy(torch.zeros(2, 2), torch.tensor([0, 1]), targets, torch.tensor([True, False]))
    torch.testing.assert_close(value, torch.log(torch.tensor(2.0)) / 2)


@pytest.mark.parametrize(("weight", "expected"), [("samples", [0.4, 0.6]), ("uniform", [0.5, 0.5])])
def test_the_mean_is_over_clients_with_the_class(weight: str, expected: list[float]) -> None:
    """30 samples at (0.3, 0.7) and 15 at (0.6, 0.4), or (0.3, 0.7) and (0.7, 0.3). Class 1 keeps its output."""
    method = asked(weight=weight).bound()
    state = {"outputs": {"1": torch.tensor([0.1, 0.9])}}
    second = [0.6, 0.4] if weight == "samples" else [0.7, 0.3]
    updates = []
    for n, mean in ((30.0, [0.3, 0.7]), (15.0, second)):
        share = torch.tensor(n if weight == "samples" else 1.0)
        update = Update({}, 1.0, whole={"outputs": {"0": share * torch.tensor(mean)}, "counts": {"0": share}})
        updates.append((method.select(state, Client(0, 0.3, 0)), update))
    new = method.step(state, 1, folded(state, *updates))["outputs"]
    assert list(new) == ["0", "1"]
    torch.testing.assert_close(new["0"], torch.tensor(expected))
    assert new["1"] is state["outputs"]["1"]


@pytest.mark.parametrize(("weight", "outputs"), [("uniform", "probabilities"), ("samples", "logits")])
def test_rounds_are_plain_torch_s(float64: None, tmp_path: Path, weight: str, outputs: str) -> None:
    """Three, on clients with two of four classes."""
    simulation = simulate(asked(weight=weight, outputs=outputs, distill=0.7), tmp_path)
    method = simulation.method
    start = {net: method.initial(c) for c, net in method.task.nets.items()}  # pyright: ignore
    own: dict[int, Params] = {}
    known: dict[int, torch.Tensor] = {}
    for round in range(3):
        sent: list[dict[int, list[torch.Tensor]]] = []
        for client in visited(simulation, round):
            module = network(client.net, own.get(client.id) or start[client.net]).train()
            sent.append(rows := {})
            for x, y in batches(client.data, client.seed, 2, 5):
                module.zero_grad()
                logits = module(x)
                loss = F.cross_entropy(logits, y)
                for z, j in zip(logits, y.tolist(), strict=True):
                    rows.setdefault(j, []).append((z.softmax(0) if outputs == "probabilities" else z).detach())
                    if j in known:
                        loss = loss - 0.7 * (known[j] * z.log_softmax(0)).sum() / len(y)
                loss.backward()
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter -= 0.05 * parameter.grad  # pyright: ignore
            own[client.id] = tensors(module)
        for j in {j for rows in sent for j in rows}:
            held = [torch.stack(rows[j]) for rows in sent if j in rows]
            whole = torch.cat(held) if weight == "samples" else torch.stack([rows.mean(0) for rows in held])
            known[j] = whole.mean(0)
    run(simulation)
    assert_close(simulation.state["outputs"], {str(j): t for j, t in known.items()}, exact=True)
    for id, kept in own.items():
        assert_close(simulation.client_states.get(id)["own"], kept, exact=True)  # pyright: ignore


def test_without_distillation_it_is_local_training(tmp_path: Path) -> None:
    """FedProto's clients without attraction, bit for bit."""
    one, other = (
        simulate(experiment(method=method, model=MIX | {"features": 6}), tmp_path / method["name"])
        for method in ({"name": "feddistill", "distill": 0}, {"name": "fedproto", "attraction": 0})
    )
    run(one)
    run(other)
    for id in one.client_states.owners:
        assert_same(one.client_states.get(id)["own"], other.client_states.get(id)["own"])  # pyright: ignore


def test_traffic(tmp_path: Path) -> None:
    """Up C + 1 numbers per class of the client, down C per known class: C = 4."""
    simulation = simulate(asked(), tmp_path)
    known, seen = 0, set()
    for round in range(2):
        clients = visited(simulation, round)
        trained = [{j for _, y in batches(c.data, c.seed, 2, 5) for j in y.tolist()} for c in clients]
        [line] = run(simulation, 1)
        assert line["bytes_up"] == sum(4 * 5 * len(classes) for classes in trained)
        assert line["bytes_down"] == 4 * 4 * 4 * known
        known, seen = len(simulation.state["outputs"]), seen.union(*trained)
        assert known == len(seen)


def test_requirements() -> None:
    with pytest.raises(ConfigError, match=r"clients.assignment: .*'dynamic'"):
        experiment(method={"name": "feddistill"}, clients={"capacities": [0.3, 0.2], "assignment": "dynamic"})
    for bad in ({"distill": -1}, {"outputs": "features"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            asked(**bad)
