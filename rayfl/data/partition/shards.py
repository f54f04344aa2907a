"""A fixed number of labels per client."""

from typing import Literal

import numpy as np
from pydantic import Field

from rayfl.config import ConfigError
from rayfl.data.partition.base import NOBODY, Labels, Owners, Partition, rank


class LabelShards(Partition):
    """`labels` classes per client, as HeteroFL's non-iid-n (section 4 there; also FedRolex).

    Each class is divided, in stored order, into labels * clients / classes shards; the first shards get one sample of
    the remainder each. Every client is dealt `labels` labels and gets a random shard of each.
    """

    name: Literal["shards"] = "shards"
    labels: int = Field(default=2, ge=1)
    """Classes per client (HeteroFL: 2; FedRolex: 2 or 5 of CIFAR-10, 20 or 50 of CIFAR-100)."""
    duplicates: Literal["merge", "keep", "resample"] = "merge"
    """Handling of a label that a client is dealt twice. merge: it gets one shard, the other is dropped, as in the
    authors' code (on average 9.5 of 100 clients with 2 of 10 labels). keep: it gets both (LG-FedAvg). resample:
    no label is dealt twice to a client; labels are dealt from the classes with most shards left."""

    def owners(self, labels: Labels, clients: int, generator: np.random.Generator) -> Owners:
        # a class without a training sample has no shards
        present = np.unique(labels.train)
        classes = len(present)
        if self.labels > classes:
            raise ConfigError(f"partition.labels: {self.labels} is not valid. Allowed: at most {classes} classes")
        shards, rest = divmod(self.labels * clients, classes)
        if rest:
            raise ConfigError(
                f"partition.labels: {self.labels} labels for {clients} clients do not divide the {classes} classes of "
                f"the training samples equally. Allowed: labels * clients a multiple of {classes}"
            )
        dealt = np.sort(present[self._deal_labels(clients, classes, shards, generator)])
        repeated = np.diff(dealt, prepend=NOBODY) == 0
        taken = ~repeated if self.duplicates == "merge" else np.ones_like(repeated)
        holder, label = np.nonzero(taken)[0], dealt[taken]
        train, test = (
            _take_shards(y, holder, label, (labels.classes, shards), generator) for y in (labels.train, labels.test)
        )
        return train, test

    def _deal_labels(self, clients: int, classes: int, shards: int, generator: np.random.Generator) -> np.ndarray:
        """Return the labels of every client [clients, labels], each class `shards` times in total."""
        if self.duplicates != "resample":
            deck = np.repeat(np.arange(classes), shards)
            return generator.permutation(deck).reshape(clients, self.labels)
        dealt, left = np.empty((clients, self.labels), np.int64), np.full(classes, shards)
        for hand in dealt:
            hand[:] = np.argsort(left + generator.random(classes))[-self.labels :]
            left[hand] -= 1
        return generator.permutation(dealt)


def _take_shards(
    y: np.ndarray, holder: np.ndarray, label: np.ndarray, cut: tuple[int, int], generator: np.random.Generator
) -> np.ndarray:
    """Return owners [N]: client holder[i] gets a random shard of class label[i]; cut = (classes, shards per class)."""
    classes, shards = cut
    totals, place = np.bincount(y, minlength=classes), rank(y)
    size = totals[y] // shards
    shard = np.where(place < size * shards, place // np.maximum(size, 1), place - size * shards)
    order = generator.permuted(np.tile(np.arange(shards), (classes, 1)), axis=1)
    owner = np.full((classes, shards), NOBODY)
    owner[label, order[label, rank(label)]] = holder
    return owner[y, shard]
