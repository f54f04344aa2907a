"""A command of rayfl as a Ray job on a cluster.

A job's name is derived from its work, so the same command finds it again: it attaches to a running job, fetches the
results of a finished one, and resumes one that failed or was stopped. The cluster's own settings (output folder, MLflow
and its password, Ray's token) are in its environment and are never sent.

Ray is imported inside functions, because it reads RAY_AUTH_MODE at import.
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
from typing import TYPE_CHECKING, Any, Literal

from rayfl.clusters import archive
from rayfl.clusters.tunnel import is_url
from rayfl.config import ConfigError, RunFailed

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

OUTPUT = (
    "${RAYFL_OUTPUT:?is not set on this cluster; set it to a folder that all of its nodes see, where Ray is started}"
)
"""Output folder of the cluster, expanded by its shell."""
STOP_SECONDS = 30
"""Time for a stopped job's checkpoint: more than `termination.GRACE_SECONDS`."""
END_SECONDS = 30.0
"""Time limit for a job's end after its last line."""
FETCH_SECONDS = 600.0
LOOK_SECONDS = 0.5
BAD_INPUT = 2
"""Exit code of a command with invalid input."""
HEADER = "Running entrypoint for job"
"""Ray's first line of a job's output."""
NOT_OURS = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
"""Variables that would make Ray use another cluster."""

CHATTY = ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", "ray._private.runtime_env.packaging")
"""Loggers of Ray's client that report uploads and closed connections."""


@dataclass(frozen=True)
class Work:
    """A checked command with everything that it needs on the cluster."""

    command: Literal["run", "sweep"]
    config: Path
    options: Sequence[str]
    """Options of the command line, without those for places."""
    name: str
    """Folder name under the output folder."""
    plain: Mapping[str, Any]
    """Complete configuration, with defaults."""
    packages: bytes = b""
    """The user's own packages (`plugins.packed`)."""
    resume: bool = False
    shows: Sequence[str] = ()
    """Options of the output."""

    @property
    def id(self) -> str:
        """Name of its jobs without their number: the folder's name and a digest of the work."""
        text = json.dumps([self.command, self.name, self.plain], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode() + self.packages).hexdigest()[:8]
        return f"rayfl-{re.sub(r'[^A-Za-z0-9_.-]+', '-', self.name)}-{digest}"

    def entrypoint(self, resume: bool) -> str:
        """Return the line for the cluster's shell. `resume`: resume if the run's folder exists."""
        name = f"--name={self.name}"
        words = ["python", "-m", "rayfl", self.command, self.config.name, *self.options, *self.shows, name]
        if self.resume:
            words.append("--resume")
        # an attempt that ended before it made its folder cannot be resumed
        begun = f'"{OUTPUT}"/{shlex.quote(self.name)}/run.json'
        again = f"$(test -e {begun} && echo --resume)" if resume and not self.resume else ""
        return f'{shlex.join(words)} --output="{OUTPUT}" {again}'.rstrip()

    def write(self, folder: Path) -> None:
        """Write the configuration file and the packages, which are sent."""
        with zipfile.ZipFile(io.BytesIO(self.packages or _EMPTY)) as file:
            file.extractall(folder)
        (folder / self.config.name).write_bytes(self.config.read_bytes())

    def left_behind(self) -> Iterator[str]:
        """Yield a warning for every file or folder of this machine in the configuration, because they are not sent."""
        for path, text in _texts(self.plain):
            if ("/" in text or text.startswith("~")) and Path(text).expanduser().exists():
                yield f"{path}: {text} is not sent to the cluster. Hint: put it at the same place there"


_EMPTY = b"PK\x05\x06" + bytes(18)
"""Empty archive."""


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
    """Use an existing token for the cluster, which Ray does only if RAY_AUTH_MODE is set."""
    named = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if named or Path("~/.ray/auth_token").expanduser().exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


class Jobs:
    """The jobs of a cluster."""

    def __init__(self, cluster: str, url: str):
        """Connect to the Jobs API at `url`. `cluster`: its name in messages. Raise ConfigError if it does not answer or
        refuses the token."""
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
            why = "the cluster refuses this token" if "Invalid" in str(error) else "the cluster requires a token"
            raise ConfigError(
                f"--cluster {self.cluster}: {why}. Hint: set RAY_AUTH_MODE=token, and put the cluster's token into "
                "~/.ray/auth_token or RAY_AUTH_TOKEN"
            ) from None
        except Exception as error:
            raise ConfigError(
                f"--cluster {self.cluster}: no Ray Jobs API answers ({str(error).splitlines()[0]}). Allowed: a head "
                "started with its dashboard, through an open tunnel"
            ) from None

    def begin(self, work: Work) -> tuple[str, bool]:
        """Return the job of the work, and whether it was submitted now."""
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
        """Return all jobs of this work, by number."""
        named = re.compile(rf"{re.escape(work.id)}-(\d+)")
        matches = ((job, named.fullmatch(job.submission_id or "")) for job in self.client.list_jobs())
        return {int(match[1]): job for job, match in matches if match}

    def follow(self, id: str, show: Callable[[str], None]) -> None:
        """Show a job's output until it ends. Raise a RunFailed if it fails or the connection is lost."""
        try:
            asyncio.run(self._tail(id, show))
            job = self._ended(id, END_SECONDS)
        except Exception as error:
            raise RunFailed(
                f"the connection to {self.cluster} was lost ({str(error) or type(error).__name__}). {id} keeps "
                "running; run the same command to attach again"
            ) from error
        if job.status != "SUCCEEDED":
            why = (job.message or "").partition(", last available logs")[0].strip().rstrip(".")
            raise RunFailed(f"the job {id} {job.status.lower()}: {why}. Run the same command to resume it")

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
        """Wait for a job's end and return it. Raise TimeoutError after `seconds`."""
        end = time.monotonic() + seconds
        while not (job := self.client.get_job_info(id)).status.is_terminal():
            if time.monotonic() > end:
                raise TimeoutError(f"{id} is still {job.status.lower()} after {seconds:g} seconds")
            time.sleep(LOOK_SECONDS)
        return job

    def fetch(self, work: Work, id: str, folder: Path) -> None:
        """Copy a job's results, without checkpoints, into a local folder. Raise a RunFailed with their place if that
        fails."""
        try:
            archive.unpack(self._archive(work), folder, id)
        except Exception as error:
            raise RunFailed(
                f"{id} is done, but its results could not be copied ({str(error) or type(error).__name__}). They are "
                f"in {work.name} below the cluster's RAYFL_OUTPUT; run the same command to copy them"
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
    """Unset environment variables within the block."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
