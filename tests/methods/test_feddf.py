"""FedDF: two rounds against plain torch, loss and targets by hand."""

import math
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
from torch import nn

from rayfl.config import ConfigError
from rayfl.core.fold import Update
from rayfl.core.seeds import stream
from rayfl.core.submodel import prefix
from rayfl.core.tensors import Params
from rayfl.engine.simulation import Simulation
from rayfl.methods import Visit
from rayfl.methods.distillation.feddf import FedDF
from rayfl.testing.tiny import assert_same, folded, run, simulate
from rayfl.training import distillation

TEACHES = {"patience": 0, "steps": 9, "batch_size": 8, "optimizer": "adam", "lr": 2e-4, "cosine": True, "clip": 0.1}
"""Training on 36 public samples: two epochs of five batches, the last of four samples, without the last step."""


ZOO = {"name": "mix", "networks": {"0.3": {"name": "resnet8", "channels": 4}, "0.2": "mcmahan_cnn"}}
"""Without biases before a batch norm: their gradient is 0 but for rounding, which Adam would enlarge."""


def feddf(**options: Any) -> dict[str, Any]:
    return {"name": "feddf", "distillation": TEACHES} | options


def asked(**sections: Any) -> Any:
    return experiment(**{"method": feddf(), "model": ZOO, "data": DATA | {"public": PUBLIC}} | sections)


# two rounds


def correct(module: nn.Module, simulation: Simulation) -> int:
    """Return the number of correctly classified validation samples."""
    [(x, y)] = simulation.executor.worker.validation.plain(1000)  # pyright: ignore
    with torch.no_grad():
        return int((module.eval()(x).argmax(1) == y).sum())


def taught(simulation: Simulation, module: nn.Module, targets: torch.Tensor, round: int, patience: int) -> Params:
    """Return the student of these logits after all steps, or the best of every second step."""
    optimizer = torch.optim.Adam(module.parameters(), 2e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    kept, best, at = tensors(module), -1, 0
    order = epochs(public_of(simulation).labeled(targets), stream(simulation.seed, "refine", round), 2, 8)
    for step, (x, z) in zip(range(1, 10), order, strict=False):
        optimizer.zero_grad()
        p, q = (z / 2).softmax(1), (module.train()(x) / 2).softmax(1)
        ((p * (p / q).log()).sum() / len(x)).backward()
        length = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in module.parameters()))  # pyright: ignore
        for parameter in module.parameters():
            parameter.grad *= min(1.0, 0.1 / length)  # pyright: ignore
        optimizer.step()
        schedule.step()
        if not patience:
            kept = tensors(module)
        elif step % 2 == 0 or step == 9:
            if (score := correct(module, simulation)) > best:
                kept, best, at = tensors(module), score, step
            if step - at >= patience:
                break
    return kept


@pytest.mark.parametrize(
    ("options", "patience"),
    [({}, 0), ({"targets": "probabilities"}, 0), ({"start": "previous", "weight": "uniform"}, 0), ({}, 2)],
)
def test_two_rounds_are_plain_torch_s(tmp_path: Path, options: dict[str, Any], patience: int) -> None:
    """Two architectures, Adam with a cosine rate, clipped gradients."""
    how = TEACHES | {"patience": patience, "validate_every": 2}
    method = feddf(temperature=2.0, distillation=how, **options)
    simulation = simulate(asked(method=method, evaluation={"holdout": 0.2}), tmp_path)
    nets = simulation.method.task.nets
    now = {net: simulation.method.initial(c) for c, net in nets.items()}  # pyright: ignore
    for round in range(2):
        answers = []
        for client in visited(simulation, round):
            module = network(client.net, now[client.net])
            descend(module, batches(client.data, client.seed, 2, 5), F.cross_entropy, 0.05)
            answers.append((client.net, 1 if "weight" in options else len(client.data), module))
        said = [logits(module, public_of(simulation)) for _, _, module in answers]
        if "targets" in options:
            targets = 2 * torch.stack([(z / 2).softmax(1) for z in said]).mean(0).log()
        else:
            targets = torch.stack(said).mean(0)
        assert {net for net, _, _ in answers} == set(now)
        for net, before in now.items():
            mine = [(n, tensors(module)) for other, n, module in answers if other == net]
            total = sum(n for n, _ in mine)
            mean = {name: torch.stack([n / total * t[name] for n, t in mine]).sum(0) for name in before}
            student = network(net, before if "start" in options else mean)
            now[net] = taught(simulation, student, targets, round, patience)
    run(simulation)
    for capacity, net in nets.items():
        assert_close(simulation.state[f"net {capacity}"], now[net])


def test_traffic_and_costs(tmp_path: Path) -> None:
    """Networks down and up, statistics too; the ensemble's passes and the students' steps are the server's work."""
    simulation = simulate(asked(rounds=1), tmp_path)
    clients, public = visited(simulation, 0), len(public_of(simulation))
    sizes = [sum(t.numel() for t in simulation.state[simulation.method.group(c)].values()) for c in (0.3, 0.2)]  # pyright: ignore
    nets = [simulation.method.task.nets[c] for c in (0.3, 0.2)]
    [line] = run(simulation)
    assert line["bytes_down"] == line["bytes_up"] == sum(4 * sizes[nets.index(c.net)] for c in clients)
    assert line["server_steps"] == 2 * 9
    assert public == 36
    asked_of = sum(2 * c.net.macs * 36 for c in clients)
    assert line["server_flops"] == asked_of + sum(6 * net.macs * (36 + 4 * 8) for net in nets)


def test_a_round_without_answers_trains_no_student(tmp_path: Path) -> None:
    simulation = simulate(asked(), tmp_path)
    state = simulation.state
    after = simulation.method.step(state, 0, folded(state))
    assert_same(after, state)
    assert not simulation.method.plan(after, 0)


def test_an_architecture_without_clients_keeps_its_network(tmp_path: Path) -> None:
    simulation = simulate(asked(rounds=1, clients={"capacities": [0.3, 0.2], "weights": [0, 1]}), tmp_path)
    before = simulation.state["net 0.3"]
    run(simulation)
    assert_same(simulation.state["net 0.3"], before)


# the start


def wrong(method: FedDF, trained: Params, visit: Visit) -> tuple[torch.Tensor, float]:
    """Logits of a network that is sure of the next class, on labelled public samples."""
    assert visit.public is not None
    return 8 * F.one_hot((visit.public.samples["y"] + 1) % 4, 4).float(), 0.0


@pytest.mark.parametrize("keep_start", [True, False])
def test_an_ensemble_that_is_wrong_on_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_start: bool
) -> None:
    """With `keep_start` the averages stay, to the bit, at their scores on validation data; otherwise students are
    worse."""
    monkeypatch.setattr(FedDF, "known", wrong)
    how = {"steps": 12, "batch_size": 8, "lr": 1e-2, "patience": 12, "validate_every": 4, "keep_start": keep_start}
    training = {"epochs": 8, "steps": None, "batch_size": 5, "lr": 0.1}
    data = DATA | {"samples": 240, "public": PUBLIC | {"labeled": True}}
    given = {"model": "digits_cnn", "data": data, "training": training, "evaluation": {"holdout": 0.3}, "rounds": 1}
    given |= {"partition": "iid", "clients": {"capacities": [0.3]}}
    simulation = simulate(asked(method=feddf(distillation=how), **given), tmp_path)
    average = None
    while not simulation.done:
        simulation.advance()
        if average is None:
            average = simulation.state["net 0.3"]
            before = correct(network(simulation.method.task.server, average), simulation)
    assert average is not None
    after = correct(network(simulation.method.task.server, simulation.state["net 0.3"]), simulation)
    if keep_start:
        assert_same(simulation.state["net 0.3"], dict(sorted(average.items())))
    else:
        assert after < before  # pyright: ignore


def test_without_steps_networks_of_one_architecture_are_averaged(tmp_path: Path) -> None:
    """By samples, statistics of norms too; the ensemble is not asked."""
    simulation = simulate(asked(method=feddf(distillation={"steps": 0}), rounds=1), tmp_path)
    groups, found = {net: f"net {c}" for c, net in simulation.method.task.nets.items()}, []
    for client in visited(simulation, 0):
        module = network(client.net, simulation.state[groups[client.net]])
        descend(module, batches(client.data, client.seed, 2, 5), F.cross_entropy, 0.05)
        found.append((client.net, len(client.data), tensors(module)))
    [line] = run(simulation)
    for net, group in groups.items():
        mine = [(n, t) for other, n, t in found if other == net]
        total = sum(n for n, _ in mine)
        mean = {name: torch.stack([n / total * t[name] for n, t in mine]).sum(0) for name in mine[0][1]}
        assert_close(simulation.state[group], mean)
    assert not {"server_steps", "server_flops"} & line.keys()


# the loss


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_loss_and_its_gradient(temperature: float) -> None:
    """Over C classes sum p log(p / q), the mean over samples; its gradient is that of finite differences, and
    (q - p) / (T B)."""
    generator = torch.Generator().manual_seed(2)
    z, teacher = (torch.randn(5, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    method = FedDF(temperature=temperature)
    p, q = (teacher / temperature).softmax(1), (z / temperature).softmax(1)
    torch.testing.assert_close(method.loss_of_student(z, teacher), (p * (p / q).log()).sum() / 5)
    z.requires_grad_()
    method.loss_of_student(z, teacher).backward()
    torch.testing.assert_close(z.grad, (q - p) / (5 * temperature))
    assert torch.autograd.gradcheck(lambda z: method.loss_of_student(z, teacher), z)


def test_one_client_s_student_has_nothing_to_learn(tmp_path: Path) -> None:
    """KL of a network to itself is 0 where no norm sees another batch; so are its gradients."""
    alone = {"count": 1, "cohort": 1, "capacities": [0.2]}
    simulation = simulate(asked(clients=alone, model="mcmahan_cnn", partition="iid"), tmp_path)
    public, [client] = public_of(simulation), visited(simulation, 0)
    module = network(client.net, simulation.state["net 0.2"])
    targets = distillation.predicted(client.net.build(), simulation.state["net 0.2"], public)
    [(x, _)] = public.plain(1000)
    loss = FedDF().loss_of_student(module(x), targets)
    loss.backward()
    assert abs(loss.item()) < 1e-6
    assert all(float(p.grad.abs().max()) < 1e-5 for p in module.parameters() if p.grad is not None)


def test_a_class_that_no_teacher_thinks_possible_has_a_target(tmp_path: Path) -> None:
    """In float32 its probability is 0, whose logarithm would make the divergence NaN."""
    simulation = simulate(asked(method=feddf(targets="probabilities")), tmp_path)
    state, net = simulation.state, simulation.method.task.nets[0.3]
    said = torch.tensor([[200.0, 0.0, 0.0, -200.0]]).softmax(1)
    assert float(said[0, 3]) == 0
    answers = Update({"net 0.3": state["net 0.3"]}, 1.0, derived={"teachers": {"sum": said, "count": torch.ones(())}})
    after = simulation.method.step(state, 0, folded(state, (prefix(net, net), answers)))
    loss = FedDF().loss_of_student(torch.zeros(1, 4), after["targets"]["targets"])
    torch.testing.assert_close(loss, torch.tensor(math.log(4)))


# bad input


def test_requirements() -> None:
    with pytest.raises(ConfigError, match="data.public: method .* needs public data"):
        experiment(feddf())
    for bad in ({"distillation": {"steps": -1}}, {"temperature": 0}, {"targets": "labels"}, {"start": "random"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            asked(method=feddf(**bad))
