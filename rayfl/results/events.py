"""What `--json` prints: a line of JSON an event, for machines. Every line has `event`, and `time` in Unix seconds.

phase      phase                                    what it is busy with: "loading the data", "starting Ray"
started    label, folder, metric, and of a run      rounds or trials begin. `metric` is what it is judged by, or
           round, rounds; of a sweep trials, mode   tuned by; `round`: how many rounds an earlier process made
trial      trial, label, point, status, round,      a trial of a sweep began, or ended; `value` is the metric's,
           rounds, value, value_round               after `value_round` rounds
round      of a sweep trial, label; the round's     a round that was not evaluated
           line of metrics.jsonl
evaluated  the same                                 a round that was
point      of a scale study: its row of scale.json
note       text                                     something that a person should know
result     label, point, seed, path; result.json    a run of the final table
ended      status                                   finished, failed or stopped; of a run with its last round
"""

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
