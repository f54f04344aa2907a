"""Checkpoints: atomic, checksummed, no pickle.

A checkpoint is a folder `round-000012/` with `state.safetensors`, one `carry-<client>.safetensors` or
`own-<client>.safetensors` for every client that keeps something (`rayfl.engine.carries`), and `manifest.json`: the
round, the configuration, the SHA-256 of every file, and one of all this. It is written beside its place and renamed
into it. So a folder of that name is whole, or it was damaged later; a damaged one is passed over for the one before,
and that is said. What a client keeps is a hard link to the file that the run works with: a file that did not change
since the last checkpoint is neither read nor written again.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rayfl.config import ConfigError, differences
from rayfl.engine.carries import Carries, Kept, in_checkpoint
from rayfl.engine.files import PARTIAL, beside, load_tensors, opened, remove, save_tensors, sha256, sync
from rayfl.fold import State

VERSION = 3
MANIFEST = "manifest.json"
UNSUMMED = {"round", "config", "sha256"}
"""What a manifest of version 1 says; one of version 2 says its version too."""
STATE = "state.safetensors"


class DamagedCheckpoint(ConfigError):
    """A checkpoint that cannot be read, or is not what its manifest says."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes on from."""

    round: int
    config: dict[str, Any]
    """What the result depends on."""
    state: State
    carries: dict[int, Kept]


def write(
    folder: Path, round: int, config: dict[str, Any], state: State, carries: Carries | None = None, keep: int = 2
) -> Path:
    """Writes the checkpoint of `round` into `folder` and removes all but the newest `keep`.

    NotWritten if the disk does not take it: the others stay as they are.
    """
    for torn in folder.glob(f"{PARTIAL}*"):
        remove(torn)
    final = folder / _name(round)
    with beside(final, f"the checkpoint of round {round}") as partial:
        partial.mkdir()
        save_tensors(partial / STATE, state)
        sync(partial / STATE)
        checksums = {STATE: sha256(partial / STATE)}
        if carries is not None:
            checksums |= carries.link(partial)
        manifest = {"version": VERSION, "round": round, "config": config, "sha256": checksums}
        (partial / MANIFEST).write_text(json.dumps(manifest | {"sum": _sum(manifest)}, indent=1))
        sync(partial / MANIFEST)
        sync(partial)
        remove(final)
    sync(folder)
    for old in complete(folder)[:-keep]:
        remove(old)
    return final


def complete(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; none where there is no such folder."""
    return sorted((path for path in folder.glob("round-*") if path.name[6:].isdecimal()), key=_round)


def read(path: Path) -> Checkpoint:
    """A checkpoint, after every checksum was verified. A DamagedCheckpoint, or a ConfigError for an older version."""
    try:
        manifest = _manifest(path)
        for name, expected in manifest["sha256"].items():
            if sha256(path / name) != expected:
                raise DamagedCheckpoint(f"{path / name}: its SHA-256 is not the manifest's")
        found = [in_checkpoint(path / name, checksum) for name, checksum in manifest["sha256"].items()]
        carries = dict(client for client in found if client is not None)
        return Checkpoint(manifest["round"], manifest["config"], load_tensors(path / STATE), carries)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        if isinstance(error, ConfigError):
            raise
        raise DamagedCheckpoint(f"{path}: not a whole checkpoint: {error}") from None


def _manifest(path: Path) -> dict[str, Any]:
    """What a checkpoint's manifest says, after its own sum was verified."""
    file = path / MANIFEST
    with opened(file) as text:
        manifest = json.load(text)
    if manifest.keys() - {"version"} == UNSUMMED:
        raise ConfigError(
            f"{path}: a checkpoint of version {manifest.get('version', 1)}, which an older rayfl wrote; allowed: one "
            f"of version {VERSION}. Go on with the rayfl that wrote it, or start anew in another folder"
        )
    if manifest.pop("sum") != _sum(manifest):
        raise DamagedCheckpoint(f"{file}: its SHA-256 is not the one that it says")
    if manifest["version"] != VERSION:
        raise ConfigError(
            f"{path}: a checkpoint of version {manifest['version']}; allowed: one of version {VERSION}. Go on with the "
            "rayfl that wrote it, or start anew in another folder"
        )
    if path.name != _name(manifest["round"]):
        raise DamagedCheckpoint(f"{path}: the checkpoint of round {manifest['round']}, in the folder of another round")
    return manifest


def _sum(manifest: dict[str, Any]) -> str:
    """The SHA-256 of what a manifest says once it was read, however it is written down."""
    said = json.loads(json.dumps(manifest))
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _name(round: int) -> str:
    return f"round-{round:06d}"


def _round(path: Path) -> int:
    return int(path.name.removeprefix("round-"))


def latest(folder: Path, config: dict[str, Any] | None, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest good checkpoint, None where there is none.

    Damaged ones are passed over and said. One of another configuration than `config` is an error that lists the
    differences.
    """
    found, damages = complete(folder), []
    for path in reversed(found):
        try:
            checkpoint = read(path)
        except DamagedCheckpoint as error:
            damages.append(str(error))
            continue
        if config is not None:
            same_config(path, checkpoint.config, config)
        for damage in damages:
            say(f"{damage}; going back to the checkpoint before it")
        return checkpoint
    if found:
        raise DamagedCheckpoint(
            "\n  ".join([f"{folder}: none of its {len(found)} checkpoints is whole; start anew:", *damages])
        )
    return None


def forget_after(folder: Path, round: int, why: str) -> bool:
    """Removes the checkpoints of later rounds; whether there were some. A ConfigError if none before them is whole:
    then all stay."""
    found = complete(folder)
    later = [path for path in found if _round(path) > round]
    if later and not any(_is_whole(path) for path in found if path not in later):
        raise ConfigError(
            f"{why}; no whole checkpoint in {folder} is of an earlier round; put back a copy of the file, or start "
            "anew in another folder"
        )
    for path in later:
        remove(path)
    return bool(later)


def _is_whole(path: Path) -> bool:
    try:
        read(path)
    except DamagedCheckpoint:
        return False
    return True


def same_config(path: Path, saved: dict[str, Any], config: dict[str, Any]) -> None:
    changed = differences(saved, json.loads(json.dumps(config)))
    if changed:
        raise ConfigError(
            f"{path}: a checkpoint of another configuration; it differs in\n  "
            + "\n  ".join(changed)
            + "\nresume with the configuration that wrote it, or choose another output folder"
        )
