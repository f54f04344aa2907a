"""The folder of a run: the truth about it on disk. MLflow and the tables are made from it.

    run.json        who it is and how it ended: the fields of `Run`
    config.json     the experiment
    metrics.jsonl   one line a round; rounds count from 1, the round after which the numbers hold
    result.json     the summary of a finished run
    clients.json    every client's accuracy on its own test split, at the last evaluation
    plots/  checkpoints/

A sweep is a run too (`kind: sweep`), without rounds of its own; its trials name its id in `sweep`. Only the
driver process writes.
"""

import errno
import json
import os
import re
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rayfl.config import ConfigError

Status = Literal["running", "finished", "failed", "stopped"]
Line = dict[str, Any]
"""What one round measured: `round`, `seconds`, `train_loss`, ..., and the accuracies if it was evaluated."""

TOTALS = ("bytes_down", "bytes_up", "train_flops", "seconds")
"""Amounts of a round that a run's summary adds up."""


@dataclass
class Run:
    """One run and its folder."""

    path: Path
    id: str
    label: str
    """The row of a table that it belongs to, e.g. "fedavg-largest"."""
    kind: Literal["run", "sweep"]
    tags: dict[str, str]
    """method, model, data, seed, commit, point (what the search chose), ..."""
    sweep: str | None
    """Id of the sweep that it is a trial of."""
    started: float
    """Unix time in seconds."""
    costs: dict[str, int] = field(default_factory=dict)
    """What its networks cost (`Experiment.costs`): part of its result."""
    status: Status = "running"
    error: str | None = None
    pending: list[Line] = field(default_factory=list, repr=False)
    """Lines that the disk did not take yet."""

    @classmethod
    def create(
        cls,
        path: str | Path,
        label: str,
        config: Mapping[str, Any],
        tags: Mapping[str, Any],
        sweep: str | None = None,
        kind: Literal["run", "sweep"] = "run",
        costs: Mapping[str, int] | None = None,
    ) -> "Run":
        """A new run in a folder that holds none; `config` is plain JSON."""
        run = cls(
            path=Path(path),
            id=uuid.uuid4().hex,
            label=label,
            kind=kind,
            tags={key: str(value) for key, value in tags.items()},
            sweep=sweep,
            started=time.time(),
            costs=dict(costs or {}),
        )
        if cls.exists(path):
            raise ConfigError(f"{path}: holds a run already; resume it, or give another folder")
        run.path.mkdir(parents=True, exist_ok=True)
        write_json(run.path / "config.json", config)
        run._save()
        return run

    @staticmethod
    def exists(path: str | Path) -> bool:
        return (Path(path) / "run.json").exists()

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """The run in a folder; a ConfigError where there is none."""
        try:
            return cls(path=Path(path), **json.loads((Path(path) / "run.json").read_text()))
        except FileNotFoundError:
            raise ConfigError(f"{path}: holds no run; allowed: a folder with a run.json") from None

    @property
    def config(self) -> dict[str, Any]:
        return read_json(self.path / "config.json")

    @property
    def result(self) -> dict[str, Any]:
        """The summary, or {} while there is none."""
        return read_json(self.path / "result.json")

    def append(self, lines: list[Line]) -> None:
        """Adds lines durably. A disk that takes none keeps them `pending` for the next call."""
        self.pending += lines
        try:
            _append(self.path / "metrics.jsonl", _jsonl(self.pending))
        except OSError:
            return
        self.pending.clear()

    def rounds(self) -> list[Line]:
        """All lines, in order; one that a crash tore is left out."""
        try:
            text = (self.path / "metrics.jsonl").read_text()
        except FileNotFoundError:
            text = ""
        whole, _, _ = text.rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()] + self.pending

    def truncate_after(self, round: int) -> None:
        """Forgets the rounds after `round`, which a resumed run makes again."""
        kept = [line for line in self.rounds() if line["round"] <= round]
        _replace(self.path / "metrics.jsonl", _jsonl(kept))
        self.pending.clear()

    def resume(self) -> None:
        """Marks an ended run as running again."""
        self.status, self.error = "running", None
        self._save()

    def finish(self, status: Status, result: Mapping[str, Any], error: str | None = None) -> None:
        """Writes what is pending, the summary with the costs, and how it ended, in this order."""
        if self.pending:
            self.append([])
        write_json(self.path / "result.json", {**result, **self.costs})
        self.status, self.error = status, error
        self._save()

    def save_clients(self, accuracy: Mapping[int, float]) -> None:
        """clients.json: every client's accuracy on its own test split, at the last evaluation."""
        write_json(self.path / "clients.json", {str(id): value for id, value in accuracy.items()})

    def record(self) -> dict[str, Any]:
        """The run as one flat row: id, label, point, status, error, sweep, seed, path, params, and its result."""
        return {
            "id": self.id,
            "label": self.label,
            "point": self.tags.get("point", ""),
            "status": self.status,
            "error": self.error,
            "sweep": self.sweep,
            "seed": int(self.tags.get("seed", 0)),
            "path": str(self.path),
            "params": flatten(self.config),
        } | self.result

    def _save(self) -> None:
        info = asdict(self)
        del info["path"], info["pending"]
        write_json(self.path / "run.json", info)


def runs(folder: str | Path) -> Iterator[Run]:
    """Every run and sweep in or below a folder, by path."""
    # folders may go while it looks: Tune removes checkpoints
    for path in sorted(Path(at) for at, _, files in os.walk(folder) if "run.json" in files):
        yield Run.open(path)


def records(folder: str | Path, sweep: str | None = None) -> list[dict[str, Any]]:
    """The rows (`Run.record`) of the runs below a folder, or of one sweep's."""
    return [run.record() for run in runs(folder) if run.kind == "run" and (sweep is None or run.sweep == sweep)]


SUMMARISED = ("accuracy_mean", "accuracy_server", "local_accuracy_mean", "local_accuracy_samples")
"""Metrics of which a result has the best and a mean of the last evaluations, where the run has them."""


AT_BEST = "local_accuracy_samples_at_best_server"
"""The local accuracy of the round with the best accuracy_server: HeteroFL's Local beside its Global."""

DENSITY_AT_BEST = "local_density_at_best"
"""The density of clients' masked networks in the round with the best local_accuracy_mean (SpaFL)."""

AMOUNTS = ("gbit", "client_macs")
"""What `amounts` gives."""


def summaries(metrics: Collection[str]) -> list[str]:
    """The names that `summary` adds for these metrics, and those of `amounts`."""
    names = [f"{kind}_{metric}" for metric in metrics if metric in SUMMARISED for kind in ("best", "last5")]
    names += [AT_BEST] if "local_accuracy_samples" in metrics else []
    names += [DENSITY_AT_BEST] if "local_accuracy_mean" in metrics else []
    return [*names, *AMOUNTS]


def amounts(record: Mapping[str, Any]) -> dict[str, float]:
    """What a run's training cost in the units of SpaFL's tables (arXiv 2406.00431), from its row (`Run.record`);
    nothing if it made no round.

    gbit: what was sent to and by all clients, in 10^9 bits. client_macs: multiply-adds of forward and backward passes,
    a mean over all clients, also those that never took part.
    """
    if not record.get("rounds"):
        return {}
    gbit = 8 * (record["bytes_down"] + record["bytes_up"]) / 1e9
    return {"gbit": gbit, "client_macs": record["train_flops"] / 2 / int(record["params"]["clients.count"])}


def summary(lines: list[Line], method: str, seed: int) -> dict[str, Any]:
    """result.json from the lines of a run.

    The accuracies are those of the last evaluated round. With them, for each of `SUMMARISED`: the best one
    (papers often print that), and the mean of the last five evaluations; `AT_BEST`; and `best_round`, the first
    round of the best accuracy_mean. Of masked networks also the last densities and shares of multiply-adds, and
    `DENSITY_AT_BEST`.
    """
    result: dict[str, Any] = {"method": method, "seed": seed}
    result["rounds"] = lines[-1]["round"] if lines else 0
    if lines and "train_loss" in lines[-1]:
        result["train_loss"] = lines[-1]["train_loss"]
    evaluated = [line for line in lines if "accuracy_mean" in line]
    if evaluated:
        result |= {key: value for key, value in evaluated[-1].items() if "accuracy_" in key}
        for metric in SUMMARISED:
            if values := [line[metric] for line in evaluated if metric in line]:
                result[f"best_{metric}"] = max(values)
                result[f"last5_{metric}"] = sum(values[-5:]) / len(values[-5:])
        if "local_accuracy_samples" in evaluated[-1]:
            result[AT_BEST] = max(evaluated, key=lambda line: line["accuracy_server"])["local_accuracy_samples"]
        result["best_round"] = max(evaluated, key=lambda line: line["accuracy_mean"])["round"]
        result |= _densities(evaluated)
    return result | {key: sum(line.get(key, 0) for line in lines) for key in TOTALS}


def _densities(evaluated: list[Line]) -> dict[str, float]:
    found = {}
    for key, value in evaluated[-1].items():
        if key == "local_density" or re.match(r"(density|macs_share)_\d", key):
            found[key] = value
    personal = [line for line in evaluated if "local_density" in line]
    if personal:
        found[DENSITY_AT_BEST] = max(personal, key=lambda line: line["local_accuracy_mean"])["local_density"]
    return found


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


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, {} where there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_json(path: Path, value: Any) -> None:
    """JSON that is there wholly or not at all."""
    _replace(path, (json.dumps(value, indent=2) + "\n").encode())


def _jsonl(lines: list[Line]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _append(path: Path, data: bytes) -> None:
    """`data` after the last whole line, all of it or (OSError) nothing."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        end = _cut_torn_line(fd)
        try:
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, end)
            raise
    finally:
        os.close(fd)


def _cut_torn_line(fd: int, block: int = 1 << 16) -> int:
    """Cuts what stands after the last newline, and returns the size that is left."""
    size = end = os.fstat(fd).st_size
    while end:
        start = max(0, end - block)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
    return end


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
