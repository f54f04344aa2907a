"""Copy of a run's or sweep's folder from a cluster, without checkpoints, as one line printed by a job.

`python -m rayfl.clusters.archive FOLDER` prints it. Ray's Jobs API returns a job's output through the existing
connection; `ray rsync-down` would copy checkpoints too and needs the path of the folder.
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
"""Start of the line, followed by the archive's SHA-256 and the archive."""
COPIED = "copied.json"
"""File that marks a copy and names its job."""
STAYS = {"checkpoints", "client_states", "tune", "mlflow.json", "lock"}
"""Files and folders that are not copied."""


def packed(folder: Path) -> bytes:
    """Return a run's folder as a zip archive, without links. Raise ConfigError if it is not a run."""
    RunFolder.open(folder)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.is_file() and not path.is_symlink() and not STAYS & set(name.parts):
                file.write(path, str(name))
    return archive.getvalue()


def line_of(archive: bytes) -> str:
    return f"{MARK} {hashlib.sha256(archive).hexdigest()} {base64.b64encode(archive).decode()}"


def found(printed: str) -> bytes | None:
    """Return the archive in a job's output, or None if it is missing or incomplete."""
    for line in printed.splitlines():
        mark, _, rest = line.partition(" ")
        if mark == MARK:
            digest, _, text = rest.partition(" ")
            archive = base64.b64decode(text)
            return archive if hashlib.sha256(archive).hexdigest() == digest else None
    return None


def require_copy(folder: Path) -> None:
    """Raise ConfigError for a folder with a run of this machine, which would be overwritten."""
    if RunFolder.exists(folder) and not (folder / COPIED).exists():
        raise ConfigError(
            f"{folder}: the folder has a run of this machine, which the cluster's results would overwrite. Hint: "
            "choose another --name or --output"
        )


def unpack(archive: bytes, folder: Path, job: str) -> None:
    """Write a copy into a folder, over an older copy of the same run, or replacing that of another run."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        if RunFolder.exists(folder):
            new = RunFolder.model_validate_json(file.read("run.json"))
            if RunFolder.open(folder).id != new.id:
                shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in file.namelist():
            _require_no_link(folder, Path(name))
        # first, so that an interrupted copy is marked too
        write_json(folder / COPIED, {"job": job})
        file.extractall(folder)


def _require_no_link(folder: Path, name: Path) -> None:
    """Raise ConfigError if a file would be written through a link inside a folder."""
    for place in (name, *name.parents[:-1]):
        if (folder / place).is_symlink():
            raise ConfigError(f"{folder / place}: the copy would be written through this link. Hint: remove it")


if __name__ == "__main__":
    print(line_of(packed(Path(sys.argv[1]))))
