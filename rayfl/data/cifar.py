"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 50,000 + 10,000 colour images of 32 x 32."""

from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from rayfl.data.base import Arrays, Downloaded
from rayfl.training import Preprocessing

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
"""As in the papers' codes, which use them for CIFAR-100 too (HeteroFL, FedRolex, FIARSE, NeFL)."""


class CIFAR10(Downloaded):
    """Ten classes of 5,000 + 1,000."""

    name: Literal["cifar10"] = "cifar10"
    shape: ClassVar = (3, 32, 32)
    classes: ClassVar = 10
    files: ClassVar = ("cifar-10-python.tar.gz",)
    augment: bool = True
    """Train on random crops (4 pixels of padding) and horizontal flips, as all of the field does."""
    scrambled: bool = False
    """Pixels out of their places, as SpaFL's code has them: the values of an image [32, 32, 3], row by row, read as
    [3, 32, 32]. With `pixels: raw` what its networks are trained and tested on."""

    def load(self) -> Arrays:
        from torchvision import datasets

        arrays = _load(self, datasets.CIFAR10)
        if not self.scrambled:
            return arrays
        return replace(arrays, x=_scrambled(arrays.x), x_test=_scrambled(arrays.x_test))

    @property
    def preprocessing(self) -> Preprocessing:
        return _preprocessing(self.augment)


class CIFAR100(Downloaded):
    """A hundred classes of 500 + 100: the fine labels."""

    name: Literal["cifar100"] = "cifar100"
    shape: ClassVar = (3, 32, 32)
    classes: ClassVar = 100
    files: ClassVar = ("cifar-100-python.tar.gz",)
    augment: bool = True
    """Train on random crops (4 pixels of padding) and horizontal flips, as all of the field does."""

    def load(self) -> Arrays:
        from torchvision import datasets

        return _load(self, datasets.CIFAR100)

    @property
    def preprocessing(self) -> Preprocessing:
        return _preprocessing(self.augment)


def _load(data: Downloaded, source) -> Arrays:
    train, test = data.fetch(
        lambda root, download: [source(root, train=part, download=download) for part in (True, False)]
    )
    return Arrays(*_arrays(train), *_arrays(test))


def _arrays(part) -> tuple[np.ndarray, np.ndarray]:
    pixels = np.ascontiguousarray(part.data.transpose(0, 3, 1, 2))
    return pixels, np.asarray(part.targets, np.int64)


def _scrambled(pixels: np.ndarray) -> np.ndarray:
    """[N, 3, 32, 32] -> the same shape, of other places."""
    return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)).reshape(pixels.shape)


def _preprocessing(augment: bool) -> Preprocessing:
    return Preprocessing(mean=MEAN, std=STD, crop=4 if augment else 0, flip=augment)
