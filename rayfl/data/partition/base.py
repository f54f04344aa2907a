"""Who holds which samples: the training set and the test set, split over the clients.

Every rule answers with an owner for each sample, so no sample can have two. A client's test split follows its training
split: same label proportions, same labels, same share. `Shards` holds the answer as two flat arrays, whatever the
number of clients.
"""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from rayfl.config import ConfigError, Named
from rayfl.core.seeds import numpy_generator

NOBODY = -1


@dataclass(frozen=True)
class Shards:
    """Client -> rows of an array, ascending: client c has idx[ptr[c]:ptr[c + 1]]."""

    ptr: np.ndarray
    """[clients + 1] int64."""
    idx: np.ndarray
    """[samples that somebody holds] int32."""

    @staticmethod
    def of(owner: np.ndarray, clients: int) -> "Shards":
        """From the owner of each row [N]: a client, or NOBODY."""
        order = np.argsort(owner, kind="stable")
        sizes = np.bincount(owner - NOBODY, minlength=clients + 1)
        return Shards(np.cumsum(sizes) - sizes[0], order[sizes[0] :].astype(np.int32))

    def __len__(self) -> int:
        return len(self.ptr) - 1

    def __getitem__(self, client: int) -> np.ndarray:
        """The client's rows [n], a view."""
        return self.idx[self.ptr[client] : self.ptr[client + 1]]

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Samples of each client [clients] int64."""
        return np.diff(self.ptr)

    @property
    def holders(self) -> np.ndarray:
        """The client of each entry of `idx` [len(idx)] int64."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def within(self, rows: np.ndarray) -> "Shards":
        """The same shards in an array of which only `rows` were split (`hold_out` took the others)."""
        return Shards(self.ptr, rows[self.idx].astype(np.int32))

    def keep(self, mask: np.ndarray) -> "Shards":
        """The same clients with those entries of `idx` that `mask` [len(idx)] bool says."""
        sizes = np.bincount(self.holders[mask], minlength=len(self))
        return Shards(np.concatenate([[0], np.cumsum(sizes)]), self.idx[mask])


@dataclass(frozen=True)
class Labels:
    """What a rule looks at: one label a sample, whatever else the samples hold."""

    train: np.ndarray
    """[N] int64."""
    test: np.ndarray
    """[N_test] int64."""
    users: np.ndarray | None
    """The natural user of each training sample [N], where the data set knows it."""
    classes: int
    """Labels are 0 ... classes - 1."""
    test_users: np.ndarray | None = None
    """The natural user of each test sample [N_test], where users have some."""


Owners = tuple[np.ndarray, np.ndarray]
"""The owner of each training sample [N] and of each test sample [N_test]: a client 0 ... clients - 1, or NOBODY."""


class Partition(Named, ABC):
    """What a `partition:` section says. A subclass adds its fields and says `owners`."""

    test_source: ClassVar[Literal["test", "train"]] = "test"
    """Which set the clients' test splits are rows of."""

    def tested_on(self, labels: Labels) -> Literal["test", "train"]:
        """Likewise of a data set, for a rule whose `test_source` depends on it."""
        return self.test_source

    @abstractmethod
    def owners(self, labels: Labels, clients: int, generator: np.random.Generator) -> Owners:
        """Who holds what. Where clients are `tested_on` "train", both answers are [N] and no sample is in both."""


def partition(spec: Partition, labels: Labels, clients: int, seed: int) -> tuple[Shards, Shards]:
    """The clients' training and test splits.

    Training splits are rows of the training set; test splits are rows of what `spec.tested_on` says, and may be
    empty. Raises ConfigError if a client would have nothing to train on.
    """
    require(len(labels.train), clients, 1)
    owners = spec.owners(labels, clients, numpy_generator(seed, "partition", spec.name))
    tested = labels.test if spec.tested_on(labels) == "test" else labels.train
    for what, owner, y in zip(("training", "test"), owners, (labels.train, tested), strict=True):
        _check(spec, what, owner, len(y), clients)
    train, test = (Shards.of(owner, clients) for owner in owners)
    empty = np.flatnonzero(train.sizes == 0)
    if len(empty):
        raise ConfigError(
            f"partition: {spec.name} leaves {len(empty)} of {clients} clients without training data, client "
            f"{empty[0]} the first; lower clients.count or take more data than {len(labels.train)} samples"
        )
    held = np.bincount(labels.train[train.idx], minlength=labels.classes)
    missing = np.setdiff1d(labels.train, np.flatnonzero(held))
    if len(missing):
        raise ConfigError(
            f"partition: {spec.name} gives no client a training sample of {len(missing)} of the {labels.classes} "
            f"classes, class {missing[0]} the first; take more clients than {clients}, another seed or partition"
        )
    return train, test


def _check(spec: Partition, what: str, owner: np.ndarray, samples: int, clients: int) -> None:
    if owner.shape != (samples,) or (samples and not NOBODY <= owner.min() <= owner.max() < clients):
        between = f" from {owner.min()} to {owner.max()}" if owner.size else ""
        raise ConfigError(
            f"partition: given {spec.name}, whose owners of the {what} samples are {list(owner.shape)}{between}; "
            f"allowed: [{samples}] from -1, which is nobody, to {clients - 1}"
        )


def label_counts(shards: Shards, y: np.ndarray, classes: int) -> np.ndarray:
    """How many samples of each class each client holds: [clients, classes] int64."""
    cell = shards.holders * classes + y[shards.idx]
    return np.bincount(cell, minlength=len(shards) * classes).reshape(len(shards), classes)


def hold_out(
    y: np.ndarray, fraction: float, generator: np.random.Generator, totals: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of labels y [N] that stay and rows held out, ascending int64: at random, of each class the rounded fraction:
    of `totals` [C] samples, unless given of its samples in y."""
    totals = np.bincount(y) if totals is None else totals
    pool = shuffled_by_class(y, generator)
    held = rank(y[pool]) < np.rint(totals * fraction)[y[pool]]
    return np.sort(pool[~held]), np.sort(pool[held])


# what rules are made of


def require(samples: int, clients: int, each: int) -> None:
    """A ConfigError unless there are samples for `each` a client."""
    if samples < clients * each:
        raise ConfigError(
            f"clients.count: given {clients}; allowed: at most {samples // each}, for {samples} training "
            f"samples and at least {each} a client; lower it or take more data"
        )


def deal(rows: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Owners [len(rows)]: the first sizes[0] of `rows` are client 0's, and so on; the last ones nobody's."""
    owner = np.full(len(rows), NOBODY)
    owner[rows[: sizes.sum()]] = np.repeat(np.arange(len(sizes)), sizes)
    return owner


def apportion(shares: np.ndarray, totals: npt.ArrayLike) -> np.ndarray:
    """Whole numbers in proportion to shares [..., clients] that sum to totals [...] over the last axis."""
    cumulated = np.cumsum(shares, -1, dtype=np.float64)
    # without the millionth, float noise moves a sample of equal shares
    bounds = np.floor(cumulated / cumulated[..., -1:] * np.expand_dims(totals, -1) + 1e-6)
    return np.diff(bounds, prepend=0, axis=-1).astype(np.int64)


def rank(values: np.ndarray) -> np.ndarray:
    """How many equal values stand before each of `values` [n], whole numbers of at least 0."""
    counts = np.bincount(values)
    found = np.empty(len(values), np.int64)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    found[np.argsort(values, kind="stable")] = np.arange(len(values)) - first
    return found


def shuffled_by_class(y: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """All rows, class after class, in random order within each."""
    rows = generator.permutation(len(y))
    return rows[np.argsort(y[rows], kind="stable")]
