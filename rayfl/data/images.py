"""Base class of image data sets, and the preprocessing of images."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from rayfl.data.arrays import Column
from rayfl.data.base import DataSet
from rayfl.data.goal import Classes, Goal
from rayfl.data.modules import Constants, as_numbers
from rayfl.data.samples import Batch, Prepare, Samples

LARGEST = 4096
"""Maximum of `size`."""
MOST_CLASSES = 10**6


@dataclass(frozen=True)
class Images(Prepare):
    """Images normalised to (x / scale - mean) / std and resized. Training images are optionally cropped and flipped.

    Samples are `x` [N, C, H, W], as stored, and `y` [N].

    >>> stored = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2)
    >>> Images(mean=(0.5,), std=(0.5,)).whole({"x": stored})["x"].flatten()
    tensor([-1.,  1.])
    """

    scale: float = 255.0
    mean: tuple[float, ...] = (0.0,)
    """Mean of x / scale for each channel. Without crops a single number may stand for all channels."""
    std: tuple[float, ...] = (1.0,)
    crop: int = 0
    """Padding per side, in stored pixels of value 0, before random crops. 0: no crops."""
    flip: bool = False
    """Random horizontal flips."""
    size: int | None = None
    """Height and width after bilinear resizing of each batch. With `crop`, images are resized to 8 / 7 of it (256 for
    224), padded in proportion, and cropped to it."""

    def whole(self, samples: Samples) -> Samples:
        """Normalise x [N, C, H, W] to float32 in channels-last layout, without resizing."""
        return samples | {"x": self.normalised(samples["x"])}

    def batch(self, samples: Samples, generator: torch.Generator | None) -> Batch:
        """Resize the images. With a generator, also crop and flip each image at random."""
        x = samples["x"]
        return _resized(x, self.size) if generator is None else self._augmented(x, generator), samples["y"]

    def plain(self) -> dict[str, Any]:
        """Return the parameters of (pixels / scale - mean) / std and `size`."""
        return {name: getattr(self, name) for name in ("scale", "mean", "std", "size")}

    def module(self) -> nn.Module:
        return _Normalised(self)

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return normalised pixels [N, C, H, W] float32 of the stored size."""
        mean = torch.tensor(self.mean, device=pixels.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(-1, 1, 1)
        batch, channels, height, width = pixels.shape
        # explicit strides: `contiguous` does not change images of one channel, and pooling would take its slow path
        x = torch.empty(batch, height, width, channels, device=pixels.device).permute(0, 3, 1, 2)
        if channels == 1:
            return x.copy_(pixels).div_(self.scale).sub_(mean).div_(std)
        # normalise in channels-first layout: this is four times as fast
        return x.copy_(pixels.to(x.dtype, copy=True).div_(self.scale).sub_(mean).div_(std))

    def _augmented(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if self.crop:
            black = -torch.tensor(self.mean, device=x.device) / torch.tensor(self.std, device=x.device)
            border, window = self.crop, x.shape[2:]
            if self.size is not None:
                border, window = round(border * self.size / x.shape[2]), (self.size, self.size)
                x = _resized(x, round(self.size * 8 / 7))
            x = _random_crop(x, border, window, black, generator)
        else:
            x = _resized(x, self.size)
        if self.flip:
            flipped = torch.rand(len(x), generator=generator).to(x.device) < 0.5
            x = torch.where(flipped.view(-1, 1, 1, 1), x.flip(-1), x)
        return x


class _Normalised(Constants):
    """Images [B, C, H, W] as stored -> network inputs."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, images: Images):
        super().__init__((-1, 1, 1), mean=images.mean, std=images.std)
        self.scale, self.size = images.scale, images.size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _resized(as_numbers(x).div_(self.scale).sub_(self.mean).div_(self.std), self.size)

    def extra_repr(self) -> str:
        return f"(x / {self.scale:g} - mean) / std, {super().extra_repr()}, size={self.size}"


def _resized(x: torch.Tensor, size: int | None) -> torch.Tensor:
    return x if size is None else F.interpolate(x, (size, size), mode="bilinear")


def _random_crop(
    x: torch.Tensor, border: int, window: Sequence[int], fill: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Crop a random window (rows, columns) from each image of x [B, C, H, W], padded by `border` of `fill` [C]."""
    batch, channels, height, width = x.shape
    padded = fill.view(1, -1, 1, 1).repeat(batch, 1, height + 2 * border, width + 2 * border)
    padded[:, :, border : border + height, border : border + width] = x
    places = 2 * border + height - window[0] + 1
    top, left = torch.randint(0, places, (2, batch), generator=generator).to(x.device)
    rows = top[:, None] + torch.arange(window[0], device=x.device)
    columns = left[:, None] + torch.arange(window[1], device=x.device)
    image = torch.arange(batch, device=x.device)[:, None, None]
    cropped = padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2)


class ImageData(DataSet, ABC):
    """Images of one stored size with one class each: `x` [N, C, H, W] and `y` [N].

    >>> import numpy as np
    >>> from rayfl.data import Arrays
    >>> class Blank(ImageData):
    ...     shape, classes = (1, 8, 8), 2
    ...     def load(self):
    ...         split = {"x": np.zeros((10, 1, 8, 8), np.uint8), "y": np.arange(10) % 2}
    ...         return Arrays(split, split)
    ...     @property
    ...     def preprocessing(self):
    ...         return Images(mean=(0.5,), std=(0.25,))
    >>> Blank().arrays().test_samples
    10
    """

    size: int | None = Field(default=None, ge=1, le=LARGEST)
    """Height and width of the network inputs (224 for networks trained on ImageNet). Default: the stored size."""
    pixels: Literal["normalised", "raw"] = "normalised"
    """normalised: (x - mean) / std of the data set. raw: as stored, without augmentation (SpaFL's code)."""
    shape: ClassVar[tuple[int, int, int]]
    """Channels, height and width of one image, as stored."""
    classes: ClassVar[int]
    """Number of classes."""

    @property
    @abstractmethod
    def preprocessing(self) -> Images:
        """Preprocessing of stored pixels, except for `size` and `pixels`."""

    @property
    def prepare(self) -> Images:
        images = self.preprocessing if self.pixels == "normalised" else Images(scale=1.0)
        return replace(images, size=self.size)

    @property
    def unit(self) -> float:
        return self.preprocessing.scale

    @property
    def goal(self) -> Goal:
        return Classes(self.classes)

    @property
    def columns(self) -> Mapping[str, Column]:
        return {"x": Column(self.shape), "y": self.goal.column}

    @property
    def seen(self) -> tuple[int, int, int]:
        """Channels, height and width of one network input."""
        return self.shape if self.size is None else (self.shape[0], self.size, self.size)

    @property
    def offers(self) -> Mapping[str, Any]:
        return {"input": self.seen, "classes": self.goal.classes}
