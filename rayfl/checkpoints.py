"""Checkpoints: atomic, checksummed, no pickle.

A checkpoint is a folder `round-000012/` with `state.safetensors`, one `carry-<client>.safetensors` for every
client that keeps something, and `manifest.json`: the round, the configuration, and the SHA-256 of every file.
It is written beside its place and renamed into it, so a folder of that name is whole or it is damaged later;
a damaged one is passed over for the one before, and that is said. Files that did not change since the last
checkpoint are hard links to it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rayfl.config import ConfigError, differences
from rayfl.tensors import Tensors, leaves, nest

MANIFEST = "manifest.json"


class DamagedCheckpoint(ConfigError):
    """A checkpoint that cannot be read, or is not what its manifest says."""


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
    carries: dict[int, Path] | None = None,
    keep: int = 2,
) -> Path:
    """Writes the checkpoint of `round` into `folder` and removes all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"round-{round:06d}"
    partial = folder / f".partial-{os.getpid()}"
    for torn in folder.glob(".partial-*"):
        shutil.rmtree(torn)
    partial.mkdir()
    save_tensors(partial / "state.safetensors", state)
    for client, file in (carries or {}).items():
        _link(file, partial / f"carry-{client}.safetensors")
    checksums = {file.name: _sha256(file) for file in sorted(partial.iterdir())}
    manifest = {"round": round, "config": config, "sha256": checksums}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for file in partial.iterdir():
        _sync(file)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _sync(folder)
    for old in complete(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def complete(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; none where there is no such folder."""
    return sorted(folder.glob("round-*"))


def read(path: Path) -> tuple[int, dict[str, Any], dict, dict[int, Path]]:
    """(round, config, state, carry files by client), after every checksum was verified."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, expected in manifest["sha256"].items():
            if _sha256(path / name) != expected:
                raise DamagedCheckpoint(f"{path / name}: its SHA-256 is not the manifest's")
        state = load_tensors(path / "state.safetensors")
        carries = {
            int(name.removeprefix("carry-").removesuffix(".safetensors")): path / name
            for name in manifest["sha256"]
            if name.startswith("carry-")
        }
        return manifest["round"], manifest["config"], state, carries
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, DamagedCheckpoint):
            raise
        raise DamagedCheckpoint(f"{path}: not a whole checkpoint: {error}") from None


def latest(
    folder: Path, config: dict[str, Any], say: Callable[[str], None]
) -> tuple[int, dict, dict[int, Path]] | None:
    """(round, state, carries) of the newest good checkpoint, None where there is none.

    Damaged ones are passed over and said. One of another configuration is an error that lists what differs.
    """
    found = complete(folder)
    for path in reversed(found):
        try:
            round, saved, state, carries = read(path)
        except DamagedCheckpoint as error:
            say(f"{error}; going back to the checkpoint before it")
            continue
        same_config(path, saved, config)
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

    Never all in memory. A client's older file stays until a checkpoint no longer needs it.
    """

    def __init__(self, folder: Path):
        """`folder` is its own: what an earlier run left there goes."""
        shutil.rmtree(folder, ignore_errors=True)
        self.folder = folder
        self.files: dict[int, Path] = {}

    def get(self, client: int) -> dict | None:
        file = self.files.get(client)
        return None if file is None else load_tensors(file)

    def put(self, client: int, round: int, tensors: Tensors) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{client}-{round}.safetensors"
        save_tensors(file, tensors)
        if (old := self.files.get(client)) is not None and old != file:
            old.unlink()
        self.files[client] = file

    def restore(self, files: dict[int, Path]) -> None:
        """Takes over a checkpoint's files; what this folder held is forgotten."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.files = {}
        for client, file in files.items():
            self.files[client] = self.folder / file.name
            _link(file, self.files[client])

    def __iter__(self) -> Iterable[int]:
        return iter(self.files)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


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
