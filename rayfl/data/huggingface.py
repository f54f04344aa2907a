"""Data sets of Hugging Face's library `datasets` (extra huggingface): from the hub, or a folder of `save_to_disk`."""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field, JsonValue

from rayfl.config import Config, ConfigError, nearest, parse, shown
from rayfl.data.arrays import Arrays, Column, Split
from rayfl.data.base import DataSet
from rayfl.data.files import OFFLINE
from rayfl.data.folder import pixels_of, size_of
from rayfl.data.goal import Goal
from rayfl.data.images import LARGEST, Images
from rayfl.data.own import OwnImages, Stored
from rayfl.data.samples import Prepare
from rayfl.data.scores import Targets
from rayfl.data.table import Frames
from rayfl.data.table_files import Frame
from rayfl.data.text.encoders import Tokens
from rayfl.data.text.own import OwnText
from rayfl.data.tokens import PAD, TokenTask

T = TypeVar("T")
Changed = tuple[tuple[str, int], ...]
"""Files of a folder with the times of their last changes."""

UNKNOWN = -1
"""Class of samples without one, in columns of named classes."""
MOST_IDS = 2**31
"""Tokens are below this."""


class Source(Config):
    """Where a data set is."""

    path: str
    """Name on the hub ("mnist", "user/name"), or a folder: of `save_to_disk`, or of files that `load_dataset` reads."""
    subset: str | None = None
    """Configuration of the data set, such as "sst2" of glue."""
    revision: str | None = None
    """Commit or branch on the hub. Default: the newest; name a commit for runs that can be repeated."""
    train: str = "train"
    """Split of the training samples. A data set without splits has this one."""
    test: str | None = None
    """Split of the test samples. Default: "test" if there is one, otherwise a part of the training samples."""

    def splits(self) -> list[Any]:
        """Return the training split, and the test split if there is one."""
        found = _loaded(self.path, self.subset, self.revision, OFFLINE.get(), _changed(self.path))
        known = found if isinstance(found, Mapping) else {self.train: found}
        names = [self.train, *([self.test] if self.test else ["test"] if "test" in known else [])]
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(f"data: {self.path} has no split {unknown[0]!r}. Allowed: {', '.join(known)}")
        return [known[name] for name in names]


def _changed(path: str) -> Changed:
    """Return the files of a folder; () for a name on the hub."""
    files = (file for pattern in ("*", "*/state.json") for file in Path(path).expanduser().glob(pattern))
    return tuple(sorted((str(file), file.lstat().st_mtime_ns) for file in files))


@functools.lru_cache(maxsize=4)
def _loaded(path: str, subset: str | None, revision: str | None, offline: bool, changed: Changed) -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError('data: "huggingface" needs the library datasets. Hint: uv sync --extra huggingface') from None
    folder = Path(path).expanduser()
    try:
        if any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
            return datasets.load_from_disk(folder)
        local = datasets.DownloadConfig(local_files_only=offline)
        return datasets.load_dataset(path, subset, revision=revision, download_config=local)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"data.path: {path!r} cannot be loaded ({reason}). Allowed: a data set of the hub, or a folder of "
            "save_to_disk"
        ) from None


class HuggingFace(Source, DataSet):
    """Images, texts, tokens or tables: the type of the column `x` says which."""

    name: Literal["huggingface"] = "huggingface"
    x: str | tuple[str, ...]
    """Column of images, texts or lists of tokens, or columns of numbers and categories."""
    y: str | tuple[str, ...] = "label"
    """Column of the targets; several for numbers and labels."""
    user: str | None = None
    """Column of the users, for `partition: users`."""
    target: Targets = "class"
    """Targets: class, numbers or labels; texts and tokens: class only."""
    options: dict[str, JsonValue] = {}
    """Further options of this kind of samples: of images `size`, `channels`, `flip`, ...; of texts those of data set
    text (`tokenizer`, `max_length`, `task`, ...); of tokens `ids`, `max_length`; of tables those of data set table."""

    @property
    def inner(self) -> DataSet:
        """The data set of this kind of samples."""
        source = {name: getattr(self, name) for name in Source.model_fields}
        features = self.splits()[0].features
        if isinstance(self.x, str) and self.x not in features:
            raise ConfigError(f"data.x: {self.path} has no column {self.x!r}. Allowed: {', '.join(features)}")
        feature = features[self.x] if isinstance(self.x, str) else None
        kind = type(feature).__name__
        x = (self.x,) if isinstance(self.x, str) else self.x
        given = {"source": source, "x": x, "y": self.y, "user": self.user, "target": self.target}
        if kind == "Image":
            return self._parsed(_Images, given)
        if kind in ("List", "LargeList", "Sequence"):
            stored = getattr(feature.feature, "dtype", "lists")  # pyright: ignore
            if not re.match("u?int", stored):
                raise ConfigError(f"data.x: {self.x!r} has lists of {stored}. Allowed: lists of integers")
            return self._parsed(_Tokens, given)
        if getattr(feature, "dtype", "") in ("string", "large_string") and "categories" not in self.options:
            if self.target != "class":
                raise ConfigError(
                    f"data.target: {self.target!r} is not supported with a column of texts. Allowed: class"
                )
            text = {"source": source, "train": self.path, "text": self.x, "label": self.y, "user": self.user}
            return self._parsed(_Text, text)
        return self._parsed(_Rows, given)

    def _parsed(self, cls: type[DataSet], given: Mapping[str, Any]) -> DataSet:
        """Return the data set with `options`. A ConfigError names the place of each value."""
        try:
            return parse(cls, {**given, **self.options}, "data")
        except ConfigError as error:
            places = {name: f"data.options.{name}" for name in self.options}
            found = re.sub(r"^data: (\w+)", lambda at: places.get(at[1], f"data.{at[1]}"), str(error), flags=re.M)
            raise ConfigError(found) from None

    @property
    def columns(self) -> Mapping[str, Column]:
        return self.inner.columns

    @property
    def prepare(self) -> Prepare:
        return self.inner.prepare

    @property
    def goal(self) -> Goal:
        return self.inner.goal

    @property
    def offers(self) -> Mapping[str, Any]:
        return self.inner.offers

    @property
    def attached(self) -> tuple[Path, ...]:
        return self.inner.attached

    @property
    def vocabulary_files(self) -> tuple[Path, ...]:
        return self.inner.vocabulary_files

    @property
    def input_columns(self) -> Mapping[str, tuple[str, ...]]:
        return self.inner.input_columns

    @property
    def unit(self) -> float | None:
        return self.inner.unit

    @property
    def notes(self) -> tuple[str, ...]:
        return self.inner.notes

    def load(self) -> Arrays:
        return self.inner.load()


class _Rows(Frames):
    """Tables."""

    source: Source

    def frames(self) -> tuple[Frame, Frame | None]:
        return _frames(self.source, tuple(self.named), self._y, _changed(self.source.path))  # pyright: ignore

    @property
    def named(self) -> list[str]:
        """Names of the columns of `frames`."""
        return [*(self.x or ()), *self._y, *self._user]


@functools.lru_cache(maxsize=4)
def _frames(
    source: Source, names: tuple[str, ...], targets: tuple[str, ...], changed: Changed
) -> tuple[Frame, Frame | None]:
    found = []
    for split in source.splits():
        if unknown := [name for name in names if name not in split.features]:
            raise ConfigError(f"data: no column is called {shown(unknown[0])}. {nearest(unknown[0], split.features)}")
        frame = split.select_columns(list(names)).to_pandas()
        for name in targets:
            if getattr(split.features[name], "names", None):
                frame[name] = frame[name].where(frame[name] != UNKNOWN)
        found.append(frame)
    return found[0], found[1] if len(found) > 1 else None


class _Single(_Rows):
    """Samples in one column, which are no numbers; targets and users as of tables."""

    @property
    def named(self) -> list[str]:
        return [*self._y, *self._user]

    @property
    def input_columns(self) -> Mapping[str, tuple[str, ...]]:
        return {}

    def samples(self, part: str) -> Any:
        """Return the column of samples of a split, "training" or "test"."""
        assert self.x
        return self.source.splits()[part == "test"][self.x[0]]


class _Images(_Single, OwnImages):
    """Images, resized when they are loaded."""

    size: int | None = Field(default=None, ge=1, le=LARGEST)
    """Height and width of loaded images: the shorter side is resized, and the centre cropped."""
    channels: Literal[1, 3] = 3

    @property
    def dtype(self) -> Stored:
        return "uint8"

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.size is not None:
            return self.channels, self.size, self.size
        return self.channels, *next(self._each("training", size_of))

    @property
    def prepare(self) -> Images:
        # images are resized when they are loaded
        return replace(super().prepare, size=None)

    @property
    def offers(self) -> Mapping[str, Any]:
        return {"input": self.shape, "classes": self.goal.classes}

    def _split(self, frame: Frame, part: str) -> Split:
        shape = self.shape
        images = list(self._each(part, lambda image: pixels_of(image, shape, self.size)))  # pyright: ignore
        y = np.stack([self._target(frame, name, part) for name in self._y], 1)
        return {"x": np.stack(images), "y": y[:, 0] if self.target == "class" else y}

    def _each(self, part: str, of: Callable[[Any], T]) -> Iterator[T]:
        """Yield `of` each image of a split. A ConfigError names the row of an image that cannot be used."""
        row = 1
        try:
            for image in self.samples(part):
                if image is None:
                    raise ValueError("it is missing")
                yield of(image)
                row += 1
        except Exception as error:
            raise ConfigError(
                f"data.x: the image in row {row} of the {part} set cannot be used ({error}). Allowed: images of one "
                "size. Hint: data.options.size resizes images of several sizes"
            ) from None


class _Tokens(_Single):
    """Lists of tokens, with one class each."""

    target: Literal["class"] = "class"
    ids: int | None = Field(default=None, ge=1)
    """Number of tokens of the vocabulary. Default: the largest token of the training samples + 1."""
    max_length: int = Field(default=128, ge=1)
    """Maximum number of tokens; longer lists are truncated."""

    @property
    def task(self) -> TokenTask:
        ids = self.ids or 1 + int(self.samples("training").ids.max())
        return TokenTask("classes", ids, self.max_length, self.goal.classes)

    @property
    def columns(self) -> Mapping[str, Column]:
        return self.task.columns

    @property
    def prepare(self) -> Prepare:
        return self.task.prepare

    @property
    def offers(self) -> Mapping[str, Any]:
        return self.task.offers

    @property
    def unit(self) -> None:
        return None

    def samples(self, part: str) -> Tokens:
        assert self.x
        return _tokens(self.source, self.x[0], part, _changed(self.source.path))  # pyright: ignore

    def _split(self, frame: Frame, part: str) -> Split:
        tokens = self.samples(part)
        x = np.full((len(tokens.lengths), self.max_length), PAD, np.int32)
        for i, row in enumerate(np.split(tokens.ids, tokens.ptr[1:-1])):
            x[i, : len(row)] = row[: self.max_length]
        return {"x": x, "y": self._target(frame, self._y[0], part)}


@functools.lru_cache(maxsize=2)
def _tokens(source: Source, column: str, part: str, changed: Changed) -> Tokens:
    lengths: list[int] = []

    def ids() -> Iterator[int]:
        for i, row in enumerate(source.splits()[part == "test"][column], 1):
            if not row or None in row or min(row) < 0 or max(row) >= MOST_IDS:
                raise ConfigError(
                    f"data.x: row {i} of the {part} set is {shown(row)}. Allowed: lists of one or more tokens from 0 "
                    f"to {MOST_IDS - 1}"
                )
            lengths.append(len(row))
            yield from row

    return Tokens.of(ids(), lengths)


class _Text(OwnText):
    """Texts."""

    source: Source
    not_in_tokens: ClassVar = ("train", "test")

    def sources(self) -> Sequence[Path]:
        return [Path(file["filename"]) for split in self.source.splits() for file in split.cache_files]

    def tables(self) -> list[Mapping[str, Sequence[str]]]:
        return [self._columns(_cells(split), Path(self.source.path)) for split in self.source.splits()]


def _cells(split: Any) -> Mapping[str, Sequence[str]]:
    """Return the columns of texts and classes, as text."""
    columns = {n: feature for n, feature in split.features.items() if type(feature).__name__ in ("Value", "ClassLabel")}
    found = {}
    for n, feature in columns.items():
        names = getattr(feature, "names", None)
        found[n] = ["" if v is None or (names and v == UNKNOWN) else names[v] if names else str(v) for v in split[n]]
    return found
