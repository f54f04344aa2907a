"""The data from which statistics of norms are collected before an evaluation."""

import pytest
import torch
from helpers import Perceptron, run, simulate, tiny

from rayfl.core import norms
from rayfl.evaluation import Evaluation

NAMES = ("0.3", "0.2", "0.1")


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
    subject = simulation.method.deploy(simulation.state, 1, 0.3)
    found = []
    for piece in (1, 30, 1000):
        monkeypatch.setattr(Evaluation, "piece", piece)
        groups = [work.clients for _, work in simulation.evaluator._pieces(1)]
        assert [id for group in groups for id in group] == list(range(6))
        [statistics] = simulation.evaluator.collect({subject.key: subject}, 1).values()
        found.append((len(groups), statistics))
    assert [n for n, _ in found] == [6, 2, 1]
    for _, statistics in found[1:]:
        for name, t in statistics.items():
            torch.testing.assert_close(t, found[0][1][name], rtol=1e-6, atol=1e-7)


def test_pooled_statistics_are_of_all_clients_rows_each_once(tmp_path):
    simulation = simulate(tiny(evaluation={"statistics": "pooled"}), tmp_path)
    pieces = simulation.evaluator._pieces(0)
    total = len(simulation.data.train.idx)
    assert [i for _, work in pieces for i in range(work.pooled.start, work.pooled.stop)] == list(range(total))
    assert [n for n, _ in pieces] == [work.pooled.stop - work.pooled.start for _, work in pieces]
    assert all(n % 5 == 0 for n, _ in pieces[:-1])  # whole training batches


def test_statistics_of_some_clients(tmp_path):
    simulation = simulate(tiny(evaluation={"statistics_clients": 2}), tmp_path)
    drawn = [[id for _, work in simulation.evaluator._pieces(round) for id in work.clients] for round in range(8)]
    assert all(len(set(ids)) == 2 for ids in drawn)
    assert len(set(map(tuple, drawn))) > 1


def test_models_without_static_norms_need_no_statistics(tmp_path):
    spec = tiny(model=Perceptron(hidden=(4,)), data={"shape": [1, 1, 2]}, clients={"capacities": [1, 0.5]})
    simulation = simulate(spec, tmp_path)
    simulation.executor.worker.collect = pytest.fail
    assert "accuracy_0.5" in run(simulation)[-1]


@pytest.mark.parametrize(("kind", "batch"), [("exact", 7), ("cumulative", 5), ("pooled", 5)])
def test_batch_means_are_over_training_batches(kind, batch, tmp_path):
    evaluator = simulate(tiny(evaluation={"statistics": kind}), tmp_path).evaluator
    found = [work for _, work in evaluator._pieces(0)] + [evaluator._collect_own(0)]
    assert {work.batch_size for work in found} == {batch}


def test_pooled_batches_are_shuffled_rows(tmp_path):
    simulation = simulate(tiny(evaluation={"statistics": "pooled"}), tmp_path)
    worker, [(_, job), *_] = simulation.executor.worker, simulation.evaluator._pieces(0)
    [(x, _)] = worker._rows("train", simulation.data.pooled(0)[job.pooled]).in_order(1000)
    assert torch.equal(torch.cat(list(worker._batches(job))), x)


@pytest.mark.parametrize("method", ["heterofl", "standalone"])
def test_nothing_is_collected_for_batches(method, tmp_path, monkeypatch):
    monkeypatch.setattr(norms, "collect", lambda *_: pytest.fail("collected"))
    run(simulate(tiny(method=method, evaluation={"statistics": "batch", "local_holdout": 0.2}), tmp_path))
