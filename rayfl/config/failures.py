"""Failures of a run, and calls of classes whose errors name the setting, the class and the verb."""

import signal
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from rayfl.config.errors import ConfigError

T = TypeVar("T")


class RunFailed(RuntimeError):
    """A run cannot continue. The first line of the message says why; a traceback may follow."""


class PluginFailed(RunFailed):
    """The code of a class raised an error, or returned what its contract does not allow."""


class Problem(ValueError):
    """A violation of a class's contract, in a sentence."""


def ask(
    where: str | Callable[[BaseException], str],
    call: Callable[[], T],
    about: str = "",
    failed: type[PluginFailed] = PluginFailed,
    passed: tuple[type[Exception], ...] = (),
) -> T:
    """Return `call()`. `failed` is raised for its errors, also for `sys.exit` and KeyboardInterrupt, except
    ConfigErrors, failures of runs and those in `passed`. It begins with `where`: the setting, the class and the verb,
    perhaps depending on the error; `about` follows the error."""
    try:
        return call()
    except (ConfigError, RunFailed, *passed):
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if _is_signal(error):
            raise
        where = where if isinstance(where, str) else where(error)
        if isinstance(error, Problem):
            raise failed(f"{where}: {error}") from None
        # without the frames of this function and of `call`
        frames = error.__traceback__ and error.__traceback__.tb_next
        if frames and frames.tb_frame.f_code is getattr(call, "__code__", None):
            frames = frames.tb_next
        lines = traceback.format_exception(type(error), error, frames)
        raise failed(f"{where}: {type(error).__name__}: {error}{about}\n{''.join(lines).rstrip()}") from None


def _is_signal(error: BaseException) -> bool:
    """Return whether a signal to this process raised it: Terminated, or a Ctrl-C that nothing defers."""
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, SystemExit) and type(error) is not SystemExit


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
