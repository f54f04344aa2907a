"""A data set: what its samples look like is known without loading it, and it loads as plain arrays.

The arrays are put into shared memory once; every worker reads the same copy and prepares what it trains on. Workers
therefore never import the library that a data set is read with.

Public samples are for methods that distil into or through them (FedMD, Li and Wang 2019, arXiv 1910.03581; FedDF, Lin
et al., NeurIPS 2020, arXiv 2006.07242; DS-FL, Itahara et al., IEEE TMC 2021, arXiv 2008.06180): a part of the training
set that no client holds, the training samples of another data set, or noise. A `Federation` knows the rows of the
training set that are public; other public samples are in `Arrays.public`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np
from pydantic import (
    Field,
    PrivateAttr,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from rayfl.config import Config, ConfigError, Kind, Named
from rayfl.core.seeds import numpy_generator
from rayfl.data.arrays import Arrays, Column, Split, validate, validate_split
from rayfl.data.goal import Goal
from rayfl.data.samples import Prepare

LABEL = "y"
"""The array of labels, where samples have some."""


class DataSet(Named, ABC):
    """What a `data:` section says. A subclass adds its fields, and says the rest."""

    not_in_result: ClassVar[tuple[str, ...]] = ()
    """Fields that change nothing in a result: where the same files lie."""
    public: "Public | None" = None
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


class Public(Config):
    """The `public:` section of a data set: samples beside those of clients, from exactly one of `share`, `data` and
    `noise`."""

    share: float | None = Field(default=None, gt=0, lt=1)
    """So much of the training set, which no client then holds: at random by the run's seed, and of every class this
    share of all its training samples, rounded. It is taken of what the server's validation rows leave."""
    data: SerializeAsAny[DataSet] | None = None
    """The training samples of another data set, by its section. They are prepared as this data set's own."""
    noise: int | None = Field(default=None, ge=1, le=10**6)
    """So many images of noise. Bytes are uniform from the smallest to the largest of the training set; floats are
    standard normal. The same in every run."""
    labeled: bool = False
    """Whether methods may use the labels. Otherwise each is 0."""
    count: int | None = Field(default=None, ge=1)
    """At most so many samples, at random, the same in every run; unless given all. The rest of a `share` is
    nobody's."""

    @model_validator(mode="after")
    def _is_of_one_source(self) -> Self:
        sources = [name for name in ("share", "data", "noise") if getattr(self, name) is not None]
        if len(sources) != 1:
            given = " and ".join(sources) or "none of share, data and noise"
            raise ConfigError(f"public: given {given}; allowed: exactly one of share, data and noise")
        if self.labeled and self.noise is not None:
            raise ConfigError("public.labeled: given true with noise; allowed: false, because noise has no labels")
        if self.data is not None and self.data.public is not None:
            raise ConfigError("public.data.public: given a section; allowed: none, in a data set that is public itself")
        return self

    def shown(self, samples: dict[str, Any]) -> dict[str, Any]:
        """Public samples (`Split` or `Samples`) as methods may see them: with labels of 0 unless these may be used."""
        if self.labeled or LABEL not in samples:
            return samples
        return samples | {LABEL: samples[LABEL] * 0}

    def first(self, samples: int) -> np.ndarray:
        """Which of so many samples `count` leaves: rows [n] int64, ascending."""
        order = numpy_generator(0, "public", "count").permutation(samples)
        return np.sort(order[: self.count])

    def split(self, own: DataSet, arrays: Arrays) -> Split | None:
        """The samples as the data set `own`, whose arrays these are, has its own; None: they are rows of its training
        set."""
        if self.data is not None:
            return self._foreign(self.data, own, arrays)
        return None if self.noise is None else self._noise(self.noise, own, arrays)

    def described(self) -> Self:
        """The same without samples (`DataSet.described`)."""
        return self if self.data is None else self.model_copy(update={"data": self.data.described()})

    def _foreign(self, data: DataSet, own: DataSet, arrays: Arrays) -> Split:
        _check_kind(data, own)
        if self.labeled and data.goal.kinds != own.goal.kinds:
            raise ConfigError(
                f"data.public.labeled: given true with the {data.goal.kinds} classes of {data.name}; allowed: false, "
                f"or a data set of {own.goal.kinds} classes, as data set {own.name} has them"
            )
        train = data.arrays().train
        for name, array in arrays.train.items():
            if train[name].dtype != array.dtype:
                raise ConfigError(
                    f"data.public: given {name} of {data.name} stored as {train[name].dtype}; allowed: {array.dtype}, "
                    f"as data set {own.name} stores it"
                )
        if all(np.array_equal(train[name], array) for name, array in arrays.train.items()):
            raise ConfigError(
                f"data.public.data: given {data.name} with the training samples of data set {own.name} itself, which "
                "clients have; allowed: another data set, or a share"
            )
        rows = self.first(len(next(iter(train.values()))))
        found = self.shown({name: array[rows] for name, array in train.items()})
        return validate_split(found, own.columns, "public")

    def _noise(self, samples: int, own: DataSet, arrays: Arrays) -> Split:
        if own.unit is None:
            raise ConfigError(
                f"data.public.noise: given with data set {own.name}, whose samples are no images; allowed: "
                "share or data"
            )
        x, y = arrays.train["x"], arrays.train[LABEL]
        shape = (min(samples, self.count or samples), *x.shape[1:])
        draw = numpy_generator(0, "public", "noise")
        if x.dtype == np.uint8:
            noise = draw.integers(x.min(), x.max(), size=shape, dtype=np.uint8, endpoint=True)
        else:
            noise = draw.standard_normal(shape, np.float32)
        return validate_split({"x": noise, LABEL: np.zeros(len(noise), y.dtype)}, own.columns, "public")


def _check_kind(data: DataSet, own: DataSet) -> None:
    """A ConfigError unless samples of `data` mean the same as those of `own`, array by array."""
    theirs, ours = data.columns, own.columns
    if set(theirs) != set(ours):
        raise ConfigError(
            f"data.public: given {' and '.join(theirs)} of {data.name}; allowed: {' and '.join(ours)}, as data set "
            f"{own.name} has them"
        )
    for name, column in ours.items():
        if theirs[name].shape != column.shape:
            raise ConfigError(
                f"data.public: given samples {list(theirs[name].shape)} of {data.name}; allowed: {list(column.shape)}, "
                f"as data set {own.name} has them"
            )
    if data.unit != own.unit:
        raise ConfigError(
            f"data.public: given {_measured(data)}; allowed: {_measured(own)}, because both are prepared alike"
        )
    if any(column.below is not None for name, column in ours.items() if name != LABEL):
        vocabularies = [[path.read_bytes() for path in one.attached] for one in (data, own)]
        if not vocabularies[0] or vocabularies[0] != vocabularies[1]:
            raise ConfigError(
                f"data.public: given tokens of {data.name}; allowed: a data set with the same tokenizer as {own.name}, "
                "because equal tokens have to be equal words"
            )


def _measured(data: DataSet) -> str:
    return f"{data.name} without pixels" if data.unit is None else f"pixels of {data.name}, in units of {data.unit:g}"


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
