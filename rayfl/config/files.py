"""Configurations as plain values: read from YAML, changed at a path, compared."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayfl.config.errors import ConfigError
from rayfl.config.plain import DEEPEST, LARGEST_TEXT, read_yaml, shown


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. `1e-3` is a number; keys are text and unique."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_TEXT + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    given = _read(text, str(path))
    if not isinstance(given, dict):
        problem = "the file is empty" if given is None else f"{shown(given)} is not valid"
        raise ConfigError(f"{path}: {problem}. Allowed: a mapping of sections")
    return given


def set_path(given: dict[str, Any], path: str | list[str], value: Any) -> dict[str, Any]:
    """Return a copy of `given` with `value` at a dotted path: "training.lr" or "method.submodels.0.width"; in parts, if
    one has dots itself. Missing sections are created; list entries must exist."""
    parts = path.split(".") if isinstance(path, str) else path
    if len(parts) > DEEPEST:
        raise ConfigError(f"{shown(path)}: the path has {len(parts)} parts. Allowed: at most {DEEPEST}")
    return _set(given, parts, 0, value)


def _read(text: str | bytes, where: str) -> Any:
    try:
        return read_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _set(given: Any, path: list[str], depth: int, value: Any) -> Any:
    """Return `given`, the value at the first `depth` parts of the path, with `value` set below it."""
    if depth == len(path):
        return value
    where, at, key = ".".join(path), ".".join(path[:depth]), path[depth]
    if isinstance(given, list | tuple):
        places = {str(i): i for i in range(len(given))}
        if key not in places:
            allowed = f"0 to {len(given) - 1}" if given else "no entry, because the list is empty"
            raise ConfigError(f"{where}: {at} is a list without the entry {key!r}. Allowed: {allowed}")
        i = places[key]
        return [*given[:i], _set(given[i], path, depth + 1, value), *given[i + 1 :]]
    if given is None and key.isdecimal():
        raise ConfigError(f"{where}: {at} is not set and has no entry {key}. Hint: set the whole list")
    section = given or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{where}: {at} is {shown(given)}. Allowed: a section")
    return section | {key: _set(section.get(key), path, depth + 1, value)}


def parse_setting(text: str) -> tuple[str, Any]:
    """Return "training.lr=1e-2" as ("training.lr", 0.01); the value is read as YAML."""
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set: {shown(text)} is not valid. Allowed: path=value, e.g. training.lr=0.05")
    return path.strip(), _read(value, f"--set {shown(text)}")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], at: str = "") -> list[str]:
    """Return the differences of two plain configurations as "dotted.path: old -> new"."""
    found = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{at}{key}.")
        elif a != b:
            found.append(f"{at}{key}: {shown(a)} -> {shown(b)}")
    return found
