"""What MLflow has of a run, as the run's folder remembers it; and into which experiment a run goes."""

from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rayfl.config import ConfigError
from rayfl.results.files import read_json, write_json
from rayfl.results.folder import RunFolder, Status

NAME = "mlflow.json"
VERSION = 3
"""rayfl 0.4 and the first 0.5 sent less."""


@dataclass
class Sent:
    """A file of the run's folder: without it everything is sent once more, which changes nothing."""

    experiment: str = ""
    """The name of the experiment; "": the study's."""
    run_id: str = ""
    """MLflow's."""
    round: int = 0
    samples: int = 0
    """Lines of system.jsonl."""
    status: Status | None = None
    models: list[str] = field(default_factory=list)
    """Names of the models of a sweep that are there."""

    @classmethod
    def of(cls, folder: Path) -> "Sent":
        """Nothing, if the memory is damaged or of an earlier version."""
        known: dict[str, Any] = {}
        with suppress(ConfigError):
            known = read_json(folder / NAME)
        version = known.pop("version", None)
        fields = asdict(cls())
        whole = known.keys() == fields.keys() and all(
            isinstance(known[name], type(value)) for name, value in fields.items() if value is not None
        )
        return cls(**known) if version == VERSION and whole else cls()

    def save(self, folder: Path) -> None:
        write_json(folder / NAME, {"version": VERSION} | asdict(self))


def destine(folder: Path, experiment: str) -> None:
    """Has a run sent to the experiment of this name."""
    known = Sent.of(folder)
    known.experiment = experiment
    known.save(folder)


def experiment_of(run: RunFolder) -> str:
    """The name of the experiment that a run goes into: as destined, else the folder's of its study, which is the sweep
    of a trial."""
    path = run.path.resolve()
    above = (folder for folder in path.parents if RunFolder.exists(folder)) if run.sweep is not None else ()
    study = next((folder for folder in above if RunFolder.open(folder).id == run.sweep), path)
    return Sent.of(path).experiment or Sent.of(study).experiment or study.name
