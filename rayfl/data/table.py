"""Tables and series in files, and the two embedded tables of scikit-learn."""

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rayfl.config import ConfigError, nearest, shown
from rayfl.data.arrays import Arrays, Split
from rayfl.data.goal import Classes, Goal, Numbers
from rayfl.data.own import Targeted, tidy, with_test
from rayfl.data.table_files import NAMELESS, Format, Frame, read, separator_hint
from rayfl.data.variables import Shaped

Names = Annotated[tuple[str, ...], Field(min_length=1)]


class Frames(Targeted, ABC):
    """Rows of named columns. A subclass reads them (`frames`).

    Inputs are the columns `x`, which are numbers, or named in `categories`. A categorical column becomes one input per
    category of the whole training table, so that the network's size does not depend on the seed; a missing or unknown
    category is 0 in all of them. Means, medians and standard deviations are those of the clients' training rows.
    Categories, users and classes are compared as text without spaces at the ends, of which 1 and 1.0 are equal, because
    a file may have integers as floats. In files, only their empty cells are missing; among numbers also NA, null, nan
    and so on.
    """

    y: str | Names
    """Column of the targets. Several: numbers or labels. Classes are numbered in sorted order."""
    x: Names | None = None
    """Columns of the inputs. Default: all but y, user and columns without a name, such as row numbers."""
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
                hint = separator_hint(str(known[0])) if len(known) == 1 else ""
                raise ConfigError(f"data: no column is called {shown(column)}. {nearest(column, known)}{hint}")
        return frame

    @property
    def inputs(self) -> list[str]:
        """Names of the input columns."""
        own = [*self._y, *self._user]
        known = self._train(*own, *(self.x or ()), *self.categories).columns.tolist()
        others = [column for column in known if column not in own and column not in self._nameless]
        inputs = list(self.x) if self.x is not None else others
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
    def _nameless(self) -> list[str]:
        """Columns without a name."""
        return [name for name in self._train().columns.tolist() if NAMELESS.fullmatch(str(name))]

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
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in their order."""
        if len(self._y) != 1:
            raise ConfigError("data.y: several columns are not valid with target: class. Allowed: one column")
        column = self._train(*self._y)[self._y[0]]
        _require_complete(_texts(column)[0] < 0, self._y[0], "training")
        return tuple(_categories(column))

    @property
    def goal(self) -> Goal:
        return self.goal_of(len(self.class_names) if self.target == "class" else len(self._y))

    @property
    def offers(self) -> Mapping[str, Any]:
        names = {"class_names": self.class_names} if self.target == "class" else {}
        return {**super().offers, **names}

    def load(self) -> Arrays:
        train, test = self.frames()
        splits = {"training": train} if test is None else {"training": train, "test": test}
        found = {part: self._split(frame, part) for part, frame in splits.items()}
        users = {part: None if self.user is None else _users(frame[self.user]) for part, frame in splits.items()}
        if test is not None:
            return Arrays(found["training"], found["test"], users["training"], users["test"])
        return with_test(found["training"], self.goal, self.test_fraction, users["training"])

    @property
    def notes(self) -> tuple[str, ...]:
        names = [name for name in self._nameless if self.x is None and name not in (*self._y, *self._user)]
        if not names:
            return ()
        return (
            f"data: columns without a name are no inputs ({', '.join(names)}). Hint: data.x, if they are not the row "
            "numbers that pandas writes",
        )

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
        return frame[[]].assign(**found)

    def _target(self, frame: Frame, name: str, part: str) -> np.ndarray:
        if self.target != "class":
            _require_complete(frame[name].isna(), name, part)
            found = _numbers(frame, name, part, "`target: class` for a column of classes")
            return found.astype(np.int64) if self.target == "labels" and not (found % 1).any() else found
        codes, texts = _texts(frame[name])
        _require_complete(codes < 0, name, part)
        number = {text: i for i, text in enumerate(self.class_names)}
        if unknown := [text for text in texts if text and text not in number]:
            raise ConfigError(
                f"data.y: the {part} table has the class {unknown[0]!r}. Allowed: the classes of the training table: "
                f"{', '.join([*number][:20])}"
            )
        return np.array([number.get(text, -1) for text in texts])[codes]


class Table(Frames):
    """Rows of a .csv, .tsv or .parquet file."""

    name: Literal["table"] = "table"
    train: str
    """File of the training rows, with the names of the columns in its first line. A relative path starts at the working
    folder."""
    test: str | None = None
    """File of the test rows with the same columns. Default: a part of the training rows (`test_fraction`)."""

    separator: str | None = Field(default=None, min_length=1, max_length=1)
    """Character between the columns of a .csv or .tsv file. Default: a comma, in a .tsv file a tab."""
    decimal: Literal[".", ","] = "."
    """Decimal mark of the numbers of a .csv or .tsv file."""

    @model_validator(mode="after")
    def _is_readable(self) -> Self:
        if self.separator is not None and self.separator in (self.decimal, '"', "\n", "\r"):
            raise ConfigError(
                f"separator: {shown(self.separator)} is not valid. Allowed: a character other than data.decimal, "
                "quotes and ends of lines"
            )
        if (
            self.decimal == ","
            and self.separator is None
            and any(f.endswith(".csv") for f in (self.train, self.test or ""))
        ):
            raise ConfigError('decimal: "," is not valid with commas between columns. Allowed: with data.separator')
        return self

    def frames(self) -> tuple[Frame, Frame | None]:
        of_text = (*self.categories, *self._user, *(self._y if self.target == "class" else ()))
        names = tuple(name for name in dict.fromkeys(of_text) if self.target == "class" or name not in self._y)
        form = Format(names, self.separator, self.decimal)
        return read("train", self.train, form), None if self.test is None else read("test", self.test, form)


def _numbers(
    frame: Frame, name: str, part: str, hint: str = "name it in data.categories, or leave it out of data.x"
) -> np.ndarray:
    import pandas as pd

    try:
        if frame[name].dtype.kind in "mM":
            raise ValueError("it has times")
        found: Any = pd.to_numeric(frame[name])
        return found.to_numpy(np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if re.search(r"\d,\d", reason):
            hint = f'data.decimal: ",", or {hint}'
        raise ConfigError(
            f"data: column {name!r} of the {part} table is no column of numbers ({reason}). Allowed: numbers. Hint: "
            f"{hint}"
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


def _require_complete(missing: Any, name: str, part: str) -> None:
    """Raise a ConfigError if values of a column are missing [N]."""
    if count := int(missing.sum()):
        raise ConfigError(f"data: column {name!r} of the {part} table has {count} missing values. Allowed: none")


def _texts(column: Any) -> tuple[np.ndarray, list[str]]:
    """Return the place of every value in a list of texts (`tidy`), [N] int64, -1 for missing and blank ones, and the
    list, in which texts may be equal. Whole numbers have no decimals."""
    codes, values = column.factorize()
    texts = [re.sub(r"^([+-]?\d+)\.0*$", r"\1", tidy(str(value))) for value in values]
    is_blank = np.array([*(not text for text in texts), True])
    return np.where(is_blank[codes], -1, codes), texts


def _categories(column: Any) -> list[str]:
    """Return the different texts of a column: in the order of their numbers if all are numbers, otherwise as text."""
    import pandas as pd

    texts = sorted(set(_texts(column)[1]) - {""})
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
