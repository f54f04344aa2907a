"""Notes on valid data that probably are not what their user thinks: cheap checks of what was loaded."""

import itertools
from collections.abc import Iterator

import numpy as np

from rayfl.data.arrays import Arrays, Split, known_users
from rayfl.data.base import LABEL, DataSet
from rayfl.data.federation import Federation

LEAST = 20
"""Minimum number of samples for which a separation of the classes is no coincidence."""
SAMPLED = 1000
"""Number of samples of the first test for a separation."""
UNUSED = 0.01
"""Largest fraction of training samples without a client that is not noted; nor is at most one sample per client, the
remainder of a division."""


def notes_on(data: DataSet, arrays: Arrays, federation: Federation) -> tuple[str, ...]:
    """Return the notes of the arrays, and those of all checks of this module."""
    own = itertools.chain(
        _equal(arrays.train), _telling(data, arrays), _named(data, arrays), _unused(arrays, federation)
    )
    return tuple(dict.fromkeys([*arrays.notes, *own]))


def _equal(train: Split) -> Iterator[str]:
    inputs = [x for name, x in train.items() if name != LABEL]
    if len(inputs[0]) > 1 and all(np.array_equal(row, x[0], equal_nan=True) for x in inputs for row in x[1:]):
        yield "data: the inputs of all training samples are equal, so that nothing can be learned from them"


def _telling(data: DataSet, arrays: Arrays) -> Iterator[str]:
    """Note inputs of tables that alone separate the classes, such as row numbers of a sorted file."""
    x, y = arrays.train.get("x"), arrays.train.get(LABEL)
    is_table = x is not None and x.ndim == 2 and data.columns["x"].below is None
    if data.goal.targets != "class" or x is None or y is None or not is_table or len(y) < LEAST:
        return
    columns = data.input_columns
    names = list(columns) or list(map(str, range(x.shape[1])))
    sample = np.linspace(0, len(y) - 1, min(len(y), SAMPLED)).astype(np.int64)
    for name, column in zip(names, x.T, strict=True):
        is_category = bool(columns.get(name))
        if all(_separates(column[rows], y[rows], is_category) for rows in (sample, slice(None))):
            yield (
                f"data: the input {name!r} alone separates the classes of the training samples. Hint: leave it out if "
                "it is a row number, or follows from the class"
            )


def _separates(column: np.ndarray, y: np.ndarray, is_category: bool) -> bool:
    """Return whether the ranges of a column's values in each class do not overlap or, of categories, whether every
    category has one class."""
    order = np.lexsort((y, column))
    classes, values = y[order], column[order]
    moved, changed = classes[1:] != classes[:-1], values[1:] != values[:-1]
    kinds = len(np.unique(y))
    if kinds < 2 or (moved & ~changed).any() or np.isnan(values[-1]):
        return False
    return int(changed.sum()) < len(y) // 4 if is_category else int(moved.sum()) == kinds - 1


def _named(data: DataSet, arrays: Arrays) -> Iterator[str]:
    """Note classes that may be numbers, and names that differ in case only."""
    if hint := data.goal.doubt(arrays.train):
        yield f"data: there are few samples per class{hint}"
    for _, same in itertools.groupby(sorted(data.offers.get("class_names", ()), key=str.casefold), str.casefold):
        if len(names := list(same)) > 1:
            yield f"data: the classes {' and '.join(map(repr, names))} differ in upper and lower case only"


def _unused(arrays: Arrays, federation: Federation) -> Iterator[str]:
    total = len(next(iter(arrays.train.values())))
    used = [federation.train.idx, federation.local_validation.idx, federation.validation]
    used += [federation.test.idx] if federation.test_source == "train" else []
    used += [federation.public] if federation.public_source == "train" else []
    unknown = 0 if arrays.users is None else int((~known_users(arrays.users)).sum())
    if (left := total - sum(map(len, used))) > max(UNUSED * total, len(federation.train)):
        of_users = f" ({unknown} samples have no user)" if unknown else ""
        yield f"data: {left} of {total} training samples belong to no client and are not used{of_users}"
