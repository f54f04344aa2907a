"""The data from which statistics of norms are collected before an evaluation."""

import numpy as np
import pytest
import torch
from helpers import Perceptron, assert_same, run, simulate, tiny

from rayfl.core import norms
from rayfl.core.seeds import numpy_generator
from rayfl.data.images import Images
from rayfl.data.partition import Shards
from rayfl.data.samples import equal_batches
from rayfl.data.synthetic import Synthetic
from rayfl.engine import collecting
from rayfl.engine.collecting import collections_of

NAMES = ("0.3", "0.2", "0.1")


@pytest.mark.parametrize("kind", ["exact", "cumulative", "pooled", "batch"])
def test_every_kind_of_statistics(kind, tmp_path):
    spec = tiny(rounds=1, method="heterofl", evaluation={"statistics": kind, "clients": False})
    [line] = run(simulate(spec, tmp_path / "a"))
    assert all(0 <= line[f"accuracy_{name}"] <= 1 for name in NAMES)
    [again] = run(simulate(spec, tmp_path / "b"))
    assert again == line


def collected(spec, folder):
    """Return the statistics of the largest network after a round."""
    simulation = simulate(spec, folder)
    simulation.run_round()
    subject = simulation.method.deploy(simulation.state, 1, 0.3)
    return simulation.evaluator.collect({subject.key: subject}, 1)[subject.key]


@pytest.mark.parametrize("kind", ["exact", "cumulative", "pooled"])
def test_statistics_do_not_depend_on_the_batch_size_of_an_evaluation(kind, tmp_path, monkeypatch):
    """A setting of memory. Augmented samples are the same, too."""
    monkeypatch.setattr(collecting, "PIECE", 30)
    monkeypatch.setattr(Synthetic, "preprocessing", Images(crop=2, flip=True))
    found = [
        collected(tiny(evaluation={"statistics": kind, "batch_size": batch}), tmp_path / str(batch))
        for batch in (1, 7, 500)
    ]
    for statistics in found[1:]:
        assert_same(statistics, found[0])


def test_the_evaluated_batches_of_norms_without_statistics_do_not_either(tmp_path):
    """A tail of one sample would be normalised by itself; batches have equal sizes."""
    found = []
    for batch in (1, 7, 500):
        evaluation = {"statistics": "batch", "statistics_batch": 23, "batch_size": batch}
        [line] = run(simulate(tiny(rounds=1, evaluation=evaluation), tmp_path / str(batch)))
        found.append({name: value for name, value in line.items() if "loss" in name or "accuracy" in name})
    assert found[1] == pytest.approx(found[0], rel=1e-6) and found[2] == pytest.approx(found[0], rel=1e-6)
    assert len(found[0]) > 10


@pytest.mark.parametrize("kind", ["exact", "cumulative", "pooled"])
def test_statistics_do_not_depend_on_the_division_into_jobs(kind, tmp_path, monkeypatch):
    found = []
    for piece in (1, 30, 1000):
        monkeypatch.setattr(collecting, "PIECE", piece)
        jobs = collections(simulate(tiny(), tmp_path / f"{piece} jobs"), kind)
        found.append((len(jobs), collected(tiny(evaluation={"statistics": kind}), tmp_path / str(piece))))
    assert found[0][0] > found[1][0] > found[2][0] == 1
    for _, statistics in found[1:]:
        for name, t in statistics.items():
            torch.testing.assert_close(t, found[0][1][name], rtol=1e-6, atol=1e-7)


# the batches


def shards(*sizes):
    return Shards(np.cumsum([0, *sizes]), np.arange(sum(sizes), dtype=np.int32) * 2)


def collections(simulation, kind, batch=5):
    train = simulation.data.train
    return collections_of(train, range(len(train)), kind, batch, 0)


@pytest.mark.parametrize("kind", ["exact", "cumulative", "pooled"])
@pytest.mark.parametrize("clients", [range(6), [1, 4]])
def test_every_row_of_the_clients_is_in_one_batch(kind, clients, monkeypatch):
    monkeypatch.setattr(collecting, "PIECE", 9)
    train = shards(3, 20, 1, 6, 4, 2)
    jobs = collections_of(train, clients, kind, 5, 0)
    rows = np.concatenate([job.rows for job in jobs]).tolist()
    assert sorted(rows) == np.concatenate([train[id] for id in clients]).tolist() != rows
    assert [sum(job.sizes) for job in jobs] == [len(job.rows) for job in jobs]
    assert all(2 <= size <= 5 for job in jobs for size in job.sizes)
    assert [job.augmented is None for job in jobs] == [kind != "pooled"] * len(jobs)


def test_clients_of_one_sample_share_batches():
    """No batch is a client's single sample, of which a norm keeps nothing."""
    for kind in ("exact", "cumulative", "pooled"):
        [job] = collections_of(shards(*[1] * 41), range(41), kind, 20, 0)
        assert sum(job.sizes) == 41 and 10 <= min(job.sizes) <= max(job.sizes) <= 20
        [job] = collections_of(shards(1), [0], kind, 20, 0)
        assert job.sizes == [1]


def test_cumulative_batches_are_of_single_clients():
    """Clients with less than a batch share theirs with the next clients, the last ones with those before."""
    [job] = collections_of(shards(10, 3, 9, 5, 2), range(5), "cumulative", 5, 0)
    assert job.sizes == [5, 5, 4, 4, 4, 4, 3]
    owners = np.digitize(job.rows / 2, [10, 13, 22])
    assert (np.diff(owners) >= 0).all()


def test_heterofls_batches_are_the_shuffled_training_set_s():
    """As a DataLoader's: full batches in the order of a permutation, augmented anew per job."""
    train = shards(1500, 1500, 2000)
    jobs = collections_of(train, range(3), "pooled", 10, 7)
    assert {size for job in jobs for size in job.sizes} == {10}
    expected = numpy_generator(7, "pooled").permutation(train.idx)
    assert np.array_equal(np.concatenate([job.rows for job in jobs]), expected)
    assert [job.augmented for job in jobs] == [0, 2000, 4000]


def test_equal_batches():
    assert [equal_batches(n, 4) for n in (0, 1, 4, 5, 9)] == [[], [1], [4], [3, 2], [3, 3, 3]]
    assert [equal_batches(n, 1) for n in (1, 4, 5)] == [[1], [2, 2], [3, 2]]


@pytest.mark.parametrize("batch_size", [None, 7])
@pytest.mark.parametrize(("kind", "default"), [("exact", 100), ("cumulative", 5), ("pooled", 5), ("batch", 5)])
def test_batches_have_the_samples_of_training_or_a_hundred(kind, default, batch_size, tmp_path):
    evaluation = {"statistics": kind, "statistics_batch": batch_size}
    evaluator = simulate(tiny(evaluation=evaluation), tmp_path).evaluator
    expected = batch_size or default
    assert evaluator._batches == (7, expected)
    sizes = [size for job in evaluator._collections(range(6)) for size in job.sizes]
    assert min(expected, len(evaluator.federation.train.idx)) - 1 <= max(sizes) <= expected


def test_a_single_value_has_no_variance():
    """E.g. the only sample of a client: its square root would divide by almost 0."""
    norm = torch.nn.Sequential(norms.StaticBatchNorm(3))
    sums = norms.collect(norm, [torch.tensor([[1.0, 2.0, 3.0]])])
    for kind in ("exact", "pooled"):
        found = norms.finish(sums, kind)
        assert found["0.running_mean"].tolist() == [1, 2, 3] and found["0.running_var"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", ["exact", "cumulative", "pooled"])
def test_statistics_of_some_clients(kind, tmp_path):
    simulation = simulate(tiny(evaluation={"statistics_clients": 2, "statistics": kind}), tmp_path)
    drawn = []
    for round in range(8):
        ids = simulation.evaluator._asked(round).tolist()
        [job] = simulation.evaluator._collections(ids)
        assert sorted(job.rows) == sorted(row for id in ids for row in simulation.data.train[id])
        drawn.append(ids)
    assert all(len(set(ids)) == 2 for ids in drawn)
    assert len(set(map(tuple, drawn))) > 1


def test_models_without_static_norms_need_no_statistics(tmp_path):
    spec = tiny(model=Perceptron(hidden=(4,)), data={"shape": [1, 1, 2]}, clients={"capacities": [1, 0.5]})
    simulation = simulate(spec, tmp_path)
    simulation.executor.worker.collect = pytest.fail
    assert "accuracy_0.5" in run(simulation)[-1]


@pytest.mark.parametrize("method", ["heterofl", "standalone"])
def test_nothing_is_collected_for_batches(method, tmp_path, monkeypatch):
    monkeypatch.setattr(norms, "collect", lambda *_: pytest.fail("collected"))
    run(simulate(tiny(method=method, evaluation={"statistics": "batch", "local_holdout": 0.2}), tmp_path))
