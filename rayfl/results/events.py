"""Events: what `--json` prints for machines, a line each; the table of all is in rayfl/cli/README.md."""

import json
import time
from collections.abc import Callable
from typing import Any

Tell = Callable[..., None]
"""Hears of an event: tell("note", text="...")."""


def nobody(event: str, **facts: Any) -> None:
    """Hears nothing."""


def line_of(event: str, **facts: Any) -> str:
    """An event as a line; a number that is none, as a mean over nobody, is null."""
    given = {"event": event, "time": round(time.time(), 3)} | {key: _plain(value) for key, value in facts.items()}
    return json.dumps(given, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return None
    return value if isinstance(value, int | float | str | None) else str(value)
