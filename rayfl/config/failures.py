"""Failures of a run, and calls of classes whose errors name the setting, the class and the verb."""

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from rayfl.config.sections import ConfigError

T = TypeVar("T")


class RunFailed(RuntimeError):
    """A run cannot continue. The first line of the message says why; a traceback may follow."""


class PluginFailed(RunFailed):
    """The code of a class raised an error, or returned what its contract does not allow."""


class Problem(ValueError):
    """A violation of a class's contract, in a sentence."""


def ask(where: str, call: Callable[[], T], about: str = "", failed: type[PluginFailed] = PluginFailed) -> T:
    """Return `call()`. `failed` is raised for its errors, except ConfigErrors and failures of runs, and begins with
    `where`: the setting, the class and the verb; `about` follows the error."""
    try:
        return call()
    except (ConfigError, RunFailed):
        raise
    except Problem as error:
        raise failed(f"{where}: {error}") from None
    except Exception as error:
        # without the frames of this function and of `call`
        frames = error.__traceback__ and error.__traceback__.tb_next and error.__traceback__.tb_next.tb_next
        lines = traceback.format_exception(type(error), error, frames)
        raise failed(f"{where}: {type(error).__name__}: {error}{about}\n{''.join(lines).rstrip()}") from None


def require(answer: Any, kind: type[T], allowed: str = "") -> T:
    """Return an answer of this type. Raise a Problem for another one."""
    if not isinstance(answer, kind):
        raise Problem(f"returned {named(answer)}. Allowed: {allowed or f'a {kind.__name__}'}")
    return answer


def require_number(answer: Any, allowed: str = "a number") -> float:
    """Return an answer that is a number, also of numpy. Raise a Problem for another one, and for NaN."""
    if isinstance(answer, bool) or not hasattr(answer, "__float__") or getattr(answer, "shape", ()) != ():
        raise Problem(f"returned {named(answer)}. Allowed: {allowed}")
    if (number := float(answer)) != number:
        raise Problem(f"returned NaN. Allowed: {allowed}")
    return number


def named(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
