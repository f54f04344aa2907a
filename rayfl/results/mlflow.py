"""MLflow: a copy of the run folders, which may lag and is never what a run waits for.

Everything is read from disk (`folder.py`), so it can be sent again at any time and from any process: a
run is found again by its tag `rayfl.run_id`, and the time of a metric follows from its line, so that MLflow
ignores one that it has. `<run>/mlflow.json` remembers what was sent and spares sending it twice.

In MLflow a trial's run is a child of its sweep's. What a round measured keeps its name; the numbers of
result.json stand under "result/". Of the checkpoints it gets the last one, without what clients keep: that can be a
network a client, so it stays in the run's folder alone, and the tag `rayfl.carries` says where.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote, unquote, urlsplit

from rayfl.config import ConfigError, nearest
from rayfl.engine.checkpoints import STORE
from rayfl.plain import public
from rayfl.results.folder import RunFolder, Status, flatten, read_json, runs, write_json

METRICS_A_BATCH, TEXTS_A_BATCH = 1000, 100
PARAM_LENGTH, TAG_LENGTH = 6000, 8000
"""MLflow's limits."""

STATUS: dict[Status, str] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
}

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Set before mlflow is imported, where the user did not. The next sync is what retries a request."""

STORES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks", "databricks-uc", "uc", "file", "")
"""Schemes of MLflow's own stores; the last is a plain path. Plugins of MLflow bring others."""

FACTS = "rayfl.facts"
"""The tag with a run's `Facts`."""

T = TypeVar("T")

FAULTS_OF_A_RUN = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE"}
"""Error codes of a server that is there and refuses one run: the others can still be sent."""


SILENT_SECONDS = 15.0
"""How long a command waits for an answer of MLflow where it waits at all. A request that MLflow itself gives up takes
10."""


def default_uri(output: str | Path) -> str:
    """The embedded store of an output folder; its artifacts lie in `artifacts/` beside it."""
    path = str(Path(output).resolve() / "mlflow.db")
    return f"sqlite:///{path.replace('%', quote('%')).replace('?', quote('?'))}"


class Mlflow:
    """One experiment of a tracking server. Trouble is said to `note`, once, and when it is over.

    Nothing is imported or connected before the first call. Use it from one thread at a time. A ConfigError for an
    address that no store of MLflow has.
    """

    def __init__(self, uri: str, experiment_name: str, note: Callable[[str], None] = print):
        _require_store(uri)
        self.uri, self.experiment_name, self.note = uri, experiment_name, note
        self.answers = 0
        """How many calls were answered."""
        self._ids: dict[str, str] = {}
        self._troubles: set[str] = set()

    def sync(self, run: RunFolder) -> bool:
        """Sends what is new of a run or a sweep; False if it could not be sent."""
        return not self.sync_runs([run])

    def sync_all(self, folder: str | Path) -> int:
        """Sends what is new below an output folder; returns how many runs could not be sent. A ConfigError if MLflow
        stops to answer."""
        return len(self._patiently(lambda: self.sync_runs(list(runs(folder)))))

    def sync_runs(self, given: list[RunFolder]) -> list[RunFolder]:
        """Sends what is new of these runs; returns those that could not be sent."""
        failed: list[RunFolder] = []
        for i, run in enumerate(given):
            try:
                self._send(run)
            # whatever a server, a database, a disk or a cloud's library raises: no run dies of it
            except Exception as error:
                if not RunFolder.exists(run.path):  # deleted while it was sent
                    continue
                failed.append(run)
                if isinstance(error, ConfigError):
                    self._say(run.id, f"does not get a damaged file: {_first_line(error)}")
                elif getattr(error, "error_code", None) in FAULTS_OF_A_RUN:
                    self._say(run.id, f"refuses {run.path}: {_first_line(error)}")
                else:
                    self._say("", f"fails: {_first_line(error)}; runs go on, and it is sent later")
                    return failed + given[i + 1 :]
        if "" in self._troubles and given:
            self._troubles.remove("")
            self.note(f"MLflow at {public(self.uri)} is back")
        return failed

    def read(self, sweep: str | None = None, kind: str = "run") -> list[dict[str, Any]]:
        """The experiment's runs (or sweeps: `kind`), or those of the sweep with this id, as rows like
        `RunFolder.record`; newest first.

        `params` are text and there is no `path`. Runs that rayfl 0.4 sent are left out until they are sent again from
        their folders. A ConfigError if there is no such server or experiment, or if it stops to answer.
        """
        wanted = f"tags.`rayfl.kind` = '{kind}'"
        if sweep is not None:
            wanted += f" AND tags.`rayfl.sweep` = '{sweep}'"
        database = _database(self.uri)
        if database is not None and not database.exists():
            raise ConfigError(f"{database}: there is no such file; run a sweep first")
        return self._patiently(lambda: self._read(wanted))

    def _read(self, wanted: str) -> list[dict[str, Any]]:
        exceptions = _imported().exceptions
        try:
            experiment = self._client.get_experiment_by_name(self.experiment_name)
            if experiment is None:
                names = [e.name for e in self._client.search_experiments()]
                raise ConfigError(
                    f"{public(self.uri)}: no experiment is called {self.experiment_name!r}; "
                    f"{nearest(self.experiment_name, names)}"
                )
            found = self._search(experiment.experiment_id, wanted, "active_only")
            return [_record(run) for run in found if FACTS in run.data.tags]
        except exceptions.MlflowException as error:
            raise ConfigError(f"{public(self.uri)}: MLflow cannot be read: {_first_line(error)}") from None

    def _patiently(self, work: Callable[[], T]) -> T:
        """What `work` gives. A ConfigError if MLflow stops to answer meanwhile: a byte now and then keeps every timeout
        of a request from passing."""
        _imported()
        ended: Future[T] = Future()

        def settle() -> None:
            try:
                ended.set_result(work())
            except BaseException as error:
                ended.set_exception(error)

        # not of a pool: the end of the process would wait for it
        thread = threading.Thread(target=settle, name="mlflow", daemon=True)
        thread.start()
        if not self.is_over(thread):
            raise ConfigError(f"{public(self.uri)}: MLflow has not answered for {SILENT_SECONDS:g} s; try again later")
        return ended.result()

    def is_over(self, thread: threading.Thread) -> bool:
        """Waits for a thread that works with this as long as MLflow answers; whether the thread ended."""
        answers = -1
        while thread.is_alive() and answers != self.answers:
            answers = self.answers
            thread.join(SILENT_SECONDS)
        return not thread.is_alive()

    # everything below raises what mlflow raises

    @cached_property
    def _client(self) -> Any:
        client = _imported().MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        if (database := _database(self.uri)) is not None:
            # MLflow also makes a folder of the path as it is quoted
            quoted = Path(self.uri.removeprefix("sqlite:///")).parent
            if quoted != database.parent:
                with suppress(OSError):
                    os.removedirs(quoted)
        return client

    @cached_property
    def _experiment(self) -> str:
        """The experiment's id; it is made if there is none."""
        found = self._client.get_experiment_by_name(self.experiment_name)
        if found is not None:
            return found.experiment_id
        database = _database(self.uri)
        artifacts = None if database is None else (database.parent / "artifacts").as_uri()
        return self._client.create_experiment(self.experiment_name, artifact_location=artifacts)

    def _search(self, experiment: str, wanted: str, view: str) -> Iterator[Any]:
        from mlflow.entities import ViewType

        token = None
        while True:
            page = self._client.search_runs([experiment], wanted, ViewType.from_string(view), page_token=token)
            self.answers += 1
            yield from page
            if not (token := page.token):
                return

    def _send(self, run: RunFolder) -> None:
        run_id = self._id(run.id, run.started)
        sent = _Sent.of(run, run_id)
        if sent.status is None:
            self._describe(run, run_id)
            sent.status = "running"
            sent.save()
        self._send_rounds(run, run_id, sent)
        if sent.status != run.status:
            self._send_end(run, run_id)
            sent.status = run.status
            sent.save()

    def _id(self, rayfl_id: str, started: float | None = None) -> str:
        """MLflow's id of a run or sweep, made if there is none: a trial may come before its sweep."""
        if rayfl_id not in self._ids:
            # a run that the user deleted in MLflow is not made again
            wanted = f"tags.`rayfl.run_id` = '{rayfl_id}'"
            found = next(self._search(self._experiment, wanted, "all"), None)
            if found is None:
                start = None if started is None else _milliseconds(started)
                found = self._client.create_run(self._experiment, start, tags={"rayfl.run_id": rayfl_id})
            self._ids[rayfl_id] = found.info.run_id
        return self._ids[rayfl_id]

    def _describe(self, run: RunFolder, run_id: str) -> None:
        """Name, parent, tags and parameters."""
        from mlflow.entities import Param, RunTag

        tags = run.tags | {"label": run.label, "title": run.title, "rayfl.kind": run.kind}
        tags[FACTS] = run.facts.model_dump_json()
        if run.made:
            tags["mlflow.source.git.commit"] = run.made[0].commit
        if run.sweep is not None:
            tags |= {"rayfl.sweep": run.sweep, "mlflow.parentRunId": self._id(run.sweep)}
        self._client.update_run(run_id, name=" ".join(filter(None, (run.label, run.tags.get("point")))))
        for some in _batches([RunTag(k, v[:TAG_LENGTH]) for k, v in tags.items()], TEXTS_A_BATCH):
            self._call("log_batch", run_id, tags=some)
        # MLflow refuses a parameter that changes, as `rounds` does of a run that is made longer
        known = self._client.get_run(run_id).data.params
        params = [Param(k, str(v)[:PARAM_LENGTH]) for k, v in flatten(run.config).items() if k not in known]
        for some in _batches(params, TEXTS_A_BATCH):
            self._call("log_batch", run_id, params=some)

    def _send_rounds(self, run: RunFolder, run_id: str, sent: "_Sent") -> None:
        at, last, values = run.started, sent.round, []
        for line in run.rounds():
            at += line.get("seconds", 0)
            if line["round"] > sent.round:
                last = line["round"]
                values += [(key, value, at, last) for key, value in line.items() if key != "round"]
        if values:
            self._log(run_id, values)
            sent.round = last
            sent.save()

    def _send_end(self, run: RunFolder, run_id: str) -> None:
        if run.status == "running":
            self._client.update_run(run_id, status="RUNNING")
            return
        result = run.result
        end, last = run.started + result.get("seconds", 0), result.get("rounds", 0)
        self._log(run_id, [(f"result/{key}", value, end, last) for key, value in result.items() if key != "seed"])
        if run.error is not None:
            self._client.set_tag(run_id, "error", run.error[:TAG_LENGTH])
        self._client.set_terminated(run_id, STATUS[run.status])
        self._send_files(run, run_id)

    def _log(self, run_id: str, values: list[tuple[str, Any, float, int]]) -> None:
        """Metrics as (name, value, time in seconds, step); what is no number is left out."""
        from mlflow.entities import Metric

        metrics = [
            Metric(key, float(value), _milliseconds(at), step)
            for key, value, at, step in values
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        for some in _batches(metrics, METRICS_A_BATCH):
            self._call("log_batch", run_id, metrics=some)

    def _send_files(self, run: RunFolder, run_id: str) -> None:
        for file in sorted(run.path.iterdir()):
            if file.suffix in (".json", ".jsonl", ".npy", ".csv", ".md", ".tex"):
                if file.name not in ("run.json", _Sent.NAME):
                    self._call("log_artifact", run_id, str(file))
        if (plots := run.path / "plots").exists():
            self._call("log_artifacts", run_id, str(plots), "plots")
        if final := max((run.path / "checkpoints").glob("round-*"), default=None):
            self._send_checkpoint(final, run_id)

    def _send_checkpoint(self, folder: Path, run_id: str) -> None:
        for file in sorted(folder.iterdir()):
            self._call("log_artifact", run_id, str(file), f"checkpoints/{folder.name}")
        if (kept := folder.parent / STORE).exists():
            self._client.set_tag(run_id, "rayfl.carries", f"in {kept.resolve()}"[:TAG_LENGTH])

    def _call(self, verb: str, *arguments: Any, **options: Any) -> None:
        getattr(self._client, verb)(*arguments, **options)
        self.answers += 1

    def say_silent(self) -> None:
        """That it does not answer."""
        self._say("", f"has not answered for {SILENT_SECONDS:g} s; the next command sends what it has not got")

    def _say(self, about: str, text: str) -> None:
        if about not in self._troubles:
            self._troubles.add(about)
            self.note(f"MLflow at {public(self.uri)} {public(text)}")


class Sender:
    """Syncs runs in a thread, every few seconds and once more at the end:

    with Sender(mlflow) as sender:
        sender.add(run.path)

    The end waits as long as MLflow answers, and no more than `SILENT_SECONDS` for an answer.
    It imports mlflow before the thread starts. So does Ray Tune on its way: in two threads at once that can fail, in
    either and for good, and where Tune is first, mlflow's telemetry is on.
    """

    def __init__(self, mlflow: Mlflow, output: Path | None = None, seconds: float = 5.0):
        """`output`: a folder of runs; those that ended and were not sent are sent too."""
        self.mlflow, self.output, self.seconds = mlflow, output, seconds
        self._paths: list[Path] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def add(self, path: Path) -> None:
        """The folder of a run or sweep, to be sent until it has ended."""
        self._paths.append(path)

    def __enter__(self) -> "Sender":
        with suppress(Exception):  # what is wrong, the first sync says
            _imported()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if not self.mlflow.is_over(self._thread):
            self.mlflow.say_silent()

    def _work(self) -> None:
        if self.output is not None:
            self._paths += unsent(self.output)
        stopping = False
        while not stopping:
            stopping = self._stop.wait(self.seconds)
            given: list[RunFolder] = []
            for path in dict.fromkeys(self._paths):
                with suppress(ConfigError):  # deleted, or not yet begun
                    given.append(RunFolder.open(path))
            failed = self.mlflow.sync_runs(given)
            for run in given:
                if run.status != "running" and run not in failed:
                    self._paths.remove(run.path)


def unsent(folder: Path) -> list[Path]:
    """The runs below a folder that ended, and whose end MLflow has not got."""
    found = []
    for path in sorted(Path(at) for at, _, files in os.walk(folder) if "run.json" in files):
        with suppress(ConfigError):  # damaged, or deleted meanwhile
            run = RunFolder.open(path)
            if run.status not in ("running", _Sent.status_of(run)):
                found.append(path)
    return found


def _imported() -> Any:
    """mlflow, quiet and in its ENVIRONMENT."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    import mlflow

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return mlflow


@dataclass
class _Sent:
    """What MLflow has of a run, as the run's folder remembers it."""

    NAME: ClassVar[str] = "mlflow.json"
    path: Path
    run_id: str
    round: int = 0
    status: Status | None = None

    @classmethod
    def of(cls, run: RunFolder, run_id: str) -> "_Sent":
        """Nothing, if the memory is damaged, or of another store's run, or of rayfl 0.4, which sent no facts."""
        path, known = run.path / cls.NAME, {}
        with suppress(ConfigError):
            known = read_json(path)
        match known:
            case {"run_id": str(of), "round": int(round), "status": status, "version": 2} if of == run_id:
                return cls(path, run_id, round, status)
        return cls(path, run_id)

    @classmethod
    def status_of(cls, run: RunFolder) -> Any:
        """The status that a store has, whichever it is; None if the memory is damaged."""
        with suppress(ConfigError):
            return read_json(run.path / cls.NAME).get("status")

    def save(self) -> None:
        memory = {"version": 2, "run_id": self.run_id, "round": self.round, "status": self.status}
        write_json(self.path, memory)


def _record(found: Any) -> dict[str, Any]:
    """An MLflow run as `RunFolder.record` gives it."""
    status = {theirs: ours for ours, theirs in STATUS.items()}
    tags, metrics = found.data.tags, found.data.metrics
    return {
        "id": tags["rayfl.run_id"],
        "label": tags["label"],
        "title": tags.get("title") or tags["label"],
        "point": tags.get("point", ""),
        "status": status[found.info.status],
        "error": tags.get("error"),
        "sweep": tags.get("rayfl.sweep"),
        "seed": int(tags.get("seed", 0)),
        "params": dict(found.data.params),
        "facts": json.loads(tags[FACTS]),
        "method": tags["label"],
    } | {key.removeprefix("result/"): _whole(value) for key, value in metrics.items() if key.startswith("result/")}


def _whole(value: float) -> float | int:
    """Counts come back as floats."""
    return int(value) if value.is_integer() else value


def _require_store(uri: str) -> None:
    scheme = urlsplit(uri).scheme.partition("+")[0]
    if scheme not in STORES and not entry_points(group="mlflow.tracking_store", name=scheme):
        raise ConfigError(
            f"--tracking-uri: given {public(uri)!r}; allowed: sqlite:///FILE, http://HOST:PORT, https://HOST:PORT, or "
            f"another address of {', '.join(STORES[3:-1])}"
        )


def _database(uri: str) -> Path | None:
    """The file of an sqlite store."""
    path, _, _ = uri.removeprefix("sqlite:///").partition("?")
    return Path(unquote(path)) if uri.startswith("sqlite:") else None


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _batches(items: list, size: int) -> Iterator[list]:
    return (items[i : i + size] for i in range(0, len(items), size))


def _first_line(error: Exception) -> str:
    return f"{error}".partition("\n")[0][:200]
