"""What there is to choose from: classes by name, ours and those of a user's packages, with their options."""

import pkgutil
import re
import sys
from collections.abc import Mapping, Sequence

from rayfl.config import ConfigError, Kind, Named
from rayfl.data import SCORES_KIND
from rayfl.experiment import NAMED
from rayfl.listeners import LISTENERS_KIND
from rayfl.training.transforms import TRANSFORMS_KIND

KINDS: Mapping[str, Kind] = {
    **NAMED,
    "evaluation.scores": SCORES_KIND,
    "updates.transforms": TRANSFORMS_KIND,
    "listeners": LISTENERS_KIND,
}
"""Place in a file -> what may be named there."""

FILLED = {"model": ("input", "classes")}
"""Place -> options that nobody has to give."""

Entry = tuple[str, str, str]
"""Name, first sentence of its documentation, options with their defaults; those without one have to be given."""


def catalogue(names: Sequence[str] = ()) -> dict[str, list[Entry]]:
    """Place -> entries, those of installed packages included; `names`: more, as "package.module:Class"."""
    found = {place: dict(kind.known()) for place, kind in KINDS.items()}
    for name in names:
        place, cls = _found(name)
        found[place][name] = cls
    return {place: [_entry(place, name, cls) for name, cls in some.items()] for place, some in found.items()}


def _found(name: str) -> tuple[str, type[Named]]:
    """The place where a class may be named. A ConfigError if it cannot be imported, or is of no kind."""
    try:
        cls = pkgutil.resolve_name(name)
    except Exception:
        cls = None
    for place, kind in KINDS.items():
        # who looks for what cannot be imported says why
        if cls is None or isinstance(cls, type) and issubclass(cls, kind.base):
            return place, kind.find(name, name)
    bases = ", ".join(f"rayfl.{kind.base.__name__}" for kind in KINDS.values())
    raise ConfigError(f"{name}: given what cannot be chosen anywhere; allowed: a subclass of {bases}")


def _entry(place: str, name: str, cls: type[Named]) -> Entry:
    hidden = ("name", *FILLED.get(place, ()))
    fields = {key: field for key, field in cls.model_fields.items() if key not in hidden and not field.exclude}
    options = [key if field.is_required() else f"{key}={field.get_default()!r}" for key, field in fields.items()]
    return name, first_sentence(cls), ", ".join(options)


def first_sentence(cls: type) -> str:
    """Of its docstring, or of the file that it stands for."""
    text = cls.__doc__ or sys.modules[cls.__module__].__doc__ or ""
    return re.split(r"\. (?=[A-Z`])", " ".join(text.split("\n\n")[0].split()))[0].rstrip(".")
