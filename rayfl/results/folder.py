"""The folder of a run: the truth about it on disk. MLflow and the tables are made from it.

    run.json        who it is and how it ended: the fields of `RunFolder`
    config.json     the experiment
    metrics.jsonl   one line a round; rounds count from 1, the round after which the numbers hold
    result.json     the summary of a run that ended
    clients.npy     every client's first score on its own test split, at the last evaluation
    plots/  checkpoints/

A sweep is a run too (`kind: sweep`), without rounds of its own; its trials name its id in `sweep`. So is a scale study
(`kind: scale`), whose lines are its points: their round is the value on the axis. Only the driver process writes.
"""

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, field_validator

from rayfl.config import Config, ConfigError, parse
from rayfl.config.plain import shown
from rayfl.metrics import CLIENT_SCORES, Line
from rayfl.results import version1
from rayfl.results.files import (
    append_lines,
    read_array,
    read_json,
    read_lines,
    read_whole_lines,
    write_array,
    write_json,
    write_lines,
)
from rayfl.results.made import Made, here
from rayfl.results.summary import Cost, Facts, summary

VERSION = 2
"""Of what a folder holds; rayfl 0.4 and earlier wrote version 1, without saying so."""

Status = Literal["running", "finished", "failed", "stopped"]
Kind = Literal["run", "sweep", "scale"]


class RunFolder(Config):
    """One run or sweep, and its folder."""

    model_config = ConfigDict(frozen=False)

    version: Literal[1, 2] = VERSION
    id: str
    label: str
    """The row of a table that it belongs to, e.g. "fedavg-largest"."""
    title: str = ""
    """Of that row, as people read it: "FedAvg, largest"; unless given the label."""
    kind: Kind = "run"
    tags: dict[str, str] = {}
    """method, model, data, seed, point (what the search chose), ..."""
    sweep: str | None = None
    """Id of the sweep that it is a trial of."""
    started: float
    """Unix time in seconds."""
    made: tuple[Made, ...] = ()
    """The processes that made it, one after another; none of runs before 0.5."""
    status: Status = "running"
    error: str | None = None
    costs: dict[str, Cost] = {}
    """Capacity -> what its network costs as it is built, before anything is masked."""
    facts: Facts
    path: Path = Field(default=Path(), exclude=True)
    pending: list[Line] = Field(default=[], exclude=True, repr=False)
    """Lines that the disk did not take yet."""

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
        sweep: str | None = None,
        kind: Kind = "run",
        title: str = "",
    ) -> "RunFolder":
        """A new run in a folder that holds none; `config` is plain JSON."""
        if cls.exists(path):
            raise ConfigError(f"{path}: holds a run already; resume it, or give another folder")
        run = cls(
            id=uuid.uuid4().hex,
            label=label,
            title=title,
            kind=kind,
            tags={key: str(value) for key, value in tags.items()},
            sweep=sweep,
            started=time.time(),
            made=(here(),),
            costs={capacity: Cost(**cost) for capacity, cost in (costs or {}).items()},
            facts=Facts(**facts),
            path=Path(path),
        )
        run.path.mkdir(parents=True, exist_ok=True)
        write_json(run.path / "config.json", config)
        run._save()
        return run

    @staticmethod
    def exists(path: str | Path) -> bool:
        return (Path(path) / "run.json").exists()

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """The run in a folder. A ConfigError where there is none, and where a file is damaged."""
        if not cls.exists(path):
            raise ConfigError(f"{path}: holds no run; allowed: a folder with a run.json")
        file = Path(path) / "run.json"
        given = read_json(file)
        version = given.get("version", 1)
        if version not in (1, VERSION):
            raise ConfigError(
                f"{file}: version: given {shown(version)}; allowed: 1 or {VERSION}; use the rayfl that wrote it"
            )
        if version == 1:
            given = version1.today(given, _config(file.parent), f"{file.parent / 'config.json'}")
        run = parse(cls, given, str(file))
        run.path = Path(path)
        return run

    @property
    def config(self) -> dict[str, Any]:
        """The experiment, as YAML would say it, with every default; of a sweep its file's sections."""
        return _config(self.path)

    @property
    def result(self) -> dict[str, Any]:
        """`summary` of a run that ended, with its label as `method` and its seed; {} before, and of sweeps."""
        file = self.path / "result.json"
        result = read_json(file)
        if result and self.version == 1:
            return self._summary()
        if result:
            parse(_Result, result, str(file))
        return result

    @property
    def client_scores(self) -> np.ndarray:
        """The rows of `CLIENT_SCORES` at the last evaluation; none where there was none."""
        found = read_array(self.path / "clients.npy", CLIENT_SCORES)
        return version1.client_scores(self.path / "clients.json") if found is None else found

    def append(self, lines: list[Line]) -> None:
        """Adds lines durably. A disk that takes none keeps them `pending` for the next call."""
        self.pending += lines
        try:
            append_lines(self.path / "metrics.jsonl", self.pending)
        except OSError:
            return
        self.pending.clear()

    def rounds(self) -> list[Line]:
        """All lines, in order; one at the end that a crash tore is left out."""
        lines = read_lines(self.path / "metrics.jsonl") + self.pending
        return version1.lines(lines, self.config) if self.version == 1 else lines

    def whole_rounds(self) -> tuple[int, str]:
        """Up to which round metrics.jsonl has a line for each, in order, and what is wrong with the line after that: ""
        where there is none."""
        lines, wrong = read_whole_lines(self.path / "metrics.jsonl")
        return len(lines), wrong

    def truncate_after(self, round: int) -> None:
        """Forgets the rounds after `round`, which a resumed run makes again. A ConfigError if one up to it has no line:
        then nothing is changed."""
        file = self.path / "metrics.jsonl"
        lines, wrong = read_whole_lines(file)
        lines += [] if wrong else self.pending
        if len(lines) < round:
            raise ConfigError(
                f"{wrong or f'{file}: ends after round {len(lines)}'}; the run goes on after round {round}; put back a "
                "copy of the file, or start anew in another folder"
            )
        write_lines(file, lines[:round])
        self.pending.clear()

    def require_version(self) -> None:
        """A ConfigError of a run that an earlier rayfl made: only its numbers can be read."""
        if self.version != VERSION:
            raise ConfigError(
                f"{self.path}: given a run of rayfl 0.4; allowed: runs of rayfl 0.5, except for reports; resume or "
                "export it with rayfl 0.4"
            )

    def resume(self, config: Mapping[str, Any] | None = None, facts: Mapping[str, Any] | None = None) -> None:
        """Marks an ended run as running again; with the configuration and facts that it goes on with, if they changed
        (more rounds)."""
        self.require_version()
        if config is not None:
            write_json(self.path / "config.json", config)
        if facts is not None:
            self.facts = Facts(**facts)
        self.made += () if here() in self.made else (here(),)
        self.status, self.error = "running", None
        self._save()

    def finish(self, status: Status, error: str | None = None) -> None:
        """Writes what is pending, the result of a run, and how it ended, in this order."""
        if self.pending:
            self.append([])
        if self.kind == "run":
            write_json(self.path / "result.json", self._summary())
        self.status, self.error = status, error
        self._save()

    def save_clients(self, scores: np.ndarray) -> None:
        """clients.npy: every client's first score on its own test split, at the last evaluation."""
        write_array(self.path / "clients.npy", scores)

    def record(self) -> dict[str, Any]:
        """The run as one row of plain values: id, label, title, point, status, error, sweep, seed, path, params (its
        configuration with dotted paths), facts, and its result."""
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
        } | self.result

    @property
    def seed(self) -> int:
        return int(self.tags.get("seed", 0))

    def _summary(self) -> dict[str, Any]:
        return {"method": self.label, "seed": self.seed} | summary(self.rounds(), self.facts, self.costs)

    def _save(self) -> None:
        write_json(self.path / "run.json", self.model_dump(mode="json"))


class _Result(Config):
    """What every result.json has; the others are numbers too."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=True)
    __pydantic_extra__: dict[str, float]

    method: str
    seed: int
    rounds: int
    bytes_down: int
    bytes_up: int
    train_flops: float
    seconds: float


def runs(folder: str | Path) -> Iterator[RunFolder]:
    """Every run and sweep in or below a folder, by path."""
    # folders may go while it looks: Tune removes checkpoints
    for path in sorted(Path(at) for at, _, files in os.walk(folder) if "run.json" in files):
        yield RunFolder.open(path)


def records(folder: str | Path, sweep: str | None = None) -> list[dict[str, Any]]:
    """The rows (`RunFolder.record`) of the runs below a folder, or of one sweep's."""
    return [run.record() for run in runs(folder) if run.kind == "run" and (sweep is None or run.sweep == sweep)]


def flatten(config: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Nested sections as dotted paths, those in a list by their place in it; other lists stay values."""
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
        raise ConfigError(f"{file}: there is no such file; put back a copy of it, or remove the run's folder")
    return read_json(file)
