"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 50,000 + 10,000 colour images of 32 x 32."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np

from rayfl.data.arrays import Arrays, Split
from rayfl.data.files import Downloaded
from rayfl.data.images import ImageData, Images

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
"""As in the published code of HeteroFL, FedRolex, FIARSE and NeFL, for CIFAR-100 too."""


class _CIFAR(Downloaded, ImageData):
    shape: ClassVar = (3, 32, 32)
    augment: bool = True
    """Train on random crops (4 pixels of padding) and horizontal flips."""

    @property
    def preprocessing(self) -> Images:
        return Images(mean=MEAN, std=STD, crop=4 if self.augment else 0, flip=self.augment)

    def _arrays(self, source: Callable[..., Any]) -> Arrays:
        train, test = map(_split, self.train_and_test(source))
        return Arrays(train, test)


class CIFAR10(_CIFAR):
    """CIFAR-10: 10 classes with 5,000 + 1,000 images each."""

    name: Literal["cifar10"] = "cifar10"
    classes: ClassVar = 10
    files: ClassVar = ("cifar-10-python.tar.gz",)
    scrambled: bool = False
    """True to permute pixels as SpaFL's code does: the values of an image [32, 32, 3], read as [3, 32, 32]. Together
    with `pixels: raw` this gives SpaFL's inputs."""

    def load(self) -> Arrays:
        from torchvision import datasets

        arrays = self._arrays(datasets.CIFAR10)
        return Arrays(_scrambled(arrays.train), _scrambled(arrays.test)) if self.scrambled else arrays


class CIFAR100(_CIFAR):
    """CIFAR-100 with fine labels: 100 classes with 500 + 100 images each."""

    name: Literal["cifar100"] = "cifar100"
    classes: ClassVar = 100
    files: ClassVar = ("cifar-100-python.tar.gz",)

    def load(self) -> Arrays:
        from torchvision import datasets

        return self._arrays(datasets.CIFAR100)


def _split(part: Any) -> Split:
    return {"x": np.ascontiguousarray(part.data.transpose(0, 3, 1, 2)), "y": np.asarray(part.targets, np.int64)}


def _scrambled(split: Split) -> Split:
    x = split["x"]
    return split | {"x": np.ascontiguousarray(x.transpose(0, 2, 3, 1)).reshape(x.shape)}
