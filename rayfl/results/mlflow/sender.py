"""Thread that sends runs to MLflow while they run."""

import threading
from contextlib import suppress
from pathlib import Path

from rayfl.config import ConfigError
from rayfl.results.folder import RunFolder, run_paths
from rayfl.results.mlflow.copy import Copy
from rayfl.results.mlflow.sent import Sent, destine
from rayfl.results.mlflow.store import imported
from rayfl.results.mlflow.system import Sampler


class Sender:
    """Thread that syncs runs every few seconds and at the end:

    with Sender(Copy(Store(uri))) as sender:
        sender.add(run.path)

    At the end it waits at most `SILENT_SECONDS` for each answer of MLflow. It imports mlflow before the thread starts:
    Ray Tune imports it too; simultaneous imports in two threads can fail permanently, and if Tune's is first, mlflow's
    telemetry is on.
    """

    def __init__(self, copy: Copy, output: Path | None = None, experiment: str | None = None, seconds: float = 5.0):
        """`output`: folder whose unsent runs are sent too. `experiment`: of added runs. Default: their study's."""
        self.copy, self.output, self.experiment, self.seconds = copy, output, experiment, seconds
        self._paths: list[Path] = []
        self._study: Path | None = None
        self._sampler: Sampler | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def add(self, path: Path) -> None:
        """Add the folder of a run or sweep, which is sent until it has ended."""
        if self.experiment is not None:
            with suppress(OSError):  # a full disk
                destine(path, self.experiment)
        self._paths.append(path)
        # a sweep comes before its trials
        self._study = self._study or path

    def page(self, path: Path) -> str:
        """Return the URL fragment of the charts of the run or sweep in a folder; "" if MLflow does not have it."""
        return self.copy.page(path)

    def __enter__(self) -> "Sender":
        with suppress(Exception):  # the first sync reports errors
            imported()
            self._sampler = Sampler.wanted(self.copy.note)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if not self.copy.store.is_over(self._thread):
            self.copy.warn_silent()

    def _work(self) -> None:
        if self._sampler:
            self._sampler.begin()
        if self.output is not None:
            self._paths += unsent(self.output)
        stopping = False
        while not stopping:
            stopping = self._stop.wait(self.seconds)
            if self._sampler and self._study:
                with suppress(ConfigError):  # a damaged file
                    self._sampler.sample(self._study)
            given: list[RunFolder] = []
            for path in dict.fromkeys(self._paths):
                with suppress(ConfigError):  # deleted, or not created yet
                    given.append(RunFolder.open(path))
            failed = self.copy.sync_runs(given)
            for run in given:
                # the report of a run is written after its end
                if run.status != "running" and run not in failed and run.path != self._study:
                    self._paths.remove(run.path)


def unsent(folder: Path) -> list[Path]:
    """Return the ended runs below a folder that MLflow does not have completely."""
    found = []
    for path in run_paths(folder):
        with suppress(ConfigError):  # damaged, or deleted meanwhile
            run = RunFolder.open(path)
            if run.status != "running" and Sent.of(path).misses(run):
                found.append(path)
    return found
