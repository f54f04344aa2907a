"""A few labels a client."""

from typing import Literal

import numpy as np
from pydantic import Field

from rayfl.config import ConfigError
from rayfl.data.partition.base import NOBODY, Labels, Owners, Partition, rank


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


def _take_shards(
    y: np.ndarray,
    holder: np.ndarray,
    label: np.ndarray,
    cut: tuple[int, int],
    generator: np.random.Generator,
) -> np.ndarray:
    """Owners [N]: client holder[i] gets a random shard of class label[i]; cut = (classes, shards of each)."""
    classes, shards = cut
    totals, place = np.bincount(y, minlength=classes), rank(y)
    size = totals[y] // shards
    shard = np.where(place < size * shards, place // np.maximum(size, 1), place - size * shards)
    order = generator.permuted(np.tile(np.arange(shards), (classes, 1)), axis=1)
    owner = np.full((classes, shards), NOBODY)
    owner[label, order[label, rank(label)]] = holder
    return owner[y, shard]
