"""Data set of arrays in the memory of a Python program."""

import hashlib
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr

from rayfl.config import ConfigError
from rayfl.data.arrays import Arrays, Column, as_array, as_integers, validate
from rayfl.data.images import MOST_CLASSES
from rayfl.data.own import OwnImages, Stored, classes_of, shape_of, with_test

HELD_OUT = 0.2
"""Fraction of every class used as the test set if none is given."""


class InMemory(OwnImages):
    """`InMemory(x, y)` or `InMemory(x, y, x_test, y_test)`: images [N, C, H, W], bytes or floats, and labels [N].

    Accepts numpy arrays, torch tensors and lists. Without a test set a random fifth of every class, rounded, is held
    out with a fixed seed. `users` [N] are the natural users of the training images, for `partition: users`.

    The fields describe and identify the arrays in the folder of a run. The arrays themselves are part of the object,
    also of pickles and copies, but not of an object read from a file.
    """

    name: Literal["arrays"] = "arrays"
    digest: str
    """SHA-256 of all validated arrays."""
    shape: tuple[int, int, int]
    """Channels, height and width of one image."""
    classes: int = Field(ge=1, le=MOST_CLASSES)
    """Number of classes. Default: the number of different labels."""
    samples: int
    """Number of training images."""
    test_samples: int
    """Number of test images."""
    stored: Stored
    """Data type of stored pixels."""
    _arrays: Arrays | None = PrivateAttr(default=None)

    def __init__(
        self, x: Any = None, y: Any = None, x_test: Any = None, y_test: Any = None, users: Any = None, **fields: Any
    ):
        if x is None and "digest" in fields:  # from a file
            super().__init__(**fields)
            return
        if x is None or y is None:
            raise ConfigError(
                'the data set "arrays" has no arrays. Allowed: rayfl.InMemory(x, y) in Python, or another data set in '
                "a file"
            )
        if (x_test is None) != (y_test is None):
            raise ConfigError("data: only one of x_test and y_test is set. Allowed: both or neither")
        arrays, classes = _checked(x, y, x_test, y_test, users, fields.get("classes"))
        described = {
            "digest": _digest(arrays),
            "shape": arrays.train["x"].shape[1:],
            "classes": classes,
            "samples": len(arrays.train["y"]),
            "test_samples": len(arrays.test["y"]),
            "stored": arrays.train["x"].dtype.name,
        }
        super().__init__(**fields | described)
        self._arrays = arrays

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InMemory) and self.model_dump() == other.model_dump()

    @property
    def dtype(self) -> Stored:
        return self.stored

    def load(self) -> Arrays:
        if self._arrays is None:
            raise ConfigError(
                f"data: the file describes {self.samples} + {self.test_samples} images (digest {self.digest[:12]}) "
                "without their pixels. Allowed: rayfl.InMemory with the arrays of the original run"
            )
        return self._arrays

    def holding(self, given: "InMemory") -> Self:
        """Return this data set with the arrays of `given`. Raise ConfigError if they are not those of this data set."""
        if given.digest != self.digest:
            raise ConfigError(
                f"data: the arrays have digest {given.digest[:12]}. Allowed: the arrays of the run with digest "
                f"{self.digest[:12]}"
            )
        # equal sections, and only the given one may have arrays
        public = given.public if given.public == self.public else self.public
        copy = self.model_copy(update={"public": public})
        copy._arrays = given.load()
        return copy


def _checked(x: Any, y: Any, x_test: Any, y_test: Any, users: Any, classes: int | None) -> tuple[Arrays, int]:
    """Return the validated arrays and the number of classes."""
    x, y = as_array(x, "data: x of the training set"), as_integers(y, "data: y of the training set")
    if classes is None:
        labels = [y] if y_test is None else [y, as_integers(y_test, "data: y of the test set")]
        classes = classes_of(labels, "data: y")
    columns = {"x": Column(shape_of(x, "data: x of the training set")), "y": Column((), below=classes)}
    train, test = {"x": x, "y": y}, {"x": x_test, "y": y_test}
    if x_test is not None:
        return validate(Arrays(train, test, users), columns), classes
    whole = validate(Arrays(train, train, users), columns)
    return with_test(whole.train, whole.users, HELD_OUT), classes


def _digest(arrays: Arrays) -> str:
    found = hashlib.sha256()
    named = [(part, name, array) for part in ("train", "test") for name, array in getattr(arrays, part).items()]
    if arrays.users is not None:
        named.append(("train", "users", arrays.users))
    for part, name, array in named:
        found.update(f"{part} {name} {array.dtype.str} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array).view(np.uint8).data)
    return found.hexdigest()
