"""Classes that a file can name, from rayfl and from installed packages, with their options."""

import math
import pkgutil
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rayfl.config import Config, ConfigError, Kind, Named
from rayfl.config.plain import write_yaml
from rayfl.data import SCORES_KIND
from rayfl.experiment import NAMED
from rayfl.listeners import LISTENERS_KIND
from rayfl.system import AVAILABILITY_KIND, DEVICES_KIND, SAMPLERS_KIND
from rayfl.training.transforms import TRANSFORMS_KIND

KINDS: Mapping[str, Kind] = {
    **NAMED,
    "evaluation.scores": SCORES_KIND,
    "updates.transforms": TRANSFORMS_KIND,
    "listeners": LISTENERS_KIND,
    "system.devices": DEVICES_KIND,
    "system.availability": AVAILABILITY_KIND,
    "system.sampler": SAMPLERS_KIND,
}
"""Place in a file -> kind of class named there."""

FILLED = {"model": ("input", "variables", "series", "classes")}
"""Place -> options that rayfl fills in from other sections."""

Entry = tuple[str, str, str]
"""Name, first sentence of its documentation, options with their defaults (required ones without)."""


def catalogue(names: Sequence[str] = (), like: str = "") -> dict[str, list[Entry]]:
    """Return place -> entries, installed packages included. `names`: further classes, "package.module:Class". `like`:
    only classes that are `about` this text."""
    found = {place: dict(kind.known()) for place, kind in KINDS.items()}
    for name in names:
        place, cls = _found(name)
        found[place][name] = cls
    return {
        place: [_entry(place, name, cls) for name, cls in some.items() if about(like, name, sheet(cls))]
        for place, some in found.items()
    }


def about(like: str, *texts: str) -> bool:
    """Return whether each word of `like` is the start of a word of the texts, in upper or lower case.

    >>> about("Class proto", "fedproto", "Clients share the prototypes of every class.")
    True
    >>> about("proto", "fedproto")
    False
    """
    words = re.findall(r"[^\W_]+", " ".join(texts).lower())
    return all(any(word.startswith(asked) for word in words) for asked in re.findall(r"[^\W_]+", like.lower()))


def _found(name: str) -> tuple[str, type[Named]]:
    """Return the place where a class can be named, and the class. Raise ConfigError if there is none."""
    try:
        cls = pkgutil.resolve_name(name)
    except Exception:
        cls = None
    for place, kind in KINDS.items():
        # for a class that cannot be imported, `find` raises the reason
        if cls is None or isinstance(cls, type) and issubclass(cls, kind.base):
            return place, kind.find(name, name)
    bases = ", ".join(f"rayfl.{kind.base.__name__}" for kind in KINDS.values())
    raise ConfigError(f"{name}: the class is of no kind that a file can name. Allowed: a subclass of {bases}")


def _entry(place: str, name: str, cls: type[Named]) -> Entry:
    # what all classes of a kind have says nothing of this one
    shared = {key: field.default for key, field in KINDS[place].base.model_fields.items()}
    hidden = {key for key, field in cls.model_fields.items() if key in shared and field.default == shared[key]}
    hidden |= {"name", *FILLED.get(place, ())}
    fields = {key: field for key, field in cls.model_fields.items() if key not in hidden and not field.exclude}
    options = [
        key if field.is_required() else f"{key}: {as_yaml(field.get_default(call_default_factory=True))}"
        for key, field in fields.items()
    ]
    return name, first_sentence(cls), ", ".join(options)


def as_yaml(value: Any) -> str:
    """Return a value as one line of YAML."""
    if isinstance(value, Config):
        value = value.model_dump(mode="json")
    text = write_yaml(_plain(value), default_flow_style=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def sheet(cls: type) -> str:
    """Return the data sheet of a class: its docstring, or that of its module."""
    return cls.__doc__ or sys.modules[cls.__module__].__doc__ or ""


def first_sentence(cls: type) -> str:
    """Return the first sentence of the data sheet of a class."""
    return re.split(r"\. (?=[A-Z`])", " ".join(sheet(cls).split("\n\n")[0].split()))[0].rstrip(".")
