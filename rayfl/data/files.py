"""Data sets whose files are in a folder or are downloaded into it."""

import contextlib
import contextvars
import csv
import lzma
import os
import socket
from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rayfl.config import ConfigError
from rayfl.data.base import DataSet

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds without an answer after which a download is aborted."""
DAMAGED = (RuntimeError, ValueError, AssertionError, EOFError)
"""What torchvision raises if files are missing or damaged."""
OFFLINE = contextvars.ContextVar("OFFLINE", default=False)


class InFolder(DataSet, ABC):
    """A data set whose files are in a folder."""

    not_in_result: ClassVar = ("root",)
    root: str | None = None
    """Folder of the files. Default: the environment variable RAYFL_DATA, otherwise ./data."""

    @property
    def folder(self) -> Path:
        given = self.root or os.environ.get("RAYFL_DATA")
        if given is None:
            return Path("data")
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise ConfigError(
                f"data.root: the folder {given!r} does not exist. Allowed: an existing folder. Hint: create it, or "
                "leave data.root and RAYFL_DATA unset to use ./data"
            )
        return folder

    def all_of(self, files: Sequence[str], reason: str = "") -> list[Path]:
        """Return the paths of the files. Raise ConfigError with the reason if one is missing."""
        found = [self.folder / file for file in files]
        if not all(path.is_file() for path in found):
            raise self.missing(files, reason)
        return found

    def missing(self, files: Sequence[str], reason: str = "") -> ConfigError:
        """Return the error for missing files; `reason`: why they cannot be downloaded."""
        folder = self.folder.resolve()
        wanted = "\n".join(f"  {folder / file}" for file in files)
        return ConfigError(
            f"data: {self.name} is not in {folder}{reason}. Allowed: a folder with the files\n{wanted}\n"
            "Hint: set another folder by data.root or the environment variable RAYFL_DATA"
        )


class Downloaded(InFolder, ABC):
    """A data set in torchvision's folder layout, downloaded if it is missing."""

    files: ClassVar[tuple[str, ...]]
    """Files required for use without a network. Archives are unpacked at the first use."""

    def train_and_test(self, source: Callable[..., Any]) -> list[Any]:
        """Return training and test set of a class of torchvision with the argument `train`."""
        return self.fetch(
            lambda root, download: [source(root, train=part, download=download) for part in (True, False)]
        )

    def fetch(self, read: Callable[[str, bool], T]) -> T:
        """Return `read(root, download)`, first without and then with a download."""
        folder = self.folder
        with contextlib.suppress(*DAMAGED):
            return read(str(folder), False)
        if OFFLINE.get():
            # archives that are there are unpacked
            self.all_of(self.files)
        try:
            with patience(PATIENCE):
                return read(str(folder), True)
        except (OSError, *DAMAGED) as error:
            reason = f" and cannot be downloaded ({' '.join(str(error).split())})"
            raise self.missing(self.files, reason) from None


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise a ConfigError if a published file turns out to be damaged inside the block."""
    try:
        yield
    # of csv, json, lzma, decoding, and keys that are missing
    except (csv.Error, lzma.LZMAError, EOFError, ValueError, LookupError) as error:
        raise ConfigError(
            f"data: {path} cannot be read ({type(error).__name__}: {error}). Allowed: the published file"
        ) from None


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Raise a ConfigError for missing files inside the block, without a download."""
    token = OFFLINE.set(True)
    try:
        yield
    finally:
        OFFLINE.reset(token)


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Set the default socket timeout, because torchvision sets none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
