"""Typed, frozen configuration, and errors that say where, what was given, what is allowed.

A section of a YAML file is a `Config`; its fields are documented under each field. Nothing here knows
the sections: they stand beside what they configure.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

PLAIN = {"tuple_type": "a list", "list_type": "a list", "dict_type": "a section", "model_type": "a section"}
"""What pydantic calls by Python's names."""


class ConfigError(ValueError):
    """Bad input of the user: the command line prints it and exits with 2."""


class Config(BaseModel):
    """A frozen section of a configuration. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


C = TypeVar("C", bound=BaseModel)


def parse(cls: type[C], given: Any, where: str) -> C:
    """`given` (what YAML held) as a `cls`. `where` is the file and path for the error, "exp.yaml: model"."""
    keys = _keys(cls)
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: given {given!r}; allowed: a mapping with the keys {_names(keys)}")
    if internal := [key for key in given if key in cls.model_fields and key not in keys]:
        raise ConfigError(_unknown(_join(where, internal), internal[0], cls))
    try:
        return cls.model_validate(dict(given))
    except ValidationError as error:
        raise ConfigError(_explain(cls, given, where, error)) from None


def choose(registry: Mapping[str, Any], name: Any, where: str, what: str) -> Any:
    """`registry[name]`, or an error that lists the known names and the nearest one."""
    if name not in registry:
        raise ConfigError(f"{where}: no {what} is called {name!r}; {nearest(name, registry)}")
    return registry[name]


def nearest(given: Any, known: Iterable[str]) -> str:
    """ "did you mean 'x'? known: ..." """
    known = list(known)
    longer = [name for name in known if name.startswith(str(given))] if given else []
    close = longer or difflib.get_close_matches(str(given), known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {_names(known)}"


def load_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file that holds a mapping. `1e-3` is a number, and a key that stands twice is an error."""
    path = Path(path)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        given = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: given {type(given).__name__}; allowed: a mapping of sections")
    return given


def set_path(given: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `given` with `value` at a dotted path: "training.lr", or into a list "method.submodels.0.width".
    Missing sections are made; of a list only what is there can be changed."""
    return _set(given, path.split("."), 0, value)


def _set(given: Any, path: list[str], depth: int, value: Any) -> Any:
    """`given`, which stands `depth` deep in the path, with `value` below it."""
    if depth == len(path):
        return value
    where, at, key = ".".join(path), ".".join(path[:depth]), path[depth]
    if isinstance(given, list | tuple):
        if not key.isdecimal() or int(key) >= len(given):
            allowed = f"0 to {len(given) - 1}" if given else "nothing, for it is empty"
            raise ConfigError(f"{where}: {at} is a list, given its entry {key!r}; allowed: {allowed}")
        i = int(key)
        return [*given[:i], _set(given[i], path, depth + 1, value), *given[i + 1 :]]
    if given is None and key.isdecimal():
        raise ConfigError(f"{where}: {at} is not given, so it has no entry {key}; write its list first")
    section = given or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{where}: {at} is {given!r}, not a section")
    return section | {key: _set(section.get(key), path, depth + 1, value)}


def parse_setting(text: str) -> tuple[str, Any]:
    """ "training.lr=1e-2" from the command line as ("training.lr", 0.01); the value is read as YAML."""
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set {text!r}: allowed: path=value, e.g. training.lr=0.05")
    try:
        return path.strip(), yaml.load(value, Loader=_Loader)
    except yaml.YAMLError:
        raise ConfigError(f"--set {text!r}: the value is not valid YAML") from None


def differences(old: Mapping[str, Any], new: Mapping[str, Any], at: str = "") -> list[str]:
    """The dotted paths at which two plain configurations differ, as "path: old -> new"."""
    found = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{at}{key}.")
        elif a != b:
            found.append(f"{at}{key}: {a!r} -> {b!r}")
    return found


def _explain(cls: type[BaseModel], given: Any, where: str, error: ValidationError) -> str:
    """A line for each thing that is wrong. Where one of several types is allowed, they share it; where `given` got as
    far as a part of one of them, that part counts."""
    errors = error.errors()
    paths = [_path(given, e) for e in errors]
    lines: dict[str, list[str]] = {}
    for e, path in zip(errors, paths, strict=True):
        if any(longer[: len(path)] == path and len(longer) > len(path) for longer in paths):
            continue
        start, allowed = _line(cls, given, where, e)
        lines.setdefault(start, []).append(allowed)
    return "\n".join(start + ", or ".join(allowed) for start, allowed in lines.items())


def _line(cls: type[BaseModel], given: Any, where: str, error: Any) -> tuple[str, str]:
    """What is wrong, and what would be right."""
    path = _path(given, error)
    place = _join(where, path)
    if error["type"] in ("extra_forbidden", "invalid_key"):
        return _unknown(place, path[-1], _owner(cls, path[:-1])), ""
    if error["type"] == "missing":
        return f"{place}: missing; it has no default", ""
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{place}: given {error['input']!r}; allowed: ", PLAIN.get(str(error["type"])) or message


def _path(given: Any, error: Any) -> list[Any]:
    """Where in `given` the error is. pydantic also names the type that it tried, of several."""
    is_missing = error["type"] == "missing"
    path: list[Any] = []
    for part in error["loc"][:-1] if is_missing else error["loc"]:
        if part in given if isinstance(given, Mapping) else isinstance(part, int):
            path.append(part)
            given = given[part]
    return [*path, error["loc"][-1]] if is_missing else path


def _unknown(place: str, key: Any, cls: type[BaseModel]) -> str:
    return f"{place}: unknown key {key!r}; {nearest(key, _keys(cls))}"


def _join(where: str, path: Iterable[Any]) -> str:
    """ "exp.yaml: training.lr": only the file is set off by a colon."""
    path = ".".join(map(str, path))
    if not path:
        return where
    return f"{where}.{path}" if ": " in where else f"{where}: {path}"


def _keys(cls: type[BaseModel]) -> list[str]:
    """The fields that a user may give; excluded ones are filled in by rayfl."""
    return [name for name, field in cls.model_fields.items() if not field.exclude]


def _owner(cls: type[BaseModel], loc: Iterable[Any]) -> type[BaseModel]:
    for part in loc:
        field = cls.model_fields.get(str(part))
        if field is not None:
            cls = next((kind for kind in _kinds(field.annotation) if issubclass(kind, BaseModel)), cls)
    return cls


def _kinds(annotation: Any) -> Iterator[type]:
    """The classes that a type names, inside unions and lists as well."""
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(str(n) for n in names))


class _Loader(yaml.SafeLoader):
    pass


# YAML 1.1 wants a dot in a float and reads 1e-3 as text
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)$"),
    list("-+0123456789."),
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
    return {loader.construct_object(k): loader.construct_object(v, deep=True) for k, v in node.value}


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
