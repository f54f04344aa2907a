"""A user's own samples: arrays in memory, a function, a class of one's own."""

import json
import pickle
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers import message, read_data

from rayfl.data import Arrays, Classes, ClientData, Column, DataSet, Images, Prepare, federate
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
    """In every run the same."""
    arrays, again = InMemory(X, Y, users=np.arange(40)).arrays(), InMemory(X, Y).arrays()
    assert np.bincount(arrays.train["y"]).tolist() == [8] * 4 and np.bincount(arrays.test["y"]).tolist() == [2] * 4
    assert arrays.users is not None and np.array_equal(arrays.train["x"], X[arrays.users])
    assert len(np.unique(np.concatenate([arrays.train["x"], arrays.test["x"]]), axis=0)) == 40
    assert np.array_equal(arrays.train["x"], again.train["x"])


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


def test_one_mean_a_channel():
    data = InMemory(X, Y, mean=(0.1, 0.2, 0.3))
    assert message(lambda: data.prepare) == "data.mean: given 3 numbers; allowed: 1, or 2, the number of channels"


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


def test_what_a_file_keeps_is_the_description():
    data = InMemory(X, Y, flip=True)
    kept = read_data(**json.loads(data.model_dump_json()))
    assert kept == data and kept.offers == data.offers and kept.prepare == data.prepare
    assert message(kept.arrays) == (
        f"data: given the description of 32 + 8 images that were in memory (digest {data.digest[:12]}), without the "
        "images; allowed: rayfl.InMemory with the arrays that the run was started with"
    )
    assert np.array_equal(kept.holding(InMemory(X, Y)).arrays().train["x"], data.arrays().train["x"])
    other = InMemory(X + 1, Y)
    assert message(kept.holding, other) == (
        f"data: given arrays of digest {other.digest[:12]}; allowed: those of the run, of digest {data.digest[:12]}"
    )


def test_a_file_cannot_name_arrays():
    assert message(read_data, name="arrays") == (
        'exp.yaml: data: given the name "arrays" without the arrays; allowed: rayfl.InMemory(x, y) in Python, another '
        "data set in a file"
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"x": X.reshape(40, 18)},
            "data: x of the training set: given an array [40, 18]; allowed: images [N, C, H, W]",
        ),
        (
            {"x": X[:, 0]},
            "data: x of the training set: given an array [40, 3, 3]; allowed: images [N, C, H, W]; x[:, None] has the "
            "one channel that gray images need",
        ),
        (
            {"x": np.zeros((40, 8, 8, 3))},
            "data: x of the training set: given an array [40, 8, 8, 3], whose channels seem to be last; allowed: "
            "images [N, C, H, W]; x.transpose(0, 3, 1, 2) puts the channels first",
        ),
        (
            {"y": Y[:39]},
            "data: the training set: given 40 of x and 39 of y; allowed: equally many, one for each sample",
        ),
        (
            {"y": Y + 1},
            "data: y: given 4 different labels, from 1 to 4; allowed: 0 to C - 1, each at least once; number them "
            "anew, or say how many `classes` there are if some have no sample",
        ),
        ({"y": Y / 2}, "data: y of the training set: given float64 values; allowed: integers"),
        ({"classes": 3}, "data: y of the training set: given values from 0 to 3; allowed: 0 to 2"),
        ({"x_test": X}, "data: given one of x_test and y_test; allowed: both or neither"),
        (
            {"x_test": X[:, :1], "y_test": Y},
            "data: x of the test set: given an array [40, 1, 3, 3]; allowed: [N, 2, 3, 3], N being the samples",
        ),
        (
            {"x_test": X, "y_test": Y + 1, "classes": 4},
            "data: y of the test set: given values from 1 to 4; allowed: 0 to 3",
        ),
        ({"x": X[:0], "y": Y[:0]}, "data: the training set: given no samples; allowed: one or more"),
        (
            {"x": X[:8], "y": Y[:8]},
            "data: given 8 samples and no test set, which leaves 8 for training and 0 for testing; allowed: a test "
            "set, or more samples of a class",
        ),
        (
            {"users": Y[:3]},
            "data: users: given int64 values [3]; allowed: integers or text [40], the user of each sample",
        ),
    ],
)
def test_arrays_that_do_not_fit(given, expected):
    assert message(InMemory, **({"x": X, "y": Y} | given)) == expected


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
    data = Function(of="mylab_loader:load")
    assert data.offers and data.prepare and data.arrays()
    import mylab_loader  # pyright: ignore

    assert mylab_loader.calls == 1


def test_classes_may_be_said_and_floats_are_taken_as_they_are(loader):
    data = Function(of="mylab_loader:load", classes=5, options={"float_pixels": True})
    assert data.offers["classes"] == 5 and data.arrays().train["x"].dtype == np.float32
    assert data.prepare == Images(1.0, (0.0, 0.0), (1.0, 1.0))
    few = Function(of="mylab_loader:load", classes=2)
    assert message(few.arrays) == "data: y of the training set: given values from 0 to 2; allowed: 0 to 1"


def test_a_function_may_return_arrays_with_users(loader):
    arrays = Function(of="mylab_loader:with_users").arrays()
    assert arrays.users is not None and arrays.users.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        ("mylab_nowhere:load", "ModuleNotFoundError: No module named 'mylab_nowhere'"),
        ("mylab_loader:lode", "AttributeError: module 'mylab_loader' has no attribute 'lode'"),
        ("mylab_loader:THREE", "TypeError: it is no function"),
        ("my lab", "ValueError: invalid format: 'my lab'"),
    ],
)
def test_functions_that_do_not_exist(loader, of, reason):
    assert message(Function(of=of).arrays) == (
        f"data.of: given {of!r}, which cannot be called ({reason}); allowed: package.module:function of a package that "
        "is installed or whose folder is in PYTHONPATH"
    )


def test_functions_that_do_not_fit(loader):
    assert message(Function(of="mylab_loader:load", options={"sample": 3}).arrays) == (
        "data.options: given {'sample': 3} (got an unexpected keyword argument 'sample'); allowed: "
        "mylab_loader:load(samples=6, float_pixels=False)"
    )
    assert message(lambda: Function(of="mylab_loader:flat").offers) == (
        "data: x of the training set: given an array [6, 18]; allowed: images [N, C, H, W]"
    )
    for name, returned in (("two", "tuple"), ("nameless", "Arrays")):
        assert message(Function(of=f"mylab_loader:{name}").arrays) == (
            f"data.of: given 'mylab_loader:{name}', which returned {returned}; allowed: (x, y, x_test, y_test), or "
            "rayfl.Arrays whose splits have x and y"
        )
    with pytest.raises(KeyError, match="the user's own"):
        Function(of="mylab_loader:wrong").arrays()


# a class of one's own, of samples that are no images


class Doubled(Prepare):
    def whole(self, samples):
        return samples | {"x": samples["x"] * 2}

    def batch(self, samples, generator):
        return samples["x"], samples["y"]


class Points(DataSet):
    """Rows of three numbers."""

    samples: int = 12
    broken: bool = False
    made: ClassVar = np.arange(36.0).reshape(12, 3)

    def load(self) -> Arrays:
        x, y = self.made[: self.samples], np.arange(self.samples, dtype=np.int32) % 2
        return Arrays({"x": x, "y": y}, {"x": x[:, :2] if self.broken else x, "y": y})

    @property
    def columns(self) -> Mapping[str, Column]:
        return {"x": Column((3,)), "y": Column((), below=2)}

    @property
    def prepare(self):
        return Doubled()

    @property
    def goal(self):
        return Classes(2)

    @property
    def offers(self):
        return {"classes": 2}


def test_a_data_set_of_a_users_package_is_checked_like_ours():
    data = read_data(name="test_own_data:Points", samples=10)
    arrays = data.arrays()
    assert arrays.train["x"].dtype == np.float32 and arrays.train["y"].dtype == np.int64
    assert message(read_data(name="test_own_data:Points", broken=True).arrays) == (
        "data: x of the test set: given an array [12, 2]; allowed: [N, 3], N being the samples"
    )
    given = ClientData({name: torch.tensor(a) for name, a in arrays.train.items()}, data.prepare, data.goal)
    [(x, y)] = given.in_order(10)
    assert torch.equal(x, 2 * torch.tensor(Points.made[:10]).float()) and y.tolist() == [0, 1] * 5
    assert given.present.tolist() == [True, True]
