"""FedGKT: losses, assignment of targets, two rounds against plain torch, equal results, traffic, and errors."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from helpers import saved_inside
from independent import assert_close, network, tensors
from torch import nn

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.fold import Fold
from rayfl.core.net import Net, check_axes, load
from rayfl.core.norms import load as load_norms
from rayfl.core.seeds import stream, torch_generator
from rayfl.core.tensors import Params
from rayfl.data.samples import ClientData, Prepare
from rayfl.engine.simulation import Simulation
from rayfl.engine.worker import Recipe, Worker
from rayfl.experiment import Experiment
from rayfl.methods import METHODS, Client, Task, Visit
from rayfl.methods.distillation import fedgkt
from rayfl.methods.distillation.fedgkt import (
    CLIENTS,
    MEMORY,
    PLACE,
    SERVER,
    FedGKT,
    featured,
    packed,
    trunk_macs,
    unpacked,
)
from rayfl.models import MODELS
from rayfl.testing.methods import rows_of
from rayfl.testing.tiny import Shuffled, assert_same, run, simulate, tiny
from rayfl.training.settings import Training

TRUNK = {"name": "resnet55_gkt", "channels": 4, "depth": [1, 1]}
HEAD = {"name": "resnet8_gkt", "channels": 4, "depth": [1]}
DEEP = {"name": "resnet8_gkt", "channels": 4, "depth": [2]}
SECTIONS: dict[str, Any] = {
    "data": {"name": "synthetic", "shape": [1, 8, 8], "samples": 80, "test_samples": 24, "classes": 4},
    "model": {"name": "mix", "networks": {"1": TRUNK, "0.5": HEAD, "0.25": DEEP}},
    "clients": {"capacities": [1, 0.5, 0.25], "weights": [0, 1, 1]},
}
ALL = SECTIONS["clients"] | {"cohort": 6}
SERVING = {"epochs": 2, "batch_size": 8}


def gkt(**options: Any) -> dict[str, Any]:
    return {"name": "fedgkt", "server": SERVING} | options


def experiment(method: Any = None, **sections: Any) -> Experiment:
    return tiny(**SECTIONS | {"method": method or gkt()} | sections)


def bound(*networks: Any, **options: Any) -> FedGKT:
    """For capacities 1, 1/2, 1/4, ..."""
    capacities = [0.5**i for i in range(len(networks))]
    mix = MODELS["mix"](networks=dict(zip(capacities, networks, strict=True)))  # pyright: ignore
    nets = {capacity: cast(Net, mix.chosen(capacity)) for capacity in capacities}
    return METHODS["fedgkt"](**options).bind(Task(mix, Training(), nets, 1.0, clients=4))  # pyright: ignore


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch_generator(seed, "test:drawn"), dtype=torch.float64)


# networks


def bottleneck(cin: int, planes: int, *, projects: bool) -> int:
    """Parameters: three convolutions with their norms, and a projection with its own."""
    norms = 2 * (planes + planes + 4 * planes)
    return cin * planes + 9 * planes**2 + 4 * planes**2 + norms + projects * (4 * cin * planes + 2 * 4 * planes)


def test_parameters_by_hand() -> None:
    """The paper's table: 11K of a client, 591K of ResNet-56, which is the server's behind an extractor."""
    extractor, client, server = 3 * 16 * 9 + 2 * 16, Net(MODELS["resnet8_gkt"]()), Net(MODELS["resnet55_gkt"]())
    first = bottleneck(16, 16, projects=True)
    head = first + bottleneck(64, 16, projects=False) + 64 * 10 + 10
    stages = [first + 5 * bottleneck(64, 16, projects=False)]
    stages += [bottleneck(64, 32, projects=True) + 5 * bottleneck(128, 32, projects=False)]
    stages += [bottleneck(128, 64, projects=True) + 5 * bottleneck(256, 64, projects=False)]
    trunk = sum(stages) + 256 * 10 + 10
    assert (extractor, head, trunk) == (464, 10_122, 590_858)
    assert client.parameters == extractor + head == 10_586
    assert server.parameters == extractor + trunk == 591_322
    for net in (client, server):
        check_axes(net)
        assert sum(math.prod(s) for n, s in net.layout.shapes.items() if n.startswith("extractor.")) == extractor


def test_so_many_layers_with_weights() -> None:
    """ResNet-55 behind an extractor of one, ResNet-8 with it: projections are not counted."""
    for name, count in (("resnet8_gkt", 1 + 7), ("resnet55_gkt", 1 + 55)):
        assert sum("projection" not in path for path in Net(MODELS[name]()).layers) == count


def test_lenet_is_split_behind_its_first_convolution(tmp_path: Path) -> None:
    """The same function as LeNet-5-Caffe, and equal extractors of server and clients."""
    whole, split = Net(MODELS["lenet5_caffe"]()), Net(MODELS["lenet5_gkt"]())
    assert split.parameters == whole.parameters and split.macs == whole.macs
    given = whole.initial()
    one, other = whole.build(), split.build()
    load(one, given)
    load(other, {f"extractor.{n}" if n.startswith("conv1.") else n: t for n, t in given.items()})
    x = drawn(2, 1, 28, 28).float()
    assert torch.equal(one(x), other(x))
    head = {"name": "lenet5_gkt", "channels": 4, "hidden": 6}
    mix = {"name": "mix", "networks": {"1": "lenet5_gkt", "0.5": head}}
    data = SECTIONS["data"] | {"shape": [1, 16, 16]}
    sections = {"data": data, "model": mix, "clients": {"capacities": [1, 0.5], "weights": [0, 1]}}
    simulation = simulate(experiment(gkt(order="mixed"), rounds=1, **sections), tmp_path)
    assert trunk_macs(simulation.method.task.server) == 50 * 25 * 20 * 4 + 50 * 500 + 500 * 4
    [line] = run(simulation)
    samples = sum(len(rows_of(simulation, id)) for id in simulation.clients.sample(0, 0))
    assert line["bytes_up"] == 4 * (20 * 36 + 4 + 1) * samples


# losses


def test_losses_by_hand() -> None:
    """One sample of two classes, T = 2, a = 3: softmax([0, 2 log 3] / 2) = [1/4, 3/4], the other side is even."""
    method = bound(TRUNK, HEAD, temperature=2.0, alpha=3.0)
    targets = packed(torch.tensor([1]), torch.tensor([[0.0, 2 * math.log(3)]]))
    logits = torch.zeros(1, 2)
    kd = 4 * (math.log(0.25 / 0.5) / 4 + 3 * math.log(0.75 / 0.5) / 4)
    assert method.client_loss(F.cross_entropy)(logits, targets).item() == pytest.approx(math.log(2) + 3 * kd)
    assert method.server_loss(F.cross_entropy)(logits, targets).item() == pytest.approx(kd + 3 * math.log(2))
    alone = bound(TRUNK, HEAD, distill_on_server=False, alpha=3.0).server_loss(F.cross_entropy)
    assert alone(logits, targets).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("side", ["client_loss", "server_loss"])
def test_gradients_are_finite_differences(side: str) -> None:
    loss = getattr(bound(TRUNK, HEAD, temperature=3.0, alpha=0.7), side)(F.cross_entropy)
    logits, targets = drawn(5, 4).requires_grad_(), packed(torch.tensor([0, 3, 1, 2, 3]), drawn(5, 4, seed=1))
    assert torch.autograd.gradcheck(lambda z: loss(z, targets), logits)


def test_the_gradient_of_distillation() -> None:
    """T (softmax(z / T) - softmax(t / T)) / B: as large as that of cross entropy at any temperature."""
    method, student, teacher = bound(TRUNK, HEAD, temperature=5.0), drawn(6, 4).requires_grad_(), drawn(6, 4, seed=1)
    method.distilled(teacher, student).backward()
    expected = 5 * ((student / 5).softmax(1) - (teacher / 5).softmax(1)) / 6
    torch.testing.assert_close(student.grad, expected.detach())


def test_labels_and_logits_as_one_target() -> None:
    y, logits = torch.tensor([3, 2**24 - 1]), drawn(2, 4).float()
    back, same = unpacked(packed(y, logits))
    assert torch.equal(back, y) and torch.equal(same, logits)


# whose targets are whose


def visit_of(simulation: Simulation, id: int, seed: int) -> Visit:
    method, capacity = simulation.method, simulation.clients.capacity(id, 0, 0)
    client = Client(id, capacity, 0)
    return Visit(client, method.select(simulation.state, client), rows_of(simulation, id), None, seed)


def test_the_order_of_batches_changes_no_target(tmp_path: Path) -> None:
    """Networks that hardly move, and whose samples do not meet in a norm: the mean loss over all samples is the same
    for any order of batches, if every sample finds its own target, and is the one by hand."""
    mix = {"1": TRUNK | {"norm": "layer"}, "0.5": HEAD | {"norm": "layer"}}
    sections = {"model": {"name": "mix", "networks": mix}, "clients": {"capacities": [1, 0.5], "weights": [0, 1]}}
    training = {"epochs": 1, "steps": None, "batch_size": 3, "lr": 1e-9}
    simulation = simulate(experiment(gkt(alpha=2.0), training=training, **sections), tmp_path)
    method, data = cast(FedGKT, simulation.method), rows_of(simulation, 1)
    teacher = 5 * drawn(len(data), 4).float()
    payload = {SERVER: {"1": teacher, "2": torch.zeros(3, 4)}}
    losses = []
    for seed in (1, 2, 3):
        metrics = method.local_update(payload, visit_of(simulation, 1, seed)).metrics
        losses.append(metrics["train_loss"] / metrics["train_samples"])
    [(x, y)] = data.plain(len(data))
    module = method.task.nets[0.5].build()
    load(module, method.initial(0.5))
    z = module(x)
    by_hand = (
        F.cross_entropy(z, y)
        + 2 * 9 * ((teacher / 3).softmax(1) * ((teacher / 3).log_softmax(1) - (z / 3).log_softmax(1))).sum(1).mean()
    )
    assert losses == pytest.approx([by_hand.item()] * 3, rel=1e-5)
    shuffled = payload | {SERVER: {"1": teacher.roll(1, 0)}}
    wrong = method.local_update(shuffled, visit_of(simulation, 1, 1)).metrics
    assert wrong["train_loss"] / wrong["train_samples"] != pytest.approx(by_hand.item(), rel=1e-4)


def test_without_logits_of_the_server_a_client_learns_from_labels(tmp_path: Path) -> None:
    """Also where others have some."""
    simulation = simulate(experiment(), tmp_path)
    method, visit = simulation.method, visit_of(simulation, 1, 5)
    first = method.local_update({}, visit)
    other = method.local_update({SERVER: {"2": torch.zeros(3, 4)}}, visit)
    some = method.local_update({SERVER: {"1": 9 * drawn(len(visit.data), 4).float()}}, visit)
    assert_same(first.client_states[1], other.client_states[1])
    assert first.metrics == other.metrics and first.metrics["train_loss"] != some.metrics["train_loss"]


# two rounds in plain torch


def kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """At T = 3, times 9."""
    p = (teacher / 3).exp() / (teacher / 3).exp().sum(1, keepdim=True)
    log_q = student / 3 - (student / 3).logsumexp(1, keepdim=True)
    return 9 * (p * (p.log() - log_q)).sum() / len(teacher)


def numbered(data: ClientData, steps: int, batch_size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A client's batches: samples, and their rows in its data."""
    return data.labeled(torch.arange(len(data))).batches(steps, batch_size, torch_generator(seed, "batches"))


@pytest.mark.parametrize("order", ["clients", "mixed"])
def test_two_rounds_in_plain_torch(tmp_path: Path, float64: None, order: str) -> None:
    """Two client networks, 4 of 6 clients per round, some of which come back. Adam's first steps divide by tiny
    gradients, so that float32 would differ between processors."""
    training = {"epochs": 2, "steps": None, "batch_size": 5, "lr": 0.05, "momentum": 0.9}
    simulation = simulate(experiment(gkt(alpha=0.5, order=order), training=training), tmp_path)
    clients, nets, method = simulation.clients, simulation.method.task.nets, cast(FedGKT, simulation.method)
    server = cast(nn.Sequential, network(nets[1], simulation.state["net 1"]))
    trunk, cut = server[1:], len("extractor.")
    adam = torch.optim.Adam(trunk.parameters(), 1e-3, weight_decay=1e-4, amsgrad=True)
    own: dict[int, nn.Sequential] = {}
    z_server: dict[int, torch.Tensor] = {}
    came_back = 0
    for round in range(2):
        cohort, sent = clients.sample(0, round), {}
        for id in cohort:
            capacity, data = clients.capacity(id, 0, round), rows_of(simulation, id)
            module = own.setdefault(id, cast(nn.Sequential, network(nets[capacity], method.initial(capacity))))
            sgd = torch.optim.SGD(module.parameters(), 0.05, 0.9)
            [(x, y)] = data.plain(len(data))
            module.train()
            for batch, rows in numbered(data, 2 * -(-len(data) // 5), 5, stream(0, "local", round, id)):
                z = module(batch)
                loss = F.cross_entropy(z, y[rows])
                if id in z_server:
                    loss = loss + 0.5 * kl(z_server[id][rows], z)
                    came_back += 1
                sgd.zero_grad()
                loss.backward()
                sgd.step()
            module.eval()
            with torch.no_grad():
                sent[id] = module[0](x), module(x), y
        trunk.train()
        for epoch in (1, 2):
            parts = {f"client {id}": sent[id] for id in cohort}
            if order == "mixed":
                parts = {"mixed": tuple(map(torch.cat, zip(*(sent[id] for id in cohort), strict=True)))}
            for name, (features, z_client, y) in parts.items():
                draw = torch_generator(stream(0, "refine", round), "student", f"epoch {epoch}, {name}")
                for rows in torch.randperm(len(y), generator=draw).split(8):
                    z = trunk(features[rows])
                    adam.zero_grad()
                    (kl(z_client[rows], z) + 0.5 * F.cross_entropy(z, y[rows])).backward()
                    adam.step()
        trunk.eval()
        with torch.no_grad():
            z_server |= {id: trunk(sent[id][0]) for id in cohort}
    run(simulation)
    assert came_back and set(own) == set(simulation.client_states.owners)
    assert_close(simulation.state["net 1"], tensors(server))
    assert_close(simulation.state[SERVER], {str(id): z for id, z in z_server.items()})
    for id, module in own.items():
        assert_close(cast(Params, (simulation.client_states.get(id) or {})["own"]), tensors(module))
        deployed = simulation.deployment(clients.capacity(id, 0, 1), id)
        given = {f"extractor.{name}": t for name, t in tensors(module[0]).items()}
        assert {name[:cut] for name in given} == {"extractor."}
        assert_close(deployed.params | (deployed.statistics or {}), tensors(server) | given)


def batches_of_the_server(simulation: Simulation) -> list[list[int]]:
    """Run a round, and return the clients of the samples of every batch of the server."""
    seen: list[list[int]] = []

    def noting(extract: Any, extractors: Any, samples: Any, rows: torch.Tensor) -> Any:
        owners = torch.tensor([id for id, data in samples.items() for _ in range(len(data))])
        assert list(extractors) == list(samples)
        features, y = featured(extract, extractors, samples, rows)
        assert len(features) == len(y) == len(rows)
        seen.append(sorted(owners[rows].tolist()))
        return features, y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedgkt, "featured", noting)
        run(simulation)
    return seen


def test_the_order_of_the_server_s_batches(tmp_path: Path) -> None:
    """clients: every batch is of one client, and clients come one after another in both epochs. mixed: each epoch has
    every sample once, in batches of 8, most of them of several clients."""
    found = {
        order: batches_of_the_server(simulate(experiment(gkt(order=order), rounds=1), tmp_path / order))
        for order in ("clients", "mixed")
    }
    simulation = simulate(experiment(), tmp_path)
    sizes = {id: len(rows_of(simulation, id)) for id in simulation.clients.sample(0, 0)}
    epoch = [[id] * min(8, n - start) for id, n in sizes.items() for start in range(0, n, 8)]
    assert found["clients"] == epoch * 2
    total = sum(sizes.values())
    lengths = [min(8, total - start) for start in range(0, total, 8)]
    assert [len(batch) for batch in found["mixed"]] == lengths * 2
    for half in (found["mixed"][: len(lengths)], found["mixed"][len(lengths) :]):
        assert sorted(id for batch in half for id in batch) == [id for id, n in sizes.items() for _ in range(n)]
    assert found["mixed"][0] != found["mixed"][len(lengths)]
    assert sum(len(set(batch)) > 1 for batch in found["mixed"]) > len(lengths)


def test_features_and_targets_of_a_mixed_batch() -> None:
    """Rows are counted client by client; each client's extractor multiplies by its own number."""
    extract = nn.Linear(1, 1, bias=False)
    extractors = {id: {"extractor.weight": torch.tensor([[float(factor)]])} for id, factor in ((3, 10), (5, 100))}
    prepare, goal = Plain(), cast(Any, None)
    samples = {
        3: ClientData({"x": torch.tensor([[1.0], [2.0]]), "y": torch.tensor([1, 2])}, prepare, goal),
        5: ClientData({"x": torch.tensor([[3.0], [4.0], [5.0]]), "y": torch.tensor([3, 4, 5])}, prepare, goal),
    }
    features, y = featured(extract, extractors, samples, torch.tensor([4, 1, 2]))
    assert y.tolist() == [2, 5, 3] and features.flatten().tolist() == [20.0, 500.0, 300.0]


class Plain(Prepare):
    def whole(self, samples: Any) -> Any:
        return samples

    def batch(self, samples: Any, generator: torch.Generator | None) -> Any:
        return samples["x"], samples["y"]


# the same bits


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "order"), [("static_bn", "mixed"), ("layer", "clients")])
def test_a_run_goes_on_from_the_middle_of_the_server_s_epochs(tmp_path: Path, norm: str, order: str) -> None:
    networks = {"1": TRUNK | {"norm": norm}, "0.5": HEAD | {"norm": norm}, "0.25": DEEP | {"norm": norm}}
    asked = experiment(gkt(order=order), model={"name": "mix", "networks": networks})
    straight = simulate(asked, tmp_path / "straight")
    lines = run(straight)
    saved = saved_inside(asked, tmp_path)
    # behind the local updates, and behind every client's part of every epoch or every epoch
    assert saved == 1 + 2 * (4 if order == "clients" else 1)
    for i in {1, 3, 6, saved} & set(range(saved + 1)):
        again = simulate(asked, tmp_path / f"again {i}")
        assert again.restore(tmp_path / f"checkpoint {i}") == (1, [])
        assert int(again.state[PLACE]["behind"]) == i - 1
        assert run(again) == lines[1:]
        assert_same(again.state, straight.state)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "order"), [(4, "clients"), (1, "mixed")])
def test_the_order_of_work_changes_no_bit(tmp_path: Path, chunk: int, order: str) -> None:
    asked = experiment(gkt(order=order))
    serial = simulate(asked, tmp_path / "serial")
    lines = run(serial)
    arrays = asked.data.arrays()

    def shuffled(recipe: Recipe) -> Shuffled:
        return Shuffled(Worker(recipe, arrays))

    other = simulate(experiment(gkt(order=order), run={"chunk": chunk}), tmp_path / "other", shuffled)
    assert run(other) == lines
    assert_same(other.state, serial.state)


# what the server holds, and what is run


def test_the_server_s_work_a_round(tmp_path: Path) -> None:
    """One server task at a time, then all logits at once; only the optimizer's state is kept."""
    simulation = simulate(experiment(), tmp_path)
    cohort, planned = simulation.clients.sample(0, 0), []
    assert simulation.method.plan(simulation.state, 0) == ()
    before = {name: t.clone() for name, t in simulation.state["net 1"].items()}
    simulation.advance()
    while simulation.partial_round:
        assert {CLIENTS, PLACE} <= simulation.state.keys()
        planned.append([server_task.name for server_task in simulation.method.plan(simulation.state, 0)])
        simulation.advance()
    assert planned[:-1] == [[f"epoch {epoch}, client {id}"] for epoch in (1, 2) for id in cohort]
    assert planned[-1] == [f"logits of client {id}" for id in cohort]
    assert set(simulation.state) == {"net 1", MEMORY, SERVER}
    for name, t in simulation.state["net 1"].items():
        assert torch.equal(t, before[name]) == name.startswith("extractor.")
    steps = sum(-(-len(rows_of(simulation, id)) // 8) for id in cohort) * 2
    assert {int(t) for name, t in simulation.state[MEMORY].items() if name.startswith("step.")} == {steps}
    assert {name.partition(".")[0] for name in simulation.state[MEMORY]} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
    }


def test_a_client_is_judged_by_the_trunk_behind_its_own_extractor(tmp_path: Path) -> None:
    """The server's last logits of a client's samples are those of the deployed network."""
    simulation = simulate(experiment(rounds=1), tmp_path)
    [line] = run(simulation)
    id = simulation.clients.sample(0, 0)[0]
    deployed, data = simulation.deployment(simulation.clients.capacity(id, 0, 0), id), rows_of(simulation, id)
    assert deployed.net == simulation.method.task.server and not deployed.is_start
    module = deployed.net.build().eval()
    load(module, deployed.params)
    load_norms(module, deployed.statistics or {})
    [(x, _)] = data.plain(len(data))
    torch.testing.assert_close(module(x).detach(), simulation.state[SERVER][str(id)])
    # of nobody there is a network on which the global test set is judged
    assert "accuracy_mean" not in line and "local_accuracy_mean" in line
    for capacity in (1, 0.5, 0.25):
        start = simulation.method.deploy(simulation.state, 1, capacity)
        assert start.is_start
        own = cast(FedGKT, simulation.method).initial(capacity)
        # all start with the extractor of the server's network
        for name, t in simulation.state["net 1"].items():
            if name.startswith("extractor.") and name in start.params:
                assert torch.equal(start.params[name], own[name]) and torch.equal(own[name], t)


def test_a_round_without_answers(tmp_path: Path) -> None:
    simulation = simulate(experiment(), tmp_path)
    assert simulation.method.step(simulation.state, 0, Fold(simulation.state)) is simulation.state


# costs


def test_traffic_and_work_by_hand(tmp_path: Path) -> None:
    """Images of 8x8 with 4 features per pixel; 4 classes. Trunk: two bottlenecks, the second of stride 2."""
    simulation = simulate(experiment(clients=ALL, training={"epochs": 2, "steps": None}), tmp_path)
    first, second = run(simulation)
    sizes = {id: len(rows_of(simulation, id)) for id in range(6)}
    samples = sum(sizes.values())
    assert first["bytes_up"] == second["bytes_up"] == 4 * (4 * 64 + 4 + 1) * samples
    assert (first["bytes_down"], second["bytes_down"]) == (0, 4 * 4 * samples)
    stage1 = 64 * (4 * 4 + 9 * 4 * 4 + 4 * 16 + 4 * 16)
    stage2 = 64 * 16 * 8 + 16 * (9 * 8 * 8 + 8 * 32 + 16 * 32)
    trunk = stage1 + stage2 + 32 * 4
    assert first["server_flops"] == samples * trunk * (2 * 6 + 2)
    assert first["server_steps"] == 2 * sum(-(-n // 8) for n in sizes.values())
    extractor = 64 * 9 * 1 * 4
    clients = {0.5: extractor + stage1 + 16 * 4}
    clients[0.25] = clients[0.5] + 64 * (16 * 4 + 9 * 4 * 4 + 4 * 16)
    work = sum(n * clients[simulation.clients.capacity(id, 0, 0)] * (2 * 6 + 2) for id, n in sizes.items())
    assert first["train_flops"] == second["train_flops"] == work


# what is refused


@pytest.mark.parametrize(
    ("networks", "weights", "message"),
    [
        ([TRUNK, HEAD], (1, 1), "clients: clients of capacity 1 have the server's network. Allowed with"),
        ([TRUNK, TRUNK], (0, 1), "clients: clients of capacity 0.5 have the server's network. Allowed with"),
        (["digits_cnn", HEAD], (0, 1), "model: digits_cnn, capacity 1, has no extractor. Allowed with"),
        ([TRUNK, "resnet8"], (0, 1), "model: resnet8, capacity 0.5, has no extractor. Allowed with"),
        (
            [TRUNK, HEAD | {"channels": 8}],
            (0, 1),
            "model: the extractor of resnet8_gkt, capacity 0.5, has features [8, 32, 32]. Allowed: "
            "[4, 32, 32], as in the server's resnet55_gkt",
        ),
        (
            [TRUNK, HEAD | {"norm": "layer"}],
            (0, 1),
            "model: the extractor of resnet8_gkt, capacity 0.5, is Sequential( (conv): Conv2d(3, 4,",
        ),
    ],
)
def test_networks_that_do_not_fit(networks: list[Any], weights: tuple[int, ...], message: str) -> None:
    clients = Population(count=4, cohort=4, capacities=(1.0, 0.5), weights=weights)
    with pytest.raises(ConfigError) as error:
        bound(*networks).check(9, clients)
    assert str(error.value).startswith(message)


def test_a_client_left_over_does_not_have_the_server_s_capacity() -> None:
    """Seven in blocks of two."""
    clients = Population(count=7, cohort=4, capacities=(0.5, 0.25, 1.0), weights=(1, 2, 0))
    bound(TRUNK, HEAD, DEEP).check(9, clients)
    assert clients.capacity(6, 0, 0) == 0.25


def test_capacities_are_fixed() -> None:
    clients = Population(count=6, cohort=4, capacities=(1.0, 0.5, 0.25), weights=(0, 1, 1), assignment="dynamic")
    with pytest.raises(ConfigError, match=r"clients.assignment: 'dynamic' is not valid. Allowed: 'fixed'"):
        bound(TRUNK, HEAD, DEEP).check(9, clients)
    bound(TRUNK, HEAD, HEAD).check(9, clients)


def test_a_model_that_is_cut_has_narrower_features() -> None:
    with pytest.raises(ConfigError, match=r"has features \[2, 8, 8\]. Allowed: \[4, 8, 8\]"):
        experiment(model=TRUNK, clients={"capacities": [1, 0.5], "weights": [0, 1]})


@pytest.mark.parametrize("options", [{"server": {"epochs": 0}}, {"temperature": 0}, {"weight": "samples"}])
def test_options_that_mean_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        experiment(gkt(**options))


def test_labels_that_a_client_does_not_have_are_masked_as_elsewhere(tmp_path: Path) -> None:
    """The client's own cross entropy alone, not what it distils."""
    simulation = simulate(experiment(gkt(mask="zero")), tmp_path)
    method, visit = cast(FedGKT, simulation.method), visit_of(simulation, 1, 5)
    y = visit.data.samples["y"]
    keeps = y == y[0]
    visit = replace(visit, data=visit.data.picked(keeps.nonzero()[:, 0]))
    logits, teacher = drawn(1, 4), drawn(1, 4, seed=1)
    masked = torch.where(torch.arange(4) == y[0], logits, 0.0)
    loss = method.client_loss(method.loss(visit))(logits, packed(y[:1], teacher))
    torch.testing.assert_close(loss, F.cross_entropy(masked, y[:1]) + method.distilled(teacher, logits))
