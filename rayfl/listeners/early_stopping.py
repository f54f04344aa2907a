"""Early stopping, also available as `run.patience`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from rayfl.listeners.base import Listener
from rayfl.metrics import Line


class EarlyStopping(Listener):
    """Early stopping: ends a run whose metric has not improved for `patience` evaluations.

    >>> stopping = EarlyStopping(metric="accuracy_mean", patience=1)
    >>> [stopping.on_round({"round": t, "accuracy_mean": a}) for t, a in enumerate((0.1, 0.3, 0.2))]
    [False, False, True]
    """

    name: Literal["early_stopping"] = "early_stopping"
    metric: str = "validation_accuracy_mean"
    """Name of a metric."""
    patience: int = Field(default=5, ge=1)
    """Number of evaluations without improvement after which the run ends."""
    mode: Literal["max", "min"] = "max"
    """Direction of improvement of the metric."""
    _best: float | None = PrivateAttr(None)
    _worse: int = PrivateAttr(0)

    def on_start(self, config: dict[str, Any], folder: Path | None, round: int) -> None:
        self._best, self._worse = None, 0

    def on_past(self, lines: Sequence[Line]) -> bool:
        """Evaluate past rounds, so that a resumed run ends like an uninterrupted one."""
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
