"""FedBE by hand, and a run against plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_fedet import (
    CLIENTS,
    DATA,
    MIX,
    TRAINING,
    cohort_of,
    mean,
    order_of,
    public_of,
    state_of,
    trained_locally,
    twin,
)
from torch import nn

from rayfl import costs
from rayfl.config import ConfigError
from rayfl.core.net import Net
from rayfl.core.seeds import numpy_generator, stream, torch_generator
from rayfl.core.tensors import Params
from rayfl.data.partition.dirichlet import Dirichlet
from rayfl.engine.simulation import Simulation
from rayfl.experiment import Experiment
from rayfl.methods.distillation import fedbe
from rayfl.methods.distillation.fedbe import FedBE, averages, gaussian, moments, shares, sharpened, statistics, variance
from rayfl.testing.tiny import assert_same, run, simulate, tiny
from rayfl.training import distillation

FEW = {
    "epochs": 2,
    "batch_size": 10,
    "momentum": 0.9,
    "lr": 0.02,
    "weight_decay": 1e-2,
    "average_from": 4,
    "average_every": 2,
}
"""Training on 36 public samples: 8 steps, and the mean of the networks after 4, 6 and 8."""
SAMPLES = 3
SOME = {**CLIENTS, "capacities": [0.5, 0.25], "weights": [1, 1]}


def experiment(sampling: str = "gaussian", weight: str = "uniform", **sections: Any) -> Experiment:
    method = {"name": "fedbe", "distillation": FEW, "sampling": sampling, "samples": SAMPLES, "sharpen": 0.4}
    method |= {"weight": weight}
    given = {"model": MIX, "data": DATA, "clients": SOME, "training": TRAINING, "partition": "iid", "method": method}
    return tiny(**given | sections)


# in plain torch


def weights_of(simulation: Simulation, clients: dict[int, Params]) -> list[float]:
    """n_k, as the method's `weight` says."""
    by_data = simulation.method.weight == "samples"
    return [float(simulation.data.train.sizes[id]) if by_data else 1.0 for id in clients]


def drawn(
    simulation: Simulation, sampling: str, capacity: float, net: Net, clients: dict[int, Params], round: int
) -> list[Params]:
    """The samples of an architecture, from its clients' networks, all in memory."""
    seed, names, found = simulation.seed, net.layout.shapes, []
    n = weights_of(simulation, clients)
    centre = mean(list(clients.values()), n)
    for j in range(SAMPLES):
        sample = dict(centre)
        if sampling == "gaussian":
            generator = torch_generator(stream(seed, "refine", round), "ensemble", f"sample {j} net {capacity}")
            for name in names:
                apart = [(t[name] - centre[name]).square() for t in clients.values()]
                deviation = mean([{name: t} for t in apart], n)[name].sqrt()
                sample[name] = centre[name] + deviation * torch.randn(deviation.shape, generator=generator)
        else:
            local = {id: stream(seed, "local", round, id) for id in clients}
            g = {id: numpy_generator(s, "ensemble", j).gamma(1.0) for id, s in local.items()}
            for name in names:
                weighted = [g[id] / sum(g.values()) * t[name].double() for id, t in clients.items()]
                sample[name] = torch.stack(weighted).sum(0).float()
        found.append(sample)
    return found


def renewed(module: nn.Module, x: torch.Tensor) -> Params:
    """Its parameters, and means and variances of what each norm is given where all normalise by the batch."""
    found, handles = state_of(module), []
    for path, norm in module.named_modules():
        if isinstance(norm, nn.BatchNorm2d):

            def see(_: nn.Module, given: tuple[torch.Tensor, ...], path: str = path) -> None:
                found[f"{path}.running_mean"] = given[0].mean((0, 2, 3))
                found[f"{path}.running_var"] = given[0].var((0, 2, 3), correction=0)

            handles.append(norm.register_forward_pre_hook(see))
    with torch.no_grad():
        module.train()(x)
    return found


def plain_rounds(simulation: Simulation, sampling: str, rounds: int) -> dict[float, Params]:
    """Capacity -> network after so many rounds of the paper's algorithm."""
    nets = simulation.method.task.nets
    now: dict[float, Params] = {c: dict(simulation.method.initial(c)) for c in nets}  # pyright: ignore
    [(images, _)] = public_of(simulation).plain(1000)
    for round in range(rounds):
        answers: dict[float, dict[int, Params]] = {}
        for id, c in cohort_of(simulation, round):
            module = trained_locally(simulation, id, nets[c], now[c], round)
            answers.setdefault(c, {})[id] = state_of(module)
        teachers = []
        for c, clients in answers.items():
            centre = mean(list(clients.values()), weights_of(simulation, clients))
            networks = [centre, *drawn(simulation, sampling, c, nets[c], clients, round)]
            teachers += [twin(nets[c], given).eval() for given in [*networks, *clients.values()]]
        with torch.no_grad():
            said = torch.stack([teacher(images).softmax(1) for teacher in teachers]).mean(0)
        targets = said**2.5 / (said**2.5).sum(1, keepdim=True)
        for c, clients in answers.items():
            student = twin(nets[c], mean(list(clients.values()), weights_of(simulation, clients))).train()
            optimizer, kept = torch.optim.SGD(student.parameters(), 0.02, 0.9, weight_decay=1e-2), []
            for step, rows in enumerate(order_of(simulation, round, len(images), 10, 8), 1):
                q = student(images[rows]).softmax(1)
                loss = (targets[rows] * (targets[rows] / q).log()).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step in (4, 6, 8):
                    kept.append(state_of(student))
            now[c] = renewed(twin(nets[c], mean(kept)), images)
    return now


@pytest.mark.parametrize(
    ("sampling", "weight"), [("gaussian", "uniform"), ("gaussian", "samples"), ("dirichlet", "samples")]
)
def test_two_rounds_are_those_of_plain_torch(sampling: str, weight: str, tmp_path: Path) -> None:
    simulation = simulate(experiment(sampling, weight, partition=Dirichlet(alpha=20)), tmp_path)
    # of unequal sizes, but with no batch of one sample, which batch norm makes too sensitive to compare
    assert sorted(simulation.data.train.sizes) == [10, 11, 11, 12, 13, 15]
    run(simulation)
    expected = plain_rounds(simulation, sampling, 2)
    assert {c for _, c in cohort_of(simulation, 0)} == {0.5, 0.25}
    assert simulation.state.keys() == {"net 0.5", "net 0.25"}
    for capacity, network in expected.items():
        found = simulation.state[f"net {capacity}"]
        assert set(found) == set(network)
        for name, t in network.items():
            torch.testing.assert_close(found[name], t, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
def test_a_run_goes_on_from_the_middle_of_the_server_s_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the ensemble is evaluated, and between server tasks of students."""
    monkeypatch.setattr(distillation, "TASK_STEPS", 3)
    # with moments, which are in the state too
    asked = experiment("dirichlet", server={"optimizer": "adam", "lr": 0.01})
    straight = simulate(asked, tmp_path / "straight")
    lines = run(straight)
    first, server_tasks = simulate(asked, tmp_path / "first"), 0
    first.run_round()
    while first.advance() is None:
        first.save(tmp_path / f"{server_tasks}")
        again = simulate(asked, tmp_path / f"again {server_tasks}")
        assert again.restore(tmp_path / f"{server_tasks}") == (1, [])
        assert run(again) == lines[1:]
        assert_same(again.state, straight.state)
        server_tasks += 1
    assert server_tasks == 4


def test_the_server_s_work_is_counted_and_done_in_parallel(tmp_path: Path) -> None:
    simulation = simulate(experiment(rounds=1), tmp_path)
    method, nets, public = simulation.method, simulation.method.task.nets, len(public_of(simulation))
    assert simulation.advance() is None
    groups = [method.group(c) for c in nets]  # pyright: ignore
    asked = [f"{which} {group}" for group in groups for which in ("mean", "sample 0", "sample 1", "sample 2")]
    assert [server_task.name for server_task in method.plan(simulation.state, 0)] == asked
    [line] = run(simulation)
    clients = sum(costs.forward_flops(nets[c], public) for _, c in cohort_of(simulation, 0))
    ensemble = sum((1 + SAMPLES) * costs.forward_flops(net, public) for net in nets.values())
    students = sum(costs.training_flops(net, 2 * public) for net in nets.values())
    anew = sum(costs.forward_flops(net, public) for net in nets.values() if net.norms)
    assert line["server_flops"] == clients + ensemble + students + anew
    assert line["server_steps"] == 16
    assert line["bytes_up"] == line["bytes_down"], "what samples are drawn from does not travel"


def test_an_architecture_without_clients_keeps_its_network(tmp_path: Path) -> None:
    simulation = simulate(experiment(rounds=1, clients={**SOME, "weights": [0, 1]}), tmp_path)
    before = simulation.state["net 0.5"]
    run(simulation)
    assert_same(simulation.state["net 0.5"], before)


# the distribution


def test_the_variance_by_hand() -> None:
    """Values 1 (n = 1) and 5 (n = 3): mean 4, variance (9 + 3) / 4 = 3. Far from 0 it does not cancel."""
    for far in (0.0, 1e4):
        given = {"w": torch.tensor([far])}
        clients = [({"w": torch.tensor([far + 1])}, 1.0), ({"w": torch.tensor([far + 5])}, 3.0)]
        one, other = (moments(found, given, n) for found, n in clients)
        assert variance({name: one[name] + other[name] for name in one}, 4.0)["w"].tolist() == [3.0]
    alone = moments({"w": torch.tensor([0.3])}, {"w": torch.tensor([0.1])}, 7.0)
    assert variance(alone, 7.0)["w"].item() == pytest.approx(0, abs=1e-8)


def test_gaussian_samples_have_that_mean_and_variance() -> None:
    mean_of, spread = {"w": torch.full((40_000,), 2.0)}, {"w": torch.full((40_000,), 9.0)}
    found = gaussian(mean_of, spread, torch.Generator().manual_seed(0))["w"]
    assert found.mean().item() == pytest.approx(2, abs=0.06) and found.var().item() == pytest.approx(9, rel=0.03)
    assert_same(gaussian(mean_of, {"w": torch.zeros(40_000)}, torch.Generator()), mean_of)


def test_sums_of_gamma_draws_are_dirichlet_averages() -> None:
    """By hand; and weights over many draws have a Dirichlet distribution's mean 1/K and variance (K - 1) / K^2 (K alpha
    + 1)."""
    one, other = shares({"w": torch.tensor([1.0])}, [1.0, 3.0]), shares({"w": torch.tensor([5.0])}, [3.0, 0.0])
    found = averages({name: one[name] + other[name] for name in one})
    assert {name: t.tolist() for name, t in found.items()} == {"0.w": [4.0], "1.w": [1.0]}
    method = FedBE(sampling="dirichlet", alpha=0.5, samples=4000)
    g = torch.tensor([method._weights(stream(3, "local", 0, k)) for k in range(4)])
    weights = g / g.sum(0)
    torch.testing.assert_close(weights.mean(1), torch.full((4,), 0.25), rtol=0, atol=0.02)
    torch.testing.assert_close(weights.var(1), torch.full((4,), 3 / (16 * 3)), rtol=0.1, atol=0)


def test_one_client_s_dirichlet_average_is_its_network() -> None:
    """However small its draw is."""
    found = {"w": torch.tensor([0.125, -2.0])}
    method = FedBE(sampling="dirichlet", alpha=1e-3, samples=5)
    ensemble = averages(shares(found, method._weights(1)))
    for t in ensemble.values():
        torch.testing.assert_close(t, found["w"])


# what is learned


def test_targets_by_hand() -> None:
    """T = 1/2 squares: (.6, .3, .1) -> (36, 9, 1) / 46. A probability of 0 stays 0."""
    given = torch.tensor([[0.6, 0.3, 0.1], [0.0, 0.5, 0.5]])
    expected = torch.tensor([[36 / 46, 9 / 46, 1 / 46], [0, 0.5, 0.5]])
    torch.testing.assert_close(sharpened(given, 0.5), expected)
    torch.testing.assert_close(sharpened(given, 1.0), given)
    surest = torch.full((1, 100), 0.01) + torch.eye(100)[:1] * 1e-4
    torch.testing.assert_close(sharpened(surest, 1e-4), torch.eye(100)[:1])


def test_the_loss_and_its_gradient() -> None:
    """KL divided by the number of classes too; its gradient that of finite differences, and (q - t) / (B C)."""
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    t = torch.randn(5, 3, generator=generator, dtype=torch.float64).softmax(1)
    loss = FedBE().loss_of_student(z, t)
    torch.testing.assert_close(loss, (t * (t.log() - z.log_softmax(1))).sum() / 15)
    assert torch.autograd.gradcheck(lambda z: FedBE().loss_of_student(z, t), z)
    loss.backward()
    torch.testing.assert_close(z.grad, ((z.softmax(1) - t) / 15).detach())


def test_statistics_are_those_of_all_public_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of a network's first norm do not depend on the batches."""
    simulation = simulate(experiment(), tmp_path)
    net, public = simulation.method.task.nets[0.25], public_of(simulation)
    given = simulation.state["net 0.25"]
    whole = statistics(net, given, public)
    assert set(whole) == {name for name in given if name not in net.layout.shapes}
    monkeypatch.setattr("rayfl.methods.distillation.fedbe.AT_ONCE", 7)
    [first, *_] = net.norms
    for name, t in statistics(net, given, public).items():
        if name.startswith(f"{first}."):
            torch.testing.assert_close(t, whole[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("patience", [0, 9])
def test_a_validated_step_keeps_its_statistics(patience: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Net] = []
    monkeypatch.setattr(fedbe, "statistics", lambda net, *given: seen.append(net) or statistics(net, *given))
    how = FEW | {"average_from": None, "patience": patience, "validate_every": 2}
    method = {"name": "fedbe", "samples": SAMPLES, "distillation": how}
    simulation = simulate(experiment(method=method, evaluation={"holdout": 0.2}, rounds=1), tmp_path)
    run(simulation)
    assert any(net.norms for net in simulation.method.groups.values())  # pyright: ignore
    assert bool(seen) == (not patience)


# bad input


def test_public_data_are_wanted_and_numbers_checked() -> None:
    with pytest.raises(ConfigError, match="data.public: method .* needs public data"):
        experiment(data=DATA | {"public": None})
    for wrong in ({"samples": 0}, {"alpha": 0}, {"sharpen": 0}, {"sampling": "uniform"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            experiment(method={"name": "fedbe"} | wrong)
