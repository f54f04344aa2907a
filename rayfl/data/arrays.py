"""Data sets in memory, and the validation that all of them pass."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from rayfl.config import ConfigError

Split = dict[str, np.ndarray]
"""Arrays by name ("x", "y", ...). The first dimension is the sample."""
UNKNOWN = -1
"""User of samples of which no user is known, among integers. Among text it is ""."""


@dataclass(frozen=True, eq=False)
class Arrays:
    """A data set in memory.

    >>> x, y = np.zeros((6, 1, 8, 8), np.uint8), np.arange(6) % 2
    >>> Arrays({"x": x, "y": y}, {"x": x[:2], "y": y[:2]}).test_samples
    2
    """

    train: Split
    test: Split
    users: np.ndarray | None = None
    """Natural user (writer, device) of each training sample [N], integers or text: `UNKNOWN` or "" where it is not
    known. None: the data set has no users."""
    test_users: np.ndarray | None = None
    """The same for the test samples, if users have their own test samples."""
    public: Split | None = None
    """Public samples from outside the training set, in the same format. Set by `DataSet.arrays`."""
    notes: tuple[str, ...] = ()
    """Messages for the user on the samples. Set by `DataSet.arrays`, completed by `load_data`."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Name -> digest of samples that are read later. Set by `DataSet.arrays`."""

    @property
    def test_samples(self) -> int:
        return _count(self.test)


@dataclass(frozen=True)
class Column:
    """Specification of one array of a split."""

    shape: tuple[int, ...]
    """Shape of one sample: () for a label."""
    below: int | None = None
    """Values are integers from `least` to below - 1. Default: any numbers."""
    least: int = 0
    stored: Literal["int64", "int32", "uint8"] = "int64"
    """Data type of the stored integers."""
    missing: bool = False
    """Numbers may be NaN: missing values."""


def validate(arrays: Any, columns: Mapping[str, Column], where: str = "data") -> Arrays:
    """Return the arrays as C-contiguous numpy arrays: integers in their column's type, other numbers uint8 or float32.

    Torch tensors, lists and other number types are converted; valid arrays are not copied. Raises ConfigError if the
    arrays do not match `columns`.
    """
    if not isinstance(arrays, Arrays):
        raise ConfigError(f"{where}: {type(arrays).__name__} is not valid. Allowed: rayfl.Arrays")
    train = validate_split(arrays.train, columns, "training", where)
    test = validate_split(arrays.test, columns, "test", where)
    users, test_users = (
        None if given is None else _users(given, _count(split), place)
        for given, split, place in (
            (arrays.users, train, f"{where}: users"),
            (arrays.test_users, test, f"{where}: users of the test set"),
        )
    )
    if users is not None and test_users is not None and _is_text(users) != _is_text(test_users):
        kinds = ["text" if _is_text(one) else "integers" for one in (users, test_users)]
        raise ConfigError(
            f"{where}: users are {kinds[0]}, and those of the test set {kinds[1]}. Allowed: both integers or both text"
        )
    return Arrays(train, test, users, test_users)


def validate_split(split: Any, columns: Mapping[str, Column], part: str, where: str = "data") -> Split:
    """Validate one split; `part` is "training", "test" or "public"."""
    place = f"{where}: the {part} set"
    if not isinstance(split, Mapping) or set(split) != set(columns):
        is_mapping = isinstance(split, Mapping)
        problem = f"has the arrays {_names(split)}" if is_mapping else f"is of type {type(split).__name__}"
        raise ConfigError(f"{place} {problem}. Allowed: a mapping of {_names(columns)} to arrays")
    found = {name: _column(split[name], c, f"{where}: {name} of the {part} set") for name, c in columns.items()}
    lengths = {name: len(array) for name, array in found.items()}
    if len(set(lengths.values())) > 1:
        each = " and ".join(f"{length} ({name})" for name, length in lengths.items())
        raise ConfigError(f"{place} has {each} samples. Allowed: the same number in every array")
    if not all(lengths.values()):
        raise ConfigError(f"{place} is empty. Allowed: one or more samples")
    return found


def as_array(value: Any, place: str) -> np.ndarray:
    """Return a numpy array of numbers or text, without copying an array."""
    if isinstance(value, torch.Tensor):
        value = (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
    try:
        array = np.asarray(value)
    except ValueError:  # nested lists of unequal lengths
        array = np.empty(0, object)
    if array.dtype == object:
        raise ConfigError(f"{place} holds Python objects or lists of unequal lengths. Allowed: an array of numbers")
    return array


def as_integers(value: Any, place: str) -> np.ndarray:
    array = as_array(value, place)
    if array.dtype.kind not in "biu":
        raise ConfigError(f"{place} has {array.dtype} values. Allowed: integers")
    return array


def _column(value: Any, column: Column, place: str) -> np.ndarray:
    array = as_array(value, place)
    if array.shape[1:] != column.shape or not array.ndim:
        expected = ", ".join(["N", *map(str, column.shape)])
        raise ConfigError(
            f"{place} has shape {list(array.shape)}. Allowed: [{expected}], where N is the number of samples"
        )
    if column.below is None:
        return _numbers(array, place, column.missing)
    array = as_integers(array, place)
    if array.size and not column.least <= array.min() <= array.max() < column.below:
        raise ConfigError(
            f"{place} has values from {array.min()} to {array.max()}. Allowed: {column.least} to {column.below - 1}"
        )
    return np.ascontiguousarray(array, column.stored)


def _numbers(array: np.ndarray, place: str, missing: bool) -> np.ndarray:
    """Return uint8 unchanged, other numbers as finite float32, or NaN if values may be missing."""
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"{place} has {array.dtype} values. Allowed: numbers")
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.ascontiguousarray(array, np.float32)
        # float64 holds any sum of float32, so the sum is finite if and only if all values are
        if np.isfinite(found.sum(dtype=np.float64)):
            return found
    valid = np.isfinite(found) | (np.isnan(array) if missing and array.dtype.kind == "f" else False)
    broken = np.flatnonzero(~valid.reshape(len(found), -1).all(1))
    if not len(broken):
        return found
    raise ConfigError(
        f"{place} has NaN or infinite values in {len(broken)} of {len(found)} samples (first: sample {broken[0]}). "
        "Allowed: finite float32 numbers"
    )


def _users(value: Any, samples: int, place: str) -> np.ndarray:
    if hasattr(value, "to_numpy"):  # a column of pandas
        value = value.to_numpy()
    if isinstance(value, np.ndarray) and value.dtype == object and all(isinstance(one, str) for one in value.flat):
        value = value.astype(str)
    array = as_array(value, place)
    if array.shape != (samples,) or array.dtype.kind not in "iuUS":
        raise ConfigError(
            f"{place} has {array.dtype} values of shape {list(array.shape)}. Allowed: integers or text of shape "
            f"[{samples}], one user per sample"
        )
    return np.ascontiguousarray(array)


def known_users(users: np.ndarray) -> np.ndarray:
    """Return which of users [n] are known, [n] bool."""
    return users != (users.dtype.type() if _is_text(users) else UNKNOWN)


def _is_text(users: np.ndarray) -> bool:
    return users.dtype.kind in "US"


def _count(split: Split) -> int:
    return len(next(iter(split.values())))


def _names(names: Mapping[str, Any]) -> str:
    return " and ".join(map(str, names)) or "(none)"
