"""The folder of a run: its complete record on disk, from which tables and the copy in MLflow are made.

    run.json        identity and status: the fields of `RunFolder`
    config.json     the experiment
    metrics.jsonl   one line per round, with metrics measured after the round; rounds count from 1
    result.json     the summary of a run that has ended
    clients.npy     every client's first score on its own test split, at the last evaluation
    clients/        all of these scores, a file per evaluation, with `run.client_scores: all`
    plots/  checkpoints/

Each line, and each of the last two files, contains its own SHA-256 (`rayfl.results.files`).

A sweep is a run (`kind: sweep`) without rounds; its trials contain its id in `sweep`. A scale study is a run
(`kind: scale`) whose lines are its points, with the value on the axis as round. Only the driver process writes.
"""

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, PrivateAttr, field_validator

from rayfl.config import Config, ConfigError, parse
from rayfl.config.plain import shown
from rayfl.engine.inputs import Inputs, changed
from rayfl.metrics import CLIENT_SCORES, Line
from rayfl.results import clients, files
from rayfl.results.made import Made, here
from rayfl.results.summary import Cost, Facts, summary

VERSION = 3
"""Version of the folder format; rayfl 0.4 and earlier wrote no version."""

Status = Literal["running", "finished", "failed", "stopped"]
Kind = Literal["run", "sweep", "scale"]


class RunFolder(Config):
    """A run or sweep and its folder."""

    model_config = ConfigDict(frozen=False)

    version: Literal[3] = VERSION
    id: str
    label: str
    """Row of the run in tables, e.g. "fedavg-largest"."""
    title: str = ""
    """Displayed name of the row, e.g. "FedAvg, largest". Default: the label."""
    kind: Kind = "run"
    tags: dict[str, str] = {}
    """Tags: method, model, data, seed, point (settings chosen by the search), ..."""
    sweep: str | None = None
    """Id of the trial's sweep."""
    started: float
    """Start time (Unix, seconds)."""
    seconds: float = 0
    """Wall-clock time of all driver processes, from start or resume to the last `count_time`."""
    made: tuple[Made, ...] = ()
    """Driver processes in order."""
    inputs: Inputs = {}
    """Arrays of the data, files and code -> digest (`rayfl.engine.inputs`)."""
    changes: tuple[str, ...] = ()
    """Inputs that had changed when the run was resumed, with the round."""
    status: Status = "running"
    error: str | None = None
    costs: dict[str, Cost] = {}
    """Capacity -> cost of its dense network."""
    facts: Facts
    path: Path = Field(default=Path(), exclude=True)
    pending: list[Line] = Field(default=[], exclude=True, repr=False)
    """Lines not written yet because the disk was full."""
    counted: float | None = Field(default=None, exclude=True, repr=False)
    """Time up to which `seconds` counts (`time.monotonic`); None outside of the process that makes the run."""
    _scores: np.ndarray | None = PrivateAttr(default=None)
    """Scores of clients not written yet because the disk was full."""
    _tables: dict[int, np.ndarray] = PrivateAttr(default_factory=dict)
    """Round -> table of all scores of clients that is not written yet."""

    @field_validator("tags")
    @classmethod
    def _seeded(cls, tags: dict[str, str]) -> dict[str, str]:
        if not tags.get("seed", "0").isdecimal():
            raise ValueError("tags whose `seed` is a whole number")
        return tags

    @classmethod
    def create(
        cls,
        path: str | Path,
        label: str,
        config: Mapping[str, Any],
        tags: Mapping[str, Any],
        facts: Mapping[str, Any],
        *,
        costs: Mapping[str, Mapping[str, int]] | None = None,
        inputs: Inputs | None = None,
        sweep: str | None = None,
        kind: Kind = "run",
        title: str = "",
    ) -> "RunFolder":
        """Create a run in a folder without one; `config` is plain JSON."""
        cls.require_new(path, kind)
        run = cls(
            id=uuid.uuid4().hex,
            label=label,
            title=title,
            kind=kind,
            tags={key: str(value) for key, value in tags.items()},
            sweep=sweep,
            started=time.time(),
            counted=time.monotonic(),
            made=(here(),),
            costs={capacity: Cost(**cost) for capacity, cost in (costs or {}).items()},
            facts=Facts(**facts),
            inputs=inputs or {},
            path=Path(path),
        )
        run.path.mkdir(parents=True, exist_ok=True)
        files.write_json(run.path / "config.json", config)
        run.save()
        return run

    @staticmethod
    def exists(path: str | Path) -> bool:
        return (Path(path) / "run.json").exists()

    @classmethod
    def require_new(cls, path: str | Path, kind: Kind = "run") -> None:
        """Raise ConfigError if the folder holds a run. `kind`: of the new one."""
        if not cls.exists(path):
            return
        if (old := cls.open(path).kind) != kind or kind == "scale":
            raise ConfigError(f"{path}: the folder is of `rayfl {old}`. Allowed: a new folder")
        raise ConfigError(
            f"{path}: the folder holds a {kind}. Allowed: a new folder, or --resume to continue the {kind}. Hint: "
            "--name NAME chooses the folder; in Python folder and resume=True"
        )

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Return the run in a folder. Raise ConfigError if there is none or a file is damaged."""
        if not cls.exists(path):
            raise ConfigError(f"{path}: the folder contains no run. Allowed: a folder with a run.json")
        file = Path(path) / "run.json"
        given = files.read_json(file)
        if (version := given.get("version")) != VERSION:
            raise ConfigError(
                f"{file}: version: {shown(version)} is not valid. Allowed: {VERSION}. Hint: use the rayfl version that "
                "wrote it"
            )
        run = parse(cls, given, str(file))
        run.path = Path(path)
        return run

    @property
    def config(self) -> dict[str, Any]:
        """The experiment's configuration with all defaults; for a sweep the sections of its file."""
        return _config(self.path)

    @property
    def result(self) -> dict[str, Any]:
        """`summary` of an ended run with its label as `method` and its seed; {} before the end and for sweeps."""
        self._require()
        file = self.path / "result.json"
        result = files.read_summed(file)
        if result:
            parse(_Result, result, str(file))
        return result

    @property
    def client_scores(self) -> np.ndarray:
        """Rows of `CLIENT_SCORES` at the last evaluation; empty without one."""
        return files.read_array(self.path / "clients.npy", CLIENT_SCORES)

    def append(self, lines: list[Line]) -> None:
        """Append lines durably. If writing fails, they stay `pending` until the next call."""
        self.pending += lines
        try:
            files.append_lines(self.path / "metrics.jsonl", self.pending)
        except OSError:
            return
        self.pending.clear()

    def rounds(self) -> list[Line]:
        """Return all lines in order, without an incomplete last line."""
        self._require()
        return files.read_lines(self.path / "metrics.jsonl") + self.pending

    def count(self) -> int:
        """Return the number of lines."""
        self._require()
        return files.count_lines(self.path / "metrics.jsonl") + len(self.pending)

    def whole_rounds(self) -> tuple[int, str]:
        """Return the last round up to which metrics.jsonl is complete, and the error of the next line, if any."""
        lines, wrong = files.read_whole_lines(self.path / "metrics.jsonl")
        return len(lines), wrong

    def truncate_after(self, round: int) -> None:
        """Remove the rounds after `round`. Raise ConfigError and change nothing if a round up to it has no line."""
        file = self.path / "metrics.jsonl"
        lines, wrong = files.read_whole_lines(file)
        lines += [] if wrong else self.pending
        if len(lines) < round:
            raise ConfigError(
                f"{wrong or f'{file}: the file ends after round {len(lines)}'}, but the run resumes after round {round}"
                ". Hint: restore a copy of the file, or start a new run in another folder"
            )
        files.write_lines(file, lines[:round])
        self.pending.clear()
        clients.truncate_after(self.path, round)

    def resume(
        self,
        config: Mapping[str, Any] | None = None,
        facts: Mapping[str, Any] | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        """Mark an ended run as running again; `config`, `facts` and `inputs` replace the old ones, e.g. with more
        rounds."""
        if inputs is not None:
            self.changes += tuple(f"after round {self.count()}: {name}" for name in changed(self.inputs, inputs))
            self.inputs = inputs
        if config is not None:
            files.write_json(self.path / "config.json", config)
        if facts is not None:
            self.facts = Facts(**facts)
        self.made += () if here() in self.made else (here(),)
        self.status, self.error = "running", None
        self.counted = time.monotonic()
        self.save()

    def save(self) -> None:
        """Write run.json."""
        files.write_json(self.path / "run.json", self.model_dump(mode="json"))

    def count_time(self) -> None:
        """Add the time since the last call to `seconds`, so that a killed process loses little of it."""
        if self.counted is not None:
            now = time.monotonic()
            self.seconds, self.counted = self.seconds + now - self.counted, now
            self.save()

    def finish(self, status: Status, error: str | None = None) -> None:
        """Write pending lines and scores, the result of a run, and the final status, in this order."""
        if self.pending:
            self.append([])
        if self._scores is not None:
            files.write_array(self.path / "clients.npy", self._scores)
        self._write_tables()
        if self.kind == "run":
            files.write_summed(self.path / "result.json", self._summary())
        self.count_time()
        self.status, self.error, self.counted = status, error, None
        self.save()

    def save_clients(self, scores: np.ndarray) -> None:
        """Write clients.npy: every client's first score on its own test split at the last evaluation. If writing fails,
        they are kept until the next call or the run's end."""
        self._scores = scores
        with suppress(OSError):
            files.write_array(self.path / "clients.npy", scores)
            self._scores = None

    def save_client_table(self, round: int, table: np.ndarray) -> None:
        """Write the rows of `client_table` of an evaluated round. If writing fails, they are kept like scores."""
        self._tables[round] = table
        with suppress(OSError):
            self._write_tables()

    def _write_tables(self) -> None:
        for round in list(self._tables):
            clients.write(self.path, round, self._tables[round])
            del self._tables[round]

    def record(self) -> dict[str, Any]:
        """Return the run as a row of plain values: id, label, title, point, status, error, sweep, seed, path, params
        (configuration with dotted paths), facts, and its result. A run without a result, outside of a sweep, has the
        summary of its lines so far."""
        is_single = self.kind == "run" and self.sweep is None
        return {
            "id": self.id,
            "label": self.label,
            "title": self.title or self.label,
            "point": self.tags.get("point", ""),
            "status": self.status,
            "error": self.error,
            "sweep": self.sweep,
            "seed": self.seed,
            "path": str(self.path),
            "params": flatten(self.config),
            "facts": self.facts.model_dump(mode="json"),
        } | (self.result or (self._summary() if is_single else {}))

    @property
    def seed(self) -> int:
        return int(self.tags.get("seed", 0))

    def _require(self) -> None:
        """Raise ConfigError if the folder was removed."""
        if not self.exists(self.path):
            raise ConfigError(f"{self.path}: the run's folder is gone. Hint: `rayfl.run(..., folder=...)` keeps it")

    def _summary(self) -> dict[str, Any]:
        return {"method": self.label, "seed": self.seed} | summary(self.rounds(), self.facts, self.costs)


class _Result(Config):
    """Required fields of a result.json; all others are numbers."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=True)
    __pydantic_extra__: dict[str, float]

    method: str
    seed: int
    rounds: int
    bytes_down: int
    bytes_up: int
    train_flops: float
    seconds: float


def run_paths(folder: str | Path) -> list[Path]:
    """Return the folders of runs and sweeps in or below a folder."""
    # folders may disappear meanwhile: Tune removes checkpoints
    return sorted(Path(at) for at, _, names in os.walk(folder) if "run.json" in names)


def runs(folder: str | Path) -> Iterator[RunFolder]:
    """Iterate over the runs and sweeps in or below a folder, ordered by path."""
    return map(RunFolder.open, run_paths(folder))


def records(folder: str | Path, sweep: str | None = None) -> list[dict[str, Any]]:
    """Return the rows (`RunFolder.record`) of the runs below a folder, or of one sweep."""
    return [run.record() for run in runs(folder) if run.kind == "run" and (sweep is None or run.sweep == sweep)]


def flatten(config: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return nested sections as dotted paths; sections in a list by their index; other lists stay values."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, list | tuple) and value and all(isinstance(entry, Mapping) for entry in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{at}{key}.")
        else:
            flat[f"{at}{key}"] = value
    return flat


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.exists():
        raise ConfigError(f"{file}: the file does not exist. Hint: restore a copy of it, or remove the run's folder")
    return files.read_json(file)
