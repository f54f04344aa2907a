"""Ray Tune's snapshots of a stage: what a resume needs of them, and Tune does not check.

Tune writes `tuner.pkl`, and every ten seconds or more the states of the trials and of the searcher, each over the one
before.
"""

import json
from pathlib import Path, PurePosixPath

import cloudpickle
from pyarrow.fs import FileSelector, FileSystem

from rayfl.config import ConfigError
from rayfl.tuning.following import Following

TRIALS, FOLLOWING, SEARCHER = "experiment_state-", Following.CKPT_FILE_TMPL.partition("{}")[0], "search_gen_state-"
"""Beginnings of the names of files, before the time of a session's start: the states of the trials, of rayfl's list of
trials, and of other searchers."""
TUNER = "tuner.pkl"
PLACE = "storage"
"""File in a stage's folder: the place of its snapshots, if it is another one."""


def exist(place: str) -> bool:
    """Return whether there is a snapshot. A process that was killed at the start may have left a part of one."""
    return bool(_states(place, TRIALS) and (_states(place, FOLLOWING) or _states(place, SEARCHER)))


def note_place(stage: Path, place: str) -> None:
    if place != str(stage):
        (stage / PLACE).write_text(place, encoding="utf-8")


def require_place(stage: Path, place: str) -> None:
    """Raise ConfigError for a stage that was started with its snapshots in another place."""
    noted = stage / PLACE
    before = noted.read_text(encoding="utf-8") if noted.exists() else str(stage)
    if place != before and (noted.exists() or exist(before)):
        raise ConfigError(
            f"--storage: the trials' checkpoints are in {before}, and this command looks for them in {place}. Allowed: "
            "the --storage, or none, of the first start"
        )


def require_whole(place: str) -> None:
    """Raise ConfigError for a snapshot that Tune cannot read, or of which one file is older than the other: Tune would
    start all trials again, or wait forever. Raises what unpickling raises for classes of other versions."""
    reading = TUNER
    try:
        cloudpickle.loads(content(place, reading))
        reading = _states(place, TRIALS)[-1]
        made = {json.loads(trial)["trial_id"] for trial, _ in json.loads(content(place, reading))["trial_data"]}
        for reading in _states(place, FOLLOWING)[-1:]:
            if made != set(cloudpickle.loads(content(place, reading)).get("rows", made)):
                raise ValueError("it is not of the same time as the state of the trials")
    except (ImportError, AttributeError):
        raise
    except Exception as error:
        raise ConfigError(
            f"{place}/{reading}: Ray Tune's snapshot is damaged ({error}). Hint: restore a copy of the folder, or "
            "remove the folder; all trials of this stage then start again"
        ) from None


def _states(place: str, kind: str) -> list[str]:
    """Return the names of the files of one kind, one per session, oldest first."""
    files, path = FileSystem.from_uri(place)
    found = files.get_file_info(FileSelector(path, allow_not_found=True))
    return sorted(file.base_name for file in found if file.base_name.startswith(kind))


def clear(place: str) -> None:
    """Remove what a process left that was killed before its first snapshot of a trial."""
    files, path = FileSystem.from_uri(place)
    files.delete_dir_contents(path, missing_dir_ok=True)


def is_read(name: str) -> bool:
    """Return whether Tune reads a file of this name when it resumes."""
    return name.endswith((".json", ".pkl"))


def names(place: str) -> list[str]:
    """Return the names of all files of a snapshot that Tune reads, besides those of trials."""
    files, path = FileSystem.from_uri(place)
    found = files.get_file_info(FileSelector(path, allow_not_found=True))
    return sorted(file.base_name for file in found if is_read(file.base_name))


def content(place: str, name: str) -> bytes:
    files, path = FileSystem.from_uri(place)
    with files.open_input_stream(f"{path}/{name}") as stream:
        return stream.readall()


def fill_gaps(place: str) -> None:
    """Make empty folders for checkpoints that were removed after Tune's last snapshot: Tune removes them again, and
    fails if one is absent."""
    files, path = FileSystem.from_uri(place)
    found = (PurePosixPath(file.path) for file in files.get_file_info(FileSelector(path, recursive=True)))
    newest: dict[PurePosixPath, int] = {}
    for folder in found:
        if folder.match("*/checkpoint_*") and folder.parent.parent == PurePosixPath(path):
            newest[folder.parent] = max(newest.get(folder.parent, 0), int(folder.name.removeprefix("checkpoint_")))
    for trial, number in newest.items():
        for gone in range(number):
            files.create_dir(str(trial / f"checkpoint_{gone:06d}"))
