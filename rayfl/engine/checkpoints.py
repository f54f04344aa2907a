"""Checkpoints: atomic, checksummed, no pickle.

A checkpoint is a folder `round-000012/` with `state.safetensors` and `manifest.json`: the round, the configuration, the
SHA-256 of every file, and one of all this. It is written beside its place and renamed into it. So a folder of that name
is whole, or it was damaged later; a damaged one is passed over for the one before, and that is said.

What clients keep is in the folder `kept/` beside all checkpoints, one file a client and round (`client_states.py`).
A checkpoint's `kept.npy` names those that it goes with, and their SHA-256. They are hard links to the files that the
run works with: one that did not change since the last checkpoint is neither read nor written nor linked again.

The folder `best/` beside them has the checkpoint of the best round, with what clients kept then, as links, where a run
keeps it (`Best`).
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError

from rayfl.config import ConfigError, differences
from rayfl.core.fold import State
from rayfl.engine.client_states import ROWS, ClientStates, Kept, files_of
from rayfl.engine.files import PARTIAL, beside, link, load_tensors, opened, remove, save_tensors, sha256, sync
from rayfl.metrics import Line

VERSION = 3
MANIFEST = "manifest.json"
UNSUMMED = {"round", "config", "sha256"}
"""What a manifest of version 1 says; one of version 2 says its version too."""
STATE = "state.safetensors"
KEPT = "kept.npy"
STORE = "kept"
BEST = "best"
VALUE = "best.json"


class DamagedCheckpoint(ConfigError):
    """A checkpoint that cannot be read, or is not what its manifest says."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes on from."""

    round: int
    config: dict[str, Any]
    """What the result depends on."""
    state: State
    client_states: Kept
    partial_round: Line
    """What a round in progress has measured so far; nothing between rounds."""


def write(
    folder: Path,
    round: int,
    config: dict[str, Any],
    state: State,
    client_states: ClientStates | None = None,
    keep: int = 2,
    partial_round: Line | None = None,
) -> Path:
    """Writes the checkpoint of `round`, perhaps in the middle of the next one, into `folder`, and removes all but it
    and those before it, `keep` in all: later ones are of rounds that are made again.

    NotWritten if the disk does not take it: the others stay as they are.
    """
    for torn in folder.glob(f"{PARTIAL}*"):
        remove(torn)
    if not complete(folder):
        remove(folder / STORE)  # nothing names what a killed process left there
    final = folder / _name(round)
    with beside(final, f"the checkpoint of round {round}") as partial:
        partial.mkdir()
        save_tensors(partial / STATE, state)
        sync(partial / STATE)
        checksums = {STATE: sha256(partial / STATE)}
        if client_states is not None and len(rows := client_states.save(folder / STORE, round)):
            np.save(partial / KEPT, rows, allow_pickle=False)
            sync(partial / KEPT)
            checksums[KEPT] = sha256(partial / KEPT)
        manifest = {
            "version": VERSION,
            "round": round,
            "config": config,
            "sha256": checksums,
            "begun": partial_round or {},
        }
        (partial / MANIFEST).write_text(json.dumps(manifest | {"sum": _sum(manifest)}, indent=1))
        sync(partial / MANIFEST)
        sync(partial)
        remove(final)
    sync(folder)
    found = complete(folder)
    kept = [path for path in found if _round(path) <= round][-keep:]
    for other in found:
        if other not in kept:
            remove(other)
    if client_states is not None:
        client_states.forget_before(_round(kept[0]))
    return final


def complete(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; none where there is no such folder."""
    return sorted((path for path in folder.glob("round-*") if path.name[6:].isdecimal()), key=_round)


def read(path: Path, client_states: bool = True) -> Checkpoint:
    """Read a checkpoint and verify its checksums. Without `client_states` those are neither read nor verified. Raises a
    DamagedCheckpoint, or a ConfigError for an older version."""
    try:
        manifest = _manifest(path)
        for name, expected in manifest["sha256"].items():
            if sha256(path / name) != expected:
                raise DamagedCheckpoint(f"{path / name}: its SHA-256 is not the manifest's")
        wanted = client_states and KEPT in manifest["sha256"]
        rows = np.load(path / KEPT, allow_pickle=False) if wanted else np.empty(0, ROWS)
        kept = Kept(path.parent / STORE, manifest["round"], rows)
        for file, expected in zip(kept.files.values(), rows["sha256"], strict=True):
            if sha256(file) != expected.tobytes().hex():
                raise DamagedCheckpoint(f"{file}: its SHA-256 is not the one that {path / KEPT} says")
        state = load_tensors(path / STATE)
        return Checkpoint(manifest["round"], manifest["config"], state, kept, manifest.get("begun", {}))
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


def latest(
    folder: Path, config: dict[str, Any] | None, notify: Callable[[str], None], client_states: bool = True
) -> Checkpoint | None:
    """The newest good checkpoint, None where there is none. `client_states`: as for `read`.

    Damaged ones are passed over and said. One of another configuration than `config` is an error that lists the
    differences.
    """
    found, damages = complete(folder), []
    for path in reversed(found):
        try:
            checkpoint = read(path, client_states)
        except DamagedCheckpoint as error:
            damages.append(str(error))
            continue
        if config is not None:
            same_config(path, checkpoint.config, config)
        for damage in damages:
            notify(f"{damage}; going back to the checkpoint before it")
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


def copy(folder: Path, to: Path) -> None:
    """All checkpoints of a folder, the best one too, as links, into another."""
    for part in (*complete(folder), folder / STORE):
        if part.is_dir():
            shutil.copytree(part, to / part.name, copy_function=link, dirs_exist_ok=True)
    copy_best(folder, to)


def copy_best(folder: Path, to: Path) -> None:
    """The best checkpoint of a folder, if it has one, in place of that of another."""
    remove(to / BEST)
    if (folder / BEST).is_dir():
        shutil.copytree(folder / BEST, to / BEST, copy_function=link)


class Best:
    """The best evaluated round so far, and its checkpoint in the folder `best/` below `folder`, the first of equal
    ones. What it goes by is in that folder too, so that a run that goes on knows it."""

    def __init__(self, folder: Path, metric: str, better: Literal["max", "min"]):
        self.folder, self.metric, self.better = folder / BEST, metric, better

    @property
    def value(self) -> float:
        """Of the metric; NaN before there is one."""
        try:
            return float(json.loads((self.folder / VALUE).read_text())["value"])
        except (OSError, ValueError, KeyError, TypeError):
            return math.nan

    def is_better(self, line: Line) -> bool:
        """Whether an evaluated round is better than all before."""
        value, before = line[self.metric], self.value
        return math.isnan(before) or (value > before if self.better == "max" else value < before)

    def keep(self, line: Line) -> None:
        """Keeps the newest checkpoint, which is of this evaluated round, in place of the best before."""
        folder = self.folder.parent
        newest = complete(folder)[-1]
        with beside(self.folder, f"the best checkpoint, of round {line['round']}") as partial:
            remove(partial)
            shutil.copytree(newest, partial / newest.name, copy_function=link)
            if (newest / KEPT).exists():
                (partial / STORE).mkdir()
                for file in files_of(folder / STORE, np.load(newest / KEPT)).values():
                    link(file, partial / STORE / file.name)
            said = {"round": line["round"], "metric": self.metric, "value": line[self.metric]}
            (partial / VALUE).write_text(json.dumps(said, indent=1))
            sync(partial / VALUE)
            sync(partial)
            remove(self.folder)
        sync(folder)


def same_config(path: Path, saved: dict[str, Any], config: dict[str, Any]) -> None:
    changed = differences(saved, json.loads(json.dumps(config)))
    if changed:
        raise ConfigError(
            f"{path}: a checkpoint of another configuration; it differs in\n  "
            + "\n  ".join(changed)
            + "\nresume with the configuration that wrote it, or choose another output folder"
        )
