"""The user's own samples: arrays in memory, a function, a `DataSet` class."""

import json
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import Points, message, read_data

from rayfl.data import ClientData, Images, Numbers, federate
from rayfl.data.function import Function
from rayfl.data.memory import InMemory
from rayfl.data.partition.users import Users

X = np.arange(40 * 2 * 3 * 3, dtype=np.uint8).reshape(40, 2, 3, 3)
Y = np.arange(40) % 4


# arrays in memory


def test_arrays_say_what_they_are():
    data = InMemory(X, Y, X[:8], Y[:8])
    assert (data.name, data.shape, data.classes) == ("arrays", (2, 3, 3), 4)
    assert (data.samples, data.test_samples, data.stored) == (40, 8, "uint8")
    assert data.offers == {"input": (2, 3, 3), "classes": 4}
    arrays = data.arrays()
    assert np.array_equal(arrays.train["x"], X) and np.array_equal(arrays.test["y"], Y[:8]) and arrays.users is None


def test_without_a_test_set_a_fifth_of_every_class_is_held_out():
    """The split is the same in every run."""
    arrays, again = InMemory(X, Y, users=np.arange(40)).arrays(), InMemory(X, Y).arrays()
    assert np.bincount(arrays.train["y"]).tolist() == [8] * 4 and np.bincount(arrays.test["y"]).tolist() == [2] * 4
    assert arrays.users is not None and np.array_equal(arrays.train["x"], X[arrays.users])
    assert len(np.unique(np.concatenate([arrays.train["x"], arrays.test["x"]]), axis=0)) == 40
    assert np.array_equal(arrays.train["x"], again.train["x"])


def test_users_may_be_a_column_of_text():
    arrays = InMemory(X, Y, users=pd.Series(["a", "b"] * 20, dtype=object)).arrays()
    assert arrays.users is not None and set(arrays.users) == {"a", "b"}


def test_users_reach_the_partition():
    data = InMemory(X, Y, X, Y, users=["ann"] * 30 + ["bob"] * 10)
    found = federate(data, data.arrays(), Users(test_fraction=0.2), 2, 0.0, 0)
    assert found.train.sizes.tolist() == [24, 8] and found.test.sizes.tolist() == [6, 2]


@pytest.mark.parametrize(
    ("x", "given", "expected"),
    [
        (X, {}, Images(255.0, (0.5, 0.5), (0.25, 0.25))),
        (X / 2, {}, Images(1.0, (0.0, 0.0), (1.0, 1.0))),
        (X, {"scale": 2, "mean": [0.1], "std": [1, 2]}, Images(2.0, (0.1, 0.1), (1.0, 2.0))),
        (X, {"crop": 1, "flip": True, "size": 8}, Images(255.0, (0.5, 0.5), (0.25, 0.25), 1, True, 8)),
        (X, {"pixels": "raw"}, Images(1.0)),
    ],
)
def test_how_pixels_are_prepared(x, given, expected):
    assert InMemory(x, Y, **given).prepare == expected


def test_images_with_three_columns_are_not_channels_last():
    assert InMemory(np.zeros((40, 3, 3, 3)), Y).shape == (3, 3, 3)
    assert InMemory(np.zeros((40, 3, 8, 4)), Y).shape == (3, 8, 4)


@pytest.mark.parametrize("given", [{"crop": 1}, {"flip": True}, {"scale": 1}, {"mean": [0]}, {"std": [1]}])
def test_raw_pixels_are_not_changed(given):
    [name] = given
    assert message(read_data, name="function", of="mylab_loader:load", pixels="raw", **given) == (
        f"exp.yaml: data: pixels: raw is not supported with {name}. Allowed: normalised"
    )


@pytest.mark.parametrize("given", [{"missing": "mean"}, {"scaling": "none"}])
def test_images_have_no_variables(given):
    [name] = given
    data = InMemory(X, Y, **given)
    for read in (lambda: data.prepare, lambda: data.offers):
        assert message(read) == f"data.{name}: not supported with images. Allowed: with tables and series only"


def test_one_mean_per_channel():
    data = InMemory(X, Y, mean=(0.1, 0.2, 0.3))
    assert message(lambda: data.prepare) == "data.mean: 3 numbers are not valid. Allowed: 1, or 2 (one per channel)"


def test_the_digest_is_that_of_the_checked_arrays():
    data = InMemory(X, Y)
    assert len(data.digest) == 64
    assert InMemory(torch.tensor(X), torch.tensor(Y, dtype=torch.int16)) == data
    other = X.copy()
    other[0, 0, 0, 0] += 1
    assert len({InMemory(*a).digest for a in ((X, Y), (other, Y), (X, Y, X, Y), (X / 1, Y), (X, Y[::-1]))}) == 5
    assert InMemory(X, Y, users=Y).digest != data.digest


def test_arrays_survive_pickle_and_copies():
    data = InMemory(X, Y, classes=7)
    for copy in (pickle.loads(pickle.dumps(data)), data.model_copy(update={"size": 6})):
        assert np.array_equal(copy.arrays().test["x"], data.arrays().test["x"])
        assert (copy.digest, copy.classes) == (data.digest, 7)
    assert pickle.loads(pickle.dumps(data)) == data and hash(data) == hash(InMemory(X, Y, classes=7))


def test_a_file_contains_the_description():
    data = InMemory(X, Y, flip=True)
    kept = read_data(**json.loads(data.model_dump_json()))
    assert kept == data and kept.offers == data.offers and kept.prepare == data.prepare
    assert message(kept.arrays) == (
        f"data: the file describes 32 + 8 samples (digest {data.digest[:12]}) without the samples. Allowed: "
        "rayfl.InMemory with the arrays of the original run"
    )
    assert np.array_equal(kept.holding(InMemory(X, Y)).arrays().train["x"], data.arrays().train["x"])
    other = InMemory(X + 1, Y)
    assert message(kept.holding, other) == (
        f"data: the arrays have digest {other.digest[:12]}. Allowed: the arrays of the run with digest "
        f"{data.digest[:12]}"
    )


def test_a_file_cannot_name_arrays():
    assert message(read_data, name="arrays") == (
        'exp.yaml: data: the data set "arrays" has no arrays. Allowed: rayfl.InMemory(x, y) in Python, or another '
        "data set in a file. Hint: `name: function` with a function that loads your file"
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"x": X[:, 0, 0, 0]},
            "data: x of the training set has shape [40]. Allowed: tables [N, F], series [N, C, T] or images "
            "[N, C, H, W]",
        ),
        (
            {"x": np.zeros((40, 8, 8, 3))},
            "data: x of the training set has shape [40, 8, 8, 3], which looks like channels last. Allowed: images "
            "[N, C, H, W]. Hint: x.transpose(0, 3, 1, 2) moves the channels",
        ),
        (
            {"x": np.zeros((40, 6, 8, 3))},
            "data: x of the training set has shape [40, 6, 8, 3], which looks like channels last. Allowed: images "
            "[N, C, H, W]. Hint: x.transpose(0, 3, 1, 2) moves the channels",
        ),
        (
            {"x": np.where(X == 0, np.nan, X), "missing": "mean"},
            "data: x of the training set has NaN or infinite values in 3 of 40 samples (first: sample 0). Allowed: "
            "finite float32 numbers",
        ),
        (
            {"y": Y[:39]},
            "data: the training set has 40 (x) and 39 (y) samples. Allowed: the same number in every array",
        ),
        (
            {"y": Y + 1},
            "data: y has 4 different labels from 1 to 4. Allowed: 0 to C - 1, each at least once. Hint: renumber the "
            "labels, or set `classes` if some classes have no sample",
        ),
        (
            {"y": Y / 2},
            "data: y of the training set has float64 values. Allowed: integers. Hint: `target: numbers` for "
            "regression, np.unique(y, return_inverse=True)[1] for named classes",
        ),
        (
            {"target": "labels"},
            "data: y of the training set has shape [40]. Allowed: [N, L] of 0 and 1 with `target: labels`",
        ),
        (
            {"y": np.stack([Y, Y], 1), "target": "labels"},
            "data: y of the training set has values from 0 to 3. Allowed: 0 to 1",
        ),
        (
            {"x": np.where(X > 700, np.nan, X) * [[[np.nan]]]},
            "data: x of the training set has NaN or infinite values in 40 of 40 samples (first: sample 0). Allowed: "
            "finite float32 numbers",
        ),
        ({"classes": 3}, "data: y of the training set has values from 0 to 3. Allowed: 0 to 2"),
        ({"x_test": X}, "data: only one of x_test and y_test is set. Allowed: both or neither"),
        (
            {"x_test": X[:, :1], "y_test": Y},
            "data: x of the test set has shape [40, 1, 3, 3]. Allowed: [N, 2, 3, 3], where N is the number of samples",
        ),
        (
            {"x_test": X, "y_test": Y + 1, "classes": 4},
            "data: y of the test set has values from 1 to 4. Allowed: 0 to 3",
        ),
        ({"x": X[:0], "y": Y[:0]}, "data: the training set is empty. Allowed: one or more samples"),
        (
            {"x": X[:8], "y": Y[:8]},
            "data: 8 samples without a test set give 8 for training and 0 for testing. Allowed: a test set, or more "
            "samples per class",
        ),
        (
            {"users": Y[:3]},
            "data: users has int64 values of shape [3]. Allowed: integers or text of shape [40], one user per sample",
        ),
    ],
)
def test_arrays_that_do_not_fit(given, expected):
    assert message(InMemory, **({"x": X, "y": Y} | given)) == expected


def test_pixels_of_both_sets_are_of_one_type():
    """0 ... 255 and 0 ... 1 would be scaled alike."""
    data = InMemory(X.astype(np.uint8), Y, x_test=np.float32(X), y_test=Y)
    assert message(data.arrays) == (
        "data: x of the test set has the type float32. Allowed: uint8 as in the training set, because pixels of both "
        "are scaled alike"
    )


# a function


LOADER = """
import numpy as np
from rayfl.data import Arrays

calls = 0
THREE = 3

def load(samples=6, float_pixels=False):
    global calls
    calls += 1
    x, y = np.ones((samples, 2, 3, 3), np.float64 if float_pixels else np.uint8), np.arange(samples) % 3
    return x, y, x[:3], y[:3]

def with_users():
    x, y, x_test, y_test = load()
    return Arrays({"x": x, "y": y}, {"x": x_test, "y": y_test}, y)

def flat():
    x, y, x_test, y_test = load()
    return x.reshape(6, 18), y, x_test.reshape(3, 18), y_test

def two():
    return load()[:2]

def nameless():
    return Arrays({"pixels": 1, "y": 2}, {"x": 1, "y": 2})

def nothing():
    return Arrays(None, None)

def wrong():
    raise KeyError("the user's own")
"""


@pytest.fixture
def loader(tmp_path, monkeypatch):
    (tmp_path / "mylab_loader.py").write_text(LOADER)
    monkeypatch.syspath_prepend(tmp_path)
    import mylab_loader  # pyright: ignore

    monkeypatch.delitem(__import__("sys").modules, "mylab_loader")
    return mylab_loader


def test_a_function_is_called_with_its_options(loader):
    data = read_data(name="function", of="mylab_loader:load", options={"samples": 9}, flip=True)
    assert (data.shape, data.goal.classes, data.offers) == ((2, 3, 3), 3, {"input": (2, 3, 3), "classes": 3})
    assert len(data.arrays().train["y"]) == 9 and len(data.arrays().test["y"]) == 3
    assert data.prepare == Images(255.0, (0.5, 0.5), (0.25, 0.25), flip=True)
    assert pickle.loads(pickle.dumps(data)) == data


def test_a_function_is_called_once(loader):
    """Also if public data are those of another."""
    data = Function(of="mylab_loader:load")
    other = Function(of="mylab_loader:load", options={"samples": 9})
    for _ in range(2):
        assert all(one.offers and one.prepare and one.arrays() for one in (data, other))
    import mylab_loader  # pyright: ignore

    assert mylab_loader.calls == 2


def test_classes_can_be_set_and_floats_are_not_scaled(loader):
    data = Function(of="mylab_loader:load", classes=5, options={"float_pixels": True})
    assert data.offers["classes"] == 5 and data.arrays().train["x"].dtype == np.float32
    assert data.prepare == Images(1.0, (0.0, 0.0), (1.0, 1.0))
    few = Function(of="mylab_loader:load", classes=2)
    assert message(few.arrays) == "data: y of the training set has values from 0 to 2. Allowed: 0 to 1"


def test_a_function_may_return_a_table_with_numbers_as_targets(loader):
    data = Function(of="mylab_loader:flat", target="numbers")
    assert data.offers == {"variables": 18, "classes": 1} and data.goal == Numbers(1)
    assert data.arrays().train["y"].tolist() == [[0], [1], [2], [0], [1], [2]]
    assert message(lambda: Function(of="mylab_loader:flat", flip=True).prepare) == (
        "data.flip: not supported with samples of shape [18]. Allowed: with images only"
    )


def test_a_function_may_return_arrays_with_users(loader):
    arrays = Function(of="mylab_loader:with_users").arrays()
    assert arrays.users is not None and arrays.users.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        ("mylab_nowhere:load", "ModuleNotFoundError: No module named 'mylab_nowhere'"),
        ("mylab_loader:lode", "AttributeError: module 'mylab_loader' has no attribute 'lode'"),
        ("my lab", "ValueError: invalid format: 'my lab'"),
    ],
)
def test_functions_that_do_not_exist(loader, of, reason):
    assert message(Function(of=of).arrays) == (
        f"data.of: {of!r} cannot be imported ({reason}). Allowed: package.module:function of a package that is "
        "installed or in PYTHONPATH"
    )


def test_functions_that_do_not_fit(loader):
    assert message(Function(of="mylab_loader:THREE").arrays) == (
        "data.of: 'mylab_loader:THREE' is of type int. Allowed: a function"
    )
    assert message(Function(of="mylab_loader:load", options={"sample": 3}).arrays) == (
        "data.options: {'sample': 3} is not valid (got an unexpected keyword argument 'sample'). Allowed: the "
        "arguments of mylab_loader:load(samples=6, float_pixels=False)"
    )
    for name, returned in (("two", "tuple"), ("nameless", "Arrays"), ("nothing", "Arrays")):
        assert message(Function(of=f"mylab_loader:{name}").arrays) == (
            f"data.of: 'mylab_loader:{name}' returned {returned}. Allowed: (x, y, x_test, y_test), or rayfl.Arrays "
            "whose splits have x and y"
        )
    assert message(Function(of="mylab_loader:wrong").arrays) == (
        """data.of: 'mylab_loader:wrong' raised KeyError: "the user's own". Allowed: a function that returns its data"""
    )


# the user's own class, without images


def test_a_data_set_of_another_package_is_validated():
    data = read_data(name="helpers:Points", samples=10)
    arrays = data.arrays()
    assert arrays.train["x"].dtype == np.float32 and arrays.train["y"].dtype == np.int64
    assert message(read_data(name="helpers:Points", broken=True).arrays) == (
        "data: x of the test set has shape [12, 2]. Allowed: [N, 3], where N is the number of samples"
    )
    given = ClientData({name: torch.tensor(a) for name, a in arrays.train.items()}, data.prepare, data.goal)
    [(x, y)] = given.in_order(10)
    assert torch.equal(x, 2 * torch.tensor(Points.made[:10]).float()) and y.tolist() == [0, 1] * 5
    assert given.present.tolist() == [True, True]
