"""Functions, classes and objects of a user's package, named "package.module:name"."""

import functools
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from rayfl.config.errors import ConfigError
from rayfl.config.plain import shown


def imported(of: str, where: str, allowed: str = "name") -> Any:
    """Return the object `of`. Raise ConfigError if it cannot be imported. `where`: place of the section."""
    try:
        return pkgutil.resolve_name(of)
    except (Exception, SystemExit) as error:
        reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        raise ConfigError(
            f"{where}.of: {shown(of)} cannot be imported ({reason}). Allowed: package.module:{allowed} of a package "
            "that is installed or in PYTHONPATH"
        ) from None


def with_options(call: Callable[..., Any], of: str, options: Mapping[str, Any], where: str) -> Callable[..., Any]:
    """Return `call`, which is named `of`, with these keyword arguments. Raise ConfigError if it does not take them."""
    try:
        signature = inspect.signature(call)
    except ValueError:  # some classes and functions in C
        return functools.partial(call, **options)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"{where}.options: {shown(dict(options))} is not valid ({error}). Allowed: the arguments of {of}{signature}"
        ) from None
    return functools.partial(call, **options)
