"""The data of one run: the arrays, and which rows are whose."""

from dataclasses import dataclass

import numpy as np

from rayfl.data.base import Arrays, DataSet
from rayfl.data.partition import Partition, Shards, hold_out, partition
from rayfl.seeds import numpy_generator
from rayfl.training import Preprocessing


@dataclass(frozen=True)
class Federation:
    """Read-only arrays and index lists: a client's shard is a view of `rows`, never a copy."""

    arrays: Arrays
    train: Shards
    """Client -> rows of `arrays.x`."""
    test: Shards
    """Client -> rows of its own test split, in `test_source`."""
    test_source: str
    """"test", or "train" where the clients' test splits are held-out training rows (natural users)."""
    validation: np.ndarray
    """Rows of `arrays.x` that the server holds out for tuning: no client has them."""
    preprocess: Preprocessing
    classes: int

    def pooled(self, seed: int) -> np.ndarray:
        """All clients' training rows, shuffled."""
        return numpy_generator(seed, "pooled").permutation(self.train.idx)


def federate(data: DataSet, arrays: Arrays, spec: Partition, clients: int, holdout: float, seed: int) -> Federation:
    """Holds out the server's validation rows, then splits the rest over the clients."""
    kept, validation = hold_out(arrays.y, holdout, seed)
    users = None if arrays.users is None else arrays.users[kept]
    train, test = partition(spec, arrays.y[kept], arrays.y_test, users, clients, data.classes, seed)
    if spec.test_source == "train":
        test = test.within(kept)
    return Federation(
        arrays,
        train.within(kept),
        test,
        spec.test_source,
        validation,
        data.preprocess,
        data.classes,
    )
