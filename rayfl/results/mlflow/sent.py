"""Record of what was sent to MLflow, in a run's folder; and the experiment of a run."""

from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rayfl.config import ConfigError
from rayfl.results.files import read_json, write_json
from rayfl.results.folder import RunFolder, Status

NAME = "mlflow.json"
VERSION = 4
"""Version of the contents sent; earlier versions of rayfl sent less."""
SUFFIXES = (".json", ".jsonl", ".npy", ".csv", ".md", ".tex", ".html")
"""Suffixes of files sent from a run's folder, in addition to its plots."""


@dataclass
class Sent:
    """A file in the run's folder. Without it everything is sent again, which changes nothing."""

    experiment: str = ""
    """Name of the experiment; "": the study's."""
    run_id: str = ""
    """Run id in MLflow."""
    round: int = 0
    samples: int = 0
    """Number of lines of system.jsonl."""
    status: Status | None = None
    models: list[str] = field(default_factory=list)
    """Names of the sweep's models in MLflow."""
    files: float = 0.0
    """Time of the last change of the files sent (Unix, seconds)."""

    @classmethod
    def of(cls, folder: Path) -> "Sent":
        """Return the record of a folder; empty if it is missing, damaged or of an earlier version."""
        known: dict[str, Any] = {}
        with suppress(ConfigError):
            known = read_json(folder / NAME)
        version = known.pop("version", None)
        fields = asdict(cls())
        whole = known.keys() == fields.keys() and all(
            isinstance(known[name], type(value)) for name, value in fields.items() if value is not None
        )
        return cls(**known) if version == VERSION and whole else cls()

    def changed(self, folder: Path) -> dict[Path, float]:
        """Return the files of a run that are not sent in their current state -> time of their last change."""
        files = [file for file in folder.iterdir() if file.suffix in SUFFIXES and file.name not in ("run.json", NAME)]
        files += [file for file in (folder / "plots").rglob("*") if file.is_file()]
        return {file: at for file in files if (at := file.stat().st_mtime) > self.files}

    def misses(self, run: RunFolder) -> bool:
        """Return whether a run is running or has anything that is not sent."""
        return run.status == "running" or run.status != self.status or bool(self.changed(run.path))

    def save(self, folder: Path) -> None:
        write_json(folder / NAME, {"version": VERSION} | asdict(self))


def destine(folder: Path, experiment: str) -> None:
    """Set the experiment to which a run is sent."""
    known = Sent.of(folder)
    known.experiment = experiment
    known.save(folder)


def experiment_of(run: RunFolder) -> str:
    """Return the name of a run's experiment. Default: the folder name of its study, which for a trial is the sweep."""
    path = run.path.resolve()
    above = (folder for folder in path.parents if RunFolder.exists(folder)) if run.sweep is not None else ()
    study = next((folder for folder in above if RunFolder.open(folder).id == run.sweep), path)
    return Sent.of(path).experiment or Sent.of(study).experiment or study.name
