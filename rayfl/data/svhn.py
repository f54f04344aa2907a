"""Street View House Numbers (Netzer et al. 2011), cropped digits."""

from typing import ClassVar, Literal

from rayfl.data.arrays import Arrays
from rayfl.data.files import Downloaded
from rayfl.data.images import ImageData, Images


class SVHN(Downloaded, ImageData):
    """73,257 + 26,032 colour images of 32 x 32 with unequal class sizes, without the `extra` part."""

    name: Literal["svhn"] = "svhn"
    shape: ClassVar = (3, 32, 32)
    classes: ClassVar = 10
    files: ClassVar = ("train_32x32.mat", "test_32x32.mat")
    augment: bool = True
    """Train on random crops (2 pixels of padding), as NeFL does, but without its colour jitter and without flips."""

    def load(self) -> Arrays:
        from torchvision import datasets

        train, test = self.fetch(
            lambda root, download: [datasets.SVHN(root, split=part, download=download) for part in ("train", "test")]
        )
        train, test = ({"x": part.data, "y": part.labels} for part in (train, test))
        return Arrays(train, test)

    @property
    def preprocessing(self) -> Images:
        return Images(mean=(0.4377, 0.4438, 0.4728), std=(0.1980, 0.2010, 0.1970), crop=2 if self.augment else 0)
