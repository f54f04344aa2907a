"""What a user's own images have in common, whether they are arrays, a folder or a function's."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from rayfl.config import ConfigError
from rayfl.core.seeds import numpy_generator
from rayfl.data.arrays import Arrays, Split
from rayfl.data.images import ImageData, Images
from rayfl.data.partition import hold_out

Stored = Literal["uint8", "float32"]


class OwnImages(ImageData, ABC):
    """How pixels of a user's own become what a network sees: x / scale, less the mean, by the standard deviation."""

    scale: float | None = Field(default=None, gt=0)
    """What stored pixels are divided by; unless given 255 for bytes and 1 for floats."""
    mean: tuple[float, ...] | None = Field(default=None, min_length=1)
    """Of x / scale: a number for all channels, or one a channel; unless given 0.5 for bytes and 0 for floats."""
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(default=None, min_length=1)
    """Likewise; unless given 0.25 for bytes and 1 for floats."""
    crop: int = Field(default=0, ge=0, le=512)
    """Train on random crops, after padding by so many stored pixels a side."""
    flip: bool = False
    """Train on random horizontal flips."""

    @property
    @abstractmethod
    def dtype(self) -> Stored:
        """What stored pixels are."""

    @property
    def preprocessing(self) -> Images:
        scale, mean, std = (255.0, 0.5, 0.25) if self.dtype == "uint8" else (1.0, 0.0, 1.0)
        return Images(
            self.scale or scale,
            self._by_channel("mean", self.mean or (mean,)),
            self._by_channel("std", self.std or (std,)),
            self.crop,
            self.flip,
        )

    def _by_channel(self, field: str, given: tuple[float, ...]) -> tuple[float, ...]:
        channels = self.shape[0]
        if len(given) not in (1, channels):
            raise ConfigError(
                f"data.{field}: given {len(given)} numbers; allowed: 1, or {channels}, the number of channels"
            )
        return given if len(given) == channels else given * channels


def shape_of(x: np.ndarray, place: str) -> tuple[int, int, int]:
    """Channels, height and width of images x [N, C, H, W]."""
    if x.ndim != 4:
        hint = "; x[:, None] has the one channel that gray images need" if x.ndim == 3 else ""
        raise ConfigError(f"{place}: given an array {list(x.shape)}; allowed: images [N, C, H, W]{hint}")
    _, channels, height, width = x.shape
    if width in (1, 3, 4) and channels == height:
        raise ConfigError(
            f"{place}: given an array {list(x.shape)}, whose channels seem to be last; allowed: images [N, C, H, W]; "
            "x.transpose(0, 3, 1, 2) puts the channels first"
        )
    return channels, height, width


def classes_of(labels: Sequence[np.ndarray], place: str) -> int:
    """C, of labels that are all of 0 ... C - 1."""
    found = np.unique(np.concatenate([y.ravel() for y in labels]))
    if not np.array_equal(found, np.arange(len(found))):
        raise ConfigError(
            f"{place}: given {len(found)} different labels, from {found[0]} to {found[-1]}; allowed: 0 to C - 1, each "
            "at least once; number them anew, or say how many `classes` there are if some have no sample"
        )
    return len(found)


def with_test(samples: Split, users: np.ndarray | None, fraction: float) -> Arrays:
    """Of every class the rounded fraction becomes the test set, at random, from a fixed seed."""
    kept, held = hold_out(samples["y"], fraction, numpy_generator(0, "hold_out", "test"))
    if not len(held) or not len(kept):
        raise ConfigError(
            f"data: given {len(samples['y'])} samples and no test set, which leaves {len(kept)} for training and "
            f"{len(held)} for testing; allowed: a test set, or more samples of a class"
        )
    train, test = ({name: array[rows] for name, array in samples.items()} for rows in (kept, held))
    return Arrays(train, test, None if users is None else users[kept])
