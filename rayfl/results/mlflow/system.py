"""What a machine does while a run goes on: its processors, memory and GPUs, as MLflow's own monitors measure them.

Off, unless MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING is true, MLflow's own switch. It wants psutil, and nvidia-ml-py for
GPUs: `pip install rayfl[system]`. The machine is the one of the process that drives the run; a sweep's trials share it.
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
"""In a run's folder: a line a sample, whose `round` is its number from 1, with `time` (Unix, seconds) and what was
measured, by MLflow's names."""


class Sampler:
    """Appends samples to the folder of a run."""

    def __init__(self, monitors: list[Any]):
        self.monitors = monitors
        self._taken: dict[Path, int] = {}

    @classmethod
    def wanted(cls, note: Callable[[str], None]) -> "Sampler | None":
        """None where it is off, or cannot be had, which is said."""
        if os.environ.get(SWITCH, "").lower() not in ("true", "1"):
            return None
        imported()
        try:
            from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        except ImportError as error:
            note(f"{SWITCH}: no system metrics: {error}; pip install rayfl[system]")
            return None
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

        monitors: list[Any] = [CPUMonitor()]
        with suppress(ImportError, RuntimeError):  # no GPU, or nothing that can ask one
            monitors.append(GPUMonitor())
        return cls(monitors)

    def begin(self) -> None:
        """In the thread that samples: shares are since its last call."""
        for monitor in self.monitors:
            monitor.collect_metrics()
            monitor.clear_metrics()

    def sample(self, folder: Path) -> None:
        """Takes one; a disk that takes none loses it."""
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
