"""The end of a run by simulated time, `system.until_s`."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from rayfl.listeners.base import Listener
from rayfl.metrics import EVALUATED, Line


class TimeLimit(Listener):
    """Ends a run at its first evaluation at `seconds` of simulated time or later, or says that there was none.

    >>> limit = TimeLimit(seconds=5, rounds=9)
    >>> [limit.on_round({"round": t, "sim_time": 2.5 * t, "evaluated": True}) for t in (1, 2)]
    [None, 'the simulated time has reached 5 s']
    """

    name: Literal["time_limit"] = "time_limit"
    seconds: float = Field(gt=0)
    rounds: int
    """Rounds of the run."""

    def on_past(self, lines: Sequence[Line]) -> str | None:
        return next(filter(None, map(self.on_round, lines)), None)

    def on_round(self, line: Line) -> str | None:
        if EVALUATED in line and line["sim_time"] >= self.seconds:
            return f"the simulated time has reached {self.seconds:g} s"
        if line["round"] == self.rounds:
            return (
                f"all {self.rounds} rounds took {line['sim_time']:.3g} s, less than system.until_s = {self.seconds:g}"
            )
        return None
