"""One client per natural user."""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.config import ConfigError
from rayfl.data.arrays import known_users
from rayfl.data.partition.base import NOBODY, Labels, Owners, Partition, rank


class Users(Partition):
    """One client per natural user of the data set: the users with most samples, in order of user id. Samples that the
    server holds out count, so that the users are the same for all seeds, except users without any other sample. Samples
    of unknown users are not used.

    A user's test split are its samples in the test set. If the test set is by other users, the last samples of each
    user's training split, in stored order, are its test split.
    """

    name: Literal["users"] = "users"
    test_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of a user's samples that become its test split, rounded down (LEAF: 0.1). Ignored if the test set has
    samples of the users."""
    min_samples: int = Field(default=2, ge=1)
    """Minimum number of samples per user. Other users are not used."""

    covers_classes: ClassVar = False

    def tested_on(self, labels: Labels) -> Literal["test", "train"]:
        users = labels.users if labels.all_users is None else labels.all_users
        if labels.test_users is None or users is None:
            return "train"
        return "test" if np.isin(labels.test_users[known_users(labels.test_users)], users).any() else "train"

    def owners(self, labels: Labels, clients: int, generator: np.random.Generator) -> Owners:
        if labels.users is None:
            raise ConfigError(
                "partition.name: users needs user ids, and the data set has none. Allowed: a data set with user ids, "
                "such as mnist with the file QMNIST/raw/qmnist-train-labels-idx2-int.gz in its folder, or your own "
                "with `users`. Hint: choose another partition"
            )
        names, user, counts = np.unique(labels.users, return_inverse=True, return_counts=True)
        whole = labels.users if labels.all_users is None else labels.all_users
        sizes = np.bincount(np.searchsorted(names, whole[np.isin(whole, names)]), minlength=len(names))
        able = np.flatnonzero((sizes >= self.min_samples) & known_users(names))
        if clients > len(able):
            raise ConfigError(
                f"clients.count: {clients} is not valid. Allowed: at most {len(able)}, the number of users with at "
                f"least {self.min_samples} samples, not all of them held out. Hint: lower clients.count, "
                "partition.min_samples or evaluation.holdout"
            )
        most = able[np.argsort(-sizes[able], kind="stable")[:clients]]
        client = np.full(len(counts), NOBODY)
        client[np.sort(most)] = np.arange(clients)
        if labels.test_users is not None and self.tested_on(labels) == "test":
            place = np.minimum(np.searchsorted(names, labels.test_users), len(names) - 1)
            return client[user], np.where(names[place] == labels.test_users, client[place], NOBODY)
        held_out = np.floor(counts * self.test_fraction + 1e-9).astype(np.int64)
        tail = rank(user) >= (counts - held_out)[user]
        return np.where(tail, NOBODY, client[user]), np.where(tail, client[user], NOBODY)
