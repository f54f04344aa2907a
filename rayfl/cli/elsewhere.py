"""`run` and `sweep` with --cluster: submit the command as a job of the cluster and follow its output."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rayfl.cli.output import Shows
from rayfl.cli.shared import notify, warn
from rayfl.config import ConfigError
from rayfl.engine.termination import Terminated

if TYPE_CHECKING:
    from rayfl.clusters.jobs import Work

INTERRUPTED = 130


def words(given: Mapping[str, Sequence[str] | str | bool | None]) -> list[str]:
    """Return options as words of a command line, without those that are not set."""
    found = []
    for option, value in given.items():
        if isinstance(value, bool):
            found += [option] * value
        else:
            found += [f"{option}={text}" for text in ([value] if isinstance(value, str) else value or [])]
    return found


def require_alone(address: str | None, tracking_uri: str | None) -> None:
    """Raise ConfigError for options that do not combine with --cluster.

    A tracking URI can contain a password, and a job's command is visible to all users of the cluster."""
    if address is not None:
        raise ConfigError("--cluster, --address: both are set. Allowed: one of them; a job uses its own cluster")
    if tracking_uri is not None:
        raise ConfigError(
            "--cluster, --tracking-uri: both are set. Allowed: --cluster, with MLFLOW_TRACKING_URI set where the "
            "cluster's head starts Ray"
        )


def elsewhere(work: "Work", cluster: str, folder: Path, shows: Shows) -> None:
    """Submit a job or attach to it, print its output and copy its results into a local folder. Ctrl-C detaches and
    leaves the job running."""
    from rayfl import driver
    from rayfl.clusters import archive
    from rayfl.clusters.jobs import Jobs
    from rayfl.clusters.tunnel import opened
    from rayfl.results.folder import RunFolder

    archive.require_copy(folder)
    driver.check_folder(folder, work.plain, RunFolder.exists(folder), work.command)
    with ExitStack() as stack:
        with shows.busy(f"connecting to {cluster}") as phase:
            jobs = Jobs(cluster, stack.enter_context(opened(cluster)))
            phase("submitting")
            id, is_new = jobs.begin(work)
        if is_new:
            for text in work.left_behind():
                warn(text)
        try:
            shows.notify(f"{'submitted' if is_new else 'attached to'} {id}; Ctrl-C detaches and leaves it running")
            jobs.follow(id, _show_event if shows.json else notify)
            with shows.busy("copying the results"):
                jobs.fetch(work, id, folder)
        except (KeyboardInterrupt, Terminated) as stopped:
            warn(f"detached from {id}, which keeps running. Run the same command to attach again")
            warn(f"to stop it: {jobs.how_to_stop(id)}")
            raise SystemExit(stopped.code if isinstance(stopped, Terminated) else INTERRUPTED) from None
    shows.notify(f"results copied without checkpoints to {folder}")


def _show_event(line: str) -> None:
    # a job merges stdout and stderr; only events belong on stdout
    print(line, file=sys.stdout if line.startswith("{") else sys.stderr, flush=True)
