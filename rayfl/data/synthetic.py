"""Images made up on the spot, of any number and shape: for scale studies and tests."""

from typing import Literal

import numpy as np
from pydantic import Field

from rayfl.data.base import Arrays, DataSet
from rayfl.seeds import numpy_generator
from rayfl.training import Preprocessing

CONTRAST, NOISE = 64, 192
"""Pixels are a class pattern in [0, CONTRAST) plus noise in [0, NOISE), both uniform, so they fill a byte."""


class Synthetic(DataSet):
    """One fixed pattern a class under noise: a linear classifier learns it, the better the more pixels.

    The same arrays in every run: they depend on the fields below only, not on the run's seed.
    """

    name: Literal["synthetic"] = "synthetic"
    samples: int = Field(default=2000, ge=1)
    """Training images; the classes come round in turn, so they are balanced."""
    test_samples: int = Field(default=500, ge=1)
    """Test images."""
    shape: tuple[int, int, int] = (1, 8, 8)  # pyright: ignore[reportIncompatibleVariableOverride]
    """Channels, height and width of one image."""
    classes: int = Field(default=10, ge=1)  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of classes."""

    def load(self) -> Arrays:
        patterns = numpy_generator(0, "synthetic", "patterns").integers(
            CONTRAST, size=(self.classes, *self.shape), dtype=np.uint8
        )
        train = self._images("train", self.samples, patterns)
        return Arrays(*train, *self._images("test", self.test_samples, patterns))

    def _images(self, part: str, count: int, patterns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(count) % self.classes
        x = numpy_generator(0, "synthetic", part).integers(NOISE, size=(count, *self.shape), dtype=np.uint8)
        x += patterns[y]
        return x, y

    @property
    def preprocessing(self) -> Preprocessing:
        return Preprocessing(mean=(0.5,) * self.shape[0], std=(0.23,) * self.shape[0])
