"""Images: what all data sets of them have, and how stored pixels become what a network sees."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from rayfl.data.arrays import Column
from rayfl.data.base import DataSet
from rayfl.data.goal import Classes
from rayfl.data.samples import Batch, Prepare, Samples

LARGEST = 4096
"""Pixels a side of the largest images that are resized to."""
MOST_CLASSES = 10**6


@dataclass(frozen=True)
class Images(Prepare):
    """x / scale, less the mean, by the standard deviation; resized; for training perhaps cropped and flipped.

    Samples are `x` [N, C, H, W], as stored, and `y` [N].
    """

    scale: float = 255.0
    mean: tuple[float, ...] = (0.0,)
    """Of each channel, of x / scale; a single number is that of all channels, if there are no crops."""
    std: tuple[float, ...] = (1.0,)
    crop: int = 0
    """Random crops after padding by so many stored pixels a side with the stored pixel 0."""
    flip: bool = False
    """Random horizontal flips."""
    size: int | None = None
    """Height and width that images are resized to, bilinearly, a batch at a time. With `crop`, images are first resized
    to 8 / 7 of it (256 for 224), padded in proportion, and cropped to it."""

    def whole(self, samples: Samples) -> Samples:
        """Normalised, of the stored size: x [N, C, H, W] float32, channels last, where that is faster."""
        return samples | {"x": self.normalised(samples["x"])}

    def batch(self, samples: Samples, generator: torch.Generator | None) -> Batch:
        """Resized, and with a generator cropped and flipped at random, every image by itself."""
        x = samples["x"]
        return _resized(x, self.size) if generator is None else self._augmented(x, generator), samples["y"]

    def plain(self) -> dict[str, Any]:
        """x = (pixels / scale - mean) / std, resized to `size`."""
        return {name: getattr(self, name) for name in ("scale", "mean", "std", "size")}

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """[N, C, H, W] float32 of the stored size."""
        mean = torch.tensor(self.mean, device=pixels.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(-1, 1, 1)
        batch, channels, height, width = pixels.shape
        # by its strides: `contiguous` leaves images of one channel as they are, and so pooling on its slow path
        x = torch.empty(batch, height, width, channels, device=pixels.device).permute(0, 3, 1, 2)
        if channels == 1:
            return x.copy_(pixels).div_(self.scale).sub_(mean).div_(std)
        # channel by channel in memory first: numbers of all channels in turn are four times as slow
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


def _resized(x: torch.Tensor, size: int | None) -> torch.Tensor:
    return x if size is None else F.interpolate(x, (size, size), mode="bilinear")


def _random_crop(
    x: torch.Tensor, border: int, window: Sequence[int], fill: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """A window, of so many rows and columns, of every image of x [B, C, H, W] inside a border of `fill` [C]."""
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
    """Images of one stored size, each of one class: `x` [N, C, H, W] and `y` [N]."""

    size: int | None = Field(default=None, ge=1, le=LARGEST)
    """Height and width that images are resized to before a network sees them (224 for networks that were trained on
    ImageNet); unless given they are as stored."""
    pixels: Literal["normalised", "raw"] = "normalised"
    """normalised: less the data set's mean, by its standard deviation. raw: 0 to 255, not augmented (SpaFL's code)."""
    shape: ClassVar[tuple[int, int, int]]
    """Channels, height and width of one image, as stored."""
    classes: ClassVar[int]
    """Number of classes."""

    @property
    @abstractmethod
    def preprocessing(self) -> Images:
        """From stored pixels to what a network sees, but for `size` and `pixels`."""

    @property
    def prepare(self) -> Images:
        kept = self.preprocessing if self.pixels == "normalised" else Images(scale=1.0)
        return replace(kept, size=self.size)

    @property
    def unit(self) -> float:
        return self.preprocessing.scale

    @property
    def goal(self) -> Classes:
        return Classes(self.classes)

    @property
    def columns(self) -> Mapping[str, Column]:
        return {"x": Column(self.shape), "y": Column((), below=self.goal.classes)}

    @property
    def seen(self) -> tuple[int, int, int]:
        """Channels, height and width of one image, as a network sees it."""
        return self.shape if self.size is None else (self.shape[0], self.size, self.size)

    @property
    def offers(self) -> Mapping[str, Any]:
        return {"input": self.seen, "classes": self.goal.classes}
