"""Typed, frozen configuration sections.

A section of a YAML file is a `Config`. A section whose `name` chooses its class is a `Named`; a `Kind` finds that class
in rayfl or in a package of the user. The sections themselves are defined beside the code that they configure.
"""

import contextlib
import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, field_validator, model_validator
from pydantic._internal._model_construction import ModelMetaclass
from pydantic_core import PydanticCustomError, core_schema

from rayfl.config.errors import ConfigError, explain, join, keys_of, names_of, typo_of, unknown
from rayfl.config.plain import shown

FEW_NAMES = 25
"""Maximum number of names of a `Kind` in an error."""


RESERVED = (".", "..", "artifacts", "mlflow.db")
"""Names in an output folder that are not allowed for runs."""


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
        cls = self.find(value["name"], join(where, ["name"]))
        return parse(cls, dict(value) | {"name": cls.own_name()}, where)

    def _names(self) -> str:
        """Return the known names; of many, where to see them."""
        if len(known := self.known()) <= FEW_NAMES:
            return names_of(known)
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
            lacking = names_of(cls.__abstractmethods__)
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
    keys = keys_of(cls)
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: {shown(given)} is not valid. Allowed: a mapping with the keys {names_of(keys)}")
    if internal := [key for key in given if key in cls.model_fields and key not in keys]:
        raise ConfigError(unknown(join(where, internal[:1]), internal[0], cls))
    try:
        return cls.model_validate(dict(given))
    except ValidationError as error:
        raise ConfigError(explain(cls, given, where, error)) from None


def component(text: Any, where: str) -> str:
    """Return `text` if it is a valid name of a file or folder on every system."""
    good = isinstance(text, str) and text not in ("", *RESERVED) and text.isprintable() and not set(text) & {"/", "\\"}
    if not good or len(text.encode()) > 150:
        raise ConfigError(
            f"{where}: {shown(text)} is not valid. Allowed: the name of a folder, 1 to 150 bytes of printable text "
            f"without / and \\, except {names_of(RESERVED)}"
        )
    return text
