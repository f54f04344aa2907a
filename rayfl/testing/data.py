"""Contract tests of data sets, partition rules and scores."""

import functools
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayfl.config import component
from rayfl.core.seeds import numpy_generator, torch_generator
from rayfl.core.tensors import as_tensor
from rayfl.data import DATASETS_KIND, PARTITIONS_KIND
from rayfl.data.base import DataSet
from rayfl.data.memory import InMemory
from rayfl.data.partition.base import NOBODY, Labels, Partition, partition
from rayfl.data.samples import ClientData
from rayfl.data.scores import SCORES_KIND, Score
from rayfl.metrics import SPLITS, named
from rayfl.testing.tiny import assert_same, run, simulate, tiny

SAMPLES = 12
"""Number of samples used by a test."""


@functools.cache
def _of_targets(targets: str) -> Mapping[str, Any]:
    """Return the sections of a tiny experiment with these targets."""
    if targets == "class":
        return {}
    x = numpy_generator(0, "test:table").standard_normal((300, 5))
    y = x[:, :3] if targets == "numbers" else (x[:, :3] > 0).astype(int)
    return {"data": InMemory(x, y, target=targets), "model": "mlp", "partition": "iid"}


class DataContract:
    """A subclass sets `data`, and `model` if its samples are not images."""

    data: Any
    """Data set, as in a `data:` section: a name, a mapping with options, or an object."""
    model: Any = "liang_mlp"
    """Model that supports the data set."""

    def set(self) -> DataSet:
        return DATASETS_KIND.read(self.data, "data")

    def some(self) -> ClientData:
        """Return the first samples."""
        data = self.set()
        train = data.arrays().train
        samples = {name: as_tensor(array[:SAMPLES]) for name, array in train.items()}
        return ClientData(samples, data.prepare.fitted(train), data.goal.fitted(train))

    def test_its_arrays_are_checked_and_always_the_same(self) -> None:
        data = self.set()
        arrays, again = data.arrays(), pickle.loads(pickle.dumps(data)).arrays()
        assert pickle.loads(pickle.dumps(data)) == data
        for split, other in ((arrays.train, again.train), (arrays.test, again.test)):
            assert split.keys() == data.columns.keys()
            for name, array in split.items():
                assert np.array_equal(array, other[name], equal_nan=True), f"{name}: loading again returns other values"

    def test_batches_are_what_it_offers(self) -> None:
        data, some = self.set(), self.some()
        [(x, y), *_] = some.in_order(5)
        assert len(x) == len(y) == min(5, len(some))
        if data.goal.targets == "class":
            _, labels = data.goal.rows(torch.zeros(*y.shape, 1), y)
            assert len(labels) and 0 <= labels.min() and labels.max() < data.goal.classes
        if x.is_floating_point():
            assert x.isfinite().all()
        offers = data.offers
        for kind in ("input", "series"):
            assert tuple(offers.get(kind, x.shape[1:])) == tuple(x.shape[1:]), f"`offers` has another {kind}"
        assert offers.get("variables", x.shape[1]) == x.shape[1], "`offers` has another number of variables"
        assert x.shape[1] <= offers.get("length", x.shape[1]), "`offers` has another length"
        assert offers.get("classes", data.goal.classes) == data.goal.classes

    def test_batches_follow_from_their_generator(self) -> None:
        """Training batches are shuffled and augmented by it; evaluation batches are equal for any batch size."""
        some = self.some()
        for of in (lambda: some.in_order(5), lambda: some.batches(4, 5, torch_generator(0, "test:batches"))):
            first, second = list(of()), list(of())
            assert all(
                torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True)
            )
        cut = [[one for part in parts for one in part] for parts in zip(*some.in_order(5), strict=True)]
        [whole] = some.in_order(len(some))
        for of_cut, of_whole in zip(cut, whole, strict=True):
            for one, other in zip(of_cut, of_whole, strict=True):
                # sequences are padded to the longest of their batch
                torch.testing.assert_close(one, other[: len(one)] if one.dim() == 1 else other)

    def test_its_labels_say_who_gets_what(self) -> None:
        data = self.set()
        for split in (data.arrays().train, data.arrays().test):
            labels = data.goal.labels(split)
            assert labels.dtype == np.int64 and labels.shape == (len(next(iter(split.values()))),)
            assert 0 <= labels.min() and labels.max() < data.goal.kinds

    def test_a_run_learns_from_it(self, tmp_path: Path) -> None:
        clients = {"count": 3, "cohort": 2, "capacities": [1.0, 0.5]}
        given = {"data": self.set(), "model": self.model, "partition": "iid", "clients": clients, "method": "heterofl"}
        simulation = simulate(tiny(**given, rounds=1), tmp_path)
        [line] = run(simulation)
        assert math.isfinite(line["train_loss"]) and line["refused"] == 0
        for score in simulation.data.goal.scores:
            for split in SPLITS:
                if split != "client_validation":
                    assert math.isfinite(line[named(score.label, "mean", split)])


class PartitionContract:
    """A subclass sets `partition`, and `labels` if it needs its own."""

    partition: Any
    """Partition, as in a `partition:` section: a name, a mapping with options, or an object."""
    clients: tuple[int, ...] = (5, 10)
    """Tested numbers of clients."""

    def rule(self) -> Partition:
        return PARTITIONS_KIND.read(self.partition, "partition")

    def labels(self) -> Labels:
        """Return labels of 400 training and 100 test samples: 10 classes of different frequency, 20 natural users."""
        generator = numpy_generator(0, "test:labels")
        train, test = (np.minimum(generator.integers(12, size=n), 9) for n in (400, 100))
        return Labels(train, test, generator.integers(20, size=400), 10)

    def test_nobody_shares_a_sample_and_nobody_has_none(self) -> None:
        rule, labels = self.rule(), self.labels()
        for clients in self.clients:
            train, test = partition(rule, labels, clients, seed=0)
            assert len(train) == len(test) == clients and (train.sizes > 0).all()
            source = rule.tested_on(labels)
            tested = labels.test if source == "test" else labels.train
            for shards, y in ((train, labels.train), (test, tested)):
                assert len(np.unique(shards.idx)) == len(shards.idx), "two clients share a sample"
                assert not len(shards.idx) or (0 <= shards.idx.min() and shards.idx.max() < len(y))
            if source == "train":
                assert not set(train.idx.tolist()) & set(test.idx.tolist()), "a client is tested on training samples"

    def test_it_follows_from_the_seed(self) -> None:
        """The global generators have no influence, and the labels stay unchanged."""
        rule, labels, found = self.rule(), self.labels(), []
        before = labels.train.copy(), labels.test.copy()
        for noise in (1, 2):
            np.random.seed(noise)
            torch.manual_seed(noise)
            train, test = partition(pickle.loads(pickle.dumps(rule)), labels, self.clients[-1], seed=3)
            found.append({"train": torch.from_numpy(train.holders), "test": torch.from_numpy(test.holders)})
            found[-1] |= {"rows": torch.from_numpy(train.idx), "test rows": torch.from_numpy(test.idx)}
        assert_same(*found)
        assert np.array_equal(before[0], labels.train) and np.array_equal(before[1], labels.test)

    def test_owners_are_clients_or_nobody(self) -> None:
        labels = self.labels()
        for owner in self.rule().owners(labels, self.clients[0], numpy_generator(0, "test:owners")):
            assert owner.ndim == 1 and owner.min() >= NOBODY and owner.max() < self.clients[0]

    def test_a_file_may_name_it(self) -> None:
        rule = self.rule()
        assert PARTITIONS_KIND.read(rule.model_dump(mode="json"), "partition") == rule


class ScoreContract:
    """A subclass sets `score`."""

    score: Any
    """Score, as in `evaluation.scores`: a name, a mapping with options, or an object."""

    def made(self) -> Score:
        return SCORES_KIND.read(self.score, "evaluation.scores")

    def answers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return predictions [60, 4] and targets, [60] classes or [60, 4] numbers or labels; most are correct."""
        y = torch.arange(60) % 4
        noise = torch.randn(60, 4, generator=torch_generator(0, "test:logits"))
        shown = torch.nn.functional.one_hot(y, 4)
        return noise + shown, {"class": y, "labels": shown, "numbers": shown.float()}[self.made().of_targets]

    def test_it_adds_over_batches(self) -> None:
        """Sums are equal for any batch size; with `counted_by`, for the same batches in any order."""
        score, (logits, y) = self.made(), self.answers()
        whole = score.counts(logits, y)
        assert whole.dim() == 1 and whole.dtype in (torch.int64, torch.float64)
        for size in (1, 7, 59):
            parts = [score.counts(a, b) for a, b in zip(logits.split(size), y.split(size), strict=True)]
            total = torch.stack(parts).sum(0)
            expected = torch.stack(parts[::-1]).sum(0) if score.counted_by else whole
            torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
            assert math.isclose(score.value(total), score.value(expected), rel_tol=1e-5, abs_tol=1e-9)
        assert isinstance(score.value(whole), float) and math.isfinite(score.value(whole))

    def test_many_sums_give_the_numbers_of_each(self) -> None:
        score, (logits, y) = self.made(), self.answers()
        sums = [score.counts(a, b) for a, b in zip(logits.split(20), y.split(20), strict=True)]
        found = score.values(torch.stack(sums))
        assert found.dtype == np.float64 and found.tolist() == [score.value(one) for one in sums]

    def test_right_answers_are_not_worse_than_wrong_ones(self) -> None:
        score, (_, y) = self.made(), self.answers()
        right = torch.nn.functional.one_hot(torch.arange(60) % 4, 4) * 10.0 - 5
        if score.of_targets == "numbers":
            right = y
        values = [score.value(score.counts(logits, y)) for logits in (right, -right - 1)]
        assert values[0] >= values[1] if score.better == "max" else values[0] <= values[1]

    def test_it_has_a_name_of_its_own_in_a_line(self, tmp_path: Path) -> None:
        score = self.made()
        assert SCORES_KIND.read(score.model_dump(mode="json"), "evaluation.scores") == score
        assert component(score.label, "label") == score.label
        evaluation = {"scores": [score], "local_holdout": 0.2}
        experiment = tiny(**_of_targets(score.of_targets), rounds=1, method="heterofl", evaluation=evaluation)
        assert score in experiment.scores
        [line] = run(simulate(experiment, tmp_path))
        known = experiment.metrics()
        for split in SPLITS:
            for of in ("mean", "worst", 0.3):
                name = named(score.label, of, split)
                assert math.isfinite(line[name]) and known[name].better == score.better

    def test_arrays_are_enough(self) -> None:
        """A pickled copy, as sent to workers, gives equal counts."""
        score, (logits, y) = self.made(), self.answers()
        assert torch.equal(pickle.loads(pickle.dumps(score)).counts(logits, y), score.counts(logits, y))
