"""Data sets of the library `datasets`, saved to disk: images, texts, tokens and tables. No network."""

import pickle

import numpy as np
import pytest
from helpers import message, read_data, run, simulate, tiny

from rayfl.data import Classes, Numbers
from rayfl.data.huggingface import Source
from rayfl.data.images import Images

datasets = pytest.importorskip("datasets")

COUNT = 40
NAMED = datasets.ClassLabel(names=["a", "b"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder of `save_to_disk` with the splits train and test."""
    pixels = np.arange(COUNT * 8 * 8, dtype=np.uint8).reshape(COUNT, 8, 8)
    columns = {
        "image": list(pixels),
        "label": [i % 4 for i in range(COUNT)],
        "sentence": [f"word{i % 4} is {'good' if i % 2 else 'bad'}" for i in range(COUNT)],
        "input_ids": [[i % 9 + 1] * (i % 3 + 1) for i in range(COUNT)],
        "age": [None if i == 3 else float(i) for i in range(COUNT)],
        "sex": ["f", "m"] * (COUNT // 2),
        "writer": [f"w{i % 5}" for i in range(COUNT)],
        "floats": [[i / 4, 1.0] for i in range(COUNT)],
        "gaps": [[i] * (i != 2) for i in range(COUNT)],
        "said": [None if i == 3 else "so" for i in range(COUNT)],
        "photo": [None if i == 3 else np.zeros((8, 4 + (i == 2)), np.uint8) for i in range(COUNT)],
    }
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["a", "b", "c", "d"]),
            "sentence": datasets.Value("string"),
            "input_ids": datasets.List(datasets.Value("int32")),
            "age": datasets.Value("float32"),
            "sex": datasets.Value("string"),
            "writer": datasets.Value("string"),
            "floats": datasets.List(datasets.Value("float32")),
            "gaps": datasets.List(datasets.Value("int32")),
            "said": datasets.Value("string"),
            "photo": datasets.Image(),
        }
    )
    whole = datasets.Dataset.from_dict(columns, features=features)
    folder = tmp_path_factory.mktemp("saved")
    datasets.DatasetDict({"train": whole, "test": whole.select(range(8))}).save_to_disk(folder / "both")
    whole.save_to_disk(folder / "one")
    return folder


@pytest.fixture
def read(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYFL_CACHE", str(tmp_path / "cache"))
    return lambda folder="both", **options: read_data(name="huggingface", path=str(saved / folder), **options)


def test_images(read):
    data = read(x="image", options={"channels": 1})
    assert data.offers == {"input": (1, 8, 8), "classes": 4} and isinstance(data.prepare, Images)
    arrays = data.arrays()
    pixels = np.arange(COUNT * 64, dtype=np.uint8).reshape(COUNT, 1, 8, 8)
    assert np.array_equal(arrays.train["x"], pixels) and arrays.test["y"].tolist() == [0, 1, 2, 3] * 2
    assert read(x="image", options={"size": 4}).offers["input"] == (3, 4, 4)
    assert pickle.loads(pickle.dumps(data)) == data


def test_images_without_a_test_split(read):
    """A fifth of every class is held out; users are a column."""
    arrays = read("one", x="image", user="writer").arrays()
    assert np.bincount(arrays.train["y"]).tolist() == [8] * 4 and np.bincount(arrays.test["y"]).tolist() == [2] * 4
    assert arrays.users is not None and len(set(arrays.users)) == 5


def test_texts(read):
    data = read(x="sentence", options={"max_length": 6})
    assert data.goal == Classes(4) and data.offers["class_names"] == ("a", "b", "c", "d")
    arrays = data.arrays()
    assert arrays.train["x"].shape == (COUNT, 6) and arrays.train["y"].tolist() == [0, 1, 2, 3] * 10


def test_lists_of_tokens(read):
    data = read(x="input_ids", options={"max_length": 2})
    assert data.offers == {"task": "classes", "ids": 10, "classes": 4, "length": 2}
    assert data.arrays().train["x"][:3].tolist() == [[1, -1], [2, 2], [3, 3]]


def test_tables(read):
    data = read(x=["age", "sex"], options={"categories": ["sex"], "missing": "mean"})
    assert data.offers["variables"] == 3 and data.goal == Classes(4)
    assert np.isnan(data.arrays().train["x"][3, 0])
    numbers = read(x=["sex"], y="age", target="numbers", options={"categories": ["sex"]})
    assert numbers.goal == Numbers(1)
    assert "column 'age' of the training table has 1 missing values" in message(numbers.arrays)


@pytest.mark.parametrize(
    ("x", "options", "model"),
    [
        ("image", {"channels": 1}, "digits_cnn"),
        ("sentence", {"max_length": 6}, "heterofl_transformer"),
        ("input_ids", {"max_length": 4}, "heterofl_transformer"),
        (["age"], {"missing": "median"}, "mlp"),
    ],
)
def test_a_run_learns_from_it(read, tmp_path, x, options, model):
    clients = {"count": 3, "cohort": 2, "capacities": [1.0, 0.5]}
    given = {"data": read(x=x, options=options), "model": model, "partition": "iid", "clients": clients}
    [line] = run(simulate(tiny(**given, rounds=1, method="heterofl"), tmp_path))
    assert line["refused"] == 0 and 0 <= line["accuracy_mean"] <= 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"x": "sentence", "y": "age", "target": "numbers"},
            "data.target: 'numbers' is not supported with a column of",
        ),
        ({"x": "floats"}, "data.x: 'floats' has lists of float32. Allowed: lists of integers"),
        (
            {"x": "gaps"},
            "data.x: row 3 of the training set is []. Allowed: lists of one or more tokens from 0 to 2147483647",
        ),
        ({"x": "said"}, "has empty cells (first: row 4; 1 in all). Allowed: rows without empty cells"),
        (
            {"x": "photo"},
            "data.x: the image in row 3 of the training set cannot be used (it has 8 x 5 pixels, not 8 x 4). Allowed: "
            "images of one size. Hint: data.options.size resizes images of several sizes",
        ),
        (
            {"x": "photo", "options": {"size": 8}},
            "data.x: the image in row 4 of the training set cannot be used (it is missing). Allowed: ",
        ),
        ({"x": "image", "options": {"size": 0}}, "data.options.size: 0 is not valid. Allowed: at least 1"),
        ({"x": "input_ids", "target": "numbers"}, "data.target: 'numbers' is not valid. Allowed: class"),
        ({"x": []}, "data.x: () is not valid. Allowed: a length of at least 1"),
    ],
)
def test_columns_that_do_not_fit(read, given, expected):
    assert expected in message(read(**given).arrays)


def test_unknown_classes_are_refused(tmp_path):
    """-1 in a column of named classes."""
    features = datasets.Features({"x": datasets.Value("string"), "n": datasets.Value("int32"), "label": NAMED})
    columns = {"x": ["a", "b"] * 5, "n": [1, 2] * 5, "label": [0, 1] * 4 + [-1, 0]}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "unknown")
    given = {"name": "huggingface", "path": str(tmp_path / "unknown")}
    assert "has empty cells (first: row 9; 1 in all)" in message(lambda: read_data(x="x", **given).arrays())
    assert "column 'label' of the training table has 1 missing values" in message(
        lambda: read_data(x=["n"], **given).arrays()
    )


@pytest.mark.parametrize("token", [None, -1, 2**31])
def test_tokens_that_are_none(tmp_path, token):
    columns = {"x": [[1, 2]] * 9 + [[1, token, 3]], "label": [0, 1] * 5}
    features = datasets.Features({"x": datasets.List(datasets.Value("int64")), "label": NAMED})
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "tokens")
    data = read_data(name="huggingface", path=str(tmp_path / "tokens"), x="x")
    assert message(data.arrays) == (
        f"data.x: row 10 of the training set is [1, {token}, 3]. Allowed: lists of one or more tokens from 0 to "
        "2147483647"
    )


def test_a_folder_that_changes_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYFL_CACHE", str(tmp_path / "cache"))
    for word in ("old", "new"):
        columns = {"x": [f"{word} {i}" for i in range(20)], "label": [0, 1] * 10}
        features = datasets.Features({"x": datasets.Value("string"), "label": NAMED})
        datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "own")
        split = Source(path=str(tmp_path / "own")).splits()[0]
        assert split["x"][0] == f"{word} 0"


def test_what_does_not_fit(read, tmp_path):
    assert message(lambda: read(x="picture").goal).startswith("data.x: ")
    assert "has no column 'picture'. Allowed: image, label, sentence" in message(lambda: read(x="picture").goal)
    assert "has no split 'dev'. Allowed: train, test" in message(lambda: read(x="image", test="dev").goal)
    assert "no column is called 'labels'. Did you mean 'label'?" in message(lambda: read(x="image", y="labels").goal)
    assert "data.options.sizes: unknown key 'sizes'. Did you mean 'size'?" in message(
        lambda: read(x="image", options={"sizes": 3}).goal
    )
    (tmp_path / "empty").mkdir()
    nothing = read_data(name="huggingface", path=str(tmp_path / "empty"), x="image")
    assert "cannot be loaded" in message(lambda: nothing.goal)
