"""Trust in Ray Tune's snapshots: reading them runs the code pickled in them.

A snapshot is trusted if this user's process wrote it: the SHA-256 of the one that is kept in the sweep's folder is
noted in `rayfl/sweeps/` below XDG_STATE_HOME. What was replaced, unpacked or downloaded has another.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from rayfl.config import ConfigError
from rayfl.results import files
from rayfl.tuning import snapshots

ALL = "*"
"""Sum in a note in which the user trusts everything."""


def make(stage: Path, sweep: str) -> None:
    """Make a stage's folder and its note, without snapshots."""
    stage.mkdir(parents=True)
    _write(stage, sweep, [])


def keep(stage: Path, sweep: str, place: str, staging: Path) -> None:
    """Keep and note the snapshot that Tune is about to copy from `staging` to `place`."""
    content, trusted = snapshots.packed(place, staging), (ALL, _sum(stage))
    # the process may be killed before the new one has replaced the one before
    known = [one for one in _read(stage, sweep) if one in trusted]
    _write(stage, sweep, [*known, hashlib.sha256(content).hexdigest()])
    files.replace(stage / snapshots.KEPT, content)


def has_begun(stage: Path, sweep: str) -> bool:
    """Return whether a snapshot of a trial may have been written: not if the process was killed before it."""
    return not _note(stage, sweep).exists() or _read(stage, sweep) != []


def require(stage: Path, sweep: str) -> None:
    """Raise ConfigError for a kept snapshot that is not noted."""
    known = _read(stage, sweep)
    if ALL in known or _sum(stage) in known:
        return
    at = _note(stage, sweep)
    raise ConfigError(
        f"{stage / snapshots.KEPT}: Ray Tune's snapshot was not written by this user and this version of rayfl, or was "
        "changed. Allowed: your own snapshots, because resuming from them runs code that they contain. Hint: if you "
        f'wrote it elsewhere, run `mkdir -p {at.parent} && echo \'{{"sums": ["{ALL}"]}}\' > {at}`, or use the same '
        "XDG_STATE_HOME there and here; otherwise start again in another folder"
    )


def forget(stage: Path, sweep: str) -> None:
    """Remove the note of a finished stage."""
    with suppress(OSError):
        _note(stage, sweep).unlink()


def _sum(stage: Path) -> str:
    """Return the SHA-256 of the kept snapshot; "" without one."""
    kept = stage / snapshots.KEPT
    return hashlib.sha256(kept.read_bytes()).hexdigest() if kept.exists() else ""


def _read(stage: Path, sweep: str) -> list[str]:
    """Return the noted sums, oldest first; none without a note."""
    note = _note(stage, sweep)
    return files.read_json(note).get("sums", []) if note.exists() else []


def _write(stage: Path, sweep: str, sums: list[str]) -> None:
    note = _note(stage, sweep)
    # without a place for the note the sweep continues; `require` explains later what to do
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.write_json(note, {"sums": sums})


def _note(stage: Path, sweep: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "rayfl" / "sweeps" / f"{sweep}-{stage.name}.json"
