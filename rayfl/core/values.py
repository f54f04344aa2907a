"""Objects without an import path, such as a class of a notebook, and results that processes need not compute again.

A section names an object by a text. The archive of a run (`rayfl.engine.plugins`) contains the objects that its
settings name, and those of a name that continues one after "#".
"""

import copy
import hashlib
import inspect
import pickle
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn

_KEPT: dict[str, Any] = {}
FOLDERS: list[Path] = []
"""Folders with objects of other processes."""


def keep(value: Any) -> str:
    """Keep a class, a function or a copy of a module, and return its name. Equal content has an equal name in every
    process."""
    kind = type(value) if isinstance(value, nn.Module) else value
    digest = hashlib.sha256(_source(kind))
    if isinstance(value, nn.Module):
        digest.update(repr(value).encode())
        for name, t in value.state_dict().items():
            digest.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
            digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    name = f"{getattr(kind, '__qualname__', type(kind).__qualname__)}@{digest.hexdigest()[:16]}"
    _KEPT[name] = copy.deepcopy(value)
    return name


def _source(kind: Any) -> bytes:
    try:
        return inspect.getsource(kind).encode()
    except (OSError, TypeError):
        return cloudpickle.dumps(kind)


def keep_as(name: str, value: Any) -> None:
    _KEPT[name] = value


def find(name: str) -> Any:
    """Return an object of this process or of the run's archive. Raise KeyError without one."""
    if name not in _KEPT:
        file = next((file for folder in FOLDERS if (file := folder / _file(name)).is_file()), None)
        if file is None:
            raise KeyError(name)
        # written by the driver of this run, into a folder of this user
        _KEPT[name] = pickle.loads(file.read_bytes())
    return _KEPT[name]


def named_in(texts: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and object of what these texts name."""
    for name, value in _KEPT.items():
        if name in texts or name.partition("#")[0] in texts:
            yield name, value


def files(texts: Collection[str]) -> dict[str, bytes]:
    """Return the content of the archive's files with the objects that these texts name."""
    return {_file(name): cloudpickle.dumps(value) for name, value in named_in(texts)}


def _file(name: str) -> str:
    return f"rayfl_values/{hashlib.sha256(name.encode()).hexdigest()}.pkl"
