"""Public data: samples that the server has, and that clients may share, for methods that distil into or through them
(FedMD, Li and Wang 2019, arXiv 1910.03581; FedDF, Lin et al., NeurIPS 2020, arXiv 2006.07242; DS-FL, Itahara et al.,
IEEE TMC 2021, arXiv 2008.06180).

They are a part of the training set that no client holds, the training samples of another data set, or noise. Which rows
they are says a `Federation`; those that are not in the training set are `Arrays.public`.
"""

from typing import TYPE_CHECKING, Any, Self

import numpy as np
from pydantic import Field, SerializeAsAny, model_validator

from rayfl.config import Config, ConfigError
from rayfl.data.arrays import Arrays, Split, validate_split
from rayfl.seeds import numpy_generator

if TYPE_CHECKING:
    from rayfl.data.base import DataSet

LABEL = "y"
"""The array of labels, where samples have some."""


class Public(Config):
    """The `public:` section of a data set: samples beside those of clients, from exactly one of `share`, `data` and
    `noise`."""

    share: float | None = Field(default=None, gt=0, lt=1)
    """So much of the training set, which no client then holds: at random by the run's seed, and of every class this
    share of all its training samples, rounded. It is taken of what the server's validation rows leave."""
    data: "SerializeAsAny[DataSet] | None" = None
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

    def split(self, own: "DataSet", arrays: Arrays) -> Split | None:
        """The samples as the data set `own`, whose arrays these are, has its own; None: they are rows of its training
        set."""
        if self.data is not None:
            return self._foreign(self.data, own, arrays)
        return None if self.noise is None else self._noise(self.noise, own, arrays)

    def described(self) -> Self:
        """The same without samples (`DataSet.described`)."""
        return self if self.data is None else self.model_copy(update={"data": self.data.described()})

    def _foreign(self, data: "DataSet", own: "DataSet", arrays: Arrays) -> Split:
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

    def _noise(self, samples: int, own: "DataSet", arrays: Arrays) -> Split:
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


def _check_kind(data: "DataSet", own: "DataSet") -> None:
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


def _measured(data: "DataSet") -> str:
    return f"{data.name} without pixels" if data.unit is None else f"pixels of {data.name}, in units of {data.unit:g}"
