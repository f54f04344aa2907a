"""JSON schemas of a run's and a sweep's file. Editors use them to complete names and to mark invalid names, types and
ranges."""

from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from rayfl.config import Config, Named, kinds_of
from rayfl.experiment import NAMED, Experiment
from rayfl.reference.catalogue import KINDS, first_sentence
from rayfl.reference.settings import SECTIONS, SWEEP, Setting, kinds_below, settings

DIALECT = "https://json-schema.org/draft/2020-12/schema"
OWN = {"type": "string", "pattern": r"^[\w.]+:[\w.]+$", "description": "Your own class, package.module:Class."}


class _Quiet(GenerateJsonSchema):
    # defaults that JSON cannot express are in the descriptions
    ignored_warning_kinds = {"non-serializable-default", "skipped-choice"}


def schema(kind: Literal["run", "sweep"]) -> dict[str, Any]:
    """Return the schema of a file, classes of installed packages included."""
    whole = {"$schema": DIALECT, "title": f"rayfl: a {kind}", "$defs": _definitions()}
    if kind == "run":
        return whole | _of(Experiment, _sections(), ["model"])
    experiment = _sections()
    del experiment["seed"]
    row = {name: _partial(name, part) for name, part in experiment.items()} | {"title": {"type": "string"}}
    properties = {
        "question": {"type": "string"},
        "experiment": _of(Experiment, {name: _partial(name, part) for name, part in experiment.items()}),
        "rows": {"type": ["object", "null"], "additionalProperties": _object(row) | {"type": ["object", "null"]}},
        **{name: {"$ref": f"#/$defs/{cls.__name__}"} for name, cls in SECTIONS.items()},
    }
    described = {name: part | {"description": SWEEP[name]} for name, part in properties.items()}
    return whole | _object(described) | {"required": ["experiment"]}


def _of(cls: type[Config], properties: Mapping[str, Any], required: Iterable[str] = ()) -> dict[str, Any]:
    return _object(properties) | {"description": f"{first_sentence(cls)}.", "required": list(required)}


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def _sections() -> dict[str, Any]:
    """Return the schema of each section of an experiment."""
    generated = _generated(Experiment)["properties"]
    found = {}
    for name, setting in settings(Experiment).items():
        below = kinds_below(name, setting.field)
        if name in NAMED:
            found[name] = _choice(name)
        elif name in KINDS:
            found[name] = _choices(name, setting)
        elif len(below) == 1:
            [cls] = below.values()
            found[name] = {"$ref": f"#/$defs/{cls.__name__}"}
            if NoneType in get_args(setting.field.annotation):
                found[name] = {"anyOf": [found[name], {"type": "null"}]}
        else:
            found[name] = generated[name]
        if setting.text:
            found[name] = found[name] | {"description": setting.text}
    return found


def _choice(place: str) -> dict[str, Any]:
    """Return the schema of a choice by name: the name alone, or a section with `name` and options."""
    known = KINDS[place].known()
    own = {"type": "object", "properties": {"name": OWN}, "required": ["name"]}
    options = [{"$ref": f"#/$defs/{_id(place, name)}"} for name in known]
    return {"anyOf": [{"enum": sorted(known)}, OWN, *options, own]}


def _choices(place: str, setting: Setting) -> dict[str, Any]:
    """Return the schema of a setting that is a choice by name, or a list of such choices."""
    is_list = get_origin(setting.field.annotation) is tuple
    return {"type": "array", "items": _choice(place)} if is_list else _choice(place)


def _partial(name: str, part: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a section in a sweep or row, which can set options of a class named elsewhere."""
    if name not in NAMED:
        return part
    options = {option for cls in NAMED[name].known().values() for option in settings(cls)}
    changes = _object(dict.fromkeys(sorted(options), {}))
    return part | {"anyOf": [*part["anyOf"], changes]}


def _definitions() -> dict[str, Any]:
    """Return id -> schema of every section and every class that can be named."""
    found: dict[str, Any] = {}
    for section, setting in settings(Experiment).items():
        for cls in kinds_below("", setting.field).values():
            if not issubclass(cls, Named):
                found |= _with_parts(cls, section)
    for cls in SECTIONS.values():
        found |= _with_parts(cls)
    for place, kind in KINDS.items():
        for name, cls in kind.known().items():
            parts = _with_parts(cls)
            own = parts.pop(cls.__name__)
            own["properties"] = {"name": {"const": name}} | own["properties"]
            own["required"] = ["name", *own["required"]]
            found |= parts | {_id(place, name): own}
    return found


def _with_parts(cls: type[Config], at: str = "") -> dict[str, Any]:
    """Return class name -> schema of a section and the sections inside it. `at`: the place of the section."""
    found = {cls.__name__: _section(cls, at)}
    for setting in settings(cls).values():
        for below in kinds_below("", setting.field).values():
            if not _chosen(below):
                found |= _with_parts(below)
    return found


def _chosen(kind: Any) -> str:
    """Return the section whose classes have this base, such as the model under adapters; "" if none."""
    return next((section for section, known in NAMED.items() if known.base is kind), "")


def _section(cls: type[Config], at: str) -> dict[str, Any]:
    generated = _generated(cls)["properties"]
    properties = {}
    for name, setting in settings(cls).items():
        place = f"{at}.{name}"
        kinds = list(kinds_of(setting.field.annotation))
        chosen = next(filter(None, map(_chosen, kinds)), "")
        if chosen:
            part = _choice(chosen)
            if NoneType in kinds:
                part["anyOf"].append({"type": "null"})
        else:
            part = _choices(place, setting) if place in KINDS else generated[name]
        words = f"{setting.text} ({setting.line})" if setting.text else setting.line
        properties[name] = {key: value for key, value in part.items() if key != "title"} | {"description": words}
    required = [name for name, setting in settings(cls).items() if not setting.default]
    return _of(cls, properties, required)


def _generated(cls: type[Config]) -> dict[str, Any]:
    """Return pydantic's schema of a class."""
    references, given = models_json_schema(
        [(cls, "validation")], ref_template="#/$defs/{model}", schema_generator=_Quiet
    )
    return given["$defs"][references[cls, "validation"]["$ref"].rpartition("/")[2]]


def _id(place: str, name: str) -> str:
    return f"{place}.{name}"
