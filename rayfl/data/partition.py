"""Who holds which samples: the training set and the test set, split over the clients.

Every rule answers with an owner for each sample, so no sample can have two. A client's test split follows
its training split: same label proportions, same labels, same share. `Shards` holds the answer as two flat
arrays, whatever the number of clients.
"""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.config import Config, ConfigError
from rayfl.seeds import numpy_generator

NOBODY = -1
REDRAWS = 1000
"""Draws of a whole Dirichlet split before it is given up."""
TINY = 1e-300
"""Smallest share: where a small alpha leaves nothing but zeros, the draw becomes uniform."""


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

    def within(self, rows: np.ndarray) -> "Shards":
        """The same shards in an array of which only `rows` were split (`hold_out` took the others)."""
        return Shards(self.ptr, rows[self.idx].astype(np.int32))


@dataclass(frozen=True)
class Labels:
    """What a rule looks at."""

    train: np.ndarray
    """[N] int64."""
    test: np.ndarray
    """[N_test] int64."""
    users: np.ndarray | None
    """[N] or None."""
    classes: int


Owners = tuple[np.ndarray, np.ndarray]
"""The owner of each training sample [N] and of each test sample [N_test]."""


class Partition(Config, ABC):
    """What a `partition:` section says. A subclass adds its fields and `name: Literal["..."] = "..."`."""

    name: str
    test_source: ClassVar[Literal["test", "train"]] = "test"
    """Which array the clients' test splits are rows of."""

    @abstractmethod
    def owners(self, labels: Labels, clients: int, generator: np.random.Generator) -> Owners:
        """Who holds what. For a `test_source` "train" both answers are [N] and no sample is in both."""


class IID(Partition):
    """Disjoint random subsets of floor(N / clients) samples; the remainder is left out (HeteroFL)."""

    name: Literal["iid"] = "iid"

    def owners(self, labels: Labels, clients: int, generator: np.random.Generator) -> Owners:
        train, test = (self._split(len(y), clients, generator) for y in (labels.train, labels.test))
        return train, test

    def _split(self, samples: int, clients: int, generator: np.random.Generator) -> np.ndarray:
        size = samples // clients
        return _deal(generator.permutation(samples), np.full(clients, size))


class Quantity(Partition):
    """Every client gets `min_samples`; the other samples go out in proportion to lognormal shares.

    Labels are IID. All training samples are used; test samples go out in proportion to training samples.
    """

    name: Literal["quantity"] = "quantity"
    sigma: float = Field(default=1.0, ge=0)
    """Standard deviation of the logarithm of a share; 0 gives equal sizes."""
    min_samples: int = Field(default=2, ge=1)
    """Training samples of the smallest client, at least."""

    def owners(self, labels: Labels, clients: int, generator: np.random.Generator) -> Owners:
        _require(len(labels.train), clients, self.min_samples)
        shares = generator.lognormal(0.0, self.sigma, clients)
        free = len(labels.train) - clients * self.min_samples
        sizes = self.min_samples + _apportion(shares, free)
        test_sizes = _apportion(sizes, len(labels.test))
        return (
            _deal(generator.permutation(len(labels.train)), sizes),
            _deal(generator.permutation(len(labels.test)), test_sizes),
        )


class Dirichlet(Partition):
    """Label skew of strength alpha: the smaller, the fewer classes a client sees.

    `balance` says how sizes come out:
    none: each class goes out in proportions Dir(alpha, ..., alpha) over the clients.
    cap: the same, class after class, but a client that already holds N / clients samples gets nothing of
    the next classes (NeFL, FIARSE's AG News, SpaFL's CIFAR-100).
    equal: each client has label proportions Dir(alpha, ..., alpha) and, in random turns, draws one sample at
    a time, until all hold floor(N / clients) (FIARSE's CIFAR).

    `none` and `cap` use every sample and are drawn again until no client is too small; `equal` leaves out
    the remainder. The test split has the proportions of the training split.
    """

    name: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(default=0.3, gt=0)
    """Concentration: 0.1 is strong skew, 100 nearly none."""
    balance: Literal["none", "cap", "equal"] = "none"
    """How sizes come out, see above."""
    min_samples: int = Field(default=2, ge=1)
    """Training samples of the smallest client, at least (NeFL: 10)."""

    def owners(self, labels: Labels, clients: int, generator: np.random.Generator) -> Owners:
        _require(len(labels.train), clients, self.min_samples)
        if self.balance == "equal":
            prior = _dirichlet(self.alpha, (clients, labels.classes), generator)
            train, test = (_draw_in_turn(y, prior, generator) for y in (labels.train, labels.test))
        else:
            shares = self._shares(labels, clients, generator)
            train, test = (_hand_out(y, shares, generator) for y in (labels.train, labels.test))
        return train, test

    def _shares(self, labels: Labels, clients: int, generator: np.random.Generator) -> np.ndarray:
        """Proportions of each class over the clients [classes, clients]."""
        totals = np.bincount(labels.train, minlength=labels.classes)
        smallest = 0
        for _ in range(REDRAWS):
            shares = _dirichlet(self.alpha, (labels.classes, clients), generator)
            if self.balance == "cap":
                _cap(shares, totals)
            least = _apportion(shares, totals).sum(0).min()
            if least >= self.min_samples:
                return shares
            smallest = max(smallest, int(least))
        raise ConfigError(
            f"partition.min_samples: given {self.min_samples}, but in {REDRAWS} draws of alpha = "
            f"{self.alpha:g} over {clients} clients the smallest client never had more than {smallest} "
            f"of {len(labels.train)} training samples; lower min_samples or clients.count, raise alpha, "
            "or set balance to cap or equal"
        )


class LabelShards(Partition):
    """`labels` classes a client, HeteroFL's non-iid-n (section 4 there, FedRolex too).

    Each class is cut, in stored order, into labels * clients / classes shards (the remainder goes one by one
    to the first shards); every client is dealt `labels` labels and takes a random shard of each.
    """

    name: Literal["shards"] = "shards"
    labels: int = Field(default=2, ge=1)
    """Classes a client: HeteroFL 2; FedRolex 2 or 5 of CIFAR-10's, 20 or 50 of CIFAR-100's."""
    duplicates: Literal["merge", "keep", "resample"] = "merge"
    """If a client is dealt a label twice. merge: it gets one shard of it and the other is lost, as in the
    authors' code (of 100 clients with 2 of 10 labels, 9.5 on average). keep: it gets both (LG-FedAvg).
    resample: labels are dealt so that nobody gets one twice, from the classes with most shards left."""

    def owners(self, labels: Labels, clients: int, generator: np.random.Generator) -> Owners:
        if self.labels > labels.classes:
            raise ConfigError(f"partition.labels: given {self.labels}; allowed: at most the {labels.classes} classes")
        shards, rest = divmod(self.labels * clients, labels.classes)
        if rest:
            raise ConfigError(
                f"partition.labels: given {self.labels} labels for {clients} clients; allowed: labels * "
                f"clients a multiple of the {labels.classes} classes, so that each is cut into equally many "
                "shards"
            )
        dealt = np.sort(self._deal_labels(clients, labels.classes, shards, generator))
        repeated = np.diff(dealt, prepend=NOBODY) == 0
        taken = ~repeated if self.duplicates == "merge" else np.ones_like(repeated)
        holder, label = np.nonzero(taken)[0], dealt[taken]
        train, test = (
            _take_shards(y, holder, label, (labels.classes, shards), generator) for y in (labels.train, labels.test)
        )
        return train, test

    def _deal_labels(self, clients: int, classes: int, shards: int, generator: np.random.Generator) -> np.ndarray:
        """The labels of every client [clients, labels], each class `shards` times in all."""
        if self.duplicates != "resample":
            deck = np.repeat(np.arange(classes), shards)
            return generator.permutation(deck).reshape(clients, self.labels)
        dealt, left = np.empty((clients, self.labels), np.int64), np.full(classes, shards)
        for hand in dealt:
            hand[:] = np.argsort(left + generator.random(classes))[-self.labels :]
            left[hand] -= 1
        return generator.permutation(dealt)


class Users(Partition):
    """One client for each natural user of the data set: those with most samples, in order of user id.

    The data sets' test users are other people, so the last samples of each user, in stored order, are held
    out of its training split and are its test split. Nothing is random.
    """

    name: Literal["users"] = "users"
    test_source: ClassVar = "train"
    test_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of a user's samples that become its test split, rounded down (LEAF: 0.1)."""
    min_samples: int = Field(default=2, ge=1)
    """Users with fewer samples are no clients."""

    def owners(self, labels: Labels, clients: int, generator: np.random.Generator) -> Owners:
        if labels.users is None:
            raise ConfigError(
                "partition.name: given users, but the data set has no user ids; allowed: mnist with the file "
                "QMNIST/raw/qmnist-train-labels-idx2-int.gz in its folder. Put it there, or choose another "
                "partition"
            )
        _, user, counts = np.unique(labels.users, return_inverse=True, return_counts=True)
        able = np.flatnonzero(counts >= self.min_samples)
        if clients > len(able):
            raise ConfigError(
                f"clients.count: given {clients}; allowed: at most {len(able)}, the users with "
                f"{self.min_samples} or more samples; lower it or partition.min_samples"
            )
        most = able[np.argsort(-counts[able], kind="stable")[:clients]]
        client = np.full(len(counts), NOBODY)
        client[np.sort(most)] = np.arange(clients)
        held_out = np.floor(counts * self.test_fraction + 1e-9).astype(np.int64)
        tail = _rank(user) >= (counts - held_out)[user]
        return np.where(tail, NOBODY, client[user]), np.where(tail, client[user], NOBODY)


PARTITIONS: dict[str, type[Partition]] = {
    "iid": IID,
    "quantity": Quantity,
    "dirichlet": Dirichlet,
    "shards": LabelShards,
    "users": Users,
}


def partition(
    spec: Partition,
    y: np.ndarray,
    y_test: np.ndarray,
    users: np.ndarray | None,
    clients: int,
    classes: int,
    seed: int,
) -> tuple[Shards, Shards]:
    """The clients' training and test splits of labels y [N] and y_test [N_test]; users [N] or None.

    Training splits are rows of the training set; test splits are rows of what `spec.test_source` says, and
    may be empty. Raises ConfigError if a client would have nothing to train on.
    """
    _require(len(y), clients, 1)
    generator = numpy_generator(seed, "partition", spec.name)
    owners = spec.owners(Labels(y, y_test, users, classes), clients, generator)
    train, test = (Shards.of(owner, clients) for owner in owners)
    empty = np.flatnonzero(train.sizes == 0)
    if len(empty):
        raise ConfigError(
            f"partition: {spec.name} leaves {len(empty)} of {clients} clients without training data, client "
            f"{empty[0]} the first; lower clients.count or take more data than {len(y)} samples"
        )
    return train, test


def label_counts(shards: Shards, y: np.ndarray, classes: int) -> np.ndarray:
    """How many samples of each class each client holds: [clients, classes] int64."""
    cell = np.repeat(np.arange(len(shards)), shards.sizes) * classes + y[shards.idx]
    return np.bincount(cell, minlength=len(shards) * classes).reshape(len(shards), classes)


def hold_out(y: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that stay and rows held out, ascending int64: at random, of each class the rounded fraction."""
    totals = np.bincount(y)
    pool = _shuffled_by_class(y, numpy_generator(seed, "hold_out"))
    held = _rank(y[pool]) < np.rint(totals * fraction)[y[pool]]
    return np.sort(pool[~held]), np.sort(pool[held])


def _require(samples: int, clients: int, each: int) -> None:
    if samples < clients * each:
        raise ConfigError(
            f"clients.count: given {clients}; allowed: at most {samples // each}, for {samples} training "
            f"samples and at least {each} a client; lower it or take more data"
        )


def _deal(rows: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Owners [len(rows)]: the first sizes[0] of `rows` are client 0's, and so on; the last ones nobody's."""
    owner = np.full(len(rows), NOBODY)
    owner[rows[: sizes.sum()]] = np.repeat(np.arange(len(sizes)), sizes)
    return owner


def _apportion(shares: np.ndarray, totals) -> np.ndarray:
    """Whole numbers in proportion to shares [..., clients] that sum to totals [...] over the last axis."""
    cumulated = np.cumsum(shares, -1, dtype=np.float64)
    # without the millionth, float noise moves a sample of equal shares
    bounds = np.floor(cumulated / cumulated[..., -1:] * np.expand_dims(totals, -1) + 1e-6)
    return np.diff(bounds, prepend=0, axis=-1).astype(np.int64)


def _rank(values: np.ndarray) -> np.ndarray:
    """How many equal values stand before each of `values` [n], whole numbers of at least 0."""
    counts = np.bincount(values)
    rank = np.empty(len(values), np.int64)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    rank[np.argsort(values, kind="stable")] = np.arange(len(values)) - first
    return rank


def _shuffled_by_class(y: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """All rows, class after class, in random order within each."""
    rows = generator.permutation(len(y))
    return rows[np.argsort(y[rows], kind="stable")]


def _dirichlet(alpha: float, shape: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """Independent rows of Dir(alpha, ..., alpha), none of them exactly 0."""
    rows, columns = shape
    return np.maximum(generator.dirichlet(np.full(columns, alpha), rows), TINY)


def _cap(shares: np.ndarray, totals: np.ndarray) -> None:
    """Sets the shares [classes, clients] of clients that are full to 0, class by class, in place."""
    limit = totals.sum() / shares.shape[1]
    held = np.zeros(shares.shape[1], np.int64)
    for share, total in zip(shares, totals, strict=True):
        share[held >= limit] = 0
        if total:
            held += _apportion(share, total)


def _hand_out(y: np.ndarray, shares: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Owners [N]: each class in the proportions shares [classes, clients]."""
    classes, clients = shares.shape
    counts = _apportion(shares, np.bincount(y, minlength=classes))
    owner = np.empty(len(y), np.int64)
    owner[_shuffled_by_class(y, generator)] = np.repeat(np.tile(np.arange(clients), classes), counts.ravel())
    return owner


def _take_shards(
    y: np.ndarray,
    holder: np.ndarray,
    label: np.ndarray,
    cut: tuple[int, int],
    generator: np.random.Generator,
) -> np.ndarray:
    """Owners [N]: client holder[i] gets a random shard of class label[i]; cut = (classes, shards of each)."""
    classes, shards = cut
    totals, rank = np.bincount(y, minlength=classes), _rank(y)
    size = totals[y] // shards
    shard = np.where(rank < size * shards, rank // np.maximum(size, 1), rank - size * shards)
    order = generator.permuted(np.tile(np.arange(shards), (classes, 1)), axis=1)
    owner = np.full((classes, shards), NOBODY)
    owner[label, order[label, _rank(label)]] = holder
    return owner[y, shard]


def _draw_in_turn(y: np.ndarray, prior: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Owners [N] by FIARSE's balanced rule; prior [clients, classes].

    Between two classes that run out the draws are independent, so they are made all at once: the same
    distribution as sample by sample.
    """
    clients, classes = prior.shape
    turns = _turns(clients, len(y) // clients, generator)
    stock = np.bincount(y, minlength=classes)
    first, drawn, done = np.cumsum(stock) - stock, np.empty_like(turns), 0
    while done < len(turns):
        drawn[done:] = _categorical(prior * (stock > 0), turns[done:], generator)
        out = np.flatnonzero(_rank(drawn[done:]) >= stock[drawn[done:]])
        until = done + out[0] if len(out) else len(turns)
        stock -= np.bincount(drawn[done:until], minlength=classes)
        done = until
    owner = np.full(len(y), NOBODY)
    owner[_shuffled_by_class(y, generator)[first[drawn] + _rank(drawn)]] = turns
    return owner


def _turns(clients: int, room: int, generator: np.random.Generator) -> np.ndarray:
    """Clients in the order in which they draw [clients * room]: each time uniformly one that has room."""
    turns, held = [np.empty(0, np.int64)], np.zeros(clients, np.int64)
    while (left := clients * room - held.sum()) > 0:
        able = np.flatnonzero(held < room)
        drawn = able[generator.integers(len(able), size=left)]
        kept = drawn[held[drawn] + _rank(drawn) < room]
        held += np.bincount(kept, minlength=clients)
        turns.append(kept)
    return np.concatenate(turns)


def _categorical(weights: np.ndarray, rows: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """One column for each of `rows` [n], drawn by the weights [clients, classes] of that row."""
    cumulated = np.cumsum(weights, 1)
    cumulated /= cumulated[:, -1:]
    ticket, column = generator.random(len(rows)), np.zeros(len(rows), np.int64)
    for bound in cumulated.T[:-1]:
        column += ticket >= bound[rows]
    return column
