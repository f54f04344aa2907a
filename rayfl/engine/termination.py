"""SIGTERM: what a batch system, a container or a cloud sends before it takes the machine away.

It ends a command as Ctrl-C does, with exit code 143. A run ends its step and writes a checkpoint first.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

GRACE_SECONDS = 20.0
"""How long a step may go on after the signal: clouds and schedulers kill after 30 seconds or more."""


class Terminated(SystemExit):
    """The process was told to end."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def leave(*_: Any) -> None:
    """The handler that ends the process at once."""
    raise Terminated


@dataclass
class Notice:
    """Whether there was a SIGTERM."""

    given: bool = False


@contextmanager
def heeded() -> Iterator[Notice]:
    """Within it a SIGTERM is noted, and raised as `Terminated` at its end; a second one, or `GRACE_SECONDS` after the
    first, is raised at once. A handler of the user's own stays in its place."""
    notice, timer = Notice(), threading.Timer(GRACE_SECONDS, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True

    def note(*_: Any) -> None:
        notice.given = True
        signal.signal(signal.SIGTERM, leave)
        timer.start()

    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before not in (signal.SIG_DFL, leave):
        yield notice
        return
    signal.signal(signal.SIGTERM, note)
    try:
        yield notice
    except Exception:
        # what it worked with may have been told to end too
        if not notice.given:
            raise
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)
    if notice.given:
        raise Terminated


@contextmanager
def kept() -> Iterator[None]:
    """SIGTERM's handler is afterwards what it was, whatever a library does to it within."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        # what a library's handler makes of the signal
        raise Terminated from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def deaf() -> Iterator[None]:
    """Processes that are started within it, and those that they start, never hear SIGTERM; this one hears it at the
    end. Who takes a machine away tells all of its processes, and a run needs its own for a checkpoint."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
