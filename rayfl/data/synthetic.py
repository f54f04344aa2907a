"""Generated images, tables and series of any number and shape, for scale studies and tests."""

from math import prod
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rayfl.config import ConfigError
from rayfl.core.seeds import numpy_generator
from rayfl.data.arrays import Arrays, Split
from rayfl.data.images import MOST_CLASSES, ImageData, Images
from rayfl.data.variables import Shaped

CONTRAST, NOISE = 64, 192
"""Pixels are a class pattern in [0, CONTRAST) plus noise in [0, NOISE), both uniform."""
MEMORY = 8 * 10**9
"""Maximum size in bytes, including labels."""

Positive = Annotated[int, Field(ge=1)]


class Synthetic(Shaped, ImageData):
    """One fixed pattern per class plus noise. A linear classifier learns it, better with more pixels.

    The arrays depend on the fields below only, not on the run's seed.
    """

    name: Literal["synthetic"] = "synthetic"
    samples: int = Field(default=2000, ge=1)
    """Number of training samples, balanced over the classes."""
    test_samples: int = Field(default=500, ge=1)
    """Number of test samples."""
    shape: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=3)] = (1, 8, 8)  # pyright: ignore
    """Shape of one sample: [C, H, W] of an image, [F] of a table's row, or [C, T] of a series."""
    classes: int = Field(default=10, ge=1, le=MOST_CLASSES)  # pyright: ignore[reportIncompatibleVariableOverride]

    @model_validator(mode="after")
    def _fits_in_memory(self) -> Self:
        samples = self.samples + self.test_samples
        asked = (samples + self.classes) * prod(self.shape) + 8 * samples
        if asked > MEMORY:
            raise ConfigError(
                f"samples, test_samples, shape and classes: the images need {asked:,} bytes. Allowed: at most "
                f"{MEMORY:,} bytes"
            )
        return self

    def load(self) -> Arrays:
        patterns = numpy_generator(0, "synthetic", "patterns").integers(
            CONTRAST, size=(self.classes, *self.shape), dtype=np.uint8
        )
        train = self._images("train", self.samples, patterns)
        return Arrays(train, self._images("test", self.test_samples, patterns))

    def _images(self, part: str, count: int, patterns: np.ndarray) -> Split:
        y = np.arange(count) % self.classes
        x = numpy_generator(0, "synthetic", part).integers(NOISE, size=(count, *self.shape), dtype=np.uint8)
        for c in range(min(self.classes, count)):
            x[c :: self.classes] += patterns[c]
        return {"x": x, "y": y}

    @property
    def preprocessing(self) -> Images:
        return Images(mean=(0.5,) * self.shape[0], std=(0.23,) * self.shape[0])
