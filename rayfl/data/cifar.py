"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 50,000 + 10,000 colour images of 32 x 32."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np

from rayfl.data.arrays import Arrays, Split
from rayfl.data.files import Downloaded
from rayfl.data.images import ImageData, Images

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
"""As in the papers' codes, which use them for CIFAR-100 too (HeteroFL, FedRolex, FIARSE, NeFL)."""


class CIFAR10(Downloaded, ImageData):
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
        return Arrays(_scrambled(arrays.train), _scrambled(arrays.test))

    @property
    def preprocessing(self) -> Images:
        return _preprocessing(self.augment)


class CIFAR100(Downloaded, ImageData):
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
    def preprocessing(self) -> Images:
        return _preprocessing(self.augment)


def _load(data: Downloaded, source: Callable[..., Any]) -> Arrays:
    train, test = data.fetch(
        lambda root, download: [source(root, train=part, download=download) for part in (True, False)]
    )
    return Arrays(_split(train), _split(test))


def _split(part: Any) -> Split:
    return {"x": np.ascontiguousarray(part.data.transpose(0, 3, 1, 2)), "y": np.asarray(part.targets, np.int64)}


def _scrambled(split: Split) -> Split:
    """x [N, 3, 32, 32] -> the same shape, of other places."""
    x = split["x"]
    return split | {"x": np.ascontiguousarray(x.transpose(0, 2, 3, 1)).reshape(x.shape)}


def _preprocessing(augment: bool) -> Images:
    return Images(mean=MEAN, std=STD, crop=4 if augment else 0, flip=augment)
