"""Ray Tune's snapshots of a stage: what of them a resume needs, and Tune does not check.

Tune writes `tuner.pkl`, and every ten seconds or more the states of the trials and of the searcher, each over the one
before.
"""

import json
from pathlib import PurePosixPath

import cloudpickle
from pyarrow.fs import FileSelector, FileSystem, FileType

from rayfl.config import ConfigError
from rayfl.tuning.following import Following

TRIALS, FOLLOWING = "experiment_state-", Following.CKPT_FILE_TMPL.partition("{}")[0]
"""Beginnings of the names of files; the time of a session's start follows."""


def require_whole(stage: str) -> None:
    """Raise ConfigError for a snapshot that Tune cannot read, or of which one file is older than the other: Tune would
    start all trials again, or wait forever. Raises what unpickling raises for classes of other versions."""
    files, path = FileSystem.from_uri(stage)
    names = sorted(file.base_name for file in files.get_file_info(FileSelector(path)) if file.type == FileType.File)

    def content(name: str) -> bytes:
        with files.open_input_stream(f"{path}/{name}") as stream:
            return stream.readall()

    reading = "tuner.pkl"
    try:
        cloudpickle.loads(content(reading))
        reading = max((name for name in names if name.startswith(TRIALS)), default=f"{TRIALS}*.json")
        made = {json.loads(trial)["trial_id"] for trial, _ in json.loads(content(reading))["trial_data"]}
        for reading in [name for name in names if name.startswith(FOLLOWING)][-1:]:
            known = cloudpickle.loads(content(reading)).get("rows", made)
            if made != set(known):
                raise ValueError("it is not of the same time as the state of the trials")
    except (ImportError, AttributeError):
        raise
    except Exception as error:
        raise ConfigError(
            f"{stage}/{reading}: Ray Tune's snapshot is damaged ({error}). Hint: restore a copy of the folder, or "
            "remove the folder; all trials of this stage then start again"
        ) from None


def fill_gaps(stage: str) -> None:
    """Make empty folders for checkpoints that were removed after Tune's last snapshot: Tune removes them again, and
    fails if one is absent."""
    files, path = FileSystem.from_uri(stage)
    found = (PurePosixPath(file.path) for file in files.get_file_info(FileSelector(path, recursive=True)))
    newest: dict[PurePosixPath, int] = {}
    for folder in found:
        if folder.match("*/checkpoint_*") and folder.parent.parent == PurePosixPath(path):
            newest[folder.parent] = max(newest.get(folder.parent, 0), int(folder.name.removeprefix("checkpoint_")))
    for trial, number in newest.items():
        for gone in range(number):
            files.create_dir(str(trial / f"checkpoint_{gone:06d}"))
