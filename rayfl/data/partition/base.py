"""Partition of training and test set over the clients.

Every rule returns one owner per sample, so clients are disjoint. A client's test split has the label proportions and
the share of its training split. `Shards` stores the result in two flat arrays.
"""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from rayfl.config import ConfigError, Named, ask
from rayfl.core.seeds import numpy_generator
from rayfl.data.arrays import as_integers

NOBODY = -1
"""Owner of samples that no client has, as in the example of `Partition`."""


@dataclass(frozen=True)
class Shards:
    """Rows of an array by client, ascending: client c has idx[ptr[c]:ptr[c + 1]]."""

    ptr: np.ndarray
    """[clients + 1] int64."""
    idx: np.ndarray
    """[samples of all clients] int32."""

    @staticmethod
    def of(owner: np.ndarray, clients: int) -> "Shards":
        """Build from the owner of each row [N]: a client, or NOBODY."""
        order = np.argsort(owner, kind="stable")
        sizes = np.bincount(owner - NOBODY, minlength=clients + 1)
        return Shards(np.cumsum(sizes) - sizes[0], order[sizes[0] :].astype(np.int32))

    def __len__(self) -> int:
        return len(self.ptr) - 1

    def __getitem__(self, client: int) -> np.ndarray:
        """Return the rows [n] of a client, as a view."""
        return self.idx[self.ptr[client] : self.ptr[client + 1]]

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Number of samples of each client [clients] int64."""
        return np.diff(self.ptr)

    @property
    def holders(self) -> np.ndarray:
        """Client of each entry of `idx` [len(idx)] int64."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def within(self, rows: np.ndarray) -> "Shards":
        """Return the shards as rows of the whole array, of which only `rows` were partitioned."""
        return Shards(self.ptr, rows[self.idx].astype(np.int32))

    def keep(self, mask: np.ndarray) -> "Shards":
        """Return the shards with the entries of `idx` selected by `mask` [len(idx)] bool."""
        sizes = np.bincount(self.holders[mask], minlength=len(self))
        return Shards(np.concatenate([[0], np.cumsum(sizes)]), self.idx[mask])


@dataclass(frozen=True)
class Labels:
    """Labels and users of the samples, the input of a partition rule.

    >>> Labels(np.array([0, 1, 1]), test=np.array([0, 1]), users=None, classes=2).classes
    2
    """

    train: np.ndarray
    """[N] int64."""
    test: np.ndarray
    """[N_test] int64."""
    users: np.ndarray | None
    """Natural user of each training sample [N], if known."""
    classes: int
    """Labels are 0 ... classes - 1."""
    test_users: np.ndarray | None = None
    """Natural user of each test sample [N_test], if users have their own test samples."""
    all_users: np.ndarray | None = None
    """Natural users [n] of the training samples and of those that the server holds out. Default: `users`."""


Owners = tuple[np.ndarray, np.ndarray]
"""Owner of each training sample [N] and of each test sample [N_test]: a client 0 ... clients - 1, or NOBODY."""


class Partition(Named, ABC):
    """The `partition:` section. A subclass adds its fields and implements `owners`.

    >>> class OneEach(Partition):
    ...     def owners(self, labels, clients, generator):
    ...         train, test = np.arange(len(labels.train)), np.arange(len(labels.test))
    ...         return np.where(train < clients, train, NOBODY), test % clients
    >>> labels = Labels(np.array([0, 1, 1]), test=np.array([0, 1]), users=None, classes=2)
    >>> OneEach().owners(labels, 2, np.random.default_rng(0))[0]
    array([ 0,  1, -1])
    """

    covers_classes: ClassVar[bool] = True
    """True if it is an error that no client has a class of the training set."""

    def tested_on(self, labels: Labels) -> Literal["test", "train"]:
        """Return the set that contains the clients' test splits."""
        return "test"

    @abstractmethod
    def owners(self, labels: Labels, clients: int, generator: np.random.Generator) -> Owners:
        """Return the owners of all samples. If clients are `tested_on` "train", both results are [N] and disjoint."""


def partition(spec: Partition, labels: Labels, clients: int, seed: int) -> tuple[Shards, Shards]:
    """Return the clients' training and test splits.

    Training splits are rows of the training set. Test splits are rows of the set `spec.tested_on` and may be empty.
    Raise ConfigError if a client has no training samples.
    """
    require(len(labels.train), clients, 1)
    generator = numpy_generator(seed, "partition", spec.name)

    def assigned() -> Owners:
        train, test = spec.owners(labels, clients, generator)
        return train, test

    given = ask(f"partition: {spec.name}, owners", assigned)
    owners = [as_integers(owner, f"partition: an answer of {spec.name}").astype(np.int64) for owner in given]
    on_train = spec.tested_on(labels) == "train"
    tested = labels.train if on_train else labels.test
    for what, owner, y in zip(("training", "test"), owners, (labels.train, tested), strict=True):
        _check(spec, what, owner, len(y), clients)
    if on_train and (both := int(((owners[0] != NOBODY) & (owners[1] != NOBODY)).sum())):
        raise ConfigError(
            f"partition: {spec.name} assigns {both} samples for training and for testing. Allowed: each sample for one "
            "of them"
        )
    train, test = (Shards.of(owner, clients) for owner in owners)
    empty = np.flatnonzero(train.sizes == 0)
    if len(empty):
        raise ConfigError(
            f"partition: {spec.name} leaves {len(empty)} of {clients} clients without training data (first: client "
            f"{empty[0]}). Allowed: at least one sample per client. Hint: lower clients.count, or use more data than "
            f"{len(labels.train)} samples"
        )
    missing = np.setdiff1d(labels.train, labels.train[train.idx])
    if len(missing) and spec.covers_classes:
        raise ConfigError(
            f"partition: {spec.name} assigns no training samples of {len(missing)} of the {labels.classes} classes "
            f"(first: class {missing[0]}). Allowed: all classes. Hint: use more clients than {clients}, another seed "
            "or another partition"
        )
    return train, test


def _check(spec: Partition, what: str, owner: np.ndarray, samples: int, clients: int) -> None:
    if owner.shape != (samples,) or (samples and not NOBODY <= owner.min() <= owner.max() < clients):
        between = f" from {owner.min()} to {owner.max()}" if owner.size else ""
        raise ConfigError(
            f"partition: {spec.name} returned owners of the {what} samples of shape {list(owner.shape)}{between}. "
            f"Allowed: [{samples}] from -1 (no client) to {clients - 1}"
        )


def label_counts(shards: Shards, y: np.ndarray, classes: int) -> np.ndarray:
    """Return the number of samples per client and class: [clients, classes] int64."""
    cell = shards.holders * classes + y[shards.idx]
    return np.bincount(cell, minlength=len(shards) * classes).reshape(len(shards), classes)


def hold_out(
    y: np.ndarray, fraction: float, generator: np.random.Generator, totals: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Split the rows of labels y [N] into remaining and held-out rows, ascending int64. Of each class a random fraction
    is held out: of its number of samples in y, or of `totals` [C], rounded."""
    totals = np.bincount(y) if totals is None else totals
    pool = shuffled_by_class(y, generator)
    held_out = rank(y[pool]) < np.rint(totals * fraction)[y[pool]]
    return np.sort(pool[~held_out]), np.sort(pool[held_out])


def require(samples: int, clients: int, each: int, setting: str = "") -> None:
    """Raise ConfigError unless there are `each` samples per client. `setting`: the one that asks for them."""
    if samples < clients * each:
        raise ConfigError(
            f"clients.count: {clients} is not valid. Allowed: at most {samples // each}, for {samples} training "
            f"samples left by evaluation.holdout and data.public, at least {each} per client"
            + (f" (partition.{setting})" if setting else "")
        )


def deal(rows: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return owners [len(rows)]: client 0 gets the first sizes[0] of `rows`, and so on. The rest is not assigned."""
    owner = np.full(len(rows), NOBODY)
    owner[rows[: sizes.sum()]] = np.repeat(np.arange(len(sizes)), sizes)
    return owner


def apportion(shares: np.ndarray, totals: npt.ArrayLike) -> np.ndarray:
    """Return integers in proportion to shares [..., clients] that sum to totals [...] over the last axis."""
    cumulated = np.cumsum(shares, -1, dtype=np.float64)
    # 1e-6 keeps rounding errors from moving a sample between equal shares
    bounds = np.floor(cumulated / cumulated[..., -1:] * np.expand_dims(totals, -1) + 1e-6)
    return np.diff(bounds, prepend=0, axis=-1).astype(np.int64)


def rank(values: np.ndarray) -> np.ndarray:
    """Return the number of equal values before each of `values` [n], non-negative integers."""
    counts = np.bincount(values)
    found = np.empty(len(values), np.int64)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    found[np.argsort(values, kind="stable")] = np.arange(len(values)) - first
    return found


def shuffled_by_class(y: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return all rows sorted by class, in random order within each class."""
    rows = generator.permutation(len(y))
    return rows[np.argsort(y[rows], kind="stable")]
