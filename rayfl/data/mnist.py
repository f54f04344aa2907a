"""MNIST (with writers, if QMNIST's label file exists) and Fashion-MNIST."""

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from rayfl.config import ConfigError
from rayfl.data.arrays import Arrays
from rayfl.data.files import Downloaded
from rayfl.data.images import ImageData, Images

PARTS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
WRITERS = "QMNIST/raw/qmnist-train-labels-idx2-int.gz"


class MNIST(Downloaded, ImageData):
    """60,000 + 10,000 handwritten digits, 28 x 28 (LeCun et al. 1998). No augmentation.

    Users are the 539 writers of the training images, if the folder has QMNIST's training labels (Yadav and Bottou
    2019), QMNIST/raw/qmnist-train-labels-idx2-int.gz. The test images are by other writers.
    """

    name: Literal["mnist"] = "mnist"
    shape: ClassVar = (1, 28, 28)
    classes: ClassVar = 10
    files: ClassVar = tuple(f"MNIST/raw/{part}-ubyte.gz" for part in PARTS)

    def load(self) -> Arrays:
        from torchvision import datasets

        return _load(self, datasets.MNIST, users=_writers(self.folder / WRITERS))

    @property
    def preprocessing(self) -> Images:
        return Images(mean=(0.1307,), std=(0.3081,))


class FashionMNIST(Downloaded, ImageData):
    """60,000 + 10,000 images of clothes, 28 x 28 (Xiao et al. 2017). No augmentation."""

    name: Literal["fashion_mnist"] = "fashion_mnist"
    shape: ClassVar = (1, 28, 28)
    classes: ClassVar = 10
    files: ClassVar = tuple(f"FashionMNIST/raw/{part}-ubyte.gz" for part in PARTS)

    def load(self) -> Arrays:
        from torchvision import datasets

        return _load(self, datasets.FashionMNIST, users=None)

    @property
    def preprocessing(self) -> Images:
        return Images(mean=(0.2860,), std=(0.3530,))


def _load(data: Downloaded, source: Callable[..., Any], users: np.ndarray | None) -> Arrays:
    train, test = ({"x": part.data[:, None].numpy(), "y": part.targets.numpy()} for part in data.train_and_test(source))
    return Arrays(train, test, users)


def _writers(path: Path) -> np.ndarray | None:
    """Return the NIST writer of each training image [60000]: column 2 of 8, after a header of 12 bytes."""
    if not path.exists():
        return None
    try:
        table = np.frombuffer(gzip.decompress(path.read_bytes()), ">i4", offset=12)
        return table.reshape(-1, 8)[:, 2].astype(np.int64)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigError(f"data: {path} cannot be read ({error}). Allowed: QMNIST's file, whole") from None
