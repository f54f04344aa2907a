"""Trust in Ray Tune's snapshots: reading them runs the code pickled in them.

A snapshot is trusted if this user's process wrote it: the SHA-256 of its files are noted in `rayfl/sweeps/` below
XDG_STATE_HOME before Tune copies them into the sweep's folder. What was replaced, unpacked or downloaded has others.
"""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rayfl.config import ConfigError
from rayfl.results import files
from rayfl.tuning import snapshots

KEPT = 3
"""Sums per file: a process may have been killed before Tune copied the newest one."""
ALL = "*"
"""Key of a note in which the user trusts everything."""

Sums = dict[str, list[str]]


def make(stage: Path, sweep: str) -> None:
    """Make a stage's folder and its note, without snapshots."""
    stage.mkdir(parents=True)
    _write(stage, sweep, {})


def note(stage: Path, sweep: str, place: str, staging: Path) -> None:
    """Note the files of the snapshot that Tune is about to copy from `staging` to `place`."""
    found = {file.name: file.read_bytes() for file in staging.iterdir() if snapshots.is_read(file.name)}
    found.setdefault(snapshots.TUNER, snapshots.content(place, snapshots.TUNER))
    known = _read(stage, sweep) or {}
    for name, content in found.items():
        one = hashlib.sha256(content).hexdigest()
        known[name] = [*(other for other in known.get(name, []) if other != one), one][-KEPT:]
    _write(stage, sweep, known)


def has_begun(stage: Path, sweep: str) -> bool:
    """Return whether a snapshot of a trial may have been written: not if the process was killed before it."""
    return _read(stage, sweep) != {}


def require(stage: Path, sweep: str, place: str) -> None:
    """Raise ConfigError for a snapshot with a file that is not noted."""
    known = _read(stage, sweep)
    if known is not None and ALL in known:
        return
    for name in snapshots.names(place):
        if known is None or hashlib.sha256(snapshots.content(place, name)).hexdigest() not in known.get(name, ()):
            at = _note(stage, sweep)
            raise ConfigError(
                f"{place}/{name}: Ray Tune's snapshot was not written by this user, or was changed. Allowed: your own "
                "snapshots, because resuming from them runs code that they contain. Hint: if you wrote it elsewhere, "
                f"run `mkdir -p {at.parent} && echo '{{\"{ALL}\": []}}' > {at}`, or use the same XDG_STATE_HOME there "
                "and here; otherwise start again in another folder"
            )


def forget(stage: Path, sweep: str) -> None:
    """Remove the note of a finished stage."""
    with suppress(OSError):
        _note(stage, sweep).unlink()


def _read(stage: Path, sweep: str) -> Sums | None:
    """Return the noted sums; None without a note."""
    note = _note(stage, sweep)
    return files.read_json(note) if note.exists() else None


def _write(stage: Path, sweep: str, sums: Mapping[str, list[str]]) -> None:
    note = _note(stage, sweep)
    # without a place for the note the sweep continues; `require` explains later what to do
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.write_json(note, sums)


def _note(stage: Path, sweep: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "rayfl" / "sweeps" / f"{sweep}-{stage.name}.json"
