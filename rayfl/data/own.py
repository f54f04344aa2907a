"""Base classes of the user's own data sets: images in a folder, arrays and functions of samples of any shape."""

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rayfl.config import ConfigError
from rayfl.core.seeds import numpy_generator
from rayfl.data.arrays import Arrays, Split, as_array, as_integers
from rayfl.data.goal import Classes, Goal, LabelSets, Numbers
from rayfl.data.images import ImageData, Images
from rayfl.data.partition import hold_out
from rayfl.data.scores import Targets
from rayfl.data.variables import Shaped

Stored = Literal["uint8", "float32"]


class OwnImages(ImageData, ABC):
    """The user's own images, normalised to (x / scale - mean) / std."""

    scale: float | None = Field(default=None, gt=0)
    """Divisor of stored pixels. Default: 255 for bytes, 1 for floats."""
    mean: tuple[float, ...] | None = Field(default=None, min_length=1)
    """Mean of x / scale: one number, or one per channel. Default: 0.5 for bytes, 0 for floats."""
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(default=None, min_length=1)
    """Standard deviation of x / scale: one number, or one per channel. Default: 0.25 for bytes, 1 for floats."""
    crop: int = Field(default=0, ge=0, le=512)
    """Train on random crops after padding by this many stored pixels per side. 0: no crops."""
    flip: bool = False
    """Train on random horizontal flips."""

    @model_validator(mode="after")
    def _is_raw_alone(self) -> Self:
        given = [name for name in ("scale", "mean", "std", "crop", "flip") if getattr(self, name)]
        if self.pixels == "raw" and given:
            raise ConfigError(f"pixels: raw is not supported with {', '.join(given)}. Allowed: normalised")
        return self

    @property
    @abstractmethod
    def dtype(self) -> Stored:
        """Data type of stored pixels."""

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
                f"data.{field}: {len(given)} numbers are not valid. Allowed: 1, or {channels} (one per channel)"
            )
        return given if len(given) == channels else given * channels


class Targeted(Shaped):
    """The user's own samples, with targets of any kind."""

    target: Targets = "class"
    """Targets y. class: one class per sample, [N] from 0. numbers: regression, [N] or [N, K]. labels: several labels
    at once, [N, L] of 0 and 1."""
    quantiles: int = Field(default=10, ge=1, le=1000)
    """With `target: numbers`: equal parts of the samples, ordered by the first number, which partition rules treat as
    classes."""

    def goal_of(self, outputs: int) -> Goal:
        """Return the goal with this number of classes, numbers or labels."""
        if self.target == "numbers":
            return Numbers(outputs, self.quantiles)
        return Classes(outputs) if self.target == "class" else LabelSets(outputs)

    def outputs_of(self, labels: Sequence[np.ndarray]) -> int:
        """Return the number of classes, numbers or labels of targets (`read_targets`) of all splits."""
        return classes_of(labels, "data: y") if self.target == "class" else labels[0].shape[1]


def read_targets(y: Any, target: Targets, place: str) -> np.ndarray:
    """Return targets as they are stored: [N] classes, [N, K] numbers, or [N, L] labels."""
    if target == "numbers":
        found = as_array(y, place)
        return found[:, None] if found.ndim == 1 else found
    try:
        found = as_integers(y, place)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. Hint: `target: numbers` for regression, np.unique(y, return_inverse=True)[1] for named classes"
        ) from None
    if target == "labels" and found.ndim != 2:
        raise ConfigError(f"{place} has shape {list(found.shape)}. Allowed: [N, L] of 0 and 1 with `target: labels`")
    return found


def tidy(name: str) -> str:
    """Return the name of a class, category or user without spaces at its ends and in Unicode's composed form, so that
    names that look equal are equal."""
    return unicodedata.normalize("NFC", name).strip()


def shape_of(x: np.ndarray, place: str) -> tuple[int, ...]:
    """Return the shape of one sample: a table's row [F], a series [C, T], or an image [C, H, W]."""
    if not 2 <= x.ndim <= 4:
        raise ConfigError(
            f"{place} has shape {list(x.shape)}. Allowed: tables [N, F], series [N, C, T] or images [N, C, H, W]"
        )
    if x.ndim < 4:
        return x.shape[1:]
    _, channels, height, width = x.shape
    if (width in (3, 4) and min(channels, height) > 4) or (width == 1 and channels == height):
        raise ConfigError(
            f"{place} has shape {list(x.shape)}, which looks like channels last. Allowed: images [N, C, H, W]. Hint: "
            "x.transpose(0, 3, 1, 2) moves the channels"
        )
    return channels, height, width


def classes_of(labels: Sequence[np.ndarray], place: str) -> int:
    """Return C if the labels are exactly 0 ... C - 1."""
    found = np.unique(np.concatenate([y.ravel() for y in labels]))
    if not np.array_equal(found, np.arange(len(found))):
        raise ConfigError(
            f"{place} has {len(found)} different labels from {found[0]} to {found[-1]}. Allowed: 0 to C - 1, each at "
            "least once. Hint: renumber the labels, or set `classes` if some classes have no sample"
        )
    return len(found)


def with_test(samples: Split, goal: Goal, fraction: float, users: np.ndarray | None = None) -> Arrays:
    """Hold out a random fraction, rounded, of every class (`Goal.labels`) as the test set, with a fixed seed."""
    kept, held_out = hold_out(goal.labels(samples), fraction, numpy_generator(0, "hold_out", "test"))
    if not len(held_out) or not len(kept):
        raise ConfigError(
            f"data: {len(samples['y'])} samples without a test set give {len(kept)} for training and {len(held_out)} "
            f"for testing. Allowed: a test set, or more samples per class{goal.doubt(samples)}"
        )
    train, test = ({name: array[rows] for name, array in samples.items()} for rows in (kept, held_out))
    own = (None, None) if users is None else (users[kept], users[held_out])
    return Arrays(train, test, *own)
