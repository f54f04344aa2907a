"""A data set: what its images look like is known without loading it, and it loads as plain arrays.

The arrays are put into shared memory once; every worker reads the same copy and normalises what it trains
on by the data set's `preprocessing`. Workers therefore never import torchvision.
"""

import contextlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field

from rayfl.config import Config, ConfigError
from rayfl.training import Preprocessing

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds without an answer after which a download is given up."""


@dataclass(frozen=True)
class Arrays:
    """A data set in memory, C-contiguous."""

    x: np.ndarray
    """Training images [N, C, H, W] uint8, as stored."""
    y: np.ndarray
    """Their labels [N] int64."""
    x_test: np.ndarray
    y_test: np.ndarray
    users: np.ndarray | None = None
    """The natural user (writer, device) of each training image [N], where the data set knows it."""


class DataSet(Config, ABC):
    """What a `data:` section says. A subclass adds its fields and `name: Literal["..."] = "..."`."""

    name: str
    size: int | None = Field(default=None, ge=1)
    """Height and width that images are resized to before a network sees them (224 for networks that were trained on
    ImageNet); unless given they are as stored."""
    pixels: Literal["normalised", "raw"] = "normalised"
    """normalised: less the data set's mean, by its standard deviation. raw: 0 to 255, not augmented (SpaFL's code)."""
    shape: ClassVar[tuple[int, int, int]]
    """Channels, height and width of one image, as stored."""
    classes: ClassVar[int]
    """Number of classes."""

    @abstractmethod
    def load(self) -> Arrays:
        """Training and test set."""

    @property
    @abstractmethod
    def preprocessing(self) -> Preprocessing:
        """From the arrays' pixels to what a network sees, but for `size`."""

    @property
    def seen(self) -> tuple[int, int, int]:
        """Channels, height and width of one image, as a network sees it."""
        return self.shape if self.size is None else (self.shape[0], self.size, self.size)

    @property
    def preprocess(self) -> Preprocessing:
        """From the arrays' pixels to what a network sees."""
        kept = self.preprocessing if self.pixels == "normalised" else Preprocessing(scale=1.0)
        return replace(kept, size=self.size)


class Downloaded(DataSet, ABC):
    """A data set that lies in a folder, or is downloaded into it."""

    root: str | None = None
    """Folder with the files in torchvision's layout. Unless given it is the environment's RAYFL_DATA, else
    ./data."""
    files: ClassVar[tuple[str, ...]]
    """What has to be in the folder where there is no network; archives are unpacked when first used."""

    @property
    def folder(self) -> Path:
        given = self.root or os.environ.get("RAYFL_DATA")
        if given is None:
            return Path("data")
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise ConfigError(
                f"data.root: given {given!r}; allowed: an existing folder. Make it, or leave both data.root "
                "and RAYFL_DATA unset to use ./data"
            )
        return folder

    def fetch(self, read: Callable[[str, bool], T]) -> T:
        """`read(root, download)` of what is in the folder, or after torchvision has downloaded it."""
        folder = self.folder
        # torchvision says RuntimeError for files that are missing or damaged
        with contextlib.suppress(RuntimeError):
            return read(str(folder), False)
        try:
            with patience(PATIENCE):
                return read(str(folder), True)
        except (OSError, RuntimeError) as error:
            wanted = "\n".join(f"  {folder.resolve() / file}" for file in self.files)
            raise ConfigError(
                f"data: {self.name} is not in {folder.resolve()} and cannot be downloaded "
                f"({' '.join(str(error).split())}). Put there\n{wanted}\n"
                "or name another folder by data.root or the environment variable RAYFL_DATA"
            ) from None


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Inside the block a silent server is an error after so many seconds (torchvision sets no timeout)."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
