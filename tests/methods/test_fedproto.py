"""FedProto: prototypes by hand, two rounds against plain torch, and prediction by the nearest prototype."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from independent import DATA, MIX, assert_close, batches, descend, experiment, network, tensors, visited
from torch import nn

from rayfl.config import ConfigError
from rayfl.core.fold import Update
from rayfl.core.tensors import Params
from rayfl.methods.base import Client
from rayfl.methods.distillation.fedproto import distance
from rayfl.models.features import classifier_path
from rayfl.testing.methods import rows_of
from rayfl.testing.tiny import assert_same, folded, run, simulate
from rayfl.training.settings import Training

SIZE = 6
PROJECTED = MIX | {"features": SIZE}


def fedproto(**options: Any) -> dict[str, Any]:
    return {"name": "fedproto"} | options


def asked(**sections: Any) -> Any:
    return experiment(**{"method": fedproto(), "model": PROJECTED} | sections)


# prototypes by hand


def answered(weight: str, *clients: dict[str, tuple[int, list[float]]]) -> Any:
    """The method, and the state after a round in which clients sent so many samples' mean features of classes."""
    method = asked(method=fedproto(weight=weight)).bound()
    state = {"prototypes": {"0": torch.tensor([7.0, 7.0]), "3": torch.tensor([9.0, 8.0])}}
    answers = []
    for means in clients:
        shares = {j: torch.tensor(n if weight == "samples" else 1.0) for j, (n, _) in means.items()}
        sums = {j: shares[j] * torch.tensor(mean) for j, (_, mean) in means.items()}
        total = float(sum(n for n, _ in means.values())) if weight == "samples" else 1.0
        update = Update({}, total, whole={"features": sums, "counts": shares})
        answers.append((method.select(state, Client(0, 0.3, 0)), update))
    return method, method.step(state, 1, folded(state, *answers))


@pytest.mark.parametrize(("weight", "expected"), [("samples", [2.0, 5.0]), ("uniform", [3.0, 6.0])])
def test_a_prototype_is_a_mean_over_clients_with_the_class(weight: str, expected: list[float]) -> None:
    """30 samples at (1, 4) and 10 at (5, 8): not divided by the number of clients again. Who does not have the class
    does not count, and a class that nobody has keeps its prototype."""
    first = {"0": (30.0, [1.0, 4.0]), "1": (5.0, [2.0, 2.0])}
    _, state = answered(weight, first, {"0": (10.0, [5.0, 8.0])}, {"2": (1.0, [0.5, 0.5])})  # pyright: ignore
    new = {"0": expected, "1": [2.0, 2.0], "2": [0.5, 0.5], "3": [9.0, 8.0]}
    assert_same(state, {"prototypes": {j: torch.tensor(t) for j, t in new.items()}})


def test_a_round_without_answers_leaves_the_prototypes() -> None:
    method = asked().bound()
    state = {"prototypes": {"0": torch.ones(SIZE)}}
    assert method.step(state, 1, folded(state)) is state


def test_the_distance_to_known_prototypes() -> None:
    """((1 - 0)^2 + (2 - 4)^2 + 0 + 0) / 4: the second sample's class has no prototype."""
    features = torch.tensor([[1.0, 2.0], [5.0, 5.0]], dtype=torch.float64, requires_grad=True)
    prototypes = torch.tensor([[0.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    value = distance(features, torch.tensor([0, 1]), prototypes, torch.tensor([True, False]))
    assert value.item() == 1.25
    value.backward()
    assert features.grad.tolist() == [[0.5, -1.0], [0.0, 0.0]]  # pyright: ignore


def test_the_distance_s_gradient() -> None:
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(5, 3, dtype=torch.float64, generator=draw, requires_grad=True)
    prototypes, y = torch.randn(4, 3, dtype=torch.float64, generator=draw), torch.tensor([0, 1, 2, 3, 1])
    known = torch.tensor([True, True, False, True])
    assert torch.autograd.gradcheck(lambda h: distance(h, y, prototypes, known), features)


# two rounds


def with_features(module: nn.Module, path: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input and output of the classifier at a path."""
    found = []
    handle = module.get_submodule(path).register_forward_pre_hook(lambda _, given: found.append(given[0]))
    logits = module(x)
    handle.remove()
    return found[0], logits


@pytest.mark.parametrize("weight", ["samples", "uniform"])
def test_rounds_are_plain_torch_s(tmp_path: Path, weight: str) -> None:
    """Three, on clients with two of four classes."""
    simulation = simulate(asked(method=fedproto(weight=weight, attraction=0.7), rounds=3), tmp_path)
    method = simulation.method
    start = {net: method.initial(c) for c, net in method.task.nets.items()}  # pyright: ignore
    own: dict[int, Params] = {}
    prototypes: dict[int, torch.Tensor] = {}
    for round in range(3):
        sums: dict[int, Any] = {}
        divisors: dict[int, float] = {}
        for client in visited(simulation, round):
            path = classifier_path(client.net)
            module = network(client.net, own.get(client.id, start[client.net])).train()
            for x, y in batches(client.data, client.seed, 2, 5):
                module.zero_grad()
                features, logits = with_features(module, path, x)
                pairs = [(h, prototypes[j]) for h, j in zip(features, y.tolist(), strict=True) if j in prototypes]
                apart = sum(((h - c) ** 2).sum() for h, c in pairs) / features.numel()
                (F.cross_entropy(logits, y) + 0.7 * apart).backward()
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter -= 0.05 * parameter.grad  # pyright: ignore
            own[client.id] = tensors(module)
            [(x, y)] = client.data.plain(1000)
            with torch.no_grad():
                features, _ = with_features(module.eval(), path, x)
            for j in y.unique().tolist():
                of_class = features[y == j]
                n = len(of_class) if weight == "samples" else 1
                sums[j] = sums.get(j, 0) + n * of_class.mean(0)
                divisors[j] = divisors.get(j, 0) + n
        prototypes |= {j: total / divisors[j] for j, total in sums.items()}
    run(simulation)
    assert_close(simulation.state["prototypes"], {str(j): t for j, t in prototypes.items()})
    for id, kept in own.items():
        assert_close(simulation.client_states.get(id)["own"], kept)  # pyright: ignore


def test_without_attraction_it_is_local_training(tmp_path: Path) -> None:
    simulation = simulate(asked(method=fedproto(attraction=0)), tmp_path)
    run(simulation)
    method, own = simulation.method, {}
    start = {net: method.initial(c) for c, net in method.task.nets.items()}  # pyright: ignore
    for round in range(2):
        for client in visited(simulation, round):
            module = network(client.net, own.get(client.id, start[client.net]))
            descend(module, batches(client.data, client.seed, 2, 5), F.cross_entropy, 0.05)
            own[client.id] = tensors(module)
    for id, kept in own.items():
        assert_close(simulation.client_states.get(id)["own"], kept)  # pyright: ignore


def test_traffic_and_costs(tmp_path: Path) -> None:
    """Up D + 1 numbers a class of the client's, down D a known class."""
    simulation = simulate(asked(), tmp_path)
    known, seen = 0, set()
    for round in range(2):
        clients = visited(simulation, round)
        [line] = run(simulation, 1)
        classes = [set(client.data.samples["y"].tolist()) for client in clients]
        assert line["bytes_up"] == sum(4 * (SIZE + 1) * len(some) for some in classes)
        assert line["bytes_down"] == 4 * 4 * SIZE * known
        known, seen = len(simulation.state["prototypes"]), seen.union(*classes)
        assert known == len(seen)
        samples = [
            (6 * Training(batch_size=5, steps=2).samples_of(n) + 2 * n) for n in map(len, (c.data for c in clients))
        ]
        assert line["train_flops"] == sum(n * c.net.macs for n, c in zip(samples, clients, strict=True))


# what a device runs


def test_the_nearest_prototype_is_a_head(tmp_path: Path) -> None:
    """argmax of what is deployed is argmin of the distances, over the classes that have a prototype."""
    simulation = simulate(asked(method=fedproto(predict="prototypes")), tmp_path)
    run(simulation)
    state = {"prototypes": {j: t for j, t in simulation.state["prototypes"].items() if j != "1"}}
    assert len(state["prototypes"]) >= 2
    classes = sorted(map(int, state["prototypes"]))
    centres = torch.stack([state["prototypes"][str(j)] for j in classes])
    for id in sorted(simulation.client_states.owners):
        client_state, data = simulation.client_states.get(id), rows_of(simulation, id)
        capacity = simulation.clients.capacity(id, 0, 0)
        deployed = simulation.method.deploy(state, 2, capacity, client_state)
        net, [(x, _)] = deployed.net, data.plain(1000)
        with torch.no_grad():
            module = network(net, deployed.params | (deployed.statistics or {})).eval()
            features, logits = with_features(module, classifier_path(net), x)
            own, _ = with_features(network(net, client_state["own"]).eval(), classifier_path(net), x)  # pyright: ignore
        assert torch.equal(features, own)
        apart = torch.cdist(features, centres).square()
        assert logits.argmax(1).tolist() == [classes[i] for i in apart.argmin(1)]
        expected = features.square().sum(1, keepdim=True) - logits[:, classes]
        torch.testing.assert_close(expected, apart, rtol=1e-4, atol=1e-4)
        assert logits.isfinite().all() and bool((logits[:, 1] < -1e29).all())


def test_a_client_s_own_split_judges(tmp_path: Path) -> None:
    """By its classifier, or by prototypes; training is the same."""
    lines = []
    for predict in ("classifier", "prototypes"):
        simulation = simulate(asked(method=fedproto(predict=predict)), tmp_path / predict)
        lines.append(run(simulation)[-1])
        assert simulation.experiment.facts()["judge"] == "local_accuracy_mean"
        assert "local_accuracy_mean" in lines[-1] and "accuracy_mean" not in lines[-1]
    assert lines[0]["train_loss"] == lines[1]["train_loss"]
    assert lines[0]["local_loss_mean"] != lines[1]["local_loss_mean"]


# bad input


def test_features_have_one_size() -> None:
    with pytest.raises(
        ConfigError, match=r"16 of capacity 0.3, 128 of capacity 0.2.*Hint: set model.features of model mix"
    ):
        asked(model=MIX)


def test_other_requirements() -> None:
    with pytest.raises(ConfigError, match="clients.assignment: .*'dynamic'"):
        asked(clients={"capacities": [0.3, 0.2], "assignment": "dynamic"})
    plain = {"name": "mix", "networks": dict.fromkeys(("0.3", "0.2"), "lenet5_caffe")}
    sections = {"model": plain, "data": DATA | {"shape": [1, 16, 16]}}
    asked(**sections)
    with pytest.raises(
        ConfigError, match="method.predict: prototypes need a classifier with bias, .*capacity 0.3 has none"
    ):
        asked(method=fedproto(predict="prototypes"), **sections)
    for bad in ({"attraction": -1}, {"predict": "head"}, {"weight": "size"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            asked(method=fedproto(**bad))
