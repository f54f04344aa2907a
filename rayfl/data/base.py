"""Base class of data sets. The format of the samples is known without loading them.

Samples load as plain arrays, which are put into shared memory once. Every worker reads this copy and never imports the
library that reads the data set.

Public samples are used by distillation methods (FedMD, Li and Wang 2019, arXiv 1910.03581; FedDF, Lin et al., NeurIPS
2020, arXiv 2006.07242; DS-FL, Itahara et al., IEEE TMC 2021, arXiv 2008.06180). They are a part of the training set
that no client has (`Federation.public`), the training samples of another data set, or noise (`Arrays.public`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
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
"""Name of the array of labels, if there is one."""


class DataSet(Named, ABC):
    """The `data:` section. A subclass adds its fields and implements the abstract members.

    >>> from rayfl.data import DATASETS
    >>> digits = DATASETS["digits"]()
    >>> sorted(digits.columns), digits.arrays().train["x"].shape
    (['x', 'y'], (1438, 1, 8, 8))
    """

    not_in_result: ClassVar[tuple[str, ...]] = ()
    """Fields that do not affect results, such as the folder of the files."""
    public: "Public | None" = None
    """Public samples for distillation: a share of the training set, another data set, or noise. Default: none."""

    @field_validator("public", mode="before")
    @classmethod
    def _read_its_data(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("data") is not None:
            return {**given, "data": DATASETS_KIND.read(given["data"], "public.data")}
        return given

    @abstractmethod
    def load(self) -> Arrays:
        """Return training and test set. Callers use `arrays`, which validates them and adds public samples."""

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, Column]:
        """Specification of each array of a split, by name. `arrays` validates against it."""

    @property
    @abstractmethod
    def prepare(self) -> Prepare:
        """Conversion of stored samples to network inputs."""

    @property
    @abstractmethod
    def goal(self) -> Goal:
        """Learning task: loss, labels and scores."""

    @property
    @abstractmethod
    def offers(self) -> Mapping[str, Any]:
        """Defaults for model fields of the same names."""

    @property
    def attached(self) -> tuple[Path, ...]:
        """Files and folders exported together with a network, such as those of a tokenizer."""
        return ()

    @property
    def vocabulary_files(self) -> tuple[Path, ...]:
        """Files that say what tokens are, which must be equal for data sets to be combined."""
        return ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the user on the loaded samples, such as files that were left out."""
        return ()

    @property
    def digests(self) -> Mapping[str, str]:
        """Name -> digest of samples that `load` does not return because they are read later."""
        return {}

    @property
    def sample(self) -> tuple[int, ...]:
        """Shape of one sample x that an exported network takes. Default: as stored."""
        return self.columns["x"].shape

    @property
    def overlap(self) -> str:
        """Why samples contain parts of each other, so that none can be held out; "" if they do not."""
        return ""

    @property
    def input_columns(self) -> Mapping[str, tuple[str, ...]]:
        """Names of a table's input columns, each with its categories in the order of their numbers: () for numbers.
        Default: inputs have no names."""
        return {}

    @property
    def unit(self) -> float | None:
        """Divisor of stored pixels, which must be equal for data sets to be combined. None: samples are not images."""
        return None

    @final
    def arrays(self) -> Arrays:
        """Return validated training and test sets, and public samples from outside the training set."""
        found = validate(self.load(), self.columns)
        stored, other = (split["x"].dtype if "x" in split else None for split in (found.train, found.test))
        if self.unit is not None and other != stored:
            raise ConfigError(
                f"data: x of the test set has the type {other}. Allowed: {stored} as in the training set, because "
                "pixels of both are scaled alike"
            )
        found = replace(found, notes=self.notes, digests=self.digests)
        return found if self.public is None else replace(found, public=self.public.split(self, found))

    @final
    def in_result(self) -> dict[str, Any]:
        """Return the dump without `not_in_result`, also for the public data set."""
        plain = {name: value for name, value in self.model_dump(mode="json").items() if name not in self.not_in_result}
        if self.public is not None and self.public.data is not None:
            plain["public"] = plain["public"] | {"data": self.public.data.in_result()}
        return plain

    @model_serializer(mode="wrap")
    def _dumped(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit `public` if there is none, for compatibility with older files."""
        plain = dump(self)
        return plain if self.public is not None else {name: plain[name] for name in plain if name != "public"}

    @final
    def described(self) -> "DataSet":
        """Return a description without samples for worker processes. Its dump equals that of the data set."""
        public = None if self.public is None else self.public.described()
        described = Described.model_construct(name=self.name, public=public)
        described._known = {name: getattr(self, name) for name in ("columns", "prepare", "goal", "offers")}
        described._plain = self.model_dump(mode="json")
        described._not_in_result = self.not_in_result
        return described


class Public(Config):
    """The `public:` section of a data set: public samples from exactly one of `share`, `data` and `noise`."""

    share: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of the training set that becomes public and is removed from the clients: of every class this fraction
    of its training samples, rounded. Drawn by the run's seed after the server's validation samples."""
    data: SerializeAsAny[DataSet] | None = None
    """Section of another data set. Its training samples are used and prepared like those of this data set."""
    noise: int | None = Field(default=None, ge=1, le=10**6)
    """Number of noise images, the same in every run. Bytes are uniform between the minimum and the maximum of the
    training set; floats are standard normal."""
    labeled: bool = False
    """True if methods may use the labels. Otherwise every label is 0."""
    count: int | None = Field(default=None, ge=1)
    """Maximum number of samples, random but equal in every run. Default: all. The rest of a `share` is not used."""

    @model_validator(mode="after")
    def _is_of_one_source(self) -> Self:
        sources = [name for name in ("share", "data", "noise") if getattr(self, name) is not None]
        if len(sources) != 1:
            problem = f"{' and '.join(sources)} are set" if sources else "no source is set"
            raise ConfigError(f"public: {problem}. Allowed: exactly one of share, data and noise")
        if self.labeled and self.noise is not None:
            raise ConfigError("public.labeled: noise has no labels. Allowed: false")
        if self.data is not None and self.data.public is not None:
            raise ConfigError("public.data.public: a public data set has a public section. Allowed: none")
        return self

    def shown(self, samples: dict[str, Any]) -> dict[str, Any]:
        """Return public samples (`Split` or `Samples`), with all labels 0 unless `labeled`."""
        if self.labeled or LABEL not in samples:
            return samples
        return samples | {LABEL: samples[LABEL] * 0}

    def first(self, samples: int) -> np.ndarray:
        """Return the rows [n] int64, ascending, of at most `count` samples."""
        order = numpy_generator(0, "public", "count").permutation(samples)
        return np.sort(order[: self.count])

    def split(self, own: DataSet, arrays: Arrays) -> Split | None:
        """Return public samples in the format of data set `own` with these arrays; None: rows of its training set."""
        if self.data is not None:
            return self._foreign(self.data, own, arrays)
        return None if self.noise is None else self._noise(self.noise, own, arrays)

    def described(self) -> Self:
        """Return the section with the description of its data set."""
        return self if self.data is None else self.model_copy(update={"data": self.data.described()})

    def _foreign(self, data: DataSet, own: DataSet, arrays: Arrays) -> Split:
        _check_kind(data, own)
        if self.labeled and data.goal.kinds != own.goal.kinds:
            raise ConfigError(
                f"data.public.labeled: {data.name} has {data.goal.kinds} classes. Allowed: false, or a data set with "
                f"{own.goal.kinds} classes as in {own.name}"
            )
        theirs, ours = (one.offers.get("class_names") for one in (data, own))
        if self.labeled and theirs and ours and theirs != ours:
            raise ConfigError(
                f"data.public.labeled: {data.name} has the classes {_listed(theirs)}. Allowed: false, or a data set "
                f"with the classes {_listed(ours)} as in {own.name}"
            )
        train = data.arrays().train
        for name, array in arrays.train.items():
            if train[name].dtype != array.dtype:
                raise ConfigError(
                    f"data.public: {name} of {data.name} has the type {train[name].dtype}. Allowed: {array.dtype} as "
                    f"in {own.name}"
                )
        if all(np.array_equal(train[name], array, equal_nan=True) for name, array in arrays.train.items()):
            raise ConfigError(
                f"data.public.data: {data.name} has the training samples of {own.name}, which clients have. Allowed: "
                "another data set. Hint: use share for a part of the training set"
            )
        rows = self.first(len(next(iter(train.values()))))
        found = self.shown({name: array[rows] for name, array in train.items()})
        return validate_split(found, own.columns, "public")

    def _noise(self, samples: int, own: DataSet, arrays: Arrays) -> Split:
        if own.unit is None:
            raise ConfigError(f"data.public.noise: the samples of {own.name} are not images. Allowed: share or data")
        x, y = arrays.train["x"], arrays.train[LABEL]
        shape = (min(samples, self.count or samples), *x.shape[1:])
        draw = numpy_generator(0, "public", "noise")
        if x.dtype == np.uint8:
            noise = draw.integers(x.min(), x.max(), size=shape, dtype=np.uint8, endpoint=True)
        else:
            noise = draw.standard_normal(shape, np.float32)
        return validate_split({"x": noise, LABEL: np.zeros((len(noise), *y.shape[1:]), y.dtype)}, own.columns, "public")


def _check_kind(data: DataSet, own: DataSet) -> None:
    """Raise ConfigError unless samples of `data` have the format of those of `own`."""
    theirs, ours = data.columns, own.columns
    if set(theirs) != set(ours):
        raise ConfigError(
            f"data.public: {data.name} has the arrays {' and '.join(theirs)}. Allowed: {' and '.join(ours)} as in "
            f"{own.name}"
        )
    for name, column in ours.items():
        if theirs[name].shape != column.shape:
            raise ConfigError(
                f"data.public: samples of {data.name} have shape {list(theirs[name].shape)}. Allowed: "
                f"{list(column.shape)} as in {own.name}"
            )
    _check_inputs(data, own)
    if data.unit != own.unit:
        raise ConfigError(f"data.public: {data.name} has {_unit(data)}. Allowed: {_unit(own)} as in {own.name}")
    if any(column.below is not None for name, column in ours.items() if name != LABEL):
        vocabularies = [[path.read_bytes() for path in one.vocabulary_files] for one in (data, own)]
        if not vocabularies[0] or vocabularies[0] != vocabularies[1]:
            raise ConfigError(
                f"data.public: {data.name} has other tokens than {own.name}. Allowed: data with the same tokenizer"
            )


def _check_inputs(data: DataSet, own: DataSet) -> None:
    """Raise ConfigError if input columns have other names, or if a number stands for another category."""
    theirs, ours = data.input_columns, own.input_columns
    if theirs and ours and list(theirs) != list(ours):
        raise ConfigError(
            f"data.public: {data.name} has the input columns {_listed(theirs)}. Allowed: {_listed(ours)} "
            f"as in {own.name}"
        )
    for name in {**ours, **theirs}:
        found, expected = theirs.get(name, ()), ours.get(name, ())
        if found != expected:
            raise ConfigError(
                f"data.public: {data.name} has {_categories(found)} in column {name!r}. Allowed: "
                f"{_categories(expected)} as in {own.name}"
            )


def _categories(values: Sequence[str]) -> str:
    return f"the categories {_listed(values)}" if values else "no categories"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _unit(data: DataSet) -> str:
    return "no pixels" if data.unit is None else f"pixels in units of {data.unit:g}"


DATASETS: dict[str, type[DataSet]] = {}
"""Name -> class; filled by `rayfl.data`."""

DATASETS_KIND = Kind("data set", DataSet, DATASETS, "rayfl.datasets")
DataSet.model_rebuild()


class Described(DataSet):
    """A data set without samples (`DataSet.described`)."""

    _known: dict[str, Any] = PrivateAttr()
    _plain: dict[str, Any] = PrivateAttr()
    _not_in_result: tuple[str, ...] = PrivateAttr()

    def load(self) -> Arrays:
        raise ConfigError(f"data: a description of {self.name} has no samples. Allowed: the data set itself")

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
