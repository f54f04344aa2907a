"""Assignment of samples to clients, server validation and public data."""

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
    """Rows of the data set's arrays by role, without the arrays. A client's shard is a view, not a copy."""

    train: Shards
    """Client -> rows of the training set."""
    test: Shards
    """Client -> rows of its test split, in `test_source`."""
    test_source: Literal["test", "train"]
    """ "train" if the clients' test splits are held-out training rows (natural users)."""
    validation: np.ndarray
    """Rows of the training set [n] that the server holds out for validation. No client has them."""
    local_validation: Shards
    """Client -> rows of its training data held out for validation."""
    prepare: Prepare
    goal: Goal
    public: np.ndarray
    """Rows [n] of the public samples in `public_source`, ascending. Empty without a section `data.public`."""
    public_source: Literal["train", "public"]
    """ "train": rows of the training set, outside of all other roles. "public": all of `Arrays.public`."""


def federate(
    data: DataSet, arrays: Arrays, spec: Partition, clients: int, holdout: float, seed: int, local_holdout: float = 0.0
) -> Federation:
    """Hold out the server's validation rows (fraction `holdout` of every class), then the public rows, and partition
    the rest over the clients. Each client then holds out the fraction `local_holdout` of its training rows."""
    share = None if data.public is None else data.public.share
    fractions = {"evaluation.holdout": holdout, "evaluation.local_holdout": local_holdout, "data.public.share": share}
    for setting, fraction in fractions.items():
        if fraction and data.overlap:
            raise ConfigError(f"{setting}: {fraction:g} is not valid. Allowed: 0, because {data.overlap}")
    y, y_test = (data.goal.labels(split, arrays.train) for split in (arrays.train, arrays.test))
    kept, validation = hold_out(y, holdout, numpy_generator(seed, "hold_out"))
    kept, public = _hold_out_public(data.public, arrays, y, kept, seed)
    users = None if arrays.users is None else arrays.users[kept]
    labels = Labels(y[kept], y_test, users, data.goal.kinds, arrays.test_users, arrays.users)
    train, test = partition(spec, labels, clients, seed)
    source = spec.tested_on(labels)
    if source == "train":
        test = test.within(kept)
    train, local_validation = _hold_out_locally(train.within(kept), local_holdout, seed)
    _require_some(validation, "evaluation.holdout", holdout, f"the largest class{data.goal.doubt(arrays.train)}")
    _require_some(local_validation.idx, "evaluation.local_holdout", local_holdout, "the largest client")
    public_source = "train" if data.public is None or data.public.share else "public"
    prepare, goal = _fitted(data, arrays, train)
    return Federation(train, test, source, validation, local_validation, prepare, goal, public, public_source)


def _fitted(data: DataSet, arrays: Arrays, train: Shards) -> tuple[Prepare, Goal]:
    """Return preprocessing and goal, fitted on all clients' training rows, and on no other rows."""
    prepare, goal = data.prepare, data.goal
    if not (prepare.learns or goal.learns):
        return prepare, goal
    rows = np.sort(train.idx)
    own = {name: array[rows] for name, array in arrays.train.items()}
    return prepare.fitted(own), goal.fitted(own)


def _hold_out_public(
    spec: Public | None, arrays: Arrays, y: np.ndarray, kept: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Split the rows `kept` into the clients' and the public rows."""
    if spec is None:
        return kept, np.empty(0, np.int64)
    if spec.share is None:
        if arrays.public is None:
            raise ConfigError(
                "data.public: the arrays have no public samples. Allowed: arrays returned by `DataSet.arrays`"
            )
        return kept, np.arange(len(next(iter(arrays.public.values()))))
    totals = np.bincount(y)
    left, public = hold_out(y[kept], spec.share, numpy_generator(seed, "public"), totals)
    if not len(left) or not len(public):
        raise ConfigError(
            f"data.public.share: {spec.share:g} selects {len(public)} of {len(kept)} training samples. Allowed: a "
            "fraction that selects at least one sample and leaves at least one for clients"
        )
    return kept[left], kept[public[spec.first(len(public))]]


def _require_some(rows: np.ndarray, setting: str, fraction: float, largest: str) -> None:
    """Raise a ConfigError if a fraction holds out no sample."""
    if fraction and not len(rows):
        raise ConfigError(
            f"{setting}: {fraction:g} holds out no sample. Allowed: 0, or a fraction that is at least one sample of "
            f"{largest}"
        )


def _hold_out_locally(train: Shards, fraction: float, seed: int) -> tuple[Shards, Shards]:
    """Hold out a random fraction, rounded, of each client's rows. At least one row remains for training."""
    if not fraction:
        return train, train.keep(np.zeros(len(train.idx), bool))
    tickets = numpy_generator(seed, "local_validation").random(len(train.idx))
    order, holders = np.lexsort((tickets, train.holders)), train.holders
    counts = np.minimum(np.rint(train.sizes * fraction), train.sizes - 1)
    held_out = np.empty(len(train.idx), bool)
    held_out[order] = rank(holders) < counts[holders]
    return train.keep(~held_out), train.keep(held_out)
