"""Which rows of a run's arrays are whose, and how they are prepared and judged."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rayfl.data.arrays import Arrays
from rayfl.data.base import DataSet
from rayfl.data.goal import Goal
from rayfl.data.partition import Labels, Partition, Shards, hold_out, partition
from rayfl.data.partition.base import rank
from rayfl.data.samples import Prepare
from rayfl.seeds import numpy_generator


@dataclass(frozen=True)
class Federation:
    """Lists of rows, without the arrays that they are rows of: a client's shard is a view, never a copy."""

    train: Shards
    """Client -> rows of the training set."""
    test: Shards
    """Client -> rows of its own test split, in `test_source`."""
    test_source: Literal["test", "train"]
    """ "train" where the clients' test splits are held-out training rows (natural users)."""
    validation: np.ndarray
    """Rows of the training set [n] that the server holds out for tuning: no client has them."""
    local_validation: Shards
    """Client -> rows of the training set that it holds out of its own for tuning, and does not train on."""
    prepare: Prepare
    goal: Goal

    def pooled(self, seed: int) -> np.ndarray:
        """All clients' training rows, shuffled."""
        return numpy_generator(seed, "pooled").permutation(self.train.idx)


def federate(
    data: DataSet,
    arrays: Arrays,
    spec: Partition,
    clients: int,
    holdout: float,
    seed: int,
    local_holdout: float = 0.0,
) -> Federation:
    """Holds out the server's validation rows, the share `holdout` of every class, then splits the rest over the
    clients. Of its own training rows each client holds out the share `local_holdout`."""
    y, y_test = data.goal.labels(arrays.train), data.goal.labels(arrays.test)
    kept, validation = hold_out(y, holdout, numpy_generator(seed, "hold_out"))
    users = None if arrays.users is None else arrays.users[kept]
    labels = Labels(y[kept], y_test, users, data.goal.kinds, arrays.test_users)
    train, test = partition(spec, labels, clients, seed)
    source = spec.tested_on(labels)
    if source == "train":
        test = test.within(kept)
    train, local_validation = _hold_out_locally(train.within(kept), local_holdout, seed)
    return Federation(train, test, source, validation, local_validation, data.prepare, data.goal)


def _hold_out_locally(train: Shards, fraction: float, seed: int) -> tuple[Shards, Shards]:
    """What clients keep and what they hold out: at random, of each client's rows the rounded fraction, but one row
    stays."""
    if not fraction:
        return train, train.keep(np.zeros(len(train.idx), bool))
    tickets = numpy_generator(seed, "local_validation").random(len(train.idx))
    order, holders = np.lexsort((tickets, train.holders)), train.holders
    held_out = np.minimum(np.rint(train.sizes * fraction), train.sizes - 1)
    held = np.empty(len(train.idx), bool)
    held[order] = rank(holders) < held_out[holders]
    return train.keep(~held), train.keep(held)
