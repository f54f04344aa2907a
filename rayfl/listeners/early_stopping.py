"""Early stopping, also available as `run.patience`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr

from rayfl.config import choose
from rayfl.listeners.base import Directions, Listener
from rayfl.metrics import EVALUATED, Line


class EarlyStopping(Listener):
    """Early stopping: ends a run whose metric has not improved for `patience` evaluations.

    >>> stopping = EarlyStopping(metric="accuracy_mean", patience=1)
    >>> line = {"evaluated": True}
    >>> [stopping.on_round({**line, "round": t, "accuracy_mean": a}) for t, a in enumerate((0.1, 0.3, 0.2))]
    [None, None, 'early stopping: accuracy_mean has not improved for 1 evaluation']
    """

    name: Literal["early_stopping"] = "early_stopping"
    metric: str | None = None
    """Name of a metric. Default: the metric of `run.patience`."""
    patience: int = Field(default=5, ge=1)
    """Number of evaluations without improvement after which the run ends."""
    mode: Literal["max", "min"] | None = None
    """Direction of improvement. Default: that of the metric."""
    _best: float | None = PrivateAttr(None)
    _worse: int = PrivateAttr(0)

    def fitted(self, metrics: Directions, judge: str, where: str) -> Self:
        metric = judge if self.metric is None else self.metric
        better = choose(metrics, metric, f"{where}.metric", "metric")
        return self.model_copy(update={"metric": metric, "mode": self.mode or better})

    def on_start(self, config: dict[str, Any], folder: Path | None, round: int) -> None:
        self._best, self._worse = None, 0

    def on_past(self, lines: Sequence[Line]) -> str | None:
        """Evaluate past rounds, so that a resumed run ends like an uninterrupted one."""
        return next(filter(None, [self.on_round(line) for line in lines]), None)

    def on_round(self, line: Line) -> str | None:
        if self.metric not in line or EVALUATED not in line:
            return None
        value = -line[self.metric] if self.mode == "min" else line[self.metric]
        if math.isnan(value):
            value = -math.inf
        if self._best is None or value > self._best:
            self._best, self._worse = value, 0
        else:
            self._worse += 1
        if self._worse != self.patience:
            return None
        count = f"{self.patience} evaluation{'s' * (self.patience > 1)}"
        return f"early stopping: {self.metric} has not improved for {count}"
