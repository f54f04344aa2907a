"""TAKFL: two rounds against plain torch in float64, FedAvg and FedDF as special cases, coefficients by brute force."""

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
from rayfl.core.net import Net
from rayfl.core.seeds import numpy_generator, stream
from rayfl.core.tensors import Params
from rayfl.engine.simulation import Simulation
from rayfl.methods.distillation.takfl import TAKFL, drawn, merged
from rayfl.testing.tiny import assert_same, folded, run, simulate

TEACHES = {"steps": 9, "batch_size": 8, "lr": 3e-3, "weight_decay": 0.01}
"""Training on 36 public samples: two epochs of five batches, the last of four samples, without the last step."""
ZOO = {"name": "mix", "networks": {"0.3": {"name": "resnet8", "channels": 4}, "0.2": "mcmahan_cnn"}}
"""Without biases before a batch norm: their gradient is 0 but for rounding, which Adam would enlarge."""
ONE = {"name": "mix", "networks": {"0.3": {"name": "resnet8", "channels": 4}}}
ALONE = {"capacities": [0.3]}
T, R, GAMMA = 2.0, 5.0, 0.7


def takfl(**options: Any) -> dict[str, Any]:
    given = {"distillation": TEACHES, "temperature": T, "self_temperature": R, "self_weight": GAMMA, "candidates": 2}
    return {"name": "takfl"} | given | options


def asked(method: Any = None, **sections: Any) -> Any:
    data, held = DATA | {"public": PUBLIC}, {"holdout": 0.2}
    return experiment(**{"method": method or takfl(), "model": ZOO, "data": data, "evaluation": held} | sections)


# two rounds


def score(net: Net, given: Params, simulation: Simulation) -> int:
    """Return the number of correctly classified validation samples."""
    validation = simulation.executor.worker.validation  # pyright: ignore
    [(_, y)] = validation.plain(1000)
    return int((logits(network(net, given), validation).argmax(1) == y).sum())


def shares(simulation: Simulation, round: int, group: str, sources: int) -> list[list[float]]:
    """Return all candidates of a group, from the smallest source to the largest."""
    generator = numpy_generator(stream(simulation.seed, "refine", round), "coefficients", group)
    rows = [[1 / sources] * sources]
    for exponent in (1, 5, 10):
        for _ in range(2):
            powers = sorted(b**exponent for b in generator.beta(1, 100, sources).tolist())
            rows.append([power / sum(powers) for power in powers])
    return rows


def summed(mean: Params, students: list[Params], row: list[float]) -> Params:
    """Return the mean and its weighted distances to the students, one tensor after another."""
    return {n: m + sum(c * (s[n] - m) for c, s in zip(row, students, strict=True)) for n, m in mean.items()}


def kl(p: torch.Tensor, q: torch.Tensor, temperature: float) -> torch.Tensor:
    p, q = (p / temperature).softmax(1), (q / temperature).softmax(1)
    return (p * (p / q).log()).sum() / len(p)


def student(simulation: Simulation, module: nn.Module, teacher: torch.Tensor, round: int) -> Params:
    optimizer = torch.optim.Adam(module.parameters(), TEACHES["lr"], weight_decay=TEACHES["weight_decay"])
    public = public_of(simulation)
    both = torch.stack([teacher, logits(module, public)], 1)
    order = epochs(public.labeled(both), stream(simulation.seed, "refine", round), 2, 8)
    for _, (x, z) in zip(range(9), order, strict=False):
        optimizer.zero_grad()
        given = module.train()(x)
        (T**2 * kl(z[:, 0], given, T) + GAMMA * R**2 * kl(z[:, 1], given, R)).backward()
        optimizer.step()
    return tensors(module)


FIXED = ((0.3, 0.9), (-0.1, 0.5))


@pytest.mark.parametrize("options", [{}, {"coefficients": FIXED}, {"candidates": 0, "weight": "uniform"}])
def test_two_rounds_are_plain_torch_s(float64: None, tmp_path: Path, options: dict[str, Any]) -> None:
    """Two architectures, each with its own teachers; coefficients of the best candidate, fixed, or all 1 / 2."""
    simulation = simulate(asked(takfl(**options)), tmp_path)
    nets = simulation.method.task.nets
    now = {c: simulation.method.initial(c) for c in nets}  # pyright: ignore
    spread = 0
    for round in range(2):
        answers: dict[float, list[tuple[float, nn.Module]]] = {c: [] for c in (0.2, 0.3)}
        for client in visited(simulation, round):
            capacity = simulation.clients.capacity(client.id, simulation.seed, round)
            module = network(client.net, now[capacity])
            descend(module, batches(client.data, client.seed, 2, 5), F.cross_entropy, 0.05)
            answers[capacity].append((1 if "weight" in options else len(client.data), module))
        assert all(answers.values())
        teachers = {
            c: torch.stack([logits(module, public_of(simulation)) for _, module in mine]).mean(0)
            for c, mine in answers.items()
        }
        for i, mine in answers.items():
            total = sum(n for n, _ in mine)
            mean = {name: sum(n / total * tensors(m)[name] for n, m in mine) for name in now[i]}  # pyright: ignore
            students = [student(simulation, network(nets[i], mean), z, round) for z in teachers.values()]  # pyright: ignore
            if "coefficients" in options:
                rows = [[FIXED[(0.3, 0.2).index(i)][(0.3, 0.2).index(k)] for k in teachers]]
            else:
                rows = shares(simulation, round, f"net {i}", 2)[: 1 if "candidates" in options else None]
            scores = [score(nets[i], summed(mean, students, row), simulation) for row in rows]  # pyright: ignore
            spread = max(spread, max(scores) - min(scores))
            now[i] = summed(mean, students, rows[scores.index(max(scores))])  # pyright: ignore
    assert options or spread
    run(simulation)
    assert set(simulation.state) == {"net 0.3", "net 0.2"}
    for capacity, expected in now.items():
        assert_close(simulation.state[f"net {capacity}"], expected, exact=True)


def test_the_best_candidate_is_used(tmp_path: Path) -> None:
    """Of the task vectors in the state before the merge, every candidate is evaluated in torch's own layers."""
    simulation = simulate(asked(rounds=1, training={"steps": 20, "batch_size": 5}), tmp_path)
    before: Any = {}
    while not simulation.done:
        before = simulation.state
        simulation.advance()
    assert not any(name.startswith("student") for name in before)
    differ = 0
    for capacity, net in simulation.method.task.nets.items():
        group = f"net {capacity}"
        tasks = [before[f"task {group} from net {k}"] for k in (0.2, 0.3)]
        networks = [merged(before[group], tasks, row) for row in shares(simulation, 0, group, 2)]
        scores = [score(net, t, simulation) for t in networks]
        assert_same(simulation.state[group], networks[scores.index(max(scores))])
        differ += max(scores) > scores[0]
    assert differ


def test_without_validation_data_all_task_vectors_count_alike(tmp_path: Path) -> None:
    nothing = {"holdout": 0}
    one = simulate(asked(evaluation=nothing), tmp_path / "one")
    other = simulate(asked(takfl(candidates=0), evaluation=nothing), tmp_path / "other")
    assert run(one) == run(other)
    assert_same(one.state, other.state)


# special cases


def test_coefficients_of_0_are_fedavg(tmp_path: Path) -> None:
    """Bit for bit, for one architecture. The students' work is lost."""
    given = {"model": "mcmahan_cnn", "clients": ALONE}
    one = simulate(asked(takfl(coefficients=[[0.0]]), **given), tmp_path / "one")
    other = simulate(asked({"name": "fedavg", "weight": "samples"}, **given), tmp_path / "other")
    assert run(one)[-1]["server_steps"] == 9
    run(other)
    assert_same(one.state["net 0.3"], other.state["params"])


def test_students_without_steps_are_the_averages(tmp_path: Path) -> None:
    """FedDF without an ensemble is FedAvg over the clients of each architecture; bit for bit, statistics too."""
    one = simulate(asked(takfl(distillation={"steps": 0})), tmp_path / "one")
    other = simulate(asked({"name": "feddf", "distillation": {"steps": 0}}), tmp_path / "other")
    for simulation in (one, other):
        run(simulation)
    assert_same(one.state, other.state)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_one_architecture_s_own_student_is_feddf_s(float64: None, tmp_path: Path, temperature: float) -> None:
    """With the coefficient 1 and no weight of its own outputs. T^2 is a factor of the rate of SGD."""
    how, scale = TEACHES | {"optimizer": "sgd", "lr": 0.01, "weight_decay": 0.09}, temperature**2
    given = {"model": ONE, "clients": ALONE}
    method = takfl(coefficients=[[1]], self_weight=0, temperature=temperature, distillation=how)
    one = simulate(asked(method, **given), tmp_path / "one")
    how |= {"lr": 0.01 * scale, "weight_decay": 0.09 / scale, "patience": 0, "cosine": False, "clip": None}
    feddf = {"name": "feddf", "temperature": temperature, "distillation": how}
    other = simulate(asked(feddf, **given), tmp_path / "other")
    for simulation in (one, other):
        run(simulation)
    assert_close(one.state["net 0.3"], other.state["net 0.3"], exact=True)


def test_the_merge_is_linear_in_its_coefficients() -> None:
    """Whole numbers, so that sums are exact."""
    generator = torch.Generator().manual_seed(3)
    mean, *tasks = ({"w": torch.randint(-9, 10, (4, 3), generator=generator).double()} for _ in range(4))
    one, other = (2.0, -1.0, 3.0), (0.0, 5.0, -2.0)
    both = merged(mean, tasks, [a + b for a, b in zip(one, other, strict=True)])["w"]
    assert torch.equal(merged(mean, tasks, one)["w"] + merged(mean, tasks, other)["w"] - mean["w"], both)
    assert torch.equal(merged(mean, tasks, (0, 0, 1))["w"], mean["w"] + tasks[2]["w"])
    assert torch.equal(merged(mean, tasks, (0, 0, 0))["w"], mean["w"])


def test_running_variances_are_not_negative() -> None:
    mean, task = ({f"norm.running_{n}": torch.tensor([t]) for n in ("mean", "var")} for t in (1.0, -0.75))
    assert merged(mean, [task], [2]) == {"norm.running_mean": torch.tensor([-0.5]), "norm.running_var": torch.zeros(1)}


def test_an_architecture_without_clients_keeps_its_network(tmp_path: Path) -> None:
    """It teaches nobody, so that the other one learns from itself alone."""
    simulation = simulate(asked(rounds=1, clients={"capacities": [0.3, 0.2], "weights": [0, 1]}), tmp_path)
    before = simulation.state["net 0.3"]
    [line] = run(simulation)
    assert_same(simulation.state["net 0.3"], before)
    assert line["server_steps"] == 9


def test_a_round_without_answers_trains_no_student(tmp_path: Path) -> None:
    simulation = simulate(asked(), tmp_path)
    after = simulation.method.step(simulation.state, 0, folded(simulation.state))
    assert_same(after, simulation.state)
    assert not simulation.method.plan(after, 0)


# candidates, loss and costs


def test_candidates_by_hand() -> None:
    """The generator's draws as they are, to the power of 5, and of 10: in ascending order, of sum 1."""
    rows, generator = drawn(3, 1, numpy_generator(0, "coefficients")), numpy_generator(0, "coefficients")
    assert rows[0] == (1 / 3, 1 / 3, 1 / 3) and len(rows) == 4
    for row, exponent in zip(rows[1:], (1, 5, 10), strict=True):
        a, b, c = sorted(generator.beta(1, 100, 3).tolist())
        assert row == pytest.approx([t**exponent / (a**exponent + b**exponent + c**exponent) for t in (a, b, c)])
        assert row[0] < row[1] < row[2]
    assert drawn(3, 0, generator) == rows[:1]
    assert drawn(1, 5, generator) == [(1.0,)]


def test_the_loss_and_its_gradient() -> None:
    """T (q - p) / B of the teachers and gamma R (q - p) / B of the student's start, each at its temperature."""
    generator = torch.Generator().manual_seed(2)
    z, teacher, start = (torch.randn(5, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    method, targets = TAKFL(temperature=T, self_temperature=R, self_weight=GAMMA), torch.stack([teacher, start], 1)
    z.requires_grad_()
    loss = method.loss_of_student(z, targets)
    torch.testing.assert_close(loss, T**2 * kl(teacher, z, T) + GAMMA * R**2 * kl(start, z, R))
    loss.backward()
    parts = [c * t * ((z / t).softmax(1) - (p / t).softmax(1)) for c, t, p in ((1, T, teacher), (GAMMA, R, start))]
    torch.testing.assert_close(z.grad, sum(parts) / 5)


def test_traffic_and_costs(tmp_path: Path) -> None:
    """Networks down and up, statistics too. The server: passes of the ensemble and of the starts, four students, and
    seven candidates per architecture on validation data."""
    simulation = simulate(asked(rounds=1), tmp_path)
    clients, nets = visited(simulation, 0), simulation.method.task.nets
    sizes = {net: sum(t.numel() for t in simulation.state[f"net {c}"].values()) for c, net in nets.items()}
    [line] = run(simulation)
    assert line["bytes_down"] == line["bytes_up"] == sum(4 * sizes[c.net] for c in clients)
    assert line["server_steps"] == 4 * 9
    held = len(simulation.executor.worker.validation)  # pyright: ignore
    assert len(public_of(simulation)) == 36 and held == 24
    students = sum(2 * 6 * net.macs * (36 + 4 * 8) for net in nets.values())
    passes = sum(2 * c.net.macs * 36 for c in clients) + sum(2 * net.macs * (36 + 7 * held) for net in nets.values())
    assert line["server_flops"] == students + passes


# bad input


def test_requirements() -> None:
    with pytest.raises(ConfigError, match="data.public: method .* needs public data"):
        experiment(takfl())
    for bad in ([[1.0]], [[1.0, 0.0]], [[1.0], [0.0]], []):
        with pytest.raises(ConfigError, match="method.coefficients: rows of .* Allowed: 2 rows of 2 numbers"):
            asked(takfl(coefficients=bad))
    wrong = ({"candidates": -1}, {"self_weight": -1}, {"self_temperature": 0}, {"coefficients": [[float("nan")]]})
    for bad in wrong:
        with pytest.raises(ConfigError, match=next(iter(bad))):
            asked(takfl(**bad))
