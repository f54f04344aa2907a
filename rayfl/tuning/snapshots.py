"""Ray Tune's snapshots of a stage: what a resume needs of them, and Tune does not check.

Tune writes `tuner.pkl`, and every ten seconds or more the states of the trials and of the searcher, each over the one
before: a process that is killed meanwhile leaves parts of them. The newest snapshot is therefore kept in one file in
the stage's folder, which is replaced at once, and a resume puts its files where Tune reads them.
"""

import io
import zipfile
from pathlib import Path, PurePosixPath

import cloudpickle
from pyarrow.fs import FileSelector, FileSystem

from rayfl.config import ConfigError
from rayfl.tuning.following import Following

TRIALS, FOLLOWING, SEARCHER = "experiment_state-", Following.CKPT_FILE_TMPL.partition("{}")[0], "search_gen_state-"
"""Beginnings of the names of files, before the time of a session's start: the states of the trials, of rayfl's list of
trials, and of other searchers."""
TUNER = "tuner.pkl"
KEPT = "snapshot.zip"
"""File in a stage's folder: the files of the newest snapshot."""
PLACE = "storage"
"""File in a stage's folder: the place of its snapshots, if it is another one."""


def exist(stage: Path, place: str) -> bool:
    """Return whether there is a snapshot. A process that was killed at the start may have left a part of one."""
    found = names(place)
    kinds = [any(name.startswith(kind) for name in found) for kind in (TRIALS, FOLLOWING, SEARCHER)]
    return (bool(found) and (stage / KEPT).exists()) or (kinds[0] and any(kinds[1:]))


def note_place(stage: Path, place: str) -> None:
    if place != str(stage):
        (stage / PLACE).write_text(place, encoding="utf-8")


def require_place(stage: Path, place: str) -> None:
    """Raise ConfigError for a stage that was started with its snapshots in another place."""
    noted = stage / PLACE
    before = noted.read_text(encoding="utf-8") if noted.exists() else str(stage)
    if place != before and (noted.exists() or exist(stage, before)):
        raise ConfigError(
            f"--storage: the trials' checkpoints are in {before}, and this command looks for them in {place}. Allowed: "
            "the --storage, or none, of the first start"
        )


def packed(place: str, staging: Path) -> bytes:
    """Return the files of a snapshot as a zip file: the staged ones, and the one that Tune writes in `place` alone."""
    found = {file.name: file.read_bytes() for file in staging.iterdir() if is_read(file.name)}
    if TUNER not in found:
        at, path = FileSystem.from_uri(place)
        with at.open_input_stream(f"{path}/{TUNER}") as stream:
            found[TUNER] = stream.readall()
    with zipfile.ZipFile(file := io.BytesIO(), "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in found.items():
            archive.writestr(name, data)
    return file.getvalue()


def restore(stage: Path, place: str) -> None:
    """Replace the files that Tune reads in `place` by those of the kept snapshot. Raise ConfigError for a damaged one,
    and what unpickling raises for classes of other versions, for which Tune would start all trials again."""
    try:
        with zipfile.ZipFile(stage / KEPT) as archive:
            found = {name: archive.read(name) for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{stage / KEPT}: Ray Tune's snapshot is damaged ({error}). Hint: restore a copy of the folder, or remove "
            "the folder; all trials of this stage then start again"
        ) from None
    for kind in (TUNER, FOLLOWING):
        for name in sorted(name for name in found if name.startswith(kind))[-1:]:
            cloudpickle.loads(found[name])
    to, path = FileSystem.from_uri(place)
    for name, data in found.items():
        with to.open_output_stream(f"{path}/{name}") as stream:
            stream.write(data)
    for name in set(names(place)) - found.keys():
        to.delete_file(f"{path}/{name}")


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
