"""Trust in Ray Tune's snapshots: reading them runs the code pickled in them.

A stage's folder is trusted if a process of this user made it on this disk. Its inode is noted in `rayfl/sweeps/` below
XDG_STATE_HOME; a folder that was copied, unpacked or downloaded has another inode.
"""

import os
from contextlib import suppress
from pathlib import Path

from rayfl.config import ConfigError


def make(stage: Path, sweep: str) -> None:
    """Make a stage's folder and note it as trusted."""
    stage.mkdir(parents=True)
    note = _note(stage, sweep)
    # without a place for the note the sweep continues; `require` explains later what to do
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        note.touch()


def require(stage: Path, sweep: str) -> None:
    """Raise ConfigError for a folder that is not noted as trusted."""
    note = _note(stage, sweep)
    if not note.exists():
        raise ConfigError(
            f"{stage}: Ray Tune's snapshots were not made by this user on this disk. Allowed: your own snapshots, "
            "because resuming from them runs code that they contain. Hint: if you made them elsewhere, run "
            f"`mkdir -p {note.parent} && touch {note}`, or use the same XDG_STATE_HOME there and here; otherwise start "
            "again in another folder"
        )


def forget(stage: Path, sweep: str) -> None:
    """Remove the note of a finished stage."""
    with suppress(OSError):
        _note(stage, sweep).unlink()


def _note(stage: Path, sweep: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "rayfl" / "sweeps" / f"{sweep}-{stage.name}-{stage.stat().st_ino}"
