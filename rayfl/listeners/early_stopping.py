"""Ends a run that no longer gets better; `run.patience` asks for it in one word."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from rayfl.listeners.base import Listener
from rayfl.metrics import Line


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

    def on_past(self, lines: Sequence[Line]) -> bool:
        """So a run that was stopped by hand ends where it would have ended anyway."""
        return any([self.on_round(line) for line in lines])

    def on_round(self, line: Line) -> bool:
        if self.metric not in line:
            return False
        value = line[self.metric] if self.mode == "max" else -line[self.metric]
        if self._best is None or value > self._best:
            self._best, self._worse = value, 0
        else:
            self._worse += 1
        return self._worse >= self.patience
