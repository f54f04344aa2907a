"""Connection to a tracking server, or to the embedded store of an output folder, with timeouts."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote, unquote, urlsplit

from rayfl.config import ConfigError
from rayfl.config.plain import public

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Set before mlflow is imported unless the user has set them. Failed requests are repeated by the next sync."""

STORES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks", "databricks-uc", "uc", "file", "")
"""Schemes of MLflow's own stores; the last is a plain path. Plugins of MLflow add others."""

T = TypeVar("T")


def default_uri(output: str | Path) -> str:
    """Return the URI of an output folder's embedded store; its artifacts are in `artifacts/` next to it."""
    return _sqlite(Path(output).resolve() / "mlflow.db")


def _sqlite(file: Path) -> str:
    return f"sqlite:///{str(file).replace('%', quote('%')).replace('?', quote('?'))}"


def imported() -> Any:
    """Import mlflow with `ENVIRONMENT` and without its log messages."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    import mlflow

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return mlflow


class Store:
    """A tracking server. Nothing is imported or connected before the first call. Use it from one thread at a time.
    Raise ConfigError for a URI without a store of MLflow."""

    SILENT_SECONDS: ClassVar[float] = 15.0
    """Seconds without an answer of MLflow after which a command stops waiting. MLflow's own timeout is 10."""

    def __init__(self, uri: str):
        _require_known(uri)
        self.uri = uri
        self.answers = 0
        """Number of answered calls."""

    def __str__(self) -> str:
        return public(self.uri)

    @property
    def database(self) -> Path | None:
        """File of an sqlite store."""
        path, _, _ = self.uri.removeprefix("sqlite:///").partition("?")
        return Path(unquote(path)) if self.uri.startswith("sqlite:") else None

    def require(self) -> None:
        """Raise ConfigError for an sqlite store without a file."""
        if self.database is not None and not self.database.exists():
            raise ConfigError(f"{self.database}: the file does not exist. Hint: run a sweep first")

    @cached_property
    def client(self) -> Any:
        """MLflow's client; it raises the errors of mlflow."""
        if self.database is not None and not self.database.exists():
            _create(self.database)
        return _connected(self.uri, self.database)

    def call(self, verb: str, *arguments: Any, **options: Any) -> Any:
        found = getattr(self.client, verb)(*arguments, **options)
        self.answers += 1
        return found

    def search(self, experiments: Sequence[str], wanted: str, view: str = "active_only") -> Iterator[Any]:
        """Iterate over the runs in these experiments (ids), newest first."""
        from mlflow.entities import ViewType

        token = None
        while True:
            page = self.call("search_runs", list(experiments), wanted, ViewType.from_string(view), page_token=token)
            yield from page
            if not (token := page.token):
                return

    def experiments(self, wanted: str | None = None) -> list[Any]:
        found, token = [], None
        while True:
            page = self.call("search_experiments", filter_string=wanted, page_token=token)
            found += page
            if not (token := page.token):
                return found

    def patiently(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Raise ConfigError if MLflow stops answering, even if single bytes arrive."""
        imported()
        ended: Future[T] = Future()

        def settle() -> None:
            try:
                ended.set_result(work())
            except BaseException as error:
                ended.set_exception(error)

        # the end of the process would wait for threads of a pool
        thread = threading.Thread(target=settle, name="mlflow", daemon=True)
        thread.start()
        if not self.is_over(thread):
            raise ConfigError(f"{self}: MLflow has not answered for {self.SILENT_SECONDS:g} s. Hint: try again later")
        return ended.result()

    def is_over(self, thread: threading.Thread) -> bool:
        """Wait for a thread that uses this store as long as MLflow answers. Return whether the thread ended."""
        answers = -1
        while thread.is_alive() and answers != self.answers:
            answers = self.answers
            thread.join(self.SILENT_SECONDS)
        return not thread.is_alive()


def _create(database: Path) -> None:
    """Create a database elsewhere and move it, because MLflow never completes one whose creation was interrupted. It
    is written to the disk once, and not after each of MLflow's migrations, which takes seconds."""
    from sqlalchemy import Engine, event

    def unsynced(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    database.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".mlflow-", dir=database.parent) as folder:
        made = Path(folder, "new.db")
        event.listen(Engine, "connect", unsynced)
        try:
            _connected(_sqlite(made), made)
        finally:
            event.remove(Engine, "connect", unsynced)
        with made.open("rb") as file:
            os.fsync(file.fileno())
        # another process may have been faster
        if not database.exists():
            made.rename(database)


def _connected(uri: str, database: Path | None) -> Any:
    client = imported().MlflowClient(tracking_uri=uri, registry_uri=uri)
    if database is not None:
        # MLflow also creates a folder of the quoted path
        quoted = Path(uri.removeprefix("sqlite:///")).parent
        if quoted != database.parent:
            with suppress(OSError):
                os.removedirs(quoted)
    return client


def first_line(error: Exception) -> str:
    """Return the first line of an error, without passwords of addresses."""
    return public(f"{error}".partition("\n")[0])[:200]


def _require_known(uri: str) -> None:
    scheme = urlsplit(uri).scheme.partition("+")[0]
    if scheme not in STORES and not entry_points(group="mlflow.tracking_store", name=scheme):
        raise ConfigError(
            f"--tracking-uri: {public(uri)!r} is not valid. Allowed: sqlite:///FILE, http://HOST:PORT, "
            f"https://HOST:PORT, or another address of {', '.join(STORES[3:-1])}"
        )
