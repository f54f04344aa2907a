"""Tables and series in files, and the two embedded tables of scikit-learn."""

import functools
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from rayfl.config import ConfigError, nearest, shown
from rayfl.data.arrays import Arrays, Split
from rayfl.data.goal import Classes, Goal, Numbers
from rayfl.data.own import Targeted, with_test
from rayfl.data.variables import Shaped

Frame = Any
"""A pandas.DataFrame. Its type stubs say of every column that it may be a number."""
Names = Annotated[tuple[str, ...], Field(min_length=1)]


def _read_csv(file: Path, names: tuple[str, ...], sep: str = ",") -> Frame:
    frame = pd.read_csv(file, sep=sep, dtype=dict.fromkeys(names, str), low_memory=False)
    if not isinstance(frame.index, pd.RangeIndex):
        raise ValueError(f"rows have more cells than the header, which has {len(frame.columns)}")
    return frame


def _read_parquet(file: Path, names: tuple[str, ...]) -> Frame:
    frame = pd.read_parquet(file)
    if columns := [name for name in names if name in frame]:
        # integers with missing values stay integers
        exact = pd.read_parquet(file, columns=columns, dtype_backend="numpy_nullable")
        frame = frame.assign(**{name: exact[name].array for name in columns})
    return frame


READERS: dict[str, Callable[[Path, tuple[str, ...]], Frame]] = {
    ".csv": _read_csv,
    ".tsv": functools.partial(_read_csv, sep="\t"),
    ".parquet": _read_parquet,
}
"""Suffix of a file -> its reader, which reads the named columns as they are written: the type of no other value of the
file changes them."""


SEPARATORS = ". Hint: separate columns by commas in a .csv file, by tabs in a .tsv file"


class Frames(Targeted, ABC):
    """Rows of named columns. A subclass reads them (`frames`).

    Inputs are the columns `x`, which are numbers, or named in `categories`. A categorical column becomes one input per
    category of the whole training table, so that the network's size does not depend on the seed; a missing or unknown
    category is 0 in all of them. Cells that pandas reads as missing are: empty ones, NA, None, null, nan and so on.
    Means, medians and standard deviations are those of the clients' training rows.
    Categories and users are compared as text, of which 1 and 1.0 are equal, because a file may have integers as floats.
    """

    y: str | Names
    """Column of the targets. Several: numbers or labels. Classes are numbered in sorted order."""
    x: Names | None = None
    """Columns of the inputs. Default: all but y and user."""
    categories: tuple[str, ...] = ()
    """Columns of the inputs that are categories, not numbers."""
    user: str | None = None
    """Column of the users of rows (hospital, device), for `partition: users`."""
    channels: int | None = Field(default=None, ge=1)
    """Rows are series of this many variables: x are all steps of the first variable, then of the second. Default: rows
    of a table."""
    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Fraction of the rows, of every class or quantile, that becomes the test set if there is none; drawn with a fixed
    seed."""

    @abstractmethod
    def frames(self) -> tuple[Frame, Frame | None]:
        """Return the training table, and the test table if there is one. Called often: it must be cached."""

    def _train(self, *columns: str) -> Frame:
        """Return the training table. Raise a ConfigError if it lacks a column."""
        frame = self.frames()[0]
        known = frame.columns.tolist()
        for column in columns:
            if column not in known:
                hint = SEPARATORS if len(known) == 1 and set(";,\t") & set(str(known[0])) else ""
                raise ConfigError(f"data: no column is called {shown(column)}. {nearest(column, known)}{hint}")
        return frame

    @property
    def inputs(self) -> list[str]:
        """Names of the input columns."""
        own = [*self._y, *self._user]
        known = self._train(*own, *(self.x or ()), *self.categories).columns.tolist()
        inputs = list(self.x) if self.x is not None else [column for column in known if column not in own]
        if not inputs:
            raise ConfigError("data.x: the table has no column besides y and user. Allowed: at least one input")
        if wrong := [column for column in self._y if column in inputs]:
            raise ConfigError(f"data.x: {wrong[0]!r} is a target. Allowed: columns that are no targets")
        if wrong := [column for column in self.categories if column not in inputs]:
            raise ConfigError(f"data.categories: {wrong[0]!r} is no input. Allowed: columns of data.x")
        if self.channels and (self.categories or len(inputs) % self.channels):
            raise ConfigError(
                f"data.channels: {self.channels} is not valid for {len(inputs)} columns with "
                f"{len(self.categories)} of categories. Allowed: a divisor of the number of columns, all numbers"
            )
        return inputs

    @property
    def _y(self) -> tuple[str, ...]:
        return (self.y,) if isinstance(self.y, str) else self.y

    @property
    def _user(self) -> tuple[str, ...]:
        return (self.user,) if self.user else ()

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Shape of one stored sample."""
        columns = len(self.inputs)
        return (columns,) if self.channels is None else (self.channels, columns // self.channels)

    @property
    def categorical(self) -> tuple[tuple[int, int], ...]:
        inputs, columns = self.inputs, self.input_columns
        return tuple((inputs.index(name), len(columns[name])) for name in self.categories)

    @property
    def input_columns(self) -> Mapping[str, tuple[str, ...]]:
        frame = self.frames()[0]
        return {name: tuple(_categories(frame[name])) if name in self.categories else () for name in self.inputs}

    @property
    def class_values(self) -> Any:
        """Values of the classes, sorted: a pandas.Index."""
        if len(self._y) != 1:
            raise ConfigError("data.y: several columns are not valid with target: class. Allowed: one column")
        found: Any = pd.unique(_complete(self._train(*self._y), self._y[0], "training"))
        return pd.Index(np.sort(found))

    @property
    def goal(self) -> Goal:
        return self.goal_of(len(self.class_values) if self.target == "class" else len(self._y))

    @property
    def offers(self) -> Mapping[str, Any]:
        names = {"class_names": tuple(map(str, self.class_values))} if self.target == "class" else {}
        return {**super().offers, **names}

    def load(self) -> Arrays:
        train, test = self.frames()
        splits = {"training": train} if test is None else {"training": train, "test": test}
        found = {part: self._split(frame, part) for part, frame in splits.items()}
        users = {part: None if self.user is None else _users(frame[self.user]) for part, frame in splits.items()}
        if test is not None:
            return Arrays(found["training"], found["test"], users["training"], users["test"])
        return with_test(found["training"], self.goal, self.test_fraction, users["training"])

    def _split(self, frame: Frame, part: str) -> Split:
        """Return one split, with categories as numbers from 0, and NaN for missing values."""
        inputs = self.inputs
        if lacking := [column for column in (*inputs, *self._y, *self._user) if column not in frame]:
            raise ConfigError(
                f"data: the {part} table has no column {lacking[0]!r}. Allowed: those of the training table"
            )
        codes = self._codes(frame) if self.categories else frame[[]]
        x = np.stack([_numbers(codes if name in codes else frame, name, part) for name in inputs], 1)
        allowed = self.missing != "refuse"
        for i, name in enumerate(inputs):
            if (count := int(np.isnan(x[:, i]).sum())) and not allowed and name not in codes:
                raise ConfigError(
                    f"data: column {name!r} of the {part} table has {count} missing values. Allowed: none. Hint: "
                    "data.missing: median or mean replaces them"
                )
        y = np.stack([self._target(frame, name, part) for name in self._y], 1)
        for numbers, names in ((x, inputs), *([(y, self._y)] if self.target == "numbers" else [])):
            _require_exact(numbers, names, part)
        return {"x": x.reshape(len(x), *self.shape), "y": y[:, 0] if self.target == "class" else y}

    def _codes(self, frame: Frame) -> Frame:
        """Return the categorical columns as numbers of their categories in the training table, or -1."""
        train, found = self.frames()[0], {}
        for name in self.categories:
            numbers = {text: i for i, text in enumerate(_categories(train[name]))}
            codes, texts = _texts(frame[name])
            found[name] = np.array([*(numbers.get(text, -1) for text in texts), -1])[codes]
        return pd.DataFrame(found)

    def _target(self, frame: Frame, name: str, part: str) -> np.ndarray:
        values = _complete(frame, name, part)
        if self.target != "class":
            found = _numbers(frame, name, part, "`target: class` for a column of classes")
            return found.astype(np.int64) if self.target == "labels" and not (found % 1).any() else found
        known = self.class_values
        place = known.get_indexer(values)
        if (place < 0).any():
            raise ConfigError(
                f"data.y: the {part} table has the class {values[place < 0][0]!r}. Allowed: the classes of the "
                f"training table: {', '.join(map(str, known[:20]))}"
            )
        return place


class Table(Frames):
    """Rows of a .csv, .tsv or .parquet file."""

    name: Literal["table"] = "table"
    train: str
    """File of the training rows, with the names of the columns in its first line. A relative path starts at the working
    folder."""
    test: str | None = None
    """File of the test rows with the same columns. Default: a part of the training rows (`test_fraction`)."""

    def frames(self) -> tuple[Frame, Frame | None]:
        names = tuple(name for name in dict.fromkeys((*self.categories, *self._user)) if name not in self._y)
        return _read("train", self.train, names), None if self.test is None else _read("test", self.test, names)


def _read(field: str, path: str, names: tuple[str, ...]) -> Frame:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"data.{field}: the file {path!r} does not exist. Allowed: an existing file")
    if file.suffix not in READERS:
        raise ConfigError(f"data.{field}: {path!r} is not valid. Allowed: files that end in {', '.join(READERS)}")
    return _read_once(field, file, file.stat().st_mtime_ns, names)


@functools.lru_cache(maxsize=4)
def _read_once(field: str, file: Path, changed: int, names: tuple[str, ...]) -> Frame:
    try:
        return READERS[file.suffix](file, names)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"data.{field}: {file} cannot be read ({reason}). Allowed: a {file.suffix} file") from None


def _numbers(
    frame: Frame, name: str, part: str, hint: str = "name it in data.categories, or leave it out of data.x"
) -> np.ndarray:
    try:
        if frame[name].dtype.kind in "mM":
            raise ValueError("it has times")
        found: Any = pd.to_numeric(frame[name])
        return found.to_numpy(np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"data: column {name!r} of the {part} table is no column of numbers ({str(error).splitlines()[0]}). "
            f"Allowed: numbers. Hint: {hint}"
        ) from None


def _require_exact(x: np.ndarray, names: Sequence[str], part: str) -> None:
    """Raise a ConfigError if float32, which networks compute in, has large steps for the numbers of a column."""
    with np.errstate(over="ignore"), warnings.catch_warnings():
        # of columns without values
        warnings.simplefilter("ignore")
        most, deviation = np.nanmax(np.abs(x), 0), np.nanstd(x, 0)
        steps = np.spacing(most.astype(np.float32)).astype(np.float64)
    for name, step, std in zip(names, steps, deviation, strict=True):
        if 0 < std < 100 * step:
            raise ConfigError(
                f"data: column {name!r} of the {part} table has a standard deviation of {std:.3g}, and its numbers are "
                f"so large that float32 has steps of {step:.3g}. Allowed: steps of a hundredth of the deviation. Hint: "
                "subtract a constant from the column"
            )


def _complete(frame: Frame, name: str, part: str) -> np.ndarray:
    """Return the values of a column without missing values."""
    if count := int(frame[name].isna().sum()):
        raise ConfigError(f"data: column {name!r} of the {part} table has {count} missing values. Allowed: none")
    return frame[name].to_numpy()


def _texts(column: Any) -> tuple[np.ndarray, list[str]]:
    """Return the place of every value in the list of different texts, [N] int64, -1 for missing ones, and the list.
    Whole numbers have no decimals."""
    codes, values = pd.factorize(column)
    return codes, [re.sub(r"^([+-]?\d+)\.0*$", r"\1", str(value)) for value in values]


def _categories(column: Any) -> list[str]:
    """Return the different texts of a column: in the order of their numbers if all are numbers, otherwise as text."""
    texts = sorted(set(_texts(column)[1]))
    numbers = np.asarray(pd.to_numeric(pd.Series(texts, dtype=object), errors="coerce"), np.float64)
    return texts if np.isnan(numbers).any() else [texts[i] for i in np.argsort(numbers, kind="stable")]


def _users(column: Any) -> np.ndarray:
    """Return users as text [N]; "" for missing ones."""
    codes, texts = _texts(column)
    return np.array([*texts, ""])[codes]


class Embedded(Shaped, ABC):
    """A table of scikit-learn, without a download. There is no published test set: a fifth of every class or tenth of
    the target is drawn with a fixed seed."""

    loader: ClassVar[str]

    def load(self) -> Arrays:
        import sklearn.datasets

        options = {"scaled": False} if self.loader == "load_diabetes" else {}
        x, y = getattr(sklearn.datasets, self.loader)(return_X_y=True, **options)
        y = y[:, None] if self.goal.targets == "numbers" else np.asarray(y, np.int64)
        return with_test({"x": np.asarray(x, np.float32), "y": y}, self.goal, 0.2)


class BreastCancer(Embedded):
    """Wisconsin breast cancer: 569 tumours, 30 measures of cell nuclei, malignant (0) or benign (1)."""

    name: Literal["breast_cancer"] = "breast_cancer"
    shape: ClassVar = (30,)
    loader: ClassVar = "load_breast_cancer"

    @property
    def goal(self) -> Goal:
        return Classes(2)


class Diabetes(Embedded):
    """Diabetes (Efron et al. 2004): 442 patients, 10 measures, and the progression after a year, a number."""

    name: Literal["diabetes"] = "diabetes"
    shape: ClassVar = (10,)
    loader: ClassVar = "load_diabetes"

    @property
    def goal(self) -> Goal:
        return Numbers(1)
