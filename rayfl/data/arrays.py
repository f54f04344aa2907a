"""Samples in memory, and the one check of them, whoever's they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from rayfl.config import ConfigError

Split = dict[str, np.ndarray]
"""Arrays by name ("x", "y", ...). Their first dimension is the sample."""


@dataclass(frozen=True, eq=False)
class Arrays:
    """A data set in memory."""

    train: Split
    test: Split
    users: np.ndarray | None = None
    """The natural user (writer, device) of each training sample [N], integers or text, where the data set knows it."""
    test_users: np.ndarray | None = None
    """Likewise of each test sample, where users have test samples of their own."""
    public: Split | None = None
    """Public samples that are not in the training set, as the training set has its own: `DataSet.arrays` fills it."""

    @property
    def test_samples(self) -> int:
        return _count(self.test)


@dataclass(frozen=True)
class Column:
    """What an array of a split holds."""

    shape: tuple[int, ...]
    """Of one sample: () for a label."""
    below: int | None = None
    """The values are integers from `least` to below - 1. Unless given they are any numbers."""
    least: int = 0
    stored: Literal["int64", "int32", "uint8"] = "int64"
    """How integers are kept."""


def validate(arrays: Any, columns: Mapping[str, Column], where: str = "data") -> Arrays:
    """The arrays as workers rely on them: C-contiguous numpy arrays, integers as their column is stored, other numbers
    uint8 or float32.

    Takes torch tensors, lists and other types of numbers too; what is right already is not copied. Raises ConfigError
    for everything else that is not as `columns` (name -> what it holds) says.
    """
    if not isinstance(arrays, Arrays):
        raise ConfigError(f"{where}: given {type(arrays).__name__}; allowed: rayfl.Arrays")
    train = validate_split(arrays.train, columns, "training", where)
    test = validate_split(arrays.test, columns, "test", where)
    users, test_users = (
        None if given is None else _users(given, _count(split), place)
        for given, split, place in (
            (arrays.users, train, f"{where}: users"),
            (arrays.test_users, test, f"{where}: users of the test set"),
        )
    )
    return Arrays(train, test, users, test_users)


def validate_split(split: Any, columns: Mapping[str, Column], part: str, where: str = "data") -> Split:
    """One of the splits; `part` is "training", "test" or "public"."""
    place = f"{where}: the {part} set"
    if not isinstance(split, Mapping) or set(split) != set(columns):
        given = f"the names {_names(split)}" if isinstance(split, Mapping) else type(split).__name__
        raise ConfigError(f"{place}: given {given}; allowed: a mapping of {_names(columns)} to arrays")
    found = {name: _column(split[name], c, f"{where}: {name} of the {part} set") for name, c in columns.items()}
    lengths = {name: len(array) for name, array in found.items()}
    if len(set(lengths.values())) > 1:
        each = " and ".join(f"{length} of {name}" for name, length in lengths.items())
        raise ConfigError(f"{place}: given {each}; allowed: equally many, one for each sample")
    if not all(lengths.values()):
        raise ConfigError(f"{place}: given no samples; allowed: one or more")
    return found


def as_array(value: Any, place: str) -> np.ndarray:
    """A numpy array of numbers or text, without a copy where it is one."""
    if isinstance(value, torch.Tensor):
        value = (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
    try:
        array = np.asarray(value)
    except ValueError:  # numpy says so of lists whose parts differ in length
        array = np.empty(0, object)
    if array.dtype == object:
        raise ConfigError(f"{place}: given Python objects, or lists of unequal lengths; allowed: an array of numbers")
    return array


def as_integers(value: Any, place: str) -> np.ndarray:
    """An array of integers, of whatever size."""
    array = as_array(value, place)
    if array.dtype.kind not in "biu":
        raise ConfigError(f"{place}: given {array.dtype} values; allowed: integers")
    return array


def _column(value: Any, column: Column, place: str) -> np.ndarray:
    array = as_array(value, place)
    if array.shape[1:] != column.shape or not array.ndim:
        expected = ", ".join(["N", *map(str, column.shape)])
        raise ConfigError(f"{place}: given an array {list(array.shape)}; allowed: [{expected}], N being the samples")
    if column.below is None:
        return _numbers(array, place)
    array = as_integers(array, place)
    if array.size and not column.least <= array.min() <= array.max() < column.below:
        raise ConfigError(
            f"{place}: given values from {array.min()} to {array.max()}; allowed: {column.least} to {column.below - 1}"
        )
    return np.ascontiguousarray(array, column.stored)


def _numbers(array: np.ndarray, place: str) -> np.ndarray:
    """uint8 as it is, anything else as finite float32."""
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"{place}: given {array.dtype} values; allowed: numbers")
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.ascontiguousarray(array, np.float32)
        # the sum is finite if and only if all are: float64 holds any sum of float32, and costs no array
        if np.isfinite(found.sum(dtype=np.float64)):
            return found
    broken = np.flatnonzero(~np.isfinite(found).reshape(len(found), -1).all(1))
    raise ConfigError(
        f"{place}: given {len(broken)} of {len(found)} samples with NaN or infinite values, sample {broken[0]} the "
        "first; allowed: finite numbers (of float32)"
    )


def _users(value: Any, samples: int, place: str) -> np.ndarray:
    array = as_array(value, place)
    if array.shape != (samples,) or array.dtype.kind not in "iuUS":
        raise ConfigError(
            f"{place}: given {array.dtype} values {list(array.shape)}; allowed: integers or text [{samples}], the user "
            "of each sample"
        )
    return np.ascontiguousarray(array)


def _count(split: Split) -> int:
    return len(next(iter(split.values())))


def _names(names: Mapping[str, Any]) -> str:
    return " and ".join(map(str, names)) or "(none)"
