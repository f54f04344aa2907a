"""Label skew drawn from Dirichlet distributions."""

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rayfl.config import ConfigError
from rayfl.data.partition.base import NOBODY, Labels, Owners, Partition, apportion, rank, require, shuffled_by_class

REDRAWS = 1000
"""Maximum number of draws of a whole split."""
TINY = 1e-300
"""Smallest share. If a small alpha gives only zeros, the draw becomes uniform."""


class Dirichlet(Partition):
    """Label skew by Dirichlet(alpha): the smaller alpha, the fewer classes per client. The test split has the label
    proportions of the training split."""

    name: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(default=0.3, gt=0)
    """Concentration: 0.1 is strong skew, 100 nearly none."""
    balance: Literal["none", "cap", "equal"] = "none"
    """Balance of client sizes.

    none: each class is distributed in proportions Dir(alpha, ..., alpha) over the clients.
    cap: as none, one class after another, but a client with N / clients samples gets none of the next classes (NeFL,
    FIARSE's AG News, SpaFL's CIFAR-100).
    equal: each client has label proportions Dir(alpha, ..., alpha). Clients in random order draw one sample at a time
    until all have floor(N / clients) (FIARSE's CIFAR).

    `none` and `cap` use all samples and are redrawn until no client is below `min_samples`; `equal` drops the
    remainder.
    """
    min_samples: int = Field(default=2, ge=1)
    """Minimum number of training samples per client (NeFL: 10; FIARSE's AG News: 4, the number of classes)."""
    samples: int | None = Field(default=None, ge=1)
    """Number of training samples per client, for `balance: equal` (FedRoRA: 1000). Default: floor(N / clients)."""

    groups: int = Field(default=1, ge=1)
    """Groups of clients with similar labels, for `balance: equal`: client k is in group k mod groups. With several, a
    group has label proportions q from Dir(group_alpha, ..., group_alpha), and a client Dir(alpha classes q)."""
    group_alpha: float = Field(default=0.5, gt=0)
    """Concentration of groups: 0.1 is strong skew, 100 nearly none."""

    @model_validator(mode="after")
    def _only_of_equal_clients(self) -> Self:
        for name, given in (("samples", self.samples is not None), ("groups", self.groups > 1)):
            if given and self.balance != "equal":
                raise ConfigError(f"{name}: not supported with balance: {self.balance}. Allowed: balance: equal")
        return self

    def owners(self, labels: Labels, clients: int, generator: np.random.Generator) -> Owners:
        each = "min_samples" if self.samples is None else "samples"
        require(len(labels.train), clients, getattr(self, each), each)
        if self.balance == "equal":
            prior = self._priors(clients, labels.classes, generator)
            size = self.samples or len(labels.train) // clients
            train = _draw_in_turn(labels.train, prior, size, generator)
            # as many per training sample: the labels of a test set that is used up could not follow the proportions
            most = len(labels.test) // clients
            tested = most if self.samples is None else min(most, -(-size * len(labels.test) // len(labels.train)))
            test = _draw_in_turn(labels.test, prior, tested, generator)
        else:
            shares = self._shares(labels, clients, generator)
            train, test = (_hand_out(y, shares, generator) for y in (labels.train, labels.test))
        return train, test

    def _priors(self, clients: int, classes: int, generator: np.random.Generator) -> np.ndarray:
        """Return the label proportions of every client [clients, classes]."""
        if self.groups == 1:
            return _dirichlet(self.alpha, (clients, classes), generator)
        groups = self.alpha * classes * _dirichlet(self.group_alpha, (self.groups, classes), generator)
        return np.maximum([generator.dirichlet(groups[client % self.groups]) for client in range(clients)], TINY)

    def _shares(self, labels: Labels, clients: int, generator: np.random.Generator) -> np.ndarray:
        """Return the proportions of each class over the clients [classes, clients]."""
        totals = np.bincount(labels.train, minlength=labels.classes)
        smallest = 0
        for _ in range(REDRAWS):
            shares = _dirichlet(self.alpha, (labels.classes, clients), generator)
            if self.balance == "cap":
                _cap(shares, totals)
            least = apportion(shares, totals).sum(0).min()
            if least >= self.min_samples:
                return shares
            smallest = max(smallest, int(least))
        raise ConfigError(
            f"partition.min_samples: {self.min_samples} was not reached in {REDRAWS} draws of alpha = {self.alpha:g} "
            f"over {clients} clients and {len(labels.train)} training samples. The largest minimum found is "
            f"{smallest}. Hint: lower clients.count, raise alpha, or set balance to cap or equal"
        )


def _dirichlet(alpha: float, shape: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """Draw independent rows of Dir(alpha, ..., alpha), at least TINY."""
    rows, columns = shape
    return np.maximum(generator.dirichlet(np.full(columns, alpha), rows), TINY)


def _cap(shares: np.ndarray, totals: np.ndarray) -> None:
    """Set the shares [classes, clients] of full clients to 0 in place, one class after another."""
    limit = totals.sum() / shares.shape[1]
    sizes = np.zeros(shares.shape[1], np.int64)
    for share, total in zip(shares, totals, strict=True):
        if total:
            share[sizes >= limit] = 0
            sizes += apportion(share, total)


def _hand_out(y: np.ndarray, shares: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return owners [N] with each class in the proportions shares [classes, clients]."""
    classes, clients = shares.shape
    counts = apportion(shares, np.bincount(y, minlength=classes))
    owner = np.empty(len(y), np.int64)
    owner[shuffled_by_class(y, generator)] = np.repeat(np.tile(np.arange(clients), classes), counts.ravel())
    return owner


def _draw_in_turn(y: np.ndarray, prior: np.ndarray, room: int, generator: np.random.Generator) -> np.ndarray:
    """Return owners [N] by FIARSE's balanced rule with `room` samples per client and prior [clients, classes].

    Draws are independent until a class runs out, so they are made together, with the same distribution.
    """
    clients, classes = prior.shape
    turns = _turns(clients, room, generator)
    stock = np.bincount(y, minlength=classes)
    first, drawn, done = np.cumsum(stock) - stock, np.empty_like(turns), 0
    while done < len(turns):
        drawn[done:] = _categorical(prior * (stock > 0), turns[done:], generator)
        out = np.flatnonzero(rank(drawn[done:]) >= stock[drawn[done:]])
        until = done + out[0] if len(out) else len(turns)
        stock -= np.bincount(drawn[done:until], minlength=classes)
        done = until
    owner = np.full(len(y), NOBODY)
    owner[shuffled_by_class(y, generator)[first[drawn] + rank(drawn)]] = turns
    return owner


def _turns(clients: int, room: int, generator: np.random.Generator) -> np.ndarray:
    """Draw the order of clients [clients * room]: in each turn uniformly one of the clients that are not full."""
    turns, sizes = [np.empty(0, np.int64)], np.zeros(clients, np.int64)
    while (left := clients * room - sizes.sum()) > 0:
        able = np.flatnonzero(sizes < room)
        drawn = able[generator.integers(len(able), size=left)]
        valid = drawn[sizes[drawn] + rank(drawn) < room]
        sizes += np.bincount(valid, minlength=clients)
        turns.append(valid)
    return np.concatenate(turns)


def _categorical(weights: np.ndarray, rows: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Draw one column for each of `rows` [n] by the weights [clients, classes] of that row."""
    cumulated = np.cumsum(weights, 1)
    cumulated /= cumulated[:, -1:]
    ticket, column = generator.random(len(rows)), np.zeros(len(rows), np.int64)
    for bound in cumulated.T[:-1]:
        column += ticket >= bound[rows]
    return column
