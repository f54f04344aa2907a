"""A data set: what its samples look like is known without loading it, and it loads as plain arrays.

The arrays are put into shared memory once; every worker reads the same copy and prepares what it trains on. Workers
therefore never import the library that a data set is read with.
"""

import contextlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar, final

from pydantic import PrivateAttr, SerializerFunctionWrapHandler, field_validator, model_serializer

from rayfl.config import ConfigError, Kind, Named
from rayfl.data.arrays import Arrays, Column, validate
from rayfl.data.goal import Goal
from rayfl.data.public import Public
from rayfl.data.samples import Prepare

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds without an answer after which a download is given up."""


class DataSet(Named, ABC):
    """What a `data:` section says. A subclass adds its fields, and says the rest."""

    not_in_result: ClassVar[tuple[str, ...]] = ()
    """Fields that change nothing in a result: where the same files lie."""
    public: Public | None = None
    """Samples beside those of clients, for methods that distil: a part of the training set, another data set, or noise;
    unless given none."""

    @field_validator("public", mode="before")
    @classmethod
    def _read_its_data(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("data") is not None:
            return {**given, "data": DATASETS_KIND.read(given["data"], "public.data")}
        return given

    @abstractmethod
    def load(self) -> Arrays:
        """Training and test set. Whoever wants them, and the public samples, calls `arrays`."""

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, Column]:
        """What each array of a split holds, by name: what `arrays` checks."""

    @property
    @abstractmethod
    def prepare(self) -> Prepare:
        """From the arrays' samples to what a network sees."""

    @property
    @abstractmethod
    def goal(self) -> Goal:
        """What is learned from the samples."""

    @property
    @abstractmethod
    def offers(self) -> Mapping[str, Any]:
        """What a model takes its fields of the same names from, unless they are given."""

    @property
    def attached(self) -> tuple[Path, ...]:
        """Files that an exported network is used with, such as a tokenizer's."""
        return ()

    @property
    def unit(self) -> float | None:
        """What stored pixels are divided by, of images: those of two data sets mean the same if it is equal. None:
        samples are no images."""
        return None

    @final
    def arrays(self) -> Arrays:
        """Training and test set, checked, and the public samples that are not in the training set."""
        found = validate(self.load(), self.columns)
        return found if self.public is None else replace(found, public=self.public.split(self, found))

    @final
    def in_result(self) -> dict[str, Any]:
        """What a result depends on: the dump without `not_in_result`, that of a public data set included."""
        plain = {name: value for name, value in self.model_dump(mode="json").items() if name not in self.not_in_result}
        if self.public is not None and self.public.data is not None:
            plain["public"] = plain["public"] | {"data": self.public.data.in_result()}
        return plain

    @model_serializer(mode="wrap")
    def _dumped(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without `public` where there is none, as files from before there was any have it."""
        plain = dump(self)
        return plain if self.public is not None else {name: plain[name] for name in plain if name != "public"}

    @final
    def described(self) -> "DataSet":
        """All that is known of it without its samples, for processes that get these by reference. It dumps as this
        data set does."""
        public = None if self.public is None else self.public.described()
        described = Described.model_construct(name=self.name, public=public)
        described._known = {name: getattr(self, name) for name in ("columns", "prepare", "goal", "offers")}
        described._plain = self.model_dump(mode="json")
        described._not_in_result = self.not_in_result
        return described


Public.model_rebuild(_types_namespace={"DataSet": DataSet})

DATASETS: dict[str, type[DataSet]] = {}
"""Name -> class; `rayfl.data` fills it."""

DATASETS_KIND = Kind("data set", DataSet, DATASETS, "rayfl.datasets")
DataSet.model_rebuild()


class Described(DataSet):
    """A data set that cannot be loaded."""

    _known: dict[str, Any] = PrivateAttr()
    _plain: dict[str, Any] = PrivateAttr()
    _not_in_result: tuple[str, ...] = PrivateAttr()

    def load(self) -> Arrays:
        raise ConfigError(f"data: given a description of {self.name}; allowed: the data set itself")

    @property
    def columns(self) -> Mapping[str, Column]:
        return self._known["columns"]

    @property
    def prepare(self) -> Prepare:
        return self._known["prepare"]

    @property
    def goal(self) -> Goal:
        return self._known["goal"]

    @property
    def offers(self) -> Mapping[str, Any]:
        return self._known["offers"]

    @property
    def not_in_result(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._not_in_result

    @model_serializer
    def _dumped(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._plain


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
