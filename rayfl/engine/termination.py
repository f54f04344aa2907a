"""Ends of a run: after SIGTERM and Ctrl-C it finishes its step and writes a checkpoint; after an error it says why.

Batch systems, containers and clouds send SIGTERM before they take a machine away. The exit code is then 143, after
Ctrl-C 130.
"""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

GRACE_SECONDS = 20.0
"""Seconds that a step may take after a SIGTERM: clouds and schedulers kill after 30 seconds or more."""


LAST_CALLS = 5
"""Calls of a traceback in the reason of a failure."""


def reason(error: Exception) -> str:
    """Return why a run failed: rayfl's own sentence, or that of the operating system; of other errors, such as those of
    a user's package, the type, the message and the last calls."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) or type(error).__module__.startswith("rayfl."):
        return str(error)
    lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-LAST_CALLS)
    return "\n".join([f"{type(error).__name__}: {error}".removesuffix(": "), "".join(lines).rstrip()])


class Terminated(SystemExit):
    """The process received SIGTERM."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def leave(*_: Any) -> None:
    """End the process at once: a handler of SIGTERM."""
    raise Terminated


@dataclass
class Notice:
    """The signal that a block received, if any."""

    given: signal.Signals | None = None


@contextmanager
def deferred(tell: Callable[[], None] = lambda: None) -> Iterator[Notice]:
    """Note a SIGTERM or a Ctrl-C in the block, call `tell`, and raise Terminated or KeyboardInterrupt at its end.

    A second signal, or `GRACE_SECONDS` after a SIGTERM, ends the block at once. Handlers of the user's stay in place.
    """
    notice, timer = Notice(), threading.Timer(GRACE_SECONDS, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    at_once = {signal.SIGTERM: leave, signal.SIGINT: signal.default_int_handler}

    def note(number: int, _: Any) -> None:
        notice.given = signal.Signals(number)
        for kind in replaced:
            signal.signal(kind, at_once[kind])
        if number == signal.SIGTERM:
            timer.start()
        tell()

    ours = threading.current_thread() is threading.main_thread()
    before = {kind: signal.getsignal(kind) for kind in at_once if ours}
    replaced = [kind for kind, handler in before.items() if handler in (signal.SIG_DFL, at_once[kind])]
    for kind in replaced:
        signal.signal(kind, note)
    try:
        yield notice
    except Exception:
        # its processes may have received the signal too
        if notice.given is None:
            raise
    finally:
        timer.cancel()
        for kind in replaced:
            signal.signal(kind, before[kind])
    if notice.given is not None:
        raise Terminated if notice.given == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def kept() -> Iterator[None]:
    """Restore SIGTERM's handler after the block, in which a library may replace it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        # raised by the library's handler
        raise Terminated from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def blocked() -> Iterator[None]:
    """Start processes in this block that never receive SIGTERM, nor do their own children; this process receives it at
    the block's end. Batch systems signal all processes, and a run needs its own for a checkpoint."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
