"""Listeners: what is told of a run, round by round, and may end it. Loggers, early stopping, whatever a user needs.

A listener of a user's package is named in the `listeners:` section as "package.module:Class", or given as an object to
`rayfl.run`. In a sweep every trial has its own, in the trial's process.
"""

from abc import ABC
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from rayfl.config import Kind, Named
from rayfl.metrics import NOTE, Line


class Listener(Named, ABC):
    """Fields are its settings; what it remembers is in attributes that begin with an underscore (`PrivateAttr`)."""

    def on_start(self, config: dict[str, Any], folder: Path | None, round: int) -> None:
        """The run begins, or goes on after `round` rounds. `config`: the experiment, as a file would hold it."""

    def on_round(self, line: Line) -> bool | None:
        """After every round, with its metrics. True ends the run: with this round if it was evaluated, else with the
        next one that is."""

    def on_note(self, text: str) -> None:
        """Something that a person should know."""

    def on_end(self, status: str) -> None:
        """finished, failed or stopped."""


class EarlyStopping(Listener):
    """Ends a run whose metric has not become better for some evaluations.

    >>> stopping = EarlyStopping(metric="accuracy_mean", patience=1)
    >>> [stopping.on_round({"round": t, "accuracy_mean": a}) for t, a in enumerate((0.1, 0.3, 0.2))]
    [False, False, True]
    """

    name: Literal["early_stopping"] = "early_stopping"
    metric: str = "validation_accuracy_mean"
    """One of a round's metrics."""
    patience: int = Field(default=5, ge=1)
    """Evaluations without a better value, after which the run ends."""
    mode: Literal["max", "min"] = "max"
    """Which end of the metric is best."""
    _best: float | None = PrivateAttr(None)
    _worse: int = PrivateAttr(0)

    def on_start(self, config: dict[str, Any], folder: Path | None, round: int) -> None:
        self._best, self._worse = None, 0

    def on_round(self, line: Line) -> bool:
        if self.metric not in line:
            return False
        value = line[self.metric] if self.mode == "max" else -line[self.metric]
        if self._best is None or value > self._best:
            self._best, self._worse = value, 0
        else:
            self._worse += 1
        return self._worse >= self.patience


LISTENERS: dict[str, type[Listener]] = {"early_stopping": EarlyStopping}

LISTENERS_KIND = Kind("listener", Listener, LISTENERS, "rayfl.listeners")


def tell(listeners: Sequence[Listener], lines: Iterable[Line]) -> bool:
    """Tells all listeners of some rounds; whether one of them ends the run."""
    stop = False
    for line in lines:
        for listener in listeners:
            stop |= bool(listener.on_round(line))
            if "refusals" in line:
                listener.on_note(f"round {line['round']}: refused {line['refusals']}")
            if NOTE in line:
                listener.on_note(line[NOTE])
    return stop
