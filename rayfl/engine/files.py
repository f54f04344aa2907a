"""Tensors in files: safetensors that are there wholly or not at all, and links to them."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rayfl.core.tensors import Tensors, leaves, nest

PARTIAL = ".partial-"


class NotWritten(RuntimeError):
    """The disk did not take a checkpoint, or what a client keeps. Nothing of it is left there."""


def save_tensors(path: Path, tensors: Tensors) -> None:
    """Nested tensors as safetensors; names are joined with "/". The format sorts them, so their order is
    written too: whoever sums over a resumed state sums in the same order."""
    flat = {name: t.contiguous().cpu() for name, t in leaves(tensors)}
    save_file(flat, path, {"order": json.dumps(list(flat))})


def load_tensors(path: Path) -> dict:
    """The nested tensors of a file, in their order."""
    with safe_open(path, "pt") as file:
        return nest({name: file.get_tensor(name) for name in json.loads(file.metadata()["order"])})


@contextmanager
def beside(final: Path, what: str) -> Iterator[Path]:
    """Where to write what is renamed to `final` when it is whole; where that fails nothing is left."""
    partial = final.with_name(f"{PARTIAL}{final.name}")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.rename(final)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            remove(partial)
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
        sync(target)


def opened(path: Path) -> BufferedReader:
    """A file to read, or the file that a link names. OSError for a pipe or a device, which may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "neither a file nor a link to one", str(path))
    return path.open("rb")


def remove(path: Path) -> None:
    """A folder with all that is in it, a file, or a link without what it names; if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
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
