"""Label skew drawn from Dirichlet distributions."""

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rayfl.config import ConfigError
from rayfl.data.partition.base import (
    NOBODY,
    Labels,
    Owners,
    Partition,
    apportion,
    rank,
    require,
    shuffled_by_class,
)

REDRAWS = 1000
"""Draws of a whole Dirichlet split before it is given up."""
TINY = 1e-300
"""Smallest share: where a small alpha leaves nothing but zeros, the draw becomes uniform."""


class Dirichlet(Partition):
    """Label skew of strength alpha: the smaller, the fewer classes a client sees. The test split has the proportions of
    the training split."""

    name: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(default=0.3, gt=0)
    """Concentration: 0.1 is strong skew, 100 nearly none."""
    balance: Literal["none", "cap", "equal"] = "none"
    """How sizes come out.

    none: each class goes out in proportions Dir(alpha, ..., alpha) over the clients.
    cap: the same, class after class, but a client that already holds N / clients samples gets nothing of
    the next classes (NeFL, FIARSE's AG News, SpaFL's CIFAR-100).
    equal: each client has label proportions Dir(alpha, ..., alpha) and, in random turns, draws one sample at
    a time, until all hold floor(N / clients) (FIARSE's CIFAR).

    `none` and `cap` use every sample and are drawn again until no client is too small; `equal` leaves out
    the remainder.
    """
    min_samples: int = Field(default=2, ge=1)
    """Training samples of the smallest client, at least (NeFL: 10; FIARSE's AG News: 4, the number of classes)."""
    samples: int | None = Field(default=None, ge=1)
    """With `balance: equal`, training samples of each client instead of floor(N / clients) (FedRoRA: 1000)."""

    @model_validator(mode="after")
    def _samples_of_equal_clients(self) -> Self:
        if self.samples is not None and self.balance != "equal":
            raise ValueError("samples with balance: equal only")
        return self

    def owners(self, labels: Labels, clients: int, generator: np.random.Generator) -> Owners:
        require(len(labels.train), clients, self.samples or self.min_samples)
        if self.balance == "equal":
            prior = _dirichlet(self.alpha, (clients, labels.classes), generator)
            train = _draw_in_turn(labels.train, prior, self.samples or len(labels.train) // clients, generator)
            test = _draw_in_turn(labels.test, prior, len(labels.test) // clients, generator)
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
            least = apportion(shares, totals).sum(0).min()
            if least >= self.min_samples:
                return shares
            smallest = max(smallest, int(least))
        raise ConfigError(
            f"partition.min_samples: given {self.min_samples}, but in {REDRAWS} draws of alpha = "
            f"{self.alpha:g} over {clients} clients the smallest client never had more than {smallest} "
            f"of {len(labels.train)} training samples; lower min_samples or clients.count, raise alpha, "
            "or set balance to cap or equal"
        )


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
            held += apportion(share, total)


def _hand_out(y: np.ndarray, shares: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Owners [N]: each class in the proportions shares [classes, clients]."""
    classes, clients = shares.shape
    counts = apportion(shares, np.bincount(y, minlength=classes))
    owner = np.empty(len(y), np.int64)
    owner[shuffled_by_class(y, generator)] = np.repeat(np.tile(np.arange(clients), classes), counts.ravel())
    return owner


def _draw_in_turn(y: np.ndarray, prior: np.ndarray, room: int, generator: np.random.Generator) -> np.ndarray:
    """Owners [N] by FIARSE's balanced rule, `room` samples each; prior [clients, classes].

    Between two classes that run out the draws are independent, so they are made all at once: the same
    distribution as sample by sample.
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
    """Clients in the order in which they draw [clients * room]: each time uniformly one that has room."""
    turns, held = [np.empty(0, np.int64)], np.zeros(clients, np.int64)
    while (left := clients * room - held.sum()) > 0:
        able = np.flatnonzero(held < room)
        drawn = able[generator.integers(len(able), size=left)]
        kept = drawn[held[drawn] + rank(drawn) < room]
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
