"""Equal shares at random."""

from typing import Literal

import numpy as np

from rayfl.data.partition.base import Labels, Owners, Partition, deal


class IID(Partition):
    """Disjoint random subsets of floor(N / clients) samples. The remainder is dropped (HeteroFL)."""

    name: Literal["iid"] = "iid"

    def owners(self, labels: Labels, clients: int, generator: np.random.Generator) -> Owners:
        train, test = (self._split(len(y), clients, generator) for y in (labels.train, labels.test))
        return train, test

    def _split(self, samples: int, clients: int, generator: np.random.Generator) -> np.ndarray:
        size = samples // clients
        return deal(generator.permutation(samples), np.full(clients, size))
