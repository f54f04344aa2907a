"""Errors of a configuration: the place, the problem and the allowed values, also of pydantic's errors."""

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from rayfl.config.plain import joined, shown

MOST_PLACES = 10
"""Maximum number of places in one error."""
MOST_NAMES = 100
"""Maximum number of names in one list of allowed names."""

PLAIN_WORDS = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a section",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number below 2**63",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "model_type": "a section",
    "none_required": "null",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "a length of at least {min_length}",
    "string_type": "text",
    "too_long": "a length of at most {max_length}",
    "too_short": "a length of at least {min_length}",
    "tuple_type": "a list",
    "union_tag_invalid": "a name, one of {expected_tags}",
    "union_tag_not_found": "a mapping with a name",
}
"""Error type of pydantic -> description of the allowed values."""


class ConfigError(ValueError):
    """Invalid input; the command line exits with 2. In a validator, the place is relative to the parsed section.

    >>> from rayfl import Experiment
    >>> try:
    ...     Experiment(model="digits_cnn", method="fedprox", rounds=0)
    ... except ConfigError as error:
    ...     print(error)
    Experiment: rounds: 0 is not valid. Allowed: at least 1
    """


def choose(registry: Mapping[str, Any], name: Any, where: str, what: str) -> Any:
    """Return `registry[name]`. A ConfigError lists the known names and the nearest one."""
    if not isinstance(name, str) or name not in registry:
        raise ConfigError(f"{where}: no {what} is called {shown(name)}. {nearest(name, registry)}")
    return registry[name]


def nearest(given: Any, known: Iterable[str]) -> str:
    """Return "Did you mean 'x'? Allowed: ..."."""
    known = list(known)
    return f"{typo_of(given, known)}Allowed: {names_of(known)}"


def typo_of(given: Any, known: Iterable[str]) -> str:
    """Return "Did you mean 'x'? " for a name that begins with `given`, contains it as a path, has few other letters, or
    its words' initials; "" without one."""
    given, known = str(given), list(known)
    longer = [name for name in known if given and name.startswith(given)]
    alike = [name for name in difflib.get_close_matches(given, known) if _is_typo(given, name)]
    initials = "".join(word[:1] for word in given.split("_"))
    outer = [name for name in known if given.startswith(f"{name}.")]
    close = longer or outer or alike or [name for name in known if name == initials]
    return f"Did you mean {close[0]!r}? " if close else ""


def _is_typo(given: str, name: str) -> bool:
    """Return whether at most one letter in four differs: fednova is not meant to be fedrora."""
    blocks = difflib.SequenceMatcher(None, given, name).get_matching_blocks()
    longest = max(len(given), len(name))
    return longest - sum(block.size for block in blocks) <= max(1, longest // 4)


def explain(cls: type[BaseModel], given: Any, where: str, error: ValidationError) -> str:
    """Return one line per error. Several allowed types of one field share a line; if `given` matches one of them in
    part, only the errors inside that part are reported."""
    wrong: dict[tuple[Any, ...], list[Any]] = {}
    for e in error.errors(include_url=False):
        wrong.setdefault(tuple(_path(given, e)), []).append(e)
    parents = {path[:i] for path in wrong for i in range(len(path))}
    places = [errors for path, errors in wrong.items() if path not in parents]
    lines: dict[str, dict[str, None]] = {}
    for e in itertools.chain(*places[:MOST_PLACES]):
        start, allowed = _line(cls, given, where, e)
        lines.setdefault(start, {}).update(dict.fromkeys(allowed))
    more = [f"and {len(places) - MOST_PLACES} more"] if len(places) > MOST_PLACES else []
    return "\n".join([*(start + ", or ".join(allowed) for start, allowed in lines.items()), *more])


def _line(cls: type[BaseModel], given: Any, where: str, error: Any) -> tuple[str, list[str]]:
    """Return the start of an error's line, and alternatives of allowed values."""
    path = _path(given, error)
    place = join(where, path)
    if error["type"] == "invalid_key" and not path:
        return f"{place}: a key is not valid. Allowed: text", [""]
    if error["type"] in ("extra_forbidden", "invalid_key"):
        return unknown(place, path[-1], _owner(cls, path[:-1])), [""]
    if error["type"] == "missing":
        return f"{place}: a value is required", [""]
    context = error.get("ctx", {})
    if isinstance(context.get("error"), ConfigError):
        return "\n".join(f"{where}: {line}" for line in str(context["error"]).split("\n")), [""]
    field = _owner(cls, path[:-1]).model_fields.get(str(path[-1])) if path else None
    null = ["null"] if field is not None and NoneType in get_args(field.annotation) else []
    return f"{place}: {shown(error['input'])} is not valid. Allowed: ", [_allowed(error, context), *null]


def _allowed(error: Any, context: Mapping[str, Any]) -> str:
    if error["type"] == "literal_error":
        names = context["expected"].replace("'", "").replace(" or ", ", ")
        return f"one of {names}" if ", " in names else names
    if plain := PLAIN_WORDS.get(error["type"]):
        numbers = {key: f"{value:g}" if isinstance(value, float) else value for key, value in context.items()}
        return plain.format(**numbers)
    return error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")


def _path(given: Any, error: Any) -> list[Any]:
    """Return the path of the error in `given`, without the names of union members that pydantic adds."""
    is_missing = error["type"] == "missing"
    path: list[Any] = []
    for part in error["loc"][:-1] if is_missing else error["loc"]:
        if part in given if isinstance(given, Mapping) else isinstance(part, int):
            path.append(part)
            given = given[part]
    return [*path, error["loc"][-1]] if is_missing else path


def unknown(place: str, key: Any, cls: type[BaseModel]) -> str:
    """Return the error for a key that `cls` does not have. It names the sections of `cls` that have this key."""
    keys = keys_of(cls)
    inside = [f"{name}.{key}" for name in keys if key in _keys_inside(cls, name)]
    hint = f"Did you mean {' or '.join(map(repr, inside))}? Allowed: {names_of(keys)}" if inside else nearest(key, keys)
    return f"{place}: unknown key {shown(key)}. {hint}"


def join(where: str, path: Iterable[Any]) -> str:
    """Return "exp.yaml: training.lr": a colon follows the file only."""
    path = joined(list(path))
    if not path:
        return where
    return f"{where}.{path}" if ": " in where else f"{where}: {path}"


def keys_of(cls: type[BaseModel]) -> list[str]:
    """Return the fields that users can set; excluded ones are set by rayfl."""
    return [name for name, field in cls.model_fields.items() if not field.exclude]


def _keys_inside(cls: type[BaseModel], name: str) -> list[str]:
    """Return the keys of the field `name`, if it is a section."""
    annotation: Any = cls.model_fields[name].annotation
    kinds = get_args(annotation | None)
    return [key for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel) for key in keys_of(kind)]


def _owner(cls: type[BaseModel], loc: Iterable[Any]) -> type[BaseModel]:
    for part in loc:
        field = cls.model_fields.get(str(part))
        if field is not None:
            cls = next((kind for kind in kinds_of(field.annotation) if issubclass(kind, BaseModel)), cls)
    return cls


def kinds_of(annotation: Any) -> Iterator[type]:
    """Yield the classes in a type, including those inside unions and lists."""
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for inner in get_args(annotation):
        yield from kinds_of(inner)


def names_of(names: Iterable[str]) -> str:
    names = sorted(str(n) for n in names)
    more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return ", ".join(names[:MOST_NAMES] + more)
