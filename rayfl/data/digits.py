"""Default data set: 1,797 handwritten digits of 8 x 8 pixels from scikit-learn, without a download."""

from typing import ClassVar, Literal

import numpy as np

from rayfl.core.seeds import numpy_generator
from rayfl.data.arrays import Arrays
from rayfl.data.images import ImageData, Images
from rayfl.data.partition import hold_out


class Digits(ImageData):
    """UCI optical digits, the test part, as in scikit-learn; pixels 0 ... 16.

    There is no published test set: 359 images (a fifth of every class, rounded) are drawn with a fixed seed, so the
    split does not depend on the run's seed.
    """

    name: Literal["digits"] = "digits"
    shape: ClassVar = (1, 8, 8)
    classes: ClassVar = 10

    def load(self) -> Arrays:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        x = np.asarray(pixels, np.uint8).reshape(-1, *self.shape)
        y = np.asarray(labels, np.int64)
        train, test = hold_out(y, 0.2, numpy_generator(0, "digits"))
        return Arrays({"x": x[train], "y": y[train]}, {"x": x[test], "y": y[test]})

    @property
    def preprocessing(self) -> Images:
        return Images(scale=16.0, mean=(0.305,), std=(0.376,))
