"""Data sets of files: in a folder of the user's, or downloaded into it."""

import contextlib
import os
import socket
from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from rayfl.config import ConfigError
from rayfl.data.base import DataSet

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds without an answer after which a download is given up."""


class InFolder(DataSet, ABC):
    """A data set of files that lie in a folder."""

    not_in_result: ClassVar = ("root",)
    root: str | None = None
    """Folder with the files. Unless given it is the environment's RAYFL_DATA, else ./data."""

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

    def all_of(self, files: Sequence[str]) -> list[Path]:
        """The files in the folder. A ConfigError says which have to be there if one is missing."""
        found = [self.folder / file for file in files]
        if not all(path.is_file() for path in found):
            raise self.missing(files)
        return found

    def missing(self, files: Sequence[str], reason: str = "") -> ConfigError:
        """What to put where; `reason`: why nobody else does."""
        folder = self.folder.resolve()
        wanted = "\n".join(f"  {folder / file}" for file in files)
        return ConfigError(
            f"data: {self.name} is not in {folder}{reason}. Put there\n{wanted}\n"
            "or name another folder by data.root or the environment variable RAYFL_DATA"
        )


class Downloaded(InFolder, ABC):
    """A data set that lies in a folder in torchvision's layout, or is downloaded into it."""

    files: ClassVar[tuple[str, ...]]
    """What has to be in the folder where there is no network; archives are unpacked when first used."""

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
            reason = f" and cannot be downloaded ({' '.join(str(error).split())})"
            raise self.missing(self.files, reason) from None


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Inside the block a silent server is an error after so many seconds (torchvision sets no timeout)."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
