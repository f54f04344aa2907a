"""Atomic files of tensors (safetensors), links and checksums."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rayfl.config import ConfigError, RunFailed
from rayfl.config.plain import shown
from rayfl.core.permissions import as_new
from rayfl.core.tensors import SEPARATOR, Tensors, leaves, nest, places

PARTIAL = ".partial-"
SUM = "sum"
"""Key of the SHA-256 of the other keys in a JSON object."""


class NotWritten(RunFailed):
    """Raised if the disk does not accept a file or folder. No part of it is left."""


def absolute(given: Any, field: str = "folder") -> Path:
    """Return the absolute path of a run's or a sweep's folder: a server actor may have another working folder."""
    if not isinstance(given, str | Path) or not str(given) or "\0" in str(given):
        raise ConfigError(f"{field}: {shown(given)} is not valid. Allowed: a path")
    return Path(given).expanduser().resolve()


def save_tensors(path: Path, tensors: Tensors) -> None:
    """Write nested tensors as safetensors, names joined with "/". The format sorts names, so the order is stored too:
    sums over a resumed state then have the same order. A tensor with several names is written for each."""
    flat: dict[str, torch.Tensor] = {}
    written: set[int] = set()
    for name, t in leaves(tensors):
        own = t.contiguous().cpu()
        flat[name] = own.clone() if own.data_ptr() in written else own
        written.add(own.data_ptr())
    save_file(flat, path, {"order": json.dumps([place for place, _ in places(tensors)])})
    as_new(path)


def load_tensors(path: Path) -> dict:
    """Return the nested tensors of a file, in their order."""
    with safe_open(path, "pt") as file:
        order = json.loads(file.metadata()["order"])
        return nest({place: None if place.endswith(SEPARATOR) else file.get_tensor(place) for place in order})


@contextmanager
def beside(final: Path, what: str) -> Iterator[Path]:
    """Yield a temporary path; at the end of the block it replaces `final`, also a folder. Raise NotWritten and leave
    nothing if that fails."""
    partial, replaced = (final.with_name(f"{PARTIAL}{name}{final.name}") for name in ("", "replaced-"))
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if final.is_dir():
            remove(replaced)
            final.rename(replaced)
        partial.rename(final)
        remove(replaced)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            remove(partial)
        raise NotWritten(f"{final}: {what} cannot be written: {error}. Hint: --resume once the disk works") from None
    except BaseException:
        with suppress(OSError):
            remove(partial)
        raise


def link(source: str | Path, target: str | Path) -> None:
    """Replace `target` with a hard link to `source`, or across file systems with a synced copy."""
    target = Path(target)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        sync(target)


def opened(path: Path) -> BufferedReader:
    """Open a file or a link to one for reading. Raise OSError for a pipe or a device, which may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "neither a file nor a link to one", str(path))
    return path.open("rb")


def remove(path: Path) -> None:
    """Remove a folder with its content, a file, or a link without its target, if it exists. A kill leaves no part of a
    folder under its name."""
    if path.is_dir() and not path.is_symlink():
        if not path.name.startswith(PARTIAL):
            aside = path.with_name(f"{PARTIAL}removed-{path.name}")
            remove(aside)
            path = path.rename(aside)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def with_sum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON object with its `SUM`, which does not depend on its formatting."""
    plain = json.loads(json.dumps(content))
    return {**content, SUM: hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


def without_sum(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the content of a JSON object without its `SUM`; None if that differs."""
    content = {key: value for key, value in given.items() if key != SUM}
    return content if with_sum(content)[SUM] == given.get(SUM) else None


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(tensors: Tensors) -> str:
    """Return a short fingerprint of names, shapes and exact bits."""
    digest = hashlib.sha256()
    for name, t in sorted(leaves(tensors), key=lambda leaf: leaf[0]):
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def check_place(path: Path) -> None:
    """Raise a ConfigError if a folder cannot be made or written."""
    try:
        above = next(place for place in (path, *path.parents) if place.exists())
        reason = "" if above.is_dir() else f"{above} is a file"
        if not os.access(above, os.W_OK):
            reason = f"{above} cannot be written"
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise ConfigError(f"{path}: the folder cannot be made: {reason}. Allowed: a new or an existing folder")
