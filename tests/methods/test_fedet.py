"""Fed-ET by hand, and a run against plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rayfl import costs
from rayfl.config import ConfigError
from rayfl.core.net import Net
from rayfl.core.norms import static_norms
from rayfl.core.seeds import stream, torch_generator
from rayfl.core.tensors import Params
from rayfl.data.samples import ClientData
from rayfl.engine.simulation import Simulation
from rayfl.experiment import Experiment
from rayfl.methods.distillation.fedet import FedET, confidence, consensus, dissent, targets
from rayfl.models.features import classifier_path
from rayfl.testing.methods import rows_of
from rayfl.testing.tiny import assert_same, run, simulate, tiny
from rayfl.training import distillation

MIX = {
    "name": "mix",
    "networks": {"1": {"name": "resnet8", "channels": 4}, "0.5": "mcmahan_cnn", "0.25": {"name": "resnet8"}},
    "features": 6,
}
DATA = {
    "name": "synthetic",
    "shape": [1, 8, 8],
    "samples": 120,
    "test_samples": 24,
    "classes": 4,
    "public": {"share": 0.3},
}
CLIENTS = {"count": 6, "cohort": 4, "capacities": [1, 0.5, 0.25], "weights": [0, 1, 1]}
TRAINING = {"batch_size": 6, "steps": 3, "lr": 0.05, "momentum": 0.5, "weight_decay": 1e-3}
FEW = {"steps": 7, "batch_size": 10, "momentum": 0.9, "lr": 0.02}


def experiment(**sections: Any) -> Experiment:
    method = {"name": "fedet", "distillation": FEW, "diversity": 0.5}
    given = {"model": MIX, "data": DATA, "clients": CLIENTS, "training": TRAINING, "partition": "iid", "method": method}
    return tiny(**given | sections)


# in plain torch


def twin(net: Net, given: Params) -> nn.Module:
    """The network with torch's own batch norms."""
    module = net.build()
    for path, norm in static_norms(module).items():
        module.set_submodule(path, nn.BatchNorm2d(norm.weight.numel()))
    module.load_state_dict(given, strict=False)
    return module


def state_of(module: nn.Module) -> Params:
    """Its parameters and running statistics."""
    return {n: t.clone() for n, t in module.state_dict().items() if not n.endswith("num_batches_tracked")}


def trained_locally(simulation: Simulation, client: int, net: Net, given: Params, round: int) -> nn.Module:
    """SGD as TRAINING says, on the batches that the seed says."""
    data = rows_of(simulation, client)
    generator = torch_generator(stream(simulation.seed, "local", round, client), "batches")
    module = twin(net, given).train()
    optimizer = torch.optim.SGD(module.parameters(), 0.05, 0.5, weight_decay=1e-3)
    for x, y in data.batches(3, 6, generator):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    return module.eval()


def public_of(simulation: Simulation) -> ClientData:
    return simulation.executor.worker.public  # pyright: ignore


def order_of(simulation: Simulation, round: int, samples: int, batch_size: int, steps: int) -> list[torch.Tensor]:
    """The rows of every step of a student."""
    seed, rows = stream(simulation.seed, "refine", round), []
    for epoch in range(steps):
        rows += torch.randperm(samples, generator=torch_generator(seed, "student", epoch)).split(batch_size)
    return rows[:steps]


def mean(networks: list[Params], weights: list[float] | None = None) -> Params:
    n = torch.tensor(weights or [1.0] * len(networks), dtype=torch.float64)
    sums = {name: torch.tensordot(n, torch.stack([net[name].double() for net in networks]), 1) for name in networks[0]}
    return {name: (t / n.sum()).to(torch.get_default_dtype()) for name, t in sums.items()}


def cohort_of(simulation: Simulation, round: int) -> list[tuple[int, float]]:
    """(client, capacity)."""
    ids, clients = simulation.clients.sample(simulation.seed, round), simulation.clients
    return [(id, clients.capacity(id, simulation.seed, round)) for id in ids]


def u_of(net: Net) -> tuple[str, str]:
    """The names of the classifier's parameters."""
    return f"{classifier_path(net)}.weight", f"{classifier_path(net)}.bias"


def plain_rounds(simulation: Simulation, rounds: int) -> dict[float, Params]:
    """Capacity -> network after so many rounds of the paper's algorithm, one client and one sample after another."""
    nets = simulation.method.task.nets
    now = {c: {n: t.clone() for n, t in simulation.method.initial(c).items()} for c in nets}  # pyright: ignore
    public = public_of(simulation)
    [(images, _)] = public.plain(1000)
    for round in range(rounds):
        answers = [
            (c, trained_locally(simulation, id, nets[c], now[c], round)) for id, c in cohort_of(simulation, round)
        ]
        with torch.no_grad():
            said = [m(images) for _, m in answers]
        for c in nets:
            if mine := [state_of(m) for d, m in answers if d == c]:
                now[c] = mean(mine)
        for name, others in zip(u_of(nets[1]), zip(*[u_of(nets[c]) for c, _ in answers], strict=True), strict=True):
            parts = [state_of(m)[o] for (_, m), o in zip(answers, others, strict=True)]
            now[1][name] = torch.stack(parts).mean(0)
        labels, diverse = [], []
        for x in range(len(images)):
            rows = [z[x] for z in said]
            spread = [float(row.var()) for row in rows]
            total = sum(v / sum(spread) * row for v, row in zip(spread, rows, strict=True))
            y = int(torch.as_tensor(total).argmax())
            others = [(v, row) for v, row in zip(spread, rows, strict=True) if int(row.argmax()) != y]
            labels.append(y)
            diverse.append(sum(v * row for v, row in others) / sum(v for v, _ in others) if others else None)
        server = twin(nets[1], now[1]).train()
        optimizer = torch.optim.SGD(server.parameters(), 0.02, 0.9)
        for picked in order_of(simulation, round, len(images), 10, 7):
            z = server(images[picked])
            loss = torch.zeros(())
            for row, x in zip(z, picked.tolist(), strict=True):
                loss = loss + F.cross_entropy(row[None], torch.tensor([labels[x]])) / len(picked)
                if (t := diverse[x]) is not None:
                    p, q = torch.as_tensor(t).softmax(0), row.softmax(0)
                    loss = loss + 0.5 * (p * (p.log() - q.log())).sum() / len(picked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        now[1] = state_of(server)
        for c in nets:
            for name, own in zip(u_of(nets[c]), u_of(nets[1]), strict=True):
                now[c][name] = now[1][own].clone()
    return now


@pytest.mark.parametrize("weights", [[0, 1, 1], [1, 1, 1]])
@pytest.mark.usefixtures("float64")
def test_two_rounds_are_those_of_plain_torch(weights: list[int], tmp_path: Path) -> None:
    """With a server's network that no client has, and with one that some have. In float64, or a label of two almost
    equal votes would depend on the processor."""
    simulation = simulate(experiment(clients={**CLIENTS, "weights": weights}), tmp_path)
    run(simulation)
    expected = plain_rounds(simulation, 2)
    assert {c for r in (0, 1) for _, c in cohort_of(simulation, r)} == {
        c for c, w in zip([1, 0.5, 0.25], weights, strict=True) if w
    }
    for capacity, network in expected.items():
        found = simulation.state[simulation.method.group(capacity)]  # pyright: ignore
        assert set(found) == set(network)
        for name, t in network.items():
            torch.testing.assert_close(found[name], t, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_the_server_s_network_is_never_sent_and_its_work_is_counted(tmp_path: Path) -> None:
    simulation = simulate(experiment(rounds=1), tmp_path)
    method, state = simulation.method, simulation.state
    nets, drawn = method.task.nets, cohort_of(simulation, 0)
    for selection, _ in simulation.cohort().values():
        assert "net 1" not in method.extract(state, selection)
    [line] = run(simulation)
    public = len(public_of(simulation))
    asked = sum(costs.forward_flops(nets[c], public) for _, c in drawn)
    batches = order_of(simulation, 0, public, 10, 7)
    assert line["server_flops"] == asked + sum(costs.training_flops(nets[1], len(rows)) for rows in batches)
    assert line["server_steps"] == 7


def test_an_architecture_without_clients_keeps_its_network_except_u(tmp_path: Path) -> None:
    simulation = simulate(experiment(rounds=1, clients={**CLIENTS, "weights": [0, 0, 1]}), tmp_path)
    net, before = simulation.method.task.nets[0.5], simulation.state["net 0.5"]
    run(simulation)
    after = simulation.state["net 0.5"]
    assert {name for name in after if not torch.equal(after[name], before[name])} == set(u_of(net))


def test_a_run_goes_on_from_the_middle_of_the_server_s_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "TASK_STEPS", 3)
    straight = simulate(experiment(), tmp_path / "straight")
    lines = run(straight)
    first = simulate(experiment(), tmp_path / "first")
    first.run_round()
    for server_task in range(3):
        assert first.advance() is None and first.partial_round
        first.save(tmp_path / f"{server_task}")
        again = simulate(experiment(), tmp_path / f"again {server_task}")
        assert again.restore(tmp_path / f"{server_task}") == (1, [])
        assert run(again) == lines[1:]
        assert_same(again.state, straight.state)


# what clients say


def test_the_consensus_by_hand() -> None:
    """Three clients, one sample: variances 14/9, 2/9 and 31/18, so shares 28, 4 and 31 of 63."""
    logits = torch.tensor([[[2.0, 0, -1]], [[0, 1, 0]], [[0.5, 3, 0]]], dtype=torch.float64)
    expected = torch.tensor([28, 4, 31], dtype=torch.float64) / 63
    torch.testing.assert_close(confidence(logits)[:, 0], expected)
    given = torch.tensor([[1.134921, 1.539683, -0.444444]], dtype=torch.float64)
    torch.testing.assert_close(consensus(logits), given, rtol=0, atol=5e-7)
    diverse, among = dissent(logits, torch.tensor([1]))
    assert among[:, 0].tolist() == [True, False, False]
    torch.testing.assert_close(diverse, logits[0])
    torch.testing.assert_close(targets(logits)[0, 0], torch.tensor([0, 1, 0], dtype=torch.float64))
    torch.testing.assert_close(targets(logits)[0, 1], logits[0, 0].softmax(0))


def test_all_agree_or_all_disagree_or_all_logits_are_constant() -> None:
    """Samples: both say 0; one says 0 and one 2 while the consensus is 1; all logits of both are equal."""
    logits = torch.tensor([[[3.0, 1, 0], [2, 1.9, -2], [1, 1, 1]], [[2, 0, 1], [-2, 1.9, 2], [0, 0, 0]]])
    said = consensus(logits).argmax(1)
    assert said.tolist() == [0, 1, 0]
    diverse, among = dissent(logits, said)
    assert among.tolist() == [[False, True, False], [False, True, False]]
    found = targets(logits)
    assert found.shape == (3, 2, 3)
    assert found[0, 1].tolist() == found[2, 1].tolist() == [0, 0, 0]
    torch.testing.assert_close(diverse[1], consensus(logits)[1])
    torch.testing.assert_close(confidence(logits)[:, 2], torch.tensor([0.5, 0.5]))


def test_constant_logits_count_only_if_all_dissenting_logits_are_constant() -> None:
    """Client 1's logits are constant, so it answers class 0."""
    logits = torch.tensor([[[0.0, 4, 0]], [[1, 1, 1]], [[2, 0, 0]]])
    torch.testing.assert_close(confidence(logits)[:, 0], torch.tensor([0.8, 0, 0.2]))
    torch.testing.assert_close(dissent(logits, torch.tensor([1]))[0], logits[2])
    torch.testing.assert_close(dissent(logits[:2], torch.tensor([1]))[0], logits[1])


def test_the_loss_is_its_parts_and_its_gradient_that_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(3)
    said = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    said[:, 0] = said[0, 0]
    z = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    method, wanted = FedET(diversity=0.3), targets(said)
    y = consensus(said).argmax(1)
    diverse, among = dissent(said, y)
    assert among.any(0).tolist()[0] is False and among.any()
    kl = F.kl_div(z.log_softmax(1), diverse.softmax(1), reduction="none").sum(1) * among.any(0)
    torch.testing.assert_close(method.loss_of_student(z, wanted), F.cross_entropy(z, y) + 0.3 * kl.mean())
    assert torch.autograd.gradcheck(lambda z: method.loss_of_student(z, wanted), z)


# bad input


def test_classifiers_of_different_shapes_are_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        experiment(model=MIX | {"features": None})
    message = str(raised.value)
    assert "capacity 0.5: weight [4, 512], bias [4]" in message and "model.features of model mix" in message


def test_public_data_are_wanted() -> None:
    with pytest.raises(ConfigError, match="data.public: method .* needs public data"):
        experiment(data=DATA | {"public": None})
    with pytest.raises(ConfigError, match="diversity"):
        experiment(method={"name": "fedet", "diversity": -1})
