"""Sends runs to MLflow in a thread, while they go on."""

import os
import threading
from contextlib import suppress
from pathlib import Path

from rayfl.config import ConfigError
from rayfl.results.folder import RunFolder
from rayfl.results.mlflow.copy import Copy
from rayfl.results.mlflow.sent import Sent, destine
from rayfl.results.mlflow.store import imported
from rayfl.results.mlflow.system import Sampler


class Sender:
    """Syncs runs in a thread, every few seconds and once more at the end:

    with Sender(Copy(Store(uri))) as sender:
        sender.add(run.path)

    The end waits as long as MLflow answers, and no more than `SILENT_SECONDS` for an answer.
    It imports mlflow before the thread starts. So does Ray Tune on its way: in two threads at once that can fail, in
    either and for good, and where Tune is first, mlflow's telemetry is on.
    """

    def __init__(self, copy: Copy, output: Path | None = None, experiment: str | None = None, seconds: float = 5.0):
        """`output`: a folder of runs; those that ended and were not sent are sent too. `experiment`: where those go
        that are added, in place of their study's."""
        self.copy, self.output, self.experiment, self.seconds = copy, output, experiment, seconds
        self._paths: list[Path] = []
        self._study: Path | None = None
        self._sampler: Sampler | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def add(self, path: Path) -> None:
        """The folder of a run or sweep, to be sent until it has ended."""
        if self.experiment is not None:
            with suppress(OSError):  # a full disk
                destine(path, self.experiment)
        self._paths.append(path)
        # a sweep comes before its trials
        self._study = self._study or path

    def page(self, path: Path) -> str:
        """The page of MLflow with the charts of the run or sweep in a folder; "" if MLflow has not got it."""
        return self.copy.page(path)

    def __enter__(self) -> "Sender":
        with suppress(Exception):  # what is wrong, the first sync says
            imported()
            self._sampler = Sampler.wanted(self.copy.note)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if not self.copy.store.is_over(self._thread):
            self.copy.say_silent()

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
                with suppress(ConfigError):  # deleted, or not yet begun
                    given.append(RunFolder.open(path))
            failed = self.copy.sync_runs(given)
            for run in given:
                if run.status != "running" and run not in failed:
                    self._paths.remove(run.path)


def unsent(folder: Path) -> list[Path]:
    """The runs below a folder that ended, and whose end MLflow has not got."""
    found = []
    for path in sorted(Path(at) for at, _, files in os.walk(folder) if "run.json" in files):
        with suppress(ConfigError):  # damaged, or deleted meanwhile
            run = RunFolder.open(path)
            if run.status not in ("running", Sent.of(path).status):
                found.append(path)
    return found
