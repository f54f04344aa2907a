"""Checkpoints: atomic, checksummed, no pickle.

A checkpoint is a folder `round-000012/` with `state.safetensors`, one `carry-<client>.safetensors` for every
client that keeps something, and `manifest.json`: the round, the configuration, and the SHA-256 of every file.
It is written beside its place and renamed into it, so a folder of that name is whole or it is damaged later;
a damaged one is passed over for the one before, and that is said. What a client keeps is a hard link to the file that
the run works with: one that did not change since the last checkpoint is neither read nor written again.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rayfl.config import ConfigError, differences
from rayfl.tensors import Tensors, leaves, nest

MANIFEST = "manifest.json"
STATE = "state.safetensors"
PARTIAL = ".partial-"


class DamagedCheckpoint(ConfigError):
    """A checkpoint that cannot be read, or is not what its manifest says."""


class NotWritten(RuntimeError):
    """The disk did not take a checkpoint, or what a client keeps. Nothing of it is left there."""


@dataclass(frozen=True)
class Kept:
    """A file of a checkpoint with what a client keeps; it never changes."""

    path: Path
    sha256: str


def save_tensors(path: Path, tensors: Tensors) -> None:
    """Nested tensors as safetensors; names are joined with "/". The format sorts them, so their order is
    written too: whoever sums over a resumed state sums in the same order."""
    flat = {name: t.contiguous().cpu() for name, t in leaves(tensors)}
    save_file(flat, path, {"order": json.dumps(list(flat))})


def load_tensors(path: Path) -> dict:
    """The nested tensors of a file, in their order."""
    with safe_open(path, "pt") as file:
        return nest({name: file.get_tensor(name) for name in json.loads(file.metadata()["order"])})


def write(
    folder: Path,
    round: int,
    config: dict[str, Any],
    state: Tensors,
    carries: "Carries | None" = None,
    keep: int = 2,
) -> Path:
    """Writes the checkpoint of `round` into `folder` and removes all but the newest `keep`.

    NotWritten if the disk does not take it: the others stay as they are.
    """
    for torn in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(torn)
    final = folder / f"round-{round:06d}"
    with _beside(final, f"the checkpoint of round {round}") as partial:
        partial.mkdir()
        save_tensors(partial / STATE, state)
        _sync(partial / STATE)
        checksums = {STATE: _sha256(partial / STATE)}
        if carries is not None:
            checksums |= carries.link(partial)
        manifest = {"round": round, "config": config, "sha256": checksums}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _sync(partial / MANIFEST)
        _sync(partial)
        if final.exists():
            shutil.rmtree(final)
    _sync(folder)
    for old in complete(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def complete(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; none where there is no such folder."""
    return sorted(folder.glob("round-*"))


def read(path: Path) -> tuple[int, dict[str, Any], dict, dict[int, Kept]]:
    """(round, config, state, what each client kept), after every checksum was verified."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, expected in manifest["sha256"].items():
            if _sha256(path / name) != expected:
                raise DamagedCheckpoint(f"{path / name}: its SHA-256 is not the manifest's")
        state = load_tensors(path / STATE)
        carries = {
            int(name.removeprefix("carry-").removesuffix(".safetensors")): Kept(path / name, sha256)
            for name, sha256 in manifest["sha256"].items()
            if name.startswith("carry-")
        }
        return manifest["round"], manifest["config"], state, carries
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, DamagedCheckpoint):
            raise
        raise DamagedCheckpoint(f"{path}: not a whole checkpoint: {error}") from None


def latest(
    folder: Path,
    config: dict[str, Any],
    say: Callable[[str], None],
    today: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> tuple[int, dict, dict[int, Kept]] | None:
    """(round, state, what each client kept) of the newest good checkpoint, None where there is none.

    Damaged ones are passed over and said. One of another configuration is an error that lists what differs; `today`
    gives a saved configuration the defaults of options that are newer.
    """
    found = complete(folder)
    for path in reversed(found):
        try:
            round, saved, state, carries = read(path)
        except DamagedCheckpoint as error:
            say(f"{error}; going back to the checkpoint before it")
            continue
        same_config(path, today(saved), config)
        return round, state, carries
    if found:
        raise DamagedCheckpoint(f"{folder}: none of its {len(found)} checkpoints is whole; start anew")
    return None


def same_config(path: Path, saved: dict[str, Any], config: dict[str, Any]) -> None:
    changed = differences(saved, json.loads(json.dumps(config)))
    if changed:
        raise ConfigError(
            f"{path}: a checkpoint of another configuration; it differs in\n  "
            + "\n  ".join(changed)
            + "\nresume with the configuration that wrote it, or choose another output folder"
        )


class Carries:
    """What clients keep between their rounds: one file a client and round, loaded when it is wanted.

    Never all in memory. A file never changes, so its first checkpoint sees to it that it is on disk for good and takes
    its SHA-256; later ones only link to it. A client's older file stays until no checkpoint needs it.
    """

    def __init__(self, folder: Path):
        """`folder` is its own: what an earlier run left there goes."""
        shutil.rmtree(folder, ignore_errors=True)
        self.folder = folder
        self.files: dict[int, Path] = {}
        self._sums: dict[int, str] = {}  # of the files that are on disk for good

    def get(self, client: int) -> dict | None:
        file = self.files.get(client)
        return None if file is None else load_tensors(file)

    def put(self, client: int, round: int, tensors: Tensors) -> None:
        """NotWritten if the disk does not take it: what the client kept before stays."""
        file = self.folder / f"{client}-{round}.safetensors"
        with _beside(file, f"what client {client} keeps of round {round + 1}") as partial:
            save_tensors(partial, tensors)
        if (old := self.files.get(client)) is not None and old != file:
            old.unlink()
        self.files[client] = file
        self._sums.pop(client, None)

    def link(self, folder: Path) -> dict[str, str]:
        """Links every file into a checkpoint's folder: its name there -> its SHA-256."""
        checksums = {}
        for client, file in sorted(self.files.items()):
            if client not in self._sums:
                _sync(file)
                self._sums[client] = _sha256(file)
            name = f"carry-{client}.safetensors"
            link(file, folder / name)
            checksums[name] = self._sums[client]
        return checksums

    def restore(self, kept: dict[int, Kept]) -> None:
        """Takes over a checkpoint's files; what this folder held is forgotten."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.files, self._sums = {}, {}
        for client, there in kept.items():
            file = self.folder / there.path.name
            link(there.path, file)
            _sync(file)  # whoever copied the checkpoint may not have
            self.files[client], self._sums[client] = file, there.sha256


@contextmanager
def _beside(final: Path, what: str) -> Iterator[Path]:
    """Where to write what is renamed to `final` when it is whole; where that fails nothing is left."""
    partial = final.with_name(f"{PARTIAL}{final.name}")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.rename(final)
    except (OSError, SafetensorError) as error:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)
        raise NotWritten(
            f"{final}: {what} cannot be written: {error}; --resume goes on once the disk takes it"
        ) from None


def link(source: str | Path, target: str | Path) -> None:
    """The same file where one file system holds both, else a copy, which then is on disk for good. Takes a
    target's place."""
    target = Path(target)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        _sync(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(tensors: Tensors) -> str:
    """A short fingerprint of names, shapes and exact bits: two states are equal if theirs are."""
    digest = hashlib.sha256()
    for name, t in sorted(leaves(tensors), key=lambda leaf: leaf[0]):
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
