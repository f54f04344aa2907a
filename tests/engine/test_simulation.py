"""The round: who trains on what, what it counts, what goes wrong, and what decides the result."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers import Troubled, assert_same, run, simulate, tiny

from rayfl.clients import Population
from rayfl.core.net import Net
from rayfl.core.seeds import stream
from rayfl.core.tensors import leaves, nbytes
from rayfl.engine.checked import MethodFailed
from rayfl.engine.files import checksum
from rayfl.engine.simulation import RefusedUpdate, Simulation
from rayfl.methods.base import Visit
from rayfl.metrics import EVALUATED

# training


def test_losses_and_steps_are_those_of_the_clients(tmp_path):
    """In batches of 5, for 2 epochs; the loss is the mean over samples."""
    spec = tiny(method="heterofl", training={"steps": None, "epochs": 2}, partition={"duplicates": "merge"})
    simulation = simulate(spec, tmp_path)
    method, state = simulation.method, simulation.state
    losses, samples, steps = [], 0, 0
    for selection, clients in simulation.cohort().values():
        for client in clients:
            assert (client.round, client.capacity) == (0, simulation.clients.capacity(client.id, 0, 0))
            data = simulation.executor.worker._rows("train", simulation.data.train[client.id])
            payload = method.extract(state, selection)
            seed = stream(0, "local", 0, client.id)
            update = method.local_update(payload, Visit(client, selection, data, None, seed))
            losses.append(update.metrics["train_loss"])
            samples += 2 * len(data)
            steps += 2 * -(-len(data) // 5)
    line = simulation.run_round()
    assert line["train_loss"] == pytest.approx(sum(losses) / samples)
    assert (line["steps"], line["round"], line["clients"]) == (steps, 1, 4)
    assert "train_samples" not in line


def test_a_cohort_is_grouped_by_version_and_selection(tmp_path):
    simulation = simulate(tiny(method="heterofl", clients={"assignment": "dynamic"}), tmp_path)
    for round in range(3):
        simulation.round = round
        cohort = simulation.cohort()
        for key, (selection, clients) in cohort.items():
            assert key == (round, selection.key) and [client.id for client in clients] == sorted(c.id for c in clients)
        drawn = {client.id: client.capacity for _, clients in cohort.values() for client in clients}
        assert sorted(drawn) == simulation.clients.sample(0, round)
        assert drawn == {id: simulation.clients.capacity(id, 0, round) for id in drawn}


def test_expected_costs_are_operations_of_samples_and_calls_of_steps(tmp_path):
    simulation, seen = simulate(tiny(method="heterofl", clients={"cohort": 6}, run={"chunk": 2}), tmp_path), []
    sizes, original = simulation.data.train.sizes, simulation.executor.map
    simulation.executor.map = lambda verb, jobs, shared: seen.extend(jobs) or original(verb, jobs, shared)
    simulation.train()
    for job, capacity, ids in zip(seen, (0.3, 0.2, 0.1), ([0, 1], [2, 3], [4, 5]), strict=True):
        samples = sum(min(sizes[id], 10) for id in ids)
        steps = 2 * len(ids)
        assert job.cost == samples * Net(simulation.method.task.model, capacity).macs + steps * 1e7
        about = f"clients {ids} with {[int(sizes[id]) for id in ids]} samples, round 1, local_update of method heterofl"
        assert job.about == about


def trained_together(experiment, folder) -> list[list[int]]:
    """The clients of every job of a round."""
    simulation, seen = simulate(experiment, folder), []
    worker = simulation.executor.worker
    original = worker.train
    worker.train = lambda broadcast, job: seen.append([client.id for client in job.clients]) or original(broadcast, job)
    simulation.train()
    return seen


def test_clients_of_one_selection_are_chunked_in_order(tmp_path):
    sections = {"clients": {"cohort": 6}, "run": {"chunk": 4}}
    assert trained_together(tiny(method="heterofl", **sections), tmp_path / "a") == [[0, 1], [2, 3], [4, 5]]
    assert trained_together(tiny(method="fedavg", **sections), tmp_path / "b") == [[0, 1, 2, 3], [4, 5]]


# rounds


def test_the_last_round_is_always_evaluated(tmp_path):
    lines = run(simulate(tiny(rounds=5, evaluation={"every": 2}), tmp_path))
    for metric in (EVALUATED, "accuracy_mean", "local_accuracy_mean"):
        assert [line["round"] for line in lines if metric in line] == [2, 4, 5]


def test_a_step_ends_with_an_evaluation(tmp_path):
    simulation = simulate(tiny(rounds=5, evaluation={"every": 2}), tmp_path)
    lines = simulation.step()
    assert len(lines) <= 2
    while not simulation.done:
        lines += simulation.step()
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    assert simulation.step() is None


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


@pytest.mark.parametrize("kind", ["exact", "pooled"])
def test_nobody_trains_on_validation_or_test_data(kind, tmp_path):
    """Other images there change no bit of the state, and no accuracy of the other split."""
    spec = tiny(method="heterofl", evaluation={"statistics": kind, "local_holdout": 0.2})
    arrays = spec.data.arrays()
    plain = Simulation(spec, arrays, tmp_path / "a")
    train, held = set(plain.data.train.idx), [plain.data.validation, plain.data.local_validation.idx]
    assert len(plain.data.validation) == 8 and len(plain.data.local_validation.idx) > 5
    assert len(train) == len(plain.data.train.idx) and not train & set(np.concatenate(held))
    before = run(plain)
    for prefix, rows in (("validation", held[0]), ("local_validation", held[1])):
        x = arrays.train["x"].copy()
        x[rows] = 255 - x[rows]
        other = Simulation(spec, dataclasses.replace(arrays, train=arrays.train | {"x": x}), tmp_path / prefix)
        after = run(other)
        assert_same(plain.state, other.state)
        left = [
            [{k: v for k, v in line.items() if not k.startswith(prefix)} for line in lines] for lines in (before, after)
        ]
        assert left[0] == left[1] and before[-1] != after[-1]
    test = arrays.test | {"x": 255 - arrays.test["x"]}
    other = Simulation(spec, dataclasses.replace(arrays, test=test), tmp_path / "test")
    after = run(other)
    assert_same(plain.state, other.state)
    for line, again in zip(before, after, strict=True):
        same = ["train_loss", *(name for name in line if "validation" in name)]
        assert [line[name] for name in same] == [again[name] for name in same]
    assert before[-1] != after[-1]


# trouble


def troubled(trouble, client=0, **sections):
    return tiny(method=Troubled(client=client, trouble=trouble), clients={"cohort": 6}, **sections)


def test_a_failing_client_is_named(tmp_path):
    simulation = simulate(troubled("raise"), tmp_path)
    samples = len(simulation.data.train[0])
    with pytest.raises(MethodFailed) as error:
        simulation.run_round()
    message = str(error.value)
    assert message.startswith(
        "method troubled, local_update, client 0: ArithmeticError: on purpose "
        f"(round 1, capacity 0.3, {samples} samples)\nTraceback (most recent call last):\n"
    )
    assert message.rstrip().endswith("ArithmeticError: on purpose")


@pytest.mark.parametrize(("trouble", "reason"), [("nan", "not finite"), ("inf", "not finite"), ("explode", "norm ")])
@pytest.mark.parametrize("chunk", [1, 6])
def test_a_bad_update_is_refused_and_the_others_are_averaged(trouble, reason, chunk, tmp_path, monkeypatch):
    """As if the client had not been drawn, to rounding; but what it cost is counted."""
    spec = troubled(trouble, run={"chunk": chunk}, evaluation={"every": 5})
    with_it = simulate(spec, tmp_path / "with")
    line = with_it.run_round()
    assert line["refused"] == 1 and line["clients"] == 5
    assert line["refusals"].startswith(f"client 0: {reason}")
    assert set(with_it.client_states.files) == {1, 2, 3, 4, 5}
    without = simulate(spec, tmp_path / "without")
    monkeypatch.setattr(Population, "sample", lambda self, seed, round: [1, 2, 3, 4, 5])
    line_without = without.run_round()
    for (path, one), (_, other) in zip(leaves(with_it.state), leaves(without.state), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7, msg=path)
    assert line["train_loss"] == pytest.approx(line_without["train_loss"], rel=1e-6)
    assert line["bytes_down"] > line_without["bytes_down"] and line["train_flops"] > line_without["train_flops"]


def test_a_round_that_refuses_everything_changes_nothing(tmp_path):
    one = {"count": 1, "cohort": 1, "capacities": [0.3]}
    simulation = simulate(
        tiny(method=Troubled(client=0, trouble="nan"), clients=one, partition={"labels": 4}), tmp_path
    )
    before = checksum(simulation.state)
    line = simulation.run_round()
    assert checksum(simulation.state) == before
    assert line["refused"] == 1 and "clients" not in line


def test_a_refused_update_counts_with_its_size_before_the_transforms(tmp_path):
    one = {"count": 1, "cohort": 1, "capacities": [0.3]}
    spec = {"clients": one, "partition": {"labels": 4}, "updates": {"transforms": [{"name": "topk", "share": 0.01}]}}
    good, bad = (tiny(method=Troubled(client=client, trouble="nan"), **spec) for client in (1, 0))
    simulation = simulate(bad, tmp_path / "bad")
    line = simulation.run_round()
    assert line["refused"] == 1 and line["bytes_up"] == nbytes(simulation.state["params"])
    assert simulate(good, tmp_path / "good").run_round()["bytes_up"] < 0.03 * line["bytes_up"]


def test_a_bad_update_stops_the_run_if_asked(tmp_path):
    with pytest.raises(RefusedUpdate) as error:
        simulate(troubled("nan", client=4, updates={"policy": "stop"}), tmp_path).run_round()
    assert str(error.value) == (
        "round 1: the update of client 4 is not finite. "
        "Hint: lower training.lr, or set updates.policy: refuse to continue without it"
    )
