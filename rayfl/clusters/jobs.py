"""A command of rayfl as a Ray job on a cluster, from a laptop that may be closed meanwhile.

A job is named by what runs. So the same command finds it again: it attaches to a job that runs, fetches the results of
one that is done, and goes on with one that failed or was stopped. What the cluster needs to know of itself (where runs
are kept, MLflow and its password, Ray's token) is in its own environment, and nothing of that is sent.

Ray is imported inside functions, because it reads RAY_AUTH_MODE when it is.
"""

import asyncio
import hashlib
import io
import json
import logging
import os
import re
import shlex
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfl.clusters import archive
from rayfl.clusters.tunnel import is_url
from rayfl.config import ConfigError

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

OUTPUT = (
    "${RAYFL_OUTPUT:?is not set on this cluster; set it to a folder that all of its nodes see, where Ray is started}"
)
"""Of the cluster, as its shell finds it."""
STOP_SECONDS = 30
"""How long a job that is stopped has for its checkpoint: more than `termination.GRACE_SECONDS`."""
END_SECONDS = 30.0
"""How long after its last line a job may go on to be called ended."""
FETCH_SECONDS = 600.0
LOOK_SECONDS = 0.5
BAD_INPUT = 2
"""Exit code of a command that was refused before it did anything."""
HEADER = "Running entrypoint for job"
"""With this line of Ray's own a job's output begins."""
NOT_OURS = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
"""Variables by which Ray would go to another cluster than the one that is asked for."""

CHATTY = ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", "ray._private.runtime_env.packaging")
"""Of Ray's client: what it uploads, and that a connection ended as it should."""


@dataclass(frozen=True)
class Work:
    """A command that was checked here, and what it needs there."""

    command: str
    """sweep or run."""
    config: Path
    options: Sequence[str]
    """As on the command line, without those that say where."""
    name: str
    """The folder of what it makes, below the output folder."""
    plain: Mapping[str, Any]
    """What runs, with every default."""
    packages: bytes = b""
    """The user's own (`plugins.packed`)."""
    resume: bool = False
    shows: Sequence[str] = ()
    """Options that say how it is shown."""

    @property
    def id(self) -> str:
        """What its jobs are called, but for their number: the folder's name and a digest of what runs."""
        text = json.dumps([self.command, self.name, self.plain], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode() + self.packages).hexdigest()[:8]
        return f"rayfl-{re.sub(r'[^A-Za-z0-9_.-]+', '-', self.name)}-{digest}"

    def entrypoint(self, resume: bool) -> str:
        """The line for the cluster's shell. `resume`: if there is something to go on with."""
        name = f"--name={self.name}"
        words = ["python", "-m", "rayfl", self.command, self.config.name, *self.options, *self.shows, name]
        if self.resume:
            words.append("--resume")
        # an attempt that ended before it made its folder left nothing to go on with
        begun = f'"{OUTPUT}"/{shlex.quote(self.name)}/run.json'
        again = f"$(test -e {begun} && echo --resume)" if resume and not self.resume else ""
        return f'{shlex.join(words)} --output="{OUTPUT}" {again}'.rstrip()

    def write(self, folder: Path) -> None:
        """What is sent: the file and the packages."""
        with zipfile.ZipFile(io.BytesIO(self.packages or _EMPTY)) as file:
            file.extractall(folder)
        (folder / self.config.name).write_bytes(self.config.read_bytes())

    def left_behind(self) -> Iterator[str]:
        """Sentences about folders and files of this machine that it names: they are not sent."""
        for path, text in _texts(self.plain):
            if ("/" in text or text.startswith("~")) and Path(text).expanduser().exists():
                yield f"{path}: {text} is on this machine, and is not sent: the cluster needs it at the same place"


_EMPTY = b"PK\x05\x06" + bytes(18)
"""An archive with nothing in it."""


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts(part, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part, path)


def show_token() -> None:
    """A token that is there is shown to the cluster. Without a word of the user Ray keeps it to itself."""
    named = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if named or Path("~/.ray/auth_token").expanduser().exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


class Jobs:
    """The jobs of a cluster."""

    def __init__(self, cluster: str, url: str):
        """`cluster`: as the user named it. `url`: where its Jobs API is. A ConfigError where none answers, and where
        it refuses the token."""
        self.cluster, self.url = cluster, url
        self.client = self._connected()

    def _connected(self) -> "JobSubmissionClient":
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient

        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            with _without(NOT_OURS):
                return JobSubmissionClient(self.url)
        except AuthenticationError as error:
            why = "refuses this token" if "Invalid" in str(error) else "asks for a token, and got none"
            raise ConfigError(
                f"--cluster {self.cluster}: it {why}; set RAY_AUTH_MODE=token, and put the cluster's token into "
                "~/.ray/auth_token or RAY_AUTH_TOKEN"
            ) from None
        except Exception as error:
            raise ConfigError(
                f"--cluster {self.cluster}: no Ray Jobs API answers there ({str(error).splitlines()[0]}); allowed: a "
                "head that was started with its dashboard, through a tunnel that is open"
            ) from None

    def begin(self, work: Work) -> tuple[str, bool]:
        """The job that does the work, and whether it is new: else it runs, or is done."""
        earlier = self._of(work)
        last = earlier[max(earlier)] if earlier else None
        if last is not None and last.status in ("PENDING", "RUNNING", "SUCCEEDED"):
            return str(last.submission_id), False
        resume = any(job.driver_exit_code != BAD_INPUT for job in earlier.values())
        with tempfile.TemporaryDirectory(prefix="rayfl-") as folder:
            work.write(Path(folder))
            environment = {"working_dir": folder, "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}}
            id = f"{work.id}-{max(earlier, default=0) + 1}"
            self.client.submit_job(entrypoint=work.entrypoint(resume), submission_id=id, runtime_env=environment)
        return id, True

    def _of(self, work: Work) -> "dict[int, JobDetails]":
        """All jobs of this work, by their number."""
        named = re.compile(rf"{re.escape(work.id)}-(\d+)")
        matches = ((job, named.fullmatch(job.submission_id or "")) for job in self.client.list_jobs())
        return {int(match[1]): job for job, match in matches if match}

    def follow(self, id: str, show: Callable[[str], None]) -> None:
        """Shows the lines that a job printed and prints, until it ends. A RuntimeError if it did not end well, or if
        the connection was lost."""
        try:
            asyncio.run(self._tail(id, show))
            job = self._ended(id, END_SECONDS)
        except Exception as error:
            raise RuntimeError(
                f"the connection to {self.cluster} was lost ({str(error) or type(error).__name__}); {id} goes on, and "
                "the same command attaches to it again"
            ) from error
        if job.status != "SUCCEEDED":
            why = (job.message or "").partition(", last available logs")[0].strip().rstrip(".")
            raise RuntimeError(f"the job {id} {job.status.lower()}: {why}; the same command goes on with it")

    async def _tail(self, id: str, show: Callable[[str], None]) -> None:
        begun, rest = False, ""
        async for text in self.client.tail_job_logs(id):
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                if begun:
                    show(line)
                begun = begun or line.startswith(HEADER)
        if rest:
            show(rest)

    def _ended(self, id: str, seconds: float) -> "JobDetails":
        """A job that ended. A TimeoutError if it does not in this time."""
        end = time.monotonic() + seconds
        while not (job := self.client.get_job_info(id)).status.is_terminal():
            if time.monotonic() > end:
                raise TimeoutError(f"{id} is still {job.status.lower()} after {seconds:g} seconds")
            time.sleep(LOOK_SECONDS)
        return job

    def fetch(self, work: Work, id: str, folder: Path) -> None:
        """Copies what a job has made into a folder here, without checkpoints. A RuntimeError says where it is if that
        does not succeed."""
        try:
            archive.unpack(self._archive(work), folder, id)
        except Exception as error:
            raise RuntimeError(
                f"{id} is done, and its results could not be copied ({str(error) or type(error).__name__}); they are "
                f"in {work.name} below the cluster's RAYFL_OUTPUT, and the same command copies them"
            ) from error

    def _archive(self, work: Work) -> bytes:
        there = f'"{OUTPUT}"/{shlex.quote(work.name)}'
        copying = self.client.submit_job(entrypoint=f"python -m rayfl.clusters.archive {there}")
        self._ended(copying, FETCH_SECONDS)
        printed = self.client.get_job_logs(copying)
        self.client.delete_job(copying)
        if found := archive.found(printed):
            return found
        raise RuntimeError((printed.strip().splitlines() or ["it printed nothing"])[-1][:200])

    def how_to_stop(self, id: str) -> str:
        if is_url(self.cluster):
            return f"ray job stop --address {self.url} {id}"
        return f"ray exec {shlex.quote(self.cluster)} {shlex.quote(f'ray job stop {id}')}"


@contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    """Within it these variables are not set."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
