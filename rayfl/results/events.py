"""Events that `--json` prints, one JSON object per line; rayfl/cli/README.md lists them."""

import json
import time
from collections.abc import Callable
from typing import Any

Tell = Callable[..., None]
"""Receiver of events: tell("note", text="...")."""


def nobody(event: str, **facts: Any) -> None:
    """Ignore all events."""


def line_of(event: str, **facts: Any) -> str:
    """Return an event as a line; numbers that are not finite become null."""
    given = {"event": event, "time": round(time.time(), 3)} | {key: _plain(value) for key, value in facts.items()}
    return json.dumps(given, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return None
    return value if isinstance(value, int | float | str | None) else str(value)
