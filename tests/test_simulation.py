"""The round: what it counts, when and how it evaluates, what nobody may see."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers import NESTED, Perceptron, Pruned, assert_same, run, simulate, tiny

from rayfl import costs, norms
from rayfl.axes import Net
from rayfl.methods import METHODS, Client
from rayfl.models import MODELS, load
from rayfl.seeds import stream
from rayfl.simulation import Simulation, _grouped, _spans
from rayfl.training import ClientData, evaluate

NAMES = ("0.3", "0.2", "0.1")


def rows(simulation, source, index):
    """Some rows of the training or the test set, as data."""
    data = simulation.data
    x, y = (data.arrays.x, data.arrays.y) if source == "train" else (data.arrays.x_test, data.arrays.y_test)
    index = np.asarray(index)
    return ClientData(torch.from_numpy(x[index]), torch.from_numpy(y[index]), data.classes, data.preprocess)


def deployed(simulation, capacity):
    """The network that a device of this capacity runs, with exact statistics of all clients' data."""
    d = simulation.method.deploy(simulation.state, simulation.round, capacity)
    net = d.model.build(d.net)
    load(net, d.params)
    datas = [rows(simulation, "train", simulation.data.train[id]) for id in range(simulation.population.count)]
    batches = (x for data in datas for x, _ in data.in_order(simulation.evaluation.batch_size))
    norms.load(net, norms.finish(norms.collect(net, batches), "exact"))
    return net


# training


def test_losses_and_steps_are_those_of_the_clients(tmp_path):
    """In batches of 5, for 2 epochs; the loss is the mean over samples."""
    spec = tiny(method="heterofl", training={"steps": None, "epochs": 2}, partition={"duplicates": "merge"})
    simulation = simulate(spec, tmp_path)
    method, state = simulation.method, simulation.state
    losses, samples, steps = [], 0, 0
    for id in simulation.population.sample(0, 0):
        client = Client(id, simulation.population.capacity(id, 0, 0))
        selection = method.select(state, 0, client, 0)
        data = rows(simulation, "train", simulation.data.train[id])
        payload = method.extract(state, selection)
        update = method.local_update(payload, selection, client, data, 0, stream(0, "local", 0, id))
        losses.append(update.metrics["train_loss"])
        samples += 2 * len(data)
        steps += 2 * -(-len(data) // 5)
    line = simulation.run_round()
    assert line["train_loss"] == pytest.approx(sum(losses) / samples)
    assert (line["steps"], line["round"], line["clients"]) == (steps, 1, 4)
    assert "train_samples" not in line


def test_expected_costs_are_samples_times_operations(tmp_path):
    simulation = simulate(tiny(method="heterofl", clients={"cohort": 6}), tmp_path)
    sizes = simulation.data.train.sizes
    for capacity, (key, (selection, clients)) in zip((0.3, 0.2, 0.1), simulation._cohort().items(), strict=True):
        job = simulation._training_job(key, selection, clients)
        samples = sum(min(sizes[id], 10) for id, _ in clients)
        assert job.cost == samples * costs.flops(simulation.method.task.model, Net(capacity))
        ids = [id for id, _ in clients]
        assert job.about == f"clients {ids} with {[int(sizes[id]) for id in ids]} samples, round 1"


def test_clients_of_one_selection_are_chunked_in_order(tmp_path):
    simulation = simulate(tiny(clients={"cohort": 6}, run={"chunk": 4}, method="heterofl"), tmp_path)
    seen = []
    original = simulation.executor.worker.train
    simulation.executor.worker.train = lambda shared, job: seen.append(job[1][1]) or original(shared, job)
    simulation.run_round()
    assert seen == [[(0, 0.3), (1, 0.3)], [(2, 0.2), (3, 0.2)], [(4, 0.1), (5, 0.1)]]
    seen.clear()
    simulation = simulate(tiny(clients={"cohort": 6}, run={"chunk": 4}, method="fedavg"), tmp_path)
    original = simulation.executor.worker.train
    simulation.executor.worker.train = lambda shared, job: seen.append(job[1][1]) or original(shared, job)
    simulation.run_round()
    assert [[id for id, _ in clients] for clients in seen] == [[0, 1, 2, 3], [4, 5]]


# evaluation


def test_the_last_round_is_always_evaluated(tmp_path):
    lines = run(simulate(tiny(rounds=5, evaluation={"every": 2}), tmp_path))
    assert [line["round"] for line in lines if "accuracy_mean" in line] == [2, 4, 5]
    assert [line["round"] for line in lines if "local_accuracy_mean" in line] == [2, 4, 5]


def test_a_step_ends_with_an_evaluation(tmp_path):
    simulation = simulate(tiny(rounds=5, evaluation={"every": 2}), tmp_path)
    lines = simulation.step()
    assert len(lines) <= 2
    while not simulation.done:
        lines += simulation.step()
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    assert simulation.step() == []


def test_accuracy_of_every_capacity_by_hand(tmp_path):
    simulation = simulate(tiny(method="heterofl", training={"steps": 8}), tmp_path)
    line = run(simulation)[-1]
    for source, index, prefix in (
        ("test", range(24), ""),
        ("train", simulation.data.validation, "validation_"),
    ):
        data = rows(simulation, source, index)
        found = [line[f"{prefix}accuracy_{name}"] for name in NAMES]
        by_hand = [evaluate(deployed(simulation, float(name)), data, 7).correct / len(data) for name in NAMES]
        assert found == by_hand
        assert line[f"{prefix}accuracy_mean"] == pytest.approx(sum(by_hand) / 3)
        assert line[f"{prefix}accuracy_worst"] == min(by_hand)


@pytest.mark.parametrize("fill", ["none", "zero", "neg_inf"])
def test_accuracy_of_every_client_by_hand(fill, tmp_path):
    """Two of four classes a client: with their logits masked, it can only do better."""
    simulation = simulate(tiny(method="heterofl", evaluation={"label_mask": fill}), tmp_path)
    line = run(simulation)[-1]
    nets = {name: deployed(simulation, float(name)) for name in NAMES}
    by_hand = {}
    for id in range(6):
        net = nets[f"{simulation.population.capacity(id, 0, 0):g}"]
        data = rows(simulation, "test", simulation.data.test[id])
        present = rows(simulation, "train", simulation.data.train[id]).present
        assert present.sum() <= 2
        result = evaluate(net, data, 7, fill=fill, present=present)
        by_hand[id] = result.correct / result.count
    assert simulation.client_accuracy() == by_hand
    assert line["local_accuracy_mean"] == pytest.approx(np.mean(list(by_hand.values())))
    assert line["local_accuracy_worst"] == min(by_hand.values())
    assert line["local_accuracy_0.2"] == pytest.approx((by_hand[2] + by_hand[3]) / 2)


@pytest.mark.parametrize("method", ["standalone", {"name": "lg_fedavg", "size": "own"}])
def test_accuracy_of_clients_with_networks_of_their_own(method, tmp_path):
    """Theirs, with statistics of their own data; who was never drawn runs what it would start from."""
    simulation = simulate(tiny(method=method, rounds=1, clients={"cohort": 3}), tmp_path)
    [line] = run(simulation)
    assert len(simulation.carries.files) == 3
    for id, accuracy in simulation.client_accuracy().items():
        capacity, carry = simulation.population.capacity(id, 0, 0), simulation.carries.get(id)
        net = deployed(simulation, capacity)
        if carry is not None:
            d = simulation.method.deploy(simulation.state, 1, capacity, Client(id, capacity, carry))
            load(net, d.params)
            own = rows(simulation, "train", simulation.data.train[id])
            norms.load(net, norms.finish(norms.collect(net, (x for x, _ in own.in_order(7))), "exact"))
        data = rows(simulation, "test", simulation.data.test[id])
        assert accuracy == evaluate(net, data, 7).correct / len(data)


def test_heterofls_local_and_global_by_hand(tmp_path):
    """Local: the server's network on every client's own split, absent classes masked; its mean over samples.
    Global: the same network on the whole test set."""
    spec = tiny(method="heterofl", partition={"labels": 2}, evaluation={"local": "server", "label_mask": "zero"})
    simulation = simulate(spec, tmp_path)
    line = run(simulation)[-1]
    net, correct, count = deployed(simulation, 0.3), 0, 0
    for id in range(6):
        data = rows(simulation, "test", simulation.data.test[id])
        present = rows(simulation, "train", simulation.data.train[id]).present
        result = evaluate(net, data, 7, fill="zero", present=present)
        assert simulation.client_accuracy()[id] == result.correct / result.count
        correct, count = correct + result.correct, count + result.count
    assert line["local_accuracy_samples"] == pytest.approx(correct / count)
    assert line["accuracy_server"] == line["accuracy_0.3"]


def test_what_a_client_keeps_for_its_training_alone_is_no_deployment_of_its_own(tmp_path):
    """SCAFFOLD's first round is FedAvg's, whatever its clients keep: so are the accuracies of its clients."""
    found = []
    for method in ("fedavg", "scaffold"):
        simulation = simulate(tiny(method={"name": method, "weight": "uniform"}, rounds=1), tmp_path / method)
        run(simulation)
        found.append(simulation.client_accuracy())
    assert simulation.carries.files and found[0] == found[1]


def test_clients_without_test_data_are_passed_over(tmp_path):
    """6 clients, 4 test samples, of which each client would get 4 // 6."""
    spec = tiny(data={"test_samples": 4}, partition="iid", rounds=1)
    [line] = run(simulate(spec, tmp_path))
    assert "accuracy_mean" in line and "local_accuracy_mean" not in line


def test_clients_are_not_evaluated_unless_asked(tmp_path):
    simulation = simulate(tiny(rounds=1, evaluation={"clients": False, "holdout": 0}), tmp_path)
    [line] = run(simulation)
    assert not [name for name in line if name.startswith(("local", "validation"))]
    assert simulation.client_accuracy() == {}


@pytest.mark.parametrize("kind", ["exact", "cumulative", "pooled", "batch"])
def test_every_kind_of_statistics(kind, tmp_path):
    spec = tiny(rounds=1, method="heterofl", evaluation={"statistics": kind, "clients": False})
    [line] = run(simulate(spec, tmp_path / "a"))
    assert all(0 <= line[f"accuracy_{name}"] <= 1 for name in NAMES)
    [again] = run(simulate(spec, tmp_path / "b"))
    assert again == line


@pytest.mark.parametrize("kind", ["exact", "cumulative"])
def test_statistics_do_not_depend_on_how_clients_are_grouped(kind, tmp_path, monkeypatch):
    simulation = simulate(tiny(evaluation={"statistics": kind}, training={"steps": 5}), tmp_path)
    simulation.run_round()
    d = simulation.method.deploy(simulation.state, 1, 0.3)
    found = []
    for piece in (1, 30, 1000):
        monkeypatch.setattr(Simulation, "_piece", piece)
        pieces = simulation._statistics_pieces()
        groups = [group for _, (_, group, _) in pieces]
        assert [id for group in groups for id in group] == list(range(6))
        nets = {d.key: (d.model, d.net)}
        [statistics] = simulation._collect(nets, {d.key: pieces}.get, lambda key: d).values()
        found.append((len(groups), statistics))
    assert [n for n, _ in found] == [6, 2, 1]
    for _, statistics in found[1:]:
        for name, t in statistics.items():
            torch.testing.assert_close(t, found[0][1][name], rtol=1e-6, atol=1e-7)


def test_statistics_of_some_clients(tmp_path):
    simulation = simulate(tiny(evaluation={"statistics_clients": 2}), tmp_path)
    drawn = []
    for round in range(8):
        simulation.round = round
        drawn.append([id for _, (_, group, _) in simulation._statistics_pieces() for id in group])
    assert all(len(set(ids)) == 2 for ids in drawn)
    assert len(set(map(tuple, drawn))) > 1


def test_models_without_static_norms_need_no_statistics(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "perceptron", Perceptron)
    data = {"shape": [1, 1, 2]}
    simulation = simulate(
        tiny(model={"name": "perceptron", "hidden": [4]}, data=data, clients={"capacities": [1, 0.5]}),
        tmp_path,
    )
    simulation.executor.worker.collect = pytest.fail
    assert "accuracy_0.5" in run(simulation)[-1]


def test_densities_of_masked_networks_by_hand(tmp_path, monkeypatch):
    """Of 10 rows of 9 weights in conv1, at 64 pixels, and 39 of 80 in hidden: all, 6 and 26, or 3 and 13 by capacity;
    of clients' own networks 10 - k and 39 - 3k for a client k who has trained."""
    monkeypatch.setitem(METHODS, "pruned", Pruned)
    simulation = simulate(tiny(method="pruned", rounds=1), tmp_path / "own")
    [own] = run(simulation)
    monkeypatch.setattr(Pruned, "is_personal", False)
    [line] = run(simulate(tiny(method="pruned", rounds=1), tmp_path / "shared"))
    whole = (90 + 10) + (20 * 90 + 20) + 2 * (10 + 20) + (39 * 80 + 39) + (4 * 39 + 4)
    assert whole == costs.parameters(simulation.method.task.model, Net(0.3))
    macs = 90 * 64 + 20 * 90 * 16 + 39 * 80 + 4 * 39
    left = {"0.3": (10, 39), "0.2": (6, 26), "0.1": (3, 13)}
    for name, (conv, hidden) in left.items():
        gone = 9 * (10 - conv), 80 * (39 - hidden)
        assert line[f"density_{name}"] == pytest.approx((whole - sum(gone)) / whole)
        assert line[f"macs_share_{name}"] == pytest.approx((macs - 64 * gone[0] - gone[1]) / macs)
    trained = set(simulation.carries.files)
    assert len(trained) == 4
    kept = [
        (10 - k, 39 - 3 * k) if k in trained else left[f"{simulation.population.capacity(k, 0, 0):g}"] for k in range(6)
    ]
    shares = np.array(kept) / [10, 39]
    assert own["local_density"] == pytest.approx(shares.mean())
    assert [own["local_density_conv1"], own["local_density_hidden"]] == pytest.approx(list(shares.mean(0)))
    assert densities(own) == {"local_density", "local_density_conv1", "local_density_hidden"}
    assert densities(line) == {f"{share}_{name}" for share in ("density", "macs_share") for name in NAMES}


def densities(line):
    return {name for name in line if "density" in name or name.startswith("macs")}


def test_dense_networks_have_no_densities(tmp_path):
    [line] = run(simulate(tiny(method="standalone", rounds=1), tmp_path))
    assert not densities(line)


# what nobody may see


@pytest.mark.parametrize("kind", ["exact", "pooled"])
def test_nobody_trains_on_validation_or_test_data(kind, tmp_path):
    """Other images there change no bit of the state, and no accuracy of the other split."""
    spec = tiny(method="heterofl", evaluation={"statistics": kind})
    arrays = spec.data.load()
    plain = spec.simulation(arrays, tmp_path / "a")
    assert len(plain.data.validation) == 8
    assert not set(plain.data.validation) & set(plain.data.train.idx)
    assert len(set(plain.data.train.idx)) == len(plain.data.train.idx)
    noisy = arrays.x.copy()
    noisy[plain.data.validation] = 255 - noisy[plain.data.validation]
    changed = dataclasses.replace(arrays, x=noisy, x_test=255 - arrays.x_test)
    other = spec.simulation(changed, tmp_path / "b")
    before, after = run(plain), run(other)
    assert_same(plain.state, other.state)
    assert [line["train_loss"] for line in before] == [line["train_loss"] for line in after]
    only_validation = spec.simulation(dataclasses.replace(arrays, x=noisy), tmp_path / "c")
    line = run(only_validation)[-1]
    assert {k: v for k, v in line.items() if not k.startswith("validation")} == {
        k: v for k, v in before[-1].items() if not k.startswith("validation")
    }


def test_seeds_decide_everything(tmp_path):
    lines = [run(simulate(tiny(seed=seed), tmp_path / str(i))) for i, seed in enumerate((0, 0, 1))]
    assert lines[0] == lines[1] != lines[2]


def test_the_global_random_state_decides_nothing(tmp_path):
    lines = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        lines.append(run(simulate(tiny(method="fedrolex"), tmp_path / str(seed))))
    assert lines[0] == lines[1]


# the parts


def test_spans_and_groups():
    assert _spans(10, 4) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert _spans(0, 4) == []
    sizes = np.array([3, 3, 5, 1, 1])
    assert _grouped(range(5), sizes, 6) == [(6, [0, 1]), (6, [2, 3]), (1, [4])]
    assert _grouped([4, 2], sizes, 1) == [(1, [4]), (5, [2])]


def test_every_method_evaluates_with_every_split(tmp_path):
    for name in METHODS:
        line = run(simulate(tiny(**NESTED.get(name, {}) | {"method": name, "rounds": 1}), tmp_path / name))[-1]
        assert {"accuracy_mean", "validation_accuracy_mean", "local_accuracy_mean"} <= line.keys()
