"""Whose snapshots Ray Tune may go on from: reading them runs the code that is pickled in them.

A stage's folder is trusted if a process of this user made it on this disk: its inode is noted in a folder of the user,
`rayfl/sweeps/` below XDG_STATE_HOME. A folder that was copied, unpacked or downloaded has another inode.
"""

import os
from contextlib import suppress
from pathlib import Path

from rayfl.config import ConfigError


def make(stage: Path, sweep: str) -> None:
    """Makes a stage's folder, which is trusted from now on."""
    stage.mkdir(parents=True)
    note = _note(stage, sweep)
    # without a place for it the sweep goes on, and `require` says later what to do
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        note.touch()


def require(stage: Path, sweep: str) -> None:
    """A ConfigError of a folder that somebody else may have made."""
    note = _note(stage, sweep)
    if not note.exists():
        raise ConfigError(
            f"{stage}: given Ray Tune's snapshots that this user did not make on this disk; allowed: one's own, "
            "because to go on from them runs code that they hold. If you made them elsewhere, say so with "
            f"`mkdir -p {note.parent} && touch {note}`, or let XDG_STATE_HOME be the same folder there and here; if "
            "not, start anew in another folder"
        )


def forget(stage: Path, sweep: str) -> None:
    """The stage is done: nobody goes on from it."""
    with suppress(OSError):
        _note(stage, sweep).unlink()


def _note(stage: Path, sweep: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "rayfl" / "sweeps" / f"{sweep}-{stage.name}-{stage.stat().st_ino}"
