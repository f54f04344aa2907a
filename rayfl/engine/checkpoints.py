"""Checkpoints: atomic, checksummed, no pickle.

A checkpoint is a folder `round-000012/` with `state.safetensors` and `manifest.json`: the round, the configuration, the
SHA-256 of every file, and a SHA-256 of the manifest itself. It is written under a temporary name and then renamed, so a
folder of that name is complete unless it was damaged later. A damaged checkpoint is reported and the one before is
used.

Client states are in the folder `kept/` beside all checkpoints, one file per client and round (`client_states.py`).
A checkpoint's `kept.npy` lists its files and their SHA-256. They are hard links to the files of the running
simulation: a file that did not change since the last checkpoint is not read, written or linked again.

The folder `best/` contains the checkpoint of the best round and its client states, as links, if the run keeps it
(`Best`).
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import Field
from safetensors import SafetensorError

from rayfl.config import Config, ConfigError, differences, parse, shown
from rayfl.core.fold import State
from rayfl.engine.client_states import ROWS, ClientStates, Kept, files_of
from rayfl.engine.files import (
    PARTIAL,
    beside,
    link,
    load_tensors,
    opened,
    remove,
    save_tensors,
    sha256,
    sync,
    with_sum,
    without_sum,
)
from rayfl.metrics import Line
from rayfl.system import Past

VERSION = 3
MANIFEST = "manifest.json"
STATE = "state.safetensors"
KEPT = "kept.npy"
STORE = "kept"
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in that of a run."""
BEST = "best"
VALUE = "best.json"

C = TypeVar("C", bound=Config)


class DamagedCheckpoint(ConfigError):
    """Raised for a checkpoint that cannot be read or does not match its manifest."""


class Manifest(Config):
    """Content of manifest.json, besides its version and its sum."""

    round: int = Field(ge=0)
    config: dict[str, Any]
    sha256: dict[Literal["state.safetensors", "kept.npy"], str]
    """File -> its SHA-256."""
    begun: dict[str, float | str] = {}
    """Sums measured so far in a round in progress."""
    schedule: Past = Past()


class _Value(Config):
    """Content of best.json, besides its sum."""

    round: int
    metric: str
    value: float


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint."""

    round: int
    config: dict[str, Any]
    """Settings that the result depends on."""
    state: State
    client_states: Kept
    partial_round: Line
    """Sums measured so far in a round in progress; empty between rounds."""
    past: Past
    """Past of the schedule; empty without a `system:` section."""


def write(
    folder: Path,
    round: int,
    config: dict[str, Any],
    state: State,
    client_states: ClientStates | None = None,
    keep: int = 2,
    partial_round: Line | None = None,
    schedule: dict[str, Any] | None = None,
) -> Path:
    """Write the checkpoint of `round` (possibly in the middle of the next one) into `folder`. Keep it and those before
    it, `keep` in total; remove later ones, whose rounds are repeated.

    Raise NotWritten if the disk fails; the other checkpoints are unchanged.
    """
    for torn in folder.glob(f"{PARTIAL}*"):
        remove(torn)
    if not complete(folder):
        remove(folder / STORE)  # left by a killed process, listed by no checkpoint
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
        } | ({"schedule": schedule} if schedule else {})
        (partial / MANIFEST).write_text(json.dumps(with_sum(manifest), indent=1), encoding="utf-8")
        sync(partial / MANIFEST)
        sync(partial)
    sync(folder)
    found = complete(folder)
    kept = [path for path in found if round_of(path) <= round][-keep:]
    for other in found:
        if other not in kept:
            remove(other)
    if client_states is not None:
        client_states.forget_before(round_of(kept[0]))
    return final


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first; none if the folder does not exist. Raise ConfigError if it is a
    file."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(f"{folder}: this is not a folder. Allowed: a folder. Hint: restore a copy of it")
    return sorted((path for path in folder.glob("round-*") if path.name[6:].isdecimal()), key=round_of)


def read(path: Path, client_states: bool = True) -> Checkpoint:
    """Read a checkpoint and verify its checksums; of client states only with `client_states`. Raise DamagedCheckpoint,
    or ConfigError for another version."""
    try:
        manifest = _manifest(path)
        for name, expected in manifest.sha256.items():
            if sha256(path / name) != expected:
                raise DamagedCheckpoint(f"{path / name}: the SHA-256 differs from the manifest's")
        wanted = client_states and KEPT in manifest.sha256
        rows = np.load(path / KEPT, allow_pickle=False) if wanted else np.empty(0, ROWS)
        if rows.dtype != ROWS or rows.ndim != 1 or not (rows["client"] >= 0).all():
            raise DamagedCheckpoint(f"{path / KEPT}: the file does not contain rows of clients")
        kept = Kept(path.parent / STORE, manifest.round, rows)
        for file, expected in zip(kept.files.values(), rows["sha256"], strict=True):
            if sha256(file) != expected.tobytes().hex():
                raise DamagedCheckpoint(f"{file}: the SHA-256 differs from the one in {path / KEPT}")
        state = load_tensors(path / STATE)
        return Checkpoint(manifest.round, manifest.config, state, kept, dict(manifest.begun), manifest.schedule)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        if isinstance(error, ConfigError):
            raise
        raise DamagedCheckpoint(f"{path}: the checkpoint is incomplete or damaged: {error}") from None


def _manifest(path: Path) -> Manifest:
    """Return a checkpoint's manifest after verifying its own checksum."""
    file = path / MANIFEST
    given = _summed(file)
    if (version := given.pop("version", None)) != VERSION:
        raise ConfigError(
            f"{path}: the checkpoint has version {shown(version)}. Allowed: version {VERSION}. Hint: resume with the "
            "rayfl that wrote it, or start again in another folder"
        )
    manifest = _parsed(Manifest, given, file)
    if STATE not in manifest.sha256:
        raise DamagedCheckpoint(f"{file}: sha256 lacks {STATE}")
    if path.name != _name(manifest.round):
        raise DamagedCheckpoint(f"{path}: the folder contains the checkpoint of another round, {manifest.round}")
    return manifest


def _summed(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file after verifying its own checksum."""
    with opened(file) as text:
        given = json.load(text)
    if (content := without_sum(given)) is None:
        raise DamagedCheckpoint(f"{file}: the SHA-256 differs from the one inside the file")
    return content


def _parsed(kind: type[C], given: dict[str, Any], file: Path) -> C:
    try:
        return parse(kind, given, str(file))
    except ConfigError as error:
        raise DamagedCheckpoint(str(error)) from None


def _name(round: int) -> str:
    return f"round-{round:06d}"


def round_of(path: Path) -> int:
    """Return the round of a checkpoint's folder."""
    return int(path.name.removeprefix("round-"))


def latest(
    folder: Path, config: dict[str, Any] | None, notify: Callable[[str], None], client_states: bool = True
) -> Checkpoint | None:
    """Return the newest valid checkpoint, or None. `client_states`: as for `read`.

    Damaged checkpoints are reported and skipped. Raise ConfigError with the differences if the configuration is not
    `config`.
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
            notify(f"{damage}. Using the checkpoint before it")
        return checkpoint
    if found:
        raise DamagedCheckpoint(
            "\n  ".join([f"{folder}: all {len(found)} checkpoints are damaged. Hint: start again:", *damages])
        )
    return None


def forget_after(folder: Path, round: int, why: str) -> bool:
    """Remove the checkpoints of rounds after `round`; return whether there were any. Raise ConfigError, and remove
    nothing, if no earlier one is valid."""
    found = complete(folder)
    later = [path for path in found if round_of(path) > round]
    if later and not any(_is_whole(path) for path in found if path not in later):
        raise ConfigError(
            f"{why}; {folder} has no valid checkpoint of an earlier round. Hint: restore the file from a copy, or "
            "start again in another folder"
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


def _is_partial(path: Path) -> bool:
    """Return whether a checkpoint was written in the middle of the next round."""
    return bool(_manifest(path).begun)


def copy(folder: Path, to: Path) -> None:
    """Copy all checkpoints of a folder, including the best, as links into another."""
    for part in (*complete(folder), folder / STORE):
        if part.is_dir():
            shutil.copytree(part, to / part.name, copy_function=link, dirs_exist_ok=True)
    copy_best(folder, to)


def copy_best(folder: Path, to: Path) -> None:
    """Replace the best checkpoint of folder `to` with that of `folder`, if any."""
    remove(to / BEST)
    if (folder / BEST).is_dir():
        shutil.copytree(folder / BEST, to / BEST, copy_function=link)


def require_whole_best(folder: Path, past: Sequence[Line] = ()) -> None:
    """Raise DamagedCheckpoint if the best checkpoint in a folder, if any, or its value is damaged. `past`: rounds made
    before, which contain that value."""
    best = folder / BEST
    if best.is_dir():
        found = _value(best)
        read(best / _name(found.round))
        if any(line["round"] == found.round and line.get(found.metric) != found.value for line in past):
            raise DamagedCheckpoint(f"{best / VALUE}: the value is not that of round {found.round}")


def remove_damaged_best(folder: Path, past: Sequence[Line]) -> list[str]:
    """Remove the best checkpoint in a folder if it is damaged, and return a note on it. `past`: rounds made before."""
    try:
        require_whole_best(folder, past)
    except DamagedCheckpoint as error:
        remove(folder / BEST)
        return [f"{error}; the best checkpoint is removed, and the next better round is kept"]
    return []


def _value(best: Path) -> _Value:
    """Return the value of the best checkpoint. Raise DamagedCheckpoint if it cannot be read."""
    try:
        return _parsed(_Value, _summed(best / VALUE), best / VALUE)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DamagedCheckpoint):
            raise
        raise DamagedCheckpoint(f"{best / VALUE}: the file is absent or damaged: {error}") from None


class Best:
    """Best evaluated round so far (the first of equal ones), its checkpoint and its value in `best/` below `folder`.
    `past`: rounds made before, whose best one has no checkpoint if the run kept none then."""

    def __init__(self, folder: Path, metric: str, better: Literal["max", "min"], past: Sequence[Line] = ()):
        self.folder, self.metric, self.better = folder / BEST, metric, better
        known = [line[metric] for line in past[:-1] if not math.isnan(line.get(metric, math.nan))]
        self.before = (max if better == "max" else min)(known, default=math.nan)

    @property
    def value(self) -> float:
        """Metric of the best round, of those before if it is not known; NaN if there is none."""
        return _value(self.folder).value if self.folder.is_dir() else self.before

    def is_better(self, line: Line) -> bool:
        """Return whether an evaluated round is better than all before. One without the metric is not."""
        if self.metric not in line:
            return False
        value, before = line[self.metric], self.value
        return math.isnan(before) or (value > before if self.better == "max" else value < before)

    def resume(self, line: Line) -> None:
        """Keep the newest checkpoint if it is of this last evaluated round, which is better than all before: the
        process ended after it was written. Not in the middle of the next round, where the state has changed."""
        saved = complete(self.folder.parent)[-1:]
        if self.is_better(line) and any(round_of(path) == line["round"] and not _is_partial(path) for path in saved):
            self.keep(line)

    def keep(self, line: Line) -> None:
        """Replace the best checkpoint with the newest one, which is of this evaluated round."""
        folder = self.folder.parent
        newest = complete(folder)[-1]
        with beside(self.folder, f"the best checkpoint, of round {line['round']}") as partial:
            remove(partial)
            shutil.copytree(newest, partial / newest.name, copy_function=link)
            if (newest / KEPT).exists():
                (partial / STORE).mkdir()
                for file in files_of(folder / STORE, np.load(newest / KEPT)).values():
                    link(file, partial / STORE / file.name)
            value = {"round": line["round"], "metric": self.metric, "value": line[self.metric]}
            (partial / VALUE).write_text(json.dumps(with_sum(value), indent=1), encoding="utf-8")
            sync(partial / VALUE)
            sync(partial)
        sync(folder)


def same_config(path: Path, saved: dict[str, Any], config: dict[str, Any]) -> None:
    changed = differences(saved, json.loads(json.dumps(config)))
    if changed:
        raise ConfigError(
            f"{path}: the checkpoint has another configuration. Differences:\n  "
            + "\n  ".join(changed)
            + "\nHint: resume with the configuration that wrote it, or choose another output folder"
        )
