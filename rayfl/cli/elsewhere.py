"""`run` and `sweep` with --cluster: the command as a job of a cluster, shown here."""

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
    """Options as they stand on a command line, without those that were not given."""
    found = []
    for option, value in given.items():
        if isinstance(value, bool):
            found += [option] * value
        else:
            found += [f"{option}={text}" for text in ([value] if isinstance(value, str) else value or [])]
    return found


def require_alone(address: str | None, tracking_uri: str | None) -> None:
    """Refuses what is a matter of the cluster. A URI may have a password in it, and everybody sees a job's command."""
    if address is not None:
        raise ConfigError("--cluster, --address: given both; allowed: one of them, because a job knows its cluster")
    if tracking_uri is not None:
        raise ConfigError(
            "--cluster, --tracking-uri: given both; allowed: MLFLOW_TRACKING_URI where the cluster's head starts Ray"
        )


def elsewhere(work: "Work", cluster: str, folder: Path, shows: Shows) -> None:
    """Begins a job or attaches to it, shows what it prints, and copies its results into a folder here. Whoever leaves
    before does not stop it."""
    from rayfl import driver
    from rayfl.clusters import archive
    from rayfl.clusters.jobs import Jobs
    from rayfl.clusters.tunnel import opened
    from rayfl.results.folder import RunFolder

    archive.require_copy(folder)
    driver.check_folder(folder, work.plain, RunFolder.exists(folder))
    with ExitStack() as held:
        with shows.busy(f"opening a way to {cluster}") as phase:
            jobs = Jobs(cluster, held.enter_context(opened(cluster)))
            phase("submitting")
            id, is_new = jobs.begin(work)
        if is_new:
            for text in work.left_behind():
                warn(text)
        try:
            shows.notify(f"{'submitted' if is_new else 'attached to'} {id}; Ctrl-C leaves it, and does not stop it")
            jobs.follow(id, _show_event if shows.json else notify)
            with shows.busy("copying the results"):
                jobs.fetch(work, id, folder)
        except (KeyboardInterrupt, Terminated) as stopped:
            warn(f"left {id}, which goes on; the same command attaches to it again; {jobs.how_to_stop(id)} stops it")
            raise SystemExit(stopped.code if isinstance(stopped, Terminated) else INTERRUPTED) from None
    shows.notify(f"a copy of it without checkpoints in {folder}")


def _show_event(line: str) -> None:
    """A job's two outputs are one, and events alone go to stdout."""
    print(line, file=sys.stdout if line.startswith("{") else sys.stderr, flush=True)
