"""Data set returned by a function of the user's package."""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, JsonValue

from rayfl.config import ConfigError, imported, shown, with_options
from rayfl.data.arrays import Arrays, as_array
from rayfl.data.goal import Goal
from rayfl.data.images import MOST_CLASSES
from rayfl.data.own import OwnImages, Stored, Targeted, read_targets, shape_of


class Function(Targeted, OwnImages):
    """Result of `of(**options)`: rayfl.Arrays of `x` and `y`, or (x, y, x_test, y_test). `x` are tables [N, F], series
    [N, C, T] or images [N, C, H, W], `y` classes [N] or targets of another `target`.

    The function must return the same data every time. A run calls it once per process, before it starts, because models
    depend on the shape of the samples.
    """

    name: Literal["function"] = "function"
    of: str
    """Function, "package.module:function". The package must be installed or in PYTHONPATH."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments of the function."""
    classes: int | None = Field(default=None, ge=1, le=MOST_CLASSES)  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of classes, numbers or labels. Default: the number of different classes, or of columns of y."""

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Shape of one sample."""
        place = "data: x of the training set"
        return shape_of(as_array(self.load().train["x"], place), place)

    @property
    def dtype(self) -> Stored:
        x = as_array(self.load().train["x"], "data: x of the training set")
        return "uint8" if x.dtype == "uint8" else "float32"

    @property
    def goal(self) -> Goal:
        if self.classes is not None:
            return self.goal_of(self.classes)
        arrays = self.load()
        return self.goal_of(self.outputs_of([arrays.train["y"], arrays.test["y"]]))

    def load(self) -> Arrays:
        found = _returned(self._function(), self.of, json.dumps(self.options))
        parts = {"training": found.train, "test": found.test}
        train, test = (
            {**split, "y": read_targets(split["y"], self.target, f"data: y of the {part} set")}
            for part, split in parts.items()
        )
        return replace(found, train=train, test=test)

    def _function(self) -> Callable[..., Any]:
        found = imported(self.of, "data", "function")
        if not callable(found):
            raise ConfigError(f"data.of: {shown(self.of)} is of type {type(found).__name__}. Allowed: a function")
        with_options(found, self.of, self.options, "data")
        return found


@functools.lru_cache(maxsize=2)
def _returned(function: Callable[..., Any], of: str, options: str) -> Arrays:
    """Return the arrays of the last two calls, such as data and public data, from a cache, because shape and labels are
    read before the arrays."""
    try:
        found = function(**json.loads(options))
    except Exception as error:
        raise ConfigError(
            f"data.of: {shown(of)} raised {type(error).__name__}: {error}. Allowed: a function that returns its data"
        ) from error
    if isinstance(found, tuple) and len(found) == 4:
        x, y, x_test, y_test = found
        return Arrays({"x": x, "y": y}, {"x": x_test, "y": y_test})
    if isinstance(found, Arrays) and all(
        isinstance(split, Mapping) and {"x", "y"} <= set(split) for split in (found.train, found.test)
    ):
        return found
    raise ConfigError(
        f"data.of: {shown(of)} returned {type(found).__name__}. Allowed: (x, y, x_test, y_test), or rayfl.Arrays whose "
        "splits have x and y"
    )
