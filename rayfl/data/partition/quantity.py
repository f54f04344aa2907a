"""Clients of unequal sizes."""

from typing import Literal

import numpy as np
from pydantic import Field

from rayfl.data.partition.base import Labels, Owners, Partition, apportion, deal, require


class Quantity(Partition):
    """Every client gets `min_samples`; the other samples are distributed in proportion to lognormal shares.

    Labels are IID. All samples are used; test samples are distributed in proportion to training samples.
    """

    name: Literal["quantity"] = "quantity"
    sigma: float = Field(default=1.0, ge=0, le=50)
    """Standard deviation of the logarithm of a share. 0 gives equal sizes. Larger values than 50 could overflow."""
    min_samples: int = Field(default=2, ge=1)
    """Minimum number of training samples per client."""

    def owners(self, labels: Labels, clients: int, generator: np.random.Generator) -> Owners:
        require(len(labels.train), clients, self.min_samples, "min_samples")
        shares = generator.lognormal(0.0, self.sigma, clients)
        free = len(labels.train) - clients * self.min_samples
        sizes = self.min_samples + apportion(shares, free)
        test_sizes = apportion(sizes, len(labels.test))
        return (
            deal(generator.permutation(len(labels.train)), sizes),
            deal(generator.permutation(len(labels.test)), test_sizes),
        )
