"""Data set of arrays in the memory of a Python program."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr
from torch.utils.data import Dataset

from rayfl.config import ConfigError
from rayfl.data.arrays import Arrays, as_array, validate
from rayfl.data.goal import Goal
from rayfl.data.images import MOST_CLASSES
from rayfl.data.own import OwnImages, Stored, Targeted, read_targets, shape_of, with_test

HELD_OUT = 0.2
"""Fraction of every class used as the test set if none is given."""


class InMemory(Targeted, OwnImages):
    """`InMemory(x, y)` or `InMemory(x, y, x_test, y_test)`: tables [N, F], series [N, C, T] or images [N, C, H, W],
    bytes or floats, and targets: classes [N], or of another `target`.

    Accepts numpy arrays, torch tensors and lists. Without a test set a random fifth of every class, rounded, is held
    out with a fixed seed. `users` [N] are the natural users of the training images, for `partition: users`.

    The fields describe and identify the arrays in the folder of a run. The arrays themselves are part of the object,
    also of pickles and copies, but not of an object read from a file.

    >>> data = InMemory(np.ones((10, 3)), np.arange(10) % 2)
    >>> data.shape, data.classes
    ((3,), 2)
    """

    name: Literal["arrays"] = "arrays"
    digest: str
    """SHA-256 of all validated arrays."""
    shape: tuple[int, ...]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Shape of one sample: [F], [C, T] or [C, H, W]."""
    classes: int = Field(ge=1, le=MOST_CLASSES)
    """Number of classes, numbers or labels. Default: the number of different classes, or of columns of y."""
    samples: int
    """Number of training samples."""
    test_samples: int
    """Number of test samples."""
    stored: Stored
    """Data type of stored samples."""
    _arrays: Arrays | None = PrivateAttr(default=None)

    def __init__(
        self, x: Any = None, y: Any = None, x_test: Any = None, y_test: Any = None, users: Any = None, **fields: Any
    ):
        if x is None and "digest" in fields:  # from a file
            super().__init__(**fields)
            return
        if isinstance(x, Dataset):
            raise ConfigError("data: x is a Dataset. Allowed: arrays. Hint: rayfl.Datasets(train, test)")
        if x is None or y is None:
            raise ConfigError(
                'the data set "arrays" has no arrays. Allowed: rayfl.InMemory(x, y) in Python, or another data set in '
                "a file. Hint: `name: function` with a function that loads your file"
            )
        if (x_test is None) != (y_test is None):
            raise ConfigError("data: only one of x_test and y_test is set. Allowed: both or neither")
        # fields are validated with placeholders, because the arrays are validated by them
        blank = {"digest": "", "shape": (1,), "classes": 1, "samples": 0, "test_samples": 0, "stored": "float32"}
        super().__init__(**blank | fields)
        arrays, classes = self._checked(x, y, x_test, y_test, users, fields.get("classes"))
        arrays = _copied(arrays, (x, y, x_test, y_test, users))
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

    @property
    def goal(self) -> Goal:
        return self.goal_of(self.classes)

    def _checked(self, x: Any, y: Any, x_test: Any, y_test: Any, users: Any, classes: int | None) -> tuple[Arrays, int]:
        """Return the validated arrays and the number of classes, numbers or labels."""
        x = as_array(x, "data: x of the training set")
        shape = shape_of(x, "data: x of the training set")
        given = {"training": y} if y_test is None else {"training": y, "test": y_test}
        found = [read_targets(one, self.target, f"data: y of the {part} set") for part, one in given.items()]
        classes = self.outputs_of(found) if classes is None else classes
        own = self.model_copy(update={"shape": shape, "classes": classes})
        train = {"x": x, "y": found[0]}
        if x_test is not None:
            return validate(Arrays(train, {"x": x_test, "y": found[1]}, users), own.columns), classes
        whole = validate(Arrays(train, train, users), own.columns)
        return with_test(whole.train, own.goal, HELD_OUT, whole.users), classes

    def load(self) -> Arrays:
        if self._arrays is None:
            raise ConfigError(
                f"data: the file describes {self.samples} + {self.test_samples} samples (digest {self.digest[:12]}) "
                "without the samples. Allowed: rayfl.InMemory with the arrays of the original run"
            )
        return self._arrays

    def holding(self, given: Any) -> Self:
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


def _copied(arrays: Arrays, given: Sequence[Any]) -> Arrays:
    """Return the arrays with copies of those that the caller could still change."""

    def own(array: np.ndarray) -> np.ndarray:
        return array.copy() if not array.flags.owndata or any(array is one for one in given) else array

    train, test = ({name: own(array) for name, array in part.items()} for part in (arrays.train, arrays.test))
    return replace(arrays, train=train, test=test, users=None if arrays.users is None else own(arrays.users))


def _digest(arrays: Arrays) -> str:
    found = hashlib.sha256()
    named = [(part, name, array) for part in ("train", "test") for name, array in getattr(arrays, part).items()]
    if arrays.users is not None:
        named.append(("train", "users", arrays.users))
    for part, name, array in named:
        found.update(f"{part} {name} {array.dtype.str} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array).view(np.uint8).data)
    return found.hexdigest()
