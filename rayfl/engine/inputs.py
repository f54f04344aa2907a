"""Digests of what a result depends on beside its settings: the data, files named in settings, and code of a user's own
classes. A run resumes only if they are the same, or if the user accepts the changes."""

import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from rayfl.config import ConfigError
from rayfl.data.base import Arrays
from rayfl.engine.files import sha256
from rayfl.engine.plugins import own_places
from rayfl.experiment import Experiment

Inputs = dict[str, str]
"""Name of an input -> its digest."""
Resume = bool | Literal["changed"]
"""Whether to resume a run, and, with "changed", to accept that its inputs changed."""


def inputs_of(experiments: Sequence[Experiment], arrays: Arrays) -> Inputs:
    """Return the digests of the inputs of experiments on the same data."""
    found = {f"data: {name}": _of_array(array) for name, array in _arrays(arrays)}
    found |= {f"data: {name}": digest for name, digest in arrays.digests.items()}
    for experiment in experiments:
        settings = {key: value for key, value in experiment.result_config().items() if key != "data"}
        found |= {f"file {path}": _of_file(path) for path in sorted(set(_files(settings)))}
        found |= _of_modules(sorted(set(_modules(settings))))
    for kind in sorted({type(part) for part in _parts(list(experiments))}, key=lambda kind: kind.__qualname__):
        found |= _of_code(kind)
    return found


def _arrays(arrays: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    for part in ("train", "test", "public"):
        for name, array in (getattr(arrays, part) or {}).items():
            yield f"{part} {name}", array
    for name in ("users", "test_users"):
        if (array := getattr(arrays, name)) is not None:
            yield name, array


def _of_array(array: np.ndarray) -> str:
    # the fastest of hashlib
    digest = hashlib.blake2b(f"{array.dtype.str} {array.shape}\n".encode(), digest_size=32)
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _files(value: Any) -> Iterator[Path]:
    """Yield the files and folders named in settings, by paths with a slash or a suffix."""
    if isinstance(value, Mapping | list | tuple):
        for inside in value.values() if isinstance(value, Mapping) else value:
            yield from _files(inside)
    elif isinstance(value, str) and 0 < len(value) < 4096 and ("/" in value or "." in value) and "\0" not in value:
        path = Path(value).expanduser()
        if path.is_file() or path.is_dir():
            yield path


def _modules(value: Any) -> Iterator[str]:
    """Yield the user's own modules that settings name as "package.module:name"."""
    if isinstance(value, Mapping | list | tuple):
        for inside in value.values() if isinstance(value, Mapping) else value:
            yield from _modules(inside)
    elif isinstance(value, str) and (name := value.partition(":")[0]) in sys.modules and ":" in value:
        if any(own_places(name.partition(".")[0])):
            yield name


def _of_file(path: Path) -> str:
    if path.is_file():
        return sha256(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    lines = (f"{file.relative_to(path)} {sha256(file)}\n" for file in files)
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def _parts(value: Any) -> Iterator[Any]:
    """Yield the objects inside settings whose class is not rayfl's."""
    if isinstance(value, BaseModel):
        if not type(value).__module__.startswith("rayfl."):
            yield value
        yield from _parts([getattr(value, name) for name in type(value).model_fields])
    elif isinstance(value, Mapping | list | tuple):
        for inside in value.values() if isinstance(value, Mapping) else value:
            yield from _parts(inside)


def _of_code(kind: type) -> Inputs:
    """Return the digests of the modules of a class and of those of the user's that they use; of a class of the main
    program, that of its own text."""
    if kind.__module__ == "__main__":
        try:
            return {f"code {kind.__qualname__}": hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()}
        except (OSError, TypeError):
            return {}
    return _of_modules([kind.__module__])


def _of_modules(names: Iterable[str]) -> Inputs:
    files = {name: getattr(sys.modules[name], "__file__", None) for name in _used(names)}
    return {f"code {name}": sha256(Path(file)) for name, file in files.items() if file and Path(file).is_file()}


def _used(names: Iterable[str]) -> list[str]:
    """Return these modules and, of the user's own ones and of their packages, all that their globals come from."""
    waiting = list(names)
    packages, found = {name.partition(".")[0] for name in waiting}, []
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        if name in found or name not in sys.modules or not (top in packages or any(own_places(top))):
            continue
        found.append(name)
        for value in list(vars(sys.modules[name]).values()):
            origin = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            waiting += [origin] if isinstance(origin, str) else []
    return sorted(found)


def changed(old: Inputs, new: Inputs) -> list[str]:
    """Return the names of inputs that changed."""
    return [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]


def check_same(path: Path, old: Inputs, new: Inputs, resume: Resume) -> list[str]:
    """Return a note on inputs that changed since a run was started or last resumed. Raise a ConfigError if the user
    did not accept it."""
    names = changed(old, new)
    if names and resume != "changed":
        raise ConfigError(
            f"{path}: these inputs changed since the run was started:\n  " + "\n  ".join(names) + "\nHint: restore "
            'them, start again in another folder, or continue with them by --resume-changed (resume="changed")'
        )
    return [f"resuming with changed inputs: {', '.join(names)}"] if names else []
