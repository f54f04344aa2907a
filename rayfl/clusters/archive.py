"""What comes back of a run or a sweep: its folder without checkpoints, in one line that a job prints.

`python -m rayfl.clusters.archive FOLDER` prints it. Ray's Jobs API gives what a job printed, and so needs no more than
the connection that is there: `ray rsync-down` would take the checkpoints along, and wants to know where the folder is.
"""

import base64
import hashlib
import io
import shutil
import sys
import zipfile
from pathlib import Path

from rayfl.config import ConfigError
from rayfl.results.files import write_json
from rayfl.results.folder import RunFolder

MARK = "rayfl-archive"
"""What the line begins with; the archive's SHA-256 and the archive follow."""
COPIED = "copied.json"
"""Marks a copy: the job that it came from."""
STAYS = {"checkpoints", "tune", "mlflow.json", "lock"}
"""Files and folders of a run that are of use where it ran alone."""


def packed(folder: Path) -> bytes:
    """A run's folder as a zip archive. A ConfigError where there is none."""
    RunFolder.open(folder)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.is_file() and not STAYS & set(name.parts):
                file.write(path, str(name))
    return archive.getvalue()


def line_of(archive: bytes) -> str:
    return f"{MARK} {hashlib.sha256(archive).hexdigest()} {base64.b64encode(archive).decode()}"


def found(printed: str) -> bytes | None:
    """The archive in what a job printed; None if it is not there, or not whole."""
    for line in printed.splitlines():
        mark, _, rest = line.partition(" ")
        if mark == MARK:
            digest, _, text = rest.partition(" ")
            archive = base64.b64decode(text)
            return archive if hashlib.sha256(archive).hexdigest() == digest else None
    return None


def require_copy(folder: Path) -> None:
    """Refuses a folder with a run that was made here: what comes back would be mixed with it."""
    if RunFolder.exists(folder) and not (folder / COPIED).exists():
        raise ConfigError(
            f"{folder}: holds a run of this machine, and what comes back from the cluster would be written over it; "
            "give another --name or --output"
        )


def unpack(archive: bytes, folder: Path, job: str) -> None:
    """Writes a copy into a folder, over an older copy of the same run, or in place of one of another."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        if RunFolder.exists(folder):
            new = RunFolder.model_validate_json(file.read("run.json"))
            if RunFolder.open(folder).id != new.id:
                shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # first: what is interrupted half-way is a copy too
        write_json(folder / COPIED, {"job": job})
        file.extractall(folder)


if __name__ == "__main__":
    print(line_of(packed(Path(sys.argv[1]))))
