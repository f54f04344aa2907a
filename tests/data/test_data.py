"""Published and synthetic data sets: shapes, arrays, and errors for missing files."""

import gzip
import os
import pickle
import socket
import subprocess
import sys
import urllib.error
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import message

from rayfl.config import ConfigError, parse
from rayfl.data import DATASETS, DATASETS_KIND, files
from rayfl.data.cifar import CIFAR10, CIFAR100
from rayfl.data.digits import Digits
from rayfl.data.mnist import MNIST, FashionMNIST
from rayfl.data.svhn import SVHN
from rayfl.data.synthetic import Synthetic

needs_data = pytest.mark.skipif(
    "RAYFL_DATA" not in os.environ, reason="RAYFL_DATA names no folder with the real data sets"
)


def check(data, arrays):
    """Assert what all workers rely on."""
    for split in (arrays.train, arrays.test):
        x, y = split["x"], split["y"]
        assert x.dtype == np.uint8 and y.dtype == np.int64
        assert x.flags.c_contiguous and y.flags.c_contiguous
        assert x.shape == (len(y), *data.shape)
        assert set(np.unique(y)) <= set(range(data.classes))


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", refuse)


PUBLISHED = ["digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "svhn", "synthetic"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_name_shape_and_classes_are_known_without_loading(name):
    data = parse(DATASETS[name], {}, "exp.yaml: data")
    assert data.name == name
    channels = data.shape[0]
    assert len(data.preprocessing.mean) == len(data.preprocessing.std) == channels
    assert data.classes in (10, 100)
    assert data.offers == {"input": data.shape, "classes": data.classes}
    assert (data.goal.classes, data.columns["x"].shape) == (data.classes, data.shape)


def test_the_registry_has_all_data_sets():
    texts = {"wikitext2", "shakespeare", "ag_news", "sst2", "synthetic_text", "text", "instructions"}
    tables = {"breast_cancer", "diabetes", "table", "huggingface"}
    assert {*DATASETS} == {*PUBLISHED, *texts, *tables, "arrays", "datasets", "folder", "function"}
    assert DATASETS_KIND.read("digits", "exp.yaml: data") == Digits()


def test_shape_is_no_setting_of_a_real_data_set():
    with pytest.raises(ConfigError, match="unknown key 'shape'"):
        parse(MNIST, {"shape": [3, 32, 32]}, "exp.yaml: data")


def test_workers_need_no_library_that_a_data_set_is_read_with():
    code = "import sys, rayfl.data; print(*{'torchvision', 'sklearn', 'PIL', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_digits():
    data = Digits()
    arrays = data.arrays()
    check(data, arrays)
    assert (len(arrays.train["y"]), len(arrays.test["y"])) == (1438, 359)
    assert arrays.train["x"].max() == 16
    # scikit-learn's 178 zeros, 182 ones, ...: a fifth of each, rounded
    assert np.bincount(arrays.test["y"]).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    assert np.array_equal(arrays.train["x"], data.arrays().train["x"])


def test_digits_are_normalised():
    x = Digits().preprocessing.normalised(torch.from_numpy(Digits().arrays().train["x"]))
    assert float(x.mean()) == pytest.approx(0, abs=2e-3)
    assert float(x.std()) == pytest.approx(1, abs=2e-3)


def test_synthetic_has_the_asked_shape_and_is_always_the_same():
    data = Synthetic(samples=53, test_samples=7, shape=(3, 4, 5), classes=6)
    arrays = data.arrays()
    check(data, arrays)
    assert (len(arrays.train["y"]), len(arrays.test["y"])) == (53, 7)
    assert np.bincount(arrays.train["y"]).tolist() == [9, 9, 9, 9, 9, 8]
    assert np.array_equal(arrays.train["x"], data.arrays().train["x"])


def test_synthetic_is_learnable_but_not_trivial():
    arrays = Synthetic().arrays()
    x, x_test = (a.reshape(len(a), -1).astype(float) for a in (arrays.train["x"], arrays.test["x"]))
    means = np.stack([x[arrays.train["y"] == c].mean(0) for c in range(10)])
    nearest = np.square(x_test[:, None] - means).sum(-1).argmin(1)
    assert 0.75 < (nearest == arrays.test["y"]).mean() < 0.95


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"samples": 10**12}, "72,000,000,036,640"),
        ({"shape": [3, 4000, 4000]}, "120,480,020,000"),
        ({"classes": 10**6, "shape": [1, 100, 100]}, "10,025,020,000"),
    ],
)
def test_a_synthetic_set_that_is_too_large_is_refused_with_its_bytes(given, asked):
    with pytest.raises(ConfigError) as error:
        parse(Synthetic, given, "exp.yaml: data")
    assert str(error.value) == (
        f"exp.yaml: data: samples, test_samples, shape and classes: the images need {asked} bytes. Allowed: at most "
        "8,000,000,000 bytes"
    )


@pytest.mark.parametrize(
    ("cls", "given", "message"),
    [
        (Digits, {"size": 10**6}, "exp.yaml: data.size: 1000000 is not valid. Allowed: at most 4096, or null"),
        (Digits, {"size": 0}, "exp.yaml: data.size: 0 is not valid. Allowed: at least 1, or null"),
        (Synthetic, {"classes": 10**9}, "exp.yaml: data.classes: 1000000000 is not valid. Allowed: at most 1000000"),
        (Synthetic, {"shape": [1, 0, 8]}, "exp.yaml: data.shape.1: 0 is not valid. Allowed: at least 1"),
    ],
)
def test_numbers_out_of_bounds_are_refused(cls, given, message):
    with pytest.raises(ConfigError) as error:
        parse(cls, given, "exp.yaml: data")
    assert str(error.value) == message


def test_the_folder_is_not_part_of_the_result():
    assert CIFAR10.not_in_result == MNIST.not_in_result == ("root",)
    assert Digits.not_in_result == ()


def test_a_data_set_has_the_shape_of_network_inputs():
    data = CIFAR10(size=224)
    assert (data.shape, data.seen, CIFAR10().seen) == ((3, 32, 32), (3, 224, 224), (3, 32, 32))
    assert data.offers == {"input": (3, 224, 224), "classes": 10}
    assert data.prepare == replace(data.preprocessing, size=224)
    assert CIFAR10().prepare == CIFAR10().preprocessing
    raw = CIFAR10(pixels="raw", size=64).prepare
    assert (raw.scale, raw.mean, raw.std, raw.crop, raw.flip, raw.size) == (1.0, (0.0,), (1.0,), 0, False, 64)


def test_cifar_augments_by_crop_and_flip_svhn_by_crop_alone():
    assert (CIFAR10().preprocessing.crop, CIFAR10().preprocessing.flip) == (4, True)
    assert (SVHN().preprocessing.crop, SVHN().preprocessing.flip) == (2, False)
    assert CIFAR100(augment=False).preprocessing.crop == 0
    assert CIFAR100(augment=False).preprocessing.flip is False


def test_missing_files_are_named(tmp_path, offline):
    with pytest.raises(ConfigError) as error:
        MNIST(root=str(tmp_path)).load()
    message = str(error.value)
    assert message.startswith(f"data: mnist is not in {tmp_path} and cannot be downloaded (")
    assert "no network" in message
    assert message.endswith(
        f"). Allowed: a folder with the files\n"
        f"  {tmp_path}/MNIST/raw/train-images-idx3-ubyte.gz\n"
        f"  {tmp_path}/MNIST/raw/train-labels-idx1-ubyte.gz\n"
        f"  {tmp_path}/MNIST/raw/t10k-images-idx3-ubyte.gz\n"
        f"  {tmp_path}/MNIST/raw/t10k-labels-idx1-ubyte.gz\n"
        "Hint: set another folder by data.root or the environment variable RAYFL_DATA"
    )


def test_packed_files_are_unpacked_without_a_network(tmp_path):
    data = FashionMNIST(root=str(tmp_path))
    unpacked = []

    def read(root, download):
        if not download:
            raise RuntimeError("not unpacked")
        unpacked.append(root)
        return "data"

    with files.offline(), pytest.raises(ConfigError, match="fashion_mnist is not in"):
        data.fetch(read)
    assert unpacked == []
    for file in data.files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    with files.offline():
        assert data.fetch(read) == "data"
    assert unpacked == [str(tmp_path)]


@pytest.mark.parametrize("kind", [FashionMNIST, CIFAR10, CIFAR100, SVHN])
def test_every_downloaded_set_names_its_files(kind, tmp_path, offline):
    with pytest.raises(ConfigError) as error:
        kind(root=str(tmp_path)).load()
    for file in kind.files:
        assert str(tmp_path / file) in str(error.value)


def test_a_folder_that_is_given_must_exist(tmp_path, monkeypatch):
    missing = str(tmp_path / "nowhere")
    expected = (
        f"data.root: the folder {missing!r} does not exist. Allowed: an existing folder. Hint: create it, or leave"
    )
    with pytest.raises(ConfigError) as error:
        CIFAR10(root=missing).load()
    assert str(error.value).startswith(expected)
    monkeypatch.setenv("RAYFL_DATA", missing)
    with pytest.raises(ConfigError) as error:
        CIFAR10().load()
    assert str(error.value).startswith(expected)


def test_downloads_have_a_timeout_that_is_restored(tmp_path):
    def read(root, download):
        if not download:
            raise RuntimeError("not found")
        return socket.getdefaulttimeout()

    assert SVHN(root=str(tmp_path)).fetch(read) == 10.0
    assert socket.getdefaulttimeout() is None


def test_cifar100_reads_channels_first_and_fine_labels(tmp_path, monkeypatch):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    pixels = np.arange(2 * 3072).reshape(2, 3072).astype(np.uint8)
    for part in ("train", "test"):
        (folder / part).write_bytes(pickle.dumps({"data": pixels, "fine_labels": [99, 0]}))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": ["a"]}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: os.path.isfile(path))
    data = CIFAR100(root=str(tmp_path))
    arrays = data.arrays()
    check(data, arrays)
    assert arrays.train["y"].tolist() == [99, 0]
    # the stored order is all red, all green, all blue
    assert np.array_equal(arrays.train["x"], pixels.reshape(2, 3, 32, 32))


def test_scrambled_cifar10_reads_channels_last_as_channels_first(tmp_path, monkeypatch):
    """As the authors of SpaFL: torchvision's [N, 32, 32, 3] array, reshaped to [N, 3, 32, 32]."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(256, size=(2, 3072)).astype(np.uint8)
    for part in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / part).write_bytes(pickle.dumps({"data": pixels, "labels": [9, 0]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["a"]}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: os.path.isfile(path))
    plain, data = CIFAR10(root=str(tmp_path)).arrays(), CIFAR10(root=str(tmp_path), scrambled=True, pixels="raw")
    arrays = data.arrays()
    check(data, arrays)
    assert np.array_equal(plain.train["x"][:2], pixels.reshape(2, 3, 32, 32))
    theirs = plain.test["x"].transpose(0, 2, 3, 1).reshape(-1, 3, 32, 32)
    assert np.array_equal(arrays.test["x"], theirs) and np.array_equal(arrays.train["x"][:2], theirs)
    # the first row of the first channel: the first 32 values of the image, red, green, blue, red, ...
    assert arrays.train["x"][0, 0, 0, :4].tolist() == [
        plain.train["x"][0, 0, 0, 0],
        *plain.train["x"][0, 1:, 0, 0],
        plain.train["x"][0, 0, 0, 1],
    ]
    assert np.array_equal(arrays.train["y"], plain.train["y"])


def test_svhn_calls_the_digit_zero_0(tmp_path, monkeypatch):
    from scipy.io import savemat

    x = np.arange(32 * 32 * 3 * 2).reshape(32, 32, 3, 2).astype(np.uint8)
    for part in ("train", "test"):
        savemat(tmp_path / f"{part}_32x32.mat", {"X": x, "y": np.array([[10], [3]], np.uint8)})
    monkeypatch.setattr("torchvision.datasets.SVHN._check_integrity", lambda self: True)
    data = SVHN(root=str(tmp_path))
    arrays = data.arrays()
    check(data, arrays)
    assert arrays.train["y"].tolist() == [0, 3]
    assert arrays.train["x"][1, 2, 5, 7] == x[5, 7, 2, 1]


@pytest.mark.data
@needs_data
def test_mnist_and_its_writers():
    data = MNIST()
    arrays = data.arrays()
    check(data, arrays)
    assert (len(arrays.train["y"]), len(arrays.test["y"])) == (60_000, 10_000)
    assert arrays.train["y"][:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert arrays.users is not None
    sizes = np.unique(arrays.users, return_counts=True)[1]
    assert (len(arrays.users), len(sizes), sizes.min(), sizes.max()) == (60_000, 539, 19, 131)
    pixels = arrays.train["x"] / 255
    assert (pixels.mean(), pixels.std()) == pytest.approx((0.1307, 0.3081), abs=1e-4)


@pytest.mark.data
@needs_data
def test_damaged_files_of_mnist_are_refused(tmp_path):
    """Interrupted: unpacking, and the download of the writers."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file in Path(os.environ["RAYFL_DATA"], "MNIST", "raw").iterdir():
        (raw / file.name).symlink_to(file)
    writers = tmp_path / "QMNIST" / "raw" / "qmnist-train-labels-idx2-int.gz"
    writers.parent.mkdir(parents=True)
    writers.write_bytes(gzip.compress(bytes(1000))[:-9])
    data = MNIST(root=str(tmp_path))
    assert message(data.arrays).startswith(f"data: {writers} cannot be read (")
    writers.unlink()
    images = raw / "train-images-idx3-ubyte"
    for content in (b"", b"no pixels"):
        images.unlink()
        images.write_bytes(content)
        assert f"{tmp_path}" in message(data.arrays)


@pytest.mark.data
@needs_data
def test_mnist_without_the_writers_file_has_no_users(tmp_path):
    (tmp_path / "MNIST").symlink_to(os.path.join(os.environ["RAYFL_DATA"], "MNIST"))
    assert MNIST(root=str(tmp_path)).arrays().users is None


@pytest.mark.data
@needs_data
def test_fashion_mnist():
    data = FashionMNIST()
    arrays = data.arrays()
    check(data, arrays)
    assert np.bincount(arrays.train["y"]).tolist() == [6000] * 10
    assert np.bincount(arrays.test["y"]).tolist() == [1000] * 10
    assert arrays.users is None
    pixels = arrays.train["x"] / 255
    assert (pixels.mean(), pixels.std()) == pytest.approx((0.2860, 0.3530), abs=1e-4)


@pytest.mark.data
@needs_data
def test_cifar10():
    data = CIFAR10()
    arrays = data.arrays()
    check(data, arrays)
    assert np.bincount(arrays.train["y"]).tolist() == [5000] * 10
    assert np.bincount(arrays.test["y"]).tolist() == [1000] * 10
    means = (arrays.train["x"] / np.float32(255)).mean((0, 2, 3), dtype=np.float64)
    assert means == pytest.approx((0.4914, 0.4822, 0.4465), abs=1e-4)
