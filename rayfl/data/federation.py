"""Which rows of a run's arrays are whose, and how they are prepared and judged."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rayfl.config import ConfigError
from rayfl.core.seeds import numpy_generator
from rayfl.data.arrays import Arrays
from rayfl.data.base import DataSet, Public
from rayfl.data.goal import Goal
from rayfl.data.partition import Labels, Partition, Shards, hold_out, partition
from rayfl.data.partition.base import rank
from rayfl.data.samples import Prepare


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
    public: np.ndarray
    """Rows [n] of the public samples in `public_source`, ascending; none without a section `data.public`."""
    public_source: Literal["train", "public"]
    """ "train" where they are rows of the training set, which no client has and the server does not validate on;
    "public" where they are all of `Arrays.public`."""

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
    """Holds out the server's validation rows, the share `holdout` of every class, and of what they leave the public
    rows, then splits the rest over the clients. Of its own training rows each client holds out the share
    `local_holdout`."""
    y, y_test = data.goal.labels(arrays.train), data.goal.labels(arrays.test)
    kept, validation = hold_out(y, holdout, numpy_generator(seed, "hold_out"))
    kept, public = _hold_out_public(data.public, arrays, y, kept, seed)
    users = None if arrays.users is None else arrays.users[kept]
    labels = Labels(y[kept], y_test, users, data.goal.kinds, arrays.test_users)
    train, test = partition(spec, labels, clients, seed)
    source = spec.tested_on(labels)
    if source == "train":
        test = test.within(kept)
    train, local_validation = _hold_out_locally(train.within(kept), local_holdout, seed)
    public_source = "train" if data.public is None or data.public.share else "public"
    return Federation(train, test, source, validation, local_validation, data.prepare, data.goal, public, public_source)


def _hold_out_public(
    spec: Public | None, arrays: Arrays, y: np.ndarray, kept: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of the rows `kept` of labels y, those for clients, and the public rows."""
    if spec is None:
        return kept, np.empty(0, np.int64)
    if spec.share is None:
        if arrays.public is None:
            raise ConfigError("data.public: given arrays without public samples; allowed: those of `DataSet.arrays`")
        return kept, np.arange(len(next(iter(arrays.public.values()))))
    totals = np.bincount(y)
    left, held = hold_out(y[kept], spec.share, numpy_generator(seed, "public"), totals)
    if not len(left) or not len(held):
        raise ConfigError(
            f"data.public.share: given {spec.share:g}, which takes {len(held)} of {len(kept)} training samples; "
            "allowed: a share that takes one or more, and leaves some for clients"
        )
    return kept[left], kept[held[spec.first(len(held))]]


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
