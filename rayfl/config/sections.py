"""Typed, frozen configuration sections, and errors with the place, the problem and the allowed values.

A section of a YAML file is a `Config`. A section whose `name` chooses its class is a `Named`; a `Kind` finds that class
in rayfl or in a package of the user. The sections themselves are defined beside the code that they configure.
"""

import contextlib
import difflib
import importlib.metadata
import inspect
import itertools
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, field_validator, model_validator
from pydantic._internal._model_construction import ModelMetaclass
from pydantic_core import PydanticCustomError, core_schema

from rayfl.config.plain import DEEPEST, LARGEST_TEXT, joined, read_yaml, shown

MOST_PLACES = 10
"""Maximum number of places in one error."""
MOST_NAMES = 100
"""Maximum number of names in one list of allowed names."""

FEW_NAMES = 25
"""Maximum number of names of a `Kind` in an error."""

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

RESERVED = (".", "..", "artifacts", "mlflow.db")
"""Names in an output folder that are not allowed for runs."""


class ConfigError(ValueError):
    """Invalid input; the command line exits with 2. In a validator, the place is relative to the parsed section."""


def _numbers(schema: Any) -> Any:
    """Return pydantic's schema without booleans as numbers and with integers of 64 bits."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_numbers, schema))
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if kind == "int":
        low = {} if "gt" in schema else {"ge": -(2**63)}
        high = {} if "lt" in schema else {"le": 2**63 - 1}
        return core_schema.no_info_before_validator_function(partial(_no_bool, "a whole number"), low | high | schema)  # pyright: ignore
    if kind == "float":
        return core_schema.no_info_before_validator_function(partial(_no_bool, "a number"), schema)  # pyright: ignore
    data = ("default", "expected", "metadata") if isinstance(kind, str) else ()
    return {key: part if key in data else _numbers(part) for key, part in schema.items()}


def _no_bool(allowed: str, value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("bool_for_number", "{allowed}", {"allowed": allowed})
    return value


class _Explained(ModelMetaclass):
    """Makes the errors of `SomeConfig(lr="x")` in Python those of a file, without pydantic's form and addresses."""

    __hash__ = type.__hash__
    # type checkers know the fields from pydantic
    if not TYPE_CHECKING:

        def __call__(cls, *given: Any, **fields: Any) -> Any:
            named = dict(zip(cls.positional, given, strict=False))
            try:
                return super().__call__(*given[len(named) :], **named | fields)
            except ValidationError as error:
                raise ConfigError(explain(cls, fields, cls.__name__, error)) from None


class Config(BaseModel, metaclass=_Explained):
    """A frozen configuration section. Unknown keys are errors, booleans are not numbers, integers have 64 bits."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    positional: ClassVar[tuple[str, ...]] = ()
    """Fields that arguments without a name set in Python."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Complete a section of which only a part is given by its default in this class."""
        defaults = {name: field.default for name, field in cls.model_fields.items()}
        return _completed(defaults, given) if isinstance(given, Mapping) else given

    def completed(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `given` and, where it gives nothing, the values set in this default."""
        own = {name: getattr(self, name) for name in self.model_fields_set}
        return {**own, **_completed(own, given)}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return _numbers(handler(source))


def _completed(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    parts = {name: (defaults.get(name), part) for name, part in given.items() if isinstance(part, Mapping)}
    return {**given, **{name: own.completed(part) for name, (own, part) in parts.items() if isinstance(own, Config)}}


class Named(Config):
    """A section whose `name` chooses its class. Classes of rayfl define `name: Literal["fedavg"] = "fedavg"`; a class
    of another package omits the field and has the name "package.module:Class"."""

    name: str = ""

    def completed(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `given`, which may name another class."""
        return given

    @classmethod
    def own_name(cls) -> str:
        """Return the name of all instances of this class."""
        return cls.model_fields["name"].default or f"{cls.__module__}:{cls.__qualname__}"

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        return {"name": cls.own_name(), **given} if isinstance(given, Mapping) else given

    @field_validator("name")
    @classmethod
    def _own(cls, name: str) -> str:
        if name != cls.own_name():
            raise ValueError(cls.own_name())
        return name


C = TypeVar("C", bound=BaseModel)
N = TypeVar("N", bound=Named)


@dataclass(frozen=True)
class Kind(Generic[N]):
    """The classes that the `name` of a section can choose: Kind("method", Method, METHODS, "rayfl.methods")."""

    what: str
    """Term for these classes in errors."""
    base: type[N]
    """Base class of all of them."""
    ours: Mapping[str, type[N]]
    """Name -> class of rayfl. These take precedence over entry points of the same name."""
    group: str
    """Entry point group for classes of installed packages."""

    def known(self) -> dict[str, type[N]]:
        """Return name -> class for the classes of rayfl and the entry points that can be loaded."""
        found = {}
        for point in self._points():
            with contextlib.suppress(ConfigError):
                found[point.name] = self._checked(point.load, point.name, "")
        return found | dict(self.ours)

    def find(self, name: Any, where: str) -> type[N]:
        """Return the class of this name in rayfl or the entry points, or any class as "package.module:Class". A
        ConfigError gives the reason: unknown name, failed import, not a subclass of `base`, abstract methods."""
        if isinstance(name, str):
            if name in self.ours:
                return self.ours[name]
            for point in self._points():
                if point.name == name:
                    return self._checked(point.load, name, where)
            if ":" in name:
                return self._checked(lambda: pkgutil.resolve_name(name), name, where)
        hint = typo_of(name, self.known())
        raise ConfigError(f"{where}: no {self.what} is called {shown(name)}. {hint}Allowed: {self._names()}")

    def read(self, value: Any, where: str) -> N:
        """Return an instance of `base` from an instance, a name, or a mapping {"name": ..., options}."""
        if isinstance(value, self.base):
            return value
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping) or "name" not in value:
            allowed = f"a mapping with a `name`: {self._names()}"
            raise ConfigError(f"{where}: {shown(value)} is not valid. Allowed: {allowed}")
        cls = self.find(value["name"], _join(where, ["name"]))
        return parse(cls, dict(value) | {"name": cls.own_name()}, where)

    def _names(self) -> str:
        """Return the known names; of many, where to see them."""
        if len(known := self.known()) <= FEW_NAMES:
            return _names(known)
        return f"one of {len(known)} names. Hint: `rayfl list --like TEXT` shows them"

    def _points(self) -> Iterable[importlib.metadata.EntryPoint]:
        return importlib.metadata.entry_points(group=self.group)

    def _checked(self, load: Callable[[], Any], name: str, where: str) -> type[N]:
        """Return the class that `load` imports; a ConfigError if `name` cannot choose it."""
        start = f"{where}: {shown(name)}"
        try:
            cls = load()
        except (Exception, SystemExit) as error:
            reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            allowed = "package.module:Class of a package that is installed or in a folder of PYTHONPATH"
            if ":" in name and not isinstance(error, ImportError | AttributeError | ValueError):
                module = name.partition(":")[0]
                allowed = f"a module without errors. Hint: python -c 'import {module}' shows where it is"
            raise ConfigError(f"{start} cannot be imported ({reason}). Allowed: {allowed}") from None
        base = f"{self.base.__module__}:{self.base.__qualname__}"
        if not (isinstance(cls, type) and issubclass(cls, self.base)):
            raise ConfigError(f"{start} is not a subclass of {base}. Allowed: its subclasses (rayfl/PLUGINS.md)")
        if inspect.isabstract(cls):
            lacking = _names(cls.__abstractmethods__)
            raise ConfigError(f"{start} does not define {lacking}. Allowed: classes without abstract methods")
        own, dotted = cls.own_name(), f"{cls.__module__}:{cls.__qualname__}"
        offered = any((point.name, point.value) == (own, dotted) for point in self._points())
        if own not in (name, dotted) and self.ours.get(own) is not cls and not offered:
            raise ConfigError(
                f"{start} has the field `name` with the default {shown(own)}. Allowed: a class without this field, or "
                f"an entry point of {self.group} with this name"
            )
        return cls


def parse(cls: type[C], given: Any, where: str) -> C:
    """Return the plain values `given` as a `cls`. `where`: file and path for errors, "exp.yaml: model"."""
    keys = _keys(cls)
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: {shown(given)} is not valid. Allowed: a mapping with the keys {_names(keys)}")
    if internal := [key for key in given if key in cls.model_fields and key not in keys]:
        raise ConfigError(unknown(_join(where, internal[:1]), internal[0], cls))
    try:
        return cls.model_validate(dict(given))
    except ValidationError as error:
        raise ConfigError(explain(cls, given, where, error)) from None


def choose(registry: Mapping[str, Any], name: Any, where: str, what: str) -> Any:
    """Return `registry[name]`. A ConfigError lists the known names and the nearest one."""
    if not isinstance(name, str) or name not in registry:
        raise ConfigError(f"{where}: no {what} is called {shown(name)}. {nearest(name, registry)}")
    return registry[name]


def nearest(given: Any, known: Iterable[str]) -> str:
    """Return "Did you mean 'x'? Allowed: ..."."""
    known = list(known)
    return f"{typo_of(given, known)}Allowed: {_names(known)}"


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


def component(text: Any, where: str) -> str:
    """Return `text` if it is a valid name of a file or folder on every system."""
    good = isinstance(text, str) and text not in ("", *RESERVED) and text.isprintable() and not set(text) & {"/", "\\"}
    if not good or len(text.encode()) > 150:
        raise ConfigError(
            f"{where}: {shown(text)} is not valid. Allowed: the name of a folder, 1 to 150 bytes of printable text "
            f"without / and \\, except {_names(RESERVED)}"
        )
    return text


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
    place = _join(where, path)
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
    keys = _keys(cls)
    inside = [f"{name}.{key}" for name in keys if key in _keys_inside(cls, name)]
    hint = f"Did you mean {' or '.join(map(repr, inside))}? Allowed: {_names(keys)}" if inside else nearest(key, keys)
    return f"{place}: unknown key {shown(key)}. {hint}"


def _join(where: str, path: Iterable[Any]) -> str:
    """Return "exp.yaml: training.lr": a colon follows the file only."""
    path = joined(list(path))
    if not path:
        return where
    return f"{where}.{path}" if ": " in where else f"{where}: {path}"


def _keys(cls: type[BaseModel]) -> list[str]:
    """Return the fields that users can set; excluded ones are set by rayfl."""
    return [name for name, field in cls.model_fields.items() if not field.exclude]


def _keys_inside(cls: type[BaseModel], name: str) -> list[str]:
    """Return the keys of the field `name`, if it is a section."""
    annotation: Any = cls.model_fields[name].annotation
    kinds = get_args(annotation | None)
    return [key for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel) for key in _keys(kind)]


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


def _names(names: Iterable[str]) -> str:
    names = sorted(str(n) for n in names)
    more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return ", ".join(names[:MOST_NAMES] + more)
