"""Validation of arrays: conversions and errors."""

import numpy as np
import pytest
import torch

from rayfl.config import ConfigError
from rayfl.data import Arrays, Column
from rayfl.data.arrays import validate

COLUMNS = {"x": Column((1, 2, 2)), "y": Column((), below=3)}


def split(samples=4, **changed):
    x = np.arange(samples * 4, dtype=np.uint8).reshape(samples, 1, 2, 2)
    return {"x": x, "y": np.arange(samples) % 3} | changed


def refused(train=None, test=None, users=None, where="data") -> str:
    with pytest.raises(ConfigError) as error:
        validate(Arrays(split() if train is None else train, test or split(), users), COLUMNS, where)
    return str(error.value)


# conversions


def test_valid_arrays_are_not_copied():
    train, test, users = split(), split(2), np.array([5, 5, 6, 6])
    found = validate(Arrays(train, test, users), COLUMNS)
    for before, after in ((train, found.train), (test, found.test)):
        assert list(after) == ["x", "y"]
        assert all(np.shares_memory(before[name], after[name]) for name in before)
    assert found.users is not None and np.shares_memory(users, found.users)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint16, np.uint64, ">i4", bool])
def test_labels_of_any_integer_type(dtype):
    y = np.array([0, 1, 1, 0]).astype(dtype)
    found = validate(Arrays(split(y=y), split()), COLUMNS).train["y"]
    assert found.dtype == np.int64 and found.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int16, np.int64, ">f4", bool])
def test_other_numbers_become_float32(dtype):
    x = (split()["x"] % 2).astype(dtype)
    found = validate(Arrays(split(x=x), split()), COLUMNS).train["x"]
    assert found.dtype == np.float32 and np.array_equal(found, split()["x"] % 2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_torch_tensors(dtype):
    x = torch.tensor(split()["x"]).to(dtype)
    if dtype.is_floating_point:
        x.requires_grad_()
    found = validate(Arrays(split(x=x, y=torch.tensor([0, 1, 2, 0], dtype=torch.int32)), split()), COLUMNS).train
    assert found["x"].dtype == (np.uint8 if dtype == torch.uint8 else np.float32)
    assert np.array_equal(found["x"], split()["x"])
    assert found["y"].tolist() == [0, 1, 2, 0] and found["y"].dtype == np.int64


def test_lists():
    found = validate(
        Arrays(split(y=[0, 1, 2, 0]), {"x": [[[[0.5, 1], [2, 3]]]], "y": [2]}, ["a", "b", "b", "c"]), COLUMNS
    )
    assert found.train["y"].dtype == np.int64 and found.test["x"].dtype == np.float32
    assert found.test["x"].tolist() == [[[[0.5, 1], [2, 3]]]] and found.users.tolist() == ["a", "b", "b", "c"]


def test_arrays_become_contiguous():
    turned = np.asfortranarray(split()["x"])
    found = validate(Arrays(split(x=turned, y=np.arange(8)[::2] % 3), split()), COLUMNS).train
    assert all(array.flags.c_contiguous for array in found.values())
    assert np.array_equal(found["x"], turned)


# errors


def test_errors_name_the_given_place():
    assert refused(split(y=[0]), where="exp.yaml: data").startswith(
        "exp.yaml: data: the training set has 4 (x) and 1 (y) samples."
    )


def test_other_than_arrays():
    with pytest.raises(ConfigError) as error:
        validate((1, 2), COLUMNS)
    assert str(error.value) == "data: tuple is not valid. Allowed: rayfl.Arrays"


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (split()["x"], "the training set is of type ndarray. Allowed: a mapping of x and y to arrays"),
        ({"x": 1}, "the training set has the arrays x. Allowed: a mapping of x and y to arrays"),
        (split(z=1), "the training set has the arrays x and y and z. Allowed: a mapping of x and y to arrays"),
        (
            split(y=np.zeros(3, np.int64)),
            "the training set has 4 (x) and 3 (y) samples. Allowed: the same number in every array",
        ),
        (
            split(x=np.zeros((4, 4))),
            "x of the training set has shape [4, 4]. Allowed: [N, 1, 2, 2], where N is the number of samples",
        ),
        (
            split(x=np.zeros((4, 3, 2, 2))),
            "x of the training set has shape [4, 3, 2, 2]. Allowed: [N, 1, 2, 2], where N is the number of samples",
        ),
        (
            split(y=np.zeros((4, 1))),
            "y of the training set has shape [4, 1]. Allowed: [N], where N is the number of samples",
        ),
        (split(y=3), "y of the training set has shape []. Allowed: [N], where N is the number of samples"),
        (split(y=np.zeros(4)), "y of the training set has float64 values. Allowed: integers"),
        (split(y=["a"] * 4), "y of the training set has <U1 values. Allowed: integers"),
        (split(y=[1, 2, 3, 1]), "y of the training set has values from 1 to 3. Allowed: 0 to 2"),
        (split(y=[0, -1, 0, 0]), "y of the training set has values from -1 to 0. Allowed: 0 to 2"),
        (
            split(x=np.array([None] * 4)),
            "x of the training set holds Python objects or lists of unequal lengths. Allowed: an array of numbers",
        ),
        (
            split(x=[[1], [1, 2]]),
            "x of the training set holds Python objects or lists of unequal lengths. Allowed: an array of numbers",
        ),
        (split(x=np.zeros((4, 1, 2, 2), complex)), "x of the training set has complex128 values. Allowed: numbers"),
    ],
)
def test_training_sets_that_do_not_fit(train, message):
    assert refused(train) == f"data: {message}"


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf, 1e300])
def test_numbers_that_are_not_finite(broken):
    x = np.zeros((4, 1, 2, 2))
    x[1, 0, 0, 0] = x[3, 0, 1, 1] = broken
    assert refused(test=split(x=x)) == (
        "data: x of the test set has NaN or infinite values in 2 of 4 samples (first: sample 1). Allowed: finite "
        "float32 numbers"
    )


def test_infinities_of_both_signs_do_not_cancel():
    x = np.zeros((4, 1, 2, 2), np.float32)
    x[2, 0, 0] = np.inf, -np.inf
    assert "has NaN or infinite values in 1 of 4 samples (first: sample 2)" in refused(split(x=x))


def test_large_finite_numbers_are_fine():
    x = np.full((4, 1, 2, 2), np.finfo(np.float32).max)
    assert validate(Arrays(split(x=x), split()), COLUMNS).train["x"].max() == np.finfo(np.float32).max


def test_empty_splits():
    assert refused(split(0)) == "data: the training set is empty. Allowed: one or more samples"
    assert refused(test=split(0)) == "data: the test set is empty. Allowed: one or more samples"


def test_users_of_two_kinds_are_refused():
    """Nobody would be found in the test set."""
    arrays = Arrays(split(), split(), np.arange(4), np.array(["0", "1", "2", "3"]))
    with pytest.raises(ConfigError) as error:
        validate(arrays, COLUMNS)
    assert str(error.value) == (
        "data: users are integers, and those of the test set text. Allowed: both integers or both text"
    )


@pytest.mark.parametrize(
    ("users", "problem"),
    [
        (np.zeros(3, int), "int64 values of shape [3]"),
        (np.zeros((4, 1), int), "int64 values of shape [4, 1]"),
        ([0.5] * 4, "float64 values of shape [4]"),
    ],
)
def test_users_that_do_not_fit(users, problem):
    assert refused(users=users) == (
        f"data: users has {problem}. Allowed: integers or text of shape [4], one user per sample"
    )
