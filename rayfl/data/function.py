"""A data set that a function of a user's package returns."""

import functools
import inspect
import json
import pkgutil
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, JsonValue

from rayfl.config import ConfigError, shown
from rayfl.data.arrays import Arrays, as_array, as_integers
from rayfl.data.goal import Classes
from rayfl.data.images import MOST_CLASSES
from rayfl.data.own import OwnImages, Stored, classes_of, shape_of


class Function(OwnImages):
    """What `of(**options)` returns: rayfl.Arrays of `x` [N, C, H, W] and `y` [N], or (x, y, x_test, y_test).

    It has to return the same every time. It is called once a process, before the run starts, because a model takes
    the shape of its input from the images.
    """

    name: Literal["function"] = "function"
    of: str
    """ "package.module:function" of a package that is installed or whose folder is in PYTHONPATH."""
    options: dict[str, JsonValue] = {}
    """What it is called with."""
    classes: int | None = Field(default=None, ge=1, le=MOST_CLASSES)  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of classes; unless given that of different labels."""

    @property
    def shape(self) -> tuple[int, int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Channels, height and width of one image."""
        place = "data: x of the training set"
        return shape_of(as_array(self.load().train["x"], place), place)

    @property
    def dtype(self) -> Stored:
        x = as_array(self.load().train["x"], "data: x of the training set")
        return "uint8" if x.dtype == "uint8" else "float32"

    @property
    def goal(self) -> Classes:
        if self.classes is not None:
            return Classes(self.classes)
        arrays = self.load()
        labels = [as_integers(split["y"], "data: y") for split in (arrays.train, arrays.test)]
        return Classes(classes_of(labels, "data: y"))

    def load(self) -> Arrays:
        return _returned(self._function(), self.of, json.dumps(self.options))

    def _function(self) -> Callable[..., Any]:
        try:
            found = pkgutil.resolve_name(self.of)
            if not callable(found):
                raise TypeError("it is no function")
        except (Exception, SystemExit) as error:
            reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            raise ConfigError(
                f"data.of: given {shown(self.of)}, which cannot be called ({reason}); allowed: package.module:function "
                "of a package that is installed or whose folder is in PYTHONPATH"
            ) from None
        try:
            inspect.signature(found).bind(**self.options)
        except TypeError as error:
            raise ConfigError(
                f"data.options: given {shown(self.options)} ({error}); allowed: {self.of}{inspect.signature(found)}"
            ) from None
        return found


@functools.lru_cache(maxsize=1)
def _returned(function: Callable[..., Any], of: str, options: str) -> Arrays:
    """The last call's arrays are kept, because shape and labels are asked for before the arrays themselves."""
    found = function(**json.loads(options))
    if isinstance(found, tuple) and len(found) == 4:
        x, y, x_test, y_test = found
        return Arrays({"x": x, "y": y}, {"x": x_test, "y": y_test})
    if isinstance(found, Arrays) and all({"x", "y"} <= set(split) for split in (found.train, found.test)):
        return found
    raise ConfigError(
        f"data.of: given {shown(of)}, which returned {type(found).__name__}; allowed: (x, y, x_test, y_test), or "
        "rayfl.Arrays whose splits have x and y"
    )
