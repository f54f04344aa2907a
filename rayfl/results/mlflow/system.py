"""Measurements of processors, memory and GPUs during a run, by MLflow's monitors.

They are off unless MLflow's variable MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING is true. They need psutil, and nvidia-ml-py
for GPUs: the extra `system`. The machine is that of the driver process, which a sweep's trials share.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rayfl.metrics import Line
from rayfl.results.files import append_lines, read_lines
from rayfl.results.mlflow.store import imported

SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"
FILE = "system.jsonl"
"""Samples in a run's folder: `round` (number from 1), `time` (Unix, seconds) and measurements by MLflow's names."""


class Sampler:
    """Sampler that appends measurements to a run's folder."""

    def __init__(self, monitors: list[Any]):
        self.monitors = monitors
        self._taken: dict[Path, int] = {}

    @classmethod
    def wanted(cls, note: Callable[[str], None]) -> "Sampler | None":
        """Return a sampler; None if it is off, or not available, which is reported."""
        if os.environ.get(SWITCH, "").lower() not in ("true", "1"):
            return None
        imported()
        try:
            from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        except ImportError as error:
            note(f"{SWITCH}: system metrics are not available: {error}. Hint: uv sync --extra system")
            return None
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

        monitors: list[Any] = [CPUMonitor()]
        with suppress(ImportError, RuntimeError):  # no GPU, or no library for it
            monitors.append(GPUMonitor())
        return cls(monitors)

    def begin(self) -> None:
        """Start measuring, in the sampling thread: utilisation is measured since its last call."""
        for monitor in self.monitors:
            monitor.collect_metrics()
            monitor.clear_metrics()

    def sample(self, folder: Path) -> None:
        """Append a sample; it is lost if the disk is full."""
        file = folder / FILE
        number = self._taken.get(file) or len(read_lines(file))
        line: Line = {"round": number + 1, "time": time.time()}
        for monitor in self.monitors:
            monitor.collect_metrics()
            line |= {f"system/{name}": value for name, value in monitor.aggregate_metrics().items()}
            monitor.clear_metrics()
        with suppress(OSError):
            append_lines(file, [line])
            self._taken[file] = number + 1
