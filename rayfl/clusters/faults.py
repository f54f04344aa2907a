"""Checks for all cluster files: keys and values, secrets, versions of Ray."""

import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jsonschema.validators import validator_for
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from rayfl.config import nearest
from rayfl.config.plain import joined, shown

PLAIN_TYPES = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "null": "null",
    "number": "a number",
    "object": "a section",
    "string": "text",
}
BOUNDS = {
    "minimum": "at least",
    "maximum": "at most",
    "minItems": "a length of at least",
    "maxItems": "a length of at most",
}
KEYS = re.compile(r"(?:AKIA|ASIA)[A-Z0-9]{16}|-----BEGIN [A-Z ]*PRIVATE KEY-----|\bhf_\w{30,}|\bgh[pousr]_\w{30,}")
NAMED_SECRET = re.compile(
    r"(?:^|[_-])(?:password|passwd|token|secret|credentials|(?:api|access|secret|flask)[_-]?key)$", re.I
)
ASSIGNED = re.compile(
    r"\b(\w*(?:PASSWORD|PASSWD|TOKEN|SECRET|API_KEY|ACCESS_KEY|SECRET_KEY))=(?!['\"]?[$~/'\"]|\s|$)", re.I
)
IN_ADDRESS = re.compile(r"://[^/\s:@$]+:[^/\s@$]+@")
RAY_VERSION = re.compile(r"(?<![\w-])ray(?:\[[\w,]*\])?\s*==\s*([\w.]+)|rayproject/ray:([\w.]+)|[-:]ray(\d+\.[\w.]+)")


def leaves(given: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[list[Any], Any]]:
    """Yield path and value of everything that is not a section or list."""
    if isinstance(given, dict | list):
        for key, value in given.items() if isinstance(given, dict) else enumerate(given):
            yield from leaves(value, (*path, key))
    elif path:
        yield list(path), given


def texts(given: Any) -> Iterator[tuple[str, str]]:
    yield from ((joined(path), value) for path, value in leaves(given) if isinstance(value, str))


def secrets(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for every key, password or token in the file, without showing it."""
    allowed = "Allowed: a variable, or a file that is made on the machine"
    for path, value in leaves(given):
        place, text = joined(path), str(value)
        # the name of a container's environment variable is beside its value
        name = _variable(given, path) if path[-1] == "value" else str(path[-1])
        is_literal = value is not None and not isinstance(value, bool) and not re.match(r"[$~/]|$", text)
        if KEYS.search(text):
            yield f"{place}: the file contains a key or token. {allowed}"
        elif is_literal and NAMED_SECRET.search(name) and path[0] != "file_mounts":
            yield f"{place}: the file contains a secret. {allowed}"
        elif found := ASSIGNED.search(text):
            yield f"{place}: the file contains the value of {found.group(1)}. {allowed}"
        elif IN_ADDRESS.search(text):
            yield f"{place}: the address contains a password. {allowed}"


def _variable(given: Any, path: list[Any]) -> str:
    for key in path[:-1]:
        given = given[key]
    return str(given.get("name", ""))


def versions(texts: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem for every version of Ray that rayfl does not support, or that differs from the first."""
    ours = next(r for r in map(Requirement, importlib.metadata.requires("rayfl") or []) if r.name == "ray").specifier
    found: dict[str, str] = {}
    for place, text in texts.items():
        direct = [text] if place.rpartition(".")[2] == "rayVersion" else []
        for version in [*direct, *("".join(parts) for parts in RAY_VERSION.findall(text))]:
            found[version] = place
            if not _within(version, ours):
                yield f"{place}: Ray {version} does not match. Allowed: {ours}, which rayfl is made for"
    if len(found) > 1:
        [(first, _), *others] = found.items()
        for version, place in others:
            yield f"{place}: Ray {version}, and {first} elsewhere in the file differ. Allowed: one version of Ray"


def _within(version: str, allowed: Any) -> bool:
    try:
        return Version(version) in allowed
    except InvalidVersion:
        return False


def by_schema(schema: Mapping[str, Any], given: Any) -> Iterator[str]:
    """Yield a problem for every place where `given` does not match a JSON schema."""
    errors = validator_for(schema)(schema).iter_errors(given)
    for error in sorted(errors, key=lambda e: [str(part) for part in e.absolute_path]):
        yield from _sentences(error)


def _sentences(error: Any) -> Iterable[str]:
    path, rule = list(error.absolute_path), error.validator_value
    place = joined(path)
    if error.validator == "additionalProperties":
        known = error.schema.get("properties", {})
        for key in sorted(set(error.instance) - set(known)):
            yield f"{joined([*path, key])}: unknown key {shown(key)}. {nearest(key, known)}"
    elif error.validator == "required":
        yield from (f"{joined([*path, key])}: missing" for key in rule if key not in error.instance)
    else:
        hidden = any(NAMED_SECRET.search(str(part)) for part in path)
        yield (
            f"{place}: {'a value' if hidden else shown(error.instance)} is not valid. Allowed: {_allowed(error, path)}"
        )


def _allowed(error: Any, path: list[Any]) -> str:
    kind, rule = error.validator, error.validator_value
    if kind == "anyOf":
        return " or ".join(PLAIN_TYPES.get(part.get("type"), "another value") for part in rule)
    if kind == "type":
        types = " or ".join(PLAIN_TYPES[name] for name in ([rule] if isinstance(rule, str) else rule))
        of_node = "resources" in path and rule == "integer"
        return f"{types}; fractions of a GPU are set by `run.gpus` of an experiment" if of_node else types
    if kind in BOUNDS:
        return f"{BOUNDS[kind]} {rule}"
    if kind == "enum":
        return f"one of {', '.join(map(str, rule))}"
    if kind == "const":
        return str(rule)
    return f"what fits {rule}" if kind == "pattern" else error.message
