"""Federations: validation rows of the server, training and validation rows of the clients."""

import pickle

import numpy as np
import pytest
import torch

from rayfl.core.seeds import numpy_generator
from rayfl.data import Arrays, federate
from rayfl.data.federation import _hold_out_locally
from rayfl.data.partition import Shards, hold_out, partition
from rayfl.data.partition.base import Labels
from rayfl.data.partition.dirichlet import Dirichlet
from rayfl.data.partition.iid import IID
from rayfl.data.partition.users import Users
from rayfl.data.synthetic import Synthetic

DATA = Synthetic(samples=600, test_samples=100, classes=10)
ARRAYS = DATA.arrays()


def rows(shards):
    return sorted(shards.idx.tolist())


def test_validation_rows_belong_to_no_client():
    found = federate(DATA, ARRAYS, Dirichlet(), 8, 0.1, 3)
    assert np.bincount(ARRAYS.train["y"][found.validation]).tolist() == [6] * 10
    assert sorted([*found.train.idx, *found.validation]) == list(range(600))
    kept, validation = hold_out(ARRAYS.train["y"], 0.1, numpy_generator(3, "hold_out"))
    labels = Labels(ARRAYS.train["y"][kept], ARRAYS.test["y"], None, 10)
    train, test = partition(Dirichlet(), labels, 8, 3)
    assert np.array_equal(found.validation, validation)
    assert all(np.array_equal(found.train[c], kept[train[c]]) for c in range(8))
    assert all(np.array_equal(found.test[c], test[c]) for c in range(8))


def test_test_splits_of_users_are_rows_of_the_training_set():
    users = np.arange(600) // 60
    found = federate(DATA, Arrays(ARRAYS.train, ARRAYS.test, users), Users(test_fraction=0.5), 10, 0.1, 0)
    assert found.test_source == "train"
    for c in range(10):
        assert set(users[found.train[c]]) == set(users[found.test[c]]) == {c}
    assert sorted([*found.train.idx, *found.test.idx, *found.validation]) == list(range(600))


def test_it_holds_rows_and_no_arrays():
    found = federate(DATA, ARRAYS, IID(), 8, 0.1, 0)
    assert len(pickle.dumps(found)) < 10_000 < ARRAYS.train["x"].nbytes
    assert (found.prepare, found.goal) == (DATA.prepare, DATA.goal)


# validation data of clients


def test_without_local_holdout_nothing_changes():
    plain, found = (federate(DATA, ARRAYS, IID(), 8, 0.1, 0, *local) for local in ([], [0.0]))
    assert np.array_equal(plain.train.idx, found.train.idx) and np.array_equal(plain.train.ptr, found.train.ptr)
    assert len(found.local_validation) == 8 and found.local_validation.sizes.tolist() == [0] * 8


def test_every_client_holds_out_a_share_of_its_own_rows():
    plain, found = (federate(DATA, ARRAYS, IID(), 8, 0.2, 0, local) for local in (0.0, 0.25))
    for c in range(8):
        assert len(found.local_validation[c]) == 15 and len(found.train[c]) == 45
        assert sorted([*found.train[c], *found.local_validation[c]]) == plain.train[c].tolist()
        assert (np.diff(found.local_validation[c]) > 0).all() and (np.diff(found.train[c]) > 0).all()
    assert np.array_equal(plain.test.idx, found.test.idx)
    again, other = (federate(DATA, ARRAYS, IID(), 8, 0.2, seed, 0.25) for seed in (0, 1))
    assert np.array_equal(found.local_validation.idx, again.local_validation.idx)
    assert not np.array_equal(found.local_validation.idx, other.local_validation.idx)


@pytest.mark.parametrize(
    ("fraction", "held"),
    [(0.1, [0, 0, 0, 0, 1]), (0.3, [0, 0, 1, 1, 3]), (0.9, [0, 0, 1, 2, 8]), (0.99, [0, 0, 1, 2, 8])],
)
def test_shares_are_rounded_and_one_row_stays(fraction, held):
    """Clients have 0, 1, 2, 3 and 9 rows; 0.3 of 2 is 0.6. No partition makes a client without rows."""
    shards = Shards(np.array([0, 0, 1, 3, 6, 15]), np.arange(15, dtype=np.int32))
    train, local = _hold_out_locally(shards, fraction, 0)
    assert local.sizes.tolist() == held
    assert (train.sizes + local.sizes).tolist() == [0, 1, 2, 3, 9]


def test_every_row_is_as_likely():
    shards = Shards(np.array([0, 4, 6]), np.arange(6, dtype=np.int32))
    count = np.zeros(6)
    for seed in range(2000):
        count[_hold_out_locally(shards, 0.5, seed)[1].idx] += 1
    assert count / 2000 == pytest.approx([0.5] * 6, abs=0.05)


def test_a_hundred_thousand_clients_hold_out_at_once():
    sizes = np.arange(100_000) % 7 + 1
    shards = Shards(np.concatenate([[0], np.cumsum(sizes)]), torch.arange(sizes.sum()).int().numpy())
    train, local = _hold_out_locally(shards, 0.5, 0)
    # of 1 to 7 rows, halves to even
    assert local.sizes[:7].tolist() == [0, 1, 2, 2, 2, 3, 4]
    assert rows(train) != rows(shards) and sorted(rows(train) + rows(local)) == rows(shards)
